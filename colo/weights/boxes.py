"""Boxes of elements: which meet, what is left of one without another, a recorded copy as boxes, and those of a rank.

A box is a range of indices in every dimension of a whole tensor. What a rank holds of a weight is a box; what an engine
copies out of it is one too, nearly always, and where not it is several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from colo.errors import Unsupported
from colo.memory.share import dtype_name
from colo.memory.storage import is_dtensor, local_shard
from colo.weights.ranks import own_rank


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A range of indices in each dimension of a tensor."""

    offset: tuple[int, ...]  # the first index in each dimension
    shape: tuple[int, ...]  # number of indices in each dimension

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
        # a scalar's box has no dimensions, and meets every other
        return Box(low, shape) if min(shape, default=1) > 0 else None

    def without(self, other: Box) -> Iterator[Box]:
        """Split the rest of this box, without `other` within it, into boxes."""
        offset, shape = list(self.offset), list(self.shape)
        for dim, (start, size) in enumerate(zip(other.offset, other.shape, strict=True)):
            for low, high in ((offset[dim], start), (start + size, offset[dim] + shape[dim])):
                if low < high:
                    yield Box((*offset[:dim], low, *offset[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :]))
            # what is left to cut has the size of `other` in this dimension, so that no two boxes overlap
            offset[dim], shape[dim] = start, size

    def cut(self, num_elements: int) -> Iterator[Box]:
        """Boxes of at most `num_elements` (at least one) that together are this one, in order."""
        if self.num_elements <= num_elements:
            yield self
            return
        # along the first dimension that can be cut, so that the elements of a piece follow one another
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
    stride: tuple[int, ...]  # for each dimension of the box

    def of(self, part: Box) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Offset, shape and strides of where `part` goes, which lies within the box."""
        steps = zip(part.offset, self.box.offset, self.stride, strict=True)
        return self.offset + sum((a - b) * step for a, b, step in steps), part.shape, self.stride


_Axis = tuple[int, int, int]  # length of one dimension of a copy, and its strides in source and target


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
    # axes of length 1 are left out: torch gives them any stride
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
        # strides without gaps are places of a number, largest first: the offset's digits are the indices
        starts[dim], rest = divmod(rest, step)
        if starts[dim] >= size:
            raise ValueError(f"a copy reads element {offset} of a tensor of {dims[0][0] * dims[0][1]}")
    strides = [0] * num_dims
    for number, (length, step, target_step) in enumerate(axes):
        # an axis is the dimension that has its stride, unless another axis is that one already
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


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of one weight that a rank holds, or that its engine takes."""

    name: str
    box: Box
    dtype: str  # dtype of the memory that it lies in, or goes to: a key of `DTYPE_BYTES`


Run = tuple[int, int]  # the first index of some that follow one another, and the one after the last


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A box of elements of one weight, on one rank."""

    name: str  # Hugging Face name of the weight
    offset: tuple[int, ...]  # first element of the box in the whole weight, an index for each dimension
    shape: tuple[int, ...]  # its size in each dimension; a zero anywhere is a part without elements
    rank: int  # global rank of the process that holds it
    tensor: torch.Tensor | None = None
    """The elements, of shape `shape`, with the trainer's dtype and its memory; `None` for a part of another rank."""

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape) or min((*self.offset, *self.shape), default=0) < 0:
            raise ValueError(f"{self.name} has no part of shape {self.shape} at {self.offset}")
        if self.tensor is not None and tuple(self.tensor.shape) != self.shape:
            raise ValueError(f"a part of {self.name} has shape {tuple(self.tensor.shape)}, its place {self.shape}")


def parts_of(name: str, tensor: torch.Tensor) -> list[PlacedPart]:
    """This rank's boxes of a tensor; several where `_StridedShard` leaves a rank rows that are apart.

    Raises: `Unsupported` for partial sums, whose elements no rank holds.
    """
    if not is_dtensor(tensor):
        return [PlacedPart(name, (0,) * tensor.dim(), tuple(tensor.shape), own_rank(), tensor.detach())]
    return list(_parts(name, tensor))


def slices_of(parts: Iterable[PlacedPart]) -> list[Slice]:
    """A rank's words about its parts, for others."""
    return [Slice(p.name, Box(p.offset, p.shape), dtype_name(p.tensor)) for p in parts if p.tensor is not None]


def shard_of(runs: Sequence[Run], *, count: int, number: int, split_factor: int = 1) -> list[Run]:
    """The indices that shard `number` of `count` has of the given ones, as `Shard` and `_StridedShard` deal them out.

    `_StridedShard` cuts into `split_factor` chunks, and takes from each.
    """
    chunks = (_chunk(runs, split_factor, index) for index in range(split_factor))
    merged: list[Run] = []
    for start, stop in itertools.chain.from_iterable(_chunk(chunk, count, number) for chunk in chunks):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _chunk(runs: Sequence[Run], count: int, number: int) -> list[Run]:
    """Chunk `number` of `count`, cut as by `torch.chunk`: the last ones may be short or empty."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // count)
    low, high, passed = number * size, min(total, (number + 1) * size), 0
    found = []
    for start, stop in runs:
        first, last = max(start, start + low - passed), min(stop, start + high - passed)
        if first < last:
            found.append((first, last))
        passed += stop - start
    return found


def _parts(name: str, tensor: Any) -> Iterator[PlacedPart]:
    mesh, local = tensor.device_mesh, local_shard(tensor.detach())
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # not of the mesh
        return
    runs: list[list[Run]] = [[(0, size)] if size else [] for size in tensor.shape]
    for number, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise Unsupported(f"{name} is a partial sum on each rank ({placement}): redistribute it first")
        if not placement.is_replicate():
            runs[placement.dim] = shard_of(
                runs[placement.dim],
                count=mesh.size(number),
                number=coordinate[number],
                # of `_StridedShard` only, which FSDP2 makes over tensor parallelism
                split_factor=getattr(placement, "split_factor", 1),
            )
    held = tuple(sum(stop - start for start, stop in of_dim) for of_dim in runs)
    # a shard without elements may have any shape that is empty
    if (local.numel() or 0 not in held) and held != tuple(local.shape):
        raise Unsupported(f"{name} has a part of shape {tuple(local.shape)} here, and {held} by {tensor.placements}")
    for box in itertools.product(*(_with_places(of_dim) for of_dim in runs)):
        part = local
        for dim, (place, start, stop) in enumerate(box):
            part = part.narrow(dim, place, stop - start)
        yield PlacedPart(name, tuple(start for _, start, _ in box), tuple(part.shape), own_rank(), part)


def _with_places(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Each run, and before it its place in the local tensor."""
    places = itertools.accumulate((stop - start for start, stop in runs), initial=0)
    return [(place, start, stop) for place, (start, stop) in zip(places, runs, strict=False)]
