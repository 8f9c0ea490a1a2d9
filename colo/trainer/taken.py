"""The gradients that a step, which has not ended, has taken in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import TensorWeakRef


class TakenGradients:
    """Notes whose gradients a step has used. One that has changed or was replaced since is another gradient."""

    def __init__(self) -> None:
        self._noted: dict[torch.Tensor, tuple[TensorWeakRef, int]] = {}  # and the writes to each

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient of the parameter was noted, the present one or an earlier one."""
        return parameter in self._noted

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note the present gradients of some parameters."""
        self._noted.update((p, (TensorWeakRef(p.grad), p.grad._version)) for p in parameters if p.grad is not None)

    def present(self) -> list[torch.Tensor]:
        """Parameters that still have the gradients noted of them."""
        return [
            parameter
            for parameter, (gradient, version) in self._noted.items()
            if parameter.grad is not None and gradient() is parameter.grad and parameter.grad._version == version
        ]

    def drop_changed(self) -> None:
        """Forget gradients that have changed."""
        self._noted = {parameter: self._noted[parameter] for parameter in self.present()}

    def drop(self, parameter: torch.Tensor) -> None:
        """Forget the gradient of one parameter, if it was noted."""
        self._noted.pop(parameter, None)

    def clear(self) -> None:
        """Forget all: the step has ended."""
        self._noted.clear()
