"""Tensor subclasses that wrap other tensors: `DTensor`, and the state of quantized optimizers (torchao's)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is of a subclass that wraps others and names them (`__tensor_flatten__`)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(wrapper: Any) -> dict[str, torch.Tensor]:
    """The wrapped tensors by the name of their attribute."""
    named = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    return {name: inner for name, inner in named.items() if isinstance(inner, torch.Tensor)}


def wrapped(like: Any, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A wrapper like `like` around other tensors with the same names, on any device."""
    names, context = like.__tensor_flatten__()
    parts = {name: getattr(like, name) for name in names} | dict(inner)
    made: torch.Tensor = type(like).__tensor_unflatten__(parts, context, like.size(), like.stride())
    return made
