"""`offload`: how fast state leaves the device and comes back, ours beside what people use today.

Every way moves the same number of bytes in the same run. The limit is a copy between the device and pinned memory that
exists already, which is what the bus gives. Then what an offload costs other work: generation beside it, and the time
that a whole loop waits for it, with the embedded engine and random weights in the shape of Qwen3-0.6B.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from benchmarks.common import Record, Row, clear, gigabytes_per_s, median_s, require_free, segment_of, shape, timed
from colo.assembly.launch import launch
from colo.config import Offload, RuntimeConfig
from colo.engine import SamplingParams
from colo.memory.offload import Mover
from colo.memory.probe import free_device_bytes
from colo.memory.region import memory_saver
from colo.phases.phase import TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Residency
from colo.runtime import Runtime
from colo.trainer.master_weights import MasterWeights
from colo.units import GIB, MIB

_CYCLES, _GROWTH_CYCLES = 5, 100


def run(record: Record, *, device: str, size: int | None = None) -> None:
    """Measure every way of moving `size` bytes out and back; see the module's docstring.

    Raises: `Unsupported` when the device has not twice that many bytes free.
    """
    target = torch.device(device)
    size_bytes = size or (8 * GIB if target.type == "cuda" else 64 * MIB)
    require_free(2 * size_bytes, target, "pass a smaller --size")
    record.tell("the limit: pinned copies")
    record.limit |= copy_limit(target, size_bytes)
    record.tell("colo")
    record.add(*_ours(target, size_bytes, _CYCLES, record.limit))
    for way, measure in _peers(target).items():
        record.tell(way)
        record.add(_row(way, size_bytes, record.limit, *measure(target, size_bytes)))
    if target.type == "cuda":
        record.rows[1] |= _against(record.rows[1], record.rows[-1])
    record.tell(f"growth over {_GROWTH_CYCLES} cycles")
    record.add(_growth(target, min(size_bytes, GIB), _GROWTH_CYCLES))
    record.tell("generation beside an offload")
    record.add(_beside_an_offload(target))
    record.tell("the exposed time of a step")
    record.add(_exposed_time(target))


def _peers(device: torch.device) -> dict[str, Callable[[torch.device, int], tuple[float, float]]]:
    ways: dict[str, Callable[[torch.device, int], tuple[float, float]]]
    ways = {"tensor.cpu(), then .to(device)": _plain, "fresh pinned copy each time": _fresh_pinned}
    return ways | ({"torch-memory-saver, own backup": _saver_backup} if device.type == "cuda" else {})


def _against(ours: Row, saver: Row) -> Row:
    """Speed relative to torch-memory-saver's own backup."""
    return {
        "times_saver_out": saver["out_s"] / ours["out_s"],
        "times_saver_back": saver["back_s"] / ours["back_s"],
        "times_saver_round_trip": (saver["out_s"] + saver["back_s"]) / (ours["out_s"] + ours["back_s"]),
    }


def copy_limit(device: torch.device, size_bytes: int = GIB) -> dict[str, float]:
    """Bandwidth of copies between the device and pinned host memory, each way."""
    out_s, back_s = _pinned_copies(device, size_bytes)
    clear(device)
    return {"out_gb_per_s": gigabytes_per_s(size_bytes, out_s), "back_gb_per_s": gigabytes_per_s(size_bytes, back_s)}


def _pinned_copies(device: torch.device, size_bytes: int) -> tuple[float, float]:
    on_device = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    on_host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out_s = median_s(lambda: on_host.copy_(on_device, non_blocking=True), device)
    return out_s, median_s(lambda: on_device.copy_(on_host, non_blocking=True), device)


def _row(way: str, size_bytes: int, limit: Mapping[str, float], out_s: float, back_s: float, **more: Any) -> Row:
    out, back = gigabytes_per_s(size_bytes, out_s), gigabytes_per_s(size_bytes, back_s)
    return {
        "way": way,
        "bytes": size_bytes,
        "out_s": out_s,
        "back_s": back_s,
        "out_gb_per_s": out,
        "back_gb_per_s": back,
        "out_of_limit": out / limit["out_gb_per_s"],
        "back_of_limit": back / limit["back_gb_per_s"],
        **more,
    }


def _ours(device: torch.device, size_bytes: int, cycles: int, limit: Mapping[str, float]) -> list[Row]:
    """The first cycle, with the arena set up beforehand in the background, and the median of the later ones."""
    mover = Mover(device)
    setup_s = timed(lambda: mover.arena.prepare(size_bytes).result(), device)
    segment = segment_of(size_bytes, mover)
    regions = segment.regions
    for region in regions:
        region.bytes.random_()
    samples = [region.bytes[::4099].clone() for region in regions]
    free_before = free_device_bytes(device)
    outs, backs, freed = [], [], []
    for _ in range(cycles + 1):
        outs.append(timed(lambda: segment.begin(Residency.OFFLOADED).wait(), device))
        freed.append(free_device_bytes(device) - free_before)
        backs.append(timed(lambda: segment.begin(Residency.RESIDENT).wait(), device))
    equal = all(torch.equal(old, region.bytes[::4099]) for old, region in zip(samples, regions, strict=True))
    more = {"equal": equal, "freed_bytes": min(freed) if device.type == "cuda" else segment.size_bytes}
    first = _row("colo, first cycle", size_bytes, limit, outs[0], backs[0], arena_setup_s=setup_s, **more)
    later = _row("colo", size_bytes, limit, statistics.median(outs[1:]), statistics.median(backs[1:]), **more)
    segment.close()
    mover.close()
    clear(device)
    return [first, later]


def _plain(device: torch.device, size_bytes: int) -> tuple[float, float]:
    tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    return _out_and_back(device, lambda: tensor.to("cpu", copy=True), lambda host: host.to(device, copy=True))


def _fresh_pinned(device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Pin fresh memory with `torch.empty(pin_memory=True)`; it is kept, or torch would hand it out again."""
    tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    pinned: list[torch.Tensor] = []

    def out() -> torch.Tensor:
        pinned.append(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"))
        return pinned[-1].copy_(tensor, non_blocking=True)

    return _out_and_back(device, out, lambda host: host.to(device, non_blocking=True, copy=True))


def _saver_backup(device: torch.device, size_bytes: int) -> tuple[float, float]:
    saver = memory_saver()
    with saver.region(tag="bench.backup", enable_cpu_backup=True):
        tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    tensor.random_()
    taken = _out_and_back(device, lambda: saver.pause("bench.backup"), lambda _: saver.resume("bench.backup"))
    del tensor
    saver.pause("bench.backup")
    return taken


def _out_and_back(device: torch.device, out: Callable[[], Any], back: Callable[[Any], Any]) -> tuple[float, float]:
    """Medians of three rounds; `back` is given what `out` returned."""
    outs, backs = [], []
    for _ in range(3):
        clear(device)
        kept: list[Any] = []
        outs.append(timed(lambda: kept.append(out()), device))  # noqa: B023 - called at once
        backs.append(timed(lambda: back(kept[0]), device))  # noqa: B023
    return statistics.median(outs), statistics.median(backs)


def _growth(device: torch.device, size_bytes: int, cycles: int) -> Row:
    """Device, host and pinned bytes after many cycles against those after two."""
    mover = Mover(device)
    segment = segment_of(size_bytes, mover)
    process = psutil.Process()
    readings = []
    for cycle in range(cycles):
        segment.begin(Residency.OFFLOADED).wait()
        segment.begin(Residency.RESIDENT).wait()
        if cycle in (1, cycles - 1):
            clear(device)
            readings.append((free_device_bytes(device), process.memory_info().rss, mover.arena.pinned_bytes))
    segment.close()
    mover.close()
    (free_a, rss_a, pinned_a), (free_b, rss_b, pinned_b) = readings
    return {
        "way": f"colo, growth over {cycles} cycles",
        "bytes": size_bytes,
        "device_growth_bytes": free_a - free_b if device.type == "cuda" else 0,
        "host_growth_bytes": rss_b - rss_a,
        "pinned_growth_bytes": pinned_b - pinned_a,
    }


# ---- beside other work -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """Sizes of a measurement."""

    kv_cache_bytes: int
    offload_bytes: int
    sequences: int
    new_tokens: int
    train_batch: int
    train_length: int
    micro_batches: int


_SIZES = {
    "cuda": _Size(
        kv_cache_bytes=8 * GIB,
        offload_bytes=32 * GIB,
        sequences=64,
        new_tokens=16,
        train_batch=8,
        train_length=1024,
        micro_batches=4,
    ),
    "cpu": _Size(
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


def _beside_an_offload(device: torch.device, *, repeats: int = 5) -> Row:
    """Seconds of the same generation alone, and while a large offload runs from its first token to its last."""
    size = _SIZES[device.type]
    rt = _launched(device, size)
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


def _exposed_time(device: torch.device) -> Row:
    """Time that a loop of rollout and train waits for moving trainer state, as a share of the raw copies' time.

    Blocks of steps with all state resident and with all of it parked for every rollout take turns, so that both
    see the same machine; the difference of the two median steps is what is exposed. Left out are the first round, in
    which host memory is pinned, and the first step of a block, which still finds the other block's residencies. A step
    ends when its own stream has: waiting for the whole device would wait for copies that the next rollout hides. The
    raw time is what the copies take by themselves.
    """
    size = _SIZES[device.type]
    rt = _launched(device, size)
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


def _timed_step(rt: Runtime, size: _Size, ids_BT: torch.Tensor) -> float:
    """Seconds of one step, on the clock of the stream that computes it."""
    start_s = time.perf_counter()
    _step(rt, size, ids_BT)
    if ids_BT.is_cuda:
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start_s


def _step(rt: Runtime, size: _Size, ids_BT: torch.Tensor) -> None:
    """Generate, then as many backward passes as a step has, then one optimizer step."""
    params = SamplingParams(n=1, max_tokens=size.new_tokens, temperature=0, ignore_eos=True)
    with rt.rollout():
        rt.generate([[i + 1, i + 2, i + 3] for i in range(size.sequences)], params)
    with rt.train():
        for _ in range(size.micro_batches):
            rt.model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def _launched(device: torch.device, size: _Size) -> Runtime:
    fused = device.type == "cuda"
    return launch(
        shape("0.6b", device),
        optimizer=MasterWeights(lambda params: torch.optim.AdamW(params, lr=1e-5, fused=fused)),
        device=device,
        dtype=torch.bfloat16,
        config=RuntimeConfig(kv_cache_bytes=size.kv_cache_bytes, offload=Offload.NEVER),
    )
