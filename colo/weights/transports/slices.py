"""The transport of a trainer that is spread over ranks, each with an engine: slices go where engines take them.

What a rank's engine takes is a recorded load plan, what ranks hold are placed parts. Where the two meet is copied, once
and as a slice; no tensor is ever whole. All copies of a rank are recorded once and made in one launch, into its own
engine and straight into those of the other ranks of the host, whose memory it maps (`peers.py`). Ranks meet before,
when all engines are paused, and after, when all has been written. Then every rank digests its own memory in one launch
and tells the others in one small gather (`Comparison`). Across hosts, and where memory cannot be mapped, slices travel
through buffers (`colo.weights.exchange`).
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from colo.errors import TransferError, Unsupported
from colo.memory.copy_plan import CopyPlan, Pair, Strided, wait_for_queued
from colo.memory.load_plan import AS_IT_WAS, LoadPlan
from colo.memory.share import dtype_name
from colo.memory.specs import TensorSpec
from colo.units import MIB, format_bytes
from colo.weights.boxes import Box, PlacedPart, Slice, landings, slices_of
from colo.weights.exchange import (
    Delivery,
    Exchange,
    ExchangePlan,
    Target,
    Told,
    Wire,
    agree,
    held_view,
    make_plan,
    timed,
)
from colo.weights.ranks import RankGroup
from colo.weights.sources.base import WeightSource
from colo.weights.transports.base import CopyingTransport
from colo.weights.transports.peers import Peers, reach

_STAGES = 4  # stages of a transfer that waits for NVLink

_NAMED_RANKS = 8  # reports name so many ranks at most

BUCKET_BYTES = 128 * MIB  # bytes that a rank sends and receives at a time, through buffers. Two are under way.


class SlicesTransport(CopyingTransport):
    """Copies every recorded region out of the parts that hold it, on this rank and others. Each method is a collective.

    Everything is planned once, and again when a rank's weights, or its engine's, lie elsewhere.
    """

    name = "slices"
    replaces_all = True

    def __init__(
        self,
        source: WeightSource,
        plan: LoadPlan,
        *,
        device: torch.device,
        why_not_shared: str,
        bucket_bytes: int | None = None,
        ranks: RankGroup | None = None,
        wire: Wire | None = None,
    ) -> None:
        """`plan` is what this rank's engine copies, without fallbacks; buffers are memory of `device`.

        `ranks`, those of the source by default, plan together; what goes through buffers goes by `wire`, by default
        theirs too. With one, no rank is asked whether it can map another's engine.
        Raises: `TransferError`, on every rank, where ranks do not have parts of the same weights, or not all of them;
        `Unsupported` for weights with gaps between their elements.
        """
        self.source = source
        self._ranks = source.ranks if ranks is None else ranks
        self._wire = wire
        self._plan = plan
        self._device = torch.empty(0, device=device).device  # with a number, as tensors' devices have
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._why_not_shared = why_not_shared
        self.received_bytes = 0  # bytes that have come to this rank from others
        self.seconds: dict[str, float] = {}
        """Seconds of this process by stage: looking for what has moved, meeting, copying; see also `Exchange`."""

        self._devices = {copy.target.device for copy in plan.copies} | {self._device}
        self._where: tuple[list[torch.Tensor], list[Hashable]] = ([], [])
        self._route = self._connect()
        self._sent: list[torch.Tensor] | None = None

    @property
    def bytes_to_receive(self) -> int:
        """Bytes that each transfer brings to this rank from others, by the plan."""
        return self._route.plan.received_bytes(self._ranks.rank)

    @property
    def working_bytes(self) -> int:
        """Bytes of two buckets where slices travel through buffers, else 0."""
        return self._route.exchange.working_bytes if self._route.exchange is not None else 0

    def transfer(self, version: int = 0) -> int:
        """Bring every slice to where it goes, and return the bytes written to this rank's engine."""
        self._meet()
        route = self._route
        if route.exchange is not None:
            self._exchange(route.exchange)
            # through buffers nothing was digested: `verify` reads both sides
            self._sent = None
        else:
            self._sent = [self._write(stage) for stage in route.stages]
        self.received_bytes += self.bytes_to_receive
        return route.num_bytes

    def _exchange(self, exchange: Exchange) -> None:
        """Send through buffers."""
        exchange.send(self.source.parts(), self.seconds)

    def _write(self, stage: CopyPlan) -> torch.Tensor:
        """Write to all engines; returns digests of what was read. When it returns, all ranks have written."""
        error: Exception | None = None
        sums = torch.empty(0, device="cpu")
        with timed(self.seconds, "copy"):
            try:
                sums = stage.replay_digested()
                for device in self._devices:
                    wait_for_queued(device)  # what goes to another GPU ends in that one's stream
            except Exception as caught:  # noqa: BLE001 - the others wait for an answer
                error = caught
        with timed(self.seconds, "meet"):
            self._ranks.report_failure("sending slices of the weights", error)
        if error is not None:
            raise error
        return sums

    def verify(self) -> None:
        """Compare every byte by its digest, and parts that several ranks hold.

        Raises: `TransferError` with a name.
        """
        found = self._differences()
        different = list(dict.fromkeys(self._names_of(found)))
        if different:
            raise TransferError(f"{len(different)} tensors differ after the transfer, {different[0]} for one")
        if found.apart:
            raise TransferError(
                f"ranks that hold the same parts of weights have different values of {len(found.apart)}, "
                f"{found.apart[0]} for one, and their engines would too: reduce gradients of replicas alike, as "
                "Megatron's finalize_model_grads does for norms and tied embeddings, and step on every rank"
            )

    def is_current(self) -> bool:
        """True if the engines of all ranks hold what the trainer does, by digests."""
        # what the last transfer has read says nothing of now
        self._sent = None
        return not self._differences().different

    def close(self) -> None:
        """Let go of what is mapped and recorded. Ordering: no rank writes any more."""
        self._route.let_go()
        self._where = ([], [])

    def _names_of(self, found: Differences) -> Iterator[str]:
        """Weights that differ in this rank's engine."""
        own = (delivery for delivery in found.different if delivery.receiver == self._ranks.rank)
        return (self._names[delivery.taken] for delivery in own)

    def _differences(self) -> Differences:
        """Compare; return the findings of all ranks."""
        if self._sent is None:
            self._meet()
        route, digests, error = self._route, None, None
        try:
            sent, self._sent = self._sent, None
            digests = route.in_order([stage.digests() for stage in route.stages] if sent is None else sent)
        except Exception as caught:  # noqa: BLE001 - the others wait for this rank's row
            error = caught
        found = route.comparison.of(digests)
        if found.failed:
            self._ranks.report_failure("comparing slices of the weights", error)
        if error is not None:
            raise error
        return found

    def _meet(self) -> None:
        """Wait until every rank is here, and plan anew, on every rank, where tensors of one have moved."""
        ranks = self._ranks
        with timed(self.seconds, "look"):
            try:
                (tensors, places), (known, known_places) = self._whereabouts(), self._where
                is_same = places == known_places and len(tensors) == len(known)
                has_moved = not (is_same and all(map(operator.is_, tensors, known)))
            except Exception:  # noqa: BLE001 - planning raises it on every rank
                has_moved = True
        with timed(self.seconds, "meet"):
            wait_for_queued(self._device)  # streams order nothing across processes, and peers write into this engine
            has_moved = ranks.any(has_moved, "looking for slices of the weights")
        if has_moved:
            self._route = self._connect()

    def _whereabouts(self) -> tuple[list[torch.Tensor], list[Hashable]]:
        tensors, places = self.source.places()
        return tensors, [*places, *[copy.target.data_ptr() for copy in self._plan.copies]]

    def _elsewhere(self) -> Mapping[int, Sequence[Slice]]:
        """Slices that engines elsewhere take, by ranks behind those of the trainer. A collective."""
        return {}

    def _settle(self, told: Mapping[int, Told]) -> None:
        """Make engines elsewhere ready for the plan of what has been told. A collective."""

    def _connect(self) -> _Route:
        ranks = self._ranks
        self._where = ([], [])  # until all is planned
        elsewhere = self._elsewhere()
        with ranks.fail_together("planning slices of the weights"):
            where = self._whereabouts()
            specs, parts = self.source.specs(), self.source.parts()
            for spec in specs:
                _check_spec(spec, self._plan)
            held, named = slices_of(parts), targets_of(self._plan)
            taken = [Slice(name, target.landing.box, dtype_name(target.memory)) for name, target in named]
        self._names, self._sent = [name for name, _ in named], None
        others = {rank: Told(tuple(specs), (), tuple(slices)) for rank, slices in elsewhere.items()}
        told = agree(ranks, Told(tuple(specs), tuple(held), tuple(taken)), others)
        # what this raises every rank raises: it depends on nothing but what all have told
        plan = make_plan(
            {rank: words.held for rank, words in told.items()},
            {rank: words.taken for rank, words in told.items()},
            order=[spec.name for spec in specs],
            bucket_bytes=self._bucket_bytes,
        )
        route = _Route(ranks, told, plan, [target for _, target in named], parts, self._device, self._wire)
        self._settle(told)
        self._where = where
        self.reason = f"{self._why_not_shared}; {self._said(route, told)}"
        return route

    def _said(self, route: _Route, told: Mapping[int, Told]) -> str:
        plan, rank = route.plan, self._ranks.rank
        own_bytes = sum(d.num_bytes for d in plan.local if d.receiver == rank)
        received = {other: plan.received_bytes(other) for other in told}
        by_rank = ", ".join(f"rank {other} receives {format_bytes(size)}" for other, size in received.items())
        if len(received) > _NAMED_RANKS:
            least, most = (format_bytes(of(received.values())) for of in (min, max))
            by_rank = f"{len(received)} ranks receive {least} to {most} each"
        return (
            f"of {len(self._plan.copies)} recorded copies {own_bytes} bytes are this rank's own and {received[rank]} "
            f"come from other ranks, as slices ({by_rank}), {route.how}"
        )


class _Route:
    """The recorded way of slices: straight into engines, or through buffers. Making one is a collective.

    Where many bytes go to other ranks, NVLink is what a transfer waits for, and memory has time to spare: slices are
    written in stages then, and a stage also reads back what engines have taken in the one before.
    """

    def __init__(
        self,
        ranks: RankGroup,
        told: Mapping[int, Told],
        plan: ExchangePlan,
        targets: Sequence[Target],
        parts: Sequence[PlacedPart],
        device: torch.device,
        wire: Wire | None,
    ) -> None:
        self.plan = plan
        self.comparison = Comparison(plan, {rank: words.held for rank, words in told.items()}, ranks)
        self.num_bytes = sum(target.landing.box.num_elements * target.memory.element_size() for target in targets)
        """Bytes of this rank's engine."""

        self.exchange: Exchange | None = None
        self.how = "copied within each rank"
        self._peers: Peers | None = None
        every = list(enumerate(plan.every))
        sent = {n: held_view(parts[d.held], d.box) for n, d in every if d.sender == ranks.rank}
        taken = {n: targets[d.taken].view(d.box) for n, d in every if d.receiver == ranks.rank}
        to: dict[int, torch.Tensor | Strided] = {n: taken[n] for n in sent if n in taken}
        others = {n: d for n, d in every if n in sent and n not in taken}
        if any(plan.buckets):
            far = [(d, sent[n]) for n, d in others.items()]
            reached = reach(ranks, plan.every, targets, far, device) if wire is None else "engines are elsewhere"
            if isinstance(reached, Peers):
                self._peers, self.how = reached, "written straight into every rank's engine"
            else:
                self.how = f"through buffers: {reached}"
                self.exchange = Exchange(plan, wire or ranks, targets, device=device)
            to |= {n: _nowhere(d) if self._peers is None else self._peers.target(d) for n, d in others.items()}
        with ranks.fail_together("planning slices of the weights"):
            stage_of = _stages(plan, told, _STAGES if self._peers is not None else 1)
            self.stages: list[CopyPlan] = []
            """Copies of all that this rank sends; where there is an exchange, digests alone of what goes to others."""

            keys: list[tuple[str, int]] = []
            kept: list[int] = []
            # as many on every rank, also where one sends nothing: a stage ends with a collective (`_write`)
            for stage in range(max(stage_of, default=0) + 1):
                now = [n for n in sent if stage_of[n] == stage]
                # apart, so that the plan spreads both over the launch: HBM and NVLink are busy at once
                groups = [n for n in now if n in taken], [n for n in now if n not in taken]
                pairs: list[list[Pair]] = [[(sent[n], to[n]) for n in group] for group in groups]
                self.stages.append(CopyPlan(*pairs, device=device, read=[taken[n] for n in kept]))
                keys += [*(("sent", n) for group in groups for n in group), *(("taken", n) for n in kept)]
                kept = [n for n in taken if stage_of[n] == stage]
            shared = [part for part in (parts[index].tensor for index in self.comparison.shared) if part is not None]
            self._last = CopyPlan(device=device, read=[*(taken[n] for n in kept), *shared])
            of_shared = [("shared", number) for number in range(len(shared))]
            keys += [*(("taken", n) for n in kept), *of_shared]
            number = {key: place for place, key in enumerate(keys)}
            # stages digest in an order of their own; ranks compare in the plan's
            row = [*(("sent", n) for n in sent), *(("taken", n) for n in taken), *of_shared]
            self._order = torch.tensor([number[key] for key in row], dtype=torch.int64, device=device)

    def in_order(self, digests: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Digests of all stages and of the last one's results, in the order of `Comparison.of`."""
        return [torch.cat([*digests, self._last.digests()])[self._order]]

    def let_go(self) -> None:
        """Unmap other ranks' engines, and forget what is recorded."""
        self._peers, self.stages, self._last = None, [], CopyPlan([])


def _stages(plan: ExchangePlan, told: Mapping[int, Told], count: int) -> list[int]:
    """Assign deliveries to stages of equal bytes, weights in order; the same on every rank."""
    every = plan.every
    num_far = sum(d.num_bytes for d in every if d.sender != d.receiver)
    if 3 * num_far < sum(d.num_bytes for d in every):
        count = 1  # most bytes stay where they are, and memory is what a transfer waits for
    names = [told[d.receiver].taken[d.taken].name for d in every]
    sizes = dict.fromkeys((spec.name for spec in next(iter(told.values())).specs), 0)
    for name, delivery in zip(names, every, strict=True):
        sizes[name] += delivery.num_bytes
    total, before = max(1, sum(sizes.values())), itertools.accumulate(sizes.values(), initial=0)
    stage = {name: start * count // total for name, start in zip(sizes, before, strict=False)}
    return [stage[name] for name in names]


def _nowhere(delivery: Delivery) -> Strided:
    """A target for digests alone: of the engine's dtype, and at no address."""
    return Strided.of(torch.empty(delivery.box.shape, dtype=getattr(torch, delivery.lands_as), device="meta"))


def why_not_sliced(plan: LoadPlan) -> str | None:
    """The reason why weights have to travel whole to this rank's engine, `None` when slices will do."""
    if plan.fallbacks:
        name, cause = next(iter(plan.fallbacks.items()))
        return f"{name}: {cause}"
    try:
        targets_of(plan)
    except Unsupported as error:
        return str(error)
    return None


def targets_of(plan: LoadPlan) -> list[tuple[str, Target]]:
    """Every box that the plan's copies read, by name, and where it goes."""
    return [
        (copy.name, Target(copy.target, landing))
        for copy in plan.copies
        for landing in landings(
            (plan.sources[copy.name][1], plan.strides[copy.name]),
            copy.shape,
            (copy.stride, tuple(copy.target.stride())),
            (copy.offset, int(copy.target.storage_offset())),
        )
    ]


def _check_spec(spec: TensorSpec, plan: LoadPlan) -> None:
    """Raise `TransferError` unless a weight has the recorded shape; strides do not matter to parts."""
    recorded = plan.sources.get(spec.name)
    if recorded is None:
        raise TransferError(f"{spec.name} was not there when the engine's copies were recorded: {AS_IT_WAS}")
    if recorded[1] != spec.shape:
        raise TransferError(f"{spec.name} has shape {spec.shape}, but {recorded[1]} was recorded: {AS_IT_WAS}")


@dataclass(frozen=True, slots=True)
class Differences:
    """Findings of a comparison, the same on every rank."""

    failed: bool  # true if a rank could not compute its digests
    different: list[Delivery]  # those of which the taking engine holds other bytes than were sent
    apart: list[str]  # parts of which ranks have different values: the weight and the ranks, in words


class Comparison:
    """The digests of a plan that have to be equal. The same on every rank.

    A row of numbers comes from each rank: whether it has failed, then digests of what it sends, of what it takes, both
    in the order of `ExchangePlan.every`, and of the parts that others hold too (`shared`).
    """

    def __init__(self, plan: ExchangePlan, held: Mapping[int, Sequence[Slice]], ranks: RankGroup) -> None:
        """`held` is by rank; a part of this rank is known by its index there."""
        self._ranks = ranks
        self._every = plan.every
        owners: dict[tuple[str, Box], dict[int, int]] = defaultdict(dict)
        for rank, slices in sorted(held.items()):
            for index, part in enumerate(slices):
                owners[part.name, part.box].setdefault(rank, index)
        self._shared = [(n, of) for (n, box), of in owners.items() if len(of) > 1 and box.num_elements]
        self.shared = [of[ranks.rank] for _, of in self._shared if ranks.rank in of]
        """Indices of this rank's parts that others hold too."""

        numbers = {rank: itertools.count(1) for rank in held}  # the next place in a rank's row
        sent = [(delivery.sender, next(numbers[delivery.sender])) for delivery in plan.every]
        taken = [(delivery.receiver, next(numbers[delivery.receiver])) for delivery in plan.every]
        shared = [{rank: (rank, next(numbers[rank])) for rank in of} for _, of in self._shared]
        self._width = max(map(next, numbers.values()), default=1)
        self._pairs = [(n, first, rank) for n, (_, (first, *of)) in enumerate(self._shared) for rank in of]
        left = [*sent, *(shared[n][first] for n, first, _ in self._pairs)]
        right = [*taken, *(shared[n][rank] for n, _, rank in self._pairs)]
        start = {rank: row * self._width for row, rank in enumerate(sorted(held))}
        self._left, self._right = (
            torch.tensor([start[rank] + place for rank, place in of], dtype=torch.int64, device=ranks.device)
            for of in (left, right)
        )

    def of(self, digests: Sequence[torch.Tensor] | None) -> Differences:
        """Compare. A collective. `digests` (int64) are of what this rank sends, takes and shares; `None` if it cannot.

        Waits for the digests.
        """
        row = torch.zeros(self._width, dtype=torch.int64, device=self._ranks.device)
        if digests is None:
            row[0] = 1
        else:
            # an empty row in front, since `cat` of nothing raises
            found = torch.cat([row[:0], *(part.to(self._ranks.device) for part in digests)])
            row[1 : 1 + len(found)] = found
        rows = self._ranks.rows(row)
        flags = rows.view(-1)[self._left] != rows.view(-1)[self._right]
        num_deliveries = len(self._every)
        flags = torch.cat([flags, rows[:, 0].any()[None]])
        # the usual case reads one number from the device
        if not flags.any():
            return Differences(failed=False, different=[], apart=[])
        others = flags.nonzero().flatten().tolist()
        failed = others[-1] == len(flags) - 1
        sent = [self._every[n] for n in others if n < num_deliveries]
        apart = dict.fromkeys(
            self._pairs[n - num_deliveries][0] for n in others if num_deliveries <= n < len(flags) - 1
        )
        return Differences(
            failed=failed,
            different=sent,
            apart=[f"{name} on ranks {', '.join(map(str, of))}" for name, of in (self._shared[n] for n in apart)],
        )
