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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from colo.errors import BudgetError
from colo.memory.offload import Mover
from colo.memory.storage import storage_key
from colo.phases.phase import TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Residency
from colo.trainer.attached_state import AttachedState, StateHome
from colo.trainer.expected import StateSizes
from colo.trainer.inventory import Inventory, StateTensor, kept_of, storage_bytes_of
from colo.trainer.snapshot import detach_state
from colo.trainer.state_segment import StateSegment
from colo.units import GIB, batches


class StateOffloader(AttachedState):
    """State that is on the device as a whole while the trainer steps, and can leave as a whole."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, mover: Mover, *, region_bytes: int = GIB, **events: Any
    ) -> None:
        """`events` are those of `AttachedState`. Raises: as that."""
        self._region_bytes = region_bytes
        self._replaced: set[str] = set()
        """Segments that have left the device for a state dict that is being loaded."""

        super().__init__(optimizer, mover, **events)

    def _make_homes(self, touch: Callable[[str], None]) -> Sequence[StateHome]:
        self.state = StateSegment(TRAINER_OPTIMIZER, mover=self._mover, on_touch=touch, is_master=False)
        self.masters = StateSegment(TRAINER_MASTER_WEIGHTS, mover=self._mover, on_touch=touch, is_master=True)
        return self.state, self.masters

    def bring_back(self) -> None:
        """Make everything resident and wait for it. Raises: `BudgetError` when the device has no room."""
        for move in [segment.begin(Residency.RESIDENT) for segment in self.segments if segment.host_bytes]:
            move.wait()

    def gather(self) -> None:
        """Move new state into regions, and close regions that nothing refers to any more.

        State that cannot move is listed in `kept`. Raises: `BudgetError` when there is no room for new regions.
        """
        inventory, sizes = Inventory(self.optimizer), StateSizes(self.optimizer)
        away = [s for s in (self.state, self.masters) if s.residency is Residency.OFFLOADED]
        was_offloaded = [segment for segment in away if segment.name not in self._replaced]
        self._replaced.clear()
        for segment in (self.state, self.masters):
            segment.note(inventory)
        reasons = [(group, inventory.why_it_stays(group)) for group in self._outside(inventory)]
        movable = [group for group, reason in reasons if reason is None]
        kept = [kept_of(group, inventory, reason) for group, reason in reasons if reason is not None]
        try:
            for segment in (self.state, self.masters):
                self._take_in(segment, [g for g in movable if any(f.is_master for f in g) is segment.is_master])
        finally:
            kept += [kept_of(g, inventory, "there was no room to gather it") for g in self._outside(inventory, movable)]
            self.kept.loose = [*inventory.kept(self._mover.device), *kept]
            self.state.expected_bytes = 0 if self.kept.holds_state else sizes.total
            self.masters.expected_bytes = sizes.masters_total
        for segment in was_offloaded:
            segment.begin(Residency.OFFLOADED).wait()  # the scheduler, which counts bytes, does not know of this move

    def _return_state(self, target: torch.device, *, to_host: bool) -> None:
        if to_host:
            if self.gradients.host_bytes:
                self.gradients.begin(Residency.RESIDENT).wait()
            for segment in (self.state, self.masters):
                with suppress(BudgetError):  # without room in the arena, an ordinary copy does, slower
                    segment.begin(Residency.OFFLOADED).wait()
        else:
            self.bring_back()
        for segment in (self.state, self.masters):
            segment.hand_over(target)

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

    def _outside(self, inventory: Inventory, groups: list[list[StateTensor]] | None = None) -> list[list[StateTensor]]:
        """The `groups`, by default all of the device, that lie in no region."""
        groups = inventory.loose(self._mover.device) if groups is None else groups
        taken = self.state.storages | self.masters.storages
        return [group for group in groups if storage_key(group[0].tensor) not in taken]

    def _take_in(self, segment: StateSegment, groups: list[list[StateTensor]]) -> None:
        """Move whole storages, so that tensors that share one still do, a region at a time."""
        if groups:
            segment.begin(Residency.RESIDENT).wait()
        for batch in batches(groups, storage_bytes_of, self._region_bytes):
            segment.adopt(batch, self._mover.device)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer within accelerate's wrappers of it, which have no hooks; any other object as it is."""
    module = sys.modules.get("accelerate.optimizer")  # without which there are none
    while module is not None and isinstance(optimizer, module.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
