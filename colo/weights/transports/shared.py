"""The transport that sends nothing: every parameter of the trainer is the engine's memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from colo.errors import StaleWeights
from colo.memory.probe import free_device_bytes
from colo.weights.sources.module import ModuleSource


class SharedTransport:
    """Trainer and engine on one copy of the weights; what is left to do is to check that they still are."""

    name = "shared"

    def __init__(self, source: ModuleSource, aliases: Mapping[str, torch.Tensor]) -> None:
        self._source = source
        self._aliases = aliases
        self.reason = f"all {len(aliases)} parameters are the engine's own memory"

    def transfer(self) -> int:
        """Send nothing: 0 bytes."""
        return 0

    def verify(self) -> None:
        """Raise `StaleWeights` naming the first parameter that is no longer the engine's memory."""
        parameters = self._source.tensors()
        for name, alias in self._aliases.items():
            parameter = parameters.get(name)
            if parameter is None:
                raise StaleWeights(f"the model has no parameter {name} any more, which it shared with the engine")
            if not is_same_memory(parameter, alias):
                raise StaleWeights(
                    f"{name} is no longer the engine's memory ({_describe(parameter)}, shared was {_describe(alias)}): "
                    "something replaced it, such as model.to(dtype), half() or a quantizer. Undo that, or build the "
                    "runtime from the model as it is now"
                )

    def is_current(self) -> bool:
        """True: what the trainer holds is what the engine holds (`verify` checks that it is still so)."""
        return True

    def move_out(self, device: torch.device) -> None:
        """Give every parameter memory of its own on `device`, one at a time, and on the host where there is no room.

        Parameters stay the same objects with the same values; the engine's memory is left as it is.
        """
        for _, parameter in self._source:
            size_bytes = parameter.numel() * parameter.element_size()
            fits = device.type != "cuda" or free_device_bytes(device) > 2 * size_bytes
            parameter.data = parameter.data.to(device if fits else "cpu", copy=True)


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
