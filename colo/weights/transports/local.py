"""The transport within one process where trainer and engine must each own their weights: recorded copies, replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from colo.errors import TransferError
from colo.memory.checksum import Checksums, checksum, values
from colo.memory.fence import wait_for_queued
from colo.memory.tiles import WORD_BYTES, in_words
from colo.units import align_up
from colo.weights.load_plan import LoadPlan
from colo.weights.sources.module import ModuleSource

if TYPE_CHECKING:
    from colo.engines.base import Engine


class LocalTransport:
    """Copies every weight by the engine's load plan or, where the plan has fallbacks, through the engine's loader."""

    name = "local"

    def __init__(
        self, source: ModuleSource, engine: Engine, plan: LoadPlan, *, why_not_shared: str, verify: bool = True
    ) -> None:
        self.source = source
        self._verify = verify
        self._sums: list[int] | None = None
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
        self._sums = None
        self.source.given_to(lambda tensors: self._engine.load_weights(tensors.items()))
        tensors = self.source.tensors()
        if self._verify:
            self._sums = _checksums(tensors)
        return sum(tensor.nbytes for tensor in tensors.values())

    def verify(self) -> None:
        """Compare every byte that the plan copied. Raises: `TransferError` naming the tensors that differ."""
        different = [] if self._plan.fallbacks else self._plan.differences(self.source.tensors())
        if different:
            raise TransferError(f"{len(different)} tensors differ after the transfer, {different[0]} for one")

    def is_current(self) -> bool:
        """Whether every byte that the plan copies is equal or, where the engine's loader is used, what it was given."""
        tensors = self.source.tensors()
        if not self._plan.fallbacks:
            return not self._plan.differences(tensors)
        return not self._verify or (self._sums is not None and self._sums == _checksums(tensors))

    def reconnect(self) -> None:
        """Do nothing: recorded copies go to memory that has outlived the engine, or through its loader."""

    def close(self) -> None:
        """Do nothing."""


def _checksums(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Of every tensor: first of those that are whole words in a row, by device, then of copies of the others."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    copied = []
    for tensor in tensors.values():
        words = in_words(tensor)
        if words is not None:
            by_device.setdefault(tensor.device, []).append(words)
        else:
            copied.append(checksum(_in_a_row(tensor)))
    sums = [
        Checksums([(number, 0, part) for number, part in enumerate(parts)], len(parts), device)
        for device, parts in by_device.items()
    ]
    return [value for of_device in sums for value in values([of_device.compute()])] + copied


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """A copy's bytes, filled up to whole words with zeros."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.new_zeros(align_up(data.numel(), WORD_BYTES))
    whole[: data.numel()] = data
    return whole
