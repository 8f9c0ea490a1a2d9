"""A worker extension that also says what tests want to know of its process."""

import torch

from colo.engines.vllm.worker.agent import ColoWorker


class ProbeWorker(ColoWorker):
    """Name it as `worker_extension_cls`."""

    def peak_bytes(self) -> int:
        """The most that torch has held of the device at a time."""
        return torch.cuda.max_memory_reserved()

    def arena_bytes(self) -> int:
        """Host memory that colo has pinned."""
        return self._colo_agent._segments_now().mover.arena.pinned_bytes
