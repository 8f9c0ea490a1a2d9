"""vLLM's plug-in: what `colo` registers with it, in every process. Nothing changes for who does not ask for it."""

from __future__ import annotations

NAME = "colo"
"""Of the model loader (`--load-format colo`), the sleep-mode backend and the weight-transfer backend."""

WORKER_EXTENSION = "colo.engines.vllm.worker.ColoWorker"


def register() -> None:
    """Register loader, sleep-mode backend and weight-transfer backend, once a process; vLLM's plug-in entry point."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if NAME not in _LOAD_FORMAT_TO_MODEL_LOADER:
        from colo.engines.vllm.loader import ColoModelLoader

        register_model_loader(NAME)(ColoModelLoader)
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, "colo.engines.vllm.sleep", "ColoSleepBackend")
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "colo.engines.vllm.transfer", "ColoWeightTransferEngine")
