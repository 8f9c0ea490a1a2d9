"""Parts of weights that are spread over ranks: which elements of which tensor lie where, and those of a `DTensor`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from colo.errors import Unsupported
from colo.memory.dtensor import is_dtensor, local_shard
from colo.weights.boxes import Box
from colo.weights.exchange.plan import Slice
from colo.weights.ranks import own_rank

Run = tuple[int, int]
"""The first index of some that follow one another, and the one after the last."""


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A box of elements of one weight, on one rank."""

    name: str
    """Hugging Face name of the weight."""

    offset: tuple[int, ...]
    """First element of the box in the whole weight, an index for each dimension."""

    shape: tuple[int, ...]
    """Its size in each dimension; a zero anywhere is a part without elements."""

    rank: int
    """Global rank of the process that holds it."""

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


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's short name of a tensor's dtype, such as `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


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
                split_factor=getattr(placement, "split_factor", 1),
            )
    held = tuple(sum(stop - start for start, stop in of_dim) for of_dim in runs)
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
