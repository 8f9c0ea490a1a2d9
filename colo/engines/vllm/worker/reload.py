"""vLLM's own layerwise reload, for models that recorded copies cannot bring weights to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from colo.engines.vllm import compat
from colo.errors import TransferError
from colo.memory.load_plan import tensors_in
from colo.memory.storage import storage_key
from colo.weights.sources.names import checkpoint_views


class Reload:
    """One reload of one model: complete, or the model cannot compute until a later one is."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        """Begin."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.tied = _is_tied(model)
        """True if the output layer is the embedding."""

        self._model = model
        self._model_config = model_config
        self._device = device
        self._given: list[str] = []
        self._taken = _Taken()
        compat.before_reload(model)
        initialize_layerwise_reload(model)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], model_type: str | None, *, keep: bool = False) -> None:
        """Load whole tensors, by the names of a transformers model of `model_type`.

        vLLM keeps what it is given until a layer is complete: with `keep` the tensors themselves, otherwise copies.
        """
        given = dict(tensors) if keep else {name: tensor.clone() for name, tensor in tensors.items()}
        if not keep:
            self._synchronize()
        rename = compat.renamer(self._model)
        load: Any = self._model.load_weights
        self._taken.expect(given)
        with self._taken:
            load((rename(name), view) for name, view in checkpoint_views(given, model_type))
        self._given += given

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Check that post-processing has run on every tensor, and that no layer lacks weights.

        `left_out` counts the elements taken of tensors that the model has not taken whole. Raises: `TransferError`
        naming layers that lack weights, which hold what they held before.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        # before the reload is ended, which drops vLLM's notes of what each layer got
        unloaded = compat.unloaded_layers(self._model)
        with self._taken:
            finalize_layerwise_reload(self._model, self._model_config)
        compat.after_reload(self._model)
        self._synchronize()
        if unloaded:
            raise TransferError(
                f"{len(unloaded)} layers of the engine's model got no weights, or not all, {unloaded[0]} for one: the "
                "trainer's model lacks them, or vLLM's loader of this model writes them past its own reload"
            )
        unused = compat.unused(self._model, self._given)
        left_out = {name: count for name, count in self._taken.left_out().items() if name not in unused}
        return {"num_tensors": len(self._given), "left_out": left_out}

    def abandon(self) -> None:
        """End a reload that has failed: layers that are not complete hold what they held before, and can compute."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        compat.forget_loaded(self._model)
        finalize_layerwise_reload(self._model, self._model_config)
        compat.after_reload(self._model)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _is_tied(model: nn.Module) -> bool:
    """Tell whether the output layer is the embedding, which a model's own output layer would then overwrite.

    The configuration does not tell: vLLM 0.30 ties layers that are equal in the checkpoint, and calls them untied.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() and parameter.device.type != "meta":
            names.setdefault(parameter.data_ptr(), []).append(name)
    return any(len(same) > 1 and any("lm_head" in name.split(".") for name in same) for same in names.values())


class _Taken(TorchDispatchMode):
    """Counts the elements of tensors that a loader copies, or notes that it computes with them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves the mode untyped
        self._waiting: dict[int, tuple[str, torch.Tensor]] = {}  # kept, so that no other storage is taken for theirs
        self._counts: dict[str, int] = {}

    def expect(self, given: Mapping[str, torch.Tensor]) -> None:
        """Count for these too. What has been taken whole by now is let go."""
        self._waiting = {key: one for key, one in self._waiting.items() if self._lacks(*one)}
        self._waiting |= {storage_key(tensor): (name, tensor) for name, tensor in given.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            if args[0].device.type != "meta":  # where vLLM only counts for itself
                self._count(args[1], args[1].numel())
        elif not func.is_view:
            for tensor in tensors_in((*args, *(kwargs or {}).values())):
                self._count(tensor, sys.maxsize)
        return func(*args, **(kwargs or {}))

    def left_out(self) -> dict[str, int]:
        """Names of what was not copied whole, nor computed with, and how many elements were copied."""
        return {name: self._counts.get(name, 0) for name, t in self._waiting.values() if self._lacks(name, t)}

    def _count(self, tensor: torch.Tensor, num_elements: int) -> None:
        if (waiting := self._waiting.get(storage_key(tensor))) is not None:
            self._counts[waiting[0]] = self._counts.get(waiting[0], 0) + num_elements

    def _lacks(self, name: str, tensor: torch.Tensor) -> bool:
        return self._counts.get(name, 0) < tensor.numel()


def check_begun(reload: Reload | None) -> Reload:
    """The reload that has begun. Raises: `TransferError` when none has."""
    if reload is None:
        raise TransferError("no reload has begun")
    return reload
