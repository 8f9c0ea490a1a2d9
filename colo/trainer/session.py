"""The trainer's side of a runtime: the state that moves, hooks on backward passes and steps, and memory used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import distributed, nn

from colo.errors import Unsupported
from colo.memory.offload import Mover
from colo.memory.probe import PeakMeter
from colo.phases.phase import TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Residency
from colo.phases.segment import Segment
from colo.trainer.attached_state import AttachedState
from colo.trainer.backward import BackwardWatch
from colo.trainer.gradients import parameters_of
from colo.trainer.inventory import Kept
from colo.trainer.megatron import MegatronOptimizers, as_torch
from colo.trainer.optimizer_state import StateOffloader
from colo.trainer.streamed_offloader import StreamedOffloader
from colo.trainer.unreduced import unreduced

LATE = (TRAINER_OPTIMIZER, TRAINER_MASTER_WEIGHTS)
"""Segments that a training phase needs only when the optimizer steps."""


class TrainerEvents(Protocol):
    """Calls from torch's hooks about a training loop. Each may raise; the loop's own call then raises too."""

    def on_backward(self, number: int) -> None:
        """The first gradient of the `number`-th backward pass since the last step is there."""

    def on_gradient(self) -> None:
        """A gradient is about to be added to what its parameter has."""

    def on_progress(self) -> None:
        """A backward pass has advanced; called about eight times in each."""

    def before_step(self) -> None:
        """The optimizer is about to step: everything that it needs has to be on the device."""

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def may_release(self) -> bool:
        """Whether a backward pass may step now, and drop gradients."""

    def on_touch(self, name: str) -> None:
        """A tensor of segment `name` is read or written while its bytes are in host memory."""


class TrainerSession:
    """The optimizer's state, gradients and backward passes of one model. `events` is told about each.

    Ownership: owns the regions of the state until `close`, which leaves an optimizer that works without colo.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: Mover,
        *,
        region_bytes: int,
        events: TrainerEvents,
        sharded_modules: Iterable[nn.Module] = (),
        streamed: bool = False,
        release_gradients: bool = False,
    ) -> None:
        """`sharded_modules` are FSDP2's, whose backward passes begin before any hook of a parameter runs.

        `streamed` state passes through the device in buckets of `region_bytes`, and with `release_gradients` does so
        within the backward pass, as gradients are complete.
        Raises: as `AttachedState`.
        """
        modules = tuple(sharded_modules)
        if release_gradients and (modules or _has_other_ranks()):
            raise Unsupported(
                "release_gradients=True steps as soon as this rank has a gradient, before ranks have reduced theirs: "
                "leave it out where there are several"
            )
        self.optimizer = as_torch(optimizer)
        self.has_stepped = False
        """Whether there was a step since `begin_training`."""

        self._gradients_before = 0
        self._events = events
        self._meter = PeakMeter(mover.device)
        told: dict[str, Any] = {
            "before_step": events.before_step,
            "after_step": events.after_step,
            "on_touch": events.on_touch,
            "other_gradients": lambda: unreduced(modules),
        }
        self._offloader: AttachedState
        if streamed:
            self._offloader = StreamedOffloader(
                self.optimizer,
                mover,
                bucket_bytes=region_bytes,
                on_bucket=events.on_progress,
                may_release=events.may_release if release_gradients else None,
                **told,
            )
        else:
            self._offloader = StateOffloader(self.optimizer, mover, region_bytes=region_bytes, **told)
        try:
            self._backward = BackwardWatch(
                parameters_of(self.optimizer),
                modules=modules,
                admit=events.on_gradient,
                on_pass=self._on_backward,
                on_progress=self._on_progress,
            )
            self._finish_step()
        except BaseException:
            self._offloader.close()
            raise

    @property
    def segments(self) -> Sequence[Segment]:
        """`trainer.optimizer`, `trainer.master_weights`, `trainer.gradients` and, which never moves, `trainer.kept`."""
        return (*self._offloader.segments, self._offloader.kept)

    @property
    def kept(self) -> Sequence[Kept]:
        """State that stays on the device in every phase, and why."""
        return tuple(self._offloader.kept.items)

    @property
    def has_state_on_host(self) -> bool:
        """Whether any state or gradient is in host memory."""
        return any(segment.host_bytes for segment in self._offloader.segments)

    @property
    def has_parked_gradients(self) -> bool:
        """Whether gradients that the loop still has are in host memory."""
        return self._offloader.gradients.residency is Residency.OFFLOADED

    @property
    def has_gradients_on_host(self) -> bool:
        """Whether gradients are in host memory, including any that the loop has dropped or replaced since."""
        return self._offloader.gradients.host_bytes > 0

    def look_again(self, *, parameters: bool = True) -> None:
        """Take in new state before it is asked to leave, and watch parameters that have begun to train.

        A collective after a step of an optimizer that has left a part of it for later: see `finish_step` of Megatron's.
        """
        self._finish_step()
        if parameters:
            self._backward.watch(parameters_of(self.optimizer))
        self._offloader.refresh()

    def _finish_step(self) -> None:
        if isinstance(self.optimizer, MegatronOptimizers):
            self.optimizer.finish_step()

    def begin_training(self) -> None:
        """Begin to measure a training phase."""
        self.has_stepped = False
        self._gradients_before = self._offloader.gradients.device_bytes
        self._meter.start()

    def end_training(self) -> int | None:
        """Bytes that the phase has used beside the segments; `None` where that is not measured (on a CPU)."""
        peak_bytes = self._meter.stop()
        if peak_bytes is None:
            return None
        # Gradients are a segment of their own and do not count, even where the loop has dropped them.
        return peak_bytes - (self._offloader.gradients.size_bytes - self._gradients_before)

    def _on_backward(self, number: int) -> None:
        self._meter.sample()
        self._events.on_backward(number)

    def _on_progress(self) -> None:
        self._meter.sample()
        self._events.on_progress()

    def note_step(self) -> None:
        """Count backward passes anew: a step has used the gradients."""
        self.has_stepped = True
        self._backward.forget()

    def bring_back(self) -> None:
        """Bring everything to the device. Raises: `BudgetError` when it has no room."""
        self._offloader.bring_back()

    def stop_watching(self) -> None:
        """Take back the hooks of backward passes. Idempotent."""
        self._backward.remove()

    def close(self, device: torch.device | None = None) -> None:
        """Return the state to ordinary memory of `device`, and the hooks with it; see `AttachedState.close`."""
        self.stop_watching()
        self._offloader.close(device)


def _has_other_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
