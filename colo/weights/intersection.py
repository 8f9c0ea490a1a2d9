"""Parts of a tensor that travel in pieces, put where the copies of a load plan want them.

A piece is a run of a contiguous source tensor's bytes. A recorded copy reads a region of that tensor: all of it, some
rows, or a slice of every row. Where the two meet is at most a block of whole rows and two parts of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from colo.errors import Unsupported
from colo.memory.load_plan import Copy


@dataclass(frozen=True, slots=True)
class _Rows:
    """A copy as rows: `count` rows of `width` elements, `step` elements apart in the source from `offset` on."""

    offset: int
    count: int
    width: int
    step: int
    target: torch.Tensor
    """Shape (count, width)."""

    @classmethod
    def of(cls, copy: Copy) -> _Rows:
        """Raises: `Unsupported` for a region that is more than rows, such as a transposed one."""
        shape, stride, target_stride = _merged(copy.shape, copy.stride, copy.target.stride())
        if len(shape) == 1 and stride[0] != 1:  # a column: rows of one element
            shape, stride, target_stride = (*shape, 1), (*stride, 1), (*target_stride, 1)
        if len(shape) > 2 or stride[-1] != 1:
            raise Unsupported(
                f"{copy.name} is not copied by rows (shape {copy.shape}, strides {copy.stride}) and cannot travel in "
                "pieces: make the buckets as large as this tensor"
            )
        if len(shape) == 1:
            shape, stride, target_stride = (1, *shape), (shape[0], *stride), (shape[0], *target_stride)
        target = copy.target.as_strided(shape, target_stride, int(copy.target.storage_offset()))
        return cls(offset=copy.offset, count=shape[0], width=shape[1], step=stride[0], target=target)

    def within(self, start: int, stop: int, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Targets and sources for elements `start` to `stop` of the tensor, which `memory` (flat) holds."""
        first = max(0, -(-(start - self.offset) // self.step))
        last = min(self.count - 1, (stop - self.offset - self.width) // self.step)
        if first <= last:
            at = self.offset + first * self.step - start
            block = memory.as_strided((last - first + 1, self.width), (self.step, 1), int(memory.storage_offset()) + at)
            yield self.target[first : last + 1], block
        for row in {(start - self.offset) // self.step, (stop - 1 - self.offset) // self.step}:
            if 0 <= row < self.count and not first <= row <= last:
                begin = self.offset + row * self.step
                low, high = max(start, begin), min(stop, begin + self.width)
                if low < high:
                    yield self.target[row, low - begin : high - begin], memory[low - start : high - start]


def intersect(copy: Copy, start: int, memory: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Targets and sources of what `copy` reads from elements `start` on of its source, which flat `memory` holds."""
    return list(_Rows.of(copy).within(start, start + memory.numel(), memory))


def _merged(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same elements in as few dimensions as both strides allow."""
    merged: list[tuple[int, int, int]] = []
    for size, left, right in zip(shape, source, target, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * left and merged[-1][2] == size * right:
            merged[-1] = (merged[-1][0] * size, left, right)
        else:
            merged.append((size, left, right))
    if not merged:
        merged = [(1, 1, 1)]
    sizes, lefts, rights = zip(*merged, strict=True)
    return sizes, lefts, rights
