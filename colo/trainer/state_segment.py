"""A segment of the trainer's state: regions and the tensors in them. Stand-ins replace the tensors while away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import ALIGNMENT_BYTES, Region, allocate_region
from colo.memory.storage import storage_bytes, storage_key, tensor_over
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import Residency
from colo.phases.segment import Done, Move
from colo.trainer.inventory import Inventory, Kept, StateTensor, why_memory_stays
from colo.trainer.stand_ins import ParkedTensor, swap_content
from colo.trainer.state_slots import StateSlot, can_be_hidden
from colo.units import align_up, format_bytes


class StateSegment(RegionSegment):
    """A region segment that knows every tensor over its regions, and lets none be read while its bytes are away.

    While it has no regions its size is what the first step is expected to make. A region with references that the
    segment does not know is set aside: it stays on the device, and does not count, until those references are gone.
    `on_touch(name)` is called when a parked tensor is used, and brings the segment back or raises.
    """

    def __init__(self, name: str, *, mover: Mover, on_touch: Callable[[str], None], is_master: bool) -> None:
        super().__init__(name, regions=(), away=Residency.OFFLOADED, mover=mover)
        self.expected_bytes = 0
        """Size of the segment while it has no regions."""

        self._on_touch = on_touch
        self.is_master = is_master
        self._aside: dict[Region, str] = {}  # and why
        self._places: dict[Region, list[StateSlot]] = {}  # of those aside too
        self._wrappers: list[StateSlot] = []

    @property
    def size_bytes(self) -> int:
        """Device bytes when resident; while there is no state yet, what the first step is expected to make."""
        return super().size_bytes if self.regions else self.expected_bytes

    def begin(self, target: Residency) -> Move:
        """Start a move; see `RegionSegment.begin`. Without state nothing moves; what must stay is set aside."""
        leaves = target is Residency.OFFLOADED and self.residency is Residency.RESIDENT
        if leaves:
            self.settle()
            self._set_aside()
        if not self.regions:
            return Done()
        if not leaves:
            return super().begin(target)
        with uninterrupted():
            try:
                for place in self._leaving():
                    place.hide()
                return super().begin(target)
            except BaseException:
                if self.residency is Residency.RESIDENT:
                    self._arrived()
                raise

    def bring_back(self) -> None:
        """Bring the segment back through `on_touch`. Raises: `PhaseError` when there is no room for it now."""
        try:
            self._on_touch(self.name)
        except BudgetError as error:
            raise PhaseError(
                f"{self.name} is in host memory, and the device has no room for {format_bytes(self.size_bytes)} now: "
                "read it within `with rt.train():`, after the backward pass, or before the rollout; "
                "optimizer.state_dict() works in every phase"
            ) from error

    # ---- tensors and their regions ------------------------------------------------------------------------------

    @property
    def kept(self) -> list[Kept]:
        """The regions that are set aside, each by the name of a tensor in it."""
        return [Kept(self._name_of(region), region.size_bytes, reason) for region, reason in self._aside.items()]

    def note(self, inventory: Inventory) -> None:
        """Record every tensor of the state that lies in a region, and close regions without tensors.

        A tensor that the optimizer has dropped still moves with its region while other code holds it.
        """
        if self.residency is not Residency.OFFLOADED:
            self.settle()
        self._note_wrappers(inventory)
        self._note_tensors(inventory)
        self._let_go(inventory)
        if self.residency is not Residency.OFFLOADED:
            self._rejoin()

    def takes(self, found: StateTensor) -> bool:
        """Whether a tensor of the state belongs to this segment rather than to another."""
        return found.is_master is self.is_master

    @property
    def storages(self) -> frozenset[int]:
        """The `storage_key` of every region."""
        return frozenset(self._by_storage())

    def adopt(self, groups: Sequence[Sequence[StateTensor]], device: torch.device) -> None:
        """Move whole storages, each with all tensors over it, into a new region.

        Raises: `BudgetError` when the device has no room for it, `PhaseError` while the segment is away; nothing has
        changed then.
        """
        sizes = [align_up(group[0].tensor.untyped_storage().nbytes(), ALIGNMENT_BYTES) for group in groups]
        region = self._allocate(sum(sizes), device)
        starts = list(accumulate(sizes, initial=0))
        try:
            for group, start_bytes in zip(groups, starts, strict=False):
                content = storage_bytes(group[0].tensor)
                region.bytes.narrow(0, start_bytes, content.numel()).copy_(content)
        except BaseException:
            region.close()
            raise
        with uninterrupted():
            self.add([region])
            self._places[region] = []
            for group, start_bytes in zip(groups, starts, strict=False):
                for found in group:
                    swap_content(found.tensor, tensor_over(region.bytes[start_bytes:], found.tensor))
                    self._places[region].append(StateSlot(found.tensor, region, self, name=found.name))

    def hand_over(self, target: torch.device) -> None:
        """Give every tensor memory of its own kind on `target` and close the regions: away ones become host memory.

        Regions that are aside are left to whoever refers to them. May be called again after an error.
        """
        if self.residency is Residency.RESIDENT:
            self.settle()
            self._set_aside()
        for region in self.regions:
            is_away = self.residency is Residency.OFFLOADED
            memory = self.host_copy(region) if is_away else region.bytes.to(target, copy=True)
            with uninterrupted():
                for place in self._places.get(region, []):
                    place.move_to(memory)
                if is_away:
                    self.give_away(region)
                else:
                    self.remove([region])
                self._places.pop(region, None)
        for region in list(self._aside):
            self._close_region(region)
        for place in self._wrappers:
            place.rebuild()
        self._wrappers.clear()

    def _allocate(self, size_bytes: int, device: torch.device) -> Region:
        return allocate_region(size_bytes, device, name=self.name)

    def _set_aside(self) -> None:
        """Set regions aside that have references unknown to the segment."""
        for region in self.regions:
            tensors = [place.tensor for place in self._places[region] if self._lies_in(place, region)]
            if (reason := why_memory_stays([region.bytes, *tensors])) is not None:
                self.take_out([region])
                self._aside[region] = reason

    def _rejoin(self) -> None:
        for region in list(self._aside):
            tensors = [place.tensor for place in self._places[region]]
            if why_memory_stays([region.bytes, *tensors]) is None:
                self.add([region])
                del self._aside[region]
        self._set_aside()

    def _note_wrappers(self, inventory: Inventory) -> None:
        """Record tensor subclasses of this segment: those in the state, and others that are still held."""
        kept = [place for place in self._wrappers if id(place.tensor) in inventory.wrappers or place.is_held]
        for place in set(self._wrappers).difference(kept):
            place.forget()
        known = {id(place.tensor) for place in kept}
        for key, found in inventory.wrappers.items():
            if key not in known and self.takes(found) and can_be_hidden(found.tensor):
                kept.append(StateSlot(found.tensor, None, self, name=found.name))
        self._wrappers = kept

    def _note_tensors(self, inventory: Inventory) -> None:
        for region, places in self._places.items():
            self._places[region] = [place for place in places if place.is_away or self._lies_in(place, region)]
        regions = self._by_storage()
        known = {id(place.tensor) for places in self._places.values() for place in places}
        for key, found in inventory.tensors.items():
            if key in known or isinstance(found.tensor, ParkedTensor):
                continue
            lies_in = regions.get(storage_key(found.tensor))
            if lies_in is not None:
                self._places[lies_in].append(StateSlot(found.tensor, lies_in, self, name=found.name))

    def _let_go(self, inventory: Inventory) -> None:
        """Forget tensors without references, and close regions that are empty then."""
        for region, places in list(self._places.items()):
            live = [place for place in places if id(place.tensor) in inventory.tensors or place.is_held]
            for place in set(places).difference(live):
                place.forget()
            self._places[region] = live
            if not live:
                self._close_region(region)

    def _by_storage(self) -> dict[int, Region]:
        return {storage_key(region.bytes): region for region in self._places}

    def _lies_in(self, place: StateSlot, region: Region) -> bool:
        if isinstance(place.tensor, ParkedTensor):  # whose bytes, since they were here, have moved to another segment
            return False
        return storage_key(place.tensor) == storage_key(region.bytes)

    def _name_of(self, region: Region) -> str:
        names = [place.name for place in self._places[region]]
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

    def _close_region(self, region: Region) -> None:
        with uninterrupted():
            self._places.pop(region, None)  # none of them is away
            if self._aside.pop(region, None) is None:
                self.remove([region])
            else:
                region.close()

    def _leaving(self) -> list[StateSlot]:
        """Every tensor that moves with the segment."""
        return [place for region in self.regions for place in self._places.get(region, [])] + self._wrappers

    def _arrived(self) -> None:
        for place in self._leaving():
            place.show()
