"""Rows of `publish` that are there when a link fails."""

from contextlib import contextmanager

import pytest

from benchmarks import publish
from benchmarks.common import Record


def test_a_link_that_fails_costs_no_row_of_another(monkeypatch):
    @contextmanager
    def server(folder, device, **_):
        yield "http://127.0.0.1:1"

    def fails():
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(publish, "_server", server)
    monkeypatch.setattr(
        publish, "_row", lambda way, *_: {"way": way, "bytes": 8, "median_s": 2.0, "link_s": 1.0, "of_link": 2.0}
    )
    monkeypatch.setattr(publish, "_links", lambda *_: {"files": lambda: 4e9, "process group": fails})
    record = Record("publish", "command")
    with pytest.raises(RuntimeError, match="NCCL"):
        publish.run(record, shape="0.6b", layers=None, density=0.01, device="cpu")
    assert [row["way"] for row in record.rows] == ["mapped memory", "files", "files, changes alone"]
    assert record.limit["files_gb_per_s"] == 4 and "process_group_gb_per_s" not in record.limit
