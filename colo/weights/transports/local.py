"""The transport within one process where trainer and engine must each own their weights: recorded copies, replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch

from colo.errors import TransferError
from colo.memory.copy_plan import wait_for_queued
from colo.memory.digest import Digest
from colo.memory.load_plan import LoadPlan
from colo.units import MIB, batches
from colo.weights.sources.base import WeightSource
from colo.weights.transports.base import CopyingTransport

if TYPE_CHECKING:
    from colo.engine import Engine

T = TypeVar("T")

GATHERED_BYTES = 256 * MIB
"""Bytes of a model sharded over ranks that are whole at a time, or one tensor if that is larger."""


class LocalTransport(CopyingTransport):
    """Copies every weight by the engine's load plan or, where the plan has fallbacks, through the engine's loader.

    Sharded weights are gathered on the way, some at a time.
    """

    name = "local"

    def __init__(
        self, source: WeightSource, engine: Engine, plan: LoadPlan, *, why_not_shared: str, verify: bool = True
    ) -> None:
        self.source = source
        self._verify = verify
        self._given: Digest | None = None  # what the engine's loader was given last
        self._engine = engine
        self._plan = plan
        self.replaces_all = not plan.fallbacks  # an engine's loader may read what it does not write
        self._parts: list[LoadPlan] = []
        """Parts of the plan of at most `GATHERED_BYTES`, or of one larger tensor, where weights are sharded."""

        if source.is_sharded:
            tensors = source.tensors()
            groups = batches(plan.sources, lambda name: tensors[name].nbytes, GATHERED_BYTES)
            self._parts = [plan.subset(names) for names in groups]
        how = f"{len(plan.copies)} recorded copies are replayed"
        if plan.fallbacks:
            name, cause = next(iter(plan.fallbacks.items()))
            how = f"the engine's own loader is used, because of {name}: {cause}"
        self.reason = f"{why_not_shared}; {how}"

    @property
    def working_bytes(self) -> int:
        """Memory for the weights that are whole at a time, and for gathering the last of them."""
        if not self.source.is_sharded:
            return 0
        tensors = self.source.tensors()
        groups = [sum(tensors[name].nbytes for name in part.sources) for part in self._parts]
        return max(groups, default=0) + max(tensor.nbytes for tensor in tensors.values())

    def transfer(self, version: int = 0) -> int:
        """Copy everything and return the bytes written to, or sent through, the engine."""
        if not self._plan.fallbacks:
            num_bytes = sum(self._each(self.source.tensors(), LoadPlan.replay))
            for device in {copy.target.device for copy in self._plan.copies}:
                wait_for_queued(device)  # what goes to another GPU ends in that one's stream
            return num_bytes
        earlier, self._given = self._given, None  # a load that fails leaves an engine that holds neither
        sent_bytes = self.source.given_to(self._load)
        if self._verify:
            self._given = Digest.of(self.source.held(), earlier)
        return sum(t.nbytes for t in self.source.tensors().values()) if sent_bytes is None else sent_bytes

    def verify(self) -> None:
        """Compare every byte that the plan copied. Raises: `TransferError` naming the tensors that differ."""
        different = [] if self._plan.fallbacks else self._differences(self.source.tensors())
        if different:
            raise TransferError(f"{len(different)} tensors differ after the transfer, {different[0]} for one")

    def is_current(self) -> bool:
        """True if every byte that the plan copies is equal or, if the engine's loader is used, was given to it."""
        tensors = self.source.tensors()
        if not self._plan.fallbacks:
            differs = bool(self._differences(tensors))
        else:
            given = self._given
            differs = self._verify and (given is None or bool(given.differs(Digest.of(self.source.held(), given))))
        return not self.source.ranks.any(differs, "comparing weights")

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        with self.source.gathered(tensors) as whole:
            return self._engine.load_weights((name, whole[name]) for name in tensors)

    def _differences(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return [name for found in self._each(tensors, LoadPlan.differences) for name in found]

    def _each(
        self, tensors: Mapping[str, torch.Tensor], do: Callable[[LoadPlan, Mapping[str, torch.Tensor]], T]
    ) -> list[T]:
        """Call `do` for the plan or, if weights have to be gathered, for each part of it in turn."""
        if not self.source.is_sharded:
            return [do(self._plan, tensors)]
        with self.source.gathered({name: tensors[name] for name in self._plan.sources}) as whole:
            # within the block: a rank that raises before it would leave the others in their gathers
            self._plan.check_source(tensors)
            return [do(part, {name: whole[name] for name in part.sources}) for part in self._parts]
