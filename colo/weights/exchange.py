"""The plan of who sends which elements of weights to whom, and slices on their way through buffers.

Ranks tell each other once what they hold and what their engines take (`agree`). The plan is a function of that alone,
so that every rank makes the same one, and finds the same thing wrong with it. An `Exchange` moves what it lists by one
grouped send and receive for each bucket, two under way:

    pack 0 | send 0 | pack 1 | send 1 | wait 0, unpack 0 | pack 2 | send 2 | wait 1, unpack 1 | ...

That is for several hosts, and for engines whose memory others cannot map (`transports/peers.py`). Elements are cast to
the engine's dtype as they are packed. What a rank holds itself is copied without a buffer. A rank that fails goes on
sending and receiving to the end, since the others wait for it, and tells them then.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

import torch

from colo.errors import TransferError
from colo.memory.copy_plan import copy_all
from colo.memory.specs import DTYPE_BYTES, Manifest, TensorSpec
from colo.units import align_up
from colo.weights.boxes import Box, Landing, PlacedPart, Slice
from colo.weights.ranks import RankGroup


@dataclass(frozen=True, slots=True)
class Delivery:
    """Elements of one weight that go from a rank's part to a rank's engine, its own or another's."""

    sender: int
    receiver: int
    held: int  # index of the sender's part
    taken: int  # index of the receiver's
    box: Box
    dtype: str  # dtype that travels: the engine's dtype, or the trainer's where that is narrower
    lands_as: str  # the engine's dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return self.box.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Every delivery there is."""

    buckets: tuple[tuple[Delivery, ...], ...]  # deliveries between ranks, in groups that travel together
    local: tuple[Delivery, ...]  # deliveries within a rank

    @property
    def every(self) -> list[Delivery]:
        """All of them, those within ranks first."""
        return [*self.local, *(delivery for bucket in self.buckets for delivery in bucket)]

    def received_bytes(self, rank: int) -> int:
        """Bytes that `rank` receives of others."""
        return sum(delivery.num_bytes for bucket in self.buckets for delivery in bucket if delivery.receiver == rank)


@dataclass(frozen=True, slots=True)
class Told:
    """One rank's words about itself."""

    specs: tuple[TensorSpec, ...]  # all weights, whole, in the order in which they travel
    held: tuple[Slice, ...]
    taken: tuple[Slice, ...]


def agree(ranks: RankGroup, words: Told, others: Mapping[int, Told] = MappingProxyType({})) -> dict[int, Told]:
    """Tell every rank; return the words of all, by rank in order, and of `others`, elsewhere. A collective.

    Raises: `TransferError`, on every rank the same, where ranks have other weights than the first, or hold what is no
    part of them.
    """
    told = {**ranks.gather(words), **others}
    check_told(told)
    ranks.connect(len(told))
    return told


def make_plan(
    held: Mapping[int, Sequence[Slice]],
    taken: Mapping[int, Sequence[Slice]],
    *,
    order: Sequence[str],
    bucket_bytes: int,
) -> ExchangePlan:
    """Find a sender for every slice: the taking rank if it holds it, else the holder that sends least so far.

    `held` and `taken` are by rank, with the same ranks. Weights travel in the given order. No rank sends and receives
    more than `bucket_bytes` in a bucket.
    Raises: `TransferError` for elements that no rank holds, and for a name that is not in `order`.
    """
    holders: dict[str, dict[Box, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    # in order of ranks: each rank plans by itself, and all have to plan the same
    for rank, slices in sorted(held.items()):
        for index, part in enumerate(slices):
            holders[part.name][part.box].append((rank, index))
    wanted: dict[str, list[tuple[int, int]]] = {name: [] for name in order}
    for rank, slices in sorted(taken.items()):
        for index, part in enumerate(slices):
            if part.name not in wanted:
                raise TransferError(f"the engine of rank {rank} takes {part.name}, which is no weight of the trainer")
            wanted[part.name].append((rank, index))
    local: list[Delivery] = []
    buckets = _Buckets(bucket_bytes)
    sent: dict[int, int] = defaultdict(int)
    for name, places in wanted.items():
        for rank, index in places:
            for source, box in _covering(rank, taken[rank][index], holders[name], sent):
                engines = taken[rank][index].dtype
                # the narrower one travels, the engine's where both are as wide: widening at the end changes no number
                dtype = min(engines, held[source[0]][source[1]].dtype, key=DTYPE_BYTES.__getitem__)
                if source[0] == rank:
                    local.append(Delivery(rank, rank, source[1], index, box, dtype, engines))
                    continue
                for travelling in box.cut(max(1, bucket_bytes // DTYPE_BYTES[dtype])):
                    buckets.add(Delivery(source[0], rank, source[1], index, travelling, dtype, engines))
                sent[source[0]] += box.num_elements * DTYPE_BYTES[dtype]
    return ExchangePlan(buckets=tuple(map(tuple, buckets.deliveries)), local=tuple(local))


def _covering(
    rank: int, part: Slice, holders: Mapping[Box, Sequence[tuple[int, int]]], sent: Mapping[int, int]
) -> Iterator[tuple[tuple[int, int], Box]]:
    """Yield (rank, index) of held slices with boxes of them; together they are the slice that `rank` takes."""
    # of replicas this rank, else whoever sends least so far, else the first: the same choice on every rank
    sources = [min(who, key=lambda one: (one[0] != rank, sent.get(one[0], 0), one)) for who in holders.values()]
    # own parts first: what a rank holds itself need not travel
    boxes = sorted(zip(sources, holders, strict=True), key=lambda found: (found[0][0] != rank, found[0]))
    left = [part.box] if part.box.num_elements else []
    for source, box in boxes:
        rest: list[Box] = []
        for wanted in left:
            met = wanted.meet(box)
            if met is None:
                rest.append(wanted)
            else:
                yield source, met
                rest += wanted.without(met)
        left = rest
    if left:
        missing = sum(box.num_elements for box in left)
        raise TransferError(
            f"no rank of the trainer holds {missing} of the {part.box.num_elements} elements of {part.name} that the "
            f"engine of rank {rank} takes, from {left[0].offset} on"
        )


@dataclass
class _Buckets:
    """Group deliveries into buckets; a new one begins when some rank's has no room left."""

    limit_bytes: int
    deliveries: list[list[Delivery]] = field(default_factory=list)
    _loads: dict[int, int] = field(default_factory=dict)

    def add(self, delivery: Delivery) -> None:
        ranks = (delivery.sender, delivery.receiver)
        fullest = max(self._loads.get(rank, 0) for rank in ranks)
        if not self.deliveries or fullest + delivery.num_bytes > self.limit_bytes:
            self.deliveries.append([])
            self._loads = {}
        self.deliveries[-1].append(delivery)
        for rank in ranks:
            self._loads[rank] = self._loads.get(rank, 0) + delivery.num_bytes


def check_told(told: Mapping[int, Told]) -> None:
    """Raise `TransferError`, naming rank and weight, where what ranks say does not fit together."""
    first, reference = next(iter(told.items()))
    try:
        manifest = Manifest(specs=reference.specs)
    except ValueError as error:
        raise TransferError(f"the weights of rank {first} cannot travel: {error}") from error
    expected = {spec.name: spec for spec in manifest.specs}
    for rank, words in told.items():
        if words.specs != reference.specs:
            raise TransferError(f"rank {rank} has other weights than rank {first}: {_difference(expected, words)}")
        for part in words.held:
            spec = expected.get(part.name)
            if spec is None:
                raise TransferError(f"rank {rank} holds a part of {part.name}, which is no weight of the trainer")
            is_within = len(part.box.shape) == len(spec.shape) and all(
                start + size <= whole
                for start, size, whole in zip(part.box.offset, part.box.shape, spec.shape, strict=True)
            )
            if part.dtype != spec.dtype or not is_within:
                raise TransferError(
                    f"rank {rank} holds {part.box.shape} of {part.name} at {part.box.offset} in {part.dtype}, which is "
                    f"{spec.shape} in {spec.dtype}"
                )


def _difference(expected: Mapping[str, TensorSpec], words: Told) -> str:
    """The first difference in words."""
    found = {spec.name: spec for spec in words.specs}
    for name, spec in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != spec:
            other = found[name]
            return f"{name} is {other.shape} in {other.dtype}, not {spec.shape} in {spec.dtype}"
    if extra := [name for name in found if name not in expected]:
        return f"{extra[0]} is one more"
    if len(words.specs) != len(found):
        return "a weight is named twice"
    return "they are in another order"


class Wire(Protocol):
    """One rank's way to the others, for an `Exchange`."""

    @property
    def rank(self) -> int:
        """Number of this rank in the plan."""

    def send_and_receive(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Begin to send memory to ranks, and to receive from them; returns torch's works. Raises: `RuntimeError`."""

    def report_failure(self, operation: str, error: Exception | None) -> None:
        """Tell the other ranks how `operation` has ended here. `TransferError` when it has failed elsewhere only."""


_NUM_BUFFERS = 2

_View = Callable[[Delivery], torch.Tensor]
_Flying = tuple["Round", torch.Tensor, list[Any], str]
"""A bucket, its buffer, what is waited for, and words for errors."""


class Exchange:
    """One rank's end of a plan. `send` is a collective.

    After an interrupt, or when a send fails rather than what is done here, a rank takes part in nothing that follows:
    the others wait until its process ends, or for the group's deadline.
    """

    def __init__(self, plan: ExchangePlan, ranks: Wire, targets: Sequence[Target], *, device: torch.device) -> None:
        """`targets` are the places of what this rank takes, in the plan's order; buffers are memory of `device`."""
        self._ranks = ranks
        self._targets = targets
        self._device = device
        self._buckets = [bucket_of(ranks.rank, deliveries) for deliveries in plan.buckets]
        self._buffer_bytes = max((bucket.num_bytes for bucket in self._buckets), default=0)
        self.working_bytes = _NUM_BUFFERS * self._buffer_bytes  # memory that `send` takes for its time
        self._local = [delivery for delivery in plan.local if delivery.receiver == ranks.rank]
        self._error: Exception | None = None
        self._seconds: MutableMapping[str, float] = {}

    @torch.no_grad()
    def send(self, parts: Sequence[PlacedPart], seconds: MutableMapping[str, float] | None = None) -> None:
        """Bring what this rank holds, in the plan's order, to where engines take it.

        `seconds` grows by the seconds of this process by stage; on a GPU they are those of queueing.
        Raises: `TransferError` on every rank when one has failed, with rank and cause there; what has failed, here.
        """
        self._seconds = {} if seconds is None else seconds

        def held(delivery: Delivery) -> torch.Tensor:
            return held_view(parts[delivery.held], delivery.box)

        with timed(self._seconds, "own"):
            self._attempt(lambda: copy_all([self._place(d) for d in self._local], [held(d) for d in self._local]))
        size = self._buffer_bytes
        # taken for the time of a send only: between two the memory is the phases'
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_NUM_BUFFERS)]
        flying: deque[_Flying] = deque()
        for index, bucket in enumerate(self._buckets):
            if len(flying) == _NUM_BUFFERS:
                # it still uses the buffer that this bucket is packed into
                self._land(*flying.popleft())
            buffer = buffers[index % _NUM_BUFFERS]
            with timed(self._seconds, "pack"):
                for parcel in bucket.sends:
                    self._attempt(_pack, parcel, buffer, held)
            said = f"bucket {index + 1} of {len(self._buckets)}"
            sends = [(parcel.peer, parcel.within(buffer)) for parcel in bucket.sends]
            receives = [(parcel.peer, parcel.within(buffer)) for parcel in bucket.receives]
            with timed(self._seconds, "wire"):
                flying.append((bucket, buffer, self._start(sends, receives, said), said))
        while flying:
            self._land(*flying.popleft())
        error, self._error = self._error, None
        self._ranks.report_failure("sending slices of the weights", error)
        if error is not None:
            raise error

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do it, unless something has failed before; keep what it raises for the end."""
        if self._error is None:
            try:
                action(*arguments)
            except Exception as error:  # noqa: BLE001 - raised when the other ranks wait no more
                self._error = error

    def _place(self, delivery: Delivery) -> torch.Tensor:
        return self._targets[delivery.taken].view(delivery.box)

    def _start(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], said: str
    ) -> list[Any]:
        """Begin to send to peers and receive from them, as one group."""
        try:
            return self._ranks.send_and_receive(sends, receives)
        except RuntimeError as error:
            raise _broken(said, error) from error

    def _land(self, bucket: Round, buffer: torch.Tensor, works: list[Any], said: str) -> None:
        """Wait for a bucket and put what has come where it goes."""
        with timed(self._seconds, "wire"):
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise _broken(said, error) from error
        with timed(self._seconds, "unpack"):
            for parcel in bucket.receives:
                self._attempt(self._unpack, parcel, buffer)

    def _unpack(self, parcel: Parcel, buffer: torch.Tensor) -> None:
        copy_all([self._place(d) for d in parcel.deliveries], parcel.fields(buffer))


def _pack(parcel: Parcel, buffer: torch.Tensor, held: _View) -> None:
    copy_all(parcel.fields(buffer), [held(delivery) for delivery in parcel.deliveries])


@contextmanager
def timed(seconds: MutableMapping[str, float], stage: str) -> Iterator[None]:
    """Add the seconds that the block takes to those of its stage."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start_s


def _broken(said: str, error: RuntimeError) -> TransferError:
    return TransferError(
        f"the ranks' exchange of weights broke off at {said}: {error}. Another rank has ended or is too late; its own "
        "output says why"
    )


# ---- parcels ------------------------------------------------------------------------------------------------------

ALIGNMENT_BYTES = 16  # alignment of parcels in their buffer, so that elements of every width can be read there


@dataclass(frozen=True, slots=True)
class Target:
    """A box of a weight in the engine's memory."""

    memory: torch.Tensor
    landing: Landing  # its elements there; offset and strides are those in the storage of `memory`

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
    offset: int  # offset in the bucket's buffer, in bytes

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
    num_bytes: int  # bytes of a buffer for all of them


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
