"""Weights that are spread over ranks, each put together whole when it is its turn, out of parts of any layout.

For loaders that compute with whole tensors. `colo.weights.sources.gathered` does the same for `DTensor`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from colo.memory.specs import TensorSpec
from colo.units import MIB
from colo.weights.boxes import Box, Landing
from colo.weights.exchange.agreement import Told, agree_on_parts
from colo.weights.exchange.exchange import Exchange
from colo.weights.exchange.parcels import Target
from colo.weights.exchange.plan import Slice, make_plan
from colo.weights.ranks import RankGroup
from colo.weights.sources.in_turn import InTurn
from colo.weights.sources.parts import PlacedPart
from colo.weights.sources.placed import slices_of

BUCKET_BYTES = 128 * MIB


class Assembled(InTurn):
    """Weights by name, whole in turn in the order of `specs`; to make one is a collective too."""

    def __init__(
        self, specs: Sequence[TensorSpec], parts: Sequence[PlacedPart], ranks: RankGroup, *, device: torch.device
    ) -> None:
        names = [spec.name for spec in specs]
        super().__init__(names, ranks, order=names, doing="putting the weights together")
        self._specs = {spec.name: spec for spec in specs}
        self._parts = [part for part in parts if part.tensor is not None]
        self._device = device
        self._told: Mapping[int, Told] = agree_on_parts(ranks, specs, slices_of(self._parts))

    def _whole(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        box = Box((0,) * whole.dim(), spec.shape)
        held = {rank: [s for s in words.held if s.name == name] for rank, words in self._told.items()}
        taken = {rank: [Slice(name, box, spec.dtype)] for rank in held}
        plan = make_plan(held, taken, order=[name], bucket_bytes=BUCKET_BYTES)
        targets = [Target(whole, Landing(box, 0, tuple(whole.stride())))]
        exchange = Exchange(plan, self._ranks, targets, device=self._device)
        exchange.send([part for part in self._parts if part.name == name])
        return whole
