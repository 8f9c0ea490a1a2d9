"""Trainer state as segments: what any `torch.optim.Optimizer` keeps, gathered into regions.

State is found, not declared: after every step the offloader walks `optimizer.state` for tensors on its device that it
does not hold yet, and moves their storages into regions, one region at a time, so that never more than a region's worth
exists twice. The tensor objects stay the same; only where their bytes live changes, and while those are in host memory
the objects say so (`stand_ins`). Scalars (step counters) stay where they are, because optimizers read them on
the host. Of a tensor that is sharded over processes (`DTensor`) each of them moves its part. A storage is moved only
when everything that refers to it is known; what is not stays on the device, and is named.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from colo.errors import BudgetError, Unsupported
from colo.memory.dtensor import local_bytes
from colo.memory.offload import Mover
from colo.memory.region import ALIGNMENT_BYTES
from colo.memory.storage import storage_key
from colo.phases.phase import TRAINER_KEPT, TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Residency, check_move
from colo.phases.segment import Done, Move
from colo.trainer.gradient_buffers import GradientBuffers
from colo.trainer.gradients import GradientSegment
from colo.trainer.inventory import Inventory, Kept, StateTensor
from colo.trainer.megatron import MegatronOptimizers, as_torch
from colo.trainer.snapshot import detach_state, snapshot
from colo.trainer.state_segment import StateSegment
from colo.trainer.unreduced import HoldsGradient
from colo.units import GIB, align_up


class KeptSegment:
    """State that never leaves the device, for example because code that colo does not know refers to its memory."""

    name = TRAINER_KEPT
    residency = Residency.RESIDENT
    away = None
    host_bytes = 0

    def __init__(self, segments: Sequence[StateSegment], gradients: GradientSegment | GradientBuffers) -> None:
        self._segments = segments
        self._gradients = gradients
        self.loose: list[Kept] = []
        """State that lies in no region."""

        self.beside: Callable[[], Sequence[Kept]] = list
        """Names what an optimizer keeps beside its state."""

    @property
    def items(self) -> list[Kept]:
        """The name, the size and the reason of everything that stays."""
        kept = [*self.loose, *(kept for segment in self._segments for kept in segment.kept)]
        kept += [*self.beside(), *(self._gradients.kept if isinstance(self._gradients, GradientBuffers) else [])]
        if num_bytes := self._gradients.staying_bytes:
            kept.append(Kept("gradients", num_bytes, "something else refers to them, or they are sparse"))
        return kept

    @property
    def holds_state(self) -> bool:
        """Whether state of the optimizer is among it."""
        return bool(self.loose) or any(segment.kept for segment in self._segments)

    @property
    def size_bytes(self) -> int:
        """Bytes of everything that stays."""
        return sum(kept.size_bytes for kept in self.items)

    @property
    def device_bytes(self) -> int:
        """The same: it is on the device."""
        return self.size_bytes

    def begin(self, target: Residency) -> Move:
        """Refuse every move. Raises: `PhaseError`."""
        if target is not self.residency:
            check_move(self.name, Residency.SHARED, target)
        return Done()


class StateOffloader:
    """Makes the state of an optimizer, its fp32 masters and its gradients movable.

    Attaches to the optimizer through torch's own hooks: state is back when a step begins, and new state is gathered
    when it ends. `state_dict()` returns a snapshot in host memory, valid in every phase and whatever happens to the
    state later; `load_state_dict` copies from what it is given and never keeps it.

    Ownership: owns the regions of its segments. `close` moves the state back to ordinary memory, so that the optimizer
    goes on working without colo.
    Raises: `Unsupported` for an optimizer without torch's hooks, `BudgetError` without room for state that is there.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: Mover,
        *,
        region_bytes: int = GIB,
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
        on_touch: Callable[[str], None] | None = None,
        other_gradients: Callable[[], Sequence[HoldsGradient]] = lambda: (),
    ) -> None:
        self.optimizer = stepped = as_torch(optimizer)
        _check_hooks(stepped)
        self._mover = mover
        self._region_bytes = region_bytes
        self._before_step = before_step or self.bring_back
        self._after_step = after_step or (lambda: None)
        touch = on_touch or self._bring
        self.state = StateSegment(TRAINER_OPTIMIZER, mover=mover, on_touch=touch, is_master=False)
        self.masters = StateSegment(TRAINER_MASTER_WEIGHTS, mover=mover, on_touch=touch, is_master=True)
        self.gradients = self._gradients_of(stepped, touch, other_gradients)
        self.kept = KeptSegment((self.state, self.masters), self.gradients)
        if isinstance(stepped, MegatronOptimizers):
            self.kept.beside = stepped.kept
        self._replaced: set[str] = set()
        """Segments that have left the device for a state dict that is being loaded."""

        self._hooks = [
            stepped.register_step_pre_hook(_untraced(lambda *_: self._before_step())),
            stepped.register_step_post_hook(_untraced(lambda *_: self._stepped())),
            stepped.register_state_dict_post_hook(_untraced(lambda _, state_dict: self._snapshot(state_dict))),
            stepped.register_load_state_dict_pre_hook(_untraced(lambda _, given: self._before_load(given))),
            stepped.register_load_state_dict_post_hook(_untraced(lambda _: self.gather())),
        ]
        try:
            self.gradients.refresh()
            self.gather()
        except BaseException:
            with suppress(Exception):  # state that cannot be moved back stays where it is; the optimizer works on
                self.close()
            raise

    def _gradients_of(
        self, stepped: Any, touch: Callable[[str], None], others: Callable[[], Sequence[HoldsGradient]]
    ) -> GradientSegment | GradientBuffers:
        if isinstance(stepped, MegatronOptimizers) and stepped.has_buffers:
            return GradientBuffers(stepped, mover=self._mover, on_touch=touch)
        made = GradientSegment(stepped, mover=self._mover, others=others)
        made.on_touch = lambda: touch(made.name)
        return made

    @property
    def segments(self) -> tuple[StateSegment, StateSegment, GradientSegment | GradientBuffers]:
        """`trainer.optimizer`, `trainer.master_weights`, `trainer.gradients`."""
        return self.state, self.masters, self.gradients

    def bring_back(self) -> None:
        """Make everything resident and wait for it. Raises: `BudgetError` when the device has no room."""
        for move in [segment.begin(Residency.RESIDENT) for segment in self.segments if segment.host_bytes]:
            move.wait()

    def gather(self) -> None:
        """Move new state into regions, and close regions that nothing refers to any more.

        State that cannot move is listed in `kept`. Raises: `BudgetError` when there is no room for new regions.
        """
        inventory = Inventory(self.optimizer)
        away = [s for s in (self.state, self.masters) if s.residency is Residency.OFFLOADED]
        was_offloaded = [segment for segment in away if segment.name not in self._replaced]
        self._replaced.clear()
        for segment in (self.state, self.masters):
            segment.note(inventory)
        reasons = [(group, inventory.why_it_stays(group)) for group in self._outside(inventory)]
        movable = [group for group, reason in reasons if reason is None]
        kept = [_kept(group, inventory, reason) for group, reason in reasons if reason is not None]
        try:
            for segment in (self.state, self.masters):
                self._take_in(segment, [g for g in movable if any(f.is_master for f in g) is segment.is_master])
        finally:
            kept += [_kept(g, inventory, "there was no room to gather it") for g in self._outside(inventory, movable)]
            self.kept.loose = [*inventory.kept(self._mover.device), *kept]
            self.state.expected_bytes = 0 if self.kept.holds_state else expected_state_bytes(self.optimizer)
        for segment in was_offloaded:
            segment.begin(Residency.OFFLOADED).wait()  # the scheduler, which counts bytes, does not know of this move

    def refresh(self) -> None:
        """Look through the state again before it leaves: user code may have taken views of it, or replaced it."""
        self.gradients.refresh()
        with suppress(BudgetError):
            self.gather()

    def close(self, device: torch.device | None = None) -> None:
        """Move the state to ordinary memory, remove the hooks and release the regions. Idempotent.

        The memory is on `device`, by default the device of the state. On the host it is the arena's own memory: state
        that has been offloaded is not copied again. May be called again after an error.
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
                    segment.begin(Residency.OFFLOADED).wait()
        if isinstance(self.gradients, GradientBuffers):
            self.gradients.hand_over(self._mover.device)
        for segment in (self.state, self.masters):
            segment.hand_over(target)
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    def _stepped(self) -> None:
        try:
            self.gather()
        except BudgetError as error:
            warnings.warn(
                f"new state of the optimizer cannot leave the device until after the next step: {error}", stacklevel=2
            )
        finally:  # whatever became of its state, the step has been made
            self._after_step()

    def _snapshot(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for segment in (self.state, self.masters):
            segment.settle()
        return snapshot(state_dict)

    def _before_load(self, given: dict[str, Any]) -> dict[str, Any]:
        """Move the present state out of the way of the loaded one, which torch puts into new memory on the device.

        It stays in host memory until then: a state dict that does not fit the optimizer changes nothing.
        """
        for segment in (self.state, self.masters):
            if segment.residency is Residency.RESIDENT and segment.regions:
                with suppress(BudgetError, torch.OutOfMemoryError):  # the host has no room: both are there for a while
                    segment.begin(Residency.OFFLOADED).wait()
                    self._replaced.add(segment.name)
        return detach_state(given, self.optimizer)

    def _bring(self, name: str) -> None:
        next(segment for segment in self.segments if segment.name == name).begin(Residency.RESIDENT).wait()

    def _outside(self, inventory: Inventory, groups: list[list[StateTensor]] | None = None) -> list[list[StateTensor]]:
        """The `groups`, by default all of the device, that lie in no region."""
        groups = inventory.loose(self._mover.device) if groups is None else groups
        taken = self.state.storages | self.masters.storages
        return [group for group in groups if storage_key(group[0].tensor) not in taken]

    def _take_in(self, segment: StateSegment, groups: list[list[StateTensor]]) -> None:
        """Move whole storages, so that tensors that share one still do, a region at a time."""
        if groups:
            segment.begin(Residency.RESIDENT).wait()
        while groups:
            batch = _next_batch(groups, self._region_bytes)
            segment.adopt(batch, self._mover.device)
            groups = groups[len(batch) :]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer within accelerate's wrappers of it, which have no hooks; any other object as it is."""
    module = sys.modules.get("accelerate.optimizer")  # without which there are none
    while module is not None and isinstance(optimizer, module.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _check_hooks(optimizer: Any) -> None:
    """Raise `Unsupported` for an optimizer that torch has not initialized, such as some that wrap another one."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks") and not isinstance(optimizer, MegatronOptimizers):
        kind = type(optimizer).__name__
        raise Unsupported(
            f"{kind} does not call torch.optim.Optimizer.__init__, so it has no hooks and colo cannot tell when it "
            "steps: use the optimizer that it wraps, or call super().__init__() in its class"
        )


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, excluded from tracing: a step under `torch.compile` calls it."""
    untraced: Callable[..., Any] = torch.compiler.disable(hook)
    return untraced


def _kept(group: Sequence[StateTensor], inventory: Inventory, reason: str) -> Kept:
    name = group[0].name if len(group) == 1 else f"{group[0].name} and {len(group) - 1} more"
    return Kept(name, inventory.bytes_of(group), reason)


def expected_state_bytes(optimizer: Any) -> int:
    """Bytes of state that the first step of an optimizer will make, for those of torch whose state is known; else 0.

    Adam, AdamW: two moments (three with amsgrad); SGD with momentum: one buffer; each as large as its parameter.
    """
    steps_mains = isinstance(optimizer, MegatronOptimizers)  # which require no gradients themselves
    # `inner` of `colo.trainer.master_weights.MasterWeights` is one.
    stepped = optimizer.inner if steps_mains else [getattr(optimizer, "inner", optimizer)]
    total_bytes = 0
    for inner in stepped:
        for group in inner.param_groups:
            if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
                copies = 3 if group.get("amsgrad") else 2
            else:
                copies = int(isinstance(inner, torch.optim.SGD) and group.get("momentum", 0) != 0)
            sizes = (local_bytes(p) for p in group["params"] if p.requires_grad or steps_mains)
            total_bytes += copies * sum(align_up(size, ALIGNMENT_BYTES) for size in sizes)
    return total_bytes


def _next_batch(groups: Sequence[list[StateTensor]], region_bytes: int) -> list[list[StateTensor]]:
    """The first storages that fit together in a region of `region_bytes`; at least one."""
    batch: list[list[StateTensor]] = []
    taken_bytes = 0
    for group in groups:
        size_bytes = align_up(group[0].tensor.untyped_storage().nbytes(), ALIGNMENT_BYTES)
        if batch and taken_bytes + size_bytes > region_bytes:
            break
        batch.append(group)
        taken_bytes += size_bytes
    return batch
