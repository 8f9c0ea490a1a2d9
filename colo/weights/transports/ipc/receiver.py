"""Weights from another process of this machine, in a vLLM worker: recorded copies out of memory that the sender owns.

    bind                                    what is sent, its order, and how the model takes it
    begin -> copy                -> finish  direct: the sender's tensors are mapped, and copied as a CUDA graph
    begin -> take_all            -> finish  staged: buckets arrive in turn in two slabs; one is filled while the other
                                            is read, under interprocess events and counts in shared host memory;
                                            slabs in host memory, where a GPU's cannot be mapped, are copied first

`finish` attests: every tensor of the manifest came once, and what is in the engine is what was sent. Until it has
returned, the model's weights are neither the old nor the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colo.errors import TransferError, Unsupported
from colo.memory.checksum import Checksums, Part, values
from colo.memory.copy_plan import CopyPlan, copy_all
from colo.memory.fence import wait_for_queued
from colo.memory.load_plan import Copy, LoadPlan
from colo.memory.mapped_buffer import MappedBuffer
from colo.memory.shared_memory import Description
from colo.memory.tiles import WORD_BYTES, in_words
from colo.units import align_up
from colo.weights.intersection import intersect
from colo.weights.manifest import Manifest, TensorSpec
from colo.weights.place import Place
from colo.weights.transports.ipc.export import empty, open_places
from colo.weights.transports.ipc.handoff import ReaderHandoff

Record = Callable[[dict[str, torch.Tensor], str | None], LoadPlan]
"""How a worker's model loads parameters of a model type."""

_Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources."""


class Receiver:
    """The receiving end in one worker."""

    def __init__(self, device: torch.device, record: Record, *, number: int = 0) -> None:
        """`number` tells the workers of one engine apart."""
        self._device = device
        self._record = record
        self._number = number
        self._plan: LoadPlan | None = None
        self._manifest: Manifest | None = None
        self._sources: dict[str, torch.Tensor] = {}
        self._compared: CopyPlan | None = None
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, torch.Tensor | None]] = {}
        self._replays = 0
        self._windows: list[MappedBuffer] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._buckets: list[_Bucket] = []
        self._turns: ReaderHandoff | None = None
        self._update: _Update | None = None

    def bind(
        self, parameters: list[list[Any]], model_type: str | None, places: list[list[Any]], memory: list[Description]
    ) -> dict[str, Any]:
        """Learn what will be sent: each parameter as `TensorSpec.to_wire` gives it, with strides.

        With `places` (`Place.to_wire`) and `memory` (see `Exported`) the sender's tensors are mapped. Returns
        `fallbacks` and `left_out` of the `LoadPlan`. Raises: `TransferError` when memory cannot be mapped, or
        parameters do not cover the model exactly once.
        """
        self.release()
        specs = tuple(map(TensorSpec.from_wire, parameters))
        self._plan = self._record({spec.name: empty(spec) for spec in specs}, model_type)
        self._manifest = Manifest(specs=specs)
        if not self._plan.fallbacks and places:
            self._sources = open_places(list(map(Place.from_wire, places)), memory, self._device)
        return {"fallbacks": dict(self._plan.fallbacks), "left_out": self._plan.left_out}

    def stage(
        self,
        slabs: list[Description],
        events: list[list[str]],
        buckets: list[list[list[Any]]],
        turns: Description | None = None,
        readers: int = 1,
        copied: bool = False,
    ) -> None:
        """Learn where buckets arrive: two slabs in turn, with [filled, read] events on CUDA, and the pieces of every
        bucket.

        A piece is [name, start, size, offset], in bytes. `turns` is for `take_all`: the sender's counts, shared by
        `readers` workers. Slabs in host memory are `copied` to the device before they are read. Raises: `Unsupported`
        for a tensor that cannot be put together from pieces; `TransferError` for slabs or pieces that are not whole
        words of four bytes, and for tensors that were described with gaps.
        """
        plan = self._bound()
        windows = [MappedBuffer(slab, self._device, copied=copied) for slab in slabs]
        offsets = [offset for pieces in buckets for *_, offset in pieces]
        if any(n % WORD_BYTES for n in (*offsets, *(window.bytes.numel() for window in windows))):
            raise TransferError(f"slabs, and where pieces begin in them, must be multiples of {WORD_BYTES} bytes")
        for name, (dtype, shape) in plan.sources.items():
            if not torch.empty_strided(shape, plan.strides[name], dtype=dtype, device="meta").is_contiguous():
                raise TransferError(f"{name} was described with strides {plan.strides[name]}: pieces have no gaps")
        self._windows = windows
        self._events = [(self._event(filled), self._event(read)) for filled, read in events]
        by_name: dict[str, list[Copy]] = {}
        for copy in plan.copies:
            by_name.setdefault(copy.name, []).append(copy)
        dtypes = {name: dtype for name, (dtype, _) in plan.sources.items()}
        self._buckets = [
            _Bucket.of(pieces, windows[index % len(windows)].bytes, by_name, dtypes)
            for index, pieces in enumerate(buckets)
        ]
        self._turns = ReaderHandoff(turns, readers=readers, number=self._number) if turns is not None else None

    def begin(self, version: int, digest: str) -> None:
        """Start taking in a version. Raises: `TransferError` when it consists of other tensors than were described."""
        self._bound()
        assert self._manifest is not None
        if digest != self._manifest.digest:
            raise TransferError(
                f"version {version} consists of other tensors (digest {digest[:12]}) than were described "
                f"({self._manifest.digest[:12]}): describe them again"
            )
        self._update = _Update(version)

    @torch.no_grad()
    def copy(self, *, verify: bool) -> None:
        """Copy everything from where it is mapped."""
        plan, update = self._bound(), self._updating()
        if not self._sources:
            raise TransferError("no memory of the sender is mapped: describe it first")
        flags = self._replay(plan, verify=verify)
        update.mapped += list(plan.sources)
        if flags is not None:
            update.different += plan.named(flags)

    @torch.no_grad()
    def take(self, index: int, *, verify: bool) -> None:
        """Copy bucket number `index` from its slab, which is free on the event `read`, or without one on return."""
        update, bucket = self._updating(), self._buckets[index]
        turn = index % len(self._windows)
        window = self._windows[turn]
        stream = torch.cuda.current_stream(self._device) if self._events else None
        if stream is not None:
            stream.wait_event(self._events[turn][0])
        window.refresh(bucket.size_bytes)
        targets, sources = bucket.pairs
        copy_all(targets, sources)
        if verify:
            held = bucket.held(window.bytes)
            update.sums[index] = held.checksums.compute()
            update.flags += [(held.names, held.compared.flags())]
        if stream is not None:
            self._events[turn][1].record(stream)
        elif window.is_copy:
            wait_for_queued(self._device)
        update.taken.append(index)

    def take_all(self, *, verify: bool) -> None:
        """Take every bucket once the sender has filled it. `TransferError` when the sender stops, ends or is silent."""
        if self._turns is None:
            raise TransferError("nothing was said about turns: stage again")
        try:
            for index in range(len(self._buckets)):
                if not self._turns.wait_filled(index + 1):
                    return  # another worker has failed, and says why
                self.take(index, verify=verify)
                self._turns.read(index + 1)
        except BaseException:
            self._turns.fail()
            raise

    def finish(self, checksums: list[int] | None) -> dict[str, Any]:
        """Check that every tensor came once, and that the engine holds what was sent; returns version and counts.

        `checksums` has one number for each piece of every bucket: `colo.memory.checksum.checksum` of its bytes in the
        slab, up to whole words of four bytes. Raises: `TransferError` naming what is missing, came twice, or differs.
        """
        update, manifest = self._updating(), self._manifest
        assert manifest is not None
        self._update = None
        arrived = [*update.mapped, *self._arrived(update.taken)]
        if arrived != list(manifest.names):
            manifest.check_received(arrived, update.version)
        wait_for_queued(self._device)
        own = values([sums for _, sums in sorted(update.sums.items())])
        if len(own) != len(checksums or ()):
            raise TransferError(
                f"{len(own)} pieces were summed, and {len(checksums or ())} checksums were given: give one for each "
                "piece that is taken with verify=True, and none else"
            )
        different = list(update.different)
        for names, flags in update.flags:
            different += [name for name, is_other in zip(names, flags.tolist(), strict=True) if is_other]
        pieces = [name for bucket in self._buckets for name, *_ in bucket.pieces]
        different += [name for name, a, b in zip(pieces, own, checksums or (), strict=False) if a != b]
        different = list(dict.fromkeys(different))
        if different:
            raise TransferError(
                f"{len(different)} tensors in the engine differ from what was sent, {different[0]} for one"
            )
        return {"version": update.version, "num_tensors": len(manifest.specs), "num_bytes": manifest.total_bytes}

    @torch.no_grad()
    def differences(self) -> list[str]:
        """Names of mapped tensors that the engine does not hold as they are now."""
        plan = self._bound()
        return plan.named(self._comparison(plan).flags()) if self._sources else []

    def release(self) -> None:
        """Unmap the sender's memory. The sender frees it after this."""
        self._graphs, self._compared = {}, None
        self._sources, self._windows, self._events, self._buckets = {}, [], [], []
        self._plan = self._update = self._turns = None
        self._replays = 0

    def _replay(self, plan: LoadPlan, *, verify: bool) -> torch.Tensor | None:
        """Copy, and compare: flags for `LoadPlan.named`. The first time as it is, from then on as a CUDA graph."""

        compared = self._comparison(plan) if verify else None

        def run() -> torch.Tensor | None:
            plan.replay(self._sources)
            return compared.flags() if compared is not None else None

        self._replays += 1
        if self._device.type != "cuda" or self._replays == 1:
            return run()
        if verify not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                flags = run()
            self._graphs[verify] = graph, flags
        graph, flags = self._graphs[verify]
        graph.replay()
        return flags

    def _comparison(self, plan: LoadPlan) -> CopyPlan:
        if self._compared is None:
            self._compared = plan.comparison(self._sources)
        return self._compared

    def _arrived(self, taken: Sequence[int]) -> list[str]:
        """Tensors whose buckets have all been taken, each as often as its most frequent bucket."""
        counts: dict[str, list[int]] = {}
        for index, bucket in enumerate(self._buckets if taken else ()):
            for name, *_ in bucket.pieces:
                counts.setdefault(name, []).append(taken.count(index))
        return [name for name, times in counts.items() if min(times) for _ in range(max(times))]

    def _event(self, handle: str) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(self._device, bytes.fromhex(handle))
        return event

    def _bound(self) -> LoadPlan:
        if self._plan is None:
            raise TransferError("nothing was described yet: call bind first")
        if self._plan.fallbacks:
            name, reason = next(iter(self._plan.fallbacks.items()))
            raise Unsupported(f"{name} cannot be copied: {reason}")
        return self._plan

    def _updating(self) -> _Update:
        if self._update is None:
            raise TransferError("no update has begun")
        return self._update


STEPS: dict[str, Callable[..., Any]] = {
    name: member for name, member in vars(Receiver).items() if not name.startswith("_")
}
"""Steps that a sender may ask for: the public methods of `Receiver`, by name."""


def run_step(receiver: Receiver, step: str, arguments: Mapping[str, Any]) -> Any:
    """Run a step and return its result. Raises: `TransferError` for an unknown step, and what the step raises."""
    if step not in STEPS:
        raise TransferError(f"{step!r} is no step of a transfer, which has {', '.join(STEPS)}")
    return STEPS[step](receiver, **arguments)


class _Update:
    """What has arrived of one version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.mapped: list[str] = []
        self.taken: list[int] = []
        self.different: list[str] = []
        self.sums: dict[int, torch.Tensor] = {}
        """By bucket, those of its pieces."""

        self.flags: list[tuple[Sequence[str], torch.Tensor]] = []


class _Bucket:
    """Where the pieces of one bucket go."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, int, int]] = []
        """Tensor, and where its bytes begin and end."""

        self.pairs: _Pairs = ([], [])
        self.numbers: list[int] = []
        """Index of every pair's piece."""

        self.size_bytes = 0
        """Bytes that the bucket takes of its slab, from the start, up to whole words."""

        self._held: _Held | None = None

    @classmethod
    def of(
        cls,
        pieces: Sequence[Sequence[Any]],
        slab: torch.Tensor,
        copies: Mapping[str, Sequence[Copy]],
        dtypes: Mapping[str, torch.dtype],
    ) -> _Bucket:
        bucket = cls()
        for number, (name, start_bytes, size_bytes, offset_bytes) in enumerate(pieces):
            dtype, stop_bytes = dtypes[name], offset_bytes + size_bytes
            memory = slab[offset_bytes:stop_bytes].view(dtype)
            for copy in copies.get(name, ()):
                for target, source in intersect(copy, start_bytes // dtype.itemsize, memory) if size_bytes else ():
                    bucket.pairs[0].append(target)
                    bucket.pairs[1].append(source)
                    bucket.numbers.append(number)
            bucket.pieces.append((name, offset_bytes, stop_bytes))
            bucket.size_bytes = max(bucket.size_bytes, align_up(stop_bytes, WORD_BYTES))
        return bucket

    def held(self, slab: torch.Tensor) -> _Held:
        """What tells whether the engine holds the bucket; always of the same slab."""
        if self._held is None:
            self._held = _Held(self, slab)
        return self._held


class _Held:
    """Checksums of what the engine holds of a bucket, for each piece as it lay in the slab.

    Pieces that this worker takes no part of are summed in the slab. So are those that go to a second place, or are not
    whole words in a row, which are compared with the slab too.
    """

    def __init__(self, bucket: _Bucket, slab: torch.Tensor) -> None:
        parts, summed = _parts(bucket, slab)
        left = [index for index in range(len(bucket.numbers)) if index not in summed]
        self.checksums = Checksums(parts, len(bucket.pieces), slab.device)
        self.names = [bucket.pieces[bucket.numbers[index]][0] for index in left]
        targets, sources = ([side[index] for index in left] for side in bucket.pairs)
        self.compared = CopyPlan(list(zip(sources, targets, strict=True)))


def _parts(bucket: _Bucket, slab: torch.Tensor) -> tuple[list[Part], set[int]]:
    """What is summed of a bucket, and which of its pairs that sees."""
    memory = in_words(slab)
    assert memory is not None, "`stage` has looked"
    parts, summed, places = [], set(), _places(bucket, slab)
    for number, (_, start, stop) in enumerate(bucket.pieces):
        reached, end = start, align_up(stop, WORD_BYTES)
        for place, index, words in [*places.get(number, ()), (end, None, memory[:0])]:
            if place < reached:
                continue
            if place > reached:
                between = memory[reached // WORD_BYTES : place // WORD_BYTES]
                parts.append((number, (reached - start) // WORD_BYTES, between))
            if index is not None:
                parts.append((number, (place - start) // WORD_BYTES, words))
                summed.add(index)
            reached = place + words.nbytes
    return parts, summed


def _places(bucket: _Bucket, slab: torch.Tensor) -> dict[int, list[tuple[int, int, torch.Tensor]]]:
    """By number of the piece: where a pair's source begins in the slab, the pair, and its target's words."""
    found: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
    for index, (target, source) in enumerate(zip(*bucket.pairs, strict=True)):
        words, is_copied = in_words(target), (target.dtype, target.device) == (source.dtype, source.device)
        if words is not None and in_words(source) is not None and is_copied:
            place = source.data_ptr() - slab.data_ptr()
            found.setdefault(bucket.numbers[index], []).append((place, index, words))
    for places in found.values():
        places.sort(key=lambda place: place[:2])
    return found
