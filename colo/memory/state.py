"""Trainer state as segments: what any `torch.optim.Optimizer` keeps, gathered into regions.

State is found, not declared: after every step the offloader walks `optimizer.state` for tensors on its device that it
does not hold yet, and moves their storages into regions, one region at a time, so that never more than a region's worth
exists twice. The tensor objects stay the same; only where their bytes live changes. Scalars (step counters) stay where
they are, because optimizers read them on the host. Of a tensor that is sharded over processes (`DTensor`) each of them
moves its part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from colo.errors import BudgetError
from colo.memory.dtensor import part_bytes, part_of
from colo.memory.gradients import GradientSegment, parameters_of
from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import ALIGNMENT_BYTES, Region, allocate_region
from colo.memory.segment import Done, Move
from colo.memory.storage import storage_key
from colo.phases.phase import TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Residency
from colo.units import GIB, align_up

MASTER_WEIGHT = "master_weight"
"""Key under which an optimizer's state keeps a parameter's fp32 master (`colo.optim.MasterWeights`)."""


class StateSegment(RegionSegment):
    """A region segment that may still be empty: then its size is what it is expected to become."""

    def __init__(self, name: str, *, mover: Mover, expected_bytes: int) -> None:
        super().__init__(name, regions=(), away=Residency.OFFLOADED, mover=mover)
        self.expected_bytes = expected_bytes

    @property
    def size_bytes(self) -> int:
        """Device bytes when resident; while there is no state yet, what the first step is expected to make."""
        return super().size_bytes if self.regions else self.expected_bytes

    def begin(self, target: Residency) -> Move:
        """As `RegionSegment.begin`; without state there is nothing to move."""
        return super().begin(target) if self.regions else Done()


class StateOffloader:
    """Makes the state of an optimizer, its fp32 masters and its gradients movable.

    Attaches to the optimizer through torch's own hooks: state is back when a step begins, and new state is gathered
    when it ends. `state_dict()` returns a snapshot in host memory, valid in every phase and whatever happens to the
    state later; `load_state_dict` copies from what it is given and never keeps it.

    Ownership: owns the regions of its segments. `close` moves the state back to ordinary memory, so that the optimizer
    goes on working without colo.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: Mover,
        *,
        region_bytes: int = GIB,
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._mover = mover
        self._region_bytes = region_bytes
        self._before_step = before_step or self.bring_back
        self._after_step = after_step or (lambda: None)
        expected_bytes = expected_state_bytes(optimizer)
        self.state = StateSegment(TRAINER_OPTIMIZER, mover=mover, expected_bytes=expected_bytes)
        self.masters = StateSegment(TRAINER_MASTER_WEIGHTS, mover=mover, expected_bytes=0)
        self.gradients = GradientSegment(optimizer, mover=mover)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
            optimizer.register_state_dict_post_hook(lambda _, state_dict: self._snapshot(state_dict)),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: detach_state(state_dict)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()),
        ]
        try:
            self.gather()
        except BaseException:
            with suppress(Exception):  # what cannot go back is left where it is, which serves the optimizer as well
                self.close()
            raise

    @property
    def segments(self) -> tuple[StateSegment, StateSegment, GradientSegment]:
        """`trainer.optimizer`, `trainer.master_weights`, `trainer.gradients`."""
        return self.state, self.masters, self.gradients

    def bring_back(self) -> None:
        """Make everything resident and wait for it. Raises: `BudgetError` when the device has no room."""
        for move in [segment.begin(Residency.RESIDENT) for segment in self.segments if segment.host_bytes]:
            move.wait()

    def gather(self) -> None:
        """Take in state that has appeared since the last call, and let go of regions that no state uses any more."""
        for segment, is_master in ((self.state, False), (self.masters, True)):
            groups = _by_storage(self._tensors(is_master))
            was_offloaded = segment.residency is Residency.OFFLOADED
            dead = [region for region in segment.regions if groups.pop(storage_key(region.bytes), None) is None]
            if dead:
                segment.remove(dead)
            self._take_in(segment, groups)
            if was_offloaded:
                segment.begin(Residency.OFFLOADED).wait()  # nobody who counts bytes knows of this move

    def close(self, device: torch.device | None = None) -> None:
        """Move the state to ordinary memory, remove the hooks and release the regions. Idempotent.

        The memory is on `device`, by default where the state has been. On the host it is that of the arena: copied at
        the speed of the bus, and no second copy of what is there already.
        Raises: `BudgetError` when the device has no room for the state; it is then offloaded as before.
        """
        if not self._hooks:
            return
        target = device or self._mover.device
        if device is None or target.type != "cpu":
            self.bring_back()
        else:
            if self.gradients.host_bytes:
                self.gradients.begin(Residency.RESIDENT).wait()
            for segment in (self.state, self.masters):
                with suppress(BudgetError):  # without room in the arena, an ordinary copy does, slower
                    if segment.regions:
                        segment.begin(Residency.OFFLOADED).wait()
        while self._hooks:
            self._hooks.pop().remove()
        for segment, is_master in ((self.state, False), (self.masters, True)):
            storages = _by_storage(self._tensors(is_master))
            for region in segment.regions:
                tensors = storages.get(storage_key(region.bytes), [])
                if segment.residency is Residency.OFFLOADED:
                    _move_to(segment.give_away(region), tensors)
                else:
                    _move_to(region.bytes.to(target, copy=True), tensors)
                    segment.remove([region])

    def _stepped(self) -> None:
        try:
            self.gather()
        except BudgetError as error:
            warnings.warn(
                f"new state of the optimizer cannot leave the device until after the next step: {error}", stacklevel=2
            )
        finally:  # whatever became of its state, the step has been made
            self._after_step()

    def _loaded(self) -> None:
        # Whatever was offloaded has just been replaced by what was loaded, which is on the device.
        self.gather()

    def _snapshot(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": _map_tensors(state_dict["state"], self._host_copy)}

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        part = part_of(tensor)
        copy = self._host_copy_of_part(part)
        if part is tensor:
            return copy
        sharded = torch.empty_like(tensor, device=copy.device)
        part_of(sharded).copy_(copy)
        return sharded

    def _host_copy_of_part(self, tensor: torch.Tensor) -> torch.Tensor:
        for segment in (self.state, self.masters):
            for region in segment.regions:
                if storage_key(region.bytes) != storage_key(tensor):
                    continue
                segment.settle()
                if segment.residency is Residency.OFFLOADED:
                    host = segment.host_copy(region).view(tensor.dtype)
                    offset = int(host.storage_offset()) + int(tensor.storage_offset())
                    return host.as_strided(tensor.shape, tensor.stride(), offset).clone()
        return tensor.detach().to("cpu", copy=True)

    def _tensors(self, is_master: bool) -> Iterator[torch.Tensor]:
        """State tensors to move: on the mover's device, not scalars, and not the memory of a parameter."""
        parameters = {storage_key(part_of(p)) for p in parameters_of(self.optimizer)}
        for value in self.optimizer.state.values():
            for path, tensor in _walk(value, ()):
                movable = tensor.device == self._mover.device and tensor.dim() > 0 and tensor.numel() > 0
                if movable and (path[-1:] == (MASTER_WEIGHT,)) is is_master and storage_key(tensor) not in parameters:
                    yield tensor

    def _take_in(self, segment: StateSegment, loose: dict[int, list[torch.Tensor]]) -> None:
        """Move whole storages, so that tensors that share one still do, a region at a time."""
        if loose:
            segment.begin(Residency.RESIDENT).wait()
        while loose:
            batch = _next_batch(loose, self._region_bytes)
            segment.add([_gather_storages(batch, self._mover.device, segment.name)])


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that the first step of an optimizer will make, for those of torch whose state is known; else 0.

    Adam, AdamW: two moments (three with amsgrad); SGD with momentum: one buffer; each as large as its parameter.
    """
    total_bytes = 0
    optimizer = getattr(optimizer, "inner", optimizer)  # of `colo.optim.MasterWeights`
    for group in optimizer.param_groups:
        if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            copies = 3 if group.get("amsgrad") else 2
        else:
            copies = int(isinstance(optimizer, torch.optim.SGD) and group.get("momentum", 0) != 0)
        sizes = (part_bytes(p) for p in group["params"] if p.requires_grad)
        total_bytes += copies * sum(align_up(size, ALIGNMENT_BYTES) for size in sizes)
    return total_bytes


def detach_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict to load from: its tensors can be pointed elsewhere, and its counters raised, without the given one.

    Larger tensors are new objects over the same memory, which gathering copies from; scalars, which are not gathered,
    are copies.
    """
    return {**state_dict, "state": _map_tensors(state_dict["state"], lambda t: t.detach() if t.dim() else t.clone())}


def _walk(value: object, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], torch.Tensor]]:
    """Every strided tensor in nested dicts, lists and tuples, or its part, with the keys that lead to it."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield path, part_of(value)
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _walk(child, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _walk(child, (*path, index))


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with every tensor replaced; the given containers are left alone."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(child, function) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(child, function) for child in value)
    return value


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Tensors by what they lie in, each once: optimizers keep one in the state of several parameters, too."""
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(storage_key(tensor), {})[id(tensor)] = tensor
    return {key: list(group.values()) for key, group in groups.items()}


def _next_batch(groups: dict[int, list[torch.Tensor]], region_bytes: int) -> list[list[torch.Tensor]]:
    """Take from `groups` as many storages as a region of `region_bytes` holds, and at least one."""
    batch: list[list[torch.Tensor]] = []
    taken_bytes = 0
    while groups:
        key = next(iter(groups))
        size_bytes = align_up(groups[key][0].untyped_storage().nbytes(), ALIGNMENT_BYTES)
        if batch and taken_bytes + size_bytes > region_bytes:
            break
        batch.append(groups.pop(key))
        taken_bytes += size_bytes
    return batch


@torch.no_grad()
def _gather_storages(groups: Sequence[Sequence[torch.Tensor]], device: torch.device, name: str) -> Region:
    """Copy whole storages into one new region and point their tensors at it."""
    sizes = [group[0].untyped_storage().nbytes() for group in groups]
    region = allocate_region(sum(align_up(size, ALIGNMENT_BYTES) for size in sizes), device, name=name)
    start_bytes = 0
    for group, size_bytes in zip(groups, sizes, strict=True):
        region.bytes.narrow(0, start_bytes, size_bytes).copy_(_storage_bytes(group[0]))
        _repoint(group, region.bytes.untyped_storage(), start_bytes)
        start_bytes += align_up(size_bytes, ALIGNMENT_BYTES)
    return region


@torch.no_grad()
def _move_to(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Point the tensors of a region at its bytes elsewhere (uint8), on whichever device."""
    for tensor in tensors:
        flat = memory.view(tensor.dtype)
        offset = int(flat.storage_offset()) + int(tensor.storage_offset())
        tensor.data = flat.as_strided(tensor.size(), tensor.stride(), offset)


def _repoint(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage, start_bytes: int) -> None:
    for tensor in tensors:
        offset = start_bytes // tensor.element_size() + int(tensor.storage_offset())
        tensor.set_(storage, offset, tensor.size(), tensor.stride())


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage (uint8)."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
