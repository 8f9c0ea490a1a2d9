"""Slices to engines elsewhere: the plan of `slices.py` with the trainer's ranks on one side and engines' on the other.

    trainer's ranks                                      ranks of engines elsewhere
    RemoteSlices: which parts they hold                  SliceTarget: which parts their loader copies, and where to
                  one plan, made alike by all of them
    Exchange.send: pack, send            ---->           Exchange.send: receive, unpack into the engine's memory
    digests of what was sent              ==             digests of what lies there

What a rank of an engine takes comes straight from the ranks that hold it, two buckets under way; no weight is ever
whole, and experts go to the ranks that own them. Words travel by the engine's own requests (`TakesSlices`), bytes in a
process group of both sides (colo/weights/meeting.py). A transfer that fails poisons the engines that took part; the
next one plans anew, in another group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from colo.errors import ColoError, TransferError, Unsupported
from colo.memory.copy_plan import CopyPlan
from colo.memory.load_plan import LoadPlan, Part
from colo.memory.share import dtype_name
from colo.memory.specs import arriving
from colo.units import format_bytes
from colo.weights.boxes import Box, Slice
from colo.weights.exchange import Exchange, ExchangePlan, Told, make_plan
from colo.weights.meeting import GroupEnd, Meeting, in_thread, indices, meet, meet_at, result
from colo.weights.ranks import RankGroup
from colo.weights.sources.base import WeightSource
from colo.weights.sources.module import check_taken
from colo.weights.transports.slices import Differences, SlicesTransport, targets_of, why_not_sliced

# ---- words -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """The parts of weights that one rank of an engine takes."""

    slices: tuple[Slice, ...]
    left_out: Mapping[str, Sequence[Part]]
    """Parts that it takes of weights that it does not take whole; see `LoadPlan.left_out`."""

    refusal: str | None
    """The reason why it takes whole weights only."""

    def to_wire(self) -> dict[str, Any]:
        """Fields by name, to travel as JSON."""
        left_out = {name: [[n, [*shape], [*stride]] for n, shape, stride in of] for name, of in self.left_out.items()}
        return {"slices": words_of(self.slices), "left_out": left_out, "refusal": self.refusal}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Taken:
        """Raises: `TransferError` with the reason."""
        with arriving(cls):
            left_out = {name: [(n, shape, stride) for n, shape, stride in of] for name, of in wire["left_out"].items()}
            return cls(slices_from(wire["slices"]), left_out, wire["refusal"])


def words_of(slices: Sequence[Slice]) -> list[list[Any]]:
    """Slices to travel as JSON."""
    return [[one.name, [*one.box.offset], [*one.box.shape], one.dtype] for one in slices]


def slices_from(words: Sequence[Sequence[Any]]) -> tuple[Slice, ...]:
    """Slices that `words_of` has made ready to travel."""
    return tuple(Slice(name, Box(tuple(offset), tuple(shape)), dtype) for name, offset, shape, dtype in words)


@dataclass(frozen=True, slots=True)
class PlanWords:
    """All that a plan is made of."""

    held: Mapping[int, Sequence[Slice]]  # by rank, as what is taken
    taken: Mapping[int, Sequence[Slice]]
    order: Sequence[str]
    bucket_bytes: int

    def plan(self) -> ExchangePlan:
        """The plan, the same on every rank."""
        return make_plan(self.held, self.taken, order=self.order, bucket_bytes=self.bucket_bytes)

    def to_wire(self) -> dict[str, Any]:
        """Fields by name, to travel as JSON."""
        by_rank = {
            name: {str(rank): words_of(slices) for rank, slices in given.items()}
            for name, given in (("held", self.held), ("taken", self.taken))
        }
        return {**by_rank, "order": [*self.order], "bucket_bytes": self.bucket_bytes}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> PlanWords:
        """Raises: `TransferError` with the reason."""
        with arriving(cls):
            held, taken = (
                {int(rank): slices_from(words) for rank, words in wire[name].items()} for name in ("held", "taken")
            )
            return cls(held, taken, tuple(map(str, wire["order"])), int(wire["bucket_bytes"]))


class SliceTaker:
    """An engine elsewhere, or several, asked by the rank of the trainer that has them; their ranks are in order.

    As it is here it is of a rank without an engine: a kind of engine has a class of its own.
    """

    address: str = ""
    """This machine's, as the engine reaches it; empty where there is no engine."""

    deadline_s: float = 0.0
    """Seconds of silence after which the engine counts as lost."""

    @property
    def members(self) -> Hashable:
        """Changes where another engine, or one more or less, takes slices from now on."""
        return None

    def taken(self, weights: Mapping[str, torch.Tensor]) -> list[list[Taken]]:
        """Ask each engine what its ranks take of weights, given whole and without data. Raises: as their loaders."""
        return []

    def plan(self, words: PlanWords, first: int) -> None:
        """Plan in each of its ranks, whose numbers in the plan begin with `first`."""

    def meet(self, meeting: Meeting, first: int, deadline_s: float) -> None:
        """Join a group in each of its ranks, whose places there begin with `first`."""

    def begin(self) -> None:
        """Poison the engine: slices are about to come. Raises: `TransferError` for one without a plan."""

    def take(self) -> None:
        """Receive everything that is planned; returns when it lies in the engine's memory."""

    def sums(self) -> list[list[int]]:
        """Digests of what lies in each of its ranks, in the order of the plan."""
        return []


@runtime_checkable
class TakesSlices(Protocol):
    """An engine that may be elsewhere."""

    @property
    def slice_taker(self) -> SliceTaker | None:
        """The taker of slices for it; `None` where it takes whole weights only, or is not elsewhere."""


class TakesWholeWeights(Unsupported):
    """Reason why an engine takes no slices, raised on every rank of the trainer."""


# ---- the trainer's side ----------------------------------------------------------------------------------------------


class RemoteSlices(SlicesTransport):
    """Sends parts of the weights to the ranks of engines elsewhere that take them. Each method is a collective."""

    def __init__(
        self,
        source: WeightSource,
        taker: SliceTaker,
        *,
        device: torch.device,
        why_not_shared: str,
        bucket_bytes: int | None = None,
    ) -> None:
        """`taker` is of this rank's engine, or a plain `SliceTaker`.

        Raises: as `SlicesTransport`; `TakesWholeWeights`, on every rank, where an engine takes no slices.
        """
        self._taker = taker
        self._end: GroupEnd | None = None
        self._failures = 0
        self._members: Hashable = None
        self._first, self._num_elsewhere = 0, 0  # number of the first rank of this rank's engine; of all engines' ranks
        self._places: Mapping[int, int] = {}
        self._taken: Mapping[int, Sequence[Slice]] = {}
        joined = _JoinedRanks(source.ranks, self)
        plan = LoadPlan.of(source.tensors(), fallbacks={})  # nothing is copied within this process
        super().__init__(
            source,
            plan,
            device=device,
            why_not_shared=why_not_shared,
            bucket_bytes=bucket_bytes,
            ranks=joined,
            wire=self,
        )

    def transfer(self, version: int = 0) -> int:
        """Send every slice to where it goes, and return the bytes that this rank has sent.

        Engines of a fleet that turn out to be lost leave, and the others are sent all of it again.
        """
        while True:
            try:
                super().transfer(version)
                break
            except BaseException as error:
                self._failures += 1  # the next one plans anew
                self._let_go(str(error) or type(error).__name__)
                if not self._has_left(error):
                    raise
        own = self._ranks.rank
        return sum(d.num_bytes for bucket in self._route.plan.buckets for d in bucket if d.sender == own)

    def verify(self) -> None:
        """Compare every byte by its digest, and parts that several ranks hold; see `transfer`.

        Raises: `TransferError` with a name.
        """
        try:
            super().verify()
        except BaseException as error:
            if not self._has_left(error):
                raise
            self.transfer()
            self.verify()

    def _has_left(self, error: BaseException) -> bool:
        """Tell if an engine has left that was asked what it takes. A collective, after a failure of all ranks."""
        if not isinstance(error, Exception):
            return False
        return self._ranks.any(self._taker.members != self._members, "asking who has left")

    def reconnect(self) -> None:
        """Plan anew at the next transfer, with an engine that has been started again."""
        self._failures += 1
        self._let_go("the engine has been started again")

    def close(self) -> None:
        """Let go of the group and of what is recorded."""
        self._let_go("the runtime is closed")
        self._end = None
        super().close()

    def _let_go(self, why: str) -> None:
        if self._end is not None:
            self._end.give_up(TransferError(why))  # it stays until there is another: the others read why

    def _whereabouts(self) -> tuple[list[torch.Tensor], list[Hashable]]:
        tensors, places = super()._whereabouts()
        return tensors, [*places, self._failures, self._taker.members]

    # ---- planning

    def _elsewhere(self) -> Mapping[int, Sequence[Slice]]:
        found: list[tuple[Slice, ...]] = []
        refusal: str | None = None
        with self._ranks.fail_together("asking engines elsewhere what they take"):
            self._members = self._taker.members
            try:
                found = [one.slices for one in what_is_taken(self.source, self._taker)]
            except Unsupported as error:
                refusal = str(error)
        told = self._ranks.gather((found, self.source.foreign, refusal))
        if refusals := [why for _, _, why in told.values() if why is not None]:
            raise TakesWholeWeights(refusals[0])
        number = max(told) + 1
        slices: dict[int, Sequence[Slice]] = {}
        for rank, (of_engine, foreign, _) in told.items():
            self.source.foreign |= foreign  # engines that do not know some buffer are asked on one rank alone
            if rank == self._ranks.rank:
                self._first = number + len(slices)
            slices |= {number + len(slices) + n: taken for n, taken in enumerate(of_engine)}
        if not slices:
            raise Unsupported("no rank of the trainer has an engine that takes slices of the weights")
        self._num_elsewhere = len(slices)
        return slices

    def _settle(self, told: Mapping[int, Told]) -> None:
        ranks, places = self._ranks, indices(list(told))
        words = PlanWords(
            {rank: of.held for rank, of in told.items()},
            {rank: of.taken for rank, of in told.items()},
            [spec.name for spec in next(iter(told.values())).specs],
            self._bucket_bytes,
        )
        with ranks.fail_together("planning slices with engines elsewhere"):
            self._taker.plan(words, self._first)
        self._places, self._taken = places, words.taken
        self._let_go("another group is made")  # engines have left it as they were asked what they take
        with ranks.fail_together("meeting engines elsewhere"):
            self._end = self._meet_engines(len(told))

    def _meet_engines(self, size: int) -> GroupEnd:
        """Join a group of all ranks of the trainer and of engines."""
        ranks, taker, place, store = self._ranks, self._taker, None, None
        with ranks.fail_together("making a group with engines elsewhere"):
            if taker.address:
                meeting, store = meet_at(taker.address, self._device, size, taker.deadline_s)
                place = meeting, taker.deadline_s
        # all meet where the first that has an engine says
        owner, (where, deadline_s) = next((rank, of) for rank, of in ranks.gather(place).items() if of is not None)
        first = self._places.get(self._first, 0)
        asked = in_thread(lambda: taker.meet(where, first, deadline_s))
        own = store if owner == ranks.rank else None
        return meet(where, self._places[ranks.rank], self._device, deadline_s, store=own, others=[asked])

    def _said(self, route: Any, told: Mapping[int, Told]) -> str:
        received = [route.plan.received_bytes(rank) for rank in list(told)[-self._num_elsewhere :]]
        return (
            f"slices go from {len(told) - len(received)} of the trainer's ranks to {len(received)} of engines, each of "
            f"which receives {format_bytes(max(received))} at most"
        )

    # ---- a transfer

    def _exchange(self, exchange: Exchange) -> None:
        ranks, end = self._ranks, self._end
        assert end is not None, "ranks have met as they planned"
        with ranks.fail_together("asking engines elsewhere to take slices"):
            self._taker.begin()
        taking, error = in_thread(self._taker.take), None
        taking.add_done_callback(lambda done: end.tell(why) if (why := done.exception()) is not None else None)

        def send() -> None:
            with torch.no_grad(), end.watched():
                super(RemoteSlices, self)._exchange(exchange)
                end.settle(self._device)

        try:
            # in a thread: torch's waits take no interrupt
            result(in_thread(send, self._device), "engines elsewhere")
        except Exception as caught:  # noqa: BLE001 - the others wait for an answer
            error = end.give_up(caught)
        try:
            result(taking, "engines elsewhere")
        except ColoError as caught:  # it says more
            error = caught
        except Exception as caught:  # noqa: BLE001 - as above
            error = error or caught
        ranks.report_failure("sending slices to engines elsewhere", error)
        if error is not None:
            raise error

    # ---- what an `Exchange` asks

    @property
    def rank(self) -> int:
        """Number of this rank in the plan."""
        return self._ranks.rank

    def send_and_receive(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Begin to send memory to ranks of engines, which send nothing. Raises: `RuntimeError`, as torch."""
        assert self._end is not None and not receives
        return self._end.send_and_receive([(self._places[rank], memory) for rank, memory in sends], [])

    def report_failure(self, operation: str, error: Exception | None) -> None:
        """Do nothing: ranks tell each other once engines have answered."""

    # ---- comparing

    def rows_elsewhere(self, width: int) -> torch.Tensor:
        """A row of digests of each rank of engines, after a number that says that it has not failed."""
        sums: list[list[int]] = []
        with self._ranks.fail_together("asking engines elsewhere what they hold"):
            sums = self._taker.sums()
        told = [of_rank for of_engine in self._ranks.gather(sums).values() for of_rank in of_engine]
        return torch.tensor(
            [[0, *of_rank] + [0] * (width - 1 - len(of_rank)) for of_rank in told], dtype=torch.int64, device="cpu"
        )

    def _names_of(self, found: Differences) -> Iterator[str]:
        return (self._taken[delivery.receiver][delivery.taken].name for delivery in found.different)


def what_is_taken(source: WeightSource, taker: SliceTaker) -> list[Taken]:
    """Ask what ranks of engines take of a source's weights. Raises: `Unsupported` for one that takes whole ones only.

    And `TransferError` for weights that an engine leaves out.
    """
    found = source.given_to(taker.taken)
    for of_engine in found:
        for rank, one in enumerate(of_engine):
            if one.refusal is not None:
                raise Unsupported(f"rank {rank} of the engine takes whole weights: {one.refusal}")
        check_taken(source.tensors(), [one.left_out for one in of_engine])
    return [one for of_engine in found for one in of_engine]


class _JoinedRanks(RankGroup):
    """The trainer's ranks, and behind them those of engines elsewhere where digests are compared."""

    def __init__(self, trainers: RankGroup, transport: RemoteSlices) -> None:
        super().__init__()
        self.wire, self.device = trainers.wire, trainers.device
        self._trainers, self._transport = trainers, transport

    @property
    def is_alone(self) -> bool:
        """True if the trainer has no other ranks to agree with."""
        return self._trainers.is_alone

    def groups(self) -> Iterator[Any]:
        """The trainer's groups: engines agree to nothing."""
        return self._trainers.groups()

    def connect(self, num_ranks: int) -> None:
        """Do nothing: ranks meet once all have planned."""

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        """A row of numbers of each rank, those of engines last: shape [num_ranks, len(row)]."""
        return torch.cat([self._trainers.rows(row), self._transport.rows_elsewhere(len(row)).to(row.device)])


# ---- the engine's side -----------------------------------------------------------------------------------------------


class SliceTarget:
    """One rank of an engine: its memory as what slices go to, by the copies that its loader makes."""

    def __init__(self, plan: LoadPlan, device: torch.device) -> None:
        """`plan` is of whole weights. What it cannot take as slices is the `refusal` of `taken`."""
        self._device = device
        self._named = [] if why_not_sliced(plan) else targets_of(plan)
        slices = tuple(Slice(name, target.landing.box, dtype_name(target.memory)) for name, target in self._named)
        self.taken = Taken(slices, plan.left_out, why_not_sliced(plan))
        """Words about it for the trainer."""

        self._end: GroupEnd | None = None
        self._rank = 0
        self._exchange: Exchange | None = None
        self._places: Mapping[int, int] = {}
        self._sums = CopyPlan([])

    def plan(self, words: PlanWords, rank: int) -> None:
        """Plan what comes to this rank, of this number in the plan. Raises: `TransferError`, as `make_plan`."""
        plan, targets = words.plan(), [target for _, target in self._named]
        self._rank, self._places = rank, indices(list(words.held))
        self._exchange = Exchange(plan, self, targets, device=self._device)
        mine = [targets[d.taken].view(d.box) for d in plan.every if d.receiver == rank]
        self._sums = CopyPlan(device=self._device, read=mine)

    def meet(self, meeting: Meeting, place: int, deadline_s: float) -> None:
        """Join a group in place of one before. Raises: `TransferError` where that fails."""
        self.let_go("another group is made")
        self._end = meet(meeting, place, self._device, deadline_s)

    def begin(self) -> None:
        """Raise `TransferError` unless there are a plan and a group, in which nothing has failed."""
        if self._exchange is None or self._end is None or not self._end.is_whole:
            raise TransferError("no slices have been planned with this engine, or another client has connected since")

    def take(self) -> None:
        """Receive every slice into the engine's memory. Raises: `TransferError` where that fails."""
        self.begin()
        assert self._exchange is not None and self._end is not None
        try:
            with self._end.watched():
                self._exchange.send([])
                self._end.settle(self._device)
        except BaseException as error:
            first = self._end.give_up(error)
            if first is error or not isinstance(error, Exception):
                raise
            raise first from error

    def sums(self) -> list[int]:
        """Digests of what lies in the engine's memory, in the plan's order."""
        found: list[int] = self._sums.digests().tolist()
        return found

    def let_go(self, why: str) -> None:
        """Let go of the group, if there is one."""
        if self._end is not None:
            self._end.give_up(TransferError(why))
        self._end = None

    # ---- what an `Exchange` asks

    @property
    def rank(self) -> int:
        """Number of this rank in the plan."""
        return self._rank

    def send_and_receive(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Begin to receive memory from the trainer's ranks. Raises: `RuntimeError`, as torch."""
        assert self._end is not None
        return self._end.send_and_receive([], [(self._places[rank], memory) for rank, memory in receives])

    def report_failure(self, operation: str, error: Exception | None) -> None:
        """Do nothing: whoever has asked is told."""
