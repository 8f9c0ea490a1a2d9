"""The life of a runtime: found by model, optimizer and engine, kept alive by them, and ended step by step.

Model, optimizer and engine refer to their runtime, and it to them: hold one of them and `Runtime.of` finds the others;
hold none and all of them go, with the engine's processes.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from colo.engine import SleepLevel
from colo.engines.fleet import Fleet
from colo.engines.main_rank import MainRankEngine
from colo.errors import EngineLost, PhaseError
from colo.memory.probe import has_room
from colo.memory.region import close_all
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import ENGINE_KV_CACHE
from colo.runtime.construction import Parts
from colo.runtime.turns import Turns
from colo.trainer.state import unwrapped
from colo.units import format_bytes
from colo.weights.sources.folded import FoldedSource

# weak: a registry of strong references would keep every runtime for ever
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
    # an engine around a `vllm.LLM` is an object of its own: the LLM within tells
    taken |= {id(llm) for runtime in _open if (llm := getattr(runtime.engine, "llm", None)) is not None}
    for name, part in parts.items():
        if any(id(one) in taken for one in _with_stages([part])):
            raise PhaseError(
                f"this {name} has a runtime already: close that one before building another; colo.Runtime.of({name}) "
                "finds it, which lives as long as what it works on"
            )


def runtime_of(part: object) -> Any:
    """The open runtime of a part, of a list of stages, or of a module around a model (`torch.compile`, a value head).

    Raises: `ValueError` when it has none, or several.
    """
    part = part[0] if isinstance(part, (list, tuple)) and part else part  # stages of a model, or optimizers
    # `modules()` includes the module itself: a wrapper finds the runtime of the model within
    inside = {id(one) for one in (part.modules() if isinstance(part, nn.Module) else [unwrapped(part)])}
    found = [runtime for runtime in _open if any(id(one) in inside for one in _parts_of(runtime))]
    if len(found) != 1:
        raise ValueError(f"this {type(part).__name__} has {len(found) or 'no'} open runtime{'s' * (len(found) > 1)}")
    return found[0]


def collect_dropped(but: object = None) -> int:
    """Free the runtimes that nobody can reach any more, and return how many others there are beside one.

    Runtimes are part of reference cycles, which Python would collect at some later time.
    """
    # a list of `None`: a reference held here would keep the runtime that is to be collected
    others = [None for runtime in _open if runtime is not but]
    if others:
        gc.collect()
    return sum(runtime is not but for runtime in _open)


def register(runtime: Any) -> None:
    """Remember the runtime until it is forgotten, or nobody holds any of its parts."""
    _open.add(runtime)
    for part in _parts_of(runtime):
        if hasattr(part, "__dict__"):
            # into `__dict__`, past `nn.Module.__setattr__` and whatever a class does there
            vars(part)[KEEPER] = _Keeper(runtime)


def forget(runtime: Any) -> None:
    """Let other runtimes drive these parts. Idempotent."""
    _open.discard(runtime)
    for part in _parts_of(runtime):
        if hasattr(part, "__dict__") and (keeper := vars(part).pop(KEEPER, None)) is not None:
            keeper.runtime = None  # a shallow copy of the part has the same keeper


def end_runtime_of(part: object) -> None:
    """Close the runtime of a part, if it has one: of a start that fails once the runtime is there."""
    with suppress(ValueError):
        runtime_of(part).close()


def _parts_of(runtime: Any) -> list[Any]:
    return list(_with_stages([runtime.model, unwrapped(runtime.optimizer), runtime.engine]))


def _with_stages(parts: Iterable[object]) -> Iterator[object]:
    """Yield parts and, of a list of stages, optimizers or engines, and of a fleet, each of those too."""
    for part in parts:
        yield part
        if isinstance(part, (Fleet, MainRankEngine)):
            yield from _with_stages(part.engines)
        elif isinstance(part, (nn.ModuleList, list, tuple)):
            yield from part


# ---- the end -------------------------------------------------------------------------------------------------------


class Closing:
    """Closes a runtime. What has begun and was interrupted goes on with the next call."""

    def __init__(self, parts: Parts, turns: Turns, *, owns_model: bool) -> None:
        """A model that the runtime owns goes to the host, so that the device is free."""
        self.has_begun = False
        self.last = ExitStack()
        """Callbacks for when everything else has been closed."""

        self._turns = turns
        self._engine = parts.engine
        self._model = parts.model
        self._transport = parts.transport
        self._mover = parts.mover
        self._session, self._scheduler = turns.side.session, turns.side.scheduler
        self._owns_model = owns_model
        self._steps: list[Callable[[], object]] = []
        self._rest: list[nn.Parameter] = []
        self._room: torch.Tensor | None = None
        self._is_done = False

    def begin(self) -> None:
        """Leave the present phase, and make sure that the state has somewhere to go.

        Raises: `BudgetError` when the device has no room for it; nothing has been closed then.
        """
        with suppress(Exception):  # what cannot be left in order is closed all the same
            self._turns.leave()
        self._turns.be_idle()
        # a model of ours goes to the host, and so does its state: nothing to make room for
        if not self._owns_model and self._session.has_state_on_host:
            with suppress(Exception):  # which is raised below
                self._drop_kv_cache()
            self._session.bring_back()  # the one step that may refuse comes before anything is closed
        self._steps = [
            # in this order: nothing may refer to memory when its owner is closed
            self._turns.versions.publisher.start_over,  # whose digests refer to the engine's memory
            self._drop_kv_cache,
            self._session.stop_watching,
            self._keep_room,
            self.return_state,
            self._take_weights_home,
            self._transport.close,
            self._release_folded,
            self._give_room,
            self._engine.close,
            # what finds its room where the engine's memory was
            self._bring_the_rest,
            lambda: close_all([parked.close for parked in self._turns.parked]),
            self._mover.close,
            self.last.close,
        ]
        self._engine.before_generate = None
        self.has_begun = True
        self._turns.close()

    def go_on(self) -> None:
        """Do what is left, and raise the first error when all of it has been tried.

        When nothing is left the engine is closed again: a `vllm.LLM` of yours may have found no room to wake before.
        """
        # every step is tried: one that fails must not keep the memory of the others
        errors: list[Exception] = []
        if not self._steps:
            self._engine.close()
        while self._steps:
            try:
                with uninterrupted():
                    self._steps[0]()
            except Exception as error:  # noqa: BLE001 - one failure must not keep the others' memory
                errors.append(error)
            del self._steps[0]  # not reached when interrupted: what was begun is then done again
        self._is_done = True
        if errors:
            raise errors[0]

    def at_end(self, function: Callable[[], object]) -> None:
        """Call a function when everything has been closed: at once where that is so."""
        if self.has_begun and not self._steps:
            function()
        else:
            self.last.callback(function)

    def abandon(self) -> None:
        """End the engine of a runtime that nobody refers to any more. Its memory goes with the last tensor in it."""
        if self._is_done:
            return
        self._is_done = True
        for end in (self._transport.close, self._engine.close, self.last.close):
            with suppress(Exception):  # nobody is there to be told
                end()

    def return_state(self) -> None:
        """Return the optimizer's state to ordinary memory, and the hooks with it."""
        self._session.close(torch.device("cpu") if self._owns_model else None)

    def _drop_kv_cache(self) -> None:
        self._scheduler.settle()
        if self._scheduler.segments[ENGINE_KV_CACHE].away is None:
            return
        with suppress(EngineLost):  # its memory went with it
            self._engine.sleep(SleepLevel.KEEP_WEIGHTS)

    def _keep_room(self) -> None:
        """Hold the memory that the engine will wake to close, or state and weights that come home take it."""
        if getattr(self._engine, "wakes_to_close", False):
            size_bytes = sum(segment.size_bytes - segment.device_bytes for segment in self._engine.segments)
            with suppress(torch.OutOfMemoryError):  # which closing the engine says
                self._room = torch.empty(size_bytes, dtype=torch.uint8, device=self._mover.device)

    def _give_room(self) -> None:
        self._room = None
        if self._mover.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine takes it from the driver

    def _release_folded(self) -> None:
        """Let go of the weights with an adapter in them, which lie in the engine's memory or take as much."""
        if isinstance(self._transport.source, FoldedSource):
            self._transport.source.release()

    def _take_weights_home(self) -> None:
        """Give the model memory of its own again, where it has been living in the engine's."""
        device = torch.device("cpu") if self._owns_model else self._mover.device
        here = [p for p in self._model.parameters() if p.device == device]
        self._transport.move_out(device)
        self._rest = [p for p in here if p.device != device]
        if self._owns_model:
            self._model.to("cpu")

    def _bring_the_rest(self) -> None:
        """Move weights to the device that it had no room for beside the engine's, which were the same memory."""
        device, left_bytes = self._mover.device, 0
        for parameter in self._rest:
            # `has_room` counts what torch's allocator takes for a small tensor, 2 MiB
            if has_room(parameter, device):
                parameter.data = parameter.data.to(device)
            else:
                left_bytes += parameter.nbytes
        self._rest = []
        if left_bytes:
            warnings.warn(
                f"{format_bytes(left_bytes)} of the model's weights stay in host memory: {device} has no room for them "
                "beside the engine's. Let go of the engine, then call model.to(device)",
                stacklevel=6,
            )
