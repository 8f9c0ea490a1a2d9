"""Whole weights of `DTensor`s, gathered one at a time in an order that all ranks keep.

An engine takes whole tensors. Making one is a collective: every rank takes part, in the same order, and one that fails
on the way goes on to the end, since the others wait for it, and tells them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from colo.memory.dtensor import is_dtensor
from colo.weights.ranks import RankGroup


class InTurn(Mapping[str, torch.Tensor]):
    """Weights by name, whole: each is made when it is asked for, and kept until the next one is.

    A context in which every rank asks for the same names in order, each as often in a row as it likes. Raises: at its
    end, `TransferError` with rank and cause when it has failed on another rank. After an interrupt or a failed
    collective on one rank the others wait until its process ends, or for the group's deadline.

    Args:
        names: all names of the mapping.
        ranks: the ranks that take part.
        order: names of the weights that have to be made, in order.
        doing: what the ranks do, for the error.
    """

    def __init__(self, names: Iterable[str], ranks: RankGroup, *, order: Iterable[str], doing: str) -> None:
        self._names = dict.fromkeys(names)
        self._ranks = ranks
        self._left = deque(order)
        self._doing = doing
        self._held: tuple[str, torch.Tensor] | None = None
        self._is_out_of_step = False

    @abstractmethod
    def _whole(self, name: str) -> torch.Tensor:
        """Makes one whole tensor together with the other ranks."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next one takes memory
            self._held = self._make(until=name)
        return self._held[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> InTurn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held = None
        if self._is_out_of_step or (kind is not None and not issubclass(kind, Exception)):
            return
        while self._left:
            self._make(until=self._left[0])
        self._ranks.report_failure(self._doing, error if isinstance(error, Exception) else None)

    def _make(self, *, until: str) -> tuple[str, torch.Tensor]:
        while True:
            name = self._left.popleft()
            self._is_out_of_step = True  # a rank in which a collective fails takes part in none that follows
            whole = self._whole(name)
            self._is_out_of_step = False
            if name == until:
                return name, whole


class Gathered(InTurn):
    """Weights by name: sharded ones are whole only in their turn of `order`, others at any time."""

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
