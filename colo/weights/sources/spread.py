"""A `WeightSource` for weights whose placement no tensor describes, such as Megatron's."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from colo.memory.specs import TensorSpec
from colo.units import MIB
from colo.weights.boxes import Box, Landing, PlacedPart, Slice, slices_of
from colo.weights.exchange import Exchange, Target, Told, agree, make_plan
from colo.weights.ranks import RankGroup
from colo.weights.sources.base import InTurn, WeightSource
from colo.weights.sources.module import saved_buffers

BUCKET_BYTES = 128 * MIB  # bytes that travel at a time to a weight that is put together


@runtime_checkable
class PlacedWeights(Protocol):
    """Parts of weights on each of several ranks. `colo.share` takes one in place of a model."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every weight, whole and without data: the same on every rank, in the same order."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """Their names in order, those of a layer together."""

    @property
    def left_out(self) -> Collection[str]:
        """Names of weights that train along but go to no engine."""

    @property
    def stages(self) -> Sequence[nn.Module]:
        """The modules of this rank."""

    @property
    def group(self) -> Any:
        """The process group of the ranks."""

    def parts(self) -> Sequence[PlacedPart]:
        """Parts that this rank holds, the live tensors. Every rank asks."""

    def fingerprint(self) -> Hashable:
        """Changes when a weight of this rank is written to or replaced, except through `.data`."""


class SpreadSource(WeightSource):
    """A `WeightSource` over `PlacedWeights`, which settle names with the places of parts, and refuse others."""

    is_sharded = True

    def __init__(self, placed: PlacedWeights, *, device: torch.device) -> None:
        """`device`: where the parts lie; the group must be able to reduce on it."""
        self._placed = placed
        self._device = device
        self.ranks = RankGroup.of(placed.group, device)
        self.foreign: set[str] = set()

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The stages of this rank."""
        return self._placed.stages

    def specs(self) -> list[TensorSpec]:
        """Every weight that engines are given, whole and without data."""
        return [spec for spec in self._placed.specs if spec.name not in self._placed.left_out]

    def parts(self) -> list[PlacedPart]:
        """Parts of them on this rank."""
        return [part for part in self._placed.parts() if part.name not in self._placed.left_out]

    def memory(self) -> list[torch.Tensor]:
        """Parameters and saved buffers of the stages, with whatever pads them."""
        stages = self._placed.stages
        return [t for stage in stages for t in (*stage.parameters(), *(buffer for _, buffer in saved_buffers(stage)))]

    def places(self) -> tuple[list[torch.Tensor], list[Hashable]]:
        """No tensors, and where each part lies."""
        parts = ((part.offset, part.tensor) for part in self.parts() if part.tensor is not None)
        return [], [(offset, t.data_ptr(), t.dtype, t.shape, t.stride()) for offset, t in parts]

    def groups(self) -> list[list[str]]:
        """Names in order, those of a layer together."""
        groups = ([n for n in names if n not in self._placed.left_out] for names in self._placed.groups)
        return [names for names in groups if names]

    def fingerprint(self) -> Hashable:
        """Changes when a weight of this rank is written to or replaced, except through `.data`."""
        return self._placed.fingerprint()

    def held(self) -> dict[str, torch.Tensor]:
        """The live parts of this rank, by name and place."""
        return {f"{part.name} at {part.offset}": part.tensor for part in self.parts() if part.tensor is not None}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every weight by name, without memory."""
        return {spec.name: _empty(spec) for spec in self.specs()}

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Put each weight together when it is its turn; every rank takes them in order."""
        return Assembled(self.specs(), self.parts(), self.ranks, device=self._device)


class Assembled(InTurn):
    """Weights by name, whole in turn in the order of `specs`, for loaders that compute with them; a collective."""

    def __init__(
        self, specs: Sequence[TensorSpec], parts: Sequence[PlacedPart], ranks: RankGroup, *, device: torch.device
    ) -> None:
        names = [spec.name for spec in specs]
        super().__init__(names, ranks, order=names, doing="putting the weights together")
        self._specs = {spec.name: spec for spec in specs}
        self._parts = [part for part in parts if part.tensor is not None]
        self._device = device
        # once for all weights: the plan of each is made of the same words
        self._told = agree(ranks, Told(tuple(specs), tuple(slices_of(self._parts)), ()))

    def _whole(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        box = Box((0,) * whole.dim(), spec.shape)
        held = {rank: [s for s in words.held if s.name == name] for rank, words in self._told.items()}
        taken = {rank: [Slice(name, box, spec.dtype)] for rank in held}
        plan = make_plan(held, taken, order=[name], bucket_bytes=BUCKET_BYTES)
        targets = [Target(whole, Landing(box, 0, tuple(whole.stride())))]
        exchange = Exchange(plan, self._ranks, targets, device=self._device)
        # the plan knows parts by their index among those of this name
        exchange.send([part for part in self._parts if part.name == name])
        return whole


def _empty(spec: TensorSpec) -> torch.Tensor:
    empty = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
    return nn.Parameter(empty, requires_grad=False) if empty.is_floating_point() else empty
