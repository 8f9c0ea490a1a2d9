"""Checksums of memory that depend on where bytes are, so that weights packed in another order do not pass.

The sum, modulo 2^64, of words of 32 bits, each multiplied by a random odd number of its position. A change of one word
always changes the sum. A change of several is missed with a probability of about 2^-28 at most: this is for signs that
flip alike in two chunks. (With words as wide as the sum, an even number of flipped signs would always cancel.)
The order of summing does not matter, so the memory may lie in several parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch

from colo.memory import tiles, triton_kernels
from colo.memory.dtensor import local_shard
from colo.memory.tiles import WORD_BYTES, in_words
from colo.units import align_up

_COLUMNS, _ROWS, _CHUNKS = 1 << 10, 1 << 10, 1 << 14
"""The number of a position is the product of its column's, its row's and its chunk's (4 MiB; repeats after 64 GiB)."""

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
    """Checksums of memory in many places. Can be computed repeatedly.

    Lifetime: ends with the memory, whose addresses it keeps.
    """

    def __init__(self, parts: Sequence[Part], count: int, device: torch.device) -> None:
        """Prepare `count` checksums; each covers the parts with its index, as if their words lay in one place."""
        self._parts = list(parts)
        self._count = count
        self._device = device
        self._kernels = triton_kernels.kernels(device)
        numbers, positions = [number for number, *_ in parts], [position for _, position, _ in parts]
        lengths = [len(words) for *_, words in parts]
        if self._kernels is None:
            cuts = tiles.cut(positions, lengths, _COLUMNS * _ROWS)
            self._cuts = list(zip(*(column.tolist() for column in cuts), strict=True))
        else:
            assert _COLUMNS * _ROWS % tiles.WORDS == 0, "a tile would cross chunks"
            addresses = [words.data_ptr() for *_, words in parts]
            columns = ((addresses, WORD_BYTES), (positions, 1), (numbers, 0))
            self._tiles = tiles.table(positions, lengths, *columns, device=device)

    def compute(self) -> torch.Tensor:
        """Queue the computation; returns sums for `values` (int64, shape [count]), on the memory's device."""
        sums = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        weights = _weights(_COLUMNS, _ROWS, _CHUNKS, self._device)
        if self._kernels is not None:
            self._kernels.weigh(self._tiles, weights, sums)
            return sums
        within, of_chunk = _within_chunk(_COLUMNS, _ROWS, self._device), weights[2]
        for index, offset, length in self._cuts:
            number, position, words = self._parts[index]
            chunk, start = divmod(position + offset, len(within))
            products = words[offset : offset + length].to(torch.int64).mul_(within[start : start + length])
            sums[number] += products.sum() * of_chunk[chunk % len(of_chunk)]
        return sums


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, padded with zeros to whole words."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.new_zeros(align_up(data.numel(), WORD_BYTES))
    whole[: data.numel()] = data
    return whole


@cache
def _weights(columns: int, rows: int, chunks: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(_odd_numbers(count, seed).to(device) for seed, count in enumerate((columns, rows, chunks), 1))


@cache
def _within_chunk(columns: int, rows: int, device: torch.device) -> torch.Tensor:
    """The number of every position: a product, with half of it mixed in, since changes in a rectangle factor too."""
    of_column, of_row, _ = _weights(columns, rows, 1, device)
    products = of_column * of_row[:, None]
    return (products ^ ((products >> 32) & 0xFFFFFFFF) | 1).view(-1)


def _odd_numbers(count: int, seed: int) -> torch.Tensor:
    """Odd numbers of 64 bits that look random and are always the same (SplitMix64)."""
    numbers, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % _MODULUS
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % _MODULUS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % _MODULUS
        odd = (mixed ^ (mixed >> 31)) | 1
        numbers.append(odd - _MODULUS if odd >= _MODULUS // 2 else odd)
    return torch.tensor(numbers, dtype=torch.int64)
