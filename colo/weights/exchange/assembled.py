"""Weights that are spread over ranks, each put together whole when it is its turn, out of parts of any layout.

For loaders that compute with whole tensors. Every rank takes part, in the same order, as in
`colo.weights.sources.gathered`, which is for `DTensor`s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import torch

from colo.units import MIB
from colo.weights.boxes import Box, Landing
from colo.weights.exchange.agreement import Told, agree_on_parts
from colo.weights.exchange.exchange import Exchange
from colo.weights.exchange.parcels import Target
from colo.weights.exchange.plan import Slice, make_plan
from colo.weights.manifest import TensorSpec
from colo.weights.ranks import RankGroup
from colo.weights.sources.parts import PlacedPart
from colo.weights.sources.placed import slices_of

BUCKET_BYTES = 128 * MIB


class Assembled(Mapping[str, torch.Tensor]):
    """Weights by name, whole: each is put together when it is asked for, and kept until the next one is.

    A context in which every rank asks for the same names in order, each as often in a row as it likes; to make one is
    a collective too. Raises: at its end, `TransferError` with rank and cause when it has failed on another rank.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], parts: Sequence[PlacedPart], ranks: RankGroup, *, device: torch.device
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._parts = [part for part in parts if part.tensor is not None]
        self._ranks = ranks
        self._device = device
        self._told: Mapping[int, Told] = agree_on_parts(ranks, specs, slices_of(self._parts))
        self._left = deque(self._specs)
        self._held: tuple[str, torch.Tensor] | None = None
        self._is_out_of_step = False

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._specs:
            raise KeyError(name)
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next one takes memory
            self._held = self._assemble(until=name)
        return self._held[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __enter__(self) -> Assembled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held = None
        if self._is_out_of_step or (kind is not None and not issubclass(kind, Exception)):
            return
        while self._left:
            self._assemble(until=self._left[0])
        self._ranks.report_failure("putting the weights together", error if isinstance(error, Exception) else None)

    def _assemble(self, *, until: str) -> tuple[str, torch.Tensor]:
        while True:
            name = self._left.popleft()
            self._is_out_of_step = True  # a rank in which sending fails takes part in nothing that follows
            whole = self._whole(self._specs[name])
            self._is_out_of_step = False
            if name == until:
                return name, whole

    def _whole(self, spec: TensorSpec) -> torch.Tensor:
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        box = Box((0,) * whole.dim(), spec.shape)
        held = {rank: [s for s in words.held if s.name == spec.name] for rank, words in self._told.items()}
        taken = {rank: [Slice(spec.name, box, spec.dtype)] for rank in held}
        plan = make_plan(held, taken, order=[spec.name], bucket_bytes=BUCKET_BYTES)
        targets = [Target(whole, Landing(box, 0, tuple(whole.stride())))]
        exchange = Exchange(plan, self._ranks, targets, device=self._device)
        exchange.send([part for part in self._parts if part.name == spec.name])
        return whole
