"""Checksums of memory that depend on where bytes are, so that weights packed in another order do not pass.

The sum is that of `colo.memory.tiles`. Its order does not matter, so the memory may lie in several parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from colo.memory import triton_kernels
from colo.memory.dtensor import local_shard
from colo.memory.tiles import WORD_BYTES, Strided, cut, flat, in_words, runs, sum_of
from colo.units import align_up

_MODULUS = 1 << 64

Part = tuple[int, int, torch.Tensor]
"""Index of the checksum, position of the words within it, and the words themselves (int32, flat)."""


def checksum(data: torch.Tensor) -> int:
    """A 64-bit checksum of `data` (uint8, contiguous, whole words of four bytes), computed where the bytes are.

    Raises: `ValueError` for another length or address.
    """
    words = in_words(data)
    if words is None:
        raise ValueError(f"{data.numel()} bytes at {data.data_ptr():#x} are not words of {WORD_BYTES} bytes")
    (value,) = values([Checksums([(0, 0, words)], 1, data.device).compute()])
    return value


def checksums_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Checksums of each local shard: contiguous ones in place, by device, then the others from a copy."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    copied = []
    for tensor in map(local_shard, tensors):
        words = in_words(tensor)
        if words is not None:
            by_device.setdefault(tensor.device, []).append(words)
        else:
            copied.append(checksum(_in_a_row(tensor)))
    sums = [
        Checksums([(number, 0, part) for number, part in enumerate(parts)], len(parts), device)
        for device, parts in by_device.items()
    ]
    return [value for of_device in sums for value in values([of_device.compute()])] + copied


def values(sums: Sequence[torch.Tensor]) -> list[int]:
    """Wait for results of `Checksums.compute` and return them as numbers below 2^64."""
    return [int(value) % _MODULUS for value in torch.cat(list(sums)).tolist()] if sums else []


class Checksums:
    """Checksums of memory in many places, in one launch on a GPU. Can be computed repeatedly.

    Lifetime: ends with the memory, whose addresses it keeps.
    """

    def __init__(self, parts: Sequence[Part], count: int, device: torch.device) -> None:
        """Prepare `count` checksums; each covers the parts with its index, as if their words lay in one place."""
        self._parts = list(parts)
        self._count = count
        self._device = device
        self._kernels = triton_kernels.kernels(device)
        if self._kernels is not None:
            spans = [(number, position, Strided.of(words)) for number, position, words in parts]
            of = [run for number, position, span in spans for run in runs(span, span, number, position * WORD_BYTES)]
            self._tiles = cut(of).to(device)

    def compute(self) -> torch.Tensor:
        """Queue the computation; returns sums for `values` (int64, shape [count]), on the memory's device."""
        sums = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        if self._kernels is None:
            for number, position, words in self._parts:
                sums[number] += sum_of(words, position)
        elif len(self._tiles):
            self._kernels.walk(self._tiles, sums, "digest")
        return sums


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, padded with zeros to whole words."""
    data = flat(tensor.detach().contiguous()).view(torch.uint8)
    whole = data.new_zeros(align_up(data.numel(), WORD_BYTES))
    whole[: data.numel()] = data
    return whole
