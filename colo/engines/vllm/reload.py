"""vLLM's own layerwise reload, for models that recorded copies cannot bring weights to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from colo.engines.vllm import compat
from colo.errors import TransferError
from colo.weights.manifest import Manifest
from colo.weights.sources.checkpoint import checkpoint_views


class Reload:
    """One reload of one model: complete, or the model cannot compute until a later one is."""

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, model_config: Any, device: torch.device, manifest: Manifest | None = None
    ) -> None:
        """Begin. `manifest` is of everything that will be given, where that is known."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._model = model
        self._model_config = model_config
        self._device = device
        self._manifest = manifest
        self._given: list[str] = []
        compat.before_reload(model)
        initialize_layerwise_reload(model)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], model_type: str | None, *, keep: bool = False) -> None:
        """Load whole tensors, by the names of a transformers model of `model_type`.

        vLLM keeps what it is given until a layer is complete. With `keep` that is the tensors themselves; without, it
        is copies, and the tensors are the caller's again when this returns.
        """
        given = dict(tensors) if keep else {name: tensor.clone() for name, tensor in tensors.items()}
        if not keep:
            self._synchronize()
        rename = compat.renamer(self._model)
        load: Any = self._model.load_weights
        load((rename(name), view) for name, view in checkpoint_views(given, model_type))
        self._given += given

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Attest: post-processing has run on every tensor that was announced, and no layer lacks its weights.

        Raises: `TransferError` otherwise. Layers that it names hold what they held before.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._manifest is not None:
            self._manifest.check_received(self._given)
        unloaded = compat.unloaded_layers(self._model)
        finalize_layerwise_reload(self._model, self._model_config)
        compat.after_reload(self._model)
        self._synchronize()
        if unloaded:
            raise TransferError(
                f"{len(unloaded)} layers of the engine's model got no weights, or not all, {unloaded[0]} for one: the "
                "trainer's model lacks them, or vLLM's loader of this model writes them past its own reload"
            )
        if self._manifest is None:
            return {"num_tensors": len(self._given)}
        return {
            "version": self._manifest.version,
            "num_tensors": len(self._manifest.specs),
            "num_bytes": self._manifest.total_bytes,
        }

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def check_begun(reload: Reload | None) -> Reload:
    """The reload that has begun. Raises: `TransferError` when none has."""
    if reload is None:
        raise TransferError("no reload has begun")
    return reload
