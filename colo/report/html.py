"""A trace as one static HTML page: the charts as SVG, and the tables. No script, no font, no network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from colo.phases.trace import Span, Trace
from colo.report import charts, svg
from colo.report.axes import Axis
from colo.report.charts import DARK, PART_COLOURS, AreaChart, BarChart, CurveChart, Heading, RowChart
from colo.report.svg import Frame, Markup
from colo.report.table import EMPTY, cycles, segment_peaks, sheets
from colo.units import format_bytes, format_seconds

_WIDTH, _HALF_WIDTH, _ROW_HEIGHT = 1000, 484, 30  # pixels


def write_html(
    trace: Trace, path: str | Path, *, title: str = "colo run", facts: Mapping[str, str] | None = None
) -> None:
    """Write the report page: memory over time, step times, reward, one step in detail, and the tables.

    The file stands alone: no script, no font, no network. It follows the reader's light or dark setting, and prints.
    `facts` are shown as given, such as `{"model": "Qwen/Qwen3-8B", "device": "NVIDIA H200"}`. A trace that holds
    nothing gives a page that says so. Long traces are drawn with fewer points, which include every peak.
    """
    header = [svg.element("h1", title)]
    if facts:
        pairs = (svg.element("div", svg.element("dt", k), svg.element("dd", v)) for k, v in facts.items())
        header.append(svg.element("dl", *pairs, class_="facts"))
    memory, peaks, busy = charts.memory_chart(trace), charts.peaks_chart(trace), charts.busy_chart(trace)
    steps, reward = charts.steps_chart(trace), charts.reward_chart(trace)
    body = [_tiles(trace)]
    body += [_areas(memory)] if memory else []
    body += [_curve(peaks, _WIDTH, 170)] if peaks else []
    pair = ([_stacked_bars(steps)] if steps else []) + ([_curve(reward, _HALF_WIDTH, 270)] if reward else [])
    body += [svg.element("div", *pair, class_="pair")] if pair else []
    body += [_rows(busy)] if busy else []
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


def _figure(heading: Heading, frame: Frame, parts: Iterable[str], legend: Markup | None = None) -> Markup:
    """A chart with its words; `legend` goes below the picture."""
    above = [svg.legend(heading.legend)] if heading.legend else []
    drawing = frame.drawing(heading.label, *parts)
    return svg.figure(heading.title, heading.caption, *above, drawing, *([legend] if legend is not None else []))


def _areas(chart: AreaChart) -> Markup:
    frame = Frame(x=chart.x, y=chart.y, width=_WIDTH, height=390, top=26)
    parts = [_phase_bands(chart.phases, frame), frame.axes()]
    columns, base = list(map(frame.column, chart.times)), [0.0] * len(chart.times)
    for series in chart.stack:
        top = [below + value for below, value in zip(base, series.values, strict=True)]
        lower, upper = (
            svg.staircase(list(zip(columns, map(frame.row, values), strict=True)), frame.end) for values in (base, top)
        )
        outline = svg.path([*upper, *reversed(lower)], closed=True)
        title = svg.element("title", series.title)
        parts.append(svg.element("path", title, d=outline, fill=series.colour, fill_opacity=0.9, class_="cut"))
        base = top
    if chart.used:
        line = svg.staircase([(frame.column(t), frame.row(num_bytes)) for t, num_bytes in chart.used], frame.end)
        parts.append(svg.element("path", d=svg.path(line), class_="trace"))
    if chart.limit:
        row = frame.row(chart.limit)
        parts.append(svg.line(frame.left, row, frame.end, row, class_="limit"))
        label = f"capacity {format_bytes(chart.limit)}"
        parts.append(svg.text(frame.end - 6, row + 16, label, class_="ink", text_anchor="end"))
    entries = svg.legend((series.colour, series.label, series.detail) for series in chart.stack)
    return _figure(chart.heading, frame, parts, entries)


def _stacked_bars(chart: BarChart) -> Markup:
    frame = Frame(x=chart.x, y=chart.y, width=_HALF_WIDTH, height=270)
    parts = [frame.axes()]
    for first, last, stack in chart.bars:
        left, width, base = frame.column(first), frame.column(last) - frame.column(first), 0.0
        for series in stack:
            top = base + series.values[0]
            place = (left + 0.08 * width, frame.row(top), 0.84 * width, frame.row(base) - frame.row(top))
            parts.append(svg.rect(*place, title=series.title, fill=series.colour))
            base = top
    return _figure(chart.heading, frame, parts)


def _curve(chart: CurveChart, width: float, height: float) -> Markup:
    """A line with dots where there is room for them; each value stands in the middle of its step."""
    frame, series = Frame(x=chart.x, y=chart.y, width=width, height=height), chart.series
    points = [(frame.column(i + 0.5), frame.row(series.values[i])) for i in chart.places]
    title = svg.element("title", series.title)
    parts = [svg.element("path", title, d=svg.path(points), fill="none", stroke_width=1.75)]
    if len(points) <= (frame.end - frame.left) / 8:
        parts += [svg.element("circle", cx=x, cy=y, r=3) for x, y in points]
    drawn = svg.element("g", *parts, style=f"fill:{series.colour};stroke:{series.colour}")
    return _figure(chart.heading, frame, [frame.axes(), drawn])


def _rows(chart: RowChart) -> Markup:
    height = 52 + _ROW_HEIGHT * len(chart.rows)
    frame = Frame(x=chart.x, y=Axis(high=1), width=_WIDTH, height=height, left=110, top=26)
    parts = [_phase_bands(chart.phases, frame), frame.axes()]
    for index, (name, spans) in enumerate(chart.rows):
        top = frame.top + index * _ROW_HEIGHT
        parts.append(svg.text(frame.left - 10, top + 19, name, text_anchor="end"))
        parts.append(svg.line(frame.left, top + _ROW_HEIGHT, frame.end, top + _ROW_HEIGHT, class_="grid"))
        parts += [_span_bar(*bar, top + 4) for bar in visible(spans, frame, least=2)]
    return _figure(chart.heading, frame, parts)


def visible(spans: Sequence[Span], frame: Frame, least: float = 1.0) -> Iterator[tuple[Span, float, float]]:
    """Spans as bars: each with its left edge and its width in pixels, at least `least`.

    Spans outside the frame are left out. So is a short one that begins where another was just drawn: any number of
    spans gives at most one short bar for each `least` pixels.
    """
    taken = -math.inf
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        left, right = frame.column(max(span.start_s, frame.x.low)), frame.column(min(span.end_s, frame.x.high))
        short = right - left < least
        if span.end_s <= frame.x.low or span.start_s >= frame.x.high or (short and left < taken):
            continue
        taken = left + least if short else taken
        yield span, left, max(right - left, least)


def _phase_bands(phases: Sequence[Span], frame: Frame) -> Markup:
    """A strip of phases along the top, and the area below it tinted."""
    bands = []
    for span, left, width in visible(phases, frame):
        colour, title = PART_COLOURS[span.phase], f"{span.phase}: {format_seconds(span.duration_s)}"
        bands.append(svg.rect(left, frame.top - 18, width, 10, title=title, fill=colour))
        bands.append(svg.rect(left, frame.top, width, frame.floor - frame.top, fill=colour, fill_opacity=0.09))
    return svg.markup(*bands)


def _span_bar(span: Span, left: float, width: float, top: float) -> Markup:
    colour = PART_COLOURS[span.phase]
    moved = f", {format_bytes(span.num_bytes)}" if span.num_bytes else ""
    title = f"{span.name}: {format_seconds(span.duration_s)}{moved}"
    bar = svg.rect(left, top, width, _ROW_HEIGHT - 8, title=title, fill=colour, class_="cut", rx=2)
    if width < 6.4 * len(span.name) + 12:
        return bar
    ink = "#ffffff" if colour in DARK else "#000000"
    return svg.markup(bar, svg.text(left + 6, top + 15, span.name, class_="on", style=f"fill:{ink}"))
