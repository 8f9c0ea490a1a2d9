"""Boxes of elements: which meet, what is left of one without another, and a recorded copy as boxes. Imports no torch.

A box is a range of indices in every dimension of a whole tensor. What a rank holds of a weight is a box; what an engine
copies out of it is one too, nearly always, and where not it is several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colo.errors import Unsupported


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A range of indices in each dimension of a tensor."""

    offset: tuple[int, ...]
    """The first index in each dimension."""

    shape: tuple[int, ...]
    """Number of indices in each dimension."""

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar's."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """The elements of both, `None` where there are none."""
        low = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(self.offset, self.shape, other.offset, other.shape, low, strict=True)
        )
        return Box(low, shape) if min(shape, default=1) > 0 else None

    def without(self, other: Box) -> Iterator[Box]:
        """Split the rest of this box, without `other` within it, into boxes."""
        offset, shape = list(self.offset), list(self.shape)
        for dim, (start, size) in enumerate(zip(other.offset, other.shape, strict=True)):
            for low, high in ((offset[dim], start), (start + size, offset[dim] + shape[dim])):
                if low < high:
                    yield Box((*offset[:dim], low, *offset[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :]))
            offset[dim], shape[dim] = start, size

    def cut(self, num_elements: int) -> Iterator[Box]:
        """Boxes of at most `num_elements` (at least one) that together are this one, in order."""
        if self.num_elements <= num_elements:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size > 1)
        rows = max(1, num_elements // math.prod(self.shape[dim + 1 :]))
        for start in range(0, self.shape[dim], rows):
            shape = (*self.shape[:dim], min(rows, self.shape[dim] - start), *self.shape[dim + 1 :])
            yield from Box((*self.offset[:dim], self.offset[dim] + start, *self.offset[dim + 1 :]), shape).cut(
                num_elements
            )


@dataclass(frozen=True, slots=True)
class Landing:
    """The way of a box of a tensor to elements of some memory, `stride` apart from `offset` on."""

    box: Box
    offset: int
    stride: tuple[int, ...]
    """For each dimension of the box."""

    def of(self, part: Box) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Offset, shape and strides of where `part` goes, which lies within the box."""
        steps = zip(part.offset, self.box.offset, self.stride, strict=True)
        return self.offset + sum((a - b) * step for a, b, step in steps), part.shape, self.stride


_Axis = tuple[int, int, int]
"""Length of one dimension of a copy, and its strides in source and target."""


def landings(
    tensor: tuple[Sequence[int], Sequence[int]],
    shape: Sequence[int],
    strides: tuple[Sequence[int], Sequence[int]],
    offsets: tuple[int, int],
) -> list[Landing]:
    """A copy out of a tensor of the given shape and strides, as boxes of it and where each goes.

    `strides` and `offsets` are those of the copy in the tensor and in its target. Raises: `Unsupported` for a tensor
    with gaps or overlaps between its elements; `ValueError` for a copy that reads outside of it.
    """
    dims = sorted(
        ((step, size, dim) for dim, (size, step) in enumerate(zip(*tensor, strict=True)) if size != 1), reverse=True
    )
    expected = 1
    for step, size, _ in reversed(dims):
        if step != expected:
            raise Unsupported(f"a tensor of shape {tuple(tensor[0])} has strides {tuple(tensor[1])}, with gaps")
        expected *= size
    if 0 in shape:
        return []
    axes = [(n, a, b) for n, a, b in zip(shape, *strides, strict=True) if n != 1]
    return list(_landings(dims, len(tensor[0]), axes, *offsets))


def _landings(
    dims: list[tuple[int, int, int]], num_dims: int, axes: list[_Axis], offset: int, target: int
) -> Iterator[Landing]:
    """A copy whose axis is no dimension of the tensor is several: one for each index, or for each row it runs into."""
    starts, sizes, rest = [0] * num_dims, [1] * num_dims, offset
    steps = {step: (size, dim) for step, size, dim in dims}
    for step, size, dim in dims:
        starts[dim], rest = divmod(rest, step)
        if starts[dim] >= size:
            raise ValueError(f"a copy reads element {offset} of a tensor of {dims[0][0] * dims[0][1]}")
    strides = [0] * num_dims
    for number, (length, step, target_step) in enumerate(axes):
        size, dim = steps.get(step, (0, -1))
        others = axes[:number] + axes[number + 1 :]
        if not size or sizes[dim] > 1:
            for index in range(length):
                yield from _landings(dims, num_dims, others, offset + index * step, target + index * target_step)
            return
        if starts[dim] + length > size:
            for low, part in _rows((length, step, target_step), starts[dim], size):
                yield from _landings(dims, num_dims, [*part, *others], offset + low * step, target + low * target_step)
            return
        sizes[dim], strides[dim] = length, target_step
    yield Landing(Box(tuple(starts), tuple(sizes)), target, tuple(strides))


def _rows(axis: _Axis, start: int, size: int) -> Iterator[tuple[int, list[_Axis]]]:
    """An axis that runs on into the next rows of `size`: the rest of the first, whole rows, and what is left."""
    length, step, target_step = axis
    head = -start % size
    body = (length - head) // size
    if head:
        yield 0, [(head, step, target_step)] if head > 1 else []
    if body:
        rows = [(body, step * size, target_step * size)] if body > 1 else []
        yield head, [*rows, (size, step, target_step)]
    if tail := length - head - body * size:
        yield head + body * size, [(tail, step, target_step)] if tail > 1 else []
