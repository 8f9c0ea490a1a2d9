"""Spans, memory samples and metrics of a run, recorded in memory.

Imports no torch: times come from `time.perf_counter`, bytes from whoever records them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from colo.phases.phase import Phase

MAX_SAMPLES = 100_000
"""Memory samples kept of a run: some thousand steps in full, longer runs thinner the further back."""

MAX_SPANS = 100_000  # spans kept of a run: those of its last several thousand steps

MAX_LATE = 16  # values that nobody has read yet; then all are, since each holds memory of the device

EVALUATION = "evaluation"
"""Name of the span of a training phase without a backward pass: it ends no training step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time."""

    name: str  # action, such as `rollout` or `offload trainer.optimizer`
    category: str = "work"
    """`phase`, `switch` (entering or leaving one), `transition` (within a switch), `step` (of a transition), `copy`
    (asynchronous, beside other work), or `work`."""

    start_s: float  # seconds since the trace began
    duration_s: float
    phase: Phase = Phase.IDLE  # the phase it belongs to
    resource: str = "host"
    """Resource that it kept busy: `host`, `device`, `d2h`, `h2d`, `engine`. One row of a timeline each."""

    num_bytes: int = 0  # bytes moved, where bytes were

    @property
    def end_s(self) -> float:
        """Seconds since the trace began."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """Who held how much at one moment."""

    time_s: float
    phase: Phase
    segments: Mapping[str, int]  # device bytes by segment name
    host_bytes: int = 0  # bytes of the host arena in use
    device_used_bytes: int | None = None
    """All device memory in use as the driver sees it, other processes included; `None` where there is no driver."""

    @property
    def total_bytes(self) -> int:
        """Device bytes of all segments together."""
        return sum(self.segments.values())


@dataclass(slots=True)
class Trace:
    """Everything recorded about a run, in order of time."""

    spans: list[Span] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """End of each step of the optimizer, in seconds since the trace began; several optimizers step as one."""

    capacity_bytes: int | None = None  # the capacity line of the memory picture
    began_s: float = field(default_factory=time.perf_counter)

    since_s: float = 0.0
    """Seconds since the trace began, from which on its spans are complete: 0 until `MAX_SPANS` has been reached."""

    _metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _late: list[tuple[list[float], int, Callable[[], float]]] = field(default_factory=list)
    """Series, place in it, and what reads the value."""

    def now_s(self) -> float:
        """Seconds since the trace began."""
        return time.perf_counter() - self.began_s

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """Record the body as one span, also when it raises; `details` are other fields of a `Span`."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self.add(name, start_s, **details)

    def add(self, name: str, start_s: float, *, end_s: float | None = None, **details: Any) -> None:
        """Record a span that began at `start_s` and ends at `end_s`, or now; `details` as for `span`."""
        duration_s = max(0.0, (self.now_s() if end_s is None else end_s) - start_s)
        span = Span(name=name, start_s=start_s, duration_s=duration_s, **details)
        self.spans.append(span)
        if len(self.spans) > MAX_SPANS:
            self._forget()

    def _forget(self) -> None:
        """Let go of the older half of the spans, at the end of a training phase, so that whole steps remain."""
        half = len(self.spans) // 2
        # from the middle back to the last training phase that has ended
        ends = (i + 1 for i in range(half, 0, -1) if _ends_training(self.spans[i]))
        forgotten = next(ends, half)
        # not the last one's end: copies are recorded after they have ended, out of order
        self.since_s = max(span.end_s for span in self.spans[:forgotten])
        del self.spans[:forgotten]
        del self.steps[: bisect_left(self.steps, self.since_s)]

    def record(self, sample: MemorySample) -> None:
        """Append a memory sample. Past `MAX_SAMPLES` the older half is thinned; the peaks of all phases stay."""
        self.samples.append(replace(sample, segments=_shared(tuple(sample.segments.items()))))
        if len(self.samples) > MAX_SAMPLES:
            older = self.samples[: len(self.samples) // 2]
            phases = {s.phase for s in older}
            # `peak_bytes` has to give the same after thinning as before
            peaks = {id(max((s for s in older if s.phase is phase), key=lambda s: s.total_bytes)) for phase in phases}
            self.samples[: len(older)] = [s for i, s in enumerate(older) if i % 2 == 0 or id(s) in peaks]

    @property
    def metrics(self) -> dict[str, list[float]]:
        """Name to one value a training step, such as `reward`. Reads what is late, which may wait for the device."""
        while self._late:
            series, place, read = self._late.pop()
            series[place] = float(read())
        return self._metrics

    def metric(self, name: str, value: float | Callable[[], float]) -> None:
        """Append one value to a per-step series; what has to be waited for as a function, called when it is read."""
        series = self._metrics[name]
        if callable(value):
            self._late.append((series, len(series), value))
        series.append(0.0 if callable(value) else float(value))
        if len(self._late) > MAX_LATE:
            _ = self.metrics

    def peak_bytes(self, phase: Phase | None = None) -> int:
        """The most device bytes all segments held together, in one phase or in any."""
        totals = (s.total_bytes for s in self.samples if phase is None or s.phase is phase)
        return max(totals, default=0)

    def seconds(self, category: str) -> dict[str, float]:
        """Summed duration of every span of a category, by name."""
        sums: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.category == category:
                sums[span.name] += span.duration_s
        return dict(sums)


def _ends_training(span: Span) -> bool:
    return span.category == "phase" and span.phase is Phase.TRAIN and span.name != EVALUATION


@lru_cache(maxsize=1024)
def _shared(segments: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Reuse one object for equal samples: a training step repeats those of the last."""
    return dict(segments)
