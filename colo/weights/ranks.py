"""The ranks that a model's weights are spread over: what they decide together, and failing together."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from colo.errors import TransferError
from colo.memory.storage import is_dtensor
from colo.memory.uninterrupted import end_wait

T = TypeVar("T")

_LOOK_AFTER_S = 0.05
_NUMBERS = re.compile(r"\d+")


class RankGroup:
    """The ranks that some tensors (`DTensor`) are sharded over, or those of a group; this process alone without any.

    Every method but `is_alone`, `rank`, `device`, `wire` and `groups` is a collective: all ranks call it, in order.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        sharded: list[Any] = [tensor for tensor in tensors if is_dtensor(tensor)]
        self._meshes = list(dict.fromkeys(tensor.device_mesh for tensor in sharded))
        self.wire: Any = None
        """The process group that ranks send to each other in; `None` is torch's own, of all processes."""

        self.device = _device_of(self._meshes[0]) if sharded else torch.device("cpu")
        """Device of the numbers that ranks compare."""

        self._order: torch.Tensor | None = None

    @classmethod
    def of(cls, group: Any, device: torch.device) -> RankGroup:
        """The ranks of a process group, of more than one; `device` is one that the group can reduce on."""
        ranks = cls()
        ranks.wire, ranks.device = group, device
        return ranks

    @property
    def is_alone(self) -> bool:
        """True if there are no other ranks to agree with."""
        return not self._meshes and self.wire is None

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return own_rank()

    def min(self, count: int, at: str = "") -> int:
        """The smallest `count` of all ranks. `at` says for what it is asked, numbers aside.

        Raises: `TransferError` on every rank when they ask at different points, as when one has left a phase alone.
        """
        if self.is_alone:
            return count
        from torch import distributed

        # not `hash`, which differs from process to process
        point = zlib.crc32(_NUMBERS.sub("", at).encode())
        # the least `point` is also the greatest only if all ranks ask at one point
        smallest = torch.tensor([count, point, -point], device=self.device)
        for group in self.groups():
            with self._named(at or "a comparison"):
                _wait(distributed.all_reduce(smallest, distributed.ReduceOp.MIN, group=group, async_op=True))
        found, first, last = smallest.tolist()
        if first != -last:
            raise TransferError(
                f"the trainer's ranks are out of step: this one, rank {self.rank}, is at {at or 'a comparison'!r}, and "
                "others are elsewhere. Every rank has to make the same calls: one has caught an exception alone, or "
                "has skipped or repeated a phase"
            )
        return int(found)

    def any(self, flag: bool, at: str = "") -> bool:
        """True if `flag` is, on at least one rank; `at` as in `min`."""
        return self.min(int(not flag), at) == 0

    def gather(self, value: T) -> dict[int, T]:
        """The value of every rank, by global rank in order. Values are pickled."""
        known = {self.rank: value}
        if self.is_alone:
            return known
        from torch import distributed

        for group in self.groups():
            told: list[dict[int, T]] = [{} for _ in range(distributed.get_world_size(group))]
            with self._named("telling each other"):
                distributed.all_gather_object(told, known, group=group)
            known = {rank: theirs for part in told for rank, theirs in part.items()}
        return dict(sorted(known.items()))

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        """A row of numbers of each rank, in the order of ranks: shape [num_ranks, len(row)]. Rows are on `device`."""
        if self._order is None:
            told = self._all_rows(torch.tensor([self.rank], device=self.device)).flatten().tolist()
            self._order = torch.tensor([told.index(rank) for rank in sorted(set(told))], device=self.device)
        return self._all_rows(row)[self._order]

    def _all_rows(self, row: torch.Tensor) -> torch.Tensor:
        """All-gather rows, group by group; a rank in several groups appears several times."""
        from torch import distributed

        found = row[None]
        for group in self.groups():
            told = [torch.empty_like(found) for _ in range(distributed.get_world_size(group))]
            with self._named("comparing numbers"):
                _wait(distributed.all_gather(told, found, group=group, async_op=True))
            found = torch.cat(told)
        return found

    def connect(self, num_ranks: int) -> None:
        """Set up the group that ranks send in, where it has only these ranks: on NCCL all of a group do that together.

        Otherwise a rank that first sends would wait for one that has nothing to send or receive.
        """
        from torch import distributed

        if not self.is_alone and distributed.get_world_size(self.wire) == num_ranks:
            with self._named("meeting"):
                _wait(distributed.all_reduce(torch.zeros(1, device=self.device), group=self.wire, async_op=True))

    def send_and_receive(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Begin to send memory to ranks, and to receive from them, as one group. Raises: `RuntimeError`, as torch."""
        from torch import distributed

        # in one group: ranks that sent first and received then would wait for each other
        kinds = ((distributed.isend, sends), (distributed.irecv, receives))
        operations = [distributed.P2POp(kind, data, peer, self.wire) for kind, pairs in kinds for peer, data in pairs]
        return list(distributed.batch_isend_irecv(operations)) if operations else []

    @contextmanager
    def _named(self, at: str) -> Iterator[None]:
        """Raise `TransferError` where a collective of torch's fails: another rank has ended, or is too late."""
        try:
            yield
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank} has lost the others at {at!r}: {error}. Another rank of the trainer has ended or is "
                "too late; its own output says why"
            ) from error

    @contextmanager
    def fail_together(self, operation: str) -> Iterator[None]:
        """A block that fails on every rank if it fails on one: elsewhere with `TransferError`, naming rank and cause.

        An interrupt of one rank alone leaves the others waiting until its process ends, or for the group's deadline.
        """
        try:
            yield
        # no interrupt: this process may be about to end, and must not wait for others
        except Exception as error:
            self.report_failure(operation, error)
            raise
        self.report_failure(operation, None)

    def report_failure(self, operation: str, error: Exception | None) -> None:
        """Tell the other ranks how `operation` has ended here. `TransferError` when it has failed elsewhere only."""
        if self.is_alone or not self.any(error is not None, operation):
            return
        # pickled only once something has failed: the usual case is one number of each rank
        causes = self.gather(f"{type(error).__name__}: {error}" if error is not None else None)
        if error is None:
            rank, cause = next((rank, cause) for rank, cause in causes.items() if cause is not None)
            raise TransferError(f"{operation} failed on rank {rank}: {cause}")

    def groups(self) -> Iterator[Any]:
        """A process group for every dimension of every mesh: what all of them have seen, every rank has."""
        if self.wire is not None:
            yield self.wire
        for mesh in self._meshes:
            yield from (mesh.get_group(dim) for dim in range(mesh.ndim))


def _wait(work: Any) -> None:
    """Wait for a collective in Python, where a second Ctrl-C ends the wait; torch's own wait takes none."""
    started_s = time.monotonic()
    while not work.is_completed():
        waited_s = time.monotonic() - started_s
        if waited_s > _LOOK_AFTER_S:
            end_wait("the other ranks")
        time.sleep(min(waited_s / 8, _LOOK_AFTER_S))  # most are over within a millisecond
    work.wait()  # raises what it failed of


def _device_of(mesh: Any) -> torch.device:
    """This process's device of a mesh; shards may be in host memory all the same (`CPUOffloadPolicy`)."""
    kind = torch.device(mesh.device_type)
    return torch.device("cuda", torch.cuda.current_device()) if kind.type == "cuda" else kind


def own_rank() -> int:
    """Global rank of this process; 0 without a process group."""
    from torch import distributed

    return int(distributed.get_rank()) if distributed.is_available() and distributed.is_initialized() else 0
