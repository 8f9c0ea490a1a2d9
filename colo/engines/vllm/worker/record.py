"""What a vLLM worker's own loader does with a trainer's parameters, as a load plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from colo.engines.vllm import compat
from colo.engines.vllm.client.options import BITSANDBYTES
from colo.engines.vllm.worker.loader import placement_of
from colo.engines.vllm.worker.packed import record_packed
from colo.errors import Unsupported
from colo.memory.load_plan import LoadPlan
from colo.weights.sources.checkpoint import checkpoint_views


def record(
    model: nn.Module, model_config: Any, device: torch.device, source: dict[str, torch.Tensor], model_type: str | None
) -> LoadPlan:
    """Record the plan of `source`, in the names of a transformers model of `model_type`; no byte is moved.

    Raises: `TransferError` when parameters do not cover the model exactly once; whatever vLLM's loader raises.
    """
    why = _why_not_recorded(model, model_config, device)
    if model_config.quantization == BITSANDBYTES:
        try:
            return record_packed(model, source, model_type)
        except Unsupported as error:
            why = str(error)
    if why:
        return LoadPlan.of(source, fallbacks=dict.fromkeys(source, why))
    rename = compat.renamer(model)

    def as_checkpoint(tensors: Any) -> Iterable[tuple[str, torch.Tensor]]:
        return ((rename(name), view) for name, view in checkpoint_views(tensors, model_type))

    load: Any = model.load_weights
    plan = LoadPlan.record(
        load,
        source,
        compat.unpadded_parameters(model),
        optional=dict(compat.loadable_buffers(model)),
        as_checkpoint=as_checkpoint,
    )
    return replace(plan, unused=compat.unused(model, source))


def _why_not_recorded(model: nn.Module, model_config: Any, device: torch.device) -> str | None:
    """Why copies alone cannot bring new weights to this model, or `None`."""
    placement = placement_of(model)
    if placement is not None and placement.outside:
        name, reason = next(iter(placement.outside.items()))
        return f"{reason} ({name})"
    if model_config.quantization is not None:
        return f"the engine quantizes its weights ({model_config.quantization})"
    if placement is None and device.type == "cpu":
        return "vLLM packs its weights on a CPU: start the engine with load_format='colo'"
    if placement is None:  # colo's loader has seen for itself
        return compat.reworked_weights(model)
    return None
