"""How many positions a transformers model has, as its config tells. Reads configs alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from colo.engines.embedded.waves import Positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")
"""What configs call it, of those that vLLM reads."""


def positions_of(config: PretrainedConfig) -> Positions:
    """The positions of a model of `config`: the smallest limit that it names, as in vLLM.

    Dynamic NTK frequencies change with every token beyond `max_position_embeddings`. A trainer could not compute such
    tokens again, so that they are not offered.
    """
    text = config.get_text_config()
    found = [value for key in _KEYS if isinstance(value := getattr(text, key, None), int) and value > 0]
    boundaries = [
        rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for rope in _ropes(getattr(text, "rope_parameters", None))
        if rope.get("rope_type", rope.get("type")) == "longrope"
    ]
    return Positions(count=min(found, default=None), boundary=min(filter(None, boundaries), default=None))


def _ropes(parameters: Any) -> Iterable[Mapping[str, Any]]:
    """The settings of rotary embeddings: one set, or one for every kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]
