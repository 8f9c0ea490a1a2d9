"""Load plans: the copies that a vLLM worker's own loader makes of a trainer's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.utils import get_packed_modules_mapping

from colo.engines.vllm import compat
from colo.engines.vllm.wire import BITSANDBYTES
from colo.engines.vllm.worker.loader import placement_of
from colo.errors import Unsupported
from colo.memory.load_plan import Copy, LoadPlan
from colo.weights.packed import PackedWeight
from colo.weights.sources.names import checkpoint_views


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


# ---- what vLLM's bitsandbytes loader leaves in a model ---------------------------------------------------------------


# In vLLM 0.26 the loader is part of vLLM, later of `vllm-bnb-plugin`, and the same in both: a fused parameter holds the
# packed layers one after another, with the state of each and where it begins.


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Every packed linear weight by its transformers name. `Unsupported` for 8 bits, and for experts in one piece."""
    parts = get_packed_modules_mapping(model)
    found = {}
    for name, parameter in _packed_parameters(model).items():
        states, starts = parameter.bnb_quant_state, getattr(parameter, "bnb_shard_offsets", None)
        if starts is None or not isinstance(states, Mapping) or parameter.data.dtype != torch.uint8:
            raise Unsupported(f"{name} is packed as no trainer can share it: only linear layers in 4 bits can be")
        module = name.removesuffix(".weight").removesuffix(".base_layer")
        owner, _, leaf = module.rpartition(".")
        leaves = parts.get(leaf, [leaf]) if len(states) > 1 else [leaf]
        if len(leaves) != len(states):
            raise Unsupported(f"{name} holds {len(states)} packed layers, and only {len(leaves)} have names")
        for index, part in enumerate(leaves):
            data = parameter.detach()[int(starts[index]) : int(starts[index + 1])]
            found[f"{owner}.{part}.weight"] = PackedWeight(data=data, quant_state=states[index])
    return found


def record_packed(model: nn.Module, source: dict[str, torch.Tensor], model_type: str | None) -> LoadPlan:
    """The plan of `source`: packed weights as they are, the others as vLLM's loader copies them."""
    packed = packed_weights(model)
    plain = {name: tensor for name, tensor in source.items() if name not in packed}
    inside = _packed_parameters(model)
    destinations = {name: t for name, t in compat.unpadded_parameters(model).items() if name not in inside}
    rename = compat.renamer(model)
    load: Any = model.load_weights
    plan = LoadPlan.record(
        load,
        plain,
        destinations,
        as_checkpoint=lambda tensors: ((rename(n), view) for n, view in checkpoint_views(tensors, model_type)),
    )
    copies, fallbacks = list(plan.copies), dict(plan.fallbacks)
    for name in source.keys() & packed.keys():
        tensor, target = source[name], packed[name].data
        if (tensor.dtype, tensor.shape, tensor.stride()) == (target.dtype, target.shape, target.stride()):
            copies.append(
                Copy(name=name, shape=tuple(tensor.shape), stride=tuple(tensor.stride()), offset=0, target=target)
            )
        else:
            fallbacks[name] = "the engine has packed it (bitsandbytes)"
    return LoadPlan.of(source, copies=copies, fallbacks=fallbacks)


def _packed_parameters(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if hasattr(p, "bnb_quant_state")}
