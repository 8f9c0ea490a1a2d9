"""colo: one GPU, an inference engine and a trainer that take turns on one copy of the weights."""

from typing import TYPE_CHECKING, Any

from colo.config import Offload, RuntimeConfig
from colo.engine import Completion, SamplingParams, SleepLevel
from colo.errors import BudgetError, ColoError, EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.phases.phase import Phase, Residency

if TYPE_CHECKING:
    from colo.assembly.check import check
    from colo.assembly.launch import launch, start
    from colo.assembly.share import share
    from colo.engines.vllm.remote import connect
    from colo.integrations.trl import attach
    from colo.planning.estimate import plan
    from colo.runtime import Runtime

__all__ = [
    "BudgetError",
    "ColoError",
    "Completion",
    "EngineLost",
    "Offload",
    "Phase",
    "PhaseError",
    "Residency",
    "Runtime",
    "RuntimeConfig",
    "SamplingParams",
    "SleepLevel",
    "StaleWeights",
    "TransferError",
    "Unsupported",
    "attach",
    "check",
    "connect",
    "launch",
    "plan",
    "share",
    "start",
]

_LAZY = {
    "attach": "colo.integrations.trl",
    "check": "colo.assembly.check",
    "launch": "colo.assembly.launch",
    "share": "colo.assembly.share",
    "start": "colo.assembly.launch",
    "connect": "colo.engines.vllm.remote",
    "plan": "colo.planning.estimate",
    "Runtime": "colo.runtime",
}
"""Names whose modules import torch and transformers, which takes seconds: loaded when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'colo' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
