"""One rank's end of an exchange: what it sends and receives in each bucket, and where that lies in its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from colo.memory.specs import DTYPE_BYTES
from colo.units import align_up
from colo.weights.boxes import Box, Landing
from colo.weights.exchange.plan import Delivery
from colo.weights.sources.parts import PlacedPart

ALIGNMENT_BYTES = 16
"""What a parcel begins at a multiple of in its buffer, so that elements of every width can be read where they lie."""


@dataclass(frozen=True, slots=True)
class Target:
    """A box of a weight in the engine's memory."""

    memory: torch.Tensor
    landing: Landing
    """Where it goes; offset and strides are those in the storage of `memory`."""

    def view(self, box: Box) -> torch.Tensor:
        """Where the elements of `box` go."""
        offset, shape, stride = self.landing.of(box)
        return self.memory.as_strided(shape, stride, offset)


def held_view(part: PlacedPart, box: Box) -> torch.Tensor:
    """The elements of `box` in the part that holds them."""
    view = part.tensor
    assert view is not None, "a rank has the tensors of its own parts"
    for dim, (start, own, size) in enumerate(zip(box.offset, part.offset, box.shape, strict=True)):
        view = view.narrow(dim, start - own, size)
    return view


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one rank sends to another in a bucket: elements in a row, the widest first, so that there are no gaps."""

    peer: int
    deliveries: tuple[Delivery, ...]
    offset: int
    """Where it lies in the bucket's buffer, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return sum(delivery.num_bytes for delivery in self.deliveries)

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its bytes in the bucket's buffer."""
        return buffer[self.offset : self.offset + self.num_bytes]

    def fields(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of its deliveries in the bucket's buffer."""
        sizes = [delivery.num_bytes for delivery in self.deliveries]
        return [
            buffer[start : start + size].view(getattr(torch, delivery.dtype)).view(delivery.box.shape)
            for delivery, size, start in zip(
                self.deliveries, sizes, accumulate(sizes, initial=self.offset), strict=False
            )
        ]


@dataclass(frozen=True, slots=True)
class Round:
    """This rank's parcels of one bucket."""

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    num_bytes: int
    """Bytes of a buffer for all of them."""


def bucket_of(rank: int, deliveries: Iterable[Delivery]) -> Round:
    """The parcels that `rank` sends and receives, one for each peer; both ends put them together alike."""
    outgoing: dict[int, list[Delivery]] = {}
    incoming: dict[int, list[Delivery]] = {}
    for delivery in deliveries:
        if delivery.sender == rank:
            outgoing.setdefault(delivery.receiver, []).append(delivery)
        elif delivery.receiver == rank:
            incoming.setdefault(delivery.sender, []).append(delivery)
    sends, end = _laid_out(outgoing, 0)
    receives, end = _laid_out(incoming, end)
    return Round(sends, receives, end)


def _laid_out(by_peer: dict[int, list[Delivery]], offset: int) -> tuple[tuple[Parcel, ...], int]:
    parcels: list[Parcel] = []
    for peer, deliveries in sorted(by_peer.items()):
        widest_first: Sequence[Delivery] = sorted(deliveries, key=lambda delivery: -DTYPE_BYTES[delivery.dtype])
        parcels.append(Parcel(peer, tuple(widest_first), offset))
        offset = align_up(offset + parcels[-1].num_bytes, ALIGNMENT_BYTES)
    return tuple(parcels), offset
