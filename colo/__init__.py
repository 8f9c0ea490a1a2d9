"""colo: one GPU, an inference engine and a trainer that take turns on one copy of the weights."""

import importlib.metadata
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from colo.config import Offload, RuntimeConfig
from colo.engine import Completion, SamplingParams, SleepLevel
from colo.errors import BudgetError, ColoError, EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.phases.phase import Phase, Residency

if TYPE_CHECKING:
    from colo.assembly.check import check
    from colo.assembly.launch import launch, start
    from colo.assembly.share import share
    from colo.engines.connect import connect
    from colo.engines.elsewhere import Broadcast, WeightsBucket, WeightsFolder
    from colo.engines.fleet import Fleet
    from colo.engines.main_rank import MainRankEngine
    from colo.planning.estimate import plan
    from colo.runtime import Runtime
    from colo.trl import attach
    from colo.weights.routing import replay_routing

    __version__: str

__all__ = [
    "Broadcast",
    "BudgetError",
    "ColoError",
    "Completion",
    "EngineLost",
    "Fleet",
    "MainRankEngine",
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
    "WeightsBucket",
    "WeightsFolder",
    "attach",
    "check",
    "connect",
    "launch",
    "plan",
    "replay_routing",
    "share",
    "start",
]

_LAZY = {
    "attach": "colo.trl",
    "check": "colo.assembly.check",
    "launch": "colo.assembly.launch",
    "share": "colo.assembly.share",
    "start": "colo.assembly.launch",
    "connect": "colo.engines.connect",
    "plan": "colo.planning.estimate",
    "Broadcast": "colo.engines.elsewhere",
    "Fleet": "colo.engines.fleet",
    "MainRankEngine": "colo.engines.main_rank",
    "WeightsBucket": "colo.engines.elsewhere",
    "WeightsFolder": "colo.engines.elsewhere",
    "Runtime": "colo.runtime",
    "replay_routing": "colo.weights.routing",
}
"""Names whose modules import torch and transformers, which takes seconds: loaded when they are first used."""

_MODULES = ("optim", "rl", "trl")
"""Modules that are attributes without an import of their own, loaded when they are first used."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    from colo.errors import named_extra, named_misfits

    with named_extra(f"colo.{name}"):
        if name in _LAZY:
            with named_misfits():
                return getattr(importlib.import_module(_LAZY[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"colo.{name}")
    raise AttributeError(f"module 'colo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_MODULES, "__version__"])


def _version() -> str:
    """The version of the distribution, `colo-rl`; "0+unknown" for a source tree that is not installed."""
    try:
        return importlib.metadata.version("colo-rl")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


with suppress(importlib.metadata.PackageNotFoundError):
    importlib.metadata.distribution("colo")
    warnings.warn(
        "the distribution colo, another project, is installed beside colo-rl and may have replaced files of it: "
        "pip uninstall colo, and install colo-rl anew",
        stacklevel=2,
    )
