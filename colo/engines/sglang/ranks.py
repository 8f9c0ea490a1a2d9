"""Ranks of an SGLang server, and their shares of a model's weights, by their names in a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_VOCABULARIES = {"embed_tokens", "lm_head"}
_KEYS = {"k_proj", "v_proj"}
_BY_ROWS = {"q_proj", "gate_proj", "up_proj", "w1", "w3"} | _KEYS | _VOCABULARIES
_BY_COLUMNS = {"o_proj", "down_proj", "w2"}

_ROWS = 64  # vocabularies are padded with zeros to a multiple of it
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of an engine, and how they share its weights.

    `tp_size` ranks share layers. Experts are dealt out to `ep_size` groups of them, one range after another, and ranks
    of a group share each of theirs. Where there are more ranks than heads of keys, some have the same.
    """

    tp_size: int = 1
    ep_size: int = 1
    num_kv_heads: int = 1
    num_experts: int = 0

    def share(self, name: str, weight: torch.Tensor, rank: int) -> torch.Tensor | None:
        """A rank's part of a weight, by its name in a checkpoint; `None` where it has nothing of it."""
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        count, index = self.tp_size, rank
        if expert := _EXPERT.search(name):
            count = self.tp_size // self.ep_size
            if int(expert[1]) * self.ep_size // self.num_experts != rank // count:
                return None
            index = rank % count
        if module in _KEYS:
            count = min(count, self.num_kv_heads)
            index = rank * count // self.tp_size
        if module in _VOCABULARIES and len(weight) % _ROWS:
            weight = torch.cat([weight, weight.new_zeros(-len(weight) % _ROWS, *weight.shape[1:])])
        if module in _BY_ROWS or (module in _BY_COLUMNS and kind == "weight"):
            return weight.chunk(count, dim=int(module in _BY_COLUMNS))[index]
        return weight
