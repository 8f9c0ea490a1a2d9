"""The cost of an offload to other work: generation beside it, and the time a whole loop waits for it.

Part of `colo bench offload`. The model has random weights in the shape of Qwen3-0.6B, on a CPU a tiny one; the embedded
engine generates.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from colo.assembly.launch import launch
from colo.bench.common import Row, clear, segment_of, shape, timed
from colo.config import Offload, RuntimeConfig
from colo.engine import SamplingParams
from colo.phases.phase import TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Residency
from colo.runtime import Runtime
from colo.trainer.master_weights import MasterWeights
from colo.units import GIB, MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapSize:
    """Sizes of a measurement."""

    kv_cache_bytes: int
    offload_bytes: int
    sequences: int
    new_tokens: int
    train_batch: int
    train_length: int
    micro_batches: int


SIZES = {
    "cuda": OverlapSize(
        kv_cache_bytes=8 * GIB,
        offload_bytes=32 * GIB,
        sequences=64,
        new_tokens=16,
        train_batch=8,
        train_length=1024,
        micro_batches=4,
    ),
    "cpu": OverlapSize(
        kv_cache_bytes=MIB,
        offload_bytes=16 * MIB,
        sequences=4,
        new_tokens=4,
        train_batch=2,
        train_length=16,
        micro_batches=2,
    ),
}
_ROUNDS, _STEPS = 4, 5  # of `exposed_time`


def beside_an_offload(device: torch.device, *, repeats: int = 5) -> Row:
    """Seconds of the same generation alone, and while a large offload runs from its first token to its last."""
    size = SIZES[device.type]
    rt = _runtime(device, size)
    params = SamplingParams(n=1, max_tokens=size.new_tokens, temperature=0, ignore_eos=True)
    prompts = [[i + 1, i + 2, i + 3] for i in range(size.sequences)]
    mover = rt.engine.mover
    segment = segment_of(size.offload_bytes, mover)
    mover.arena.reserve(size.offload_bytes)
    alone, beside, left = [], [], []
    with rt.rollout():
        for _ in range(repeats + 1):
            alone.append(timed(lambda: rt.generate(prompts, params), device))
            start_s = time.perf_counter()
            departure = segment.begin(Residency.OFFLOADED)
            rt.generate(prompts, params)
            beside.append(time.perf_counter() - start_s)
            departure.wait()
            left.append(time.perf_counter() - start_s)
            segment.begin(Residency.RESIDENT).wait()
    segment.close()
    rt.close()
    clear(device)
    alone_s, beside_s = statistics.median(alone[1:]), statistics.median(beside[1:])
    return {
        "way": "generation beside an offload",
        "bytes": size.offload_bytes,
        "alone_s": alone_s,
        "beside_s": beside_s,
        "offload_s": statistics.median(left[1:]),
        "times_slower": beside_s / alone_s,
    }


def exposed_time(device: torch.device) -> Row:
    """Time that a loop of rollout and train waits for moving trainer state, as a share of the raw copies' time.

    Blocks of steps with all state resident and with all of it parked for every rollout take turns, so that both
    see the same machine; the difference of the two median steps is what is exposed. Left out are the first round, in
    which host memory is pinned, and the first step of a block, which still finds the other block's residencies. A step
    ends when its own stream has: waiting for the whole device would wait for copies that the next rollout hides. The
    raw time is what the copies take by themselves.
    """
    size = SIZES[device.type]
    rt = _runtime(device, size)
    ids = torch.randint(1, shape("0.6b", device).vocab_size, (size.train_batch, size.train_length), device=device)
    seconds: dict[Offload, list[float]] = {Offload.NEVER: [], Offload.ALWAYS: []}
    for i in range(_ROUNDS):
        for offload, taken in seconds.items():
            rt.scheduler.offload = offload
            block = [_timed_step(rt, size, ids) for _ in range(_STEPS)]
            taken += block[1:] if i else []
    resident_s, parked_s = (statistics.median(taken) for taken in seconds.values())
    state_bytes = sum(rt.scheduler.segments[n].size_bytes for n in (TRAINER_OPTIMIZER, TRAINER_MASTER_WEIGHTS))
    copies = [span for span in rt.trace.spans if span.category == "copy"]
    raw_s = 2 * state_bytes * sum(span.duration_s for span in copies) / sum(span.num_bytes for span in copies)
    rt.close()
    clear(device)
    return {
        "way": "exposed time of a step",
        "bytes": 2 * state_bytes,
        "step_resident_s": resident_s,
        "step_parked_s": parked_s,
        "raw_copies_s": raw_s,
        "exposed_s": parked_s - resident_s,
        "exposed_of_raw": (parked_s - resident_s) / raw_s,
    }


def _timed_step(rt: Runtime, size: OverlapSize, ids_BT: torch.Tensor) -> float:
    """Seconds of one step, on the clock of the stream that computes it."""
    start_s = time.perf_counter()
    _step(rt, size, ids_BT)
    if ids_BT.is_cuda:
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start_s


def _step(rt: Runtime, size: OverlapSize, ids_BT: torch.Tensor) -> None:
    """Generate, then as many backward passes as a step has, then one optimizer step."""
    params = SamplingParams(n=1, max_tokens=size.new_tokens, temperature=0, ignore_eos=True)
    with rt.rollout():
        rt.generate([[i + 1, i + 2, i + 3] for i in range(size.sequences)], params)
    with rt.train():
        for _ in range(size.micro_batches):
            rt.model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def _runtime(device: torch.device, size: OverlapSize) -> Runtime:
    fused = device.type == "cuda"
    return launch(
        shape("0.6b", device),
        optimizer=MasterWeights(lambda params: torch.optim.AdamW(params, lr=1e-5, fused=fused)),
        device=device,
        dtype=torch.bfloat16,
        config=RuntimeConfig(kv_cache_bytes=size.kv_cache_bytes, offload=Offload.NEVER),
    )
