"""Timing, models, and the record of every benchmark. Imports no vLLM, and transformers only where it is needed."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from colo.doctor import circumstances
from colo.errors import Unsupported
from colo.memory.offload import Mover, RegionSegment
from colo.memory.probe import free_device_bytes
from colo.memory.region import allocate_region
from colo.phases.phase import Residency
from colo.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PARENT_ENDS = 1  # PR_SET_PDEATHSIG of Linux

_END_S = 60.0
"""Longest time to wait for a process to end by itself."""

Row = dict[str, Any]
Spread = dict[str, tuple[Any, Any]]
"""The least and the most of figures of several rounds, by column."""

Tell = Callable[[str], None]

_SHAPES: dict[str, Row] = {
    name: {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
    }
    for name, hidden, intermediate, layers, heads, tied in (
        ("0.6b", 1024, 3072, 28, 16, True),
        ("1.7b", 2048, 6144, 28, 16, True),
        ("4b", 2560, 9728, 36, 32, True),
        ("8b", 4096, 12288, 36, 32, False),
        ("14b", 5120, 17408, 40, 40, False),
        ("32b", 5120, 25600, 64, 64, False),
        ("30b-a3b", 2048, 6144, 48, 32, False),
    )
}
_SHAPES["30b-a3b"] |= {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_TINY: Row = {
    "vocab_size": 256,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_TINY_EXPERTS: Row = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def silent(part: str) -> None:
    """Tell nobody which part of a benchmark begins."""


class Record:
    """Figures of one benchmark, written to `path` after every row, so that an interrupted run keeps what it has.

    The form is that of the files under `examples/bench/results/`. Of several rounds, `rows` and `limit` are those of
    the present one, and the file has the median of each figure, and beside it the rows of every round.
    """

    def __init__(self, benchmark: str, command: str, *, path: Path | None = None, tell: Tell = silent) -> None:
        """`command` prints the figures again; `tell` is called with the name of each part as it begins."""
        self.benchmark, self.command, self.tell = benchmark, command, tell
        self.limit: dict[str, float] = {}
        """Limits that the hardware sets, measured in the same run."""

        self.rows: list[Row] = []
        self.rounds: list[list[Row]] = [self.rows]
        self._limits = [self.limit]
        self.ended = "killed"
        """`complete`, or the reason that it is not; what the file says of a process that cannot say it any more."""

        self._path = path
        self._circumstances = {"commit": _commit()} | circumstances()

    def begin_round(self) -> None:
        """Measure everything once more: the rows so far are another round's."""
        self.rows, self.limit = [], {}
        self.rounds.append(self.rows)
        self._limits.append(self.limit)

    def add(self, *rows: Row) -> None:
        """Add rows, and write the file."""
        self.show([*self.rows, *rows])

    def show(self, rows: Iterable[Row]) -> None:
        """Put `rows` in place of all that are there, and write the file."""
        self.rows = self.rounds[-1] = list(rows)
        self.write()

    def write(self) -> None:
        """Write the file anew; a reader sees the old one or the new one, whole."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_name(f".{self._path.name}.part")
            beside.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            beside.replace(self._path)

    def to_json(self) -> dict[str, Any]:
        """Return figures and circumstances as plain data."""
        about = {"benchmark": self.benchmark, "command": self.command, **self._circumstances}
        limits: dict[str, list[float]] = {}
        for of_one in self._limits:
            for name, value in of_one.items():
                limits.setdefault(name, []).append(value)
        limit = {name: statistics.median(values) for name, values in limits.items()}
        found = about | {"ended": self.ended, "limit": limit, "rows": [row for row, _ in of_rounds(self.rounds)]}
        return found if len(self.rounds) == 1 else found | {"rounds": self.rounds}


def _commit() -> str | None:
    """Ask git for the commit that is measured; changed files show as `-dirty`."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return None


def of_rounds(rounds: Iterable[Iterable[Row]]) -> list[tuple[Row, Spread]]:
    """Combine rows of several rounds: the median of each figure, and the least and the most of those that differ.

    Rows are of the same thing if they have the same columns, words and truths; of several such the first of a round
    belongs to the first of another.
    """
    found: dict[Any, list[Row]] = {}
    for rows in rounds:
        seen: Counter[Any] = Counter()
        for row in rows:
            same = tuple((column, _is_figure(value) or (value,)) for column, value in row.items())
            found.setdefault((same, seen[same]), []).append(row)
            seen[same] += 1
    combined = []
    for of_one in found.values():
        row, spread = dict(of_one[0]), Spread()
        for column, first in row.items():
            figures = [other[column] for other in of_one]
            if not _is_figure(first) or min(figures) == max(figures):
                continue
            # one that was measured: the mean of two counts would be none
            median = statistics.median_low if isinstance(first, int) else statistics.median
            row[column], spread[column] = median(figures), (min(figures), max(figures))
        combined.append((row, spread))
    return combined


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `function` and everything it queues on the device take."""
    synchronize(device)
    start_s = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start_s


def median_s(function: Callable[[], Any], device: torch.device, *, repeats: int = 5, warmup: int = 1) -> float:
    """Median seconds of `repeats` calls after `warmup` unmeasured ones."""
    for _ in range(warmup):
        timed(function, device)
    return statistics.median(timed(function, device) for _ in range(repeats))


def clear(device: torch.device) -> None:
    """Return what Python and torch's caches hold on to, of the device and of pinned host memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def clocked(function: Callable[[], Any]) -> tuple[Any, float]:
    """Call and return its value and wall-clock seconds. Does not wait for the device."""
    start_s = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start_s


def shape(name: str, device: torch.device, *, layers: int | None = None) -> PretrainedConfig:
    """The configuration of a Qwen3, such as `0.6b` or `30b-a3b`; on a CPU a tiny one of the same kind.

    With a number of `layers` it has those of the shape, on a CPU too, and a small vocabulary.
    """
    from transformers import Qwen3Config, Qwen3MoeConfig

    kind = Qwen3MoeConfig if name == "30b-a3b" else Qwen3Config
    common: Row = {"max_position_embeddings": 8192, "eos_token_id": None, "bos_token_id": None}
    if layers is not None:
        return kind(**common, vocab_size=16384, head_dim=128, **_SHAPES[name] | {"num_hidden_layers": layers})
    if device.type == "cpu":
        experts = _TINY_EXPERTS if kind is Qwen3MoeConfig else {}
        return kind(**common, **_TINY, **experts, dtype=torch.float32)
    return kind(**common, vocab_size=151936, head_dim=128, **_SHAPES[name], dtype=torch.bfloat16)


@contextmanager
def own_processes(
    count: int = 1, *, first: str | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Processes of their own for calls, which give all of their memory back as the block ends.

    Each has `environment` in its own, and imports the module `first` before all that calls need, such as transformers.

    Those that do not end by themselves are killed with their children: at once where the block is left by an error,
    Ctrl-C or a limit of time, and on Linux where this process is killed.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=spawn, initializer=_begin, initargs=(first, environment or {})
    ) as executor:
        workers = executor._processes  # Python has kill_workers from 3.14 on
        try:
            yield executor
            executor.shutdown(wait=False)
            give_up_s = time.monotonic() + _END_S
            while any(worker.is_alive() for worker in workers.values()) and time.monotonic() < give_up_s:
                time.sleep(0.05)
        finally:
            for pid in list(workers):
                with suppress(psutil.NoSuchProcess):
                    worker = psutil.Process(pid)
                    for process in (*worker.children(recursive=True), worker):
                        with suppress(psutil.NoSuchProcess):
                            process.kill()


def _begin(first: str | None, environment: Mapping[str, str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_ENDS, signal.SIGKILL)
    os.environ.update(environment)
    if first is not None:
        importlib.import_module(first)


def require_free(num_bytes: int, device: torch.device, instead: str) -> None:
    """Refuse what holds `num_bytes` of the device at once where fewer are free. Raises: `Unsupported`."""
    if (free_bytes := free_device_bytes(device)) < num_bytes:
        raise Unsupported(
            f"the benchmark needs more than {format_bytes(num_bytes)} free on {device}, where "
            f"{format_bytes(free_bytes)} are: {instead}"
        )


def segment_of(size_bytes: int, mover: Mover) -> RegionSegment:
    """A resident segment of regions of about 1 GiB each."""
    num_regions = max(1, size_bytes // GIB)
    regions = [allocate_region(size_bytes // num_regions, mover.device, name="bench") for _ in range(num_regions)]
    return RegionSegment("bench", regions=regions, away=Residency.OFFLOADED, mover=mover)


def gigabytes_per_s(num_bytes: int, seconds: float) -> float:
    """Decimal gigabytes a second, the unit of bus and memory datasheets."""
    return num_bytes / seconds / 1e9


def rows_tables(record: Record, *, width: int = 10_000) -> list[Table]:
    """Tables of a record's rows for the terminal: one for the rows that have the same columns.

    What is the same in every row of a table stands in its caption. A figure that differs from round to round is
    followed by its least and its most. A table that does not fit into `width` characters is turned: a line for each
    column.
    """
    found = record.to_json()
    limits = ", ".join(f"{name} {value:.3g}" for name, value in found["limit"].items())
    groups: dict[tuple[str, ...], list[tuple[Row, Spread]]] = {}
    for row, spread in of_rounds(record.rounds):
        groups.setdefault(tuple(row), []).append((row, spread))
    tables = [_table(columns, rows, width) for columns, rows in groups.items()]
    if tables:
        where = found["machine"]["gpu"] or "the CPU"
        tables[0].title = f"{record.benchmark} on {where}; limit: {limits or 'none'}"
    return tables


def _table(columns: Sequence[str], combined: Sequence[tuple[Row, Spread]], width: int) -> Table:
    rows, spreads = zip(*combined, strict=True)
    same = {
        c: rows[0][c]
        for c in columns[1:]
        if len(rows) > 1 and not any(c in spread for spread in spreads) and all(row[c] == rows[0][c] for row in rows)
    }
    facts = [f"{c.replace('_', ' ')} {_cell(c, value)}" for c, value in same.items() if value is not None]
    caption = f"all: {', '.join(facts)}" if facts else None
    shown = [column for column in columns if column not in same]
    cells = [[column.replace("_", " ") for column in shown]]
    cells += [[_cell(column, row[column], spread.get(column)) for column in shown] for row, spread in combined]
    table = _lines(cells, caption)
    is_too_wide = Console(width=10_000).measure(table).maximum > width
    return _lines(list(zip(*cells, strict=True)), caption) if is_too_wide else table


def _lines(cells: Sequence[Sequence[str]], caption: str | None) -> Table:
    """A table; its first line is the head."""
    table = Table(box=SIMPLE_HEAD, caption=caption)
    for index, name in enumerate(cells[0]):
        table.add_column(name, justify="right" if index else "left")
    for line in cells[1:]:
        table.add_row(*line)
    return table


def _cell(column: str, value: Any, spread: tuple[Any, Any] | None = None) -> str:
    if spread is not None:
        return f"{_cell(column, value)} ({' to '.join(_cell(column, end) for end in spread)})"
    if value is None:
        return ""
    if column.endswith("bytes") and isinstance(value, int):
        return format_bytes(value)
    if column.endswith("_s") and not column.endswith("per_s") and isinstance(value, float):
        return format_seconds(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
