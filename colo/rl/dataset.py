"""Rows to train on, from a file of JSON lines or through Hugging Face's `datasets`. A row has a prompt and columns."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from colo.rl.problems import Problem

PROMPT = "prompt"
"""The column that is sampled for: a text, or a conversation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Rows, and what to call them in errors."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    """Every column but the prompt."""

    def problem(self, index: int) -> Problem:
        """The problem of a row; columns that it lacks are `None`."""
        row = self.rows[index]
        return Problem(prompt=row[PROMPT], columns={column: row.get(column) for column in self.columns})


def load_rows(name: str, *, config: str | None = None, split: str = "train") -> Dataset:
    """Rows of a file of JSON lines, or else of a folder or dataset on the hub, of which `config` and `split` are taken.

    Raises: `ValueError` for lines that are no rows, a dataset without rows or prompts, or without `datasets` where that
    is needed; whatever `datasets` raises.
    """
    path = Path(name)
    if path.is_file() or path.suffix in (".jsonl", ".json"):
        rows: Any = list(_lines(path))
        columns = list(dict.fromkeys(column for row in rows for column in row))
    else:
        rows = _from_hub(name, config, split)
        columns = list(rows.column_names)
    if not len(rows):
        raise ValueError(f"dataset {name} is empty: there is nothing to train on")
    if PROMPT not in columns:
        raise ValueError(
            f"dataset {name} has no column {PROMPT!r}, but {', '.join(columns)}: rename the one that is to be sampled "
            "for, a text or a list of messages"
        )
    return Dataset(name=name, rows=rows, columns=tuple(column for column in columns if column != PROMPT))


def shuffled(num_rows: int, per_step: int, num_steps: int, seed: int) -> list[list[int]]:
    """The rows of each step: every row once before any comes again, in another order each time."""
    generator = random.Random(seed)
    deck: list[int] = []
    steps = []
    for _ in range(num_steps):
        while len(deck) < per_step:
            deck += generator.sample(range(num_rows), num_rows)
        steps.append(deck[:per_step])
        deck = deck[per_step:]
    return steps


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a file of JSON lines, or the name of a dataset")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}): write one object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {row!r:.80} is not an object: write one a line")
        if PROMPT not in row:
            has = ", ".join(row) or "nothing"
            raise ValueError(f"{path}, line {number}: there is no {PROMPT!r}, but {has}: rename the column, or add it")
        yield row


def _from_hub(name: str, config: str | None, split: str) -> Any:
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"{name} is not a file, and reading datasets of Hugging Face needs datasets: pip install 'colo-rl[trl]', "
            "or give a file of JSON lines"
        ) from error
    return datasets.load_dataset(name, config, split=split)
