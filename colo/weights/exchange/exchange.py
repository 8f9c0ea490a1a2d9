"""Moves slices of weights between ranks by a plan: one grouped send and receive for each bucket, two under way.

    pack 0 | send 0 | pack 1 | send 1 | wait 0, unpack 0 | pack 2 | send 2 | wait 1, unpack 1 | ...

For several hosts, and for engines whose memory others cannot map (`peers.py` beside this). Elements are cast to the
engine's dtype as they are packed. What a rank holds itself is copied without a buffer. A rank that fails goes on
sending and receiving to the end, since the others wait for it, and tells them then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from colo.errors import TransferError
from colo.memory.copy_plan import copy_all
from colo.memory.specs import DTYPE_BYTES
from colo.units import align_up
from colo.weights.boxes import Box, Landing
from colo.weights.exchange.plan import Delivery, ExchangePlan
from colo.weights.ranks import RankGroup
from colo.weights.sources.placed import PlacedPart

_NUM_BUFFERS = 2

_View = Callable[[Delivery], torch.Tensor]
_Flying = tuple["Round", torch.Tensor, list[Any], str]
"""A bucket, its buffer, what is waited for, and words for errors."""


class Exchange:
    """One rank's end of a plan. `send` is a collective.

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
        self._seconds: MutableMapping[str, float] = {}

    @property
    def working_bytes(self) -> int:
        """Memory that `send` takes for its time: two buckets."""
        return _NUM_BUFFERS * self._buffer_bytes

    @property
    def _buffer_bytes(self) -> int:
        return max((bucket.num_bytes for bucket in self._buckets), default=0)

    @torch.no_grad()
    def send(self, parts: Sequence[PlacedPart], seconds: MutableMapping[str, float] | None = None) -> None:
        """Bring what this rank holds, in the plan's order, to where engines take it.

        `seconds` grows by the seconds of this process by stage; on a GPU they are those of queueing.
        Raises: `TransferError` on every rank when one has failed, with rank and cause there; what has failed, here.
        """
        self._seconds = {} if seconds is None else seconds
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
                self._attempt(self._unpack, parcel, buffer)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start_s

    def _unpack(self, parcel: Parcel, buffer: torch.Tensor) -> None:
        copy_all([self._place(d) for d in parcel.deliveries], parcel.fields(buffer))


def _held(parts: Sequence[PlacedPart], delivery: Delivery) -> torch.Tensor:
    return held_view(parts[delivery.held], delivery.box)


def _pack(parcel: Parcel, buffer: torch.Tensor, held: _View) -> None:
    copy_all(parcel.fields(buffer), [held(delivery) for delivery in parcel.deliveries])


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


# ---- parcels ------------------------------------------------------------------------------------------------------

ALIGNMENT_BYTES = 16
"""Alignment of parcels in their buffer, so that elements of every width can be read there."""


@dataclass(frozen=True, slots=True)
class Target:
    """A box of a weight in the engine's memory."""

    memory: torch.Tensor
    landing: Landing
    """Its elements there; offset and strides are those in the storage of `memory`."""

    def view(self, box: Box) -> torch.Tensor:
        """The memory of the elements of `box`."""
        offset, shape, stride = self.landing.of(box)
        return self.memory.as_strided(shape, stride, offset)


def held_view(part: PlacedPart, box: Box) -> torch.Tensor:
    """The elements of `box` in the part that holds them."""
    view = part.tensor
    assert view is not None, "a rank has the tensors of its own parts"
    for dim, (start, own, size) in enumerate(zip(box.offset, part.offset, box.shape, strict=True)):
        view = view.narrow(dim, start - own, size)
    return view


@dataclass(frozen=True, slots=True)
class Parcel:
    """Data of one rank for another in a bucket: contiguous, the widest dtypes first, so that there are no gaps."""

    peer: int
    deliveries: tuple[Delivery, ...]
    offset: int
    """Offset in the bucket's buffer, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return sum(delivery.num_bytes for delivery in self.deliveries)

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its bytes in the bucket's buffer."""
        return buffer[self.offset : self.offset + self.num_bytes]

    def fields(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of its deliveries in the bucket's buffer."""
        sizes = [delivery.num_bytes for delivery in self.deliveries]
        return [
            buffer[start : start + size].view(getattr(torch, delivery.dtype)).view(delivery.box.shape)
            for delivery, size, start in zip(
                self.deliveries, sizes, accumulate(sizes, initial=self.offset), strict=False
            )
        ]


@dataclass(frozen=True, slots=True)
class Round:
    """This rank's parcels of one bucket."""

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    num_bytes: int
    """Bytes of a buffer for all of them."""


def bucket_of(rank: int, deliveries: Iterable[Delivery]) -> Round:
    """The parcels that `rank` sends and receives, one for each peer; both ends put them together alike."""
    outgoing: dict[int, list[Delivery]] = {}
    incoming: dict[int, list[Delivery]] = {}
    for delivery in deliveries:
        if delivery.sender == rank:
            outgoing.setdefault(delivery.receiver, []).append(delivery)
        elif delivery.receiver == rank:
            incoming.setdefault(delivery.sender, []).append(delivery)
    sends, end = _laid_out(outgoing, 0)
    receives, end = _laid_out(incoming, end)
    return Round(sends, receives, end)


def _laid_out(by_peer: dict[int, list[Delivery]], offset: int) -> tuple[tuple[Parcel, ...], int]:
    parcels: list[Parcel] = []
    for peer, deliveries in sorted(by_peer.items()):
        widest_first: Sequence[Delivery] = sorted(deliveries, key=lambda delivery: -DTYPE_BYTES[delivery.dtype])
        parcels.append(Parcel(peer, tuple(widest_first), offset))
        offset = align_up(offset + parcels[-1].num_bytes, ALIGNMENT_BYTES)
    return tuple(parcels), offset
