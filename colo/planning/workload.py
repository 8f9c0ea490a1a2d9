"""The work that `colo plan` is asked about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from colo.config import OptimizerState
from colo.units import GIB

# Left resident by vLLM 0.26 asleep (context, CUDA graphs, workspaces), measured: Qwen3-8B on an H200.
ENGINE_RESIDUAL_BYTES = round(1.4 * GIB)
TRAINER_RESIDUAL_BYTES = GIB // 2  # an allowance, not measured: cuBLAS workspaces, what the allocator rounds up


class Mode(StrEnum):
    """The trained weights: every weight, or fp32 adapters on a base in 16 bits (lora) or in NF4 (qlora)."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Optimizer(StrEnum):
    """Optimizer state in fp32: two moments, one, or (adafactor) a row and a column for each matrix."""

    ADAMW = "adamw"
    SGD_MOMENTUM = "sgd-momentum"
    ADAFACTOR = "adafactor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of each GPU."""

    gpu_memory_bytes: int
    context: int  # tokens of the longest sequence, prompt and completion together
    generations: int  # sequences of `context` tokens that are alive at once in a rollout
    mode: Mode = Mode.FULL
    optimizer: Optimizer = Optimizer.ADAMW
    state: OptimizerState = OptimizerState.AUTO  # where the optimizer's state is while it steps
    release_gradients: bool = False  # each is stepped and dropped within the backward pass
    tp: int = 1  # tensor-parallel ranks, of engine and trainer alike
    lora_rank: int = 16
    dtype_bytes: int = 2  # of weights, activations and KV cache; at 2, bf16, full fine-tuning adds 2 for each master
    micro_batch: int = 1  # sequences of `context` tokens in one forward and backward pass
    residual_bytes: int = ENGINE_RESIDUAL_BYTES + TRAINER_RESIDUAL_BYTES  # on the device in every phase

    def __post_init__(self) -> None:
        for name, kind in (("mode", Mode), ("optimizer", Optimizer), ("state", OptimizerState)):
            value, known = getattr(self, name), [str(member) for member in kind]
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, but is {value!r}")
            object.__setattr__(self, name, kind(value))
        sizes = ("gpu_memory_bytes", "context", "generations", "tp", "lora_rank", "dtype_bytes", "micro_batch")
        for name, least in (*((size, 1) for size in sizes), ("residual_bytes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, but is {getattr(self, name)}")
