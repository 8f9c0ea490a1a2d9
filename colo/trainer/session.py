"""The trainer's side of a runtime: the state that moves, hooks on backward passes and steps, and memory used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import distributed, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from colo.errors import PhaseError, Unsupported
from colo.memory.offload import Mover
from colo.memory.parking import Kept
from colo.memory.probe import PeakMeter
from colo.memory.region import pausable_bytes
from colo.memory.storage import local_bytes
from colo.phases.phase import (
    NEEDS,
    TRAINER_GRADIENTS,
    TRAINER_MASTER_WEIGHTS,
    TRAINER_OPTIMIZER,
    Need,
    Phase,
    Residency,
    Segment,
)
from colo.trainer.backward import BackwardWatch, weakly
from colo.trainer.gradients import unreduced
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.optimizers import MegatronOptimizers, OptimizerParts, as_torch, parameters_of
from colo.trainer.state import TrainerState, UncopiedHook, untraced
from colo.trainer.streamed import StreamedState
from colo.trainer.window import RANGE_BYTES

LATE = (TRAINER_OPTIMIZER, TRAINER_MASTER_WEIGHTS)
"""Segments that a training phase needs only when the optimizer steps; but see `TrainerSession.needs`."""


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
        """Tell whether a backward pass may step now, and drop gradients."""


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
        model: nn.Module | None = None,
        streamed: bool = False,
        release_gradients: bool = False,
        resident_bytes: int = 0,
        moment_dtype: torch.dtype = torch.float32,
        agree: Callable[[int], int] = int,
    ) -> None:
        """`sharded_modules` are FSDP2's, whose backward passes begin before any hook of a parameter runs.

        `streamed` state passes through the device in ranges of at most `region_bytes`, and with `release_gradients`
        does so within the backward pass, as gradients are complete. `resident_bytes` of it stay on the device; its
        fp32 moments are kept in `moment_dtype`, rounded by numbers that ranks `agree` on.
        Raises: as `TrainerState`.
        """
        modules = tuple(sharded_modules)
        if release_gradients and (modules or has_other_ranks()):
            raise Unsupported(
                "release_gradients=True steps as soon as this rank has a gradient, before ranks have reduced theirs: "
                "leave it out where there are several"
            )
        self.optimizer = as_torch(optimizer)
        self._steps_early = isinstance(self.optimizer, MegatronOptimizers)
        self.has_stepped = False  # true after a step since `begin_training`
        self._lacks_step = False  # a training phase has ended in order after a pass without a step
        self._gradients_before = self._passes_before = self._state_before = 0
        self._events = events
        self._meter = PeakMeter(mover.device, partial(pausable_bytes, mover.device))
        told: dict[str, Any] = {
            "before_step": events.before_step,
            "after_step": events.after_step,
            "other_gradients": lambda: unreduced(modules),
        }
        self.unseen = UnseenState(self.optimizer, model)  # state that is not moved
        self._backward = BackwardWatch(
            modules=modules, admit=self._on_admission, on_pass=self._on_backward, on_progress=self._on_progress
        )
        self._state: TrainerState
        try:
            # before hooks of the state, which may step: a pass that is refused must not reach them
            self._backward.watch(parameters_of(self.optimizer))
            if streamed:
                self._state = StreamedState(
                    self.optimizer,
                    mover,
                    # a window of larger ranges would only take memory: see `RANGE_BYTES`
                    region_bytes=min(region_bytes, RANGE_BYTES),
                    resident_bytes=resident_bytes,
                    moment_dtype=moment_dtype,
                    agree=agree,
                    on_progress=events.on_progress,
                    may_release=events.may_release if release_gradients else None,
                    **told,
                )
            else:
                self._state = TrainerState(self.optimizer, mover, region_bytes=region_bytes, **told)
        except BaseException:
            self.stop_watching()
            raise
        try:
            self._finish_step()
        except BaseException:
            self.close()
            raise

    @property
    def segments(self) -> Sequence[Segment]:
        """`trainer.optimizer`, `trainer.master_weights`, `trainer.gradients` and, which never moves, `trainer.kept`."""
        return (*self._state.segments, self._state.kept)

    @property
    def kept(self) -> Sequence[Kept]:
        """State that stays on the device in every phase, and why."""
        return tuple(self._state.kept.items)

    @property
    def has_state_on_host(self) -> bool:
        """True while any state or gradient is in host memory."""
        return any(segment.host_bytes for segment in self._state.segments)

    @property
    def has_parked_gradients(self) -> bool:
        """True while gradients are in host memory."""
        return self._state.gradients.is_parked

    @property
    def needs(self) -> Mapping[Phase, Mapping[str, Need]]:
        """Requirements of every phase: `NEEDS`, but for Megatron's main parameters.

        Megatron sets their gradients before any hook of a step runs, and torch refuses those of another device.
        """
        if not self._steps_early:
            return NEEDS
        return {**NEEDS, Phase.TRAIN: {**NEEDS[Phase.TRAIN], TRAINER_MASTER_WEIGHTS: Need.RESIDENT}}

    @property
    def parked_early(self) -> list[str]:
        """Names of segments in host memory that are used before hooks of a step run: gradients; more in `needs`."""
        parked = [TRAINER_GRADIENTS] if self.has_parked_gradients else []
        if self._steps_early and self._state.parkings[1].residency is Residency.OFFLOADED:
            parked.append(TRAINER_MASTER_WEIGHTS)
        return parked

    def look_again(self, *, parameters: bool = True) -> None:
        """Take in new state before it is asked to leave, and watch parameters that have begun to train.

        A collective with Megatron's `overlap_param_gather`: weights of the last step are gathered first.
        """
        # first: it may write weights, of which digests are taken afterwards
        self._finish_step()
        self.unseen.look()
        if parameters:
            self._backward.watch(parameters_of(self.optimizer))
        self._state.refresh()

    def _finish_step(self) -> None:
        if isinstance(self.optimizer, MegatronOptimizers):
            self.optimizer.finish_step()

    def begin_training(self) -> None:
        """Start measuring a training phase."""
        self.has_stepped = False
        self._gradients_before = self._state.gradients.device_bytes
        self._passes_before = self._backward.passes
        self._state_before = self._state_bytes()
        self._meter.start()

    @property
    def has_trained(self) -> bool:
        """True after a step or a backward pass since `begin_training`: an evaluation has none."""
        return self.has_stepped or self._backward.passes > self._passes_before

    def end_training(self) -> int | None:
        """Bytes that the phase has used beside the segments; `None` where that is not measured (on a CPU)."""
        peak_bytes = self._meter.stop()
        if peak_bytes is None:
            return None
        # Gradients are a segment of their own and do not count, even where the loop has dropped them. Nor does state
        # that a step has made: it lies in torch's memory until it leaves for the first time.
        made_bytes = self._state_bytes() - self._state_before
        return peak_bytes - (self._state.gradients.size_bytes - self._gradients_before) - made_bytes

    def _state_bytes(self) -> int:
        """Bytes of the optimizer's state, wherever it is; of streamed state, which is made on the host, what stays."""
        if isinstance(self._state, StreamedState):
            return self._state.resident_bytes
        leaves = pytree.tree_leaves(dict(self.optimizer.state))
        return sum(local_bytes(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    @property
    def is_streamed(self) -> bool:
        """True where state passes through a window, which opens as the optimizer steps and takes no time to come."""
        return isinstance(self._state, StreamedState)

    @property
    def slot_bytes(self) -> int:
        """Bytes that the window of streamed state grows by once a part of the state stays on the device."""
        return self._state.window.slot_bytes if isinstance(self._state, StreamedState) else 0

    @property
    def releases_gradients(self) -> bool:
        """True while backward passes may step, and drop gradients."""
        return self._state.releases

    def _on_admission(self) -> None:
        # first whatever may refuse the pass, or bring parked gradients back
        self._events.on_gradient()
        self._state.before_gradient()

    def _on_backward(self, number: int) -> None:
        self._meter.sample()
        self._events.on_backward(number)

    def _on_progress(self) -> None:
        self._meter.sample()
        self._events.on_progress()

    def note_step(self) -> bool:
        """Count backward passes anew: a step has used the gradients. False for a step that none came before."""
        # zero means a further optimizer of the same step: see `Turns.after_step`
        had_passes = self._backward.passes > 0
        self.has_stepped, self._lacks_step = True, False
        self._backward.forget()
        return had_passes

    def note_end(self, *, in_order: bool) -> None:
        """Note whether a training phase has ended without an error: a pass without a step was not interrupted then."""
        self._lacks_step |= in_order and self._backward.passes > 0

    @property
    def has_whole_pass(self) -> bool:
        """True after a backward pass that has stepped all weights, and no step since."""
        return isinstance(self._state, StreamedState) and self._state.has_whole_pass

    def end_earlier_pass(self) -> None:
        """End the step of an interrupted backward pass, before another phase's first one.

        It has stepped weights already. Raises: `PhaseError` while it has gradients left.
        """
        if not self.releases_gradients or not self._backward.passes or self._lacks_step:
            return  # without its step the next pass is refused, as a second one within a block
        if any(parameter.grad is not None for parameter in parameters_of(self.optimizer)):
            raise PhaseError(
                "an earlier backward pass has left gradients, and nothing is added to those with "
                "release_gradients=True, since it may have stepped other weights before it ended or was interrupted: "
                "optimizer.zero_grad() drops them, optimizer.step() uses them"
            )
        assert isinstance(self._state, StreamedState), "others release no gradients"
        self._state.end_step()
        self._backward.forget()

    def bring_back(self) -> None:
        """Bring everything to the device. Raises: `BudgetError` when it has no room."""
        self._state.bring_back()

    def stop_watching(self) -> None:
        """Take back the hooks of backward passes, and of other optimizers' steps. Idempotent."""
        self._backward.remove()
        self.unseen.remove()

    def accept(self) -> None:
        """Keep the state as it is held now: until then `close` returns every number that was given."""
        if isinstance(self._state, StreamedState):
            self._state.window.accept()

    def close(self, device: torch.device | None = None) -> None:
        """Return the state to ordinary memory of `device`, and the hooks with it; see `TrainerState.close`."""
        self.stop_watching()
        self._state.close(device)


def has_other_ranks() -> bool:
    """Tell whether this process is one of several ranks, by torch's process group."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


# ---- state that colo does not see -----------------------------------------------------------------------------------


class UnseenState:
    """Looks for state that colo does not see, which never leaves the device, and warns of each kind once.

    It belongs to optimizers that colo was not given, or lies outside of `optimizer.state`.
    """

    def __init__(self, optimizer: Any, model: nn.Module | None) -> None:
        self.num_stepped_elsewhere = 0  # number of parameters that an optimizer unknown to colo steps
        self.num_without_state = 0
        """Number of parameters of which the optimizer has nothing in its state after a step."""

        self._optimizer = optimizer
        self._known = list(_known(optimizer))
        own = parameters_of(optimizer)
        self._own = set(map(id, own))
        others = [p for p in model.parameters() if id(p) not in self._own] if model is not None else []
        # torch's counts of in-place writes, before anybody has trained
        self._versions: dict[torch.Tensor, int] = {parameter: parameter._version for parameter in others}
        self._parameters = {id(p): p for p in [*own, *others]}
        self._stepped_elsewhere: set[int] = set()  # by optimizers of torch's that colo was not given
        self._stepped: set[int] = set()  # by the others, with a gradient
        self._is_checked = isinstance(optimizer, MegatronOptimizers)  # which has state of copies of them
        # torch keeps this hook for all optimizers of the process: bound weakly, it does not keep a dropped runtime
        self._hooks = [register_optimizer_step_post_hook(untraced(weakly(self._on_step)))]
        # loading writes to weights too: of the whole model, or of a part that another optimizer may train
        for module in model.modules() if others and model is not None else ():
            if module is model or any(
                p.requires_grad and p in self._versions for p in module.parameters(recurse=False)
            ):
                self._hooks.append(module.register_load_state_dict_post_hook(UncopiedHook(weakly(self._on_load))))
        finalize(self, _remove, self._hooks)  # of a runtime that is dropped

    def remove(self) -> None:
        """Take the hooks back. Idempotent."""
        _remove(self._hooks)

    def look(self) -> None:
        """Count such parameters, between two phases.

        Two things tell of steps of other optimizers: torch's hook for every optimizer, since torch counts no write of a
        fused step, and the count of writes, since an optimizer that is none of torch's calls no hook.
        """
        self._take_in_joined()
        stepped = {id(p) for p, version in self._versions.items() if p.requires_grad and p._version != version}
        stepped |= self._stepped_elsewhere
        if stepped and not self.num_stepped_elsewhere:
            warnings.warn(
                f"{self._described(stepped)}, are stepped by an optimizer that colo was not given: its state "
                "never leaves the device. Give all optimizers as a list",
                stacklevel=3,
            )
        self.num_stepped_elsewhere = len(stepped)
        if self._stepped and not self._is_checked:
            self._check_state()

    def _take_in_joined(self) -> None:
        """Count parameters that `add_param_group` has brought as the optimizer's own."""
        for parameter in parameters_of(self._optimizer):
            if id(parameter) not in self._own:
                self._own.add(id(parameter))
                self._parameters[id(parameter)] = parameter
                self._versions.pop(parameter, None)

    def _check_state(self) -> None:
        """Look, after the first steps, if the optimizers have made state of the parameters."""
        self._is_checked = True
        without = self._stepped - {id(p) for part in self._known for p in _with_state(part)}
        self.num_without_state = len(without)
        if without:
            kind = type(self._known[0]).__name__
            warnings.warn(
                f"{kind} has stepped {self._described(without)}, and has no state of them: any that it keeps elsewhere "
                f"never leaves the device. Keep it in {kind}.state, or give the optimizers within it as a list",
                stacklevel=4,
            )

    def _described(self, keys: set[int]) -> str:
        first = next(p for key, p in self._parameters.items() if key in keys)
        return f"{len(keys)} parameters, one of shape {tuple(first.shape)}"

    def _on_load(self, module: nn.Module) -> None:
        self._versions |= {p: p._version for p in module.parameters() if p in self._versions}

    def _on_step(self, optimizer: torch.optim.Optimizer) -> None:
        # by `state` too: a step in parts calls with objects that share the optimizer's state (`part_of`)
        if not any(optimizer is part or optimizer.state is part.state for part in self._known):
            self._stepped_elsewhere |= self._parameters.keys() & set(map(id, parameters_of(optimizer)))
        elif not self._is_checked:
            # only until the first look: afterwards it is known which have state
            self._stepped |= {id(p) for p in parameters_of(optimizer) if p.grad is not None} & self._own


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _known(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that step what colo was given, those within others too."""
    if isinstance(optimizer, OptimizerParts):
        for part in optimizer.inner:
            yield from _known(part)
        return
    yield optimizer
    if isinstance(optimizer, MasterWeightsOptimizer):
        yield optimizer.inner


def _with_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters whose state is in `optimizer.state`: all where there is any, as some share theirs."""
    has_any = any(map(_is_kept, pytree.tree_leaves(list(optimizer.state.values()))))
    for group in optimizer.param_groups:
        if has_any or (type(optimizer) is torch.optim.SGD and not group["momentum"]):  # which has none
            yield from group["params"]


def _is_kept(leaf: object) -> bool:
    return leaf.dim() > 0 if isinstance(leaf, torch.Tensor) else not isinstance(leaf, (int, float, str, type(None)))
