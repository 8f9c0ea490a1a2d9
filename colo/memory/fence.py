"""Waiting before another process reads: streams order the kernels of one process only."""

from __future__ import annotations

import torch


def wait_for_queued(device: torch.device) -> None:
    """Return when everything queued on the current stream of a GPU has run. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
