"""Models of real shapes with random weights, engines, and a step of GRPO's shape, for the benchmarks of vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from colo.assembly.launch import launch
from colo.bench.common import median_s
from colo.config import RuntimeConfig
from colo.engines.vllm import compat
from colo.engines.vllm.engine import VLLMEngine
from colo.memory.probe import used_device_bytes
from colo.runtime import Runtime
from colo.units import GIB, MIB

PINNING_S = 120.0
"""Longest time to wait for pinning."""

Row = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Sizes of a workload, apart from the model."""

    kv_cache_bytes: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    train_sequences: int
    """Sequences of a micro-batch."""

    cycles: int
    """Rounds over which growth is measured."""

    steps: int
    enforce_eager: bool
    """Run vLLM without CUDA graphs and torch.compile, which take longer to start."""

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


def size_name(name: str, device: str) -> str:
    """The shape's name, or what is measured in its place on a CPU; see `shape`."""
    return name if device == "cuda" else f"of a tiny stand-in for {name}"


def shape(name: str, device: torch.device) -> PretrainedConfig:
    """The configuration of Qwen3 `0.6b`, `8b` or `30b-a3b`; on a CPU a tiny one of the same kind."""
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


def launched(config: PretrainedConfig, device: torch.device, size: Size, *, own_process: bool = True) -> Runtime:
    """vLLM and a model to train on one copy of the weights."""
    return launch(
        config,
        engine="vllm",
        engine_options={
            "own_process": own_process,
            "enforce_eager": size.enforce_eager,
            "max_model_len": size.max_length,
            "disable_log_stats": True,
        },
        device=device,
        dtype=config.dtype,
        config=RuntimeConfig(kv_cache_bytes=size.kv_cache_bytes),
    )


def engine(folder: str, device: torch.device, size: Size, **options: Any) -> VLLMEngine:
    """vLLM driven by colo, without a trainer."""
    return VLLMEngine(
        folder,
        kv_cache_bytes=size.kv_cache_bytes,
        device=device,
        load_format="dummy",
        enforce_eager=size.enforce_eager,
        max_model_len=size.max_length,
        disable_log_stats=True,
        **options,
    )


def stock(folder: str, device: torch.device, size: Size, *, own_process: bool = True, **options: Any) -> Any:
    """Stock vLLM. On a CPU it uses colo's loader, since vLLM packs weights there and cannot load them again."""
    from vllm import LLM

    loading: dict[str, Any] = {"load_format": "dummy"}
    if device.type == "cpu":
        loading = {"load_format": "colo", "model_loader_extra_config": {"colo_load_format": "dummy"}}
    with compat.in_this_process(not own_process):
        return LLM(
            folder,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=size.kv_cache_bytes,
            gpu_memory_utilization=compat.smallest_utilization(),
            max_model_len=size.max_length,
            enforce_eager=size.enforce_eager,
            disable_log_stats=True,
            enable_sleep_mode=device.type == "cuda",
            **loading,
            **options,
        )


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


def insecure_serialization() -> AbstractContextManager[None]:
    """Let vLLM accept pickled handles, which other transfers send, for as long as its engine lives."""
    return compat.variable("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def shut_down(llm: Any) -> None:
    """End an engine of vLLM's own."""
    llm.llm_engine.engine_core.shutdown()


def worker_model(worker: Any) -> Any:
    """The model of a worker, for `collective_rpc` within one process."""
    return getattr(worker, "worker", worker).get_model()


def grpo_step(rt: Runtime, size: Size, *, new_tokens: int | None = None, prompts: int | None = None) -> None:
    """A rollout, a loss over all of its tokens, and a step of the optimizer."""
    with rt.rollout():
        completions = rt.generate(size.token_ids[:prompts], max_tokens=new_tokens or size.new_tokens, ignore_eos=True)
    sequences = [c.prompt_token_ids + c.token_ids for c in completions]
    with rt.train():
        train_step(rt.model, rt.optimizer, sequences, size, rt.device)


def train_step(model: Any, optimizer: Any, sequences: list[Any], size: Size, device: torch.device) -> None:
    """Gradients of a loss over `sequences` (equally long lists of token ids), and a step of the optimizer."""
    for part in torch.tensor(sequences, device=device).split(size.train_sequences):
        model(input_ids=part, use_cache=False, labels=part).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def peak_device_bytes(device: torch.device) -> Iterator[list[int]]:
    """The most device memory in use meanwhile, all processes together, looked at every few milliseconds; 0 on a CPU."""
    peak, done = [used_device_bytes(device) or 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.003):
            peak[0] = max(peak[0], used_device_bytes(device) or 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def seconds(function: Callable[[], Any]) -> float:
    """Wall-clock seconds of a call."""
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def ipc_options(device: torch.device) -> dict[str, Any]:
    """Options with which a stock engine takes weights over vLLM's own IPC transfer."""
    if device.type != "cuda":
        return {}
    from vllm.config import WeightTransferConfig

    return {"weight_transfer_config": WeightTransferConfig(backend="ipc")}


def device_copy_bytes_per_s(device: torch.device) -> float:
    """Bytes that a copy of one large tensor writes in a second."""
    num_bytes = 2 * GIB if device.type == "cuda" else 64 * MIB
    left, right = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return num_bytes / median_s(partial(left.copy_, right), device)
