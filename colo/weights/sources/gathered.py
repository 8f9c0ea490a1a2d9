"""Weights that are sharded over the ranks of a trainer, each gathered when it is its turn.

An engine takes whole tensors. Gathering one is a collective: every rank takes part, in the same order, and one that
fails on the way goes on gathering to the end, since the others wait for it, and tells them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from colo.memory.dtensor import is_dtensor
from colo.weights.ranks import RankGroup


class Gathered(Mapping[str, torch.Tensor]):
    """Weights by name, whole: a sharded one is gathered when it is asked for, and kept until the next one is.

    A context in which every rank asks for the same names in `order`, each as often in a row as it likes. Raises: at its
    end, `TransferError` with rank and cause when it has failed on another rank. After an interrupt or a failed
    gathering on one rank the others wait until its process ends, or for the group's deadline.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], order: Iterable[str] | None = None) -> None:
        self._tensors = tensors
        self._ranks = RankGroup(tensors.values())
        self._left = deque(name for name in (tensors if order is None else order) if is_dtensor(tensors[name]))
        self._held: tuple[str, torch.Tensor] | None = None
        self._is_out_of_step = False

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if not is_dtensor(tensor):
            return tensor
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next one takes memory
            self._held = self._gather(until=name)
        return self._held[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Gathered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held = None
        if self._is_out_of_step or (kind is not None and not issubclass(kind, Exception)):
            return
        while self._left:
            self._gather(until=self._left[0])
        self._ranks.report_failure("gathering the weights", error if isinstance(error, Exception) else None)

    def _gather(self, *, until: str) -> tuple[str, torch.Tensor]:
        while True:
            name = self._left.popleft()
            self._is_out_of_step = True  # a rank in which a collective fails takes part in none that follows
            whole = _whole(self._tensors[name])
            self._is_out_of_step = False
            if name == until:
                return name, whole


@torch.no_grad()
def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.detach().full_tensor()
    return whole
