"""The transport that sends nothing: every parameter of the trainer is the engine's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from colo.errors import StaleWeights
from colo.memory.probe import free_device_bytes
from colo.weights.sources.module import ModuleSource, all_modules


class SharedTransport:
    """Trainer and engine on one copy of the weights; what is left to do is to check that they still are."""

    name = "shared"

    def __init__(self, source: ModuleSource, aliases: Mapping[str, torch.Tensor]) -> None:
        self.source = source
        self._aliases = aliases
        self.reason = f"all {len(aliases)} weights are the engine's own memory"
        self._seen: _Seen | None = None

    @property
    def working_bytes(self) -> int:
        """None."""
        return 0

    def transfer(self, version: int = 0) -> int:
        """Send nothing: 0 bytes."""
        return 0

    def verify(self) -> None:
        """Raise `StaleWeights` naming the first parameter that is no longer the engine's memory."""
        if self._seen is not None and self._seen.is_unchanged(self.source.model):
            return
        self._compare()
        self._seen = _Seen.of(self.source.model)

    def _compare(self) -> None:
        parameters = self.source.tensors()
        for name, alias in self._aliases.items():
            parameter = parameters.get(name)
            if parameter is None:
                raise StaleWeights(f"the model has no parameter {name} any more, which it shared with the engine")
            if not is_same_memory(parameter, alias):
                raise StaleWeights(
                    f"{name} is no longer the engine's memory ({_describe(parameter)}, shared was {_describe(alias)}): "
                    "something replaced it, such as model.to(dtype), half(), load_state_dict(assign=True) or a "
                    "quantizer. Undo that, or build the runtime from the model as it is now"
                )

    def is_current(self) -> bool:
        """True: what the trainer holds is what the engine holds (`verify` checks that it is still so)."""
        return True

    def reconnect(self) -> None:
        """Do nothing: the engine has mapped the same memory again."""

    def close(self) -> None:
        """Let go of the engine's memory. Ordering: after `move_out`, which gives the parameters memory of their own."""
        self._aliases = {}
        self._seen = None

    def move_out(self, device: torch.device) -> None:
        """Give every parameter memory of its own on `device`, one at a time, and on the host where there is no room.

        Parameters stay the same objects with the same values; the engine's memory is left as it is.
        """
        for name, parameter in self.source:
            if name not in self._aliases:
                continue
            size_bytes = parameter.numel() * parameter.element_size()
            fits = device.type != "cuda" or free_device_bytes(device) > 2 * size_bytes
            parameter.data = parameter.data.to(device if fits else "cpu", copy=True)


class _Seen:
    """A model whose parameters have been compared: to be looked at in a moment, which comparing by name is not."""

    def __init__(
        self,
        modules: list[int],
        tensors: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, tuple[Any, ...]]],
    ) -> None:
        self._modules = modules
        self._tensors = tensors

    @classmethod
    def of(cls, model: nn.Module) -> _Seen:
        """The model as it is."""
        modules = all_modules(model)
        holders: list[dict[str, Any]] = [held for m in modules for held in (m._parameters, m._buffers) if held]
        tensors = [(held, n, t, _facts(t)) for held in holders for n, t in held.items() if t is not None]
        return cls(list(map(id, modules)), tensors)

    def is_unchanged(self, model: nn.Module) -> bool:
        """Whether modules, parameters and their memory are the same ones."""
        return list(map(id, all_modules(model))) == self._modules and all(
            held.get(name) is tensor and _facts(tensor) == facts for held, name, tensor, facts in self._tensors
        )


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def is_same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are the same elements at the same addresses."""
    return (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
