"""Peaks of ways that take turns on one device."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import step
from benchmarks.common import Record, silent
from benchmarks.tenants import PARTS, Stopwatch

OUTSIDE_BYTES, RESTING_BYTES = 1000, 10
PEAKS = {"large": 500, "small": 70, "other": 200}


class Device:
    """A device's bytes: what each side holds, and what torch has kept of its last way."""

    def __init__(self):
        self.sides, self.calls = [], []

    def used_bytes(self, device=None):
        return OUTSIDE_BYTES + sum(side.held_bytes for side in self.sides)

    def side(self, make, setup, own_process):
        self.sides.append(Side(self))
        return self.sides[-1]


class Side:
    """A side whose first step after another way begins with the memory that torch has kept of that."""

    def __init__(self, device):
        self.device, self.held_bytes, self.way = device, RESTING_BYTES, None

    def call(self, method, way=None):
        self.device.calls.append((method, way))
        if method == "rest":
            self.held_bytes, self.way = RESTING_BYTES, None
            return None
        peak_bytes = self.device.used_bytes() - self.held_bytes + max(PEAKS[way], self.held_bytes)
        self.held_bytes, self.way = PEAKS[way], way
        watch = Stopwatch(torch.device("cpu"), dict.fromkeys(PARTS, 0.25), total_s=1.0)
        return {"step": watch, "watched_step": (watch, peak_bytes), "prepare": None}[method]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def device(monkeypatch):
    made = Device()
    kinds = [step.Kind("a", None, "own-process", ("large", "small")), step.Kind("b", None, "own-process", ("other",))]
    monkeypatch.setattr(step, "_kinds", lambda *_: kinds)
    monkeypatch.setattr(step, "Side", made.side)
    monkeypatch.setattr(step, "replace", lambda setup, **_: setup)
    monkeypatch.setattr(step, "used_device_bytes", made.used_bytes)
    return made


def test_a_peak_has_nothing_of_the_way_before_nor_of_others(device):
    record = Record("step", "command")
    setup = SimpleNamespace(device=torch.device("cuda"), size=SimpleNamespace(steps=3), tell=silent)
    step._steps(record, setup, "own-process")
    found = {row["way"]: row["peak_bytes"] for row in record.rows if "peak_bytes" in row}
    ways = ("a, own-process, large", "a, own-process, small", "b, own-process, other")
    assert found == dict(zip(ways, PEAKS.values(), strict=True))


def test_each_way_takes_a_short_step_before_each_that_is_measured(device):
    setup = SimpleNamespace(device=torch.device("cuda"), size=SimpleNamespace(steps=2), tell=silent)
    step._steps(Record("step", "command"), setup, "own-process")
    started = [("prepare", "large"), ("rest", None), ("prepare", "other"), ("rest", None)]

    def turn(measured):
        of = [[("prepare", way), (measured, way)] for way in ("large", "small", "other")]
        return [*of[0], *of[1], ("rest", None), *of[2], ("rest", None)]

    assert device.calls == [*started, *turn("watched_step"), *turn("step")]
