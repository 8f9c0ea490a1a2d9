"""The transport that sends nothing: every parameter of the trainer is the engine's memory."""

from __future__ import annotations

import operator
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
    shares = True
    replaces_all = False

    def __init__(self, source: ModuleSource, aliases: Mapping[str, torch.Tensor]) -> None:
        self.source = source
        self._aliases = aliases
        self.reason = f"all {len(aliases)} weights are the engine's own memory"
        self._seen: _Seen | None = None

    @property
    def working_bytes(self) -> int:
        """Nothing: no byte moves."""
        return 0

    def transfer(self, version: int = 0) -> int:
        """Send nothing: 0 bytes."""
        return 0

    def verify(self) -> None:
        """Raise `StaleWeights` naming the first parameter that is no longer the engine's memory; see `check`."""
        self.check()

    def check(self) -> None:
        """Raise `StaleWeights` naming the first parameter that is no longer the engine's memory, or is new."""
        if self._seen is not None and self._seen.is_unchanged(self.source.model):
            return
        self._compare()
        self._seen = _Seen(self.source.model)

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
        self.source.check_names(parameters)

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
        """Give every parameter memory of its own on `device`, one at a time, or on the host where there is no room."""
        for name, parameter in self.source:
            if name not in self._aliases:
                continue
            size_bytes = parameter.numel() * parameter.element_size()
            fits = device.type != "cuda" or free_device_bytes(device) > 2 * size_bytes
            parameter.data = parameter.data.to(device if fits else "cpu", copy=True)


class _Seen:
    """A model whose parameters have been compared. Keeps the modules, so that no new one has an old one's address."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = all_modules(model)
        holders: list[dict[str, Any]] = [held for m in self._modules for held in (m._parameters, m._buffers)]
        self._holders = [(held, [(name, tensor, _facts(tensor)) for name, tensor in held.items()]) for held in holders]

    def is_unchanged(self, model: nn.Module) -> bool:
        """Whether modules, parameters and their memory are the same ones, and no others have joined them."""
        modules = all_modules(model)
        if len(modules) != len(self._modules) or not all(map(operator.is_, modules, self._modules)):
            return False
        return all(
            len(held) == len(known)
            and all(held.get(name) is tensor and _facts(tensor) == facts for name, tensor, facts in known)
            for held, known in self._holders
        )


def _facts(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return ()
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
