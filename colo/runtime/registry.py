"""Registry of open runtimes by model, optimizer and engine; the three keep their runtime alive.

Model, optimizer and engine refer to their runtime, and it to them: hold one of them and `Runtime.of` finds the others;
hold none and all of them go, with the engine's processes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from colo.errors import PhaseError
from colo.trainer.state import unwrapped
from colo.weights.sources.heads import causal_lm

_open: weakref.WeakSet[Any] = weakref.WeakSet()

KEEPER = "_colo_runtime"
"""Attribute of a model, an optimizer and an engine that keeps their runtime alive."""


class _Keeper:
    """A reference to a runtime. Copies and pickles of a model have `None` in its place."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime

    def __deepcopy__(self, _: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def check_free(parts: Mapping[str, object]) -> None:
    """Raise `PhaseError` when a part, a model, an optimizer or an engine (also a `vllm.LLM`), has an open runtime."""
    taken = {id(part) for runtime in _open for part in _parts_of(runtime)}
    taken |= {id(llm) for runtime in _open if (llm := getattr(runtime.engine, "llm", None)) is not None}
    for name, part in parts.items():
        if any(id(one) in taken for one in _with_stages([part])):
            raise PhaseError(
                f"this {name} has a runtime already: close that one before building another; colo.Runtime.of({name}) "
                "finds it, which lives as long as what it works on"
            )


def runtime_of(part: object) -> Any:
    """The open runtime of a part, or of a list of stages. Raises: `ValueError` when it has none."""
    part = part[0] if isinstance(part, (list, tuple)) and part else part  # stages of a model, or optimizers
    part = causal_lm(part) if isinstance(part, nn.Module) else unwrapped(part)
    for runtime in _open:
        if any(one is part for one in _parts_of(runtime)):
            return runtime
    raise ValueError(f"this {type(part).__name__} has no open runtime")


def collect_dropped(but: object = None) -> int:
    """Free the runtimes that nobody can reach any more, and return how many others there are beside one.

    Runtimes are part of reference cycles, which Python would collect at some later time.
    """
    others = [None for runtime in _open if runtime is not but]
    if others:
        gc.collect()
    return sum(runtime is not but for runtime in _open)


def register(runtime: Any) -> None:
    """Remember the runtime until it is forgotten, or nobody holds any of its parts."""
    _open.add(runtime)
    for part in _parts_of(runtime):
        if hasattr(part, "__dict__"):
            vars(part)[KEEPER] = _Keeper(runtime)


def forget(runtime: Any) -> None:
    """Let other runtimes drive these parts. Idempotent."""
    _open.discard(runtime)
    for part in _parts_of(runtime):
        if hasattr(part, "__dict__"):
            vars(part).pop(KEEPER, None)


def _parts_of(runtime: Any) -> list[Any]:
    return list(_with_stages([runtime.model, unwrapped(runtime.optimizer), runtime.engine]))


def _with_stages(parts: Iterable[object]) -> Iterator[object]:
    """Yield parts and, of a model that is a list of stages or of several optimizers, each of those too."""
    for part in parts:
        yield part
        if isinstance(part, (nn.ModuleList, list)):
            yield from part
