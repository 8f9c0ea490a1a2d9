"""Tensors whose bytes move between the device and pinned host memory, under the same tensor objects.

While it is parked a tensor is an ordinary host tensor: `tensor.data` points to pinned memory, as `Module.cuda()` points
a parameter. Reading, saving, zeroing it and assigning to its `.data` all work and move nothing; mixing it with tensors
of the device is torch's own error. On a CPU, where host and device are one, only the note of residency tells.

Tensors move in packs of about a GiB: one mapping, one copy and one event a pack, since those of each tensor would cost
more than its bytes. A pack that has come back once lies in a region, so that its addresses are the same from then on,
which captured graphs, fused steps and CUDA IPC handles rely on.

Never for a leaf that takes part in autograd: with data on another device torch makes it a new AccumulateGrad node, and
hooks on the old node (DDP's, FSDP's, Megatron's) are lost. Masters, moments and gradients are safe.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from colo.errors import PhaseError
from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import ALIGNMENT_BYTES, Region, allocate_region
from colo.memory.storage import hidden_bases, num_others, num_references, storage_bytes, storage_key
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import Done, Move, Residency
from colo.units import GIB, batches

_base_of, _cdata_of = attrgetter("_base"), attrgetter("_cdata")
_use_count_of: Any = torch.Tensor._use_count  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Kept:
    """Memory that stays on the device, and why."""

    name: str
    size_bytes: int
    reason: str


class Parking(RegionSegment):
    """A segment of the tensors that `look` was last given.

    Ownership: owns the packs' regions and extents of the arena. A tensor over a pack's memory that `look` was not told
    of, such as a view that a loop holds, keeps that pack on the device, outside of the segment and named in `kept`.
    """

    def __init__(
        self,
        name: str,
        mover: Mover,
        *,
        name_of: Callable[[torch.Tensor], str] = lambda _: "a tensor",
        pack_bytes: int = GIB,
        keeps_addresses: bool = True,
    ) -> None:
        """Without `keeps_addresses` tensors come back into memory of torch's allocator, each by itself."""
        super().__init__(name, regions=(), away=Residency.OFFLOADED, mover=mover)
        self.expected_bytes = 0  # size of the segment while it has no tensors
        self.kept: list[Kept] = []
        """Tensors that `look` was given and that must stay, because something else refers to their memory."""

        self._name_of = name_of
        self._pack_bytes = pack_bytes
        self._keeps_addresses = keeps_addresses
        self._loose: list[_Block] = []  # not in a pack yet
        self._loose_bytes = 0
        self._aside: list[Pack] = []
        self._owned: frozenset[int] = frozenset()  # `id`s of tensors that are gradients of parameters
        self._seen: tuple[object, ...] = ()  # see `_facts`

    @property
    def size_bytes(self) -> int:
        """Device bytes when resident; without any tensor, what is expected."""
        return (super().size_bytes + self._loose_bytes) or self.expected_bytes

    @property
    def device_bytes(self) -> int:
        """Device bytes held at this moment."""
        return super().device_bytes + self._loose_bytes

    def look(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set the contents of the segment to `tensors`: plain, strided, on the device or parked here before.

        New tensors join at the next departure. Memory of tensors that are gone is freed once nobody refers to it.
        """
        if self._residency is Residency.OFFLOADED and self._move is not None and not self._move.poll():
            return  # on their way to the host: what is new is found when they come back
        self.settle()
        by_id = {id(tensor): tensor for tensor in tensors}
        # nearly always nothing has changed: finding that out takes a twentieth of what follows
        if not self._seen or self._seen != self._facts(by_id):
            with uninterrupted():  # packs and the records of them change together
                self._take_in(by_id)

    def _take_in(self, by_id: dict[int, torch.Tensor]) -> None:
        for pack in (*self._packs(), *self._aside):
            pack.forget_others(by_id)
            if not pack.blocks:
                self._drop(pack)
        known = self._known()
        self._join([tensor for key, tensor in by_id.items() if key not in known])
        # packs whose last view has been dropped take part again
        for pack in [pack for pack in self._aside if not pack.num_others(self._owned)]:
            if self.residency is Residency.OFFLOADED:
                self._drop(pack)  # its tensors are found on the device, among those that are new
            else:
                self._aside.remove(pack)
                self.add([pack])
        # a view that somebody has made since would read unmapped pages once the pack has left
        for pack in self._packs():
            if pack.resident and pack.num_others(self._owned):
                self._set_aside(pack)
        # once more: packs have been joined, dropped and set aside meanwhile
        known = self._known()
        groups: dict[int, list[torch.Tensor]] = {}  # by storage, whose memory is freed as a whole
        for key, tensor in by_id.items():
            # elsewhere, or without bytes, there is nothing to free
            if key not in known and tensor.device == self._mover.device and tensor.untyped_storage().nbytes():
                groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self.kept = [self._kept_of(pack.blocks, pack.size_bytes, pack.why_it_stays) for pack in self._aside]
        self._loose = []
        for group in groups.values():
            block = _Block(group)
            # a base that nobody but these views holds would keep the memory: it moves with them
            if not (is_alone := _is_alone(group, self._owned)) and (bases := hidden_bases(group)):
                block = _Block([*group, *bases])
            if is_alone or (reason := why_memory_stays(block.tensors, self._owned)) is None:
                self._loose.append(block)
            else:
                self.kept.append(self._kept_of([block], block.size_bytes, reason))
        self._loose_bytes = sum(block.padded_bytes for block in self._loose)
        if self._residency is not Residency.OFFLOADED or not self._regions:
            self._residency = Residency.RESIDENT if self._loose or self._regions else Residency.DISCARDED
        del groups, known  # which refer to storages
        self._seen = self._facts(by_id)

    def _facts(self, by_id: Mapping[int, torch.Tensor]) -> tuple[object, ...]:
        """All that `look` decides by, asked by functions of C; empty for views, whose bases it has to look at."""
        tensors = by_id.values()
        if any(base is not None for base in map(_base_of, tensors)):
            return ()
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        return (
            (self._residency, len(self._regions), len(self._aside), len(self._loose), self._owned),
            list(by_id),  # identities hold as long as blocks refer to the tensors
            list(map(torch.Tensor.data_ptr, tensors)),
            list(map(_use_count_of, tensors)),
            list(map(torch._C._storage_Use_Count, map(_cdata_of, storages))),
            list(map(torch.UntypedStorage.nbytes, storages)),
            list(map(torch.UntypedStorage.resizable, storages)),
        )

    def begin(self, target: Residency) -> Move:
        """Start a move; see `Segment.begin`. Tensors point to where they go once all bytes of their pack are there."""
        leaves = target is Residency.OFFLOADED and self._residency is Residency.RESIDENT
        if leaves:
            self.settle()  # nothing may be left of what was on its way: somebody has assigned to its `data`
        if self._residency is Residency.DISCARDED:
            return Done()  # nothing is there
        if leaves:
            with uninterrupted():
                self._pack()
                move = super().begin(target)
            move.poll()  # on a CPU the copies have been made
            return move
        return super().begin(target)

    def hand_over(self) -> None:
        """Give every tensor that is on the device memory of torch's allocator, and let go of all. Idempotent.

        Parked tensors keep their host memory, which is theirs then. Without room on the device, or where somebody has
        views of them, tensors keep the region's.
        """
        self.settle()
        for pack in (*self._packs(), *self._aside):
            if pack.resident and pack.region is not None and not pack.num_others(self._owned):
                pack.move_out()
            self._drop(pack)
        # what is loose lies in torch's memory already
        self._loose, self._loose_bytes, self._residency = [], 0, Residency.DISCARDED

    # ---- packs ------------------------------------------------------------------------------------------------------

    def _packs(self) -> list[Pack]:
        return [region for region in self._regions if isinstance(region, Pack)]

    def _known(self) -> set[int]:
        """List the `id`s of all tensors in packs."""
        packs = (*self._packs(), *self._aside)
        return {id(tensor) for pack in packs for block in pack.blocks for tensor in block.tensors}

    def _join(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add tensors over the memory of packs, such as views made since, to those packs.

        Left out, they would keep a pack on the device for good, or stay behind at the host when it comes back.
        """
        packs = (*self._packs(), *self._aside)
        if not packs or not tensors:
            return
        blocks: dict[int, list[_Block]] = {}
        for pack in packs:
            for block in pack.blocks:
                blocks.setdefault(storage_key(block.tensors[0]), []).append(block)
        grown = {
            id(block): block
            for tensor in tensors
            for block in blocks.get(storage_key(tensor), ())
            if block.join(tensor)
        }
        for block in grown.values():
            for base in hidden_bases(block.tensors):
                block.join(base)

    def _pack(self) -> None:
        """Put what is loose into packs. Raises: `BudgetError` when the host has no room; nothing has changed then."""
        for block in self._loose:  # the loop may have assigned to some tensor's `data` since `look`
            block.keep()
        self._loose = [block for block in self._loose if block.tensors]
        made = [
            Pack(self.name, blocks, self._mover.device, keeps_address=self._keeps_addresses)
            for blocks in batches(self._loose, lambda block: block.padded_bytes, self._pack_bytes)
        ]
        self._mover.arena.reserve(sum(pack.size_bytes for pack in made))  # before anything is recorded: it may refuse
        self._loose, self._loose_bytes = [], 0
        self._regions.extend(made)

    def _depart(self) -> Move:
        for pack in self._packs():
            # a write while the copy runs raises torch's count, and `point_to_host` then copies once more
            pack.note_versions()
        return super()._depart()

    def _arrive(self) -> Move:
        for pack in self._packs():
            if pack.is_at_host:  # of another, which its departure has not reached, that one's count is still good
                pack.note_versions()
        return super()._arrive()

    def _left(self, region: Region) -> None:
        """Point the tensors of a pack to the host; where something else refers to their memory, back to where it is."""
        assert isinstance(region, Pack)
        if not region.is_at_host:
            extent = self._extents[region]
            region.point_to_host(lambda start, size: self._mover.arena.tensor(extent, start, size))
            if region.is_referred_to:  # by a view made since `look`: its memory must not be unmapped
                region.note_versions()
                region.point_to_device()
                self._set_aside(region)
                return
        was_torchs = region.region is None and region.device.type == "cuda"
        region.release()
        if was_torchs and not any(pack.resident and pack.region is None for pack in self._packs()):
            # once, behind the last of them, since cudaFree waits for the device
            torch.cuda.empty_cache()  # torch's allocator would keep what they have left

    def _arrived(self) -> None:
        for pack in self._packs():
            if pack.is_at_host and pack.resident and (held := pack.point_to_device()):
                # a view of the host memory outlives the stay: these bytes are lent again only after it
                self._mover.arena.release_after(self._extents.pop(pack), held)
        if not self._keeps_addresses:
            for pack in self._packs():
                # loose again, so that each tensor, such as a gradient, can be freed by itself
                self._loose += pack.blocks
                self._take_out([pack])
            self._loose_bytes = sum(block.padded_bytes for block in self._loose)
            self._residency = Residency.RESIDENT if self._loose else Residency.DISCARDED

    def _discard(self) -> Move:
        raise PhaseError(f"segment {self.name} has tensors that somebody uses: their bytes cannot be discarded")

    def _set_aside(self, pack: Pack) -> None:
        pack.why_it_stays = _others(max(1, pack.num_others(self._owned)))
        self._take_out([pack])
        if pack.region is not None:  # else its tensors are found anew, each by itself
            self._aside.append(pack)
        self.kept.append(self._kept_of(pack.blocks, pack.size_bytes, pack.why_it_stays))

    def _drop(self, pack: Pack) -> None:
        """Let go of a pack: its memory on either side goes with the last tensor over it."""
        with uninterrupted():
            if pack in self._aside:
                self._aside.remove(pack)
            else:
                if held := pack.held_host():
                    self._mover.arena.release_after(self._extents.pop(pack), held)
                self._take_out([pack])
            pack.close()

    def _kept_of(self, blocks: Sequence[_Block], size_bytes: int, reason: str) -> Kept:
        tensors = [tensor for block in blocks for tensor in block.tensors]
        name = self._name_of(tensors[0])
        return Kept(name if len(tensors) == 1 else f"{name} and {len(tensors) - 1} more", size_bytes, reason)


class _Block:
    """All known tensors over one storage: `size_bytes` bytes at `start` in their pack."""

    __slots__ = ("address", "device", "host", "offsets", "padded_bytes", "size_bytes", "start", "tensors", "versions")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        self.tensors = tensors
        self.offsets = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
        self.size_bytes = storage.nbytes()
        self.padded_bytes = -(-self.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.address = storage.data_ptr()  # address of the bytes that the tensors point to
        self.start = 0
        self.host: torch.Tensor | None = None  # uint8, while the tensors point there
        self.device: torch.Tensor | None = None  # uint8, memory of torch's that they have left or go to
        self.versions: list[object] = []

    def note_versions(self) -> None:
        self.versions = _versions(self.tensors)

    @property
    def was_written(self) -> bool:
        return _versions(self.tensors) != self.versions

    def point_to(self, memory: torch.Tensor) -> None:
        """Point the tensors to `memory` (uint8, the block's bytes)."""
        storage, start = memory.untyped_storage(), memory.storage_offset()
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            made = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            at = (start + offset) // tensor.element_size()
            tensor.data = made.set_(storage, at, tensor.size(), tensor.stride())
        self.address = memory.data_ptr()

    def join(self, tensor: torch.Tensor) -> bool:
        """Take in one more tensor over the same storage; false when it lies outside of the block."""
        offset = tensor.data_ptr() - self.address
        if not 0 <= offset < self.size_bytes:
            return False
        self.tensors.append(tensor)
        self.offsets.append(offset)
        if self.versions:
            self.versions += _versions([tensor])
        return True

    def keep(self, is_kept: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        """Forget tensors whose `data` somebody has assigned, and those that are not `is_kept`."""
        stays = [
            tensor.data_ptr() == self.address + offset and is_kept(tensor)
            for tensor, offset in zip(self.tensors, self.offsets, strict=True)
        ]
        if not all(stays):
            if self.versions:
                self.versions = [version for version, here in zip(self.versions, stays, strict=True) if here]
            self.offsets = [offset for offset, here in zip(self.offsets, stays, strict=True) if here]
            self.tensors = [tensor for tensor, here in zip(self.tensors, stays, strict=True) if here]


class Pack(Region):
    """Tensors that move together: first over memory of torch's allocator, after their return over one region."""

    def __init__(self, name: str, blocks: list[_Block], device: torch.device, *, keeps_address: bool) -> None:
        # no bytes of its own: they are its tensors' until the first return, and its region's from then on
        super().__init__(name, torch.empty(0, dtype=torch.uint8, device=device))
        self.blocks = blocks
        self.region: Region | None = None
        self.why_it_stays = ""
        self.reuses_memory = True
        self._keeps_address = keeps_address
        self._lent: list[torch.Tensor] = []  # host memory that tensors may lie over which are not the pack's any more
        start = 0
        for block in blocks:
            block.start = start
            start += block.padded_bytes
        self.size_bytes = start

    @property
    def is_at_host(self) -> bool:
        """True while the tensors point to host memory."""
        return any(block.host is not None for block in self.blocks)

    def held_host(self) -> list[torch.Tensor]:
        """List the host memory (uint8) that tensors lie over: it must not be lent to anybody else."""
        hosts = [*self._lent, *(block.host for block in self.blocks if block.host is not None)]
        return [host for host in hosts if num_references(host) > 1]

    def pairs(self, host: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) memory of the bytes to copy; see `Region.pairs`."""
        if self.region is not None:
            return [(self.region.bytes[: self.size_bytes], host)]
        for block in self.blocks:
            block.keep()
        # the bytes of tensors that somebody has pointed elsewhere are nobody's
        here = [block for block in self.blocks if block.tensors or block.device is not None]
        return [(self._on_device(block), host[block.start : block.start + block.size_bytes]) for block in here]

    def note_versions(self) -> None:
        """Note how often each tensor was written, by torch's count, before its bytes are copied."""
        for block in self.blocks:
            block.note_versions()

    def num_others(self, owned: Container[int]) -> int:
        """Count references to the pack's device memory, other than its own tensors."""
        if self.region is None:
            return max((num_others(block.tensors, owned) for block in self.blocks), default=0)
        tensors = [tensor for block in self.blocks for tensor in block.tensors]
        counted = num_references(self.region.bytes) - 1 - len(tensors)
        for tensor in tensors:
            if tensor._use_count() != 1:  # type: ignore[attr-defined]  # a view's base, or an owner in C++: look closer
                return num_others([self.region.bytes, *tensors])
        return counted

    @property
    def is_referred_to(self) -> bool:
        """True when something refers to the device memory that the pack's tensors have left."""
        if self.region is not None:
            return self.region.is_referred_to
        return any(block.device is not None and num_references(block.device) > 1 for block in self.blocks)

    def point_to_host(self, host: Callable[[int, int], torch.Tensor]) -> None:
        """Point every tensor to `host(start, size)`, a storage of its own for each block."""
        with uninterrupted():
            for block in self.blocks:
                block.keep()
                there = self._on_device(block)
                block.host = host(block.start, block.size_bytes)
                if block.was_written:  # while it was copied
                    block.host.copy_(there)
                if self.region is None:
                    block.device = there
                block.point_to(block.host)

    def point_to_device(self) -> list[torch.Tensor]:
        """Point every tensor on the host to the device; return the host memory that something else still holds."""
        hosts, self._lent = self._lent, []
        with uninterrupted():
            for block in self.blocks:
                host = block.host
                assert host is not None
                block.keep()
                there = self._on_device(block)
                if block.was_written:  # on the host, while it was copied
                    there.copy_(host)
                block.point_to(there)
                block.host = block.device = None
                hosts.append(host)
            self.blocks = [block for block in self.blocks if block.tensors]
        return [host for host in hosts if num_references(host) > 1]

    def forget_others(self, by_id: dict[int, torch.Tensor]) -> None:
        """Forget tensors that are not in `by_id`, or do not lie here any more."""
        for block in self.blocks:
            # nearly always nothing has changed, and this loop then makes no list
            address, is_same = block.address, True
            for tensor, offset in zip(block.tensors, block.offsets, strict=True):
                if id(tensor) not in by_id or tensor.data_ptr() != address + offset:
                    is_same = False
            if is_same:
                continue
            # bases of views are in the block though nobody names them
            bases = {id(tensor._base) for tensor in block.tensors if id(tensor) in by_id}
            block.keep(lambda tensor, bases=bases: id(tensor) in by_id or id(tensor) in bases)  # type: ignore[misc]
            if not block.tensors and block.host is not None:
                self._lent.append(block.host)
        self.blocks = [block for block in self.blocks if block.tensors]

    def _on_device(self, block: _Block) -> torch.Tensor:
        """Device memory of a block (uint8)."""
        if self.region is not None:
            return self.region.bytes[block.start : block.start + block.size_bytes]
        if block.device is not None:
            return block.device
        # without tensors there are no bytes to keep: any memory will do
        if not block.tensors:
            return torch.empty(block.size_bytes, dtype=torch.uint8, device="cpu")
        return storage_bytes(block.tensors[0])

    def move_out(self) -> None:
        """Give the tensors memory of torch's allocator, as far as there is room."""
        for block in self.blocks:
            try:
                made = torch.empty(block.size_bytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                return  # the region's memory stays with them
            made.copy_(self._on_device(block))
            block.point_to(made)

    def close(self) -> None:
        """Let go of the region. Idempotent."""
        self.closed = True
        self.resident = False
        if self.region is not None:
            self.region.close()

    def _release(self) -> None:
        for block in self.blocks:
            block.device = None
        if self.region is not None:
            self.region.release()

    def _restore(self) -> None:
        if not self._keeps_address:
            try:
                for block in self.blocks:
                    block.device = torch.empty(block.size_bytes, dtype=torch.uint8, device=self.device)
            except BaseException:  # the ones before have memory that nobody would count
                self._release()
                raise
        elif self.region is None:
            self.region = allocate_region(self.size_bytes, self.device, name=self.name)
            self.reuses_memory = self.region.reuses_memory
        else:
            self.region.restore()


def _versions(tensors: Sequence[torch.Tensor]) -> list[object]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # of tensors made in inference mode nobody counts the writes: each may have been written
        return [object() for _ in tensors]


def _is_alone(tensors: Sequence[torch.Tensor], owned: Container[int]) -> bool:
    """Tell at once, in the most frequent case, that nothing but one tensor refers to its memory."""
    tensor = tensors[0]
    storage = tensor.untyped_storage()
    return (
        len(tensors) == 1
        and tensor._base is None
        and torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor, and `storage` here
        and tensor._use_count() == 1 + (id(tensor) in owned)  # type: ignore[attr-defined]
        and storage.resizable()
    )


def why_memory_stays(tensors: Sequence[torch.Tensor], owned: Container[int] = ()) -> str | None:
    """Say why the storage of `tensors` must stay even after they point elsewhere; `None` if it can be freed."""
    if count := num_others(tensors, owned):
        return _others(count)
    if not tensors[0].untyped_storage().resizable():
        return "its memory is shared with NumPy or another owner"
    return None


def _others(count: int) -> str:
    return f"{count} more refer{'s' if count == 1 else ''} to its memory: a view, or a buffer that it is a part of"
