"""A segment: a named piece of memory with one owner, its bytes, and where they are. Imports no torch."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from colo.phases.phase import Residency, check_move


class Move(Protocol):
    """A change of residency that has been started."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross between host and device for this move; zero for a discard or a fresh allocation."""

    def wait(self) -> None:
        """Return when the segment has arrived; a second call returns at once.

        Raises: whatever made the move fail. The segment is then back in the residency it came from.
        """

    def poll(self) -> bool:
        """Give back what a departure has freed so far, without waiting; true when the segment has arrived."""


@runtime_checkable
class Segment(Protocol):
    """A piece of memory that the scheduler moves.

    Ownership: the segment owns its device and host bytes; the scheduler only asks it to move.
    """

    @property
    def name(self) -> str:
        """Dotted name such as `trainer.optimizer`, unique within a runtime."""

    @property
    def residency(self) -> Residency:
        """Present place of the bytes, or the target while a move is under way."""

    @property
    def size_bytes(self) -> int:
        """Device bytes when resident; for a discarded segment, what becoming resident will take."""

    @property
    def device_bytes(self) -> int:
        """Device bytes held at this moment, moves under way included."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena held at this moment."""

    @property
    def away(self) -> Residency | None:
        """Target when the segment's bytes are needed: `OFFLOADED`, `DISCARDED`, or `None` for never."""

    def begin(self, target: Residency) -> Move:
        """Start moving to `target` and return without waiting where the hardware allows it.

        Ordering: work already queued on the current stream sees the segment as it was.
        Raises: `PhaseError` for an illegal move, `BudgetError` when memory is missing; nothing has changed then.
        """


class Done:
    """A move that was complete when it was returned."""

    def __init__(self, moved_bytes: int = 0) -> None:
        self.moved_bytes = moved_bytes

    def wait(self) -> None:
        """Return at once."""

    def poll(self) -> bool:
        """True."""
        return True


class FixedSegment:
    """A segment that never moves: memory that stays resident, or that is someone else's (`SHARED`)."""

    away = None
    host_bytes = 0

    def __init__(self, name: str, size_bytes: int, residency: Residency) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.residency = residency

    @property
    def device_bytes(self) -> int:
        """Device bytes of its own."""
        return self.size_bytes if self.residency is Residency.RESIDENT else 0

    def begin(self, target: Residency) -> Move:
        """Refuse every move. Raises: `PhaseError`."""
        if target is not self.residency:
            check_move(self.name, Residency.SHARED, target)
        return Done()
