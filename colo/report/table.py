"""A trace as figures, and the figures as tables: `summary` for machines, `report_tables` for people.

All show the same numbers. Sizes are binary (GiB), rates decimal (GB/s).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from colo.phases.phase import Phase
from colo.phases.trace import EVALUATION, MemorySample, Span, Trace
from colo.units import format_bytes, format_seconds

PARTS = ("rollout", "sync", "train", "switch", "idle")
"""Parts of a training step's seconds; `switch` is transitions outside of every phase."""

EMPTY = "Nothing was recorded: this trace has no spans, no memory samples and no metrics."

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Bars of growing height, for curves as text; the first is empty."""

_BARS = BLOCKS[1:]
_SWITCHING = ("step", "transition", "switch")


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One row of the phase table: a phase, the switching between phases, or the idle time outside of both."""

    phase: str  # one of `PARTS`, or `evaluation`
    count: int
    total_s: float
    mean_s: float
    share: float  # share of all recorded seconds, 0 to 1
    peak_bytes: int | None  # the most device bytes that all segments held together during it; `None`: not measured
    moved_bytes: int  # bytes of the phase's transition steps and copies, in evaluations too; 0 of what is no phase
    gb_per_s: float | None  # moved bytes over the seconds in which something moved; `None` when nothing did


@dataclass(frozen=True, slots=True)
class StepFigures:
    """All transition steps, or all copies, of one name."""

    name: str
    category: str
    count: int
    median_s: float
    total_s: float
    moved_bytes: int
    gb_per_s: float | None  # moved bytes over total seconds; `None` when nothing moved


@dataclass(frozen=True, kw_only=True, slots=True)
class Cycle:
    """One training step: from the end of the training before it to the end of its own."""

    start_s: float
    end_s: float
    parts_s: Mapping[str, float]  # seconds by name, for each of `PARTS`; they add up to the length of the cycle

    @property
    def duration_s(self) -> float:
        """Wall-clock seconds of the step."""
        return self.end_s - self.start_s


class Sheet(NamedTuple):
    """A table before it is drawn: text in the first column, then figures, then maybe a curve."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def phase_figures(trace: Trace) -> list[PhaseFigures]:
    """Time, peak and traffic of each of `PARTS` that took time, and the time of evaluations."""
    moves, every = moves_once(trace), _all_cycles(trace)
    evaluations = [cycle for cycle, last in every if last.name == EVALUATION]
    steps = [cycle for cycle, last in every if last.name != EVALUATION]  # and a rollout after them
    spans = [s for s in phase_spans(trace) if not any(e.start_s <= s.start_s < e.end_s for e in evaluations)]
    seconds = {part: [s.duration_s for s in spans if s.phase == part] for part in PARTS}
    seconds |= {part: [step.parts_s[part] for step in steps] for part in ("switch", "idle")}
    seconds[EVALUATION] = [cycle.duration_s for cycle in evaluations]
    whole_s = sum(map(sum, seconds.values()))
    # samples have a phase: what is none has those of its time
    stretches = {"switch": _switches(trace.spans), EVALUATION: [(cycle.start_s, cycle.end_s) for cycle in evaluations]}
    return [
        _phase_row(trace, part, given, whole_s, moves, stretches.get(part))
        for part, given in seconds.items()
        if sum(given)
    ]


def _phase_row(
    trace: Trace,
    part: str,
    seconds: list[float],
    whole_s: float,
    moves: list[Span],
    stretches: list[tuple[float, float]] | None,
) -> PhaseFigures:
    total_s = sum(seconds)
    samples = (s for s in trace.samples if (s.phase == part if stretches is None else _is_within(stretches, s.time_s)))
    peak_bytes = max((s.total_bytes for s in samples), default=None)
    moved = [s for s in moves if s.phase == part and s.num_bytes]
    moved_bytes = sum(s.num_bytes for s in moved)
    rate = _rate(moved_bytes, sum(end - start for start, end in stretches_of(moved)))
    mean_s, share = statistics.fmean(seconds), total_s / whole_s
    return PhaseFigures(part, len(seconds), total_s, mean_s, share, peak_bytes, moved_bytes, rate)


def moves_once(trace: Trace) -> list[Span]:
    """The transition steps and copies, with every moved byte counted once and in the phase that it was moved for.

    A step that started a copy leaves its bytes to that copy, which says how long they took. What was recorded without
    a phase belongs to the phase during which, or else before which, it began.
    """
    phases = phase_spans(trace)
    ends = [span.end_s for span in phases]
    starts: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in sorted((s for s in trace.spans if s.category == "copy"), key=lambda s: s.start_s):
        starts[span.resource, span.num_bytes].append(span.start_s)
    moves = []
    for span in trace.spans:
        if span.category in ("step", "copy"):
            same = starts[span.resource, span.num_bytes] if span.category == "step" else []
            copied = bisect_left(same, span.start_s) < bisect_right(same, span.end_s)
            index = bisect_right(ends, span.start_s)
            phase = phases[index].phase if span.phase is Phase.IDLE and index < len(phases) else span.phase
            moves.append(replace(span, phase=phase, num_bytes=0 if copied else span.num_bytes))
    return moves


def step_figures(trace: Trace) -> list[StepFigures]:
    """Transition steps and copies by name, those that took longest in all first."""
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in moves_once(trace):
        groups[span.name, span.category].append(span)
    return sorted((_step_row(*key, spans) for key, spans in groups.items()), key=lambda row: -row.total_s)


def _step_row(name: str, category: str, spans: Sequence[Span]) -> StepFigures:
    seconds, moved_bytes = [s.duration_s for s in spans], sum(s.num_bytes for s in spans)
    total_s, median_s = sum(seconds), statistics.median(seconds)
    return StepFigures(name, category, len(spans), median_s, total_s, moved_bytes, _rate(moved_bytes, total_s))


def phase_spans(trace: Trace) -> list[Span]:
    """The spans of category `phase`, those of the idle phase left out, in order of their start."""
    return sorted(filter(_is_phase, trace.spans), key=lambda s: s.start_s)


def _is_phase(span: Span) -> bool:
    return span.category == "phase" and span.phase is not Phase.IDLE


def segment_peaks(trace: Trace) -> dict[str, int]:
    """The most device bytes each segment ever held: the engine's first, then others, in order of appearance."""
    names = dict.fromkeys(name for sample in trace.samples for name in sample.segments)
    ordered = sorted(names, key=lambda name: not name.startswith("engine."))
    return {name: max(s.segments.get(name, 0) for s in trace.samples) for name in ordered}


def peak_samples(trace: Trace) -> dict[Phase, MemorySample]:
    """The first sample of each phase at which all segments together held most."""
    by_phase = {Phase(name): [s for s in trace.samples if s.phase == name] for name in PARTS if name != "switch"}
    return {phase: max(samples, key=lambda s: s.total_bytes) for phase, samples in by_phase.items() if samples}


def cycles(trace: Trace) -> list[Cycle]:
    """The training steps of a trace, from its `phase` spans.

    A step ends where the optimizer has stepped, the last one before a rollout where its training phase ends. What comes
    between (parking state, the user's own code) belongs to the step that it prepares. What a phase does within itself
    is its own time, moves included. Rollouts that are followed by an evaluation, passes without a backward one, or by
    nothing, are no steps.
    """
    return [c for c, last in _all_cycles(trace) if last.phase is Phase.TRAIN and last.name != EVALUATION]


def _all_cycles(trace: Trace) -> list[tuple[Cycle, Span]]:
    """Every group of phases that training or an evaluation ends, or nothing yet, with the last of its phases."""
    groups: list[list[Span]] = []
    for span in phase_spans(trace):
        last = groups[-1][-1] if groups else None
        if last is None or (last.phase is Phase.TRAIN and (span.phase is not Phase.TRAIN or span.name != last.name)):
            groups.append([])
        groups[-1].append(span)
    switches = _switches(trace.spans)
    if not groups:
        return []
    first_s = min([groups[0][0].start_s, *(start for start, _ in switches[:1])])
    starts = [first_s, *(group[-1].end_s for group in groups[:-1])]
    return [
        (_cycle(group, switches, begin_s, end_s), group[-1])
        for group, start_s in zip(groups, starts, strict=True)
        for begin_s, end_s in pairwise([start_s, *_steps_within(group, trace.steps), group[-1].end_s])
    ]


def _steps_within(group: Sequence[Span], steps: Sequence[float]) -> list[float]:
    """The ends of the optimizer's steps in the training phases of a group, without the last one's."""
    trained = (span for span in group if span.phase is Phase.TRAIN)
    inside = (steps[bisect_left(steps, span.start_s) : bisect_right(steps, span.end_s)] for span in trained)
    return [end_s for ends in inside for end_s in ends][:-1]


def _cycle(spans: Sequence[Span], switches: Sequence[tuple[float, float]], start_s: float, end_s: float) -> Cycle:
    """The step from `start_s` to `end_s`, which lie within `spans`."""
    parts_s = dict.fromkeys(PARTS, 0.0)
    parts_s["switch"] = covered_s(switches, start_s, end_s)
    for span in spans:
        first_s, last_s = max(span.start_s, start_s), min(span.end_s, end_s)
        if first_s < last_s:
            parts_s[span.phase] += last_s - first_s
            parts_s["switch"] -= covered_s(switches, first_s, last_s)
    parts_s["switch"] = max(0.0, parts_s["switch"])
    parts_s["idle"] = max(0.0, end_s - start_s - sum(parts_s.values()))
    return Cycle(start_s=start_s, end_s=end_s, parts_s=parts_s)


def switching_s(spans: Sequence[Span]) -> float:
    """Seconds of changes between phases in `spans`; what phases do in them, such as sending weights, is theirs."""
    switches = _switches(spans)
    within_s = (covered_s(switches, span.start_s, span.end_s) for span in spans if _is_phase(span))
    return sum(end_s - start_s for start_s, end_s in switches) - sum(within_s)


def _switches(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return stretches_of(span for span in spans if span.category in _SWITCHING)


def stretches_of(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The stretches of time covered by at least one span, in order and apart."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((s.start_s, s.end_s) for s in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def covered_s(stretches: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Seconds between `start_s` and `end_s` within `stretches`, which are sorted and disjoint."""
    seconds = 0.0
    for start, end in islice(stretches, bisect_right(stretches, start_s, key=lambda s: s[1]), None):
        if start >= end_s:
            break
        seconds += min(end, end_s) - max(start, start_s)
    return seconds


def _is_within(stretches: Sequence[tuple[float, float]], time_s: float) -> bool:
    index = bisect_left(stretches, time_s, key=lambda s: s[1])
    return index < len(stretches) and stretches[index][0] <= time_s


def _rate(num_bytes: int, seconds: float) -> float | None:
    return num_bytes / seconds / 1e9 if num_bytes and seconds > 0 else None


def summary(trace: Trace) -> dict[str, object]:
    """The figures of `report_tables` as plain JSON values: seconds, bytes, GB/s; null for what is not finite."""
    steps = cycles(trace)
    return {
        "since_s": trace.since_s,
        "num_steps": len(steps),
        "median_step_s": statistics.median(c.duration_s for c in steps) if steps else None,
        "parts_s": {part: sum(c.parts_s[part] for c in steps) for part in PARTS},
        "capacity_bytes": trace.capacity_bytes,
        "peak_bytes": trace.peak_bytes(),
        "peak_host_bytes": max((s.host_bytes for s in trace.samples), default=0),
        "peak_device_used_bytes": max((s.device_used_bytes or 0 for s in trace.samples), default=0) or None,
        "phases": {row.phase: asdict(row) for row in phase_figures(trace)},
        "steps": [asdict(row) for row in step_figures(trace)],
        "segments_at_peak": {str(phase): dict(s.segments) for phase, s in peak_samples(trace).items()},
        "segment_peaks": segment_peaks(trace),
        "metrics": {n: {"count": len(v), **_metric_figures(v)} for n, v in trace.metrics.items() if v},
    }


def _metric_figures(values: Sequence[float]) -> dict[str, float | None]:
    """First, last, least and greatest value; `None` for what is not finite."""
    finite = [v for v in values if math.isfinite(v)] or [math.nan]
    figures = {"first": values[0], "last": values[-1], "lowest": min(finite), "highest": max(finite)}
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def sparkline(values: Iterable[float], width: int = 24) -> str:
    """A series as at most `width` block characters; neighbours are averaged, values that are not finite left out."""
    finite = [v for v in values if math.isfinite(v)]
    largest = max(map(abs, finite), default=0.0) or 1.0
    count = min(width, len(finite))
    edges = [i * len(finite) // count for i in range(count + 1)] if count else []
    means = [statistics.fmean(v / largest for v in finite[a:b]) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(_BARS[round((mean - low) / ((high - low) or 1.0) * (len(_BARS) - 1))] for mean in means)


def sheets(trace: Trace) -> list[Sheet]:
    """The phases, the transitions, the memory and the metrics of a trace, each if there is any."""
    every = (_phase_sheet(trace), _step_sheet(trace), _memory_sheet(trace), _metric_sheet(trace))
    return [sheet for sheet in every if sheet.rows]


def report_tables(trace: Trace) -> list[RenderableType]:
    """The sheets as tables, for `rich.print(*report_tables(trace))`; a line that says so when there is nothing."""
    return [_table(sheet) for sheet in sheets(trace)] or [Text(EMPTY)]


def _table(sheet: Sheet) -> Group:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    has_curve = "curve" in sheet.columns  # which alone gets narrower where there is little room
    for column in sheet.columns:
        is_text = column in (sheet.columns[0], "curve")
        no_wrap = column != "curve" and (has_curve or not is_text)
        table.add_column(column, justify="left" if is_text else "right", no_wrap=no_wrap)
    for row in sheet.rows:
        cells = [Text(cell) for cell in row]  # a name may look like markup
        table.add_row(*cells[:-1], _Curve(row[-1]) if has_curve else cells[-1])
    return Group(Text(sheet.title, style="bold"), table, "")


class _Curve:
    """A curve as text, from its first value to its last in whatever width there is."""

    def __init__(self, blocks: str) -> None:
        self._blocks = blocks

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, len(self._blocks)), len(self._blocks))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(map(_BARS.index, self._blocks), options.max_width))


def _phase_sheet(trace: Trace) -> Sheet:
    columns = ("phase", "count", "total", "mean", "share", "peak", "moved", "GB/s")
    rows = []
    for row in phase_figures(trace):
        times = (format_seconds(row.total_s), format_seconds(row.mean_s), f"{row.share:.1%}")
        peak = format_bytes(row.peak_bytes) if row.peak_bytes else "-"
        rows.append((row.phase, str(row.count), *times, peak, *_moved(row.moved_bytes, row.gb_per_s)))
    steps = cycles(trace)
    title = f"Phases of {len(steps)} training step{'s' * (len(steps) != 1)}" if steps else "Phases"
    title += f" since {format_seconds(trace.since_s)}" if trace.since_s else ""
    median = f", {format_seconds(statistics.median(c.duration_s for c in steps))} at the median" if steps else ""
    return Sheet(title + median, columns, rows)


def _moved(num_bytes: int, gb_per_s: float | None) -> tuple[str, str]:
    return format_bytes(num_bytes) if num_bytes else "-", "-" if gb_per_s is None else f"{gb_per_s:.1f}"


def _step_sheet(trace: Trace) -> Sheet:
    columns = ("transition", "kind", "count", "median", "total", "moved", "GB/s")
    rows = []
    for row in step_figures(trace):
        times = (f"{row.median_s * 1e3:.1f} ms", format_seconds(row.total_s))
        rows.append((row.name, row.category, str(row.count), *times, *_moved(row.moved_bytes, row.gb_per_s)))
    return Sheet("Where the seconds of the transitions went (a copy runs beside other work)", columns, rows)


def _memory_sheet(trace: Trace) -> Sheet:
    peaks = peak_samples(trace)
    held: dict[str, list[int | None]] = {n: [s.segments.get(n) for s in peaks.values()] for n in segment_peaks(trace)}
    held["all segments"] = [s.total_bytes for s in peaks.values()]
    # at most, which may be at another moment: activations are in no segment
    held["device (driver's view)"] = [
        max(s.device_used_bytes or 0 for s in trace.samples if s.phase is p) for p in peaks
    ]
    held["host arena"] = [s.host_bytes for s in peaks.values()]
    rows = [(name, *(format_bytes(v) if v else "-" for v in values)) for name, values in held.items() if any(values)]
    return Sheet(memory_headline(trace) or "Memory", ("segment", *map(str, peaks)), rows)


def memory_headline(trace: Trace) -> str:
    """Say what taking turns is for: the peak of all segments beside every segment's own peak, added up."""
    if not (peak_bytes := trace.peak_bytes()):
        return ""
    capacity = f" of {format_bytes(trace.capacity_bytes)}" if trace.capacity_bytes else ""
    apart = format_bytes(sum(segment_peaks(trace).values()))
    return f"Memory{capacity}: peak {format_bytes(peak_bytes)}, without taking turns {apart}"


def _metric_sheet(trace: Trace) -> Sheet:
    columns = ("metric", "values", "first", "last", "lowest", "highest", "curve")
    rows = []
    for name, values in trace.metrics.items():
        if values:
            figures = ("-" if v is None else f"{v:.3g}" for v in _metric_figures(values).values())
            rows.append((name, str(len(values)), *figures, sparkline(values)))
    return Sheet("Metrics", columns, rows)
