"""Segments of a vLLM engine, as the trainer's process sees them: moved by the workers, counted here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from colo.engine import SleepLevel
from colo.engines.vllm.wire import WorkerInfo
from colo.errors import PhaseError
from colo.phases.phase import Residency, check_move
from colo.phases.segment import Done, Move


class Holder(Protocol):
    """What holds segments of an engine's memory, and moves them."""

    def why_it_stays(self, name: str) -> str:
        """Why a segment never leaves, in words that follow `it is`."""

    def before_move(self, name: str, target: Residency) -> None:
        """Make ready for a segment's move: room in the device, or nobody who uses what leaves."""

    def begin_move(self, name: str, source: Residency, target: Residency) -> None:
        """Start a move. Raises: `BudgetError` when memory is missing; nothing has changed then."""

    def wait_for(self, name: str) -> int:
        """Return, when a segment has arrived, the device bytes that it holds."""


def residual_bytes(infos: Sequence[WorkerInfo]) -> dict[str, int]:
    """Device bytes that stay while an engine sleeps, by kind: what all of its workers have told, together."""
    known: dict[str, int] = {}
    for info in infos:
        for kind, num_bytes in info.residual_bytes.items():
            known[kind] = known.get(kind, 0) + num_bytes
    return known


class WorkerSegment:
    """A segment of the engine's memory, moved by its workers."""

    def __init__(self, holder: Holder, name: str) -> None:
        self.name = name
        self.size_bytes = self.device_bytes = self.host_bytes = 0
        self.away: Residency | None = None
        self.residency = Residency.RESIDENT
        self._holder = holder

    def reset(self, size_bytes: int, away: Residency | None) -> None:
        """Be what an engine that has just started holds."""
        self.size_bytes = self.device_bytes = size_bytes
        self.away = away
        self.residency = Residency.RESIDENT

    def vanish(self) -> None:
        """Be gone, with the process that held it."""
        self.residency, self.device_bytes, self.host_bytes = Residency.DISCARDED, 0, 0

    def begin(self, target: Residency) -> Move:
        """Start moving to `target`; the engine is paused before anything leaves.

        Raises: as `Segment.begin`, and `PhaseError` when it must not leave.
        """
        source = self.residency
        if target is source:
            return Done()
        if self.away is None:
            raise PhaseError(
                f"segment {self.name} cannot become {target}: it is {self._holder.why_it_stays(self.name)}. Level "
                f"'{SleepLevel.KEEP_WEIGHTS}' drops the KV cache only"
            )
        check_move(self.name, source, target)
        self._holder.before_move(self.name, target)
        try:
            self._holder.begin_move(self.name, source, target)
        except Exception:
            raise
        except BaseException:  # an interrupt: whether the workers have moved it is unknown, and to move twice is not
            self.residency = source if target is Residency.RESIDENT else target
            raise
        self.residency = target
        if target is Residency.DISCARDED:
            self.settle()
            return Done()
        return _WorkerMove(self, self.size_bytes if Residency.OFFLOADED in (source, target) else 0)

    def settle(self) -> None:
        """Wait until the workers have moved it."""
        self.device_bytes = self._holder.wait_for(self.name)
        self.host_bytes = max(self.host_bytes, self.size_bytes if self.residency is Residency.OFFLOADED else 0)


class _WorkerMove:
    def __init__(self, segment: WorkerSegment, moved_bytes: int) -> None:
        self._segment = segment
        self.moved_bytes = moved_bytes
        self._target = segment.residency
        self._done = False
        if self._target is Residency.RESIDENT:
            segment.device_bytes = segment.size_bytes

    def wait(self) -> None:
        if not self._done and self._segment.residency is self._target:
            self._segment.settle()
        self._done = True

    def poll(self) -> bool:
        return self._done
