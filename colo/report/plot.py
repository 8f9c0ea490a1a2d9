"""A trace as pictures: one static HTML page without scripts or network, or one PNG through matplotlib.

Blue is the engine and its phase, warm colours are the trainer; see `svg` for the palette.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from colo.errors import Unsupported
from colo.phases import phase as known
from colo.phases.trace import MemorySample, Span, Trace
from colo.report import svg
from colo.report.svg import Frame, Markup
from colo.report.table import EMPTY, PARTS, Cycle, cycles, moves_once, phase_spans, segment_peaks, sheets
from colo.units import format_bytes, format_seconds

PART_COLOURS = dict(zip(PARTS, (svg.BLUE, svg.GREEN, svg.VERMILLION, svg.YELLOW, svg.GREY), strict=True))
"""Colour of each part of a training step; those that are phases have it everywhere."""

_SEGMENT_COLOURS = {
    known.ENGINE_WEIGHTS: svg.BLUE,
    known.ENGINE_KV_CACHE: svg.SKY,
    known.TRAINER_PARAMETERS: svg.VERMILLION,
    known.TRAINER_GRADIENTS: svg.YELLOW,
    known.TRAINER_OPTIMIZER: svg.ORANGE,
    known.TRAINER_MASTER_WEIGHTS: svg.PURPLE,
}
_OTHER_COLOURS = (svg.GREEN, svg.GREY, svg.VERMILLION, svg.SKY)
_ROWS = {"engine": "engine", "device": "device", "d2h": "device to host", "h2d": "host to device", "host": "host"}
_NO_FACTS: Mapping[str, str] = MappingProxyType({})
_WIDTH, _HALF_WIDTH, _ROW_HEIGHT = 1000, 484, 30  # pixels
_NUM_BINS, _MAX_BARS, _MAX_STEPS = 400, 160, 20  # memory samples, step times, and training steps drawn one by one


def write_html(
    trace: Trace, path: str | Path, *, title: str = "colo run", subtitle: str = "", facts: Mapping[str, str] = _NO_FACTS
) -> None:
    """Write the report page: memory over time, step times, reward, one step in detail, and the tables.

    The file stands alone: no script, no font, no network. It follows the reader's light or dark setting, and prints.
    `facts` are shown as given, such as `{"model": "Qwen/Qwen3-8B", "device": "NVIDIA H200"}`. A trace that holds
    nothing gives a page that says so. Of long traces fewer points are drawn, every peak among them.
    """
    header = [svg.element("h1", title)] + ([svg.element("p", subtitle)] if subtitle else [])
    if facts:
        pairs = (svg.element("div", svg.element("dt", k), svg.element("dd", v)) for k, v in facts.items())
        header.append(svg.element("dl", *pairs, class_="facts"))
    pair = [figure for figure in (_steps_figure(trace), _reward_figure(trace)) if figure]
    body = [_tiles(trace), _memory_figure(trace), _peaks_figure(trace)]
    body += [svg.element("div", *pair, class_="pair")] if pair else []
    body += [_gantt_figure(trace)]
    body += [svg.figure(s.title, "", svg.table(s.columns, s.rows)) for s in sheets(trace)]
    shown = [part for part in body if part] or [svg.element("figure", svg.element("p", EMPTY))]
    footer = svg.element("footer", "Drawn by colo. Colours: Okabe and Ito, chosen for readers with colour blindness.")
    Path(path).write_text(svg.page(title, *header, *shown, footer), encoding="utf-8")


def _tiles(trace: Trace) -> Markup:
    """The figures that answer the first questions: what fits, what sharing saves, how long, how much of it is lost."""
    items = []
    if peak := trace.peak_bytes():
        capacity = f"of {format_bytes(trace.capacity_bytes)} on the device" if trace.capacity_bytes else "on the device"
        items.append(("Peak of all segments", format_bytes(peak), capacity))
        apart = format_bytes(sum(segment_peaks(trace).values()))
        items.append(("Without taking turns", apart, "every segment's own peak, added up"))
    if steps := cycles(trace):
        switch_s = statistics.fmean(step.parts_s["switch"] for step in steps)
        share = switch_s / (statistics.fmean(step.duration_s for step in steps) or 1.0)
        median = format_seconds(statistics.median(step.duration_s for step in steps))
        items.append(("Training step", median, f"median of {len(steps)}"))
        items.append(("Switching", f"{share:.1%}", f"of the time, {format_seconds(switch_s)} a step"))
    return svg.tiles(items) if items else Markup()


def time_range(trace: Trace) -> tuple[float, float]:
    """From the first to the last moment of which anything was recorded, in seconds; (0, 0) for an empty trace."""
    moments = [s.time_s for s in trace.samples] + [t for s in trace.spans for t in (s.start_s, s.end_s)]
    return min(moments, default=0.0), max(moments, default=0.0)


def segment_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each segment: fixed for those that every run has, in turn for others."""
    others = cycle(_OTHER_COLOURS)
    return {name: _SEGMENT_COLOURS.get(name) or next(others) for name in names}


def decimate(samples: Sequence[MemorySample], num_bins: int = _NUM_BINS) -> list[MemorySample]:
    """At most a handful of samples for each of `num_bins` equal stretches of time, in order, with every peak.

    Of each stretch stay the first and the last sample, those where all segments together held most and least, where
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


def _memory_window(trace: Trace) -> tuple[float, float, str]:
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


def _memory_frame(trace: Trace) -> tuple[Frame, int]:
    """The frame of the memory picture, and the capacity to mark in it.

    The capacity is 0 when it is unknown, or so far above what was used that it would flatten the picture.
    """
    most = max(trace.peak_bytes(), *(s.device_used_bytes or 0 for s in trace.samples), 1)
    capacity = trace.capacity_bytes or 0
    limit = capacity if capacity <= 4 * most else 0
    start_s, end_s, _ = _memory_window(trace)
    return Frame(width=_WIDTH, height=390, x_min=start_s, x_max=end_s, y_max=max(most, limit) * 1.05, top=26), limit


def _memory_stack(trace: Trace, frame: Frame) -> tuple[list[MemorySample], list[svg.Series]]:
    """The samples to draw, from the one that holds at the left edge on, and each segment's bytes at each of them."""
    samples = sorted((s for s in trace.samples if s.time_s <= frame.x_max), key=lambda s: s.time_s)
    samples = decimate(samples[max(0, sum(s.time_s <= frame.x_min for s in samples) - 1) :])
    peaks = segment_peaks(trace)
    return samples, [
        svg.Series([s.segments.get(name, 0) for s in samples], colour, name, f"peak {format_bytes(peaks[name])}")
        for name, colour in segment_colours(peaks).items()
        if peaks[name]
    ]


def _memory_figure(trace: Trace) -> Markup:
    if not trace.samples:
        return Markup()
    frame, limit = _memory_frame(trace)
    samples, stack = _memory_stack(trace, frame)
    times = [max(s.time_s, frame.x_min) for s in samples]
    axes = frame.axes(frame.time_ticks(), svg.unit_ticks(0, frame.y_max, svg.BYTE_UNITS))
    parts = [_phase_bands(trace, frame), axes, svg.areas(frame, times, stack)]
    caption = "Bytes that each segment holds on the device. The strip on top, and the shading, show whose turn it is."
    used = [(t, s.device_used_bytes) for t, s in zip(times, samples, strict=True) if s.device_used_bytes is not None]
    if used:
        line = svg.staircase([(frame.x(t), frame.y(num_bytes)) for t, num_bytes in used], frame.end)
        parts.append(svg.element("path", d=svg.path(line), class_="trace"))
        caption += " The thin line is all device memory in use, as the driver sees it."
    if limit:
        parts.append(svg.line(frame.left, frame.y(limit), frame.end, frame.y(limit), class_="limit"))
        place, label = (frame.end - 6, frame.y(limit) + 16), f"capacity {format_bytes(limit)}"
        parts.append(svg.text(*place, label, class_="ink", text_anchor="end"))
    elif trace.capacity_bytes:
        caption += f" The capacity, {format_bytes(trace.capacity_bytes)}, lies far above this picture."
    drawing = frame.drawing("Device memory by segment over time", *parts)
    entries = svg.legend((series.colour, series.label, series.detail) for series in stack)
    phases = _part_legend({span.phase for span in phase_spans(trace)})
    return svg.figure("Device memory", caption + _memory_window(trace)[2], phases, drawing, entries)


def _peaks_figure(trace: Trace) -> Markup:
    """The peak of every training step, for runs too long to draw in full: shows whether memory grows."""
    steps = cycles(trace)
    if len(steps) <= _MAX_STEPS or not trace.samples:
        return Markup()
    ordered = sorted(trace.samples, key=lambda s: s.time_s)
    times = [s.time_s for s in ordered]
    held = (ordered[bisect_left(times, c.start_s) : bisect_right(times, c.end_s)] for c in steps)
    peaks = [max((s.total_bytes for s in samples), default=math.nan) for samples in held]
    series = svg.Series(peaks, "var(--curve)", "peak", f"at most {format_bytes(trace.peak_bytes())}")
    drawing = svg.curve(series, svg.BYTE_UNITS, width=_WIDTH, height=170)
    return svg.figure("Peak of each training step", "The most bytes that all segments held together.", drawing)


def _part_legend(parts: Collection[str]) -> Markup:
    return svg.legend((PART_COLOURS[part], part, "") for part in PARTS if part in parts)


def _visible(spans: Sequence[Span], frame: Frame, least: float = 1.0) -> Iterator[tuple[Span, float, float]]:
    stretches = [(s.start_s, s.end_s) for s in spans]
    return ((spans[index], left, width) for index, left, width in svg.visible(frame, stretches, least))


def _phase_bands(trace: Trace, frame: Frame) -> Markup:
    """A strip of phases along the top, and the area below it tinted."""
    bands = []
    for span, left, width in _visible(phase_spans(trace), frame):
        colour, title = PART_COLOURS[span.phase], f"{span.phase}: {format_seconds(span.duration_s)}"
        bands.append(svg.rect(left, frame.top - 18, width, 10, title=title, fill=colour))
        bands.append(svg.rect(left, frame.top, width, frame.floor - frame.top, fill=colour, fill_opacity=0.09))
    return svg.markup(*bands)


def _bars(steps: Sequence[Cycle]) -> list[tuple[int, int, int]]:
    """What each bar stands for: steps `first` to `last`, the last not included, shown by the slowest of them."""
    size = -(-len(steps) // _MAX_BARS)
    groups = [(first, min(first + size, len(steps))) for first in range(0, len(steps), size or 1)]
    return [(first, last, max(range(first, last), key=lambda i: steps[i].duration_s)) for first, last in groups]


def _steps_figure(trace: Trace) -> Markup:
    steps = cycles(trace)
    if not steps:
        return Markup()
    bars = _bars(steps)
    frame = Frame(width=_HALF_WIDTH, height=270, x_max=len(steps), y_max=max(s.duration_s for s in steps) * 1.05)
    parts = [frame.axes(svg.count_ticks(len(steps)), svg.unit_ticks(0, frame.y_max, svg.TIME_UNITS))]
    parts += [svg.stacked_bar(frame, first, last, _parts(steps[i], i + 1)) for first, last, i in bars]
    size = bars[0][1] - bars[0][0]
    caption = "Seconds of each training step." if size == 1 else f"The slowest of every {size} training steps."
    drawing = frame.drawing("Seconds of each training step by part", *parts)
    return svg.figure("Step time", caption, _part_legend(PARTS), drawing)


def _parts(step: Cycle, number: int) -> Iterator[svg.Series]:
    for part, seconds in step.parts_s.items():
        share = f"{format_seconds(seconds)} of {format_seconds(step.duration_s)}"
        yield svg.Series([seconds], PART_COLOURS[part], f"step {number}, {part}", share)


def _reward_figure(trace: Trace) -> Markup:
    rewards = trace.metrics.get("reward", [])
    if not any(map(math.isfinite, rewards)):
        return Markup()
    ends = f"{rewards[0]:.3g} at first, {rewards[-1]:.3g} at last"
    series = svg.Series(rewards, "var(--curve)", "reward", ends)
    drawing = svg.curve(series, svg.PLAIN_UNITS, width=_HALF_WIDTH, height=270)
    return svg.figure("Reward", f"Mean of each training step: {ends}.", drawing)


def _gantt_figure(trace: Trace) -> Markup:
    """What kept each resource busy during one training step, the one of median length, or during the whole run."""
    steps = sorted(enumerate(cycles(trace), start=1), key=lambda item: item[1].duration_s)
    number, window = steps[(len(steps) - 1) // 2] if steps else (0, None)
    start_s, end_s = (window.start_s, window.end_s) if window else time_range(trace)
    spans = moves_once(trace) + [s for s in phase_spans(trace) if s.resource != "host"]
    spans += [s for s in trace.spans if s.category not in ("phase", "step", "copy")]
    inside = [s for s in spans if s.end_s > start_s and s.start_s < end_s]
    if not inside:
        return Markup()
    rows = sorted({s.resource for s in inside}, key=lambda name: [*_ROWS, name].index(name))
    height = 52 + _ROW_HEIGHT * len(rows)
    frame = Frame(width=_WIDTH, height=height, x_min=start_s, x_max=end_s, y_max=1, left=110, top=26)
    parts = [_phase_bands(trace, frame), frame.axes(frame.time_ticks(), ())]
    for index, row in enumerate(rows):
        top = frame.top + index * _ROW_HEIGHT
        parts.append(svg.text(frame.left - 10, top + 19, _ROWS.get(row, row), text_anchor="end"))
        parts.append(svg.line(frame.left, top + _ROW_HEIGHT, frame.end, top + _ROW_HEIGHT, class_="grid"))
        bars = _visible([s for s in inside if s.resource == row], frame, least=2)
        parts += [_span_bar(span, left, width, top + 4) for span, left, width in bars]
    title = f"Training step {number} in detail" if window else "The run in detail"
    caption = f"What kept each resource busy, coloured by phase{', in the step of median length' if window else ''}."
    return svg.figure(title, caption, frame.drawing("Busy resources over time", *parts))


def _span_bar(span: Span, left: float, width: float, top: float) -> Markup:
    colour = PART_COLOURS[span.phase]
    moved = f", {format_bytes(span.num_bytes)}" if span.num_bytes else ""
    title = f"{span.name}: {format_seconds(span.duration_s)}{moved}"
    bar = svg.rect(left, top, width, _ROW_HEIGHT - 8, title=title, fill=colour, class_="cut", rx=2)
    if width < 6.4 * len(span.name) + 12:
        return bar
    ink = "#ffffff" if colour in svg.DARK else "#000000"
    return svg.markup(bar, svg.text(left + 6, top + 15, span.name, class_="on", style=f"fill:{ink}"))


def write_png(trace: Trace, path: str | Path, *, title: str = "colo run", dpi: int = 150) -> None:
    """Draw memory over time, step times and reward as one PNG, 10 inches wide, on white.

    Raises: `Unsupported` without matplotlib, the optional extra `plot`; no file has been written then.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported("a PNG needs matplotlib: run pip install 'colo[plot]', or write HTML instead") from error
    lower = ["Step time"] * bool(cycles(trace)) + ["Reward"] * any(map(math.isfinite, trace.metrics.get("reward", ())))
    rows = [row for row in (["Device memory"] * max(1, len(lower)) if trace.samples else [], lower) if row]
    figure = Figure(figsize=(10, 4 * max(1, len(rows))), layout="constrained")
    figure.suptitle(title if rows else f"{title}\n{EMPTY}", x=0.01, ha="left", fontweight="bold")
    panels: dict[str, Any] = figure.subplot_mosaic(rows) if rows else {}
    for name, axes in panels.items():
        draw = {"Device memory": _png_memory, "Step time": _png_steps, "Reward": _png_rewards}[name]
        draw(axes, trace)
        axes.set_title(name, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=dpi, facecolor="white")


def _png_memory(axes: Any, trace: Trace) -> None:
    frame, limit = _memory_frame(trace)
    samples, stack = _memory_stack(trace, frame)
    times = [*(s.time_s for s in samples), frame.x_max]
    below = [0.0] * len(times)
    for series in stack:
        above = [b + v for b, v in zip(below, [*series.values, series.values[-1]], strict=True)]
        axes.fill_between(times, below, above, step="post", color=series.colour, linewidth=0, label=series.title)
        below = above
    for span, _, _ in _visible(phase_spans(trace), frame):
        axes.axvspan(span.start_s, span.end_s, color=PART_COLOURS[span.phase], alpha=0.09, linewidth=0, zorder=0)
    if limit:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"capacity {format_bytes(limit)}")
    byte_ticks = svg.unit_ticks(0, frame.y_max, svg.BYTE_UNITS)
    for axis, ticks in ((axes.xaxis, frame.time_ticks()), (axes.yaxis, byte_ticks)):
        axis.set_ticks([value for value, _ in ticks], [label for _, label in ticks])
    axes.set(xlim=(frame.x_min, frame.x_max if frame.x_max > frame.x_min else None), ylim=(0, frame.y_max))
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(handles=handles, ncols=3, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.08))


def _png_steps(axes: Any, trace: Trace) -> None:
    steps = cycles(trace)
    firsts, lasts, shown = zip(*_bars(steps), strict=True)
    widths, below = [0.84 * (b - a) for a, b in zip(firsts, lasts, strict=True)], [0.0] * len(shown)
    for part, colour in PART_COLOURS.items():
        seconds = [steps[i].parts_s[part] for i in shown]
        axes.bar([a + 0.58 for a in firsts], seconds, widths, below, align="edge", color=colour, label=part)
        below = [b + s for b, s in zip(below, seconds, strict=True)]
    ticks = svg.unit_ticks(0, max(below), svg.TIME_UNITS)
    axes.set_yticks([value for value, _ in ticks], [label for _, label in ticks])
    axes.set(xlabel="training step", xticks=[value + 0.5 for value, _ in svg.count_ticks(len(steps))])
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.15))


def _png_rewards(axes: Any, trace: Trace) -> None:
    rewards = trace.metrics["reward"]
    axes.plot(range(1, len(rewards) + 1), rewards, color=svg.BLUE, marker=".")
    axes.set(xlabel="training step", xticks=[value + 0.5 for value, _ in svg.count_ticks(len(rewards))])
    axes.grid(axis="y", alpha=0.3)
