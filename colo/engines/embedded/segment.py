"""Segments of the embedded engine, which tell it of every move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from colo.engine import SleepLevel
from colo.errors import PhaseError
from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import Region
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import Residency
from colo.phases.segment import Move

OnMove = Callable[[Residency, Residency], None]
"""Told where a segment was and where it is going, once it is on its way."""


class EngineSegment(RegionSegment):
    """A segment that tells the engine of every move. With `away=None` it never leaves the device."""

    def __init__(
        self, name: str, *, regions: Sequence[Region], away: Residency | None, mover: Mover, on_move: OnMove
    ) -> None:
        super().__init__(name, regions=regions, away=away, mover=mover)
        self._on_move = on_move

    def begin(self, target: Residency) -> Move:
        """Start moving to `target`. Raises: as `Segment.begin`, and `PhaseError` when it must not leave."""
        source = self.residency
        if target is not source and self.away is None and target is not Residency.RESIDENT:
            raise PhaseError(
                f"segment {self.name} cannot become {target}: a trainer works on these {self.size_bytes} bytes. "
                f"Put the engine to sleep with level '{SleepLevel.KEEP_WEIGHTS}', which drops the KV cache only"
            )
        with uninterrupted():
            move = super().begin(target)
            if target is not source:
                self._on_move(source, target)
        return move
