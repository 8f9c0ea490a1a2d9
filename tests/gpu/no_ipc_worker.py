"""A worker extension for which this machine has no CUDA IPC."""

from colo.engines.vllm.worker.agent import ColoWorker
from colo.errors import TransferError
from colo.memory import cuda_driver


def _refuse(handle, size_bytes, device):
    raise TransferError("CUDA IPC does not map memory of another process here (pretended)")


cuda_driver.open_exported = _refuse


class NoIpcWorker(ColoWorker):
    """Name it as `worker_extension_cls`."""
