"""Ranks of `sharded`: too few GPUs, and a rank that fails."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import sharded
from benchmarks.common import Record


def test_more_ranks_than_gpus_are_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="each of --ranks 4 needs a GPU of its own, and torch sees 2"):
        sharded.run(Record("sharded", "command"), shape="0.6b", device="cuda", ranks=4)


def measure(rank, folder):
    """Write a row, and fail in rank 1, as the others wait for it; rank 0 has begun another row."""
    row = json.dumps({"way": "slices", "median_s": 1.0 + rank, "received_bytes": 8})
    Path(folder, f"rows-{rank}").write_text(f"{row}\n" + '{"way": "wh' * (rank == 0))
    while not all(Path(folder, f"rows-{other}").exists() for other in range(2)):
        time.sleep(0.01)
    if rank == 1:
        raise RuntimeError("out of memory")
    time.sleep(300)


def test_a_rank_that_fails_ends_the_others_at_once_and_rows_that_all_have_found_stay(tmp_path):
    record, start_s = Record("sharded", "command"), time.monotonic()
    record.add({"way": "of the trainer before"})
    with pytest.raises(RuntimeError, match="out of memory"):
        sharded._run_ranks(record, partial(measure, folder=str(tmp_path)), 2, str(tmp_path))
    assert time.monotonic() - start_s < 120
    first, second = record.rows
    assert first == {"way": "of the trainer before"}
    assert second == {"way": "slices", "median_s": 2.0, "received_bytes": 8, "to_all_ranks_bytes": 16}
