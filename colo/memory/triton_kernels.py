"""Loads the Triton kernels of `colo.memory.kernels` where Triton works."""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

import torch


@cache
def kernels(device: torch.device) -> ModuleType | None:
    """The compiled kernels of `colo.memory.kernels`; `None` on a CPU and, with a warning, where Triton fails."""
    if device.type != "cuda":
        return None
    try:
        from colo.memory import kernels as compiled

        compiled.try_out(device)
    except torch.OutOfMemoryError:
        raise  # of this moment, not of this machine
    except Exception as error:  # noqa: BLE001 - Triton may lack a compiler, a driver's library, or support of the GPU
        warnings.warn(f"weights are checked without Triton, which is slower: {error}", RuntimeWarning, stacklevel=2)
        return None
    return compiled
