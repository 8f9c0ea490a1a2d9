"""Gradients in buffers that are there from step to step, as Megatron's data-parallel wrapper has them, as a segment."""

from __future__ import annotations

from collections.abc import Callable

from colo.errors import BudgetError
from colo.memory.offload import Mover
from colo.memory.storage import storage_key
from colo.phases.phase import TRAINER_GRADIENTS
from colo.trainer.inventory import Inventory, Kept
from colo.trainer.megatron import MegatronOptimizers
from colo.trainer.state_segment import StateSegment

_ADVICE = "; after a step, optimizer.zero_grad() drops gradients of main parameters that lie in it"


class GradientBuffers(StateSegment):
    """What `GradientSegment` is for gradients of a parameter each: parked while a rollout needs their room.

    A buffer moves as a whole, with every view of it that Megatron has; one that something else refers to stays.
    """

    staying_bytes = 0
    """What stays is in `kept`."""

    def __init__(self, optimizer: MegatronOptimizers, *, mover: Mover, on_touch: Callable[[str], None]) -> None:
        super().__init__(TRAINER_GRADIENTS, mover=mover, on_touch=on_touch, is_master=False)
        self._optimizer = optimizer
        self._device = mover.device
        self._loose: list[Kept] = []

    @property
    def kept(self) -> list[Kept]:
        """Buffers that stay on the device, and why."""
        found = [*super().kept, *self._loose]
        return [Kept("a buffer of gradients", item.size_bytes, f"{item.reason}{_ADVICE}") for item in found]

    def refresh(self) -> None:
        """Take in buffers and views of them that are new."""
        inventory = Inventory(self._optimizer.gradients)
        self.note(inventory)
        self._loose = []
        for group in inventory.loose(self._device):
            if storage_key(group[0].tensor) in self.storages:
                continue
            reason = inventory.why_it_stays(group)
            if reason is None:
                try:
                    self.adopt([group], self._device)
                    continue
                except BudgetError:
                    reason = "there was no room to gather it"
            self._loose.append(Kept(group[0].name, group[0].tensor.untyped_storage().nbytes(), reason))
