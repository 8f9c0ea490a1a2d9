"""The policy that a KL term compares with: the model as training began.

Knows models and their log-probabilities; knows nothing of runtimes, losses or completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from colo.errors import BudgetError, Unsupported
from colo.memory.dtensor import is_dtensor
from colo.memory.probe import available_host_bytes, free_device_bytes
from colo.units import format_bytes
from colo.weights.sources.peft import adds_nothing, is_peft_model

T = TypeVar("T")


class Reference:
    """A frozen policy of a model that is being trained.

    A model whose adapter adds nothing yet, as new ones do, is its own reference with the adapter switched off: that
    takes no memory. Of any other adapter (PiSSA and others, which rewrite the base and start from the rest of it; one
    that was trained before) the tensors are copied, and of a model that is trained as a whole the weights, to the host:
    `size_bytes` of them (pinned on a machine with a GPU). They are on the device a second time during `run`: before a
    backward pass, where there are no gradients yet, which take as much.
    """

    def __init__(self, model: nn.Module) -> None:
        """Freeze the present weights.

        Raises: `BudgetError` where the host has no room for them; `Unsupported` for weights that are sharded over
        ranks.
        """
        self._model = model
        self._kept: dict[str, Tensor] = {}
        if not is_peft_model(model):
            held = model.state_dict().keys()
            buffers = {name: buffer for name, buffer in model.named_buffers() if name in held}
            self._kept = _copied(dict(model.named_parameters()) | buffers)
        elif not adds_nothing(model):
            self._kept = _copied({name: p for name, p in model.named_parameters() if p.requires_grad})

    @property
    def size_bytes(self) -> int:
        """Host memory that the frozen weights take."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    @torch.no_grad()
    def run(self, compute: Callable[[Any], T]) -> T:
        """Call `compute` with the frozen model, in evaluation mode and without gradients.

        Raises: `BudgetError` where the device has no room for its weights.
        """
        with evaluating(self._model):
            if not self._kept:
                with _without_adapter(self._model):
                    return compute(self._model)
            return self._run_frozen(compute)

    def _run_frozen(self, compute: Callable[[Any], T]) -> T:
        device = next(self._model.parameters()).device
        free_bytes = free_device_bytes(device) + _cached_bytes(device)
        if device.type != "cpu" and self.size_bytes > free_bytes:
            raise BudgetError(
                f"the reference of the KL term needs {format_bytes(self.size_bytes)} of the device beside the model, "
                f"and {format_bytes(free_bytes)} are free: train a new adapter (lora=...), whose reference is the "
                "model without it, set kl_coefficient to 0, or lower RuntimeConfig.kv_cache_bytes",
                needed_bytes=self.size_bytes,
                free_bytes=free_bytes,
            )
        frozen = {f"model.{name}": t.to(device, non_blocking=True) for name, t in self._kept.items()}
        result: T = torch.func.functional_call(_Call(self._model, compute), frozen, ())
        return result


def _cached_bytes(device: torch.device) -> int:
    """Freed device memory that torch's allocator keeps and reuses, such as that of the last step's gradients."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


class _Call(nn.Module):
    """A function of a model as a module around that, for `functional_call` to put other weights in."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self) -> Any:
        return self.function(self.model)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host."""
    if any(is_dtensor(tensor) for tensor in tensors.values()):
        raise Unsupported(
            "a KL term over weights that are sharded over ranks is not there yet: train a new adapter, one that starts "
            "at zero, or set kl_coefficient to 0"
        )
    needed_bytes, free_bytes = sum(t.nbytes for t in tensors.values()), available_host_bytes()
    if needed_bytes > free_bytes:
        raise BudgetError(
            f"the reference of the KL term is a copy of the weights, {format_bytes(needed_bytes)} of host memory, and "
            f"{format_bytes(free_bytes)} are available: free some, train a new adapter (lora=...), whose reference is "
            "the model without it, or set kl_coefficient to 0",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )
    return {name: _on_host(tensor.detach()) for name, tensor in tensors.items()}


def _on_host(tensor: Tensor) -> Tensor:
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
    return kept.copy_(tensor)


@contextmanager
def _without_adapter(model: Any) -> Iterator[None]:
    if hasattr(model, "disable_adapter"):  # PEFT's own model
        with model.disable_adapter():
            yield
        return
    model.disable_adapters()  # one that transformers has added
    try:
        yield
    finally:
        model.enable_adapters()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off; every module is left in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
