"""The plan of who sends which elements to whom, made of what every rank holds and what every rank's engine takes.

Ranks tell each other both once (`agree`). The plan is a function of that alone, so that every rank makes the same one,
and finds the same thing wrong with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from colo.errors import TransferError
from colo.memory.specs import DTYPE_BYTES, Manifest, TensorSpec
from colo.weights.boxes import Box
from colo.weights.ranks import RankGroup


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of one weight that a rank holds, or that its engine takes."""

    name: str
    box: Box
    dtype: str
    """Dtype of the memory that it lies in, or goes to: a key of `DTYPE_BYTES`."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Elements of one weight that go from a rank's part to a rank's engine, its own or another's."""

    sender: int
    receiver: int
    held: int
    """Index of the sender's part."""

    taken: int
    """Index of the receiver's."""

    box: Box
    dtype: str
    """Dtype that travels: the engine's dtype, or the trainer's where that is narrower."""

    lands_as: str
    """The engine's dtype."""

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return self.box.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Every delivery there is."""

    buckets: tuple[tuple[Delivery, ...], ...]
    """Deliveries between ranks, in groups that travel together."""

    local: tuple[Delivery, ...]
    """Deliveries within a rank."""

    @property
    def every(self) -> list[Delivery]:
        """All of them, those within ranks first."""
        return [*self.local, *(delivery for bucket in self.buckets for delivery in bucket)]

    def received_bytes(self, rank: int) -> int:
        """Bytes that `rank` receives of others."""
        return sum(delivery.num_bytes for bucket in self.buckets for delivery in bucket if delivery.receiver == rank)

    def sent_bytes(self, rank: int) -> int:
        """Bytes that `rank` sends to others."""
        return sum(delivery.num_bytes for bucket in self.buckets for delivery in bucket if delivery.sender == rank)

    def staged_bytes(self, rank: int) -> int:
        """The most bytes that `rank` sends and receives in one bucket."""
        loads = (sum(m.num_bytes for m in bucket if rank in (m.sender, m.receiver)) for bucket in self.buckets)
        return max(loads, default=0)


@dataclass(frozen=True, slots=True)
class Told:
    """One rank's words about itself."""

    specs: tuple[TensorSpec, ...]
    """All weights, whole, in the order in which they travel."""

    held: tuple[Slice, ...]
    taken: tuple[Slice, ...]


def agree(ranks: RankGroup, words: Told) -> dict[int, Told]:
    """Tell every rank; return the words of all, by rank in order. A collective.

    Raises: `TransferError`, on every rank the same, where ranks have other weights than the first, or hold what is no
    part of them.
    """
    told = ranks.gather(words)
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
                dtype = _narrower(held[source[0]][source[1]].dtype, engines)
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


def _narrower(trainers: str, engines: str) -> str:
    return engines if DTYPE_BYTES[engines] <= DTYPE_BYTES[trainers] else trainers


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
