"""Hundreds of cycles, and Ctrl-C at any moment of one, with vLLM in a process of its own."""

import gc
import os
import random
import signal
import sys
import threading
import time
from typing import NamedTuple

import psutil
import pytest
import torch
from tiny_vllm import MARKS, PROMPTS, config, difference, launch, train_step

from colo.memory.probe import torch_pinned_bytes, used_device_bytes
from colo.units import MIB

pytestmark = MARKS

TIMES = 200
CLOSE = 0.02


@pytest.fixture(scope="module")
def rt():
    runtime = launch(config(), enforce_eager=True, worker_extension_cls="probe_worker.ProbeWorker")
    for group in runtime.optimizer.param_groups:
        group["lr"] = 1e-5  # hundreds of steps, after which log-probabilities are still compared
    yield runtime
    runtime.close()


def cycle(rt, step):
    """A rollout, whose log-probabilities are compared with the model's, and a step of training."""
    with rt.rollout():
        completions = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(rt.model, completions) < CLOSE
    train_step(rt, step)


class Held(NamedTuple):
    """Bytes of the device and, of this process and vLLM's, pinned ones and resident ones."""

    device: int
    arenas: int  # that colo has pinned
    caches: int  # that torch has: it makes a block when all of a size are in use at once, and keeps it
    resident: int


def held(rt):
    gc.collect()
    torch.cuda.empty_cache()
    processes = [psutil.Process(pid) for pid in (os.getpid(), *rt.engine.pids)]
    engines = sum(rt.engine.llm.collective_rpc("arena_bytes"))
    return Held(
        used_device_bytes(rt.device),
        rt._mover.arena.pinned_bytes + engines,
        torch_pinned_bytes() + rt.engine.pinned_bytes - engines,
        sum(process.memory_info().rss for process in processes),
    )


def assert_nothing_is_left(rt, before):
    after = held(rt)
    give_up_s = time.monotonic() + 30  # an engine of another test may still be ending
    while after.device > before.device and time.monotonic() < give_up_s:
        time.sleep(0.5)
        after = held(rt)
    assert after.device <= before.device and after.arenas == before.arenas
    assert after.caches - before.caches < TIMES, "not even a byte for each cycle"
    assert after.resident - before.resident < 32 * MIB


def test_hundreds_of_cycles_leave_nothing_behind(rt):
    for step in range(20):
        cycle(rt, step)
    before = held(rt)
    for step in range(TIMES):
        cycle(rt, step)
    assert_nothing_is_left(rt, before)


def test_ctrl_c_at_any_moment_leaves_a_runtime_that_goes_on(rt, monkeypatch):
    draw, swallowed, caught = random.Random(0), [], 0
    # one that falls into a destructor is nobody's; with it would be kept what its frames hold
    monkeypatch.setattr(sys, "unraisablehook", lambda one: swallowed.append(one.exc_type))
    began_s = time.monotonic()
    cycle(rt, 0)
    took_s = time.monotonic() - began_s
    before = held(rt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for step in range(TIMES):
            presses = threading.Timer(draw.uniform(0, took_s), os.kill, (os.getpid(), signal.SIGINT))
            try:
                presses.start()
                cycle(rt, step)
                presses.join()
                time.sleep(0.01)  # one that comes late
            except KeyboardInterrupt:
                caught += 1
            finally:
                presses.cancel()
                presses.join()
            rt.optimizer.zero_grad()
            cycle(rt, step)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert caught + len(swallowed) >= TIMES
    assert_nothing_is_left(rt, before)
