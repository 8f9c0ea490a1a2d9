"""Bytes of what a trainer keeps, and of the part of it that a streamed step has on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from colo.phases import phase as names
from colo.planning.model_shape import ModelShape
from colo.planning.workload import Mode, Optimizer, Workload
from colo.units import GIB

BUCKET_BYTES = GIB  # of state that a streamed step handles at a time: RuntimeConfig.region_bytes


@dataclass(frozen=True, slots=True)
class Window:
    """What a streamed step has on the device."""

    state: int  # bytes of three buckets, and of what stepping the largest takes beside it
    gradients: int  # bytes of the gradients of two buckets


def window_bytes(shape: ModelShape, w: Workload) -> Window:
    """Three buckets, of which the largest is full or the largest tensor's own, and fp32 copies of what it steps.

    Those are a master and a gradient for each element, where there are masters.
    """
    masters = 2 if w.mode is Mode.FULL and w.dtype_bytes < 4 else 0
    tensors = [(prod(size), count, optimizer_bytes(w.optimizer, size)) for size, count in _trained(shape, w)]
    num_trained = sum(elements * count for elements, count, _ in tensors)
    total = sum((state + masters * elements) * count for elements, count, state in tensors)
    bucket = min(BUCKET_BYTES, total)
    most = [
        (max(bucket, own), min(num_trained, max(elements, elements * bucket // own)))
        for elements, own in ((elements, state + masters * elements) for elements, _, state in tensors)
    ]
    transient = 8 if masters else 0
    window = max(size + transient * elements for size, elements in most) + 2 * bucket
    return Window(
        state=min(window, total + transient * num_trained),
        gradients=2 * max(elements for _, elements in most) * (w.dtype_bytes if w.mode is Mode.FULL else 4),
    )


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
