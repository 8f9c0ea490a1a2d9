"""The scheduler: walks a runtime through its phases, one admitted transition at a time. Imports no torch.

A transition is planned and admitted as a whole, then its steps are started in order. Departures run in the background:
a step that needs bytes waits for just as many of them as it takes, so copies to the host overlap whatever else the
transition and the phase after it do. When a step fails, the steps before it are undone and the phase is the old one; if
undoing fails too, the phase is `IDLE`, which asks nothing of any segment.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colo.config import Offload
from colo.errors import BudgetError
from colo.phases.phase import NEEDS, Need, Phase, Residency
from colo.phases.trace import MemorySample, Trace
from colo.phases.transition import Action, Holding, Ledger, Step, Transition, plan_evictions, plan_transition

if TYPE_CHECKING:
    from colo.phases.phase import Move, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of what the segments of a runtime take, together."""

    capacity_bytes: int
    host_capacity_bytes: int
    offload: Offload = Offload.AUTO
    drop_cache: bool = False
    """Let the KV cache leave for training even where it fits: what a pass takes is known only when it has run."""


class Scheduler:
    """Moves segments so that each phase finds what it needs.

    Not thread-safe: phases follow one another, and so do the calls.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        budget: Budget,
        *,
        needs: Mapping[Phase, Mapping[str, Need]] = NEEDS,
        trace: Trace | None = None,
        used_device_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.phase = Phase.IDLE
        self.trace = trace if trace is not None else Trace(capacity_bytes=budget.capacity_bytes)
        self.working_bytes: dict[Phase, int] = {}
        """Memory that each phase uses in addition to its segments; kept free when the phase is entered."""

        self.segments: Mapping[str, Segment] = {segment.name: segment for segment in segments}
        self.offload = budget.offload  # when trainer state leaves for a rollout; may be changed between phases
        self.budget = budget
        self._needs = needs
        # in the order in which they began: one copy stream ends them in that order
        self._departing: dict[str, Move] = {}
        self._used_device_bytes = used_device_bytes
        self.promised_bytes = 0  # device bytes that the current phase was promised at most
        self.side_by_side = True  # true if late segments of the current phase fit beside its working memory

    def add(self, segment: Segment, needs: Mapping[Phase, Need]) -> None:
        """Move one more segment, by its needs in each phase; a phase that is not named does not use it."""
        self.segments = {**self.segments, segment.name: segment}
        phases = {phase: {**self._needs.get(phase, {})} for phase in Phase}
        for phase, need in needs.items():
            phases[phase][segment.name] = need
        self._needs = phases

    def remove(self, name: str) -> None:
        """Move a segment no more."""
        self.segments = {other: segment for other, segment in self.segments.items() if other != name}

    def ledger(self) -> Ledger:
        """Who holds what now; moves under way count as finished."""
        rows = (Holding.of(segment) for segment in self.segments.values())
        budget = self.budget
        return Ledger.of(rows, capacity_bytes=budget.capacity_bytes, host_capacity_bytes=budget.host_capacity_bytes)

    def plan(self, target: Phase, ledger: Ledger | None = None) -> Transition:
        """The transition to `target` as it would run now, or from no phase with a given `ledger`.

        Raises: `PhaseError`, `BudgetError`.
        """
        return plan_transition(
            # a ledger that somebody has made up belongs to no phase; IDLE has an edge to each
            self.phase if ledger is None else Phase.IDLE,
            target,
            self.ledger() if ledger is None else ledger,
            needs=self._needs,
            working_bytes=self.working_bytes.get(target, 0),
            offload=self.offload,
            drop_cache=self.budget.drop_cache,
        )

    def enter(self, target: Phase) -> Transition:
        """Go to `target`.

        Raises: `PhaseError` for an illegal edge, `BudgetError` when it does not fit; nothing has changed then. Whatever
        a step raises, once the steps before it are undone.
        """
        transition = self.plan(target)  # refuses before anything moves
        with self.trace.span(f"{self.phase} -> {target}", category="transition", phase=target):
            self._run(transition)
        self.phase = target
        self.promised_bytes = transition.promised_bytes
        self.side_by_side = transition.side_by_side
        self.sample()
        return transition

    def leave(self) -> None:
        """Go to `IDLE`, unless it is there already. Raises: as `enter`."""
        if self.phase is not Phase.IDLE:
            self.enter(Phase.IDLE)

    def anticipate(self, target: Phase, *, but_for: Container[str] = ()) -> None:
        """Start the departures that entering `target` would need, in the background; later calls wait for them.

        Segments in `but_for` stay until then. Nothing more is started where the phase would not fit, or the host has no
        room; `enter` raises the error then.
        """
        with suppress(BudgetError):
            for step in self.plan(target).steps:
                # copies only: they take time, while a discard takes none and could not be taken back
                if step.action is Action.OFFLOAD and step.segment not in but_for:
                    self._start(step)

    def require(self, name: str) -> None:
        """Bring one segment to the device within the current phase, and wait for it.

        Where it does not fit, segments that the phase does not use leave, but never while an engine is at work.
        Raises: `BudgetError` when there is no room, and whatever bringing it raises; segments that have left for it are
        back then.
        """
        segment = self.segments[name]
        # three are asked for in every step, and nearly always all are there
        if segment.residency is Residency.RESIDENT and name not in self._departing:
            segment.begin(Residency.RESIDENT).wait()  # it may still be on its way
            return
        self.fetch(name).wait()
        self.sample()

    def fetch(self, name: str) -> Move:
        """Start bringing one segment to the device within the current phase; see `require`."""
        segment = self.segments[name]
        done: list[Step] = []
        try:
            if segment.residency is Residency.OFFLOADED:
                for step in self._plan_arrival(segment):
                    self._start(step)
                    done.append(step)
                # its own departure, if there is one, is turned round by `begin` and must not be waited for
                self._make_room(segment.size_bytes - segment.device_bytes, keep=name)
            move = segment.begin(Residency.RESIDENT)
        except BaseException as error:
            self._undo(done, error)
            raise
        # only now: had `begin` raised, its departure would still be under way
        self._departing.pop(name, None)
        self.promised_bytes = max(self.promised_bytes, self.ledger().device_bytes)  # the phase may not have needed it
        self.sample()
        return move

    def forget(self, name: str) -> None:
        """Discard a segment's host copy, once it is complete: the segment's next owner writes it anew.

        Nothing happens to a segment that is elsewhere.
        """
        segment = self.segments[name]
        if segment.residency is Residency.OFFLOADED:
            self._departing.pop(name, None)
            segment.begin(Residency.DISCARDED).wait()
            self.sample()

    def fits(self, name: str) -> bool:
        """Tell if there is room for a segment that is away, without moving another."""
        return self.segments[name].size_bytes <= self.ledger().free_bytes

    def settle(self) -> None:
        """Wait until every departure has finished and its bytes are free."""
        for name in list(self._departing):
            self._departing[name].wait()
            del self._departing[name]
        self.sample()

    def sample(self) -> None:
        """Take back what departures have freed, and record who holds how many bytes at this moment."""
        self._departing = {name: move for name, move in self._departing.items() if not move.poll()}
        self.trace.record(
            MemorySample(
                time_s=self.trace.now_s(),
                phase=self.phase,
                segments={name: segment.device_bytes for name, segment in self.segments.items()},
                host_bytes=sum(segment.host_bytes for segment in self.segments.values()),
                device_used_bytes=self._used_device_bytes(),
            )
        )

    def _run(self, transition: Transition) -> None:
        done: list[Step] = []
        arriving: list[Move] = []
        try:
            for step in transition.steps:
                with self.trace.span(
                    str(step.action) + " " + step.segment,
                    category="step",
                    phase=transition.target,
                    resource=step.resource,
                    num_bytes=step.moved_bytes,
                ):
                    # as late as can be, so that copies to the host overlap the steps before this one
                    if step.device_delta_bytes > 0:
                        self._make_room(step.device_delta_bytes)
                    move = self._start(step)
                    # after it has begun: a step whose `begin` raises has changed nothing, and is not undone
                    done.append(step)
                    if step.device_delta_bytes > 0:
                        arriving.append(move)
                # `enter` samples in the end, when what was leaving beside an arrival may have left
                if step is not transition.steps[-1] or step.device_delta_bytes > 0:
                    self.sample()
            for move in arriving:  # all are queued before the first is waited for
                move.wait()
            # room for the phase's own memory; what leaves beyond that may go on leaving while the phase runs
            self._make_room(self.working_bytes.get(transition.target, 0))
        except BaseException as error:
            self._undo(done, error)
            raise

    def _start(self, step: Step) -> Move:
        move = self.segments[step.segment].begin(step.target)
        if step.action is Action.OFFLOAD:
            self._departing[step.segment] = move
        else:
            # an arrival or a discard ends a departure of the same segment
            self._departing.pop(step.segment, None)
        return move

    def _undo(self, done: list[Step], error: BaseException) -> None:
        """Bring every moved segment back, last first. Room is there: the bytes come from undoing the later steps."""
        for step in reversed(done):
            try:
                if step.device_delta_bytes < 0:
                    # departures of others may still hold the bytes; its own is turned round by `begin`
                    self._make_room(step.size_bytes, keep=step.segment)
                self.segments[step.segment].begin(step.source).wait()
                self._departing.pop(step.segment, None)
            except Exception as failure:  # noqa: BLE001 - reported with the error that made undoing necessary
                error.add_note(f"undoing '{step}' failed too: {failure!r}; the runtime is idle")
                self.phase = Phase.IDLE
            # an interrupt: what is left to undo stays as it is, which only IDLE allows
            except BaseException:
                self.phase = Phase.IDLE
                raise
        self.sample()

    def _make_room(self, needed_bytes: int, *, keep: str | None = None) -> None:
        """Wait for departures under way, oldest first, until `needed_bytes` are free."""
        for name in [n for n in self._departing if n != keep]:
            # bytes held at this moment: the ledger counts moves under way as finished
            held_bytes = sum(segment.device_bytes for segment in self.segments.values())
            if held_bytes + needed_bytes <= self.budget.capacity_bytes:
                return
            if (move := self._departing.pop(name, None)) is not None:  # else it has ended beside an earlier one
                move.wait()
                self.sample()

    def _plan_arrival(self, segment: Segment) -> tuple[Step, ...]:
        """The departures that make room for one segment. Raises: `BudgetError` when they are not enough."""
        ledger = self.ledger()
        leaving: tuple[Step, ...] = ()
        # in the other phases the engine may be at work on what would leave
        if segment.size_bytes > ledger.free_bytes and self.phase in (Phase.IDLE, Phase.TRAIN):
            unused = [n for n in self.segments if self._needs[self.phase].get(n, Need.UNUSED) is Need.UNUSED]
            leaving = plan_evictions(ledger, unused, needed_bytes=segment.size_bytes, offload=self.offload)
        free_bytes = ledger.free_bytes + sum(step.size_bytes for step in leaving)
        if segment.size_bytes > free_bytes:
            raise ledger.refuse(
                f"bringing {segment.name} back in phase {self.phase}",
                needed_bytes=segment.size_bytes,
                free_bytes=free_bytes,
                advice="Enter the phase that needs it, or free other segments first.",
            )
        return leaving
