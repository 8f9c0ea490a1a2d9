"""The tensor to blame for log-probabilities that are not numbers. Looked for only when there are some."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from colo.memory.dtensor import local_shard

_CHUNK_ELEMENTS = 1 << 24


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The first tensor, or this rank's part of it, with NaN or infinite values and how many; `None` without any."""
    for name, tensor in tensors:
        values = local_shard(tensor.detach())
        if not values.is_floating_point() or not values.numel():
            continue
        chunks = values.reshape(-1).split(_CHUNK_ELEMENTS)
        count = sum(int((~chunk.float().isfinite()).sum()) for chunk in chunks)
        if count:
            return f"{name} {tuple(tensor.shape)} has {count} values that are NaN or infinite"
    return None


def not_numbers(culprit: str | None) -> str:
    """The message for log-probabilities that are not numbers, with what `first_not_finite` has found."""
    return "the log-probabilities of what was sampled are not numbers: " + (
        f"{culprit}. Load weights that are finite, and look for the step that made them so (a norm of the gradients "
        "that is not finite, a learning rate too high)"
        if culprit
        else "every weight is finite, so that an activation has overflowed (use another dtype, bfloat16 or float32), "
        "or vLLM's KV cache still holds what earlier weights, not finite, have left in it (start vLLM anew)"
    )
