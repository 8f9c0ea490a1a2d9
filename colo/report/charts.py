"""The charts of a trace: what each shows and says, for the HTML page and the PNG alike. Draws nothing.

A colour means one thing: blue is the engine's memory, warm colours are the trainer's; green, violet and greys are
phases. Those of memory are Okabe's and Ito's (https://jfly.uni-koeln.de/color/), which stay apart for readers with any
kind of colour blindness; all are the same on light and on dark paper.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from typing import NamedTuple

from colo.phases import phase as known
from colo.phases.trace import MemorySample, Span, Trace
from colo.report.table import PARTS, Cycle, cycles, moves_once, phase_spans, segment_peaks
from colo.units import GIB, KIB, MIB, format_bytes, format_seconds

CURVE = "var(--ink)"
"""Colour of a single line."""

PART_COLOURS = dict(zip(PARTS, ("#009e73", "#7b6bb0", "#66748a", "#b2abd2", "#ccd2d9"), strict=True))
"""Colour of each part of a training step: green, violet, slate, lilac, grey."""

_SEGMENT_COLOURS = {
    known.ENGINE_WEIGHTS: "#0072b2",
    known.ENGINE_KV_CACHE: "#56b4e9",
    known.TRAINER_PARAMETERS: "#d55e00",
    known.TRAINER_GRADIENTS: "#f0e442",
    known.TRAINER_OPTIMIZER: "#e69f00",
    known.TRAINER_MASTER_WEIGHTS: "#cc79a7",
}
_OTHER_COLOURS = ("#8c6d31", "#d9c7a3", "#843c39", "#e7969c")
DARK = frozenset({"#009e73", "#7b6bb0", "#66748a"})
"""Colours of phases that white text can be read on; black text on the others."""

Unit = tuple[float, float, str]
"""Smallest size shown in a unit, the size of the unit, and its name."""

TIME_UNITS: Sequence[Unit] = ((10800, 3600, "h"), (600, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms"), (0, 1e-6, "us"))
BYTE_UNITS: Sequence[Unit] = ((GIB, GIB, "GiB"), (MIB, MIB, "MiB"), (KIB, KIB, "KiB"), (0, 1, "B"))
PLAIN_UNITS: Sequence[Unit] = ((-math.inf, 1, ""),)

_ROWS = {"engine": "engine", "device": "device", "d2h": "device to host", "h2d": "host to device", "host": "host"}
_NUM_BINS, _MAX_BARS, _MAX_STEPS = 400, 160, 20  # memory samples, step times, and training steps drawn one by one


Ticks = Sequence[tuple[float, str]]
"""Places on an axis and their labels."""


class Series(NamedTuple):
    """Values of one kind, how they are drawn, and what is said of them."""

    values: Sequence[float]
    colour: str
    label: str
    detail: str

    @property
    def title(self) -> str:
        """Text that shows when the pointer rests on it."""
        return f"{self.label}: {self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The values from one end of a chart to the other, and those that are labelled."""

    low: float = 0.0
    high: float
    ticks: Ticks = ()


class Legend(NamedTuple):
    """A colour and what it stands for."""

    colour: str
    label: str
    detail: str = ""


class Heading(NamedTuple):
    """The words around a chart."""

    title: str
    caption: str
    label: str  # text for screen readers
    legend: Sequence[Legend] = ()  # colours of phases and parts, above the picture


@dataclass(frozen=True, kw_only=True, slots=True)
class AreaChart:
    """Segments on top of each other over time."""

    heading: Heading
    x: Axis
    y: Axis
    times: Sequence[float]
    stack: Sequence[Series]  # values at `times`; each holds until the next, the last to the end
    used: Sequence[tuple[float, float]]  # seconds and bytes of a line over the areas
    limit: int  # bytes to mark across the chart; 0 for none
    phases: Sequence[Span]


@dataclass(frozen=True, kw_only=True, slots=True)
class BarChart:
    """Stacked bars, each from one place of the x axis to another."""

    heading: Heading
    x: Axis
    y: Axis
    bars: Sequence[tuple[int, int, Sequence[Series]]]  # first step, first step after the bar, one value for each part


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveChart:
    """A line through one value for each step."""

    heading: Heading
    x: Axis
    y: Axis
    series: Series
    places: Sequence[int]  # indices of the values that are drawn (see `extremes`)
    x_label: str = "training step"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChart:
    """Rows of bars over time: what kept each resource busy."""

    heading: Heading
    x: Axis
    rows: Sequence[tuple[str, Sequence[Span]]]
    phases: Sequence[Span]


def memory_chart(trace: Trace) -> AreaChart | None:
    """Bytes of each segment over time; of many training steps those around the peak. `None` without samples."""
    if not trace.samples:
        return None
    start_s, end_s, words = _memory_range(trace)
    most = max(trace.peak_bytes(), *(s.device_used_bytes or 0 for s in trace.samples), 1)
    capacity = trace.capacity_bytes or 0
    limit = capacity if capacity <= 4 * most else 0  # a larger one would flatten the picture
    samples, stack = _memory_stack(trace, start_s, end_s)
    times = [max(s.time_s, start_s) for s in samples]
    used = [(t, s.device_used_bytes) for t, s in zip(times, samples, strict=True) if s.device_used_bytes is not None]
    caption = "Bytes that each segment holds on the device. The strip on top, and the shading, show whose turn it is."
    if (peaks := _step_peaks(trace)) and not _differ(peaks):
        caption += f" Every one of {len(peaks)} training steps peaks at {format_bytes(max(peaks))}."
    if used:
        caption += " The thin line is all device memory in use, as the driver sees it."
    if capacity and not limit:
        caption += f" The capacity, {format_bytes(capacity)}, lies far above this picture."
    phases = phase_spans(trace)
    high = max(most, limit) * 1.05
    legend = _part_legend({span.phase for span in phases})
    heading = Heading("Device memory", caption + words, "Device memory by segment over time", legend)
    x, y = time_axis(start_s, end_s), Axis(high=high, ticks=unit_ticks(0, high, BYTE_UNITS))
    return AreaChart(heading=heading, x=x, y=y, times=times, stack=stack, used=used, limit=limit, phases=phases)


def peaks_chart(trace: Trace) -> CurveChart | None:
    """The peak of every training step of a long run; `None` where all are alike, which `memory_chart` says."""
    peaks = _step_peaks(trace)
    if not _differ(peaks):
        return None
    series = Series(peaks, CURVE, "peak", f"at most {format_bytes(trace.peak_bytes())}")
    caption = "The most bytes that all segments held together."
    return _curve_chart("Peak of each training step", caption, series, BYTE_UNITS)


def _step_peaks(trace: Trace) -> list[float]:
    """Peaks of the training steps of a run that is too long to draw in full; of others none."""
    steps = cycles(trace)
    if len(steps) <= _MAX_STEPS or not trace.samples:
        return []
    ordered = sorted(trace.samples, key=lambda s: s.time_s)
    times = [s.time_s for s in ordered]
    held = (ordered[bisect_left(times, c.start_s) : bisect_right(times, c.end_s)] for c in steps)
    return [max((s.total_bytes for s in samples), default=math.nan) for samples in held]


def _differ(peaks: Sequence[float]) -> bool:
    """True if peaks differ by a hundredth or more: others would be a flat line."""
    finite = [peak for peak in peaks if math.isfinite(peak)]
    return bool(finite) and max(finite) - min(finite) > 0.01 * max(finite)


def steps_chart(trace: Trace) -> BarChart | None:
    """Seconds of each training step by part; of very many the slowest of each group."""
    steps = cycles(trace)
    if not steps:
        return None
    bars, high = _bars(steps), max(s.duration_s for s in steps) * 1.05
    size = bars[0][1] - bars[0][0]
    caption = "Seconds of each training step." if size == 1 else f"The slowest of every {size} training steps."
    return BarChart(
        heading=Heading("Step time", caption, "Seconds of each training step by part", _part_legend(PARTS)),
        x=Axis(high=len(steps), ticks=count_ticks(len(steps))),
        y=Axis(high=high, ticks=unit_ticks(0, high, TIME_UNITS)),
        bars=[(first, last, list(_parts(steps[slowest], slowest + 1))) for first, last, slowest in bars],
    )


def reward_chart(trace: Trace) -> CurveChart | None:
    """The reward of each training step; `None` where there is none that is finite."""
    rewards = trace.metrics.get("reward", [])
    if not any(map(math.isfinite, rewards)):
        return None
    ends = f"{rewards[0]:.3g} at first, {rewards[-1]:.3g} at last"
    series, num_steps = Series(rewards, CURVE, "reward", ends), len(cycles(trace))
    if len(rewards) == num_steps:
        return _curve_chart("Reward", f"Mean of each training step: {ends}.", series, PLAIN_UNITS)
    # fewer where a trainer logs every so often, or a rollout serves several steps
    caption = f"{len(rewards)} values{f' of {num_steps} training steps' if num_steps else ''}: {ends}."
    return replace(_curve_chart("Reward", caption, series, PLAIN_UNITS), x_label="value")


def busy_chart(trace: Trace) -> RowChart | None:
    """Work of each resource during the training step of median length, or during the whole run."""
    steps = sorted(enumerate(cycles(trace), start=1), key=lambda item: item[1].duration_s)
    number, step = steps[(len(steps) - 1) // 2] if steps else (0, None)
    start_s, end_s = (step.start_s, step.end_s) if step else time_range(trace)
    spans = moves_once(trace) + [s for s in phase_spans(trace) if s.resource != "host"]
    spans += [s for s in trace.spans if s.category not in ("phase", "step", "copy")]
    inside = [s for s in spans if s.end_s > start_s and s.start_s < end_s]
    if not inside:
        return None
    names = sorted({s.resource for s in inside}, key=lambda name: [*_ROWS, name].index(name))
    where = ", in the step of median length" if step else ""
    title = f"Training step {number} in detail" if step else "The run in detail"
    caption = f"What kept each resource busy, coloured by phase{where}."
    return RowChart(
        heading=Heading(title, caption, "Busy resources over time"),
        x=time_axis(start_s, end_s),
        rows=[(_ROWS.get(name, name), [s for s in inside if s.resource == name]) for name in names],
        phases=phase_spans(trace),
    )


def time_range(trace: Trace) -> tuple[float, float]:
    """The first and the last recorded moment, in seconds; (0, 0) for an empty trace."""
    moments = [s.time_s for s in trace.samples] + [t for s in trace.spans for t in (s.start_s, s.end_s)]
    return min(moments, default=0.0), max(moments, default=0.0)


def segment_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each segment: fixed for those that every run has, in turn for others."""
    others = cycle(_OTHER_COLOURS)
    return {name: _SEGMENT_COLOURS.get(name) or next(others) for name in names}


def decimate(samples: Sequence[MemorySample], num_bins: int = _NUM_BINS) -> list[MemorySample]:
    """At most a handful of samples for each of `num_bins` equal stretches of time, in order, with every peak.

    Each stretch keeps its first and last sample, those where all segments together held most and least, where
    the driver saw most, and where each segment held most.
    """
    ordered = sorted(samples, key=lambda s: s.time_s)
    if len(ordered) <= 2 * num_bins:
        return ordered
    begin_s, length_s = ordered[0].time_s, ordered[-1].time_s - ordered[0].time_s
    kept: list[MemorySample] = []
    for _, group in groupby(ordered, key=lambda s: int((s.time_s - begin_s) / (length_s or 1.0) * (num_bins - 1))):
        kept += _notable(list(group))
    return kept


def _notable(group: Sequence[MemorySample]) -> list[MemorySample]:
    totals = [s.total_bytes for s in group]
    rows = [totals, [-total for total in totals], [s.device_used_bytes or 0 for s in group]]
    rows += [[s.segments.get(name, 0) for s in group] for name in {name for s in group for name in s.segments}]
    keep = {0, len(group) - 1} | {row.index(max(row)) for row in rows}
    return [group[i] for i in sorted(keep)]


def _memory_range(trace: Trace) -> tuple[float, float, str]:
    """The seconds that the memory picture shows, and a word on them: of many training steps those around the peak."""
    steps = cycles(trace)
    if len(steps) <= _MAX_STEPS:
        return (*time_range(trace), "")
    recorded = [s for s in trace.samples if s.time_s >= trace.since_s] or trace.samples
    highest = max(recorded, key=lambda s: s.total_bytes)
    before = sum(step.end_s <= highest.time_s for step in steps)
    first = max(0, min(before - _MAX_STEPS // 2, len(steps) - _MAX_STEPS))
    shown = steps[first : first + _MAX_STEPS]
    words = f" Shown are training steps {first + 1} to {first + len(shown)} of {len(steps)}, around the highest moment."
    return min(shown[0].start_s, highest.time_s), max(shown[-1].end_s, highest.time_s), words


def _memory_stack(trace: Trace, start_s: float, end_s: float) -> tuple[list[MemorySample], list[Series]]:
    """The samples to draw, from the one that holds at the left edge on, and each segment's bytes at each of them."""
    samples = sorted((s for s in trace.samples if s.time_s <= end_s), key=lambda s: s.time_s)
    samples = decimate(samples[max(0, sum(s.time_s <= start_s for s in samples) - 1) :])
    peaks = segment_peaks(trace)
    return samples, [
        Series([s.segments.get(name, 0) for s in samples], colour, name, f"peak {format_bytes(peaks[name])}")
        for name, colour in segment_colours(peaks).items()
        if peaks[name]
    ]


def _part_legend(parts: Collection[str]) -> list[Legend]:
    return [Legend(PART_COLOURS[part], part) for part in PARTS if part in parts]


def _bars(steps: Sequence[Cycle]) -> list[tuple[int, int, int]]:
    """Steps of each bar: `first` to `last`, the last not included, shown by the slowest of them."""
    size = -(-len(steps) // _MAX_BARS)
    groups = [(first, min(first + size, len(steps))) for first in range(0, len(steps), size or 1)]
    return [(first, last, max(range(first, last), key=lambda i: steps[i].duration_s)) for first, last in groups]


def _parts(step: Cycle, number: int) -> Iterator[Series]:
    for part, seconds in step.parts_s.items():
        share = f"{format_seconds(seconds)} of {format_seconds(step.duration_s)}"
        yield Series([seconds], PART_COLOURS[part], f"step {number}, {part}", share)


def _curve_chart(title: str, caption: str, series: Series, units: Sequence[Unit]) -> CurveChart:
    """The axis spans at least 2 % of the values' size, so that rounding does not look like a trend."""
    places = extremes(series.values)
    # differences of the largest numbers that there are overflow: those are drawn as multiples of a power of ten
    largest = max(abs(series.values[i]) for i in places)
    power = math.floor(math.log10(largest)) if largest > 1e300 else 0
    series = series._replace(values=[value / 10.0**power for value in series.values])
    low, high = min(series.values[i] for i in places), max(series.values[i] for i in places)
    margin = max((high - low) * 0.08, abs(high) * 0.01)
    margin = margin if margin > 1e-280 else 1.0  # the smallest are a line at zero, as matplotlib takes them
    low, high = low - margin, high + margin
    x = Axis(high=len(series.values), ticks=count_ticks(len(series.values)))
    labels = unit_ticks(low, high, units)
    if power:
        labels = [(tick, f"{tick:g}e+{power}" if tick else "0") for tick, _ in labels]
    y = Axis(low=low, high=high, ticks=labels)
    return CurveChart(heading=Heading(title, caption, series.title), x=x, y=y, series=series, places=places)


# ---- axes ------------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(rough / step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.15g}") for i in range(first, last + 1)]


def count_ticks(count: int) -> list[tuple[float, str]]:
    """Round whole numbers from 1 to `count`, each in the middle of its unit: 1 at 0.5."""
    return [(tick - 0.5, f"{tick:g}") for tick in ticks(1, count) if tick == int(tick)]


def unit_ticks(low: float, high: float, units: Sequence[Unit], count: int = 5) -> list[tuple[float, str]]:
    """Round values from `low` to `high` in the unit that suits `high`, each with its label."""
    _, factor, name = next(unit for unit in units if high >= unit[0])
    values = ticks(low / factor, high / factor, count)
    return [(tick * factor, f"{tick:g} {name}".rstrip() if tick else "0") for tick in values]


def extremes(values: Sequence[float]) -> list[int]:
    """Indices of the values to draw: the finite ones; of many the first, the last, and each bin's extremes."""
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    size = max(1, len(finite) // _NUM_BINS)
    keep = {*finite[:1], *finite[-1:]}
    for first in range(0, len(finite), size):
        part = finite[first : first + size]
        keep |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(keep)


def time_axis(start_s: float, end_s: float) -> Axis:
    """Seconds, counted from the left edge."""
    labels = unit_ticks(0, end_s - start_s, TIME_UNITS, 8)
    return Axis(low=start_s, high=end_s, ticks=[(start_s + value, label) for value, label in labels])
