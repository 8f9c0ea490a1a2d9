"""The transport within one process where trainer and engine must each own their weights: recorded copies, replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colo.errors import TransferError
from colo.memory.fence import wait_for_queued
from colo.weights.load_plan import LoadPlan
from colo.weights.sources.module import ModuleSource

if TYPE_CHECKING:
    from colo.engines.base import Engine


class LocalTransport:
    """Copies every weight by the engine's load plan or, where the plan has fallbacks, through the engine's loader."""

    name = "local"

    def __init__(self, source: ModuleSource, engine: Engine, plan: LoadPlan, *, why_not_shared: str) -> None:
        self.source = source
        self._engine = engine
        self._plan = plan
        how = f"{len(plan.copies)} recorded copies are replayed"
        if plan.fallbacks:
            name, cause = next(iter(plan.fallbacks.items()))
            how = f"the engine's own loader is used, because of {name}: {cause}"
        self.reason = f"{why_not_shared}; {how}"

    def transfer(self, version: int = 0) -> int:
        """Copy everything and return the bytes written to, or sent through, the engine."""
        if not self._plan.fallbacks:
            num_bytes = self._plan.replay(self.source.tensors())
            for device in {copy.target.device for copy in self._plan.copies}:
                wait_for_queued(device)  # what goes to another GPU ends in that one's stream
            return num_bytes
        self.source.given_to(lambda tensors: self._engine.load_weights(tensors.items()))
        return sum(tensor.numel() * tensor.element_size() for tensor in self.source.tensors().values())

    def verify(self) -> None:
        """Compare every byte that the plan copied. Raises: `TransferError` naming the tensors that differ."""
        different = [] if self._plan.fallbacks else self._plan.differences(self.source.tensors())
        if different:
            raise TransferError(f"{len(different)} tensors differ after the transfer, {different[0]} for one")

    def is_current(self) -> bool:
        """Whether every byte that the plan copies is equal; true where the plan has fallbacks and cannot tell."""
        return bool(self._plan.fallbacks) or not self._plan.differences(self.source.tensors())

    def reconnect(self) -> None:
        """Do nothing: recorded copies go to memory that has outlived the engine, or through its loader."""

    def close(self) -> None:
        """Do nothing."""
