"""A worker extension that says of the trainer's memory what one without CUDA IPC does."""

from colo.engines.vllm import worker

worker.why_not_mapped = lambda probe, device: "it maps nothing of another process's GPU memory"


class UnmappedWorker(worker.ColoWorker):
    """Name it as `worker_extension_cls`."""
