"""A worker extension that says of the trainer's memory what one without CUDA IPC does."""

from colo.engines.vllm.worker import agent

agent.why_not_mapped = lambda probe, device: "it maps nothing of another process's GPU memory"


class UnmappedWorker(agent.ColoWorker):
    """Name it as `worker_extension_cls`."""
