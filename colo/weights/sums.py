"""Checksums of tensors at one moment, to be compared with what they hold at another.

They are taken at every call to generate, to notice writes that torch does not count. On a GPU the kernel of
`colo.memory.checksum` reads at the speed of the memory; on a CPU a CRC is several times as fast.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from colo.memory.checksum import Checksums, checksums_of, values
from colo.memory.tiles import flat, in_words


class Places:
    """Where tensors are, and facts about them such as an adapter's scalings. Lifetime: keeps the tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], key: list[Hashable]) -> None:
        self.key = key
        self._on_host: list[torch.Tensor] = []
        self._odd: list[torch.Tensor] = []
        parts: dict[torch.device, list[tuple[int, int, torch.Tensor]]] = {}
        for tensor in map(torch.Tensor.detach, tensors):
            words = in_words(tensor)
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                self._on_host.append(flat(tensor).view(torch.uint8))
            elif words is None:
                self._odd.append(tensor)
            else:
                of_device = parts.setdefault(tensor.device, [])
                of_device.append((0, of_device[-1][1] + len(of_device[-1][2]) if of_device else 0, words))
        self._checksums = [Checksums(of_device, 1, device) for device, of_device in parts.items()]

    def compute(self) -> tuple[list[torch.Tensor], list[int]]:
        """A sum for each device, queued and not waited for, and those of tensors that are read at once."""
        crcs = [zlib.crc32(tensor.numpy().data) for tensor in self._on_host]
        return [checksums.compute() for checksums in self._checksums], crcs + checksums_of(self._odd)


@dataclass(frozen=True, slots=True)
class ContentSums:
    """What tensors held, and where they were."""

    places: Places
    _queued: list[torch.Tensor]
    _known: list[int]

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], facts: Sequence[Hashable] = (), earlier: ContentSums | None = None
    ) -> ContentSums:
        """The sums of `tensors` now; with less work where they are in the same places as for `earlier`."""
        key: list[Hashable] = [*((t.data_ptr(), t.nbytes, t.dtype) for t in tensors), *facts]
        places = earlier.places if earlier is not None and earlier.places.key == key else Places(tensors, key)
        return cls(places, *places.compute())

    def is_equal(self, other: ContentSums) -> bool:
        """Whether both are of the same places, with the same facts and the same content. Waits for the sums."""
        if self.places.key != other.places.key or self._known != other._known:
            return False
        return values(self._queued) == values(other._queued)
