"""Usual GPUs with the memory that CUDA gives programs there, and configs of models that need no hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from colo.units import GIB, MIB, parse_bytes


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU by name. The driver keeps a part of what is sold: 8 GB are 7.6 GiB."""

    name: str
    memory_bytes: int  # `torch.cuda.mem_get_info()[1]`; drivers differ by about 1%, here is the least that was seen


CARDS = tuple(
    Card(name, int(gib * GIB))
    for name, gib in (
        ("RTX 4060", 7.6),
        ("RTX 3060", 11.6),
        ("T4", 14.5),
        ("RTX 4080", 15.5),
        ("L4", 22.0),
        ("A10G", 22.0),
        ("RTX 4090", 23.5),
        ("RTX 5090", 31.3),
        ("A100 40GB", 39.4),
        ("L40S", 44.4),
        ("A6000", 47.4),
        ("H100", 79.1),
        ("H200", 139.7),
        ("B200", 178.3),
    )
)
"""Known cards, the smallest first."""

DEFAULT_CARD = "H100"
"""Planned for where there is no GPU."""


def smallest_card(needed_bytes: int) -> Card | None:
    """Return the first of `CARDS` with so much memory, if there is one."""
    return next((card for card in CARDS if card.memory_bytes >= needed_bytes), None)


def read_card(memory: str | int | None) -> Card:
    """Read a size, such as `80GiB` or a number of bytes, or the name of a card; `None` takes the GPU that is there.

    Raises: `ValueError` for what is neither, and for less than a MiB.
    """
    if memory is None:
        planned = read_card(DEFAULT_CARD)
        return _present() or Card(f"{planned.name}, since no GPU is here", planned.memory_bytes)
    wanted = _plain(memory) if isinstance(memory, str) else None
    named = next((card for card in CARDS if _plain(card.name) == wanted), None)
    if named is not None:
        return named
    try:
        return Card("", parse_bytes(memory, least_bytes=MIB))
    except ValueError as error:
        raise ValueError(f"{error}; or name a card: {', '.join(card.name for card in CARDS)}") from None


def _plain(name: str) -> str:
    return (
        name.lower()
        .replace(" ", "")
        .replace("-", "")
        .removeprefix("nvidia")
        .removeprefix("geforce")
        .removeprefix("rtx")
    )


def _present() -> Card | None:
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Card(found.name, int(found.total_memory))


# ---- configs that come along -----------------------------------------------------------------------------------------

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
_DENSE = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12_288, 36, 32, False),
    "Qwen3-14B": (5120, 17_408, 40, 40, False),
    "Qwen3-32B": (5120, 25_600, 64, 64, False),
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    **{name: _QWEN3 | dict(zip(_SIZES, sizes, strict=True)) for name, sizes in _DENSE.items()},
    "Qwen3-30B-A3B": _QWEN3 | dict(zip(_SIZES, (2048, 6144, 48, 32, False), strict=True)) | _EXPERTS,
}
"""Sizes from `config.json` of the models that README plans and docs/measured.md measures."""


def known_config(model: str) -> dict[str, object] | None:
    """Return the config of one of `MODELS`, with or without `Qwen/` before its name."""
    found = MODELS.get(model.removeprefix("Qwen/"))
    return dict(found) if found is not None else None
