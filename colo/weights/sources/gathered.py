"""Weights that are sharded over the ranks of a trainer as `DTensor`s, each gathered when it is its turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from colo.memory.dtensor import is_dtensor
from colo.weights.ranks import RankGroup
from colo.weights.sources.in_turn import InTurn


class Gathered(InTurn):
    """Weights by name, the sharded ones whole in turn in `order`, the others as they are at any time."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], order: Iterable[str] | None = None) -> None:
        sharded = [name for name in (tensors if order is None else order) if is_dtensor(tensors[name])]
        super().__init__(tensors, RankGroup(tensors.values()), order=sharded, doing="gathering the weights")
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return super().__getitem__(name) if is_dtensor(tensor) else tensor

    @torch.no_grad()
    def _whole(self, name: str) -> torch.Tensor:
        tensor: Any = self._tensors[name].detach()
        whole: torch.Tensor = tensor.full_tensor()
        return whole
