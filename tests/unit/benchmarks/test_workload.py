"""Shapes that a device has no room for."""

import pytest

from benchmarks import common, share, step, sync, workload
from benchmarks.common import Record
from colo.errors import Unsupported


@pytest.mark.parametrize(("benchmark", "shape"), [(sync, "30b-a3b"), (share, "30b-a3b"), (step, "8b")])
def test_a_shape_without_room_is_refused_before_anything_starts(monkeypatch, benchmark, shape):
    monkeypatch.setattr(common, "free_device_bytes", lambda device: 1 << 10)
    for starts in ("launched", "engine", "stock"):
        monkeypatch.setattr(workload.Setup, starts, None)
    words = "needs more than .*iB free on cpu, where 1.00 KiB are: take a smaller --shape, or a GPU"
    with pytest.raises(Unsupported, match=words):
        benchmark.run(Record("benchmark", "command"), shape=shape, device="cpu")
