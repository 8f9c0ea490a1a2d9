"""The work that `colo plan` is asked about, and the bytes that a trainer keeps for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from colo.config import OptimizerState
from colo.phases import phase as names
from colo.planning.model_shape import ModelShape
from colo.units import GIB, MIB

RANGE_BYTES, NUM_SLOTS = 64 * MIB, 3  # as colo/trainer/planes.py has them, which imports torch
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


def trainer_state(shape: ModelShape, w: Workload) -> dict[str, int]:
    """Parameters of the trainer's own, gradients, optimizer state and master weights of what is trained."""
    full, trained = w.mode is Mode.FULL, _trained(shape, w)
    num_trained = sum(prod(size) * count for size, count in trained)
    return {
        names.TRAINER_PARAMETERS: 0 if full else 4 * num_trained,
        names.TRAINER_GRADIENTS: (w.dtype_bytes if full else 4) * num_trained,
        names.TRAINER_OPTIMIZER: sum(optimizer_bytes(w.optimizer, size) * count for size, count in trained),
        names.TRAINER_MASTER_WEIGHTS: 2 * num_trained if full and w.dtype_bytes < 4 else 0,
    }


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes that a streamed step has on the device."""

    state: int  # the slots, and what a range is stepped in
    gradients: int  # those that are there at once where a range's are dropped as it is stepped


def window_bytes(shape: ModelShape, w: Workload) -> Window:
    """Size the window: ranges of elements for AdamW and SGD, some whole parameters for others.

    A range is stepped over a flat parameter and its gradient, in fp32 where there are masters.
    """
    masters = 2 if w.mode is Mode.FULL and w.dtype_bytes < 4 else 0
    dtype_bytes = w.dtype_bytes if w.mode is Mode.FULL else 4
    tensors = [(prod(size), count, optimizer_bytes(w.optimizer, size)) for size, count in _trained(shape, w)]
    num_trained = sum(elements * count for elements, count, _ in tensors)
    largest = max(elements for elements, _, _ in tensors)
    if w.optimizer is Optimizer.ADAFACTOR:
        held = max(masters * elements + state for elements, _, state in tensors)
        window = 3 * max(min(RANGE_BYTES, (masters + 1) * num_trained), held) + (8 if masters else 0) * largest
        return Window(state=window, gradients=2 * largest * dtype_bytes)
    state_bytes = masters + optimizer_bytes(w.optimizer, (1,))
    elements = min(num_trained, RANGE_BYTES // state_bytes)
    flat_bytes = 2 * (4 if masters else dtype_bytes)
    return Window(
        state=(NUM_SLOTS * state_bytes + flat_bytes) * elements,
        gradients=2 * max(largest, elements) * dtype_bytes,
    )


def _trained(shape: ModelShape, w: Workload) -> Sequence[tuple[tuple[int, ...], int]]:
    """Shape and number of what is trained: every weight, or the adapter."""
    if w.mode is Mode.FULL:
        return [(group.local_shape(w.tp), group.count) for group in shape.groups]
    return shape.adapter_shapes(w.lora_rank, tp=w.tp)


def optimizer_bytes(optimizer: Optimizer, shape: tuple[int, ...]) -> int:
    """State of one tensor; adafactor factors the last two axes (Shazeer and Stern 2018, as `torch.optim.Adafactor`)."""
    if optimizer is Optimizer.ADAFACTOR and len(shape) > 1:
        return 4 * prod(shape[:-2]) * (shape[-2] + shape[-1])
    return (8 if optimizer is Optimizer.ADAMW else 4) * prod(shape)
