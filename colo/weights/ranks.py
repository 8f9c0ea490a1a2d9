"""The ranks that a model's weights are sharded over: what they decide together, and failing together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from colo.errors import TransferError
from colo.memory.dtensor import is_dtensor


class RankGroup:
    """The ranks that some tensors (`DTensor`) are sharded over; this process alone where none is.

    Every method but `is_alone` is a collective: all ranks call it, in the same order.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        sharded: list[Any] = [tensor for tensor in tensors if is_dtensor(tensor)]
        self._meshes = list(dict.fromkeys(tensor.device_mesh for tensor in sharded))
        self._device = sharded[0].device if sharded else torch.device("cpu")

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks to agree with."""
        return not self._meshes

    def min(self, count: int) -> int:
        """The smallest `count` of all ranks."""
        if self.is_alone:
            return count
        from torch import distributed

        smallest = torch.tensor(count, device=self._device)
        for group in self._groups():
            distributed.all_reduce(smallest, distributed.ReduceOp.MIN, group=group)
        return int(smallest)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on at least one rank."""
        return self.min(int(not flag)) == 0

    @contextmanager
    def fail_together(self, operation: str) -> Iterator[None]:
        """A block that fails on every rank if it fails on one: elsewhere with `TransferError`, naming rank and cause.

        An interrupt of one rank alone leaves the others waiting until its process ends, or for the group's deadline.
        """
        try:
            yield
        except Exception as error:
            self.report_failure(operation, error)
            raise
        self.report_failure(operation, None)

    def report_failure(self, operation: str, error: Exception | None) -> None:
        """Tell the other ranks how `operation` has ended here. `TransferError` when it has failed elsewhere only."""
        if self.is_alone or not self.any(error is not None):
            return
        causes = self._gather(f"{type(error).__name__}: {error}" if error is not None else None)
        if error is None:
            rank, cause = min(causes.items())
            raise TransferError(f"{operation} failed on rank {rank}: {cause}")

    def _gather(self, cause: str | None) -> dict[int, str]:
        """The causes of all ranks that have one, by rank."""
        from torch import distributed

        causes = {} if cause is None else {distributed.get_rank(): cause}
        for group in self._groups():
            told: list[dict[int, str]] = [{} for _ in range(distributed.get_world_size(group))]
            distributed.all_gather_object(told, causes, group=group)
            causes = {rank: words for part in told for rank, words in part.items()}
        return causes

    def _groups(self) -> Iterator[Any]:
        """A process group for every dimension of every mesh: what all of them have seen, every rank has."""
        for mesh in self._meshes:
            yield from (mesh.get_group(dim) for dim in range(mesh.ndim))
