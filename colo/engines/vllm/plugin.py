"""vLLM's plug-in: what `colo` registers with it, in every process. Nothing changes for who does not ask for it."""

from __future__ import annotations

from colo.engines.vllm.wire import COLO


def register() -> None:
    """Register loader, sleep-mode backend and both ends of the weight-transfer backend, once a process.

    vLLM's plug-in entry point.
    """
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.distributed.weight_transfer import factory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if COLO not in _LOAD_FORMAT_TO_MODEL_LOADER:
        from colo.engines.vllm.worker.loader import ColoModelLoader

        register_model_loader(COLO)(ColoModelLoader)
    if COLO not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(COLO, "colo.engines.vllm.worker.sleep", "ColoSleepBackend")
    if COLO not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            COLO, "colo.engines.vllm.worker.weights", "ColoWeightTransferEngine"
        )
    trainers = getattr(factory, "WeightTransferTrainerFactory", None)  # 0.26 has none
    if trainers is not None and COLO not in trainers._registry:
        trainers.register_engine(COLO, "colo.engines.vllm.trainer", "ColoTrainerWeightTransferEngine")
