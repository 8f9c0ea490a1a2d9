"""Where tensors lie in memory that another process maps, and what is copied there; both travel as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colo.weights.manifest import TensorSpec, arriving

NOWHERE = -1
"""Index of the memory of a tensor without elements."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in one of several pieces of memory."""

    tensor: TensorSpec
    """Name, dtype, shape and strides."""

    memory: int
    """Index of the piece of memory, or `NOWHERE`."""

    offset_bytes: int
    """Where the tensor begins in it."""

    def __post_init__(self) -> None:
        _check_whole("Place", memory=self.memory, offset_bytes=self.offset_bytes)
        if self.memory < NOWHERE or self.offset_bytes < 0:
            raise ValueError(f"{self.tensor.name} cannot lie in memory {self.memory} at {self.offset_bytes}")
        if self.tensor.strides is None:
            raise ValueError(f"{self.tensor.name} needs strides to be found in memory")

    def to_wire(self) -> list[Any]:
        """[*`TensorSpec.to_wire()`, memory, offset in bytes]."""
        return [*self.tensor.to_wire(), self.memory, self.offset_bytes]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> Place:
        """Raises: `TransferError` with what is wrong."""
        with arriving(cls):
            *tensor, memory, offset_bytes = wire
            return cls(TensorSpec.from_wire(tensor), memory, offset_bytes)


@dataclass(frozen=True, slots=True)
class CopySpec:
    """A copy that a loader makes: elements of a parameter, to a place in the engine's memory."""

    shape: tuple[int, ...]
    """Shape of the elements that are read."""

    strides: tuple[int, ...]
    """Their strides in the parameter."""

    offset: int
    """The first of them, counted in elements."""

    target: Place
    """Where they go; `target.tensor.name` is that of the parameter."""

    def __post_init__(self) -> None:
        _check_whole("CopySpec", offset=self.offset, **{f"size {n}": size for n, size in enumerate(self.shape)})
        _check_whole("CopySpec", **{f"stride {n}": stride for n, stride in enumerate(self.strides)})
        if len(self.shape) != len(self.strides) or self.offset < 0:
            raise ValueError(f"{self.name} cannot be read as {self.shape}, {self.strides} from {self.offset}")

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.target.tensor.name

    def to_wire(self) -> list[Any]:
        """[shape, strides, offset, place]."""
        return [list(self.shape), list(self.strides), self.offset, self.target.to_wire()]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> CopySpec:
        """Raises: `TransferError` with what is wrong."""
        with arriving(cls):
            shape, strides, offset, target = wire
            return cls(tuple(shape), tuple(strides), offset, Place.from_wire(target))


def _check_whole(owner: str, **numbers: object) -> None:
    """Raise `TypeError` unless all of `numbers` are integers."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} of a {owner} is an integer, not {number!r}")
