"""An optimizer whose state lives in host memory and is on the device a bucket at a time, while that one is stepped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from colo.errors import BudgetError
from colo.memory.offload import Mover
from colo.phases.phase import TRAINER_MASTER_WEIGHTS, Residency
from colo.trainer.attached_state import AttachedState, StateHome, StepArguments, untraced
from colo.trainer.gradients import GradientSegment, StepsInParts, parameters_of
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.snapshot import detach_state
from colo.trainer.state_segment import StateSegment
from colo.trainer.streamed_state import StreamedState
from colo.trainer.streamed_step import StreamedStep
from colo.units import GIB, format_bytes


class StreamedOffloader(AttachedState):
    """State that passes through the device a bucket at a time. `trainer.master_weights` is empty: masters go along.

    For optimizers that are stepped in parts: see `colo.trainer.separable.why_not_separable`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: Mover,
        *,
        bucket_bytes: int = GIB,
        on_bucket: Callable[[], None] = lambda: None,
        may_release: Callable[[], bool] | None = None,
        **events: Any,
    ) -> None:
        """`on_bucket` is called before a step handles a bucket; `events` are those of `AttachedState`.

        With `may_release`, a backward pass in which that is true steps buckets and drops their gradients.
        Raises: as `AttachedState`.
        """
        self._bucket_bytes = bucket_bytes
        self._on_bucket = on_bucket
        self._loaded: list[dict[Any, Any]] | None = None
        self._is_loading_part = False
        self._may_release = may_release
        self._watched: WeakIdKeyDictionary = WeakIdKeyDictionary()
        super().__init__(optimizer, mover, **events)

    def _make_homes(self, touch: Callable[[str], None]) -> Sequence[StateHome]:
        self.state = StreamedState(self.optimizer, self._mover, bucket_bytes=self._bucket_bytes, on_touch=touch)
        self._step = StreamedStep(self.optimizer, self.state, on_bucket=self._on_bucket)
        self.state.comes_from_the_end = self._may_release is not None
        masters = StateSegment(TRAINER_MASTER_WEIGHTS, mover=self._mover, on_touch=touch, is_master=True)
        return self.state, masters

    def _steps_in_parts(self) -> StepsInParts | None:
        return self._step

    def bring_back(self) -> None:
        """Make the gradients resident; state is where it belongs."""
        if self.gradients.host_bytes:
            self.gradients.begin(Residency.RESIDENT).wait()

    def gather(self) -> None:
        """See `AttachedState.gather`; what is new goes to the host."""
        self.state.gather_all()
        if self._may_release is not None:
            self._watch_gradients()

    def _watch_gradients(self) -> None:
        assert isinstance(self.gradients, GradientSegment), "Megatron's optimizers are not streamed"
        self.gradients.expected_bytes = lambda: self.state.released_bytes
        for parameter in parameters_of(self.optimizer):
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = None
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._may_release is not None and self._may_release() and self._step.has_all_gradients(parameter):
            with torch.no_grad():
                self._before_step()
                self._step.take_in(parameter)

    def refresh(self) -> None:
        """See `AttachedState.refresh`. Makes our hook the last before a step, so that others see all gradients."""
        self._step.show_gradients()
        super().refresh()
        hooks = self.optimizer._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self._hooks[0].id:
            self._hooks[0].remove()
            self._hooks[0] = self.optimizer.register_step_pre_hook(untraced(self._pre_hook))

    def _pre_hook(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        if self._step.is_running:
            return None
        self._before_step()
        return self._step.run(args, kwargs)

    def _stepped(self) -> None:
        if self._step.is_running:
            return
        try:
            self._step.finish()
        finally:  # whatever became of its state, the step has been made
            self._after_step()

    def _return_state(self, target: torch.device, *, to_host: bool) -> None:
        self.bring_back()
        self._step.show_gradients()
        if to_host:
            with suppress(BudgetError):
                self.state.lower_all()
        else:
            self._bring_buckets(target)
        self.state.hand_over(target)

    def _bring_buckets(self, target: torch.device) -> None:
        """Give state ordinary device memory for as long as the device has room."""
        for number, bucket in enumerate(self.state.buckets):
            try:
                bucket.begin(Residency.RESIDENT).wait()
                bucket.hand_over(target)
            except (BudgetError, torch.OutOfMemoryError):
                left_bytes = sum(bucket.size_bytes for bucket in self.state.buckets[number:])
                warnings.warn(
                    f"{format_bytes(left_bytes)} of the optimizer's state stay in host memory, since {target} has no "
                    "room for them: it steps again once it is shared with a runtime, or loads its state where "
                    "there is room",
                    stacklevel=5,
                )
                return

    # ---- loading ----------------------------------------------------------------------------------------------------

    def _watch_loading(self) -> Any:
        hook = untraced(lambda _, given: self._before_load(given))  # before those of optimizers that take state away
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend=True)

    def _before_load(self, given: dict[str, Any]) -> dict[str, Any]:
        """Load one bucket's state after another, each on its way to the host, in calls of the optimizer's own.

        Raises: what loading a part raises; the optimizer has its old state then.
        """
        if self._is_loading_part:
            return detach_state(given, self.optimizer)
        optimizers = self._with_inner()
        before = [
            (dict(optimizer.state), [dict(group) for group in optimizer.param_groups]) for optimizer in optimizers
        ]
        loaded: list[dict[Any, Any]] = [{} for _ in optimizers]
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        number_of = dict(zip(map(id, parameters), numbers, strict=False))  # torch refuses other groups
        old = self.state.replace_buckets()
        self._is_loading_part = True
        try:
            for bucket in self.state.buckets:
                wanted = {number_of.get(id(parameter)) for parameter in bucket.parameters}
                part = {key: value for key, value in given["state"].items() if key in wanted}
                self.optimizer.load_state_dict({**given, "state": part})
                mine = {id(parameter) for parameter in bucket.parameters}
                loaded[0].update({key: value for key, value in self.optimizer.state.items() if id(key) in mine})
                for found, inner in zip(loaded[1:], optimizers[1:], strict=True):
                    found.update(inner.state)
                self.state.lower(bucket)
        except BaseException:
            self.state.buckets = old
            for optimizer, (state, groups) in zip(optimizers, before, strict=True):
                _replace_state(optimizer, state)
                for group, was in zip(optimizer.param_groups, groups, strict=True):
                    group.update(was)
            raise
        finally:
            self._is_loading_part = False
        self._loaded = loaded
        self.state.keep_dropped(old)
        rest = {key: value for key, value in given["state"].items() if key not in set(numbers)}
        return detach_state({**given, "state": rest}, self.optimizer)

    def _after_load(self) -> None:
        if self._is_loading_part:
            return
        loaded, self._loaded = self._loaded, None
        for optimizer, state in zip(self._with_inner(), loaded or (), strict=False):
            optimizer.state.update(state)
        self.gather()

    def _with_inner(self) -> list[torch.optim.Optimizer]:
        has_inner = isinstance(self.optimizer, MasterWeightsOptimizer)
        return [self.optimizer, self.optimizer.inner] if has_inner else [self.optimizer]


def _replace_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)
