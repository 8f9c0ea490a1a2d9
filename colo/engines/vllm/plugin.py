"""vLLM's plug-in: what `colo` registers with it, in every process. Nothing changes for who does not ask for it."""

from __future__ import annotations

NAME = "colo"
"""Of the model loader (`--load-format colo`) and of the sleep-mode backend."""

WORKER_EXTENSION = "colo.engines.vllm.worker.ColoWorker"


def register() -> None:
    """Register the model loader and the sleep-mode backend, once a process. vLLM calls this by its entry point."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if NAME not in _LOAD_FORMAT_TO_MODEL_LOADER:
        from colo.engines.vllm.loader import ColoModelLoader

        register_model_loader(NAME)(ColoModelLoader)
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, "colo.engines.vllm.sleep", "ColoSleepBackend")
