"""`sleep`: how fast vLLM gives memory back and takes it again, driven by colo and by itself.

8B with random weights: level 1 (weights to the host), level 2 (weights dropped) and keep-weights (KV cache dropped), in
a process of its own; keep-weights in one process beside what the driver alone takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import Record, Row, clear, clocked, gigabytes_per_s, timed
from benchmarks.offload import copy_limit
from benchmarks.workload import Setup, prepared, shut_down, wait_for_pinning, worker_of
from colo.engine import SleepLevel
from colo.engines.vllm import compat
from colo.engines.vllm.client.engine import VLLMEngine
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS

ROUNDS = 5
REST_S = 0.5
"""Pause between sleep and wake, as training would make: the driver clears the pages it was given back."""


def run(record: Record, *, device: str) -> None:
    """Measure sleep and wake. On a CPU only the KV cache leaves, and vLLM itself does not sleep."""
    with prepared(record, "8b", device, copies=False) as prepared_setup:
        setup = prepared_setup.resized(enforce_eager=True)
        if device == "cuda":
            record.limit |= copy_limit(setup.device)
            record.tell("vLLM's own levels")
            peer = _peer(setup)
            record.tell("levels 1 and 2, keep-weights, in its own process")
            for row in _levels(setup, peer, record.limit):
                record.add(row)
        record.tell("keep-weights in this process")
        record.add(_keep_weights_here(setup))


def _peer(setup: Setup) -> Mapping[str, list[float]]:
    llm = setup.stock()
    times: dict[str, list[float]] = {name: [] for name in ("sleep 1", "wake 1", "sleep 2", "wake 2")}
    for level, rounds in ((1, 4), (2, 3)):
        for _ in range(rounds):
            times[f"sleep {level}"].append(clocked(partial(llm.sleep, level=level))[1])
            time.sleep(REST_S)
            times[f"wake {level}"].append(clocked(partial(llm.wake_up, tags=["weights"]))[1])
            llm.wake_up(tags=["kv_cache"])
    shut_down(llm)
    return times


def _levels(setup: Setup, peer: Mapping[str, list[float]], limit: Mapping[str, float]) -> Iterator[Row]:
    driven = setup.engine(share_memory=False)
    wait_for_pinning(driven.pids)  # as during a first rollout, before the first sleep
    weights_bytes = next(s.size_bytes for s in driven.segments if s.name == ENGINE_WEIGHTS)
    for level in (1, 2):
        sleeps, wakes = _rounds(driven, level, lambda: driven.wake(["weights"]))
        row: Row = {
            "way": f"level {level}, own process",
            "bytes": weights_bytes,
            "sleep_s": _typical(sleeps),
            "wake_s": _typical(wakes),
            "vllm_sleep_s": _typical(peer[f"sleep {level}"]),
            "vllm_wake_s": _typical(peer[f"wake {level}"]),
            "first_sleep_s": sleeps[0],
            "vllm_first_sleep_s": peer[f"sleep {level}"][0],
        }
        if level == 1:
            row |= {
                "sleep_of_limit": gigabytes_per_s(weights_bytes, row["sleep_s"]) / limit["out_gb_per_s"],
                "wake_of_limit": gigabytes_per_s(weights_bytes, row["wake_s"]) / limit["back_gb_per_s"],
                "first_times_faster": peer["sleep 1"][0] / sleeps[0],
            }
        yield row
    sleeps, wakes = _rounds(driven, SleepLevel.KEEP_WEIGHTS, driven.wake)
    yield _keep_weights_row("own process", driven, sleeps, wakes)
    driven.close()
    clear(setup.device)


def _rounds(driven: VLLMEngine, level: SleepLevel | int, wake: Callable[[], None]) -> tuple[list[float], list[float]]:
    sleeps, wakes = [], []
    for _ in range(ROUNDS):
        sleeps.append(clocked(lambda: driven.sleep(level))[1])
        time.sleep(REST_S)
        wakes.append(clocked(wake)[1])
        driven.wake()
        driven.resume()
    return sleeps, wakes


def _keep_weights_here(setup: Setup) -> Row:
    """Measure colo and the bare driver in turns, so that both find the same state."""
    device = setup.device
    driven = setup.engine(own_process=False)
    sleeps, wakes, unmaps, maps = [], [], [], []
    for _ in range(ROUNDS + 1):
        sleeps.append(timed(lambda: driven.sleep(SleepLevel.KEEP_WEIGHTS), device))
        time.sleep(REST_S)
        wakes.append(timed(driven.wake, device))
        if device.type == "cuda":
            ((unmap_s, map_s),) = driven.llm.collective_rpc(_unmap_and_map)
            unmaps.append(unmap_s)
            maps.append(map_s)
        driven.resume()
    row = _keep_weights_row("in process", driven, sleeps, wakes)
    if maps:
        row |= {"driver_unmap_s": _typical(unmaps), "driver_map_s": _typical(maps)}
        row["wake_of_driver"] = row["wake_s"] / row["driver_map_s"]
    driven.close()
    clear(device)
    return row


def _keep_weights_row(where: str, driven: VLLMEngine, sleeps: Sequence[float], wakes: Sequence[float]) -> Row:
    return {
        "way": f"keep-weights, {where}",
        "bytes": next(s.size_bytes for s in driven.segments if s.name == ENGINE_KV_CACHE),
        "sleep_s": _typical(sleeps),
        "wake_s": _typical(wakes),
    }


def _unmap_and_map(worker: Any) -> tuple[float, float]:
    """Seconds that the driver alone takes to unmap the KV cache's pages, and to map new ones."""
    pool = compat.sleep_pool(worker_of(worker))
    assert pool is not None
    records = [record for record in pool.pointer_to_data.values() if record.tag == "kv_cache"]
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for record in records:
        compat.unmap(record)
    unmapped_s = time.perf_counter() - start_s
    time.sleep(REST_S)
    start_s = time.perf_counter()
    for record in records:
        compat.remap(record)
    torch.cuda.synchronize()
    return unmapped_s, time.perf_counter() - start_s


def _typical(times: Sequence[float]) -> float:
    """The median of all but the first, which sets things up."""
    return statistics.median(times[1:])
