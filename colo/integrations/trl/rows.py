"""Rows to train on, from files, folders or the hub, checked before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk
from transformers import AutoConfig, AutoTokenizer

from colo.engines.text import check_prompts, encode_prompts, positions_of
from colo.errors import Unsupported

PROMPT = "prompt"
"""The column that is sampled for: a text, or a conversation."""


def load_rows(
    name: str, split: str, *, config: str | None = None, streaming: bool = False, columns: Iterable[str] = ()
) -> Any:
    """Rows of a file (JSON lines, JSON, parquet, CSV), a folder or a dataset on the hub.

    Of the last two `config` and `split` are taken; `columns` renames, as in `prompt=question`, the new name first.
    Raises: `ValueError` for lines that are no rows, no rows at all, or a column that is not there; whatever `datasets`
    raises.
    """
    path = Path(name)
    if path.suffix in (".jsonl", ".json", ".parquet", ".csv") and not path.is_file():
        raise ValueError(f"there is no file {path}: give a file of JSON lines, parquet or CSV, or a dataset's name")
    if path.suffix == ".jsonl":
        rows: Any = _from_lines(path)
    elif path.is_file():
        kind = "csv" if path.suffix == ".csv" else "parquet" if path.suffix == ".parquet" else "json"
        rows = load_dataset(kind, data_files=str(path), split="train")
    elif Path(path, "dataset_info.json").is_file() or Path(path, "dataset_dict.json").is_file():
        saved = load_from_disk(name)
        rows = saved[split] if isinstance(saved, Mapping) else saved
    else:
        rows = load_dataset(name, config, split=split, streaming=streaming)
    if isinstance(rows, Dataset) and not len(rows):
        raise ValueError(f"dataset {name} is empty: there is nothing to train on")
    return _renamed(rows, name, columns)


def _from_lines(path: Path) -> Dataset:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}): write one object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {row!r:.80} is not an object: write one a line")
        rows.append(row)
    columns = dict.fromkeys(column for row in rows for column in row)
    try:
        return Dataset.from_dict({column: [row.get(column) for row in rows] for column in columns})
    except Exception as error:  # pyarrow's, of values of several types in one column
        raise ValueError(f"{path} has a column with values of several types ({error}): make them alike") from error


def _renamed(rows: Any, name: str, columns: Iterable[str]) -> Any:
    for pair in columns:
        new, equals, old = pair.partition("=")
        if not (equals and new and old):
            raise ValueError(f"dataset_columns {pair!r} renames nothing: write the new name, =, and the dataset's")
        there = list(rows.column_names or [])
        if there and old not in there:
            raise ValueError(f"dataset {name} has no column {old!r} to call {new!r}, but {', '.join(there)}")
        if new in there and new != old:
            rows = rows.remove_columns(new)
        rows = rows.rename_column(old, new) if new != old else rows
    there = list(rows.column_names or [])
    if there and PROMPT not in there:
        raise ValueError(
            f"dataset {name} has no column {PROMPT!r}, but {', '.join(there)}: say which is sampled for, a text or a "
            f"list of messages, as in --dataset_columns {PROMPT}={there[0]}"
        )
    return rows


def check_rows(rows: Any, name: str, model: str, *, revision: str = "main", trust_remote_code: bool = False) -> int:
    """Tokens of the longest prompt, 0 of a stream. Raises: `ValueError` for a row that cannot be sampled for."""
    if not isinstance(rows, Dataset):
        return 0
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(model, **options)
    config = AutoConfig.from_pretrained(model, **options)
    vocab_size, num_positions = config.get_text_config().vocab_size, positions_of(config).count
    longest = 0
    for number, prompt in enumerate(rows[PROMPT], start=1):
        try:
            if isinstance(prompt, Mapping):
                raise ValueError("prompt 0 is a single message: give a list of messages")
            (token_ids,) = encode_prompts([_messages(prompt)], tokenizer)
            check_prompts([token_ids], vocab_size, num_positions)
        except (TypeError, ValueError, Unsupported) as error:
            words = str(error).replace("prompt 0", "its prompt")
            raise ValueError(f"row {number} of {name}: {words}") from error
        longest = max(longest, len(token_ids))
    return longest


def _messages(prompt: Any) -> Any:
    """A prompt without the keys that arrow adds to messages which lack them."""
    if not isinstance(prompt, list):
        return prompt
    return [{k: v for k, v in m.items() if v is not None} if isinstance(m, Mapping) else m for m in prompt]
