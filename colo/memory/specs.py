"""Tensors in words: names, dtypes, shapes, where they lie and what is copied there. All of it travels as JSON.

Imports no torch: dtypes are torch's own short names (`str(tensor.dtype).removeprefix("torch.")`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Self

from colo.errors import TransferError

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("bool", "int8", "uint8"), 1),
        **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
        **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32"), 4),
        **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
        "complex128": 16,
        **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
        "float4_e2m1fn_x2": 1,
    }
)
"""Bytes of one element by torch's short dtype name. `float4_e2m1fn_x2` holds two values in an element, as in torch."""

NOWHERE = -1  # index of the memory of a tensor without elements

_NUM_SHOWN = 5

Wire = Mapping[str, Any]


@contextmanager
def arriving(kind: type) -> Iterator[None]:
    """Raise `TransferError`, with the reason, unless what another process has sent makes a `kind`."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TransferError(f"what arrived is no {kind.__name__}: {missing}") from error


class Words:
    """A dataclass that travels as JSON, by the names of its fields."""

    __slots__ = ()
    within: ClassVar[Mapping[str, type[Words]]] = {}  # fields that are such words themselves

    def to_wire(self) -> dict[str, Any]:
        """Fields by name."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        given |= {name: given[name].to_wire() for name in self.within}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_wire(cls, wire: Wire) -> Self:
        """Raises: `TransferError` with the reason."""
        with arriving(cls):
            given = {field.name: wire[field.name] for field in fields(cls)}  # type: ignore[arg-type]
            return cls(**given | {name: kind.from_wire(given[name]) for name, kind in cls.within.items()})


@dataclass(frozen=True, slots=True)
class TensorSpec(Words):
    """One tensor of a set of weights, without its values."""

    name: str  # the name the sender uses, such as `model.layers.0.mlp.down_proj.weight`
    dtype: str  # a key of `DTYPE_BYTES`, such as `bfloat16`
    shape: tuple[int, ...]
    """Sizes of the dimensions; `()` is a scalar of one element, a zero anywhere makes the tensor empty."""

    strides: tuple[int, ...] | None = None  # strides in elements, where they matter; no part of a manifest

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.dtype, str):
            raise TypeError(f"name and dtype of a TensorSpec are strings, not {self.name!r} and {self.dtype!r}")
        if not self.name:
            raise ValueError("a TensorSpec needs a name")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: unknown dtype {self.dtype!r}; known are {', '.join(sorted(DTYPE_BYTES))}")
        object.__setattr__(self, "shape", _sizes(f"{self.name}: the sizes of a shape", self.shape))
        if self.strides is not None:
            object.__setattr__(self, "strides", _sizes(f"{self.name}: the strides", self.strides))
            if len(self.strides) != len(self.shape):
                raise ValueError(f"{self.name}: {len(self.shape)} dimensions have {len(self.strides)} strides")

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor when contiguous."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Place(Words):
    """A tensor in one of several pieces of memory that another process maps."""

    within = MappingProxyType({"tensor": TensorSpec})
    tensor: TensorSpec  # name, dtype, shape and strides
    memory: int  # index of the piece of memory, or `NOWHERE`
    offset_bytes: int  # start of the tensor in it

    def __post_init__(self) -> None:
        _check_whole("Place", memory=self.memory, offset_bytes=self.offset_bytes)
        if self.memory < NOWHERE or self.offset_bytes < 0:
            raise ValueError(f"{self.tensor.name} cannot lie in memory {self.memory} at {self.offset_bytes}")
        if self.tensor.strides is None:
            raise ValueError(f"{self.tensor.name} needs strides to be found in memory")


@dataclass(frozen=True, slots=True)
class CopySpec(Words):
    """A copy that a loader makes: elements of a parameter, to a place in the engine's memory."""

    within = MappingProxyType({"target": Place})
    shape: tuple[int, ...]  # shape of the elements that are read
    strides: tuple[int, ...]  # their strides in the parameter
    offset: int  # the first of them, counted in elements
    target: Place  # their destination; `target.tensor.name` is the name of the parameter

    def __post_init__(self) -> None:
        for name in ("shape", "strides"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_whole("CopySpec", offset=self.offset, **{f"size {n}": size for n, size in enumerate(self.shape)})
        _check_whole("CopySpec", **{f"stride {n}": stride for n, stride in enumerate(self.strides)})
        if len(self.shape) != len(self.strides) or self.offset < 0:
            raise ValueError(f"{self.name} cannot be read as {self.shape}, {self.strides} from {self.offset}")

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.target.tensor.name


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The tensors that make up a model's weights, in the order in which they travel.

    Sender and receiver each build one. Where they disagree the update is refused with `TransferError`.
    """

    specs: tuple[TensorSpec, ...]  # every tensor once, in order

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(self.specs))
        doubled = [name for name, count in Counter(self.names).items() if count > 1]
        if doubled:
            raise ValueError(f"a manifest names every tensor once, but {_some(doubled)} came more than once")

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names in order."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(spec.size_bytes for spec in self.specs)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the specs in order, in hexadecimal: a plan for one manifest is valid for all with its digest."""
        # without strides: the same weights may lie differently in sender and receiver
        rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    def check_received(self, received: Iterable[str], version: int) -> None:
        """Check that each tensor of `version` arrived once, by name and in any order.

        Raises: `TransferError` naming every kind of difference with its count, and the first few of each.
        """
        expected, counts = set(self.names), Counter(received)
        kinds = {
            "missing": [name for name in self.names if name not in counts],
            "doubled": [f"{name} ({count} times)" for name, count in counts.items() if count > 1],
            "unknown": [name for name in counts if name not in expected],
        }
        problems = [f"{len(found)} {kind}: {_some(found)}" for kind, found in kinds.items() if found]
        if problems:
            raise TransferError(
                f"weights version {version} did not arrive as its manifest says ({len(self.specs)} tensors, "
                f"{self.total_bytes} bytes): {'; '.join(problems)}. Nothing may be generated from them; send all again"
            )


def _sizes(what: str, given: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(given)
    for size in sizes:
        # to Python True is an integer, to JSON it is not
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{what} are integers, not {size!r} in {sizes}")
        if size < 0:
            raise ValueError(f"{what} are not negative, as {size} in {sizes} is")
    return sizes


def _check_whole(owner: str, **numbers: object) -> None:
    """Raise `TypeError` unless all of `numbers` are integers."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} of a {owner} is an integer, not {number!r}")


def _some(items: list[str]) -> str:
    more = len(items) - _NUM_SHOWN
    return ", ".join(items[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
