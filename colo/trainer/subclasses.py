"""Tensor subclasses around other tensors: `DTensor`, and what quantized optimizers keep (torchao's)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is of a subclass that says what it is around (`__tensor_flatten__`)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(wrapper: Any) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper is around, by the attribute that keeps each."""
    named = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    return {name: inner for name, inner in named.items() if isinstance(inner, torch.Tensor)}


def wrapped(like: Any, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A wrapper like `like` around other tensors, by the same names, on whichever device they are."""
    names, context = like.__tensor_flatten__()
    parts = {name: getattr(like, name) for name in names} | dict(inner)
    made: torch.Tensor = type(like).__tensor_unflatten__(parts, context, like.size(), like.stride())
    return made
