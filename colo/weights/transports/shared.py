"""The transport that sends nothing: every parameter of the trainer is the engine's memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from colo.errors import StaleWeights
from colo.memory.probe import free_device_bytes
from colo.memory.storage import places_of
from colo.weights.sources.module import ModuleSource


class SharedTransport:
    """Trainer and engine on one copy of the weights. The only work left is to check that they still are."""

    name = "shared"
    shares = True
    replaces_all = False

    def __init__(self, source: ModuleSource, aliases: Mapping[str, torch.Tensor]) -> None:
        self.source = source
        self._aliases = aliases
        self.reason = f"all {len(aliases)} weights are the engine's own memory"
        self._places: dict[str, Hashable] | None = None

    @property
    def working_bytes(self) -> int:
        """0: no byte moves."""
        return 0

    def transfer(self, version: int = 0) -> int:
        """Send nothing: 0 bytes."""
        return 0

    def verify(self) -> None:
        """Raise `StaleWeights` naming the first parameter that is no longer the engine's memory; see `check`."""
        self.check()

    def check(self) -> None:
        """Raise `StaleWeights` naming the first parameter that is no longer the engine's memory, or is new."""
        parameters = self.source.tensors()
        places = places_of(parameters)
        if places == self._places:
            return
        self._places = None
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
        self._places = places

    def is_current(self) -> bool:
        """True: what the trainer holds is what the engine holds (`verify` checks that it is still so)."""
        return True

    def reconnect(self) -> None:
        """Do nothing: the engine has mapped the same memory again."""

    def close(self) -> None:
        """Let go of the engine's memory. Ordering: after `move_out`, which gives the parameters memory of their own."""
        self._aliases = {}
        self._places = None
        self.source.tensors()  # lets go of those that the model no longer has

    def move_out(self, device: torch.device) -> None:
        """Give every parameter memory of its own on `device`, one at a time, or on the host where there is no room."""
        for name, parameter in self.source:
            if name not in self._aliases:
                continue
            size_bytes = parameter.numel() * parameter.element_size()
            fits = device.type != "cuda" or free_device_bytes(device) > 2 * size_bytes
            parameter.data = parameter.data.to(device if fits else "cpu", copy=True)


def is_same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two tensors are the same elements at the same addresses."""
    return (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
