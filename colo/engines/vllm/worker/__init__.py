"""Code of vLLM's own processes: its weight loader, and the extension of its workers."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`ColoWorker`, by the name that `worker_extension_cls` takes. Imported when asked for: the loader needs less."""
    if name != "ColoWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from colo.engines.vllm.worker.agent import ColoWorker

    return ColoWorker
