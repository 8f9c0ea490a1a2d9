"""Gradients that FSDP2 keeps whole until they are reduced, as after `set_requires_gradient_sync(False)`.

FSDP2 has no public way to them. They are read from attributes that torch 2.6 to 2.13 have; where those are missing,
such gradients stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn


class HoldsGradient(Protocol):
    """A parameter, or whatever else has a gradient."""

    grad: torch.Tensor | None


class _Accumulated:
    """A gradient that is kept in the dtype in which it is to be reduced, apart from its parameter."""

    own_references = 1
    """References to the gradient that are not other code's: FSDP2's."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = self._held.unsharded_accumulated_grad
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self._held.unsharded_accumulated_grad = gradient


def unreduced(modules: Iterable[nn.Module]) -> list[HoldsGradient]:
    """What holds whole gradients among FSDP2's modules and those within them."""
    found: list[HoldsGradient] = []
    for held in _fsdp_parameters(modules):
        whole = getattr(held, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            found.append(whole)
        if getattr(held, "unsharded_accumulated_grad", None) is not None:
            found.append(_Accumulated(held))
    return found


def _fsdp_parameters(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        for inner in module.modules():
            get_state: Any = getattr(inner, "_get_fsdp_state", None)
            state = get_state() if get_state is not None else None
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in groups:
                yield from getattr(group, "fsdp_params", ())
