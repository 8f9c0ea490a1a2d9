"""Which copies a step waits for, and who is asked for its peak."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import tenants, workload
from benchmarks.tenants import Side, exposed_s, of_short_step
from colo.phases.trace import Trace


def trace(*copies, others=()):
    made = Trace()
    for category, spans in (("copy", copies), ("step", others)):
        for start_s, end_s in spans:
            made.add("back trainer.optimizer", start_s, end_s=end_s, category=category)
    return made


@pytest.mark.parametrize(
    ("copies", "hidden", "seconds"),
    [
        ([], [(0, 9)], 0),
        ([(2, 4)], [], 2),
        ([(2, 4)], [(1, 5)], 0),
        ([(2, 4), (3, 6)], [], 4),  # side by side
        ([(2, 6)], [(0, 3), (5, 9)], 2),
        ([(-5, 1), (8, 20)], [], 3),  # what lies outside of the step
        ([(-5, 1), (8, 20)], [(-5, 0.5), (9, 20)], 1.5),
    ],
)
def test_what_neither_sampling_nor_gradients_hide(copies, hidden, seconds):
    assert exposed_s(trace(*copies, others=[(0, 10)]), (0, 10), hidden) == pytest.approx(seconds)


def test_the_thread_that_watches_for_a_peak_asks_the_driver_alone(monkeypatch):
    """Asking torch's allocator there ends in a deadlock with vLLM's sleep pool."""
    asked, looks, seen = [], iter(range(1, 1000)), threading.Event()

    def used_device_bytes(device):
        look = next(looks)
        if look == 10:
            seen.set()
        return look

    for name in ("memory_stats", "memory_reserved", "memory_allocated", "memory_snapshot"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: asked.append(name) or 0)
    monkeypatch.setattr(workload, "used_device_bytes", used_device_bytes)
    with workload.peak_device_bytes(torch.device("cuda")) as peak:
        assert seen.wait(60)
    assert peak[0] >= 10
    assert not asked


def test_a_short_step_trains_two_micro_batches_as_long_as_those_of_a_whole_one():
    size = replace(workload.SIZES["cpu"], prompt_tokens=3, new_tokens=7, train_sequences=2)
    sampled = [(1, 2, 3, number) for number in range(9)]
    assert of_short_step(sampled, size) == [[1, 2, 3, n, 1, 2, 3, n, 1, 2] for n in range(4)]


class Hangs:
    def step(self):
        time.sleep(600)

    def close(self):
        raise AssertionError("it would wait behind the step")


class Ended(BaseException):
    pass


def test_a_side_that_hangs_holds_up_no_limit_of_time():
    start_s = time.monotonic()
    with pytest.raises(Ended), Side(Hangs) as side:
        side._process.submit(tenants._call, "step", ())
        raise Ended
    assert time.monotonic() - start_s < 300
