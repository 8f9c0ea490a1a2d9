"""Tensors that stand where others have been while those are in host memory: to touch one is to ask for its bytes.

A parked tensor has no memory on the device, and reading it would crash the process (on CUDA it destroys the context).
So a stand-in takes its place. It has the same shape, dtype and device but no bytes, and calls its keeper before torch
does anything with it that needs bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colo.errors import PhaseError

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
"""A function of torch, its positional and its keyword arguments, stand-ins among them."""

_TELLS = (
    "shape dtype device layout ndim itemsize nbytes names _version _base is_cuda is_cpu is_meta is_sparse "
    "is_sparse_csr is_quantized is_nested is_mkldnn is_mps is_xpu is_leaf requires_grad grad grad_fn _grad _grad_fn "
    "retains_grad output_nr _backward_hooks size dim numel nelement ndimension element_size stride storage_offset "
    "__len__ __hash__ is_contiguous is_floating_point is_complex is_signed is_inference is_conj is_neg is_pinned "
    "is_same_size get_device"
)
_FACTS = frozenset(_TELLS.split())
"""Attributes and methods of a tensor that need no bytes."""


class Keeper(ABC):
    """Knows where the bytes of parked tensors are."""

    @abstractmethod
    def on_operation(self, call: Call) -> Any:
        """Do what `call` asks for, with the tensors themselves, or raise `PhaseError` with what to do first."""

    def on_missing(self, name: str) -> Any:
        """Look up an attribute that only the parked tensor's class has. Raises: `AttributeError`."""
        raise AttributeError(f"a tensor in host memory has no attribute {name!r}")

    def on_dispatch(self, call: Call) -> Any:
        """Do the same for an operation that reaches torch's dispatcher, from C++. Raises: `PhaseError` by default."""
        raise PhaseError(f"{call[0]} on a tensor whose bytes are in host memory: touch it within `with rt.train():`")


class ParkedTensor(torch.Tensor):
    """Stands in for a tensor of the same shape, strides, dtype and device, and has no bytes of its own."""

    keeper: Keeper

    @staticmethod
    def __new__(cls: type[ParkedTensor], like: torch.Tensor, keeper: Keeper) -> ParkedTensor:
        """A stand-in for `like`, whose bytes `keeper` knows. Holds no reference to `like`."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: ParkedTensor = make(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
            requires_grad=like.requires_grad,
        )
        made.keeper = keeper
        return made

    def __init__(self, like: torch.Tensor, keeper: Keeper) -> None:
        """Nothing more: tensors are made by `__new__`."""

    def __getattr__(self, name: str) -> Any:
        if "keeper" not in self.__dict__:
            raise AttributeError(name)
        return self.keeper.on_missing(name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what needs no bytes, and leave everything else to the keeper."""
        asked = func.__self__.__name__ if _is_descriptor(func) else getattr(func, "__name__", "")
        if asked in _FACTS or (asked == "type" and len(args) == 1 and not kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _first_of((args, kwargs)).keeper.on_operation((func, args, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch names it otherwise
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Leave to the keeper operations that begin in C++, such as a backward pass."""
        return _first_of((args, kwargs)).keeper.on_dispatch((func, args, kwargs or {}))


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap what two tensor objects are, class included. Attributes that were set on an object stay with it.

    References to one object, weak ones too, see the other tensor afterwards. Unlike `torch.utils.swap_tensors` this
    allows other owners in C++; they keep the tensor that they own.
    """
    swap_content(one, other)
    one.__class__, other.__class__ = type(other), type(one)


def swap_content(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange contents, as `exchange` does, between tensors that torch's C++ takes for one class."""
    torch._C._swap_tensor_impl(one, other)


def _is_descriptor(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__" and hasattr(getattr(func, "__self__", None), "__name__")


def _first_of(values: Any) -> ParkedTensor:
    """The first stand-in among arguments, and within lists, tuples and dicts of them."""
    found = _find(values)
    if found is None:
        raise PhaseError("a tensor whose bytes are in host memory was used: touch it within `with rt.train():`")
    return found


def _find(values: Any) -> ParkedTensor | None:
    if isinstance(values, ParkedTensor):
        return values
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, (list, tuple)) or hasattr(values, "mapping"):
        return next((found for value in values if (found := _find(value)) is not None), None)
    return None
