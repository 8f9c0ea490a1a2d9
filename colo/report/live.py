"""A table of a run that grows while it trains: redrawn in a terminal or a notebook, plain lines anywhere else.

with LiveTable(steps=300) as table:
    for metrics in grpo(rt, batches, reward, config):
        table.update(metrics)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from colo.report import html
from colo.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

Format = Callable[[float], str]

COLUMNS: tuple[tuple[str, tuple[str, ...], Format], ...] = (
    ("length", ("completion_tokens", "completions/mean_length"), lambda value: f"{value:.1f}"),
    ("mismatch", ("mismatch", "mismatch_sampled"), lambda value: f"{value:.1e}"),
    ("tokens/s", ("tokens_per_s",), lambda value: f"{value:,.0f}"),
    ("memory", ("device_bytes",), lambda value: format_bytes(int(value))),
)
"""Title, metric names by preference, and formatter of a column."""

LEFT_OUT = ("length", "tokens/s", "mismatch")
"""Columns that a plain line goes without where it would not fit, the first one first."""

PLAIN_EVERY_S = 10.0
"""So often a plain line is written."""


class LiveTable:
    """Metrics of the last steps: rewards, completion length, mismatch, tokens a second, memory, and the time left.

    `update` takes a step's metrics: `reward`, `rewards/NAME`, and those of `COLUMNS`; others are not shown, and what is
    missing in all steps has no column. Used as a context manager; what is shown last stays.
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        console: Console | None = None,
        num_rows: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`steps` is how many there will be, for the time left."""
        from rich.console import Console

        self.steps = steps
        self._console = console or Console()
        self._rows: deque[dict[str, str]] = deque(maxlen=num_rows)
        self._clock = clock
        self._first_s = 0.0
        self._num_done = 0
        self._written_s = float("-inf")
        self._is_written = True
        self._live: Live | None = None
        self._handle: Any = None

    def __enter__(self) -> LiveTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif not self._is_written:
            self._write()

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show one more step."""
        self._num_done += 1
        self._rows.append(self._cells(metrics))
        self._is_written = False
        if self._console.is_terminal:
            self._show_in_terminal()
        elif self._console.is_jupyter:
            self._show_in_notebook()
        elif self._clock() - self._written_s >= PLAIN_EVERY_S:
            self._write()

    def table(self) -> Table:
        """The last steps as a table of rich's."""
        titles = list(dict.fromkeys(title for row in self._rows for title in row))
        if "left" in titles:
            titles = [title for title in titles if title != "left"] + ["left"]
        table = Table(box=None, pad_edge=False)
        for title in titles:
            table.add_column(Text(title), justify="right")  # a reward's name may look like markup
        for row in self._rows:
            table.add_row(*(row.get(title, "") for title in titles))
        return table

    def _cells(self, metrics: Mapping[str, float]) -> dict[str, str]:
        of = "" if self.steps is None else f"/{self.steps}"
        cells = {"step": f"{self._num_done}{of}"}
        rewards = [name for name in metrics if name == "reward" or name.startswith("rewards/")]
        cells |= {name.removeprefix("rewards/"): _short(metrics[name]) for name in rewards}
        for title, names, write in COLUMNS:
            found = next((metrics[name] for name in names if name in metrics), None)
            if found is not None:
                cells[title] = write(found)
        if self._num_done == 1:  # whose time has that of a start in it
            self._first_s = self._clock()
        elif self.steps is not None:
            each_s = (self._clock() - self._first_s) / (self._num_done - 1)
            cells["left"] = _duration(each_s * max(0, self.steps - self._num_done))
        return cells

    def _write(self) -> None:
        cells = dict(self._rows[-1])
        for title in LEFT_OUT:
            if sum(len(name) + len(cell) + 3 for name, cell in cells.items()) - 2 > self._console.width:
                cells.pop(title, None)
        self._console.print(Text("  ".join(f"{title} {cell}" for title, cell in cells.items())))
        self._written_s, self._is_written = self._clock(), True

    def _show_in_terminal(self) -> None:
        from rich.live import Live

        if self._live is None:  # not before the first step: what shows a start on the terminal has ended then
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self.table(), refresh=True)
        self._is_written = True

    def _show_in_notebook(self) -> None:
        from IPython.display import HTML, display

        shown = HTML(_html(self.table()))
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)
        self._is_written = True


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _html(table: Table) -> str:
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    return html.table([str(column.header) for column in table.columns], rows)
