"""`colo bench step`: whole steps of GRPO's shape, and what the two tenants take of the device.

0.6B: ours (one copy, trainer state parked for every rollout) against what people do today with two copies: both
tenants resident, vLLM's level 1, and vLLM's level 2, each pushing the weights tensor by tensor after every step.
8B: the memory of full fine-tuning with fp32 masters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from colo.assembly.launch import default_optimizer
from colo.bench.common import Result, Row, Tell, clear, clocked, synchronize
from colo.bench.offload import copy_limit
from colo.bench.workload import (
    Setup,
    Size,
    grpo_steps,
    peak_device_bytes,
    prepared,
    shut_down,
    train_step,
    worker_model,
)
from colo.config import Offload
from colo.memory.probe import used_device_bytes
from colo.phases.phase import ENGINE_WEIGHTS, TRAINER_GRADIENTS, TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Phase
from colo.runtime import Runtime
from colo.units import GIB

LARGE_KV_CACHE_BYTES = 80 * GIB
SLACK_BYTES = 2 * GIB
"""Allowance for fragments of torch's memory beside the plan."""

WARM_UP_STEPS = 1


def run(*, shape_name: str, device: str, tell: Tell = lambda text: None) -> Result:
    """Measure steps of one shape; see `prepared`."""
    with prepared("step", shape_name, device, tell) as setup:
        limit = copy_limit(setup.device)
        rows = [_memory(setup)] if shape_name == "8b" else _steps(setup)
        return setup.result(rows, limit=limit)


# ---- time ------------------------------------------------------------------------------------------------------------


def _steps(setup: Setup) -> list[Row]:
    setup.tell("ours")
    rt = setup.launched()
    rows = _ours(rt, setup.size)
    rt.close()
    del rt
    clear(setup.device)
    setup.tell("two copies of the weights")
    peers = TwoCopies(setup)
    for level in (0, 1, 2) if setup.device.type == "cuda" else (0,):
        setup.tell(f"two copies, {_LEVELS[level]}")
        rows.append(peers.measure(level))
    peers.close()
    return rows


def _ours(rt: Runtime, size: Size) -> list[Row]:
    """Steps with the trainer's state parked for every rollout. Time outside of rollout and train is switching."""
    rt.scheduler.offload = Offload.ALWAYS
    grpo_steps(WARM_UP_STEPS + 1, rt, size)  # the second is the first with state to park
    first_span = len(rt.trace.spans)
    with peak_device_bytes(rt.device) as peak:
        _, total_s = clocked(partial(grpo_steps, size.steps, rt, size))
    spent = {Phase.ROLLOUT: 0.0, Phase.TRAIN: 0.0}
    switching: dict[str, float] = {}
    for span in rt.trace.spans[first_span:]:
        if span.category == "phase" and span.phase in spent:
            spent[span.phase] += span.duration_s
        if span.category in ("switch", "transition", "step"):  # one within the other
            switching[span.name] = switching.get(span.name, 0.0) + span.duration_s / size.steps
    row = _row("colo, own process", size, total_s, spent[Phase.ROLLOUT], spent[Phase.TRAIN], peak[0] or None)
    mismatch = rt.trace.metrics["mismatch_sampled"]
    row |= {"synced_bytes": rt.bytes_synced, "mismatch_first": mismatch[0], "mismatch_last": mismatch[-1]}
    return [row, *({"way": f"of ours: {name}", "each_step_s": seconds} for name, seconds in switching.items())]


_LEVELS = {0: "both resident", 1: "vLLM's level 1", 2: "vLLM's level 2"}


class TwoCopies:
    """vLLM in this process and a trainer, each on weights of its own."""

    def __init__(self, setup: Setup) -> None:
        self._device, self._size = setup.device, setup.size
        self._llm = setup.stock(own_process=False)
        with torch.device(setup.device):
            self._model = AutoModelForCausalLM.from_config(setup.config, dtype=setup.config.dtype)
        self._optimizer = default_optimizer(self._model.parameters())

    def measure(self, level: int) -> Row:
        """Steps with vLLM asleep at `level` while training; 0 is never asleep."""
        for _ in range(WARM_UP_STEPS):
            self._step(level, {"rollout": 0.0, "train": 0.0})
        spent = {"rollout": 0.0, "train": 0.0}
        with peak_device_bytes(self._device) as peak:
            start_s = time.perf_counter()
            for _ in range(self._size.steps):
                self._step(level, spent)
            total_s = time.perf_counter() - start_s
        name = f"two copies, {_LEVELS[level]}"
        return _row(name, self._size, total_s, spent["rollout"], spent["train"], peak[0] or None)

    def close(self) -> None:
        """End vLLM."""
        shut_down(self._llm)
        del self._llm, self._model, self._optimizer
        clear(self._device)

    def _step(self, level: int, spent: dict[str, float]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=self._size.new_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0
        )
        prompts: Any = [{"prompt_token_ids": ids} for ids in self._size.token_ids]
        self._llm.reset_prefix_cache()
        outputs = self._timed("rollout", spent, lambda: self._llm.generate(prompts, params, use_tqdm=False))
        if level:
            self._llm.sleep(level=level)
        sequences = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        train = (self._model, self._optimizer, sequences, self._size, self._device)
        self._timed("train", spent, lambda: train_step(*train))
        if level:
            torch.cuda.empty_cache()  # else vLLM does not find the memory that it gave back
            self._llm.wake_up(tags=["weights"])
        self._push()
        if level:
            self._llm.wake_up(tags=["kv_cache"])
        synchronize(self._device)

    def _timed(self, name: str, spent: dict[str, float], function: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        value = function()
        synchronize(self._device)
        spent[name] += time.perf_counter() - start_s
        return value

    @torch.no_grad()
    def _push(self) -> None:
        """Push the weights one tensor at a time through vLLM's loader, as TRL does."""
        (model,) = self._llm.collective_rpc(worker_model)
        for name, parameter in self._model.named_parameters():
            model.load_weights([(name, parameter.detach())])


def _row(way: str, size: Size, total_s: float, rollout_s: float, train_s: float, peak_bytes: int | None) -> Row:
    lost_s = total_s - rollout_s - train_s
    return {
        "way": way,
        "step_s": total_s / size.steps,
        "rollout_s": rollout_s / size.steps,
        "train_s": train_s / size.steps,
        "switching_s": lost_s / size.steps,
        "of_step": lost_s / total_s,
        "peak_bytes": peak_bytes,
    }


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory(setup: Setup) -> Row:
    """Peak memory of two steps of full fine-tuning with fp32 masters, as the driver sees it."""
    setup.tell("full fine-tuning, two steps")
    if setup.device.type == "cuda":
        setup = setup.resized(kv_cache_bytes=LARGE_KV_CACHE_BYTES, prompts=32, new_tokens=64, train_sequences=8)
    device, size = setup.device, setup.size
    rt = setup.resized(enforce_eager=True).launched()
    rt.model.gradient_checkpointing_enable()  # type: ignore[operator]
    clear(device)
    held_bytes = sum(segment.device_bytes for segment in rt.scheduler.segments.values())
    outside_bytes = max(0, (used_device_bytes(device) or 0) - held_bytes)
    grpo_steps(2, rt, size)  # the first makes the optimizer's state, the second shows what training takes beside it
    _limit_torch(rt)
    with peak_device_bytes(device) as peak:
        grpo_steps(2, rt, size)
    segments = {name: segment.size_bytes for name, segment in rt.scheduler.segments.items()}
    phases = {phase: rt.trace.peak_bytes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
    working_bytes = rt.scheduler.working_bytes[Phase.TRAIN]
    larger_bytes = max(phases[Phase.ROLLOUT], phases[Phase.TRAIN] + working_bytes)
    both_bytes = sum(segments.values()) + segments[ENGINE_WEIGHTS] + working_bytes + outside_bytes
    row = {
        "way": "full fine-tuning, a whole cycle",
        "peak_bytes": peak[0] or None,
        "rollout_bytes": phases[Phase.ROLLOUT],
        "train_bytes": phases[Phase.TRAIN],
        "train_working_bytes": working_bytes,
        "residual_bytes": outside_bytes,
        "of_larger_and_residual": peak[0] / (larger_bytes + outside_bytes) if peak[0] else None,
        "both_resident_bytes": both_bytes,
        "under_both": 1 - peak[0] / both_bytes if peak[0] else None,
        "synced_bytes": rt.bytes_synced,
    }
    rt.close()
    return row


def _limit_torch(rt: Runtime) -> None:
    """Let torch cache no more than was planned, as it must on a device without memory to spare."""
    if rt.device.type != "cuda":
        return
    clear(rt.device)
    of_trainer = (TRAINER_OPTIMIZER, TRAINER_MASTER_WEIGHTS, TRAINER_GRADIENTS)
    planned_bytes = sum(rt.scheduler.segments[name].size_bytes for name in of_trainer)
    planned_bytes += rt.scheduler.working_bytes[Phase.TRAIN] + SLACK_BYTES
    total_bytes = torch.cuda.get_device_properties(rt.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, planned_bytes / total_bytes), rt.device)
