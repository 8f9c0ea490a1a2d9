"""The version of the trainer's weights: raised, noticed, compared, and brought to the engine."""

from __future__ import annotations

import torch

from colo.config import RuntimeConfig
from colo.engine import Engine, EngineState, Recovers
from colo.engines.base import EngineBase
from colo.errors import PhaseError
from colo.memory.copy_plan import wait_for_queued
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import ENGINE_WEIGHTS, Phase, Residency
from colo.phases.scheduler import Scheduler
from colo.weights.publish import Publisher
from colo.weights.transports.base import Transport
from colo.weights.watch import WriteWatch


class WeightVersions:
    """Decides which version of the weights there is, and whether the engine has it.

    A version is raised by every optimizer step, and by every other write that is noticed: torch counts those in place,
    checksums tell of those through `.data`, and identities of tensors that were replaced.
    """

    def __init__(
        self, engine: Engine, transport: Transport, publisher: Publisher, scheduler: Scheduler, config: RuntimeConfig
    ) -> None:
        self.publisher = publisher
        self.source = transport.source
        self._engine = engine
        self._transport = transport
        self._ranks = transport.source.ranks
        self._scheduler = scheduler
        self._verify = config.verify
        self._writes = WriteWatch(transport.source)

    @property
    def current(self) -> int:
        """Version of the trainer's weights."""
        return self.publisher.version

    def note_step(self) -> None:
        """Raise the version: the optimizer has stepped."""
        self.publisher.version += 1
        # the step's own writes are in the new version: they are not to raise it again
        self._writes.accept()

    def notice_writes(self) -> None:
        """Raise the version for writes without the optimizer, as far as this rank alone sees them."""
        if self._writes.has_changed() or self.publisher.has_other_contents():
            self.publisher.version += 1

    def notice_and_compare(self) -> None:
        """Raise the version for writes on any rank, those included that only a comparison with the engine shows."""
        seen = self._writes.has_changed() or self.publisher.has_other_contents()
        # every rank takes part in each collective below, so all have to agree on whether there is one
        changed = self._ranks.any(seen or self.publisher.has_changed_shard(), "entering a rollout")
        # a comparison costs a pass over the weights: only to verify, or where ranks hold parts
        if not changed and (self._verify or not self._ranks.is_alone):  # torch counts few of the writes to parts
            changed = self.is_engine_current() and not self._is_equal()
        if changed:
            self.publisher.version += 1

    def is_engine_current(self) -> bool:
        """Tell if the engines of all ranks hold the present version."""
        return not self._ranks.any(not self.publisher.is_current, "comparing versions")

    def publish(self) -> None:
        """Make the present version the engine's, in a phase of its own. Raises: as `Publisher.publish`."""
        trace = self._scheduler.trace
        try:
            with self._ranks.fail_together("making room to publish"):
                if self.publisher.replaces_everything:
                    self._scheduler.plan(Phase.SYNC)  # refuse while nothing has changed
                    # A wake maps memory and then copies, which nothing can hide: a copy of old weights is not worth it.
                    self._scheduler.forget(ENGINE_WEIGHTS)
                # a phase of its own: a copy may need room that neither rollout nor training leaves
                self._scheduler.enter(Phase.SYNC)
            with trace.span(Phase.SYNC, category="phase", phase=Phase.SYNC, resource="device"):
                self.publisher.publish()
        finally:
            # also after a failed transfer: the engine is poisoned by then, and memory must not stay as the transfer had
            # it; nor as this rank has it where another one has refused
            self._scheduler.leave()

    def recover(self) -> None:
        """Start a lost engine again and publish to it; every rank of a sharded model calls. See `Runtime.recover`."""
        engine = self._engine
        if isinstance(engine, EngineBase):
            engine.look()  # nothing may have been asked of it since it ended
        is_lost = engine.state is EngineState.LOST
        # only the lost engine is started again, and every rank publishes: weights travel between ranks
        is_lost_elsewhere = self._ranks.any(is_lost, "recovering the engine") and not is_lost
        with self._ranks.fail_together("recovering the engine"):
            self._scheduler.plan(Phase.ROLLOUT)  # refuse while nothing has changed
            self._scheduler.anticipate(Phase.ROLLOUT)
            # bytes on their way are settled first: a starting engine measures what is free
            self._scheduler.settle()
            if not is_lost_elsewhere:
                if not isinstance(engine, Recovers):
                    raise PhaseError(f"the {engine.name} engine cannot be started again from here: nothing to recover")
                engine.recover()
                self.publisher.start_over()
                self._transport.reconnect()
        self.publish()

    def refresh(self) -> None:
        """Publish what has changed since the rollout began, so that no call samples from older weights."""
        with uninterrupted(), torch.inference_mode(False):
            self.notice_writes()
            self.publisher.check()
            # A poisoned engine alone, of many that weights are gathered for, would wait for the others: it refuses.
            waits = not self._ranks.is_alone and self._engine.weights_version is None
            if not self.publisher.is_current and not waits:
                self.publisher.publish()
                # publishing pauses the engine
                self._engine.resume()
                # digests of what has just been published: the next call compares with them
                self.publisher.note_contents()
            # a kernel that writes weights may still be queued here, and an engine in another process knows nothing of
            # this stream
            wait_for_queued(self._engine.device)

    def _is_equal(self) -> bool:
        """Compare the engine's weights with the trainer's; those that are away come back first."""
        is_away = self._scheduler.segments[ENGINE_WEIGHTS].residency in (Residency.OFFLOADED, Residency.DISCARDED)
        takes_memory = is_away or self._transport.working_bytes > 0
        try:
            with self._ranks.fail_together("making room to compare weights"):
                # memory is asked for only if it is needed: a comparison in place moves nothing
                if takes_memory:
                    self._scheduler.enter(Phase.SYNC)
            return self._transport.is_current() and not self._ranks.any(
                not self.publisher.has_adapter(), "comparing weights"
            )
        finally:
            self._scheduler.leave()  # also where another rank has refused what this one has entered
