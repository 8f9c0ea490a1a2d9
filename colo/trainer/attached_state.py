"""What an optimizer keeps, attached to a runtime through torch's own hooks, wherever its state lies between steps."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from colo.errors import BudgetError, Unsupported
from colo.memory.offload import Mover
from colo.phases.phase import TRAINER_KEPT, Residency, check_move
from colo.phases.segment import Done, Move, Segment
from colo.trainer.gradient_buffers import GradientBuffers
from colo.trainer.gradients import GradientSegment, StepsInParts
from colo.trainer.inventory import Kept
from colo.trainer.megatron import MegatronOptimizers, as_torch
from colo.trainer.snapshot import snapshot
from colo.trainer.unreduced import HoldsGradient

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a `step`, the optimizer first."""


class StateHome(Segment, Protocol):
    """A segment that knows the tensors of the state in it."""

    @property
    def kept(self) -> Sequence[Kept]:
        """State that stays on the device, and why."""

    def settle(self) -> None:
        """Wait for every move that is under way."""

    def hand_over(self, target: torch.device) -> None:
        """Give every tensor memory of its own on `target` and close the regions: away ones become host memory."""


class KeptSegment:
    """State that never leaves the device, for example because code that colo does not know refers to its memory."""

    name = TRAINER_KEPT
    residency = Residency.RESIDENT
    away = None
    host_bytes = 0

    def __init__(self, homes: Sequence[StateHome], gradients: GradientSegment | GradientBuffers) -> None:
        self._homes = homes
        self._gradients = gradients
        self.loose: list[Kept] = []
        """State that lies in no region."""

        self.beside: Callable[[], Sequence[Kept]] = list
        """Names what an optimizer keeps beside its state."""

    @property
    def items(self) -> list[Kept]:
        """The name, the size and the reason of everything that stays."""
        kept = [*self.loose, *(kept for home in self._homes for kept in home.kept)]
        kept += [*self.beside(), *(self._gradients.kept if isinstance(self._gradients, GradientBuffers) else [])]
        if num_bytes := self._gradients.staying_bytes:
            kept.append(Kept("gradients", num_bytes, "something else refers to them, or they are sparse"))
        return kept

    @property
    def holds_state(self) -> bool:
        """Whether state of the optimizer is among it."""
        return bool(self.loose) or any(home.kept for home in self._homes)

    @property
    def size_bytes(self) -> int:
        """Bytes of everything that stays."""
        return sum(kept.size_bytes for kept in self.items)

    @property
    def device_bytes(self) -> int:
        """The same: it is on the device."""
        return self.size_bytes

    def begin(self, target: Residency) -> Move:
        """Refuse every move. Raises: `PhaseError`."""
        if target is not self.residency:
            check_move(self.name, Residency.SHARED, target)
        return Done()


class AttachedState(ABC):
    """The state of an optimizer and its gradients as segments, kept current through torch's own hooks.

    State is there when a step begins, and what is new is taken in when it ends. `state_dict()` returns a snapshot in
    host memory, valid in every phase and whatever happens to the state later; `load_state_dict` copies from what it is
    given and never keeps it.

    Ownership: owns the regions of its segments. `close` moves the state back to ordinary memory, so that the optimizer
    goes on working without colo.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: Mover,
        *,
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
        on_touch: Callable[[str], None] | None = None,
        other_gradients: Callable[[], Sequence[HoldsGradient]] = lambda: (),
    ) -> None:
        """Raises: `Unsupported` for an optimizer without torch's hooks, `BudgetError` without room for its state."""
        self.optimizer = stepped = as_torch(optimizer)
        _check_hooks(stepped)
        self._mover = mover
        self._before_step = before_step or self.bring_back
        self._after_step = after_step or (lambda: None)
        touch = on_touch or self._bring
        homes = self._make_homes(touch)
        self.gradients = self._gradients_of(stepped, touch, other_gradients)
        self._homes = homes
        self.kept = KeptSegment(homes, self.gradients)
        if isinstance(stepped, MegatronOptimizers):
            self.kept.beside = stepped.kept
        self._hooks = [
            stepped.register_step_pre_hook(untraced(self._pre_hook)),
            stepped.register_step_post_hook(untraced(lambda *_: self._stepped())),
            stepped.register_state_dict_post_hook(untraced(lambda _, state_dict: self._snapshot(state_dict))),
            stepped.register_load_state_dict_post_hook(untraced(lambda _: self._after_load())),
        ]
        self._hooks.append(self._watch_loading())
        try:
            self.gradients.refresh()
            self.gather()
        except BaseException:
            with suppress(Exception):  # state that cannot be moved back stays where it is; the optimizer works on
                self.close()
            raise

    @property
    def segments(self) -> tuple[Segment, ...]:
        """`trainer.optimizer`, `trainer.master_weights`, `trainer.gradients`."""
        return *self._homes, self.gradients

    def refresh(self) -> None:
        """Look through the state again before it leaves: user code may have taken views of it, or replaced it."""
        self.gradients.refresh()
        with suppress(BudgetError):
            self.gather()

    @abstractmethod
    def bring_back(self) -> None:
        """Make everything resident that can be, and wait for it. Raises: `BudgetError` when the device has no room."""

    @abstractmethod
    def gather(self) -> None:
        """Take new state in, and let go of what nothing refers to any more. State that cannot move is in `kept`.

        Raises: `BudgetError` when there is no room.
        """

    def close(self, device: torch.device | None = None) -> None:
        """Move the state to ordinary memory, remove the hooks and release the regions. Idempotent.

        The memory is on `device`, by default the device of the state. On the host it is the arena's own memory: state
        that has been offloaded is not copied again. May be called again after an error.
        Raises: `BudgetError` when the device has no room for the state; it is then offloaded as before.
        """
        if not self._hooks:
            return
        self._return_state(device or self._mover.device, to_host=device is not None and device.type == "cpu")
        if isinstance(self.gradients, GradientBuffers):
            self.gradients.hand_over(self._mover.device)
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    @abstractmethod
    def _make_homes(self, touch: Callable[[str], None]) -> Sequence[StateHome]:
        """The segments of the state and the masters."""

    @abstractmethod
    def _return_state(self, target: torch.device, *, to_host: bool) -> None:
        """Bring gradients and state to ordinary memory of `target`, or `to_host`."""

    def _steps_in_parts(self) -> StepsInParts | None:
        """Who knows which gradients a step that failed has taken in."""
        return self.optimizer if isinstance(self.optimizer, StepsInParts) else None

    def _pre_hook(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Have ready what a step needs; returns other arguments for it where it is to have others."""
        self._before_step()
        return None

    def _stepped(self) -> None:
        try:
            self.gather()
        except BudgetError as error:
            warnings.warn(
                f"new state of the optimizer cannot leave the device until after the next step: {error}", stacklevel=2
            )
        finally:  # whatever became of its state, the step has been made
            self._after_step()

    def _snapshot(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for home in self._homes:
            home.settle()
        return snapshot(state_dict)

    def _watch_loading(self) -> Any:
        return self.optimizer.register_load_state_dict_pre_hook(untraced(lambda _, given: self._before_load(given)))

    @abstractmethod
    def _before_load(self, given: dict[str, Any]) -> dict[str, Any]:
        """See to it that loading has room; returns what is to be loaded."""

    def _after_load(self) -> None:
        self.gather()

    def _bring(self, name: str) -> None:
        next(segment for segment in self.segments if segment.name == name).begin(Residency.RESIDENT).wait()

    def _gradients_of(
        self, stepped: Any, touch: Callable[[str], None], others: Callable[[], Sequence[HoldsGradient]]
    ) -> GradientSegment | GradientBuffers:
        if isinstance(stepped, MegatronOptimizers) and stepped.has_buffers:
            return GradientBuffers(stepped, mover=self._mover, on_touch=touch)
        made = GradientSegment(stepped, mover=self._mover, others=others, steps_in_parts=self._steps_in_parts)
        made.on_touch = lambda: touch(made.name)
        return made


def _check_hooks(optimizer: Any) -> None:
    """Raise `Unsupported` for an optimizer that torch has not initialized, such as some that wrap another one."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks") and not isinstance(optimizer, MegatronOptimizers):
        kind = type(optimizer).__name__
        raise Unsupported(
            f"{kind} does not call torch.optim.Optimizer.__init__, so it has no hooks and colo cannot tell when it "
            "steps: use the optimizer that it wraps, or call super().__init__() in its class"
        )


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, excluded from tracing: a step under `torch.compile` calls it."""
    untraced: Callable[..., Any] = torch.compiler.disable(hook)
    return untraced
