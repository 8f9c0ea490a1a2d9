"""The report of a run, which `rt.report()` returns and `rt.plot()` writes: tables, pictures and facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from colo.phases.trace import Trace
from colo.report.html import write_html
from colo.report.png import write_png
from colo.report.table import report_tables, summary


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
