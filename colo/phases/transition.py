"""Planning a transition: the ordered steps from one phase's residencies to the next, as data. Pure; imports no torch.

Steps come in the order frees, moves to the device, allocations, so that the KV cache, which takes what is left, is
last. A plan is admitted as a whole: if any step of it would not fit, planning raises and nothing has happened. It
starts from a ledger: who holds how many bytes, on the device and on the host, and what is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from colo.config import Offload
from colo.errors import BudgetError
from colo.phases.phase import (
    ENGINE_KV_CACHE,
    NEEDS,
    TRAINER_RESIDENT_STATE,
    Need,
    Phase,
    Residency,
    check_edge,
    check_move,
)
from colo.units import format_bytes

if TYPE_CHECKING:
    from colo.phases.phase import Segment


class Action(StrEnum):
    """Kind of a step; the order of the members is the order of the steps."""

    DISCARD = "discard"
    OFFLOAD = "offload"
    ONLOAD = "onload"
    ALLOCATE = "allocate"


RESOURCES: Mapping[Action, str] = {
    Action.DISCARD: "device",
    Action.OFFLOAD: "d2h",
    Action.ONLOAD: "h2d",
    Action.ALLOCATE: "device",
}
"""Resource that each action keeps busy; steps on different ones overlap."""

_ACTIONS: Mapping[tuple[Residency, Residency], Action] = {
    (Residency.RESIDENT, Residency.DISCARDED): Action.DISCARD,
    (Residency.OFFLOADED, Residency.DISCARDED): Action.DISCARD,
    (Residency.RESIDENT, Residency.OFFLOADED): Action.OFFLOAD,
    (Residency.OFFLOADED, Residency.RESIDENT): Action.ONLOAD,
    (Residency.DISCARDED, Residency.RESIDENT): Action.ALLOCATE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One segment's move within a transition."""

    segment: str
    source: Residency
    target: Residency
    size_bytes: int

    @property
    def action(self) -> Action:
        """Kind of the move."""
        return _ACTIONS[self.source, self.target]

    @property
    def resource(self) -> str:
        """Resource that the move keeps busy."""
        return RESOURCES[self.action]

    @property
    def device_delta_bytes(self) -> int:
        """Change of the device bytes in use."""
        if self.target is Residency.RESIDENT:
            return self.size_bytes
        return -self.size_bytes if self.source is Residency.RESIDENT else 0

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the bus."""
        return self.size_bytes if self.action in (Action.OFFLOAD, Action.ONLOAD) else 0

    def __str__(self) -> str:
        return f"{self.action} {self.segment} ({format_bytes(self.size_bytes)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """An admitted plan from one phase to another."""

    source: Phase
    target: Phase
    steps: tuple[Step, ...]
    before: Ledger
    after: Ledger
    peak_bytes: int  # the most device bytes that segments hold at any point of the transition, its two ends included
    promised_bytes: int  # device bytes of the whole target phase: resident segments, late ones and working memory
    side_by_side: bool  # whether late segments and working memory fit together, rather than one after the other

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the bus."""
        return sum(step.moved_bytes for step in self.steps)


def plan_transition(
    source: Phase,
    target: Phase,
    ledger: Ledger,
    *,
    needs: Mapping[Phase, Mapping[str, Need]] = NEEDS,
    working_bytes: int = 0,
    offload: Offload = Offload.AUTO,
    drop_cache: bool = False,
) -> Transition:
    """Plan the moves that take `ledger` from phase `source` to phase `target`.

    `working_bytes` is memory that the target phase uses in addition to its segments, such as activations. Late segments
    get room in addition to it where both fit, and otherwise after the working memory is free again.
    `Offload.AUTO` sends away only what must go, cheapest bytes first; `ALWAYS` everything that the phase does not use;
    `NEVER` nothing. With `drop_cache` the KV cache leaves for training although it would fit.

    Raises: `PhaseError` for an illegal edge; `BudgetError`, with the ledger, when the phase does not fit.
    """
    check_edge(source, target)
    by_need: dict[Need, list[Holding]] = {need: [] for need in Need}
    for holding in ledger.holdings.values():
        by_need[needs[target].get(holding.name, Need.UNUSED)].append(holding)
    leaving, side_by_side = _evictions(target, ledger, by_need, working_bytes, offload, drop_cache=drop_cache)
    # the condition is for the type checker: none leaves that has no place to go (`_may_leave`)
    moves = [(h, h.away) for h in leaving if h.away is not None]
    moves += [(h, Residency.RESIDENT) for h in by_need[Need.RESIDENT] if h.residency in _AWAY]
    steps = sorted(
        (Step(segment=h.name, source=h.residency, target=to, size_bytes=h.size_bytes) for h, to in moves),
        key=lambda step: list(Action).index(step.action),  # frees first, so that the peak stays low
    )
    after, peak_bytes = ledger, ledger.device_bytes
    for step in steps:
        after = after.moved(step.segment, step.target)
        peak_bytes = max(peak_bytes, after.device_bytes)
    # the host is looked at last: only now is it known what leaves for it
    if not after.fits_host:
        raise after.refuse(
            f"the host arena in phase {target}",
            needed_bytes=after.host_bytes,
            free_bytes=after.host_capacity_bytes,
            advice="Raise host_limit_bytes, or keep more on the device.",
        )
    # counted after the steps, since late segments that have yielded come back within the phase too
    late_bytes = _away_bytes(after, by_need[Need.LATE])
    return Transition(
        source=source,
        target=target,
        steps=tuple(steps),
        before=ledger,
        after=after,
        peak_bytes=peak_bytes,
        side_by_side=side_by_side,
        promised_bytes=after.device_bytes
        + (late_bytes + working_bytes if side_by_side else max(late_bytes, working_bytes)),
    )


def plan_evictions(
    ledger: Ledger, names: Iterable[str], *, needed_bytes: int, offload: Offload = Offload.AUTO
) -> tuple[Step, ...]:
    """The moves of some of the segments `names` that leave `needed_bytes` free, or of all where that is not enough.

    Only what the host has room for leaves.
    """
    candidates = [h for h in map(ledger.holdings.__getitem__, names) if _may_leave(h, offload)]
    steps: list[Step] = []
    for holding in _cheapest(candidates, needed_bytes - ledger.free_bytes):
        # each by itself: a small one may still find room on the host where a large one did not
        if holding.away is not None and (moved := ledger.moved(holding.name, holding.away)).fits_host:
            ledger = moved
            step = Step(
                segment=holding.name, source=holding.residency, target=holding.away, size_bytes=holding.size_bytes
            )
            steps.append(step)
    return tuple(steps)


def _evictions(
    target: Phase,
    ledger: Ledger,
    by_need: Mapping[Need, list[Holding]],
    working_bytes: int,
    offload: Offload,
    *,
    drop_cache: bool,
) -> tuple[list[Holding], bool]:
    """Choose the segments that leave; also true if late segments and working memory fit together.

    Where they do not, they take turns: late segments that are resident may leave too, and come back when the working
    memory has gone.
    """
    movable = [h for h in by_need[Need.UNUSED] if _may_leave(h, offload)]
    arriving_bytes = sum(h.size_bytes for h in by_need[Need.RESIDENT] if h.residency in _AWAY)
    late_bytes = _away_bytes(ledger, by_need[Need.LATE])
    # not for SYNC, which the rollout follows, with a plan of its own
    is_eager = offload is Offload.ALWAYS and target in (Phase.ROLLOUT, Phase.TRAIN)
    wanted_bytes = arriving_bytes + late_bytes + working_bytes - ledger.free_bytes
    is_dropped = drop_cache and target is Phase.TRAIN
    chosen = [h for h in movable if is_eager or (is_dropped and h.name == ENGINE_KV_CACHE)]
    others = [h for h in movable if h not in chosen]
    chosen += _cheapest(others, wanted_bytes - sum(h.size_bytes for h in chosen))
    available_bytes = ledger.free_bytes + sum(h.size_bytes for h in chosen)
    if arriving_bytes + late_bytes + working_bytes <= available_bytes:
        return chosen, True
    # each of the two has to fit without the other: late segments come when the working memory has gone
    _require(target, ledger, arriving_bytes + late_bytes, available_bytes)
    # late segments leave last of all: they have to come back within the phase
    yielding = [h for h in by_need[Need.LATE] if _may_leave(h, offload)]
    yielding = _cheapest(yielding, arriving_bytes + working_bytes - available_bytes)
    _require(target, ledger, arriving_bytes + working_bytes, available_bytes + sum(h.size_bytes for h in yielding))
    return [*chosen, *yielding], False


def _require(target: Phase, ledger: Ledger, needed_bytes: int, available_bytes: int) -> None:
    if needed_bytes > available_bytes:
        staying = [h.name for h in ledger.holdings.values() if h.device_bytes and not h.away]
        kept = f" {', '.join(staying)} cannot leave." if staying else ""
        what = f"phase {target}"
        if available_bytes < 0:  # the capacity is smaller than what stays in any case
            held_bytes = ledger.capacity_bytes - available_bytes
            what, needed_bytes = f"{what}, with what stays,", needed_bytes + held_bytes
            available_bytes = ledger.capacity_bytes
        raise ledger.refuse(
            what,
            needed_bytes=needed_bytes,
            free_bytes=available_bytes,
            advice=f"Make the KV cache, the batch or the model smaller, or raise device_limit_bytes.{kept}",
        )


_AWAY = (Residency.OFFLOADED, Residency.DISCARDED)


def _may_leave(holding: Holding, offload: Offload) -> bool:
    if holding.residency is not Residency.RESIDENT or holding.away is None:
        return False
    # NEVER forbids copies to the host, not giving up what is made anew anyway, such as the KV cache
    return offload is not Offload.NEVER or holding.away is Residency.DISCARDED


def _away_bytes(ledger: Ledger, holdings: list[Holding]) -> int:
    """Bytes of those `holdings` that are not on the device in `ledger`."""
    rows = (ledger.holdings[h.name] for h in holdings)
    return sum(row.size_bytes for row in rows if row.residency in _AWAY)


def _cheapest(candidates: list[Holding], needed_bytes: int) -> list[Holding]:
    """Candidates that free `needed_bytes`: discards first, then small offloads, without those made spare later.

    State that stays goes last, since it does so for good. Greedy, so that it may move more bytes than it must. Returns
    every candidate when they are not enough together.
    """
    chosen: list[Holding] = []
    # by name too, so that ranks with the same ledger choose alike
    for holding in sorted(candidates, key=lambda h: (h.name == TRAINER_RESIDENT_STATE, h.eviction_cost_bytes, h.name)):
        if needed_bytes <= 0:
            break
        chosen.append(holding)
        needed_bytes -= holding.size_bytes
    # An early small choice may have become unnecessary through a later large one.
    surplus_bytes = -needed_bytes
    for holding in sorted(chosen, key=lambda h: (h.name != TRAINER_RESIDENT_STATE, -h.eviction_cost_bytes, h.name)):
        if holding.size_bytes <= surplus_bytes:
            chosen.remove(holding)
            surplus_bytes -= holding.size_bytes
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One segment's line in the ledger."""

    name: str
    size_bytes: int  # device bytes when resident; for a discarded segment, what becoming resident will take
    residency: Residency
    away: Residency | None = None  # where it goes when its bytes are needed; `None` for never
    home_bytes: int = 0  # host bytes that it takes in any residency, as streamed state does; no more once it is away

    @property
    def device_bytes(self) -> int:
        """Device bytes in this residency."""
        return self.size_bytes if self.residency is Residency.RESIDENT else 0

    @property
    def host_bytes(self) -> int:
        """Host bytes in this residency."""
        return self.home_bytes or (self.size_bytes if self.residency is Residency.OFFLOADED else 0)

    @property
    def eviction_cost_bytes(self) -> int:
        """Bytes that would cross the bus if it left now."""
        return self.size_bytes if self.away is Residency.OFFLOADED else 0

    @classmethod
    def of(cls, segment: Segment) -> Holding:
        """The line of a live segment."""
        return cls(
            name=segment.name,
            size_bytes=segment.size_bytes,
            residency=segment.residency,
            away=segment.away,
            # no part of the protocol: only streamed state has some
            home_bytes=getattr(segment, "home_bytes", 0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """All segments of a runtime on one device."""

    capacity_bytes: int  # device bytes that the segments and the phases' working memory may take together
    host_capacity_bytes: int  # host bytes that offloaded segments may take together
    holdings: Mapping[str, Holding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # a copy that nobody can write to: transitions keep the ledgers of before and after
        object.__setattr__(self, "holdings", MappingProxyType(dict(self.holdings)))

    @classmethod
    def of(cls, holdings: Iterable[Holding], *, capacity_bytes: int, host_capacity_bytes: int) -> Ledger:
        """A ledger of `holdings`, whose names must differ. Raises: `ValueError` naming one that is there twice."""
        rows: dict[str, Holding] = {}
        for holding in holdings:
            if holding.name in rows:
                raise ValueError(f"two segments are called {holding.name}")
            rows[holding.name] = holding
        return cls(capacity_bytes=capacity_bytes, host_capacity_bytes=host_capacity_bytes, holdings=rows)

    @property
    def device_bytes(self) -> int:
        """Device bytes of all segments."""
        return sum(holding.device_bytes for holding in self.holdings.values())

    @property
    def host_bytes(self) -> int:
        """Host bytes of all segments."""
        return sum(holding.host_bytes for holding in self.holdings.values())

    @property
    def free_bytes(self) -> int:
        """Device bytes left; negative when the segments hold more than the capacity."""
        return self.capacity_bytes - self.device_bytes

    @property
    def fits_host(self) -> bool:
        """True if the host has room for the offloaded segments."""
        return self.host_bytes <= self.host_capacity_bytes

    def moved(self, name: str, target: Residency) -> Ledger:
        """The ledger after one segment has moved. Raises: `PhaseError` for an illegal move."""
        holding = self.holdings[name]
        check_move(name, holding.residency, target)
        return replace(self, holdings={**self.holdings, name: replace(holding, residency=target)})

    def refuse(self, what: str, *, needed_bytes: int, free_bytes: int | None = None, advice: str) -> BudgetError:
        """A `BudgetError` that says what does not fit, by how much, who holds the rest, and what to change."""
        free_bytes = self.free_bytes if free_bytes is None else free_bytes
        message = (
            f"{what} needs {format_bytes(needed_bytes)}, but {format_bytes(max(0, free_bytes))} could be made free: "
            f"{format_bytes(needed_bytes - free_bytes)} are missing. {advice}\n{self.render()}"
        )
        return BudgetError(message, needed_bytes=needed_bytes, free_bytes=free_bytes)

    def render(self) -> str:
        """The ledger as text, one segment a line, largest first."""
        rows = sorted(self.holdings.values(), key=lambda h: (-h.size_bytes, h.name))
        width = max([len(h.name) for h in rows] + [len("capacity")])
        lines = [f"  {h.name:<{width}}  {format_bytes(h.size_bytes):>11}  {h.residency}" for h in rows]
        lines.append(f"  {'free':<{width}}  {format_bytes(self.free_bytes):>11}")
        lines.append(f"  {'capacity':<{width}}  {format_bytes(self.capacity_bytes):>11}")
        host = f"{format_bytes(self.host_bytes)} of {format_bytes(self.host_capacity_bytes)}"
        return "\n".join(["ledger of the device:", *lines, f"  host arena: {host}"])
