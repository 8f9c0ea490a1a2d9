"""What vLLM's bitsandbytes loader leaves in a model: packed weights by the names of a transformers model.

In vLLM 0.26 it is part of vLLM, later of `vllm-bnb-plugin`, and the same in both: a fused parameter holds the packed
layers one after another, with the state of each and where it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.utils import get_packed_modules_mapping

from colo.engines.vllm import compat
from colo.errors import Unsupported
from colo.memory.load_plan import Copy, LoadPlan
from colo.weights.packed import PackedWeight
from colo.weights.sources.checkpoint import checkpoint_views


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
