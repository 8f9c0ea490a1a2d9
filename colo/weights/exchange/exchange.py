"""Moves slices of weights between ranks by a plan: one grouped send and receive for each bucket, two under way.

    pack 0 | send 0 | pack 1 | send 1 | wait 0, unpack 0 | pack 2 | send 2 | wait 1, unpack 1 | ...

Elements are cast to the engine's dtype as they are packed. What a rank holds itself is copied without a buffer. A rank
that fails goes on sending and receiving to the end, since the others wait for it, and tells them then.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from colo.errors import TransferError
from colo.memory.copy_plan import CopyPlan, copy_all
from colo.memory.digest import Checksums
from colo.memory.tiles import WORD_BYTES, in_words
from colo.units import align_up
from colo.weights.exchange.parcels import Parcel, Round, Target, bucket_of, held_view
from colo.weights.exchange.plan import Delivery, ExchangePlan
from colo.weights.ranks import RankGroup
from colo.weights.sources.parts import PlacedPart

_NUM_BUFFERS = 2

_View = Callable[[Delivery], torch.Tensor]
_Flying = tuple[Round, torch.Tensor, list[Any], str]
"""A bucket, its buffer, what is waited for, and words for errors."""


class Exchange:
    """One rank's end of a plan. `send` and `differences` are collectives. Run on gloo so far, not on NCCL.

    After an interrupt, or when a send fails rather than what is done here, a rank takes part in nothing that follows:
    the others wait until its process ends, or for the group's deadline.
    """

    def __init__(
        self, plan: ExchangePlan, ranks: RankGroup, targets: Sequence[Target], *, device: torch.device
    ) -> None:
        """`targets` are the places of what this rank takes, in the plan's order; buffers are memory of `device`."""
        self._ranks = ranks
        self._targets = targets
        self._device = device
        self._buckets = [bucket_of(ranks.rank, deliveries) for deliveries in plan.buckets]
        self._local = [delivery for delivery in plan.local if delivery.receiver == ranks.rank]
        self._error: Exception | None = None
        self.received_bytes = 0
        """Bytes that have come from other ranks, in all calls of `send`."""

        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of this process by stage, in all calls of `send`; on a GPU they are those of queueing."""

    @property
    def working_bytes(self) -> int:
        """Memory that `send` takes for its time: two buckets."""
        return _NUM_BUFFERS * self._buffer_bytes

    @property
    def _buffer_bytes(self) -> int:
        return max((bucket.num_bytes for bucket in self._buckets), default=0)

    @torch.no_grad()
    def send(self, parts: Sequence[PlacedPart]) -> None:
        """Bring what this rank holds, in the plan's order, to where engines take it.

        Raises: `TransferError` on every rank when one has failed, with rank and cause there; what has failed, here.
        """
        held = partial(_held, parts)
        with self._stage("own"):
            self._attempt(self._copy_own, held)
        size_bytes = self._buffer_bytes
        buffers = [torch.empty(size_bytes, dtype=torch.uint8, device=self._device) for _ in range(_NUM_BUFFERS)]
        flying: deque[_Flying] = deque()
        for index, bucket in enumerate(self._buckets):
            if len(flying) == _NUM_BUFFERS:
                self._land(*flying.popleft())
            buffer = buffers[index % _NUM_BUFFERS]
            with self._stage("pack"):
                for parcel in bucket.sends:
                    self._attempt(_pack, parcel, buffer, held)
            said = f"bucket {index + 1} of {len(self._buckets)}"
            sends = [(parcel.peer, parcel.within(buffer)) for parcel in bucket.sends]
            receives = [(parcel.peer, parcel.within(buffer)) for parcel in bucket.receives]
            with self._stage("wire"):
                flying.append((bucket, buffer, self._start(sends, receives, said), said))
        while flying:
            self._land(*flying.popleft())
        self._end("sending slices of the weights")

    @torch.no_grad()
    def differences(self, parts: Sequence[PlacedPart]) -> list[int]:
        """Indices of targets that do not hold what `parts` do, cast to their dtype. Sends checksums only.

        Raises: as `send`.
        """
        held, different = partial(_held, parts), set[int]()
        self._attempt(self._compare_own, held, different)
        sent = [(m, self._sums(m, held)) for bucket in self._buckets for m in bucket.sends]
        here = [(m, self._sums(m, self._place)) for bucket in self._buckets for m in bucket.receives]
        told = [(parcel, torch.empty_like(sums)) for parcel, sums in here]
        said = "comparing slices of the weights"
        _wait(self._start([(m.peer, s) for m, s in sent], [(m.peer, s) for m, s in told], said), said)
        for (parcel, own), (_, theirs) in zip(here, told, strict=True):
            flags = (own != theirs).tolist()
            different |= {d.taken for d, is_other in zip(parcel.deliveries, flags, strict=True) if is_other}
        self._end(said)
        return sorted(different)

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do it, unless something has failed before; keep what it raises for `_end`."""
        if self._error is None:
            try:
                action(*arguments)
            except Exception as error:  # noqa: BLE001 - raised by `_end`, when the other ranks wait no more
                self._error = error

    def _end(self, operation: str) -> None:
        error, self._error = self._error, None
        self._ranks.report_failure(operation, error)
        if error is not None:
            raise error

    def _place(self, delivery: Delivery) -> torch.Tensor:
        return self._targets[delivery.taken].view(delivery.box)

    def _copy_own(self, held: _View) -> None:
        copy_all([self._place(d) for d in self._local], [held(d) for d in self._local])

    def _compare_own(self, held: _View, different: set[int]) -> None:
        flags = CopyPlan([(held(d), self._place(d)) for d in self._local]).flags().tolist()
        different |= {d.taken for d, is_other in zip(self._local, flags, strict=True) if is_other}

    def _start(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], said: str
    ) -> list[Any]:
        """Begin to send to peers and receive from them, as one group."""
        from torch import distributed

        group, kinds = self._ranks.wire, ((distributed.isend, sends), (distributed.irecv, receives))
        operations = [distributed.P2POp(kind, data, peer, group) for kind, pairs in kinds for peer, data in pairs]
        try:
            return list(distributed.batch_isend_irecv(operations)) if operations else []
        except RuntimeError as error:
            raise _broken(said, error) from error

    def _land(self, bucket: Round, buffer: torch.Tensor, works: list[Any], said: str) -> None:
        """Wait for a bucket and put what has come where it goes."""
        with self._stage("wire"):
            _wait(works, said)
        with self._stage("unpack"):
            for parcel in bucket.receives:
                self.received_bytes += parcel.num_bytes
                self._attempt(self._unpack, parcel, buffer)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start_s

    def _unpack(self, parcel: Parcel, buffer: torch.Tensor) -> None:
        copy_all([self._place(d) for d in parcel.deliveries], parcel.fields(buffer))

    def _sums(self, parcel: Parcel, view: _View) -> torch.Tensor:
        """A checksum of each delivery as the engine holds it (int64); zeros when that has failed."""
        sums = torch.zeros(len(parcel.deliveries), dtype=torch.int64, device=self._device)
        self._attempt(self._add_sums, parcel, view, sums)
        return sums

    def _add_sums(self, parcel: Parcel, view: _View, sums: torch.Tensor) -> None:
        tensors = [view(delivery) for delivery in parcel.deliveries]
        dtypes = [getattr(torch, delivery.lands_as) for delivery in parcel.deliveries]
        words = [_in_words(tensor, dtype, self._device) for tensor, dtype in zip(tensors, dtypes, strict=True)]
        parts = [(number, 0, of_one) for number, of_one in enumerate(words)]
        sums += Checksums(parts, len(parts), self._device).compute()


def _held(parts: Sequence[PlacedPart], delivery: Delivery) -> torch.Tensor:
    return held_view(parts[delivery.held], delivery.box)


def _pack(parcel: Parcel, buffer: torch.Tensor, held: _View) -> None:
    copy_all(parcel.fields(buffer), [held(delivery) for delivery in parcel.deliveries])


def _in_words(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy of a tensor's elements in `dtype`, in a row, with zeros up to whole words."""
    size_bytes = tensor.numel() * dtype.itemsize
    memory = torch.zeros(align_up(size_bytes, WORD_BYTES), dtype=torch.uint8, device=device)
    memory[:size_bytes].view(dtype).view(tensor.shape).copy_(tensor)
    words = in_words(memory)
    assert words is not None
    return words


def _wait(works: Sequence[Any], said: str) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise _broken(said, error) from error


def _broken(said: str, error: RuntimeError) -> TransferError:
    return TransferError(
        f"the ranks' exchange of weights broke off at {said}: {error}. Another rank has ended or is too late; its own "
        "output says why"
    )
