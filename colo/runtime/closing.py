"""The end of a runtime: its memory goes back, step by step, and an interrupt between two steps loses none of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch
from torch import nn

from colo.engine import Engine, SleepLevel
from colo.errors import EngineLost
from colo.memory.offload import Mover
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import ENGINE_KV_CACHE
from colo.phases.scheduler import Scheduler
from colo.runtime.turns import Turns
from colo.runtime.versions import WeightVersions
from colo.trainer.session import TrainerSession
from colo.weights.transports.base import Transport


class Closing:
    """Closes a runtime. What has begun and was interrupted goes on with the next call."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        transport: Transport,
        session: TrainerSession,
        mover: Mover,
        *,
        owns_model: bool,
    ) -> None:
        """A model that the runtime owns goes to the host, so that the device is free."""
        self.has_begun = False
        self.last = ExitStack()
        """Callbacks for when everything else has been closed."""

        self._engine = engine
        self._model = model
        self._transport = transport
        self._session = session
        self._mover = mover
        self._owns_model = owns_model
        self._steps: list[Callable[[], object]] = []
        self._is_done = False

    def begin(self, scheduler: Scheduler, turns: Turns, versions: WeightVersions) -> None:
        """Leave the present phase, and make sure that the state has somewhere to go.

        Raises: `BudgetError` when the device has no room for it; nothing has been closed then.
        """
        with suppress(Exception):  # what cannot be left in order is closed all the same
            turns.leave()
        turns.be_idle()
        if not self._owns_model and self._session.has_state_on_host:
            with suppress(Exception):  # which is raised below
                self._drop_kv_cache(scheduler)
            self._session.bring_back()  # the one step that may refuse comes before anything is closed
        self._steps = [
            # in this order: nothing may refer to memory when its owner is closed
            versions.publisher.start_over,  # whose digests refer to the engine's memory
            lambda: self._drop_kv_cache(scheduler),
            self._session.stop_watching,
            self.return_state,
            self._take_weights_home,
            self._transport.close,
            self._engine.close,
            self._mover.close,
            self.last.close,
        ]
        self._engine.before_generate = None
        self.has_begun = True
        turns.close()

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

    def _drop_kv_cache(self, scheduler: Scheduler) -> None:
        scheduler.settle()
        if scheduler.segments[ENGINE_KV_CACHE].away is None:
            return
        with suppress(EngineLost):  # its memory went with it
            self._engine.sleep(SleepLevel.KEEP_WEIGHTS)

    def _take_weights_home(self) -> None:
        """Give the model memory of its own again, where it has been living in the engine's."""
        self._transport.move_out(torch.device("cpu") if self._owns_model else self._mover.device)
        if self._owns_model:
            self._model.to("cpu")
