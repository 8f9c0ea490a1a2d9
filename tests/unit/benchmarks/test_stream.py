"""Rows of torchao's optimizer in `stream`, where it is installed and where it is not."""

import pytest
import torch

from benchmarks import stream
from benchmarks.common import Record


@pytest.fixture
def rows(monkeypatch):
    """Rows of a run on a GPU that is not there: no step and no training is measured."""
    monkeypatch.setattr(stream, "_steps", lambda *_: {"way": "step"})
    monkeypatch.setattr(stream, "_training", lambda way, _, device, *, sequences: {"way": way, "sequences": sequences})
    record = Record("stream", "command")

    def of(spec):
        monkeypatch.setattr(stream, "find_spec", lambda name: spec)
        stream.run(record, shape="8b", device="cuda", ranges=(64,))
        return record.rows[1:]

    return of


def test_torchao_trains_as_many_sequences_as_colo(rows):
    ours, released, theirs, offloaded = rows(object())
    assert [row["sequences"] for row in (ours, released, theirs, offloaded)] == [8, 1, 8, 1]
    assert theirs["way"] + ", gradients offloaded" == offloaded["way"]
    assert theirs["cpu_threads"] == offloaded["cpu_threads"] == torch.get_num_threads()
    assert "cpu_threads" not in ours


def test_a_torchao_that_is_not_installed_is_named_in_rows_of_its_own(rows):
    _, _, *skipped = rows(None)
    assert [row["skipped"] for row in skipped] == ["pip install torchao"] * 2
