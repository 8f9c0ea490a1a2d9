"""Drawing with strings: escaped markup, a plotting frame with axes, and the look of the report page.

Paper, ink and lines are CSS variables: pictures follow the reader's light or dark setting.
They are as wide as the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from colo.report.axes import Axis

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1a1f26; --muted: #5a6572; --line: #dde2e7;
  --soft: #f5f7f9; --curve: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --paper: #13171c; --ink: #e6eaee; --muted: #98a4b1; --line: #2b323a;
  --soft: #1b2127; --curve: #56b4e9; } }
@media (max-width: 720px) { figure { overflow-x: auto; }  body > figure > svg { min-width: 640px; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 40px 24px 56px; max-width: 1048px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; }  h2 { margin: 0; font-size: 17px; line-height: 1.3; }
p { margin: 4px 0 0; color: var(--muted); max-width: 110ch; }
footer { margin-top: 44px; color: var(--muted); font-size: 13px; }
figure { margin: 40px 0 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; margin-top: 10px; overflow: visible; }
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
  :root { --paper: #ffffff; --ink: #000000; --muted: #444444; --line: #cccccc; --soft: #f5f5f5; --curve: #0072b2; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }  body { padding: 0; font-size: 12px; }
  figure, table, .tiles { break-inside: avoid; }  figure { margin-top: 22px; }
  table, .legend { font-size: 11px; }  footer { margin-top: 16px; }  .tiles dd:first-of-type { font-size: 17px; }
  .pair { grid-template-columns: 1fr 1fr; }  .tiles { grid-template-columns: repeat(4, 1fr); } }
"""
"""Style sheet of the page: light, dark and printed."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The area of a chart between its axes: values in, pixels out. Sizes are pixels."""

    x: Axis
    y: Axis
    width: float  # of the whole drawing, labels of the axes included
    height: float
    left: float = 64.0
    right: float = 8.0
    top: float = 12.0
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
        """Grid lines and labels."""
        parts = []
        for value, label in self.y.ticks:
            row = self.row(value)
            parts.append(line(self.left, row, self.end, row, class_="grid"))
            parts.append(text(self.left - 8, row + 4, label, text_anchor="end"))
        for value, label in self.x.ticks:
            column = self.column(value)
            parts.append(line(column, self.floor, column, self.floor + 4, class_="grid"))
            parts.append(text(column, self.floor + 18, label, text_anchor="middle"))
        return markup(*parts)

    def drawing(self, label: str, *children: str) -> Markup:
        """The finished `svg` element; `label` is what a screen reader says."""
        box = f"0 0 {number(self.width)} {number(self.height)}"
        return element("svg", *children, viewBox=box, role="img", aria_label=label, width=self.width)


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
