"""Names of weights in Hugging Face checkpoints, for those of transformers and of Megatron.

Since version 5 transformers stacks the experts of a layer, while checkpoints name each expert's matrices. Its own way
back (`revert_weight_conversion`) copies them; `checkpoint_views` are views, so that a load plan can follow them to the
parameter.

A table maps Megatron's name of a weight to the one in a checkpoint, or to three for queries, keys and values, which
Megatron keeps in one tensor. Weights of a layer are named as within it, experts with `{expert}`. Where Transformer
Engine fuses a norm into the layer behind it, the norm has two names. A family is a union of tables: one of your own is
`FAMILIES["llama"] | {"mlp.extra.weight": "mlp.extra.weight"}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from colo.errors import Unsupported

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
        # gate lies before up, so that each is a view
        for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{prefix}{_EXPERTS}{index}.{part}.weight", matrix


Table = Mapping[str, str | tuple[str, ...]]

EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"

VOCABULARY = frozenset({EMBEDDING, OUTPUT_LAYER})  # weights with a row for each token, which Megatron pads

QKV = frozenset({"self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"})
"""Weights that have queries, keys and values in turns."""

ENDS: Table = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT_LAYER: "lm_head.weight",
}
NORMS: Table = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
ATTENTION: Table = {
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}
LATENT_ATTENTION: Table = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}


def _gated(
    megatrons: str, theirs: str, projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Table:
    """The three matrices of a gated linear unit, whose first two are halves of one to Megatron."""
    halves = ("linear_fc1.weight_w", "linear_fc1.weight_v", "linear_fc2.weight")
    return {f"{megatrons}.{of}": f"{theirs}.{name}.weight" for of, name in zip(halves, projections, strict=True)}


DENSE: Table = _gated("mlp", "mlp")
EXPERTS: Table = {
    "mlp.router.weight": "mlp.gate.weight",
    **_gated("mlp.experts.{expert}", "mlp.experts.{expert}"),
}
SHARED_EXPERT: Table = {
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    **_gated("mlp.shared_experts", "mlp.shared_experts"),
}
MIXTRAL_EXPERTS: Table = {
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    **_gated("mlp.experts.{expert}", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
}
NEXT_TOKENS: Table = {  # of layers that predict more tokens than the next one (MTP)
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}

LLAMA: Table = {**ENDS, **NORMS, **ATTENTION, **DENSE}

FAMILIES: Mapping[str, Table] = MappingProxyType(
    {
        "llama": LLAMA,
        "qwen2": LLAMA,
        "qwen3": LLAMA,
        "qwen3_moe": {**LLAMA, **EXPERTS},
        "glm4_moe": {**LLAMA, **EXPERTS, **SHARED_EXPERT, **NEXT_TOKENS},
        "mixtral": {**ENDS, **NORMS, **ATTENTION, **MIXTRAL_EXPERTS},
        "deepseek_v3": {**ENDS, **NORMS, **LATENT_ATTENTION, **DENSE, **EXPERTS, **SHARED_EXPERT, **NEXT_TOKENS},
    }
)
"""Tables by `model_type` of a transformers config."""

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of Megatron's in terms of a table."""

    entry: str  # its name in the table
    names: tuple[str, ...]  # the weights of a checkpoint that it consists of
    group: int
    """Layers are numbered from 1 on; what comes before them is in group 0, what comes after in the last one."""

    order: tuple[int, int]  # its place within the group


class Names:
    """One family's names, for a model of `num_layers` layers; those for further tokens are numbered after them."""

    def __init__(self, family: str | Table, *, num_layers: int) -> None:
        """Raises: `Unsupported` for a family without a table."""
        if isinstance(family, str) and family not in FAMILIES:
            raise Unsupported(
                f"colo has no table of Megatron's names for {family}, only for {', '.join(FAMILIES)}: pass one as "
                "`family` (colo/weights/sources/names.py says how they look)"
            )
        self.family = family if isinstance(family, str) else "the given table"
        self._table = FAMILIES[family] if isinstance(family, str) else family
        self._order = {entry: number for number, entry in enumerate(self._table)}
        self._num_layers = num_layers

    def is_further(self, name: str) -> bool:
        """True for a checkpoint's weight of a multi-token-prediction (MTP) layer."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= self._num_layers

    def of(self, key: str) -> Named:
        """The checkpoint's names of one of Megatron's tensors. Raises: `Unsupported` for a key in no table."""
        layer = _LAYER.fullmatch(key)
        if layer is None:
            # what is in no layer: the embedding is first, all else follows the last layer
            group, number, within, prefix = 0 if key == EMBEDDING else 1 << 30, 0, key, ""
        else:
            number = int(layer[2]) + (self._num_layers if layer[1] == "mtp" else 0)
            group, within, prefix = number + 1, layer[3], f"model.layers.{number}."
        expert = _EXPERT.match(within)
        entry = _EXPERT.sub("mlp.experts.{expert}.", within)
        if entry not in self._table:
            raise Unsupported(
                f"Megatron's {key} has no name in a Hugging Face checkpoint of {self.family} that colo knows: add "
                f"{entry!r} to its table (colo/weights/sources/names.py), or pass one as `family`"
            )
        found = self._table[entry]
        number = int(expert[1]) if expert else -1
        names = tuple(prefix + name.format(expert=number) for name in ((found,) if isinstance(found, str) else found))
        return Named(entry, names, group, (number, self._order[entry]))
