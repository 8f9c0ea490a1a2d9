"""The report of a run (`rt.report()`, `rt.plot()`: tables, pictures and facts), and its memory as a line of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from colo.phases.phase import Phase
from colo.phases.trace import MemorySample, Trace
from colo.report.html import write_html
from colo.report.png import write_png
from colo.report.table import BLOCKS, cycles, report_tables, summary
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
    samples = _last_samples(trace, num_cycles)
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


def _last_samples(trace: Trace, num_cycles: int) -> list[MemorySample]:
    steps = cycles(trace)
    start_s = steps[-num_cycles].start_s if len(steps) >= num_cycles else 0.0
    return [sample for sample in trace.samples if sample.time_s >= start_s]


def _pick(samples: Sequence[MemorySample], most: int) -> list[MemorySample]:
    """At most `most` samples in order: of each group the one that holds most, so that no peak is lost."""
    group = -(-len(samples) // most)
    return [max(samples[i : i + group], key=lambda s: s.total_bytes) for i in range(0, len(samples), group)]


def _bars(values: Sequence[int], scale_bytes: int) -> str:
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, -(-value * top // scale_bytes))] for value in values)
