"""The phases of a colocated run, the segments of memory, and what each phase needs of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from colo.errors import PhaseError


class Phase(StrEnum):
    """Who may work on the device."""

    IDLE = "idle"
    """Nobody. Segments stay where the last phase left them, since moving them now might be for nothing."""

    SYNC = "sync"
    """The runtime, making the trainer's weights visible to the engine."""

    ROLLOUT = "rollout"
    """The engine, generating."""

    TRAIN = "train"
    """The trainer: forward, backward, optimizer step."""


class Residency(StrEnum):
    """Place of a segment's bytes."""

    RESIDENT = "resident"
    """On the device, and the segment's own."""

    OFFLOADED = "offloaded"
    """In the host arena; the device bytes are free."""

    DISCARDED = "discarded"
    """Nowhere. The device bytes are free and the content is gone, or was never there."""

    SHARED = "shared"
    """On the device as someone else's resident bytes, so that this segment costs nothing and never moves."""


class Need(StrEnum):
    """Requirement of a phase on a segment."""

    RESIDENT = "resident"
    """On the device from the first moment of the phase to the last."""

    LATE = "late"
    """On the device when its owner asks for it within the phase: its bytes are promised, and may be away until then."""

    UNUSED = "unused"
    """Not touched by the phase: stays where it is, unless its bytes are needed."""


EDGES: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.IDLE: frozenset({Phase.SYNC, Phase.ROLLOUT, Phase.TRAIN}),
        Phase.SYNC: frozenset({Phase.ROLLOUT, Phase.IDLE}),
        # through IDLE only: what ends a phase, such as pausing the engine, is done before memory moves for the next
        Phase.ROLLOUT: frozenset({Phase.IDLE}),
        Phase.TRAIN: frozenset({Phase.IDLE}),
    }
)
"""The legal moves from one phase to the next; everything else raises `PhaseError`."""

MOVES: Mapping[Residency, frozenset[Residency]] = MappingProxyType(
    {
        Residency.RESIDENT: frozenset({Residency.OFFLOADED, Residency.DISCARDED}),
        Residency.OFFLOADED: frozenset({Residency.RESIDENT, Residency.DISCARDED}),
        # there is no content to offload: it comes back as a fresh allocation
        Residency.DISCARDED: frozenset({Residency.RESIDENT}),
        Residency.SHARED: frozenset(),
    }
)
"""The legal moves of one segment from residency to residency."""

ENGINE_WEIGHTS = "engine.weights"
ENGINE_KV_CACHE = "engine.kv_cache"
TRAINER_PARAMETERS = "trainer.parameters"
TRAINER_ADAPTER = "trainer.adapter"
TRAINER_BASE = "trainer.base"  # weights beneath an adapter that is folded into copies of them
TRAINER_GRADIENTS = "trainer.gradients"
TRAINER_OPTIMIZER = "trainer.optimizer"
TRAINER_MASTER_WEIGHTS = "trainer.master_weights"
TRAINER_RESIDENT_STATE = "trainer.resident_state"  # of streamed state, what stays on the device
TRAINER_KEPT = "trainer.kept"

NEEDS: Mapping[Phase, Mapping[str, Need]] = MappingProxyType(
    {
        Phase.IDLE: {},
        Phase.SYNC: {ENGINE_WEIGHTS: Need.RESIDENT, TRAINER_PARAMETERS: Need.RESIDENT},
        # not the trainer's parameters: shared ones are the engine's, and others are not read while it samples
        Phase.ROLLOUT: {ENGINE_WEIGHTS: Need.RESIDENT, ENGINE_KV_CACHE: Need.RESIDENT},
        Phase.TRAIN: {
            TRAINER_PARAMETERS: Need.RESIDENT,
            # late: backward pass and step ask for these, and activations may have gone by then
            TRAINER_GRADIENTS: Need.LATE,
            TRAINER_OPTIMIZER: Need.LATE,
            TRAINER_MASTER_WEIGHTS: Need.LATE,
            TRAINER_RESIDENT_STATE: Need.LATE,
        },
    }
)
"""Requirements by phase and segment; a segment that is not named is `Need.UNUSED`."""


def check_edge(source: Phase, target: Phase) -> None:
    """Raise `PhaseError` unless `target` may follow `source`."""
    if target not in EDGES[source]:
        legal = ", ".join(sorted(EDGES[source]))
        raise PhaseError(f"cannot go from phase {source} to {target}: from {source} the runtime may enter {legal}")


def check_move(segment: str, source: Residency, target: Residency) -> None:
    """Raise `PhaseError` unless a segment may go from `source` to `target`."""
    if target not in MOVES[source]:
        legal = ", ".join(sorted(MOVES[source])) or "nothing: it is someone else's memory"
        raise PhaseError(f"segment {segment} is {source} and cannot become {target}; it may become {legal}")


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
        self.residency = residency
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the memory, whoever's it is."""
        return self._size_bytes

    @property
    def device_bytes(self) -> int:
        """Device bytes of its own."""
        return self.size_bytes if self.residency is Residency.RESIDENT else 0

    def begin(self, target: Residency) -> Move:
        """Refuse every move. Raises: `PhaseError`."""
        if target is not self.residency:
            check_move(self.name, self.residency, target)
            raise PhaseError(f"segment {self.name} is {self.residency} and cannot become {target}: it never moves")
        return Done()
