"""A base for engines: states, the version of the weights, sleep levels; what an `Engine` need not write itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from colo.engine import EngineState, SamplingParams, SleepLevel, missing_members
from colo.engines.sampling import check_taken, sampling_temperature
from colo.errors import BudgetError, EngineLost, PhaseError, StaleWeights
from colo.memory.offload import Mover
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency, Segment

WEIGHTS_AT: Mapping[SleepLevel, Residency] = {
    SleepLevel.KEEP_WEIGHTS: Residency.RESIDENT,
    SleepLevel.LEVEL_1: Residency.OFFLOADED,
    SleepLevel.LEVEL_2: Residency.DISCARDED,
}
"""Residency of the weights at each sleep level. All of them discard the KV cache."""

TAGS = {"weights": ENGINE_WEIGHTS, "kv_cache": ENGINE_KV_CACHE}
"""vLLM's names of what sleeps, in the order of waking, and the segments'."""

DEPTH = (Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED)


class EngineBase:
    """The verbs of an `Engine` that its state and its segments decide.

    A subclass sets `name`, `placement`, `model_type` and `vocab_size`, and writes `load_weights` and `generate`, which
    begins with `ready`. Where there is more to a verb, it extends that one. Not thread-safe: one caller at a time.
    """

    before_generate: Callable[[], None] | None = None

    name: str
    """Short name for reports."""

    called = ""
    """Words for it in errors about sampling options; by default its name."""

    longest_prompt: int | None = None
    """The most tokens of a prompt after which a position is left to sample for; `None` without a limit."""

    boundary: int | None = None
    """The tokens at which a sequence that was shorter ends, before the model has no position left; see `Positions`."""

    asks_together = False
    """All ranks of a trainer call `generate` together, as often as each other."""

    or_else = "leave it out"
    """Advice for the error about an option that the engine does not take."""

    def __init__(
        self,
        device: torch.device,
        segments: Sequence[Segment],
        *,
        mover: Mover | None = None,
        status: EngineStatus | None = None,
    ) -> None:
        """Start awake and poisoned. A mover that is given stays its owner's; another is closed with the engine.

        Raises: `TypeError` for a segment that is not whole.
        """
        for segment in segments:
            if missing := missing_members(segment, Segment):
                raise TypeError(f"the segment {type(segment).__name__} lacks {', '.join(missing)}")
        self.device = device
        self.mover = mover or Mover(device)
        self._owns_mover = mover is None
        self._segments = tuple(segments)
        # a status that is given knows of a process that can end
        self._status = status or EngineStatus(lambda: self.segments)

    @property
    def segments(self) -> Sequence[Segment]:
        """`engine.weights` and `engine.kv_cache`."""
        return self._segments

    @property
    def state(self) -> EngineState:
        """State by the table in colo/engine.py, as the segments have it."""
        return self._status.state

    def look(self) -> None:
        """Find out by asking whether the engine is lost, for `state` to say; one that is told of it need not ask."""

    @property
    def residual_bytes(self) -> Mapping[str, int]:
        """Nothing beside the segments."""
        return {}

    # ---- versions ----------------------------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int | None:
        """Version of the weights it holds; `None` while poisoned."""
        return self._status.version

    def commit(self, version: int) -> None:
        """Declare that the engine now holds `version`; lifts a poisoning. `PhaseError` unless they are resident."""
        self._status.require_weights(f"hold version {version}")
        self._status.commit(version)

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""
        self._status.poison(cause)

    def poison_for_load(self) -> None:
        """Withdraw the version: `load_weights` is about to write. Raises: `PhaseError` while the weights are away."""
        self._status.require_weights("load weights")
        self.poison("weights have been loaded into it and not committed: call commit(version) once all of them have")

    # ---- generation --------------------------------------------------------------------------------------------------

    def ready(self) -> int:
        """Let the runtime publish what was written to since, and return the version to sample from.

        Raises: `PhaseError` unless awake, `EngineLost` when lost, `StaleWeights` while poisoned.
        """
        if self.before_generate is not None:
            # first: it may publish, and lift a poisoning
            self.before_generate()
        return self._status.require_version()

    def check_request(self, prompts: Sequence[Sequence[int]], params: Any) -> None:
        """Raise what `generate` would raise for these prompts and parameters. Here: nothing."""

    def sampling_params(self, params: Any = None, **sampling: Any) -> Any:
        """`SamplingParams`, with the options given by name in place of those of `params`.

        Raises: `ValueError` for an option that this engine does not have, unless it changes nothing (`min_tokens=0`);
        `TypeError` for parameters of another kind.
        """
        called = self.called or f"the {self.name} engine"
        sampling = check_taken(sampling, called, self.or_else)
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(
                f"{called} takes one colo.SamplingParams for all prompts, or options by name, not a "
                f"{type(params).__name__}"
            )
        return replace(params, **sampling) if params is not None else SamplingParams(**sampling)

    def sampling_temperature(self, params: Any) -> float | None:
        """The temperature that `logprobs` have in them; `None` where filters change them too."""
        return sampling_temperature(params)

    def pause(self) -> None:
        """Stop generating, so that weights may change. Idempotent; `PhaseError` when asleep or closed."""
        self._status.require("pause", EngineState.AWAKE, EngineState.PAUSED)
        self._status.paused = True

    def resume(self) -> None:
        """Generate again. Idempotent; `PhaseError` unless every segment is resident."""
        self._status.require("resume", EngineState.AWAKE, EngineState.PAUSED)
        for segment in self.segments:
            segment.begin(Residency.RESIDENT).wait()  # may still be on its way
        self._status.paused = False

    def reset_prefix_cache(self) -> None:
        """Do nothing: an engine keeps nothing of earlier calls unless it says so."""

    # ---- sleep -------------------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel | int) -> None:
        """Give memory back, unless that is done already; see `SleepLevel`. If it raises, nothing has changed.

        A level deeper than the present one gives back more, a lighter one changes nothing.
        """
        self._status.require_open("sleep")
        self._leave(self.leaving(SleepLevel(str(level))))

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """Bring back `weights`, `kv_cache`, or both (`None`), weights first; the engine is paused afterwards.

        Raises: `BudgetError` when the bytes are not free, with everything as it was; `ValueError` for another tag.
        """
        self._status.require_open("wake")
        wanted = set(TAGS if tags is None else tags)
        if unknown := sorted(wanted - TAGS.keys()):
            raise ValueError(f"unknown tags {unknown}: wake takes {sorted(TAGS)}")
        by_name = {segment.name: segment for segment in self.segments}
        # also of a part: an engine with some memory away must not generate
        if any(segment.residency is not Residency.RESIDENT for segment in self.segments):
            self._status.paused = True
        woken: list[tuple[Segment, Residency]] = []
        try:
            for segment in (by_name[name] for tag, name in TAGS.items() if tag in wanted):
                source = segment.residency
                segment.begin(Residency.RESIDENT).wait()
                woken.append((segment, source))
        except BudgetError:
            for segment, source in woken:
                segment.begin(source).wait()
            raise

    def leaving(self, level: SleepLevel) -> list[tuple[Segment, Residency]]:
        """The segments that a sleep of `level` moves, and where to. Raises: `PhaseError` when one of them stays."""
        targets = {ENGINE_WEIGHTS: WEIGHTS_AT[level], ENGINE_KV_CACHE: Residency.DISCARDED}
        found = [(segment, targets[segment.name]) for segment in self.segments if segment.name in targets]
        found = [(s, target) for s, target in found if DEPTH.index(target) > DEPTH.index(s.residency)]
        for segment, _ in found:
            if segment.away is None:
                raise PhaseError(f"level {level} would move {segment.name}, which is {self.why_it_stays(segment)}")
        return found

    def why_it_stays(self, segment: Segment) -> str:
        """The reason why a segment never leaves, in words that follow `it is`."""
        return f"memory that stays on the device ({segment.size_bytes} bytes)"

    def _leave(self, leaving: Sequence[tuple[Segment, Residency]]) -> None:
        self._status.paused = self._status.paused or bool(leaving)
        for move in [segment.begin(target) for segment, target in leaving]:
            move.wait()

    # ---- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._status.check_process()
        if not self._status.closed:
            self._status.close()
            # first: nobody may use what is being released
            self._release()
            if self._owns_mover:
                self.mover.close()

    def _release(self) -> None:
        """Release what a subclass owns, once."""


ADVICE: Mapping[EngineState, str] = {
    EngineState.AWAKE: "pause or sleep first",
    EngineState.PAUSED: "call resume() first",
    EngineState.ASLEEP: "call wake() first",
    EngineState.CLOSED: "make a new one",
}
"""Advice about a state that does not allow an operation."""


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
        """`check_alive` runs before each `require` and `state`, and calls `lose` if it is gone; `on_loss` runs then.

        `segments` are the engine's; `when_lost` is the advice for a lost engine.
        """
        self.version: int | None = None
        self.cause = "no weights have been committed yet"
        """The reason why there is no version."""

        self.paused = self.closed = False
        self.lost: str | None = None
        """The reason why the engine is lost; `None` while it is not."""

        self.when_lost = when_lost
        self._pid = os.getpid()
        self._segments = segments
        self._check_alive = check_alive
        self._on_loss = on_loss

    @property
    def state(self) -> EngineState:
        """State by the table in colo/engine.py, as the segments have it. A process that has ended is found out here."""
        if not self.closed:
            with suppress(EngineLost):
                self._check_alive()
        return self._seen()

    def _seen(self) -> EngineState:
        """State by what has been found out so far: nothing is asked."""
        if self.closed:
            return EngineState.CLOSED
        if self.lost is not None:
            return EngineState.LOST
        if any(segment.residency is not Residency.RESIDENT for segment in self._segments()):
            return EngineState.ASLEEP
        return EngineState.PAUSED if self.paused else EngineState.AWAKE

    def require(self, verb: str, *states: EngineState) -> None:
        """Raise `EngineLost` for a lost engine, and `PhaseError` for one in none of `states`, or of another process."""
        self.check_process()
        # once: a second look could find that the process has ended since the first
        self._check_alive()
        state = self._seen()
        self.require_present()
        if state not in states:
            raise PhaseError(f"the engine is {state} and cannot {verb}: {ADVICE[state]}")

    def check_process(self) -> None:
        """Raise `PhaseError` in a forked child, which has none of what the engine talks to."""
        if os.getpid() != self._pid:
            raise PhaseError(
                f"the engine belongs to process {self._pid}, and this is {os.getpid()}, a child that was forked from "
                "it: use the engine there"
            )

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
