"""Models of real shapes with random weights, engines, and a step of GRPO's shape, for the benchmarks of vLLM."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig

from benchmarks.common import Record, Row, Tell, clear, clocked, median_s, require_free, shape
from colo.assembly.launch import launch
from colo.config import RuntimeConfig
from colo.engines.vllm import compat
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.client.start import save_config
from colo.memory.probe import torch_pinned_bytes, used_device_bytes
from colo.planning.model_shape import ModelShape
from colo.runtime import Runtime
from colo.units import GIB, MIB

PINNING_S = 120.0
"""Longest time to wait for pinning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Sizes of a workload, apart from the model."""

    kv_cache_bytes: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    train_sequences: int  # sequences of a micro-batch
    cycles: int  # rounds over which growth is measured
    steps: int
    enforce_eager: bool  # run vLLM without CUDA graphs and torch.compile, which take longer to start

    @property
    def max_length(self) -> int:
        """Tokens of prompt and completion together."""
        return max(64, self.prompt_tokens + self.new_tokens)

    @property
    def token_ids(self) -> list[list[int]]:
        """The prompts."""
        return [[(7 * i + j * j) % 200 + 1 for j in range(self.prompt_tokens)] for i in range(self.prompts)]


SIZES = {
    "cuda": Size(
        kv_cache_bytes=16 * GIB,
        prompts=256,
        prompt_tokens=64,
        new_tokens=256,
        train_sequences=16,
        cycles=100,
        steps=3,
        enforce_eager=False,
    ),
    "cpu": Size(
        kv_cache_bytes=32 * MIB,
        prompts=4,
        prompt_tokens=8,
        new_tokens=4,
        train_sequences=2,
        cycles=5,
        steps=2,
        enforce_eager=True,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A model of random weights, its device, and the sizes of the work."""

    shape_name: str
    device: torch.device
    config: PretrainedConfig
    size: Size
    folder: str  # holds the model's configuration for vLLM to read
    tell: Tell  # called with the name of each part as it begins

    def resized(self, **sizes: Any) -> Setup:
        """The same with other sizes."""
        return replace(self, size=replace(self.size, **sizes))

    def small(self) -> Setup:
        """The same with a KV cache of 1 GiB at most, and without CUDA graphs and torch.compile."""
        return self.resized(enforce_eager=True, kv_cache_bytes=min(self.size.kv_cache_bytes, GIB))

    @property
    def placed(self) -> dict[str, Any]:
        """Options by which vLLM takes one process for an engine, as on a GPU; on a CPU it takes two otherwise."""
        if self.device.type == "cuda":
            return {}
        return {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}

    def launched(self, *, own_process: bool = True, **settings: Any) -> Runtime:
        """vLLM and a model to train on one copy of the weights, with settings of `RuntimeConfig`."""
        return launch(
            self.config,
            engine="vllm",
            engine_options={
                "own_process": own_process,
                "enforce_eager": self.size.enforce_eager,
                "max_model_len": self.size.max_length,
                "disable_log_stats": True,
                **self.placed,
            },
            device=self.device,
            dtype=self.config.dtype,
            config=RuntimeConfig(kv_cache_bytes=self.size.kv_cache_bytes, **settings),
        )

    def engine(self, **options: Any) -> VLLMEngine:
        """vLLM driven by colo, without a trainer."""
        return VLLMEngine(
            self.folder,
            kv_cache_bytes=self.size.kv_cache_bytes,
            device=self.device,
            load_format="dummy",
            enforce_eager=self.size.enforce_eager,
            max_model_len=self.size.max_length,
            disable_log_stats=True,
            **self.placed,
            **options,
        )

    def stock(self, *, own_process: bool = True, **options: Any) -> Any:
        """Stock vLLM. On a CPU it uses colo's loader, since vLLM packs weights there and cannot load them again."""
        from vllm import LLM

        loading: dict[str, Any] = {"load_format": "dummy"}
        if self.device.type == "cpu":
            loading = {"load_format": "colo", "model_loader_extra_config": {"colo_load_format": "dummy"}}
        with compat.in_this_process(not own_process):
            return LLM(
                self.folder,
                skip_tokenizer_init=True,
                kv_cache_memory_bytes=self.size.kv_cache_bytes,
                gpu_memory_utilization=compat.smallest_utilization(),
                max_model_len=self.size.max_length,
                enforce_eager=self.size.enforce_eager,
                disable_log_stats=True,
                enable_sleep_mode=self.device.type == "cuda",
                **loading,
                **self.placed,
                **options,
            )


@contextmanager
def prepared(record: Record, shape_name: str, device: str, *, copies: bool = True) -> Iterator[Setup]:
    """Set up one shape; on a CPU a tiny one, which shows that the benchmark works and no more.

    The record's limit is a copy within the device, unless `copies` is false.
    """
    target = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    config = shape(shape_name, target)
    if copies:
        record.limit["device_copy_gb_per_s"] = device_copy_bytes_per_s(target) / 1e9
    with tempfile.TemporaryDirectory(prefix="colo-") as folder:
        save_config(config, folder)
        yield Setup(
            shape_name=shape_name, device=target, config=config, size=SIZES[device], folder=folder, tell=record.tell
        )


def require_room(setup: Setup, *, weights: int, more_bytes: int = 0) -> None:
    """Refuse a shape of which `weights` copies and more bytes do not fit the device. Raises: `Unsupported`."""
    weights_bytes = ModelShape.from_config(setup.config.to_dict()).num_parameters * setup.config.dtype.itemsize
    instead = "take a smaller --shape, or a GPU with more memory"
    require_free(weights * weights_bytes + more_bytes, setup.device, instead)


def wait_for_pinning(pids: Iterable[int]) -> None:
    """Wait until processes hold no more host memory than a second ago: colo pins in the background after a start."""

    def held() -> int:
        return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)

    pids = list(pids)
    give_up_s = time.monotonic() + PINNING_S
    before, now = -1, held()
    while now - before > MIB and time.monotonic() < give_up_s:
        time.sleep(1.0)
        before, now = now, held()


def shut_down(llm: Any) -> None:
    """End an engine of vLLM's own."""
    llm.llm_engine.engine_core.shutdown()


def worker_of(worker: Any) -> Any:
    """The worker itself, where vLLM wraps it, for functions that `collective_rpc` calls."""
    return getattr(worker, "worker", worker)


def worker_model(worker: Any) -> Any:
    """The model of a worker, for `collective_rpc` within one process."""
    return worker_of(worker).get_model()


def grpo_steps(count: int, rt: Runtime, size: Size, *, prompts: int | None = None) -> None:
    """Several times a rollout, a loss over all of its tokens, and a step of the optimizer."""
    for _ in range(count):
        with rt.rollout():
            completions = rt.generate(size.token_ids[:prompts], max_tokens=size.new_tokens, ignore_eos=True)
        sequences = [c.prompt_token_ids + c.token_ids for c in completions]
        with rt.train():
            train_step(rt.model, rt.optimizer, sequences, size, rt.device)


def train_step(model: Any, optimizer: Any, sequences: list[Any], size: Size, device: torch.device) -> None:
    """Gradients of a loss over `sequences`, and a step of the optimizer."""
    gradients(model, sequences, size, device)
    optimizer.step()
    optimizer.zero_grad()


def gradients(model: Any, sequences: list[Any], size: Size, device: torch.device) -> None:
    """Add gradients of a loss over `sequences` (equally long lists of token ids)."""
    for part in torch.tensor(sequences, device=device).split(size.train_sequences):
        model(input_ids=part, use_cache=False, labels=part).loss.backward()


@contextmanager
def peak_device_bytes(device: torch.device) -> Iterator[list[int]]:
    """The most device memory in use meanwhile, all processes together, looked at every few milliseconds; 0 on a CPU."""
    peak, done = [used_device_bytes(device) or 0], threading.Event()

    def watch() -> None:
        # the driver alone: who asks torch's allocator holds the GIL and waits for its lock, and vLLM's sleep pool, as
        # it allocates, holds that lock and waits for the GIL
        while not done.wait(0.003):
            peak[0] = max(peak[0], used_device_bytes(device) or 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def growth(work: Callable[[], None], held: Callable[[], tuple[int, int, int]]) -> tuple[Row, float]:
    """Device, host and pinned bytes that `work` leaves behind once it has run before, and its seconds."""
    work()
    before = held()
    _, spent_s = clocked(work)
    names = ("device_bytes", "host_bytes", "pinned_bytes")
    return {name: b - a for name, a, b in zip(names, before, held(), strict=True)}, spent_s


def held_bytes(device: torch.device, driven: VLLMEngine) -> tuple[int, int, int]:
    """Device, host and pinned bytes of this process and the engine's, after what is cached has been returned."""
    clear(device)
    pids = {psutil.Process().pid, *driven.pids}
    resident = sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)
    return used_device_bytes(device) or 0, resident, torch_pinned_bytes() + driven.pinned_bytes


def device_copy_bytes_per_s(device: torch.device) -> float:
    """Bytes that a copy of one large tensor writes in a second."""
    num_bytes = 2 * GIB if device.type == "cuda" else 64 * MIB
    left, right = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return num_bytes / median_s(partial(left.copy_, right), device)
