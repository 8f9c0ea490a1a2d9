"""The report of a run: `rt.report()` and `rt.plot()`. Tables, pictures and facts; its memory as text, and as a PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from colo.errors import Unsupported
from colo.phases.phase import Phase
from colo.phases.trace import MemorySample, Trace
from colo.report.charts import (
    CURVE,
    PART_COLOURS,
    AreaChart,
    Axis,
    BarChart,
    CurveChart,
    memory_chart,
    reward_chart,
    steps_chart,
)
from colo.report.html import write_html
from colo.report.table import BLOCKS, EMPTY, cycles, report_tables, summary
from colo.units import format_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """A run so far: printable, showable in a notebook, and plain data through `to_json`."""

    facts: Mapping[str, str]
    """Facts about the runtime and its choices: name to sentence."""

    trace: Trace

    def to_json(self) -> dict[str, object]:
        """Facts and figures as plain data."""
        return {"facts": dict(self.facts), **summary(self.trace)}

    def write(self, path: Path, *, title: str) -> Path:
        """Write the run as a static HTML file or, for `.png`, as a picture. Raises: `ValueError` for another suffix."""
        if path.suffix == ".png":
            write_png(self.trace, path, title=title)
        elif path.suffix == ".html":
            write_html(self.trace, path, title=title, facts=self.facts)
        else:
            raise ValueError(f"cannot plot to {path}: name a file that ends in .html or .png")
        return path

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(map(len, self.facts))
        for name, sentence in self.facts.items():
            yield Text.assemble((f"{name:<{width}}  ", "bold"), sentence)
        yield from report_tables(self.trace)

    def _repr_html_(self) -> str:
        """The report in a notebook: the terminal's tables, in a fixed-width font."""
        return f"<pre style='line-height:1.2'>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        console = Console(width=100, no_color=True, force_terminal=False, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


MARKS = {Phase.ROLLOUT: "r", Phase.TRAIN: "t", Phase.SYNC: "s", Phase.IDLE: "."}
STYLES = {Phase.ROLLOUT: "cyan", Phase.TRAIN: "yellow", Phase.SYNC: "magenta", Phase.IDLE: "dim"}


def memory_timeline(trace: Trace, *, width: int = 100, num_cycles: int = 3) -> Text:
    """The last `num_cycles` training steps, event by event: time is not to scale, so that every move can be seen.

    The height of each block is the segment's bytes as a share of the capacity, or of the peak where there is none.
    """
    steps = cycles(trace)
    start_s = steps[-num_cycles].start_s if len(steps) >= num_cycles else 0.0
    samples = [sample for sample in trace.samples if sample.time_s >= start_s]
    if not samples:
        return Text("no memory has been recorded yet")
    names = [name for name in samples[0].segments if any(s.segments.get(name) for s in samples)]
    label = max([len(name) for name in names] + [len("all segments")])
    columns = _pick(samples, max(8, width - label - 14))
    scale_bytes = trace.capacity_bytes or max(s.total_bytes for s in samples) or 1
    text = Text.assemble((f"{'phase':<{label}}  ", "bold"))
    for sample in columns:
        text.append(MARKS[sample.phase], STYLES[sample.phase])
    for name in names:
        values = [sample.segments.get(name, 0) for sample in columns]
        text.append(f"\n{name:<{label}}  {_bars(values, scale_bytes)}  {format_bytes(max(values))}")
    totals = [sample.total_bytes for sample in columns]
    text.append(f"\n{'all segments':<{label}}  {_bars(totals, scale_bytes)}  {format_bytes(max(totals))}", "bold")
    text.append(
        f"\n{'':<{label}}  r rollout  t train  s sync  . between; full height {format_bytes(scale_bytes)}", "dim"
    )
    return text


def _pick(samples: Sequence[MemorySample], most: int) -> list[MemorySample]:
    """At most `most` samples in order: of each group the one that holds most, so that no peak is lost."""
    group = -(-len(samples) // most)
    return [max(samples[i : i + group], key=lambda s: s.total_bytes) for i in range(0, len(samples), group)]


def _bars(values: Sequence[int], scale_bytes: int) -> str:
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, -(-value * top // scale_bytes))] for value in values)


# ---- a PNG, through matplotlib -------------------------------------------------------------------------------------


def write_png(trace: Trace, path: str | Path, *, title: str = "colo run", dpi: int = 150) -> None:
    """Draw memory over time, step times and reward as one PNG, 10 inches wide, on white.

    Raises: `Unsupported` without matplotlib, the optional extra `plot`; no file has been written then.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported("a PNG needs matplotlib: run pip install 'colo-rl[plot]', or write HTML instead") from error
    upper = memory_chart(trace)
    lower = [chart for chart in (steps_chart(trace), reward_chart(trace)) if chart is not None]
    rows = [["memory"] * max(1, len(lower))] if upper else []
    rows += [[chart.heading.title for chart in lower]] if lower else []
    figure = Figure(figsize=(10, 4 * max(1, len(rows))), layout="constrained")
    figure.suptitle(title if rows else f"{title}\n{EMPTY}", x=0.01, ha="left", fontweight="bold")
    panels: dict[str, Any] = figure.subplot_mosaic(rows) if rows else {}
    for chart in (upper, *lower):
        if chart is not None:
            axes = panels["memory" if chart is upper else chart.heading.title]
            _DRAW[type(chart)](axes, chart)
            axes.set_title(chart.heading.title, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=dpi, facecolor="white")


def _draw_areas(axes: Any, chart: AreaChart) -> None:
    times = [*chart.times, chart.x.high]
    below = [0.0] * len(times)
    for series in chart.stack:
        above = [b + v for b, v in zip(below, [*series.values, series.values[-1]], strict=True)]
        axes.fill_between(times, below, above, step="post", color=series.colour, linewidth=0, label=series.title)
        below = above
    for span in chart.phases:
        if span.start_s < chart.x.high and span.end_s > chart.x.low:
            axes.axvspan(span.start_s, span.end_s, color=PART_COLOURS[span.phase], alpha=0.09, linewidth=0, zorder=0)
    if chart.limit:
        label = f"capacity {format_bytes(chart.limit)}"
        axes.axhline(chart.limit, color="black", linestyle="--", linewidth=1, label=label)
    _label(axes.xaxis, chart.x)
    _label(axes.yaxis, chart.y)
    axes.set(xlim=(chart.x.low, chart.x.high if chart.x.high > chart.x.low else None), ylim=(0, chart.y.high))
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(handles=handles, ncols=3, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.08))


def _draw_bars(axes: Any, chart: BarChart) -> None:
    firsts, lasts, stacks = zip(*chart.bars, strict=True)
    widths, below = [0.84 * (b - a) for a, b in zip(firsts, lasts, strict=True)], [0.0] * len(stacks)
    for (_, part, _), *column in zip(chart.heading.legend, *stacks, strict=True):
        values = [series.values[0] for series in column]
        place = {"align": "edge", "color": column[0].colour, "label": part}
        axes.bar([a + 0.58 for a in firsts], values, widths, below, **place)
        below = [b + value for b, value in zip(below, values, strict=True)]
    _label(axes.yaxis, chart.y)
    axes.set(xlabel="training step", xticks=[value + 0.5 for value, _ in chart.x.ticks])
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.15))


def _draw_curve(axes: Any, chart: CurveChart) -> None:
    colour = "black" if chart.series.colour == CURVE else chart.series.colour
    axes.plot([i + 1 for i in chart.places], [chart.series.values[i] for i in chart.places], color=colour, linewidth=1)
    _label(axes.yaxis, chart.y)
    ticks = [value + 0.5 for value, _ in chart.x.ticks]
    axes.set(xlabel=chart.x_label, xticks=ticks, ylim=(chart.y.low, chart.y.high))
    axes.grid(axis="y", alpha=0.3)


def _label(axis: Any, values: Axis) -> None:
    axis.set_ticks([value for value, _ in values.ticks], [label for _, label in values.ticks])


_DRAW: dict[type, Callable[[Any, Any], None]] = {AreaChart: _draw_areas, BarChart: _draw_bars, CurveChart: _draw_curve}
