"""A trace as one static HTML page: the charts as SVG, and the tables. No script, no font, no network."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from colo.phases.trace import Span, Trace
from colo.report import charts, svg
from colo.report.axes import Axis
from colo.report.charts import DARK, PART_COLOURS, AreaChart, BarChart, CurveChart, Heading, RowChart
from colo.report.svg import Frame, Markup
from colo.report.table import EMPTY, cycles, segment_peaks, sheets
from colo.units import format_bytes, format_seconds

_NO_FACTS: Mapping[str, str] = MappingProxyType({})
_WIDTH, _HALF_WIDTH, _ROW_HEIGHT = 1000, 484, 30  # pixels


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


def _frame(x: Axis, y: Axis, width: float, height: float, *, left: float = 64.0, top: float = 12.0) -> Frame:
    ends = {"x_min": x.low, "x_max": x.high, "y_min": y.low, "y_max": y.high}
    return Frame(width=width, height=height, left=left, top=top, **ends)


def _areas(chart: AreaChart) -> Markup:
    frame = _frame(chart.x, chart.y, _WIDTH, 390, top=26)
    axes = frame.axes(chart.x.ticks, chart.y.ticks)
    parts = [_phase_bands(chart.phases, frame), axes, svg.areas(frame, chart.times, chart.stack)]
    if chart.used:
        line = svg.staircase([(frame.x(t), frame.y(num_bytes)) for t, num_bytes in chart.used], frame.end)
        parts.append(svg.element("path", d=svg.path(line), class_="trace"))
    if chart.limit:
        row = frame.y(chart.limit)
        parts.append(svg.line(frame.left, row, frame.end, row, class_="limit"))
        label = f"capacity {format_bytes(chart.limit)}"
        parts.append(svg.text(frame.end - 6, row + 16, label, class_="ink", text_anchor="end"))
    entries = svg.legend((series.colour, series.label, series.detail) for series in chart.stack)
    return _figure(chart.heading, frame, parts, entries)


def _stacked_bars(chart: BarChart) -> Markup:
    frame = _frame(chart.x, chart.y, _HALF_WIDTH, 270)
    bars = (svg.stacked_bar(frame, first, last, stack) for first, last, stack in chart.bars)
    return _figure(chart.heading, frame, [frame.axes(chart.x.ticks, chart.y.ticks), *bars])


def _curve(chart: CurveChart, width: float, height: float) -> Markup:
    frame = _frame(chart.x, chart.y, width, height)
    parts = [frame.axes(chart.x.ticks, chart.y.ticks), svg.curve(frame, chart.series, chart.places)]
    return _figure(chart.heading, frame, parts)


def _rows(chart: RowChart) -> Markup:
    height = 52 + _ROW_HEIGHT * len(chart.rows)
    frame = _frame(chart.x, Axis(high=1), _WIDTH, height, left=110, top=26)
    parts = [_phase_bands(chart.phases, frame), frame.axes(chart.x.ticks, ())]
    for index, (name, spans) in enumerate(chart.rows):
        top = frame.top + index * _ROW_HEIGHT
        parts.append(svg.text(frame.left - 10, top + 19, name, text_anchor="end"))
        parts.append(svg.line(frame.left, top + _ROW_HEIGHT, frame.end, top + _ROW_HEIGHT, class_="grid"))
        parts += [_span_bar(*bar, top + 4) for bar in _visible(spans, frame, least=2)]
    return _figure(chart.heading, frame, parts)


def _visible(spans: Sequence[Span], frame: Frame, least: float = 1.0) -> Iterator[tuple[Span, float, float]]:
    stretches = [(s.start_s, s.end_s) for s in spans]
    return ((spans[index], left, width) for index, left, width in svg.visible(frame, stretches, least))


def _phase_bands(phases: Sequence[Span], frame: Frame) -> Markup:
    """A strip of phases along the top, and the area below it tinted."""
    bands = []
    for span, left, width in _visible(phases, frame):
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
