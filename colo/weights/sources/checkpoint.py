"""A transformers model's parameters under the names that its checkpoints use: what an engine's loader expects.

Since version 5 transformers stacks the experts of a layer, while checkpoints name each expert's matrices. Its own way
back (`revert_weight_conversion`) copies them; these are views, so that a load plan can follow them to the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

_EXPERTS = ".experts."


_USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")
_NAMES = {
    "deepseek_v3": _USUAL,
    "glm4_moe": _USUAL,
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "olmoe": _USUAL,
    "qwen2_moe": _USUAL,
    "qwen3_moe": _USUAL,
}
"""By `model_type`, what checkpoints call transformers' `mlp` and its gate, up and down projections."""


def checkpoint_views(tensors: Mapping[str, torch.Tensor], model_type: str | None) -> list[tuple[str, torch.Tensor]]:
    """Views that together are `tensors`, by their names in a checkpoint; in order, experts in a parameter's place.

    For the model types above `experts.gate_up_proj` [E, 2I, H] becomes E pairs of projections [I, H], and
    `experts.down_proj` [E, H, I] becomes E matrices [H, I]. Everything else is passed through. Meta tensors will do.
    """
    names = _NAMES.get(model_type or "")
    if names is None:
        return list(tensors.items())
    return [view for name, tensor in tensors.items() for view in _views(name, tensor, names)]


def _views(name: str, tensor: torch.Tensor, names: tuple[str, str, str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    block, gate, up, down = names
    name = name.replace(".mlp.", f".{block}.")
    prefix, _, projection = name.rpartition(_EXPERTS)
    if not prefix or tensor.dim() != 3 or projection not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    parts = (gate, up) if projection == "gate_up_proj" else (down,)
    for index, expert in enumerate(tensor.unbind()):
        for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{prefix}{_EXPERTS}{index}.{part}.weight", matrix
