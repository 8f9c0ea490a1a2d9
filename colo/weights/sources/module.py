"""A transformers model, possibly wrapped by PEFT, as a source of weights in Hugging Face names."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import nn

_COMPILED = "_orig_mod."
_PEFT_PREFIX = "base_model.model."
_PEFT_BASE = ".base_layer."
_ADAPTER_PARTS = (".lora_", ".modules_to_save.", ".lora_magnitude_vector.")


class ModuleSource:
    """The base weights of a model: what an engine loads, without adapters.

    Iterating gives `(name, tensor)` with the names of the plain Hugging Face model, each tied tensor once. Tensors are
    the live parameters, looked up anew each time, so that a parameter somebody replaced is noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if not any(part in name for part in _ADAPTER_PARTS):
                yield plain_name(name), parameter

    def fingerprint(self) -> Hashable:
        """Changes when a base weight is written to or replaced, except through `.data`, which torch does not count."""
        return tuple((tensor.data_ptr(), tensor._version) for _, tensor in self)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every base weight by name."""
        return dict(self)


def plain_name(name: str) -> str:
    """The name that a parameter or module has without PEFT or `torch.compile` around the model."""
    return name.replace(_COMPILED, "").removeprefix(_PEFT_PREFIX).replace(_PEFT_BASE, ".")
