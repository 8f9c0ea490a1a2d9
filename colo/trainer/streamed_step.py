"""A step that handles one bucket of the state after another, while the next comes and the last one leaves.

torch calls an optimizer's `step` between two hooks. The first of ours makes the whole step, calling the class's `step`
once for each bucket with the gradients of all other parameters absent; the call in between finds no gradients, and the
second hook puts them back. So nothing of the optimizer is replaced, and each bucket is stepped by its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import Residency
from colo.trainer.gradients import StepsInParts, parameters_of
from colo.trainer.state_bucket import StateBucket
from colo.trainer.streamed_state import StreamedState
from colo.trainer.taken import TakenGradients

Hidden = list[tuple[torch.Tensor, torch.Tensor]]


class StreamedStep:
    """Steps an optimizer bucket by bucket; a `StepsInParts`.

    What fails or is interrupted within a bucket leaves every gradient where it was, and is raised by `step()`. The next
    call goes on with the bucket that failed. Gradients that have changed by then are stepped again.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, state: StreamedState, *, on_bucket: Callable[[], None]
    ) -> None:
        """`on_bucket` is called before each bucket is stepped, when the window is full."""
        self.is_running = False
        """Whether a bucket is being stepped: hooks of the optimizer have nothing to do then."""

        self._optimizer = optimizer
        self._state = state
        self._on_bucket = on_bucket
        self._taken = TakenGradients()
        self._is_under_way = False  # a step that has not ended
        self._hidden: Hidden = []
        self._changes: list[tuple[torch.Tensor, int]] = []

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Step every bucket that has gradients, and hide these; returns what the call itself is to be given.

        Raises: `BudgetError` without host memory for the state, before anything is stepped; whatever stepping a bucket
        raises.
        """
        self.show_gradients()
        args, options = _with_closure_called(args, kwargs)
        self._begin()
        waiting = [bucket for bucket in self._state.buckets if self._turn_of(bucket)]
        for bucket, following in zip(waiting, [*waiting[1:], None], strict=False):
            self._handle(bucket, following, args, options)
        with uninterrupted():
            self._hidden = _hide(parameters_of(self._optimizer))
        return args, options

    def has_all_gradients(self, parameter: torch.Tensor) -> bool:
        """Whether every parameter of the bucket of this one has its gradient."""
        members = self._state.buckets[self._number_of(parameter)].parameters
        return all(p.grad is not None for p in members if p.requires_grad)

    def take_in(self, parameter: torch.Tensor) -> None:
        """Within a backward pass, step the bucket of a parameter, which has all gradients, and drop these.

        Raises: as `run`; buckets that have been stepped stay so.
        """
        self._begin()
        number = self._number_of(parameter)
        bucket, before = self._state.buckets[number], self._state.buckets[number - 1] if number else None
        self._handle(bucket, before, (self._optimizer,), {})
        with uninterrupted():
            for member in bucket.parameters:
                member.grad = None
                self._taken.drop(member)

    def _number_of(self, parameter: torch.Tensor) -> int:
        buckets = enumerate(self._state.buckets)
        return next(n for n, bucket in buckets if any(p is parameter for p in bucket.parameters))

    def finish(self) -> None:
        """Put the gradients back and wait for the last bucket to leave, once the call itself is over."""
        with uninterrupted():
            self.show_gradients()
            self._taken.clear()
            self._is_under_way = False
            if self._changes:
                self._optimizer.note_changes(self._changes)  # type: ignore[attr-defined]
                self._changes = []
        self._state.lower_all()

    def show_gradients(self) -> None:
        """Put back gradients that were hidden from a call; those that have been assigned since stay. Idempotent."""
        with uninterrupted():
            _show(self._hidden)
            self._hidden = []

    def consumed(self) -> list[torch.Tensor]:
        """See `StepsInParts`."""
        within = self._optimizer.consumed() if isinstance(self._optimizer, StepsInParts) else []
        return [*self._taken.present(), *(parameter for parameter in within if parameter not in self._taken)]

    def mark_consumed(self, parameters: Iterable[torch.Tensor]) -> None:
        """See `StepsInParts`."""
        given = list(parameters)
        self._taken.note([parameter for parameter in given if parameter in self._taken])
        if isinstance(self._optimizer, StepsInParts):  # of a bucket that it was stepping
            self._optimizer.mark_consumed([parameter for parameter in given if parameter not in self._taken])

    def _begin(self) -> None:
        """Begin a step, or go on with one that has not ended."""
        self._taken.drop_changed()
        if not self._is_under_way:
            self._changes = []
        self._is_under_way = True
        self._state.extend()
        self._state.reserve()
        self._state.begin(Residency.RESIDENT)

    def _handle(
        self, bucket: StateBucket, following: StateBucket | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Step a bucket while the one that follows comes."""
        self._state.hold(bucket, following)
        self._on_bucket()
        with uninterrupted():  # the state, and the note of whose gradients were taken in, change together
            self._step_bucket(bucket, args, kwargs)
        self._state.lower(bucket)

    def _turn_of(self, bucket: StateBucket) -> list[torch.Tensor]:
        """The parameters of a bucket that are still to be stepped."""
        return [p for p in bucket.parameters if p.grad is not None and p not in self._taken]

    def _step_bucket(self, bucket: StateBucket, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        turn = self._turn_of(bucket)
        ids = set(map(id, turn))
        hidden = _hide(p for p in parameters_of(self._optimizer) if id(p) not in ids)
        self.is_running = True
        try:
            _class_step(self._optimizer)(*args, **kwargs)
        finally:
            self.is_running = False
            _show(hidden)
        self._taken.note(turn)
        changes = getattr(self._optimizer, "changes", None)  # of `MasterWeights`
        if changes is not None:
            self._changes.append(changes)


def _hide(parameters: Iterable[torch.Tensor]) -> Hidden:
    hidden = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in hidden:
        parameter.grad = None
    return hidden


def _show(hidden: Hidden) -> None:
    for parameter, gradient in hidden:
        if parameter.grad is None:
            parameter.grad = gradient


def _class_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The `step` of the optimizer's class, without the hooks that torch has put around it where they can be left out.

    Called with hooks, ours see that a step is running.
    """
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _with_closure_called(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `step` in which a closure, which has been called once, only returns its loss again."""
    position = 1 if len(args) > 1 else None  # after the optimizer itself
    closure = args[1] if position else kwargs.get("closure")
    if not callable(closure):
        return args, dict(kwargs)
    with torch.enable_grad():
        loss = closure()

    def again() -> Any:
        return loss

    if position:
        return (args[0], again, *args[2:]), dict(kwargs)
    return args, {**kwargs, "closure": again}
