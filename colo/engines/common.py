"""What engines have in common: their state, where sleep levels leave memory, waking by tags, checks of prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from colo.engine import EngineState, SleepLevel
from colo.engines.status import EngineStatus
from colo.errors import BudgetError
from colo.memory.probe import available_host_bytes
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency
from colo.phases.segment import Segment
from colo.units import format_bytes

WEIGHTS_AT: Mapping[SleepLevel, Residency] = {
    SleepLevel.KEEP_WEIGHTS: Residency.RESIDENT,
    SleepLevel.LEVEL_1: Residency.OFFLOADED,
    SleepLevel.LEVEL_2: Residency.DISCARDED,
}
"""Where each sleep level leaves the weights. All of them discard the KV cache."""

COMPLETION_BYTES = 512
"""Host memory of a `Completion` of one token, with what decodes its text; what engines keep of it comes on top."""

_DEPTH = (Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED)
_TAGS = {"weights": ENGINE_WEIGHTS, "kv_cache": ENGINE_KV_CACHE}


class StatusEngine:
    """The part of an `Engine` that only asks its status and its segments."""

    _status: EngineStatus

    before_generate: Callable[[], None] | None = None

    @property
    @abstractmethod
    def segments(self) -> Sequence[Segment]:
        """`engine.weights` and `engine.kv_cache`."""

    @property
    def state(self) -> EngineState:
        """What the engine can do now, as its segments have it."""
        return self._status.state

    @property
    def weights_version(self) -> int | None:
        """Version of the weights it holds; `None` while poisoned."""
        return self._status.version

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""
        self._status.poison(cause)

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """Bring back `weights`, `kv_cache`, or both (`None`); see `Engine.wake`. `ValueError` for another tag."""
        self._status.require_open("wake")
        wake_segments(self.segments, tags)


def is_deeper(target: Residency, source: Residency) -> bool:
    """Whether `target` gives back more than `source`: falling asleep moves memory down only."""
    return _DEPTH.index(target) > _DEPTH.index(source)


def wake_segments(segments: Sequence[Segment], tags: Iterable[str] | None) -> None:
    """Bring back `weights`, `kv_cache`, or both (`None`), weights first. `ValueError` for another tag.

    Raises: `BudgetError` when the bytes are not free, with everything as it was.
    """
    wanted = set(_TAGS if tags is None else tags)
    if unknown := sorted(wanted - _TAGS.keys()):
        raise ValueError(f"unknown tags {unknown}: wake takes {sorted(_TAGS)}")
    by_name = {segment.name: segment for segment in segments}
    woken: list[tuple[Segment, Residency]] = []
    try:
        for segment in (by_name[name] for tag, name in _TAGS.items() if tag in wanted):
            source = segment.residency
            segment.begin(Residency.RESIDENT).wait()
            woken.append((segment, source))
    except BudgetError:
        for segment, source in woken:
            segment.begin(source).wait()
        raise


def check_prompts(
    prompts: Sequence[Sequence[int]], vocab_size: int, num_positions: int | None, *, or_else: str = ""
) -> None:
    """Raise `ValueError` for an empty prompt, one that leaves no position, or an id outside the vocabulary.

    `or_else` says what gives the model more positions, after a comma.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompt {index} is empty: there is nothing to continue; give it at least one token, such as the "
                "tokenizer's bos_token"
            )
        if num_positions is not None and len(prompt) >= num_positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, the model knows {num_positions} positions: shorten it, so "
                f"that at least one is left for what is sampled{or_else}"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            token = next(t for t in prompt if not 0 <= t < vocab_size)
            raise ValueError(f"prompt {index} has token id {token}, outside the vocabulary of {vocab_size}")


def check_count(num_prompts: int, n: int) -> None:
    """Raise `BudgetError` for more completions than the host would hold if each had one token only."""
    needed_bytes, free_bytes = num_prompts * n * COMPLETION_BYTES, available_host_bytes()
    if needed_bytes > free_bytes:
        raise BudgetError(
            f"n={n} for {num_prompts} prompts asks for {num_prompts * n} completions, which take at least "
            f"{format_bytes(needed_bytes)} of host memory, and {format_bytes(free_bytes)} are available: lower n, or "
            "generate for some of them at a time",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )
