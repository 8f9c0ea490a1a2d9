"""A bucket: the state of some parameters, which moves by itself and only for as long as a step handles it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from colo.memory.offload import Mover
from colo.memory.region import Region, ResizedRegion
from colo.phases.phase import TRAINER_BUCKET, Residency
from colo.trainer.inventory import StateTensor
from colo.trainer.stand_ins import swap_content
from colo.trainer.state_segment import StateSegment


class StateBucket(StateSegment):
    """A segment of the state of some parameters, whose device memory is torch's.

    Unlike regions of `allocate_region`, whose pages go to the driver and come from it at every move, what one bucket
    gives back is what torch's allocator gives the next: the driver, beside whose work copies make no headway, is not
    asked within a step.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        *,
        mover: Mover,
        expected_bytes: int,
        largest_bytes: int,
        transient_bytes: int,
        on_touch: Callable[[StateBucket], None],
    ) -> None:
        """`on_touch` brings the bucket back, or raises."""
        super().__init__(TRAINER_BUCKET, mover=mover, on_touch=lambda _: on_touch(self), is_master=False)
        self.parameters = parameters
        self.expected_bytes = expected_bytes
        self.largest_bytes = largest_bytes
        """The most that the first step is expected to make for one parameter."""

        self.transient_bytes = transient_bytes
        """What the step of these parameters takes beside their state."""

        self.is_made = False
        """Whether a step has made the state; until then there may be masters alone."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the state, what a first step is expected to make included."""
        return self.present_bytes + self.bytes_to_come

    @property
    def present_bytes(self) -> int:
        """Bytes of the state that there is."""
        return sum(region.size_bytes for region in self.regions)

    @property
    def bytes_to_come(self) -> int:
        """Bytes that the first step is expected to make."""
        return 0 if self.is_made else self.expected_bytes

    @property
    def is_here(self) -> bool:
        """Whether it holds bytes of the device."""
        return self.device_bytes > 0

    def takes(self, found: StateTensor) -> bool:
        """Masters are stepped with the rest, and move with it."""
        return True

    def tensors_among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Find those of `tensors` that are in this bucket."""
        own = {
            id(place.tensor)
            for region, places in self._places.items()
            for place in places
            if place.is_away or self._lies_in(place, region)  # and has not been given other bytes since
        }
        return [tensor for tensor in tensors if id(tensor) in own]

    def let_out(self, tensor: torch.Tensor) -> None:
        """Give a tensor ordinary device memory, where it stays from now on. Ordering: while the bucket is resident."""
        assert self.residency is Residency.RESIDENT, "its bytes are there"
        for places in self._places.values():
            for place in [place for place in places if place.tensor is tensor]:
                swap_content(tensor, tensor.detach().clone())
                place.forget()
                places.remove(place)

    def _allocate(self, size_bytes: int, device: torch.device) -> Region:
        return ResizedRegion(self.name, size_bytes, device)
