"""Parts of a Megatron model in this process, as Megatron describes them for its checkpoints.

`sharded_state_dict` with `singleton_local_shards` names layers and experts by their numbers in the whole model, tells
the halves of a gated linear unit apart, and gives each part's place in the whole: over tensor, pipeline (with virtual
stages), expert and expert-tensor parallelism. Nothing here computes a layer's or an expert's number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colo.errors import Unsupported

_SHARDED_WRAPPERS = ("FullyShardedDataParallel", "MegatronFSDP", "TorchFullyShardedDataParallel")
_NO_WEIGHTS = "_extra_state"
"""Suffix of Transformer Engine's extra state, such as scales of its fp8 kernels."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A part of one of Megatron's tensors."""

    key: str
    tensor: torch.Tensor
    """The parameter or buffer itself, or a view of it."""

    whole: tuple[int, ...]
    """Shape of the whole tensor, over all ranks."""

    offset: tuple[int, ...]
    """First index of the part in the whole, per axis."""


def is_megatron(model: object) -> bool:
    """True for a stage of a Megatron model, or a list of stages. Does not import Megatron."""
    module = sys.modules.get("megatron.core.transformer.module")  # without which there are none
    stages = model if isinstance(model, (list, tuple)) else [model]
    return module is not None and bool(stages) and all(isinstance(stage, module.MegatronModule) for stage in stages)


def bare(stages: Sequence[nn.Module]) -> list[Any]:
    """The models within Megatron's data-parallel and mixed-precision wrappers.

    Raises: `Unsupported` for what is no stage of Megatron's, is sharded by FSDP, or computes with other weights than it
    keeps.
    """
    found = []
    if not stages:
        raise Unsupported("there are no stages of a Megatron model in an empty list")
    for stage in stages:
        if not is_megatron(stage):
            raise Unsupported(f"a {type(stage).__name__} is no stage of a Megatron model: pass the list that it made")
        model: Any = stage
        while True:
            if type(model).__name__ in _SHARDED_WRAPPERS:
                raise Unsupported(
                    f"{type(model).__name__} cuts weights over data-parallel ranks, and Megatron does not say where "
                    "the parts lie: use Megatron's DistributedDataParallel with the distributed optimizer "
                    "(use_megatron_fsdp=False, use_torch_fsdp2=False)"
                )
            if not isinstance(getattr(model, "module", None), nn.Module):
                break
            model = model.module
        found.append(model)
    for option, why in _REFUSED.items():
        if getattr(found[0].config, option, False):
            raise Unsupported(f"{option} of Megatron's config is not supported: {why}")
    return found


_REFUSED = {
    "layernorm_zero_centered_gamma": "Megatron's norms are those of a checkpoint less one, and colo copies weights",
    "attention_output_gate": "the rows of its linear_qkv hold a gate that colo does not know the place of",
}


def held_by(stages: Sequence[Any]) -> Iterator[HeldTensor]:
    """Every part of a weight in this process. Nothing is copied, and no other rank is asked.

    Raises: `Unsupported` for what is no plain tensor, or has no place in a whole.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for stage in stages:
        told = stage.sharded_state_dict(metadata={"singleton_local_shards": True, "dp_cp_group": group})
        apply_factories(told)
        for part in nested_values(told):
            if isinstance(part, ShardedObject) and part.key.rpartition(".")[2].startswith(_NO_WEIGHTS):
                continue
            if not isinstance(part, ShardedTensor) or part.data is None:
                name = getattr(part, "key", type(part).__name__)
                raise Unsupported(f"Megatron gives {name} as a {type(part).__name__} and not as a part of a tensor")
            tensor = part.data.detach()
            if type(tensor) is not torch.Tensor or part.prepend_axis_num:
                raise Unsupported(
                    f"{part.key} is a {type(tensor).__name__} of shape {tuple(tensor.shape)} in a whole of "
                    f"{tuple(part.global_shape)}: colo sends plain tensors only (no fp8 parameters)"
                )
            yield HeldTensor(part.key, tensor, tuple(part.global_shape), tuple(part.global_offset))
