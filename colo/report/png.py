"""A trace as one PNG, through matplotlib: device memory, step times and reward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from colo.errors import Unsupported
from colo.phases.trace import Trace
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
from colo.report.table import EMPTY
from colo.units import format_bytes


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
    axes.set(xlabel="training step", xticks=[value + 0.5 for value, _ in chart.x.ticks])
    axes.grid(axis="y", alpha=0.3)


def _label(axis: Any, values: Axis) -> None:
    axis.set_ticks([value for value, _ in values.ticks], [label for _, label in values.ticks])


_DRAW: dict[type, Callable[[Any, Any], None]] = {
    AreaChart: _draw_areas,
    BarChart: _draw_bars,
    CurveChart: _draw_curve,
}
