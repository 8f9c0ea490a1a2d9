"""What an engine can do now: its state, the version of its weights, and what it refuses with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from colo.engine import EngineState
from colo.errors import EngineLost, PhaseError, StaleWeights
from colo.phases.phase import ENGINE_WEIGHTS, Residency
from colo.phases.segment import Segment

ADVICE: Mapping[EngineState, str] = {
    EngineState.AWAKE: "pause or sleep first",
    EngineState.PAUSED: "call resume() first",
    EngineState.ASLEEP: "call wake() first",
    EngineState.CLOSED: "make a new one",
}
"""What to do about a state that does not allow an operation."""


class EngineStatus:
    """Awake or not, lost or closed, and the version of the weights. An engine starts awake and poisoned."""

    def __init__(
        self,
        segments: Callable[[], Sequence[Segment]],
        *,
        check_alive: Callable[[], None] = lambda: None,
        on_loss: Callable[[], None] = lambda: None,
        when_lost: str = "call recover() to start it again",
    ) -> None:
        """`check_alive` runs before each `require`, and calls `lose` if the engine is gone. `on_loss` runs then.

        `segments` are the engine's; `when_lost` is the advice for a lost engine.
        """
        self.version: int | None = None
        self.cause = "no weights have been committed yet"
        """Why there is no version."""

        self.paused = self.closed = False
        self.lost: str | None = None
        """Why the engine is lost; `None` while it is not."""

        self.when_lost = when_lost
        self._segments = segments
        self._check_alive = check_alive
        self._on_loss = on_loss

    @property
    def state(self) -> EngineState:
        """What the engine can do now, as its segments have it."""
        if self.closed:
            return EngineState.CLOSED
        if self.lost is not None:
            return EngineState.LOST
        if any(segment.residency is not Residency.RESIDENT for segment in self._segments()):
            return EngineState.ASLEEP
        return EngineState.PAUSED if self.paused else EngineState.AWAKE

    def require(self, verb: str, *states: EngineState) -> None:
        """Raise `EngineLost` for a lost engine, and `PhaseError` for one in none of `states`."""
        self._check_alive()
        self.require_present()
        if (state := self.state) not in states:
            raise PhaseError(f"the engine is {state} and cannot {verb}: {ADVICE[state]}")

    def require_open(self, verb: str) -> None:
        """Raise `PhaseError` for a closed engine, `EngineLost` for a lost one."""
        self.require(verb, EngineState.AWAKE, EngineState.PAUSED, EngineState.ASLEEP)

    def require_weights(self, verb: str) -> None:
        """Raise `PhaseError` unless the weights are resident; the KV cache may be away."""
        self.require_open(verb)
        for segment in self._segments():
            if segment.name == ENGINE_WEIGHTS and segment.residency is not Residency.RESIDENT:
                raise PhaseError(f"the engine's weights are {segment.residency} and it cannot {verb}: wake them first")

    def require_version(self) -> int:
        """The version of the weights, of an engine that is awake. Raises: also `StaleWeights` when there is none."""
        self.require("generate", EngineState.AWAKE)
        if self.version is None:
            raise StaleWeights(f"the engine does not generate: {self.cause}")
        return self.version

    def require_present(self) -> None:
        """Raise `EngineLost` when the engine is lost."""
        if self.lost is not None:
            raise EngineLost(f"the engine is lost: {self.lost}. {self.when_lost[0].upper()}{self.when_lost[1:]}")

    def commit(self, version: int) -> None:
        """Name the weights that the engine holds now."""
        self.version = version

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""
        self.version, self.cause = None, cause

    def lose(self, cause: str) -> EngineLost:
        """Mark the engine as lost; the error to raise."""
        self.lost = cause
        self.poison(f"it is lost: {cause}")
        self._on_loss()
        return EngineLost(f"the engine is lost: {cause}. The trainer's weights are intact; {self.when_lost}")

    def revive(self) -> None:
        """Mark the engine as started again: awake, and still poisoned."""
        self.lost = None
        self.paused = False

    def close(self) -> None:
        """Mark the engine as closed."""
        self.closed = True
        self.poison("it is closed")
