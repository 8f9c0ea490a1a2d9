"""The tensors of a trainer's state: where the bytes of each are, and its stand-in while they are away."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, cast

import torch

from colo.errors import PhaseError
from colo.memory.region import Region
from colo.memory.storage import tensor_over
from colo.trainer.stand_ins import Call, Keeper, ParkedTensor, exchange, swap_content
from colo.trainer.subclasses import inner_tensors, wrapped


class Bringer(Protocol):
    """A segment whose tensors are asked for while they are away."""

    def bring_back(self) -> None:
        """Make the segment resident. Raises: `PhaseError` when it cannot come back now, with what to do."""

    def host_copy(self, region: Region) -> torch.Tensor:
        """The bytes of a region in host memory (uint8)."""


class StateSlot(Keeper):
    """One tensor object of the state. Its bytes are in a region; a subclass that wraps tensors has theirs.

    Code that holds the object keeps the same one: it is a stand-in while the bytes are away, and the tensor afterwards.
    Attributes set on it are visible in both.
    """

    def __init__(self, tensor: torch.Tensor, region: Region | None, segment: Bringer, *, name: str) -> None:
        self.tensor = tensor
        """The object that other code holds."""

        self.region = region
        self.name = name
        self._segment = segment
        self._hidden: torch.Tensor | None = None  # while away, the tensor itself

    @property
    def is_away(self) -> bool:
        """Whether the object is a stand-in of this slot's now."""
        return isinstance(self.tensor, ParkedTensor) and self.tensor.__dict__.get("keeper") is self

    @property
    def original(self) -> torch.Tensor:
        """The tensor itself. Its bytes may be away: ask it for its class and shape only."""
        return self._hidden if self._hidden is not None and self.is_away else self.tensor

    @property
    def is_held(self) -> bool:
        """Whether other code refers to the object."""
        return _references_to_tensor(self) > _references_of_one()

    def hide(self) -> None:
        """Put a stand-in in place of the tensor. Idempotent."""
        if self.is_away:
            return
        self._hidden = ParkedTensor(self.tensor, self)
        _hand_over_gradient(self.tensor, self._hidden)
        self._hidden.__dict__ = self.tensor.__dict__
        self.tensor.__dict__["keeper"] = self
        exchange(self.tensor, self._hidden)

    def show(self) -> None:
        """Put the tensor itself back, once its bytes are there. Idempotent."""
        if self.is_away:
            assert self._hidden is not None
            _hand_over_gradient(self.tensor, self._hidden)
            exchange(self.tensor, self._hidden)
        self.forget()

    def move_to(self, memory: torch.Tensor) -> None:
        """Point the tensor to `memory` (uint8), a copy of its region on any device."""
        self.show()
        swap_content(self.tensor, tensor_over(memory, self.tensor))

    def rebuild(self) -> None:
        """Show the tensor. Recreate a subclass whose inner tensors are on another device now."""
        self.show()
        inner = inner_tensors(self.tensor)
        if any(part.device != self.tensor.device for part in inner.values()):
            swap_content(self.tensor, wrapped(self.tensor, inner))

    def forget(self) -> None:
        """Drop the hidden tensor and the link to this slot."""
        self._hidden = None
        if self.tensor.__dict__.get("keeper") is self:
            del self.tensor.__dict__["keeper"]

    def host_copy(self) -> torch.Tensor:
        """A copy of the tensor while it is away, in ordinary host memory."""
        assert self.region is not None
        return tensor_over(self._segment.host_copy(self.region), self.tensor).detach().clone()

    def on_operation(self, call: Call) -> Any:
        """See `Keeper.on_operation`. Assigning `data` replaces bytes that are away; to drop `grad` needs none."""
        function, args, kwargs = call
        if function == torch.Tensor.grad.__set__ and args[1] is None:  # type: ignore[union-attr]
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args)
        if function == torch.Tensor.data.__set__ and args[0] is self.tensor and not isinstance(args[1], ParkedTensor):  # type: ignore[attr-defined]
            self.show()
            self.tensor.data = args[1]
            return None
        self._come_back()
        if args and args[0] is self.tensor:
            function = _as_of(type(self.tensor), function)
        return function(*args, **kwargs)

    def on_missing(self, name: str) -> Any:
        """See `Keeper.on_missing`: bring the bytes back for attributes of tensor subclasses."""
        if not hasattr(type(self.original), name):
            return super().on_missing(name)
        self._come_back()
        return getattr(self.tensor, name)

    def on_dispatch(self, call: Call) -> Any:
        """Do an operation on a tensor subclass that wraps this tensor: its arguments stay the same objects."""
        return self.on_operation(call)

    def _come_back(self) -> None:
        self._segment.bring_back()
        if self.is_away:
            raise PhaseError(f"{self.name} is in host memory and did not come back: use it within `with rt.train():`")


def _as_of(kind: type[torch.Tensor], function: Callable[..., Any]) -> Callable[..., Any]:
    """The override of a `torch.Tensor` method in class `kind`; any other function itself."""
    name = getattr(function, "__name__", "")
    own: Callable[..., Any] = getattr(kind, name, function)
    return own if getattr(torch.Tensor, name, None) is function else function


def _hand_over_gradient(one: torch.Tensor, other: torch.Tensor) -> None:
    """Let the gradient of one tensor be that of another, of which either stands in for the other."""
    with torch._C.DisableTorchFunctionSubclass():
        if one.is_leaf and one.grad is not None:
            other.grad, one.grad = one.grad, None


def can_be_hidden(tensor: torch.Tensor) -> bool:
    """Whether a stand-in can replace a tensor of a subclass: not where `__slots__` change the object's layout."""
    return isinstance(tensor, ParkedTensor) or not any(kind.__dict__.get("__slots__") for kind in type(tensor).__mro__)


def _references_to_tensor(place: StateSlot) -> int:
    return sys.getrefcount(place.tensor)


@cache
def _references_of_one() -> int:
    """The reference count of a tensor that only a slot refers to."""
    return _references_to_tensor(StateSlot(torch.zeros(1), None, cast(Bringer, None), name=""))
