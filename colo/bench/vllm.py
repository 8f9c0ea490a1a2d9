"""`colo bench vllm`: vLLM driven by colo, beside vLLM as it is, on random weights of real shapes.

Parts, each a run of its own: `switch` (0.6B: publication, generation, a loop), `life` (0.6B: growth, restart, one
process), `sleep` (8B: level 1), `cycle` (8B: the memory of full fine-tuning), `experts` (30B-A3B: replay).
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from colo.assembly import launch
from colo.bench.common import Result, clear, gigabytes_per_s, median_s, result, timed
from colo.bench.offload import copy_limit
from colo.config import Offload, RuntimeConfig
from colo.engines.vllm import compat
from colo.engines.vllm.engine import VLLMEngine
from colo.engines.vllm.options import save_config
from colo.memory.probe import used_device_bytes
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Phase
from colo.runtime import Runtime
from colo.units import GIB, MIB
from colo.weights.sources.checkpoint import checkpoint_views

Row = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything, apart from the model."""

    kv_cache_bytes: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    train_sequences: int
    cycles: int
    steps: int
    enforce_eager: bool


SIZES = {
    "cuda": Size(
        kv_cache_bytes=16 * GIB,
        prompts=256,
        prompt_tokens=64,
        new_tokens=256,
        train_sequences=16,
        cycles=100,
        steps=4,
        enforce_eager=False,
    ),
    "cpu": Size(
        kv_cache_bytes=8 * MIB,
        prompts=4,
        prompt_tokens=8,
        new_tokens=4,
        train_sequences=2,
        cycles=5,
        steps=2,
        enforce_eager=True,
    ),
}
CYCLE_KV_CACHE_BYTES = 48 * GIB


def run(part: str, *, device: str, tell: Tell = lambda text: None) -> Result:
    """Run one part; on a CPU with tiny shapes, which shows that it works and no more."""
    target = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    size = SIZES[device]
    with tempfile.TemporaryDirectory(prefix="colo-") as folder:
        rows = list(PARTS[part](target, size, folder, tell))
    limit = copy_limit(target) if part == "sleep" else {}
    return result(f"vllm {part}", f"colo bench vllm {part} --device {device}", limit=limit, rows=rows)


# ---- 0.6B ------------------------------------------------------------------------------------------------------------


def switch(device: torch.device, size: Size, folder: str, tell: Tell) -> Iterator[Row]:
    """Publication, keep-weights sleep, generation against stock vLLM, and a GRPO-like loop, across processes."""
    config = _shape("0.6b", device)
    save_config(config, folder)
    tell("stock vLLM: generation")
    llm = _stock(folder, device, size)
    stock = _tokens_per_s(llm, size)
    llm.llm_engine.engine_core.shutdown()
    del llm
    clear(device)
    tell("engine in its own process")
    rt = _launch(config, device, size, own_process=True)
    yield _publication(rt, "own process")
    yield _keep_weights(rt, "own process")
    ours = _tokens_per_s(rt.engine.llm, size)  # type: ignore[attr-defined]
    yield {
        "way": "generation, own process, mapped weights",
        "tokens_per_s": ours,
        "stock_tokens_per_s": stock,
        "of_stock": ours / stock,
    }
    tell("a loop of rollout and train")
    yield _loop(rt, size)
    rt.close()


def life(device: torch.device, size: Size, folder: str, tell: Tell) -> Iterator[Row]:
    """Growth over many cycles, a restart after a kill, and the same figures for an engine in this process."""
    config = _shape("0.6b", device)
    save_config(config, folder)
    eager = replace(size, enforce_eager=True)
    tell("stock vLLM: start")
    stock_start_s = _seconds(lambda: _stock(folder, device, eager).llm_engine.engine_core.shutdown())
    clear(device)
    tell("engine in its own process")
    start_s = time.perf_counter()
    rt = _launch(config, device, eager, own_process=True)
    started_s = time.perf_counter() - start_s
    tell(f"{size.cycles} cycles")
    yield _growth(rt, size)
    tell("kill and restart")
    yield _restart(rt, stock_start_s, started_s)
    rt.close()
    clear(device)
    tell("engine in this process")
    rt = _launch(config, device, eager, own_process=False)
    yield _publication(rt, "in process")
    yield _keep_weights(rt, "in process") | _driver_time(rt)
    rt.close()


def _publication(rt: Runtime, where: str) -> Row:
    """Pause, prefix reset, checks, commit and resume, of weights that have changed."""
    seconds = []
    for _ in range(20):
        rt._publisher.version += 1
        start_s = time.perf_counter()
        rt._publish()
        rt.engine.resume()
        seconds.append(time.perf_counter() - start_s)
    return {
        "way": f"publication, {where}",
        "bytes": rt.publications[-1].num_bytes,
        "median_s": statistics.median(seconds),
        "slowest_s": max(seconds),
    }


def _keep_weights(rt: Runtime, where: str) -> Row:
    sleeps, wakes = [], []
    for _ in range(6):
        sleeps.append(timed(lambda: rt.engine.sleep("keep-weights"), rt.device))  # type: ignore[arg-type]
        wakes.append(timed(rt.engine.wake, rt.device))
        rt.engine.resume()
    return {
        "way": f"keep-weights sleep, {where}",
        "bytes": rt.scheduler.segments[ENGINE_KV_CACHE].size_bytes,
        "sleep_s": statistics.median(sleeps[1:]),
        "wake_s": statistics.median(wakes[1:]),
    }


def _driver_time(rt: Runtime) -> Row:
    """What the driver alone takes to unmap and to map the same bytes."""
    if rt.device.type != "cuda":
        return {}
    rt.engine.pause()
    (times,) = rt.engine.llm.collective_rpc(  # type: ignore[attr-defined]
        lambda worker: _remap(getattr(worker, "worker", worker))
    )
    rt.engine.resume()
    return {"driver_unmap_s": times[0], "driver_map_s": times[1]}


def _remap(worker: Any) -> tuple[float, float]:
    pool = compat.sleep_pool(worker)
    assert pool is not None
    records = [record for record in pool.pointer_to_data.values() if record.tag == "kv_cache"]
    pairs = []
    for _ in range(5):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for record in records:
            compat.unmap(record)
        middle_s = time.perf_counter()
        for record in records:
            compat.remap(record)
        torch.cuda.synchronize()
        pairs.append((middle_s - start_s, time.perf_counter() - middle_s))
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def _stock(folder: str, device: torch.device, size: Size, **options: Any) -> Any:
    from vllm import LLM

    with compat.in_this_process(False):
        return LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=size.kv_cache_bytes,
            gpu_memory_utilization=0.3,
            max_model_len=_max_length(size),
            enforce_eager=size.enforce_eager,
            disable_log_stats=True,
            enable_sleep_mode=device.type == "cuda",
            **options,
        )


def _tokens_per_s(llm: Any, size: Size) -> float:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=size.new_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in _prompts(size)]
    seconds = []
    for _ in range(5):
        llm.reset_prefix_cache()
        start_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start_s)
    return size.prompts * size.new_tokens / statistics.median(seconds[1:])


def _loop(rt: Runtime, size: Size) -> Row:
    """Share of a GRPO-like step, trainer state parked for every rollout, that belongs to neither rollout nor train."""
    rt.scheduler.offload = Offload.ALWAYS
    for step in range(size.steps + 2):
        if step == 2:
            first_span, start_s = len(rt.trace.spans), time.perf_counter()
        _grpo_step(rt, size)
    total_s = time.perf_counter() - start_s
    seconds: dict[str, float] = {}
    for span in rt.trace.spans[first_span:]:
        if span.category == "phase" and span.phase in (Phase.ROLLOUT, Phase.TRAIN):
            seconds[span.name] = seconds.get(span.name, 0.0) + span.duration_s
    lost_s = total_s - sum(seconds.values())
    mismatch = rt.trace.metrics["mismatch_sampled"]
    return {
        "way": "switching in a step",
        "step_s": total_s / size.steps,
        "rollout_s": seconds["rollout"] / size.steps,
        "train_s": seconds["train"] / size.steps,
        "switching_s": lost_s / size.steps,
        "of_step": lost_s / total_s,
        "synced_bytes": rt.bytes_synced,
        "mismatch_first": mismatch[0],
        "mismatch_last": mismatch[-1],
    }


def _grpo_step(rt: Runtime, size: Size, *, new_tokens: int | None = None, prompts: int | None = None) -> None:
    tokens = _prompts(size)[:prompts]
    with rt.rollout():
        completions = rt.generate(tokens, max_tokens=new_tokens or size.new_tokens, ignore_eos=True)
    ids = torch.tensor([c.prompt_token_ids + c.token_ids for c in completions], device=rt.device)
    with rt.train():
        for part in ids.split(size.train_sequences):
            logits = rt.model(input_ids=part, use_cache=False, labels=part)
            logits.loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def _growth(rt: Runtime, size: Size) -> Row:
    """Bytes that cycles of rollout, train and step leave behind, in both processes."""
    pids = {psutil.Process().pid, *rt.engine.pids}  # type: ignore[attr-defined]

    def held() -> tuple[int, int, int]:
        clear(rt.device)
        resident = sum(psutil.Process(pid).memory_info().rss for pid in pids)
        return used_device_bytes(rt.device) or 0, resident, rt._mover.arena.pinned_bytes

    for _ in range(10):
        _grpo_step(rt, size, new_tokens=2, prompts=size.train_sequences)
    before = held()
    start_s = time.perf_counter()
    for _ in range(size.cycles):
        _grpo_step(rt, size, new_tokens=2, prompts=size.train_sequences)
    seconds = time.perf_counter() - start_s
    device_bytes, host_bytes, pinned_bytes = (after - b for after, b in zip(held(), before, strict=True))
    return {
        "way": f"growth over {size.cycles} cycles",
        "device_bytes": device_bytes,
        "host_bytes": host_bytes,
        "pinned_bytes": pinned_bytes,
        "cycle_s": seconds / size.cycles,
    }


def _restart(rt: Runtime, stock_start_s: float, started_s: float) -> Row:
    """The engine's process killed, and started again on the same memory."""
    engine: Any = rt.engine
    before = [p.detach().clone() for p in rt.model.parameters()]
    for pid in engine.pids:
        psutil.Process(pid).kill()
    start_s = time.perf_counter()
    while engine.state != "lost":
        try:
            rt.generate([[1, 2, 3]], max_tokens=1)
        except Exception:  # noqa: BLE001 - the loss is what is waited for
            time.sleep(0.01)
    noticed_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    rt.recover()
    recovered_s = time.perf_counter() - start_s
    return {
        "way": "restart after a kill",
        "noticed_s": noticed_s,
        "recovered_s": recovered_s,
        "mapping_s": engine._infos[0]["placing_s"],
        "first_start_s": started_s,
        "stock_start_s": stock_start_s,
        "weights_equal": all(torch.equal(a, b) for a, b in zip(before, rt.model.parameters(), strict=True)),
    }


# ---- 8B --------------------------------------------------------------------------------------------------------------


def sleep(device: torch.device, size: Size, folder: str, tell: Tell) -> Iterator[Row]:
    """Level 1 beside vLLM's own. On a CPU vLLM's weights do not leave, and there is nothing to measure."""
    save_config(_shape("8b", device), folder)
    eager = replace(size, enforce_eager=True)
    if device.type == "cuda":
        tell("vLLM's own level 1")
        peer = _peer_level_1(folder, device, eager)
        clear(device)
        tell("level 1")
        yield _level_1(folder, device, eager, peer)


def cycle(device: torch.device, size: Size, folder: str, tell: Tell) -> Iterator[Row]:
    """The memory of full fine-tuning with fp32 masters."""
    tell("a cycle of full fine-tuning")
    yield _cycle(_shape("8b", device), device, replace(size, enforce_eager=True))


def _peer_level_1(folder: str, device: torch.device, size: Size) -> dict[str, list[float]]:
    llm = _stock(folder, device, size)
    times: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(4):
        times["sleep"].append(_seconds(partial(llm.sleep, level=1)))
        times["wake"].append(_seconds(partial(llm.wake_up, tags=["weights"])))
        llm.wake_up(tags=["kv_cache"])
    llm.llm_engine.engine_core.shutdown()
    return times


def _level_1(folder: str, device: torch.device, size: Size, peer: Mapping[str, Sequence[float]]) -> Row:
    engine = _engine(folder, device, size, share_memory=False)
    time.sleep(8)  # host memory is pinned in the background, as it would be during the first rollout
    sleeps, wakes = [], []
    for _ in range(5):
        sleeps.append(_seconds(lambda: engine.sleep(1)))
        wakes.append(_seconds(lambda: engine.wake(["weights"])))
        engine.wake()
    num_bytes = next(s.size_bytes for s in engine.segments if s.name == ENGINE_WEIGHTS)
    engine.close()
    clear(device)
    limit = copy_limit(device)
    out, back = (gigabytes_per_s(num_bytes, statistics.median(t[1:])) for t in (sleeps, wakes))
    return {
        "way": "level 1, own process",
        "bytes": num_bytes,
        "sleep_s": statistics.median(sleeps[1:]),
        "wake_s": statistics.median(wakes[1:]),
        "sleep_of_limit": out / limit["out_gb_per_s"],
        "wake_of_limit": back / limit["back_gb_per_s"],
        "first_sleep_s": sleeps[0],
        "vllm_first_sleep_s": peer["sleep"][0],
        "vllm_sleep_s": statistics.median(peer["sleep"][1:]),
        "vllm_wake_s": statistics.median(peer["wake"][1:]),
        "first_times_faster": peer["sleep"][0] / sleeps[0],
    }


def _cycle(config: PretrainedConfig, device: torch.device, size: Size) -> Row:
    """Peak memory of two steps of full fine-tuning with fp32 masters, as the driver sees it."""
    kv_cache_bytes = CYCLE_KV_CACHE_BYTES if device.type == "cuda" else size.kv_cache_bytes
    rt = _launch(config, device, replace(size, kv_cache_bytes=kv_cache_bytes), own_process=True)
    rt.model.gradient_checkpointing_enable()  # type: ignore[operator]
    outside_bytes = (used_device_bytes(device) or 0) - sum(s.device_bytes for s in rt.scheduler.segments.values())
    small = replace(size, prompts=min(size.prompts, 32), new_tokens=min(size.new_tokens, 64), train_sequences=8)
    _grpo_step(rt, small)
    with _peak(device) as peak:
        for _ in range(2):
            _grpo_step(rt, small)
    segments = {name: segment.size_bytes for name, segment in rt.scheduler.segments.items()}
    phases = {phase: rt.trace.peak_bytes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
    working = rt.scheduler.working_bytes[Phase.TRAIN]
    larger_bytes = max(phases[Phase.ROLLOUT], phases[Phase.TRAIN] + working)
    both_bytes = sum(segments.values()) + segments[ENGINE_WEIGHTS] + working + outside_bytes
    row = {
        "way": "full fine-tuning, a whole cycle",
        "peak_bytes": peak[0],
        "rollout_bytes": phases[Phase.ROLLOUT],
        "train_bytes": phases[Phase.TRAIN],
        "train_working_bytes": working,
        "residual_bytes": outside_bytes,
        "of_larger_and_residual": peak[0] / (larger_bytes + outside_bytes) if peak[0] else None,
        "both_resident_bytes": both_bytes,
        "under_both": 1 - peak[0] / both_bytes if peak[0] else None,
        "synced_bytes": rt.bytes_synced,
    }
    rt.close()
    return row


@contextmanager
def _peak(device: torch.device) -> Iterator[list[int]]:
    """The most device memory in use meanwhile, all processes together, looked at every two milliseconds."""
    peak, done = [used_device_bytes(device) or 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], used_device_bytes(device) or 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


# ---- 30B-A3B ---------------------------------------------------------------------------------------------------------


def experts(device: torch.device, size: Size, folder: str, tell: Tell) -> Iterator[Row]:
    """Weights of a mixture of experts into an engine in this process: recorded copies against `load_weights`."""
    config = _shape("30b-a3b", device)
    save_config(config, folder)
    tell("starting the engine")
    engine = _engine(
        folder, device, replace(size, kv_cache_bytes=min(size.kv_cache_bytes, GIB), enforce_eager=True), own=False
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    source = {n: torch.empty(p.shape, dtype=config.dtype, device=device) for n, p in model.named_parameters()}
    for tensor in source.values():
        tensor.uniform_(-0.05, 0.05)
    tell("replay against load_weights")
    start_s = time.perf_counter()
    plan = engine.record_plan(source)
    recorded_s = time.perf_counter() - start_s
    num_bytes = sum(t.nbytes for t in source.values())
    if plan.fallbacks:
        yield {"way": "replay", "bytes": num_bytes, "fallback": next(iter(plan.fallbacks.values()))}
        return
    (engine_model,) = engine.llm.collective_rpc(_model_of)

    def load() -> None:
        with torch.no_grad():
            engine_model.load_weights(checkpoint_views(source, config.model_type))

    load_s = median_s(load, device, repeats=3)
    for copy in plan.copies:
        copy.target.zero_()
    replay_s = median_s(lambda: plan.replay(source), device)
    different = plan.differences(source)
    yield {
        "way": "replay, in process",
        "bytes": num_bytes,
        "tensors": len(checkpoint_views(source, config.model_type)),
        "copies": len(plan.copies),
        "recorded_s": recorded_s,
        "replay_s": replay_s,
        "load_weights_s": load_s,
        "times_faster": load_s / replay_s,
        "copy_limit_s": num_bytes / _device_copy_bytes_per_s(device),
        "of_limit": replay_s / (num_bytes / _device_copy_bytes_per_s(device)),
        "different_tensors": len(different),
    }
    engine.close()


def _model_of(worker: Any) -> Any:
    return getattr(worker, "worker", worker).get_model()


def _device_copy_bytes_per_s(device: torch.device) -> float:
    """Bytes that a copy of one large tensor writes in a second."""
    num_bytes = 2 * GIB if device.type == "cuda" else 64 * MIB
    left, right = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return num_bytes / median_s(partial(left.copy_, right), device)


PARTS: Mapping[str, Callable[[torch.device, Size, str, Tell], Iterator[Row]]] = {
    "switch": switch,
    "life": life,
    "sleep": sleep,
    "cycle": cycle,
    "experts": experts,
}


# ---- shared ----------------------------------------------------------------------------------------------------------


def _seconds(function: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def _shape(name: str, device: torch.device) -> PretrainedConfig:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    common: dict[str, Any] = {
        "vocab_size": 151936,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "eos_token_id": None,
        "bos_token_id": None,
        "dtype": dtype,
    }
    if device.type == "cpu":
        common |= {"vocab_size": 256, "head_dim": 32, "hidden_size": 64, "intermediate_size": 96}
        common |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        return Qwen3MoeConfig(**common, **experts) if name == "30b-a3b" else Qwen3Config(**common)
    if name == "30b-a3b":
        return Qwen3MoeConfig(
            **common,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
    large = name == "8b"
    return Qwen3Config(
        **common,
        hidden_size=4096 if large else 1024,
        intermediate_size=12288 if large else 3072,
        num_hidden_layers=36 if large else 28,
        num_attention_heads=32 if large else 16,
        num_key_value_heads=8,
        tie_word_embeddings=not large,
    )


def _launch(config: PretrainedConfig, device: torch.device, size: Size, **options: Any) -> Runtime:
    return launch(
        config,
        engine="vllm",
        engine_options={
            "enforce_eager": size.enforce_eager,
            "max_model_len": _max_length(size),
            "disable_log_stats": True,
            **options,
        },
        device=device,
        dtype=config.dtype,
        config=RuntimeConfig(kv_cache_bytes=size.kv_cache_bytes),
    )


def _engine(folder: str, device: torch.device, size: Size, *, own: bool = True, **options: Any) -> VLLMEngine:
    return VLLMEngine(
        folder,
        kv_cache_bytes=size.kv_cache_bytes,
        device=device,
        own_process=own,
        load_format="dummy",
        enforce_eager=size.enforce_eager,
        max_model_len=_max_length(size),
        disable_log_stats=True,
        **options,
    )


def _max_length(size: Size) -> int:
    return max(64, size.prompt_tokens + size.new_tokens)


def _prompts(size: Size) -> list[list[int]]:
    return [[(7 * i + j * j) % 200 + 1 for j in range(size.prompt_tokens)] for i in range(size.prompts)]
