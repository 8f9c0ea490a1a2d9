"""A trace as one static HTML page: the charts as SVG, and the tables. No script, no font, no network.

Paper, ink and lines are CSS variables: pictures follow the reader's light or dark setting. They are as wide as the
page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from colo.phases.trace import Span, Trace
from colo.report import charts
from colo.report.charts import DARK, PART_COLOURS, AreaChart, Axis, BarChart, CurveChart, RowChart
from colo.report.table import EMPTY, cycles, segment_peaks, sheets
from colo.units import format_bytes, format_seconds

_WIDTH, _HALF_WIDTH, _NARROW_WIDTH, _ROW_HEIGHT = 1000, 484, 400, 30  # pixels

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1a1f26; --muted: #5a6572; --line: #dde2e7;
  --soft: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --paper: #13171c; --ink: #e6eaee; --muted: #98a4b1; --line: #2b323a;
  --soft: #1b2127; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 40px 24px 56px; max-width: 1048px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; }  h2 { margin: 0; font-size: 17px; line-height: 1.3; }
p { margin: 4px 0 0; color: var(--muted); max-width: 110ch; }
footer { margin-top: 44px; color: var(--muted); font-size: 13px; }
figure { margin: 40px 0 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; margin-top: 10px; overflow: visible; }
svg.narrow { display: none; }
@media screen and (max-width: 720px) { svg.broad { display: none; }  svg.narrow { display: block; } }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 0 32px; }
.pair figure { display: flex; flex-direction: column; }  .pair svg { margin-top: auto; padding-top: 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 16px; margin: 28px 0 0; }
.tiles div { padding: 14px 16px; border-radius: 8px; background: var(--soft); }
.tiles dt, .facts dt { color: var(--muted); font-size: 13px; }
.tiles dd { margin: 0; font-size: 23px; font-weight: 600; line-height: 1.3; white-space: nowrap; }
.tiles dd + dd { color: var(--muted); font-size: 13px; font-weight: 400; white-space: normal; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 10px 24px;
  margin: 24px 0 0; }  .facts dd { margin: 0; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 10px 0 0; padding: 0; list-style: none;
  font-size: 13px; }  .legend b { margin-left: 6px; color: var(--muted); font-weight: 400; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 7px; border-radius: 2px; }
.wide { overflow-x: auto; }
table { width: 100%; margin-top: 10px; border-collapse: collapse; font-size: 14px; }
th { color: var(--muted); font-weight: 500; }
th, td { padding: 5px 0 5px 18px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
svg text { fill: var(--muted); font-size: 12px; }  svg .ink { fill: var(--ink); }
svg .on { font-size: 11px; pointer-events: none; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .limit { stroke: var(--ink); stroke-width: 1.25; stroke-dasharray: 6 4; }
svg .trace { fill: none; stroke: var(--ink); stroke-width: 1; stroke-opacity: 0.65; }
svg .cut { stroke: var(--paper); stroke-width: 0.5; }
@media print {
  :root { --paper: #ffffff; --ink: #000000; --muted: #444444; --line: #cccccc; --soft: #f5f5f5; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }  body { padding: 0; font-size: 12px; }
  figure, table, .tiles { break-inside: avoid; }  figure { margin-top: 22px; }
  table, .legend { font-size: 11px; }  footer { margin-top: 16px; }  .tiles dd:first-of-type { font-size: 17px; }
  .pair { grid-template-columns: 1fr 1fr; }  .tiles { grid-template-columns: repeat(4, 1fr); } }
"""
"""Style sheet of the page: light, dark and printed."""


def write_html(
    trace: Trace, path: str | Path, *, title: str = "colo run", facts: Mapping[str, str] | None = None
) -> None:
    """Write the report page: memory over time, step times, reward, one step in detail, and the tables.

    The file stands alone: no script, no font, no network. It follows the reader's light or dark setting, and prints.
    `facts` are shown as given, such as `{"model": "Qwen/Qwen3-8B", "device": "NVIDIA H200"}`. A trace that holds
    nothing gives a page that says so. Long traces are drawn with fewer points, which include every peak.
    """
    header = [element("h1", title)]
    if facts:
        pairs = (element("div", element("dt", k), element("dd", v)) for k, v in facts.items())
        header.append(element("dl", *pairs, class_="facts"))
    memory, peaks, busy = charts.memory_chart(trace), charts.peaks_chart(trace), charts.busy_chart(trace)
    steps, reward = charts.steps_chart(trace), charts.reward_chart(trace)
    body = [_tiles(trace)]
    body += [_drawn(chart, *_both(chart)) for chart in (memory, peaks) if chart is not None]
    pair = [_drawn(c, Frame(c.x, c.y, _HALF_WIDTH, 270)) for c in (steps, reward) if c is not None]
    body += [element("div", *pair, class_="pair")] if pair else []
    body += [_drawn(busy, *_both(busy))] if busy else []
    body += [figure(s.title, "", table(s.columns, s.rows)) for s in sheets(trace)]
    shown = [part for part in body if part] or [element("figure", element("p", EMPTY))]
    footer = element(
        "footer", "Drawn by colo. Colours of memory: Okabe and Ito, chosen for readers with colour blindness."
    )
    Path(path).write_text(page(title, *header, *shown, footer), encoding="utf-8")


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
    return tiles(items) if items else Markup()


# ---- markup ----------------------------------------------------------------------------------------------------------


class Markup(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def markup(*parts: str) -> Markup:
    """Join parts; those that are not `Markup` are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """One element. Children that are not `Markup` and all attributes are escaped.

    An attribute's name may end in an underscore (`class_`) and has `-` where Python needs `_`; numbers are written
    with at most two decimals.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else number(value))}"'
        for name, value in attributes.items()
    )
    return Markup(f"<{tag}{written}>{markup(*children)}</{tag}>")


def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, width: float, height: float, *, title: str = "", **attributes: str | float) -> Markup:
    """A rectangle; `title` shows when the pointer rests on it."""
    children = [element("title", title)] if title else []
    return element("rect", *children, x=x, y=y, width=width, height=height, **attributes)


def text(x: float, y: float, content: str, **attributes: str | float) -> Markup:
    """A line of text whose baseline starts at (x, y)."""
    return element("text", content, x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: str | float) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def path(points: Iterable[tuple[float, float]], *, closed: bool = False) -> str:
    """The `d` of a path through points."""
    body = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return f"M{body}{'Z' if closed else ''}"


def staircase(points: Sequence[tuple[float, float]], end_x: float) -> list[tuple[float, float]]:
    """The corners of a series that keeps each value until the next point, the last one until `end_x`."""
    corners = list(points[:1])
    for (_, before), (x, y) in pairwise(points):
        if y != before:
            corners += [(x, before), (x, y)]
    return [*corners, (max(end_x, corners[-1][0]), corners[-1][1])] if corners else []


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of a chart between its axes: values in, pixels out. Sizes are pixels."""

    x: Axis
    y: Axis
    width: float  # of the whole drawing, labels of the axes included
    height: float
    left: float = 64.0
    top: float = 12.0
    right: float = 14.0
    bottom: float = 26.0

    @property
    def floor(self) -> float:
        """Pixel row of the lower edge."""
        return self.height - self.bottom

    @property
    def end(self) -> float:
        """Pixel column of the right edge."""
        return self.width - self.right

    def column(self, value: float) -> float:
        """Pixel column of a value of the x axis."""
        return self.left + (value - self.x.low) / (self.x.high - self.x.low or 1.0) * (self.end - self.left)

    def row(self, value: float) -> float:
        """Pixel row of a value of the y axis."""
        return self.floor - (value - self.y.low) / (self.y.high - self.y.low or 1.0) * (self.floor - self.top)

    def axes(self) -> Markup:
        """Draw grid lines and labels, of the x axis as many as there is room for."""
        parts = []
        for value, label in self.y.ticks:
            row = self.row(value)
            parts.append(line(self.left, row, self.end, row, class_="grid"))
            parts.append(text(self.left - 8, row + 4, label, text_anchor="end"))
        widest = max((7 * len(label) + 12 for _, label in self.x.ticks), default=0)
        every = max(1, math.ceil(widest * len(self.x.ticks) / (self.end - self.left)))
        for value, label in self.x.ticks[::every]:
            column = self.column(value)
            parts.append(line(column, self.floor, column, self.floor + 4, class_="grid"))
            parts.append(text(column, self.floor + 18, label, text_anchor="middle"))
        return markup(*parts)

    def drawing(self, label: str, *children: str, **attributes: str) -> Markup:
        """Finish the `svg` element; a screen reader says `label`."""
        box = f"0 0 {number(self.width)} {number(self.height)}"
        return element("svg", *children, viewBox=box, role="img", aria_label=label, width=self.width, **attributes)


def legend(items: Iterable[tuple[str, str, str]]) -> Markup:
    """Entries of a colour, a label and a figure beside it."""
    entries = (
        element("li", element("i", style=f"background:{colour}"), label, *([element("b", detail)] if detail else []))
        for colour, label, detail in items
    )
    return element("ul", *entries, class_="legend")


def tiles(items: Iterable[tuple[str, str, str]]) -> Markup:
    """Large figures: a caption, the figure, and a line below it."""
    parts = (element("div", element("dt", a), element("dd", b), element("dd", c)) for a, b, c in items)
    return element("dl", *parts, class_="tiles")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Markup:
    """A table; the first column is text, the others are figures."""
    head = element("tr", *(element("th", column) for column in columns))
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    whole = element("table", element("thead", head), element("tbody", *body))
    return element("div", whole, class_="wide")


def figure(title: str, caption: str, *children: str) -> Markup:
    """A heading, a line that explains, and a picture or a table."""
    about = [element("p", caption)] if caption else []
    return element("figure", element("figcaption", element("h2", title), *about), *children)


def page(title: str, *children: str) -> str:
    """A whole HTML document that needs nothing but itself."""
    head = (
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    return "<!doctype html>\n" + element("html", element("head", *head), element("body", *children), lang="en") + "\n"


# ---- charts ----------------------------------------------------------------------------------------------------------

Chart = AreaChart | BarChart | CurveChart | RowChart


def _both(chart: AreaChart | CurveChart | RowChart) -> tuple[Frame, Frame]:
    """Frames as wide as the page, for screens with room and for telephones."""
    rows = 52 + _ROW_HEIGHT * len(chart.rows) if isinstance(chart, RowChart) else 0
    y = Axis(high=1) if isinstance(chart, RowChart) else chart.y
    top = 12 if isinstance(chart, CurveChart) else 26
    heights = (rows, rows) if rows else (170, 170) if isinstance(chart, CurveChart) else (390, 300)
    left = 110 if rows else 64
    broad, narrow = (Frame(chart.x, y, *size, left, top) for size in zip((_WIDTH, _NARROW_WIDTH), heights, strict=True))
    return broad, narrow


def _drawn(chart: Chart, *frames: Frame) -> Markup:
    """Draw a chart with its words, once for each frame; the style sheet shows the first or, on telephones, the last."""
    heading, classes = chart.heading, ({"class_": "broad"}, {"class_": "narrow"}) if len(frames) > 1 else ({},)
    above = [legend(heading.legend)] if heading.legend else []
    drawings = [
        frame.drawing(heading.label, *_PARTS[type(chart)](chart, frame), **kind)
        for frame, kind in zip(frames, classes, strict=True)
    ]
    below = []
    if isinstance(chart, AreaChart):
        below = [legend((series.colour, series.label, series.detail) for series in chart.stack)]
    return figure(heading.title, heading.caption, *above, *drawings, *below)


def _areas(chart: AreaChart, frame: Frame) -> list[Markup]:
    parts = [_phase_bands(chart.phases, frame), frame.axes()]
    columns, base = list(map(frame.column, chart.times)), [0.0] * len(chart.times)
    for series in chart.stack:
        top = [below + value for below, value in zip(base, series.values, strict=True)]
        lower, upper = (
            staircase(list(zip(columns, map(frame.row, values), strict=True)), frame.end) for values in (base, top)
        )
        outline = path([*upper, *reversed(lower)], closed=True)
        title = element("title", series.title)
        parts.append(element("path", title, d=outline, fill=series.colour, fill_opacity=0.9, class_="cut"))
        base = top
    if chart.used:
        used = staircase([(frame.column(t), frame.row(num_bytes)) for t, num_bytes in chart.used], frame.end)
        parts.append(element("path", d=path(used), class_="trace"))
    if chart.limit:
        row = frame.row(chart.limit)
        parts.append(line(frame.left, row, frame.end, row, class_="limit"))
        label = f"capacity {format_bytes(chart.limit)}"
        parts.append(text(frame.end - 6, row - 4, label, class_="ink", text_anchor="end"))
    return parts


def _stacked_bars(chart: BarChart, frame: Frame) -> list[Markup]:
    parts = [frame.axes()]
    for first, last, stack in chart.bars:
        left, width, base = frame.column(first), frame.column(last) - frame.column(first), 0.0
        for series in stack:
            top = base + series.values[0]
            place = (left + 0.08 * width, frame.row(top), 0.84 * width, frame.row(base) - frame.row(top))
            parts.append(rect(*place, title=series.title, fill=series.colour))
            base = top
    return parts


def _curve(chart: CurveChart, frame: Frame) -> list[Markup]:
    """A line with dots where there is room for them; each value stands in the middle of its step."""
    series = chart.series
    points = [(frame.column(i + 0.5), frame.row(series.values[i])) for i in chart.places]
    title = element("title", series.title)
    parts = [element("path", title, d=path(points), fill="none", stroke_width=1.75)]
    if len(points) <= (frame.end - frame.left) / 8:
        parts += [element("circle", cx=x, cy=y, r=3) for x, y in points]
    drawn = element("g", *parts, style=f"fill:{series.colour};stroke:{series.colour}")
    return [frame.axes(), drawn]


def _rows(chart: RowChart, frame: Frame) -> list[Markup]:
    parts = [_phase_bands(chart.phases, frame), frame.axes()]
    for index, (name, spans) in enumerate(chart.rows):
        top = frame.top + index * _ROW_HEIGHT
        parts.append(text(frame.left - 10, top + 19, name, text_anchor="end"))
        parts.append(line(frame.left, top + _ROW_HEIGHT, frame.end, top + _ROW_HEIGHT, class_="grid"))
        parts += [_span_bar(*bar, top + 4) for bar in visible(spans, frame, least=2)]
    return parts


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
        bands.append(rect(left, frame.top - 18, width, 10, title=title, fill=colour))
        bands.append(rect(left, frame.top, width, frame.floor - frame.top, fill=colour, fill_opacity=0.09))
    return markup(*bands)


def _span_bar(span: Span, left: float, width: float, top: float) -> Markup:
    colour = PART_COLOURS[span.phase]
    moved = f", {format_bytes(span.num_bytes)}" if span.num_bytes else ""
    title = f"{span.name}: {format_seconds(span.duration_s)}{moved}"
    bar = rect(left, top, width, _ROW_HEIGHT - 8, title=title, fill=colour, class_="cut", rx=2)
    if width < 6.4 * len(span.name) + 12:
        return bar
    ink = "#ffffff" if colour in DARK else "#000000"
    return markup(bar, text(left + 6, top + 15, span.name, class_="on", style=f"fill:{ink}"))


_PARTS: Mapping[type, Callable[[Any, Frame], list[Markup]]] = {
    AreaChart: _areas,
    BarChart: _stacked_bars,
    CurveChart: _curve,
    RowChart: _rows,
}
