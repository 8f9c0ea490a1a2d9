"""Which models, optimizers and engines have an open runtime."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from colo.errors import PhaseError
from colo.trainer.optimizer_state import unwrapped
from colo.weights.sources.heads import causal_lm

_runtimes: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The open runtime of every model, optimizer and engine, by their identity."""


def check_free(parts: Mapping[str, object]) -> None:
    """Raise `PhaseError` when a part, a model, an optimizer or an engine (also a `vllm.LLM`), has an open runtime."""
    driven = [getattr(runtime.engine, "llm", None) for runtime in list(_runtimes.values())]
    for name, part in _with_stages(parts.items()):
        if id(part) in _runtimes or any(part is llm for llm in driven):
            raise PhaseError(
                f"this {name} has a runtime already: close that one before building another; colo.Runtime.of({name}) "
                "finds it, which lives as long as what it works on"
            )


def runtime_of(part: object) -> Any:
    """The open runtime of a part, or of a list of stages. Raises: `ValueError` when it has none."""
    part = part[0] if isinstance(part, (list, tuple)) and part else part  # the stages of a Megatron model
    runtime = _runtimes.get(id(causal_lm(part) if isinstance(part, nn.Module) else unwrapped(part)))
    if runtime is None:
        raise ValueError(f"this {type(part).__name__} has no open runtime")
    return runtime


def register(runtime: object, parts: Iterable[object]) -> None:
    """Remember the runtime that drives these parts, until it or they are gone."""
    _runtimes.update({id(part): runtime for _, part in _with_stages(("", part) for part in parts)})


def forget(parts: Iterable[object]) -> None:
    """Let other runtimes drive these parts."""
    for _, part in _with_stages(("", part) for part in parts):
        _runtimes.pop(id(part), None)


def _with_stages(parts: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Parts by name and, of a model that is a list of stages, each of those too."""
    for name, part in parts:
        yield name, part
        if isinstance(part, nn.ModuleList):
            yield from ((name, stage) for stage in part)
