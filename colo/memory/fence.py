"""What another process may read: streams order the kernels of one process, and of no other."""

from __future__ import annotations

import torch


def wait_for_queued(device: torch.device) -> None:
    """Return when everything queued on the current stream of a GPU has run. Nothing to wait for elsewhere."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
