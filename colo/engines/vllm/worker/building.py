"""How the parameters of a model come to lie in slabs while vLLM builds it, before any weight is read.

Large tensors are made there to begin with, the others move as they are registered. When the slabs hold weights already,
because an engine is started again on a trainer's, nothing that a module does to its new parameters may reach them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from colo.units import MIB

_LARGE_BYTES = MIB
"""What torch takes from small blocks of its own, and uses again, is no larger."""


class Slabs(Protocol):
    """Memory for parameters."""

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """Memory with the dtype and shape of a contiguous tensor."""

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Where a tensor lies in it, or `None`."""


@contextmanager
def parameters_in(slabs: Slabs, device: torch.device, *, built_on: torch.device, fill: bool) -> Iterator[None]:
    """Put every parameter that is registered meanwhile into `slabs`, which hold weights already unless `fill`.

    `built_on` is the device of the context that the model is built in, which may lack its number.
    """
    seen: dict[int, nn.Parameter] = {}  # also keeps ids from being reused

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or id(parameter) in seen or is_lazy(parameter) or parameter.device.type != device.type:
            return
        if parameter.numel() and parameter.is_contiguous() and slabs.locate(parameter) is None:
            place = slabs.place(parameter)
            if fill:
                place.copy_(parameter.detach())
            parameter.data = place
        seen[id(parameter)] = parameter

    with ExitStack() as undo:
        undo.callback(register_module_parameter_registration_hook(move).remove)
        if not fill:
            undo.enter_context(_NothingWrittenTo(slabs))
        undo.enter_context(_LargeTensorsIn(slabs, built_on))
        yield


class _LargeTensorsIn(TorchFunctionMode):
    """Makes large tensors in the slabs when `torch.empty` gets no device, as for parameters.

    The mode then sees the context's `torch.device`; vLLM itself passes strings or numbers. A tensor that moved
    later would leave memory behind that torch hardly uses again under vLLM's `max_split_size_mb:20`.
    """

    def __init__(self, slabs: Slabs, built_on: torch.device) -> None:
        super().__init__()
        self._slabs = slabs
        self._built_on = built_on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.empty and isinstance(device, torch.device) and device == self._built_on:
            plain = not kwargs.get("pin_memory") and kwargs.get("out") is None and not kwargs.get("requires_grad")
            like = torch.empty(*args, **(kwargs | {"device": "meta"})) if plain else None
            if like is not None and like.nbytes > _LARGE_BYTES and like.is_contiguous():
                return self._slabs.place(like)
        return func(*args, **kwargs)


class _NothingWrittenTo(TorchDispatchMode):
    """Leaves out operations that would write to the slabs, as modules do that initialize their parameters."""

    def __init__(self, slabs: Slabs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slabs = slabs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = list(_written(func, args, kwargs))
        if torch.Tag.inplace_view in func.tags or not any(self._slabs.locate(tensor) for tensor in written):
            return func(*args, **kwargs)
        count = len(func._schema.returns)
        return None if count == 0 else written[0] if count == 1 else tuple(written)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The arguments that an operation writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            values: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
            yield from (tensor for tensor in values if isinstance(tensor, torch.Tensor))
