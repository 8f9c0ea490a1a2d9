"""`share`: weights that trainer and engine have in common, or that reach the engine by recorded copies.

0.6B: publication, growth, and a killed engine, whose restart stands beside starts of stock vLLM. 30B-A3B: recorded
copies beside `load_weights`, whole and a tensor at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.common import Record, Row, clear, clocked, median_s
from benchmarks.workload import (
    Setup,
    Size,
    device_copy_bytes_per_s,
    growth,
    grpo_steps,
    held_bytes,
    prepared,
    require_room,
    shut_down,
    wait_for_pinning,
    worker_model,
)
from colo.runtime import Runtime
from colo.weights.mismatch import logprob_difference
from colo.weights.sources.names import checkpoint_views


def run(record: Record, *, shape: str, device: str) -> None:
    """Measure one shape; see `prepared`."""
    measure = _experts if shape == "30b-a3b" else _one_copy
    with prepared(record, shape, device) as setup:
        for row in measure(setup):
            record.add(row)


# ---- 0.6B ------------------------------------------------------------------------------------------------------------


def _one_copy(setup: Setup) -> Iterator[Row]:
    stock_starts_s: list[float] = []
    # the engine that is started again has compiled before, too
    for compiled in ("compiling", "compiled before") if setup.device.type == "cuda" else ("once",):
        setup.tell(f"stock vLLM, {compiled}")
        llm, spent_s = clocked(setup.stock)
        stock_starts_s.append(spent_s)
        shut_down(llm)
        del llm
        clear(setup.device)
    setup.tell("engine in its own process")
    rt, started_s = clocked(setup.launched)
    yield _publication(rt, "own process")
    wait_for_pinning([psutil.Process().pid])
    setup.tell(f"{setup.size.cycles} cycles")
    yield _growth(rt, setup.size)
    setup.tell("kill and restart")
    yield _restart(rt, setup.size, stock_starts_s, started_s)
    rt.close()
    del rt
    clear(setup.device)
    setup.tell("engine in this process")
    rt = setup.resized(enforce_eager=True).launched(own_process=False)
    yield _publication(rt, "in process")
    rt.close()


def _publication(rt: Runtime, where: str) -> Row:
    """Pause, prefix reset, checks, commit and resume of changed weights, and a check of unchanged ones."""
    times = []
    for _ in range(20):
        rt.versions.publisher.version += 1
        start_s = time.perf_counter()
        rt.versions.publish()
        rt.engine.resume()
        times.append(time.perf_counter() - start_s)
    return {
        "way": f"publication, {where}",
        "bytes": rt.publications[-1].num_bytes,
        "median_s": statistics.median(times),
        "slowest_s": max(times),
        "unchanged_check_s": statistics.median(clocked(rt.transport.verify)[1] for _ in range(20)),
    }


def _growth(rt: Runtime, size: Size) -> Row:
    """Bytes that cycles of rollout, train and step leave behind, in both processes, after as many to warm up.

    The trace, which grows until it reaches a bound, is emptied.
    """
    driven: Any = rt.engine

    def cycles() -> None:
        grpo_steps(size.cycles, rt, replace(size, new_tokens=2), prompts=size.train_sequences)
        rt.trace.spans.clear()
        rt.trace.samples.clear()

    def held() -> tuple[int, int, int]:
        device_bytes, host_bytes, pinned_bytes = held_bytes(rt.device, driven)
        return device_bytes, host_bytes, pinned_bytes + driven.mover.arena.pinned_bytes

    row, total_s = growth(cycles, held)
    return {"way": f"growth over {size.cycles} cycles", **row, "cycle_s": total_s / size.cycles}


def _restart(rt: Runtime, size: Size, stock_starts_s: list[float], started_s: float) -> Row:
    """The engine's process killed, and started again on the same memory.

    `gap` is the mean |log p(engine) - log p(trainer)| of greedy tokens, before the kill and after the restart.
    """
    driven: Any = rt.engine
    gap_before = _gap(rt, size)
    before = [p.detach().clone() for p in rt.model.parameters()]
    for pid in driven.pids:
        psutil.Process(pid).kill()
    start_s = time.perf_counter()
    while driven.state != "lost":
        try:
            rt.generate([[1, 2, 3]], max_tokens=1)
        except Exception:  # noqa: BLE001 - the loss is what is waited for
            time.sleep(0.01)
    noticed_s = time.perf_counter() - start_s
    _, recovered_s = clocked(rt.recover)
    return {
        "way": "restart after a kill",
        "noticed_s": noticed_s,
        "recovered_s": recovered_s,
        "mapping_s": driven.link.infos[0].placing_s,
        "first_start_s": started_s,
        "stock_first_start_s": stock_starts_s[0],
        "stock_start_s": stock_starts_s[-1],
        "weights_equal": all(torch.equal(a, b) for a, b in zip(before, rt.model.parameters(), strict=True)),
        "gap_before": gap_before,
        "gap_after": _gap(rt, size),
    }


def _gap(rt: Runtime, size: Size) -> float | None:
    completions = rt.generate(size.token_ids[: size.train_sequences], max_tokens=32, temperature=0)
    return logprob_difference(rt.model, completions, temperature=1.0, device=rt.device)


# ---- 30B-A3B ---------------------------------------------------------------------------------------------------------


def _experts(setup: Setup) -> Iterator[Row]:
    """Weights of a mixture of experts into an engine in this process: recorded copies against `load_weights`."""
    config, device = setup.config, setup.device
    require_room(setup, weights=2)  # a copy on either side
    setup.tell("starting the engine")
    driven = setup.small().engine(own_process=False)
    source = _random_weights(config, device)
    setup.tell("recorded copies against load_weights")
    plan, recorded_s = clocked(lambda: driven.record_plan(source))
    num_bytes = sum(t.nbytes for t in source.values())
    if plan.fallbacks:
        yield {"way": "replay", "bytes": num_bytes, "fallback": next(iter(plan.fallbacks.values()))}
        driven.close()
        return
    (model,) = driven.llm.collective_rpc(worker_model)
    views = list(checkpoint_views(source, config.model_type))

    @torch.no_grad()
    def load() -> None:
        model.load_weights(views)

    @torch.no_grad()
    def load_one_by_one() -> None:
        for view in views:
            model.load_weights([view])

    load_s = median_s(load, device, repeats=3)
    one_by_one_s = median_s(load_one_by_one, device, repeats=2)
    for copy in plan.copies:
        copy.target.zero_()
    replay_s = median_s(lambda: plan.replay(source), device)
    different = plan.differences(source)
    limit_s = num_bytes / device_copy_bytes_per_s(device)
    yield {
        "way": "replay, in process",
        "bytes": num_bytes,
        "tensors": len(views),
        "copies": len(plan.copies),
        "recorded_s": recorded_s,
        "replay_s": replay_s,
        "load_weights_s": load_s,
        "one_by_one_s": one_by_one_s,
        "times_faster": load_s / replay_s,
        "copy_limit_s": limit_s,
        "of_limit": replay_s / limit_s,
        "different_tensors": len(different),
    }
    driven.close()


def _random_weights(config: PretrainedConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """A model's parameters in Hugging Face names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    empty = {n: torch.empty(p.shape, dtype=config.dtype, device=device) for n, p in model.named_parameters()}
    return {name: tensor.uniform_(-0.05, 0.05) for name, tensor in empty.items()}
