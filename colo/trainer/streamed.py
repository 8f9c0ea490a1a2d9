"""A step of an optimizer whose state stays in host memory, and passes through a window on the device.

torch calls an optimizer's `step` between two hooks. The first of ours makes the whole step, a range or a bucket at a
time (colo/trainer/window.py), and has torch call the class's `step` with an optimizer that has no parameters. So
nothing of the user's optimizer is replaced, and no gradient is hidden from anybody.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover
from colo.memory.parking import Parking
from colo.memory.storage import local_bytes
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import TRAINER_MASTER_WEIGHTS, Residency
from colo.trainer.backward import weakly
from colo.trainer.gradients import ParameterGradients, TakenGradients
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.optimizers import base_of, parameters_of
from colo.trainer.planes import Work, is_plane, part_of, refuse_sparse
from colo.trainer.remainders import OF_MASTERS
from colo.trainer.state import StateSegment, StepArguments, TrainerState, untraced
from colo.trainer.window import RANGE_BYTES, StateWindow
from colo.units import format_bytes

PROGRESS_CALLS = 8  # number of reports of progress in a step


class StreamedState(TrainerState):
    """State in host memory. `trainer.optimizer` is the window, of masters too; `trainer.master_weights` is empty.

    A step that fails or is interrupted has stepped some ranges and left every gradient where it was. The next call goes
    on with the others; of gradients that have changed by then, all elements are stepped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: Mover,
        *,
        region_bytes: int = RANGE_BYTES,
        resident_bytes: int = 0,
        moment_dtype: torch.dtype = torch.float32,
        agree: Callable[[int], int] = int,
        on_progress: Callable[[], None] = lambda: None,
        may_release: Callable[[], bool] | None = None,
        **events: Any,
    ) -> None:
        """`on_progress` is called several times in a step; `events` are those of `TrainerState`.

        Of the state, `resident_bytes` stay on the device until a phase needs their room. Moments in fp32 are kept in
        `moment_dtype`, rounded by numbers that ranks `agree` on.
        With `may_release`, a backward pass in which that is true steps ranges and drops their gradients.
        Raises: as `TrainerState`.
        """
        self.releases = may_release is not None
        """True while backward passes may drop gradients: until one comes in parts."""

        self._on_progress = on_progress
        self._may_release = may_release
        self._watched: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._loading: dict[torch.Tensor, dict[str, Any]] = {}
        self._taken = TakenGradients()
        self._done: dict[torch.Tensor, set[int]] = {}  # ranges of each parameter that the present step has stepped
        self._missing: dict[int, set[int]] | None = None  # by range, whose gradients the present backward pass lacks
        self._left = _LeftGradient()
        self._changes: list[tuple[torch.Tensor, int]] = []
        self._is_under_way = False
        self._resident_bytes, self._moment_dtype, self._agree = resident_bytes, moment_dtype, agree
        super().__init__(optimizer, mover, region_bytes=region_bytes, **events)

    def _make_parkings(self, region_bytes: int) -> Sequence[StateSegment]:
        self.window = StateWindow(
            self.optimizer,
            self._mover,
            range_bytes=region_bytes,
            resident_bytes=self._resident_bytes,
            moment_dtype=self._moment_dtype,
            agree=self._agree,
        )
        # masters pass through the window with the rest: the second segment stays, empty, since phases ask for it by
        # name
        segments: list[StateSegment] = [self.window, Parking(TRAINER_MASTER_WEIGHTS, self._mover)]
        return [*segments, self.window.resident] if self._resident_bytes else segments

    @property
    def resident_bytes(self) -> int:
        """Bytes of the state that are on the device between steps."""
        return self.window.resident.device_bytes

    def bring_back(self) -> None:
        """Make the gradients resident; state is where it belongs. Raises: `BudgetError` without room for them."""
        self.gradients.begin(Residency.RESIDENT).wait()

    def refresh(self) -> None:
        """See `TrainerState.refresh`. Makes our hook the last before a step: others may change gradients."""
        super().refresh()
        self._come_last()

    def _come_last(self) -> bool:
        """Make our hook the last before a step, unless it is; false where it was. Never while hooks are being run."""
        # hooks run in the order of registration, and another's may still clip or unscale gradients
        if next(reversed(self.optimizer._optimizer_step_pre_hooks)) == self._hooks[0].id:
            return False
        self._hooks[0].remove()
        self._hooks[0] = self.optimizer.register_step_pre_hook(untraced(self._pre_hook))
        return True

    def _find_state(self) -> None:
        # the window takes the stock itself: what lies in planes must not be parked as well
        self.window.take_in()
        self._stock = self.window.stock
        if self.releases:
            assert isinstance(self.gradients, ParameterGradients), "Megatron's optimizers are not streamed"
            # the plan counts two neighbouring ranges' gradients instead of all of them
            self.gradients.bytes_of_all = self.window.released_bytes
            for parameter in parameters_of(self.optimizer):
                if parameter.requires_grad and parameter not in self._watched:
                    self._watched[parameter] = None
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(weakly(self._on_gradient)))

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _pre_hook(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        if self._come_last():  # torch calls no further hooks, since this raises
            raise PhaseError(
                "register_step_pre_hook() was called after the backward pass, and that hook would run once weights "
                "have been stepped: nothing has been stepped yet, and step() called again runs it first"
            )
        self._before_step()
        # here and not by torch: a closure runs backward passes, whose gradients this step has to use
        args, kwargs = _with_closure_called(args, kwargs)
        with torch.no_grad():
            self._step()
        # torch now calls the class's `step`, which must find nothing left to do
        nothing = [{**group, "params": []} for group in self.optimizer.param_groups]
        return (part_of(self.optimizer, nothing, {}), *args[1:]), kwargs

    def _step(self) -> None:
        self._begin()
        waiting = [work for work in self.window.work() if self._is_waiting(work)]
        every = max(1, len(waiting) // PROGRESS_CALLS)
        for number, work in enumerate(waiting):
            if number % every == 0:
                self._on_progress()
            self._handle(work, waiting[number + 1] if number + 1 < len(waiting) else None)

    def _begin(self) -> None:
        """Begin a step, or go on with one that has not ended. Raises: `BudgetError` without host memory for its state;
        `RuntimeError`, torch's own, for sparse gradients that the class does not take. Nothing has been stepped then.
        """
        # after a step that failed: gradients that were written to since belong to another step
        self._taken.drop_changed()
        noted = set(map(id, self._taken.present()))
        # parameters that were stepped and have another gradient now: these begin a new step of their own
        again = [p for p in self._done if id(p) not in noted and p.grad is not None]
        with uninterrupted():
            # a parameter that was stepped whole has ended its step; one in the middle of it is stepped again whole
            self.window.end_part(p for p in again if len(self._done[p]) == len(self.window.work_of(p)))
            for parameter in again:
                del self._done[parameter]
        self._check_layouts(parameters_of(self.optimizer))
        if not self._is_under_way:
            # only once: `prepare` forgets what an unfinished step has stepped
            self._changes = []
            if isinstance(self.optimizer, MasterWeightsOptimizer):
                self.optimizer.take_state()
            self.window.prepare()
        self._is_under_way = True
        self.window.begin(Residency.RESIDENT)
        if isinstance(self.optimizer, MasterWeightsOptimizer):
            self.optimizer.copy_hyperparameters()

    def _check_layouts(self, parameters: Iterable[torch.Tensor]) -> None:
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters):
            refuse_sparse(base_of(self.optimizer))

    def _is_waiting(self, work: Work) -> bool:
        return any(self._is_due(parameter, work) for parameter in work.parameters)

    def _is_due(self, parameter: torch.Tensor, work: Work) -> bool:
        # no gradient, or stepped in this range already, by the backward pass or by an attempt that failed
        return parameter.grad is not None and work.number not in self._done.get(parameter, ())

    def _handle(self, work: Work, following: Work | None) -> None:
        with uninterrupted():  # the state, and the note of whose gradients were used, change together
            due = [parameter for parameter in work.parameters if self._is_due(parameter, work)]
            self.window.step(work, due, following, lambda stepped, changes: self._note(work, stepped, changes))

    def _note(self, work: Work, stepped: list[torch.Tensor], changes: list[tuple[torch.Tensor, int]]) -> None:
        self._changes += changes
        self._taken.note(stepped)
        for parameter in stepped:
            self._done.setdefault(parameter, set()).add(work.number)

    def _stepped(self) -> None:
        try:
            with uninterrupted():
                self.window.end_step()
                self._taken.clear()
                self._done.clear()
                if self._missing is not None:
                    # only where gradients were released: the loop has none left to zero, and `_LeftGradient` tells
                    # whether it tries
                    self._missing = None
                    self._left.leave(parameters_of(self.optimizer))
                self._is_under_way = False
                if self._changes:
                    self.optimizer.note_changes(self._changes)
                    self._changes = []
                # last: without room on the host it raises, and the step has ended
                self.window.begin(Residency.OFFLOADED)
            self._find_state()
        except BudgetError as error:
            warnings.warn(f"state of the optimizer stays on the device until the next step: {error}", stacklevel=2)
        finally:  # whatever became of its state, the step has been made
            self._after_step()

    @property
    def has_whole_pass(self) -> bool:
        """True where a backward pass has brought every gradient, and no step has followed."""
        return self._missing is not None and not any(self._missing.values())

    def end_step(self) -> None:
        """End a step that has not ended, if there is one: weights whose gradients are gone stay as they are."""
        if self._is_under_way:
            with torch.no_grad():
                self._stepped()

    # ---- stepping within the backward pass --------------------------------------------------------------------------

    def before_gradient(self) -> None:
        """See `TrainerState.before_gradient`. Raises: `PhaseError` for a loop that zeroes gradients."""
        self._come_last()
        if self._left.take_back() and self.releases and self._may_release is not None and self._may_release():
            raise PhaseError(
                "gradients have been zeroed, as by zero_grad(set_to_none=False), with which torch goes on to step "
                "weights that get none any more; release_gradients=True leaves nothing to zero: call zero_grad(), or "
                "leave release_gradients out"
            )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        # outside of `train()` gradients stay, and `optimizer.step()` uses them
        if self._may_release is None or not self._may_release():
            return
        if self.releases and _is_reentrant():
            self._keep_gradients()
        # `_keep_gradients` may have been called just now, or in an earlier pass
        if not self.releases:
            if parameter in self._done:
                raise PhaseError(
                    f"a weight of shape {tuple(parameter.shape)} has been stepped, and gets another part of its "
                    "gradient from a reentrant checkpoint: checkpoint with use_reentrant=False, or leave "
                    "release_gradients out"
                )
            return
        with torch.no_grad():
            self._check_layouts([parameter])
            if self._missing is None:
                self._before_step()
                self._begin()
                self._missing = {
                    work.number: {id(p) for p in work.parameters if p.requires_grad} for work in self.window.work()
                }
            for work in self.window.work_of(parameter):
                missing = self._missing[work.number]
                missing.discard(id(parameter))
                if not missing:
                    # nothing to fetch ahead: which range is complete next depends on the backward pass
                    self._handle(work, None)
                    for member in work.parameters:  # a gradient goes when the last of its ranges is stepped
                        if len(self._done.get(member, ())) == len(self.window.work_of(member)):
                            member.grad = None

    def _keep_gradients(self) -> None:
        """Drop no gradient from now on: each checkpoint of a layer adds to them, and none tells if it is the last.

        What has been stepped already is outside of checkpoints, and had the whole of its gradient.
        """
        warnings.warn(
            "release_gradients=True has no effect from now on: reentrant checkpointing brings gradients in parts, and "
            f"all {format_bytes(self._all_bytes())} of them stay until optimizer.step(). Checkpoint with "
            "use_reentrant=False",
            stacklevel=4,
        )
        self.releases = False
        assert isinstance(self.gradients, ParameterGradients)
        self.gradients.bytes_of_all = self._all_bytes

    def _all_bytes(self) -> int:
        return sum(local_bytes(p) for p in parameters_of(self.optimizer) if p.requires_grad)

    # ---- leaving and loading ----------------------------------------------------------------------------------------

    def _return_state(self, *, to_host: bool) -> None:
        self.bring_back()
        self.window.close(on_device=not to_host)
        self.gradients.hand_over()

    def _watch_loading(self) -> Any:
        hook = untraced(lambda _, given: self._before_load(given))  # before those of optimizers that take state away
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend=True)

    def _before_load(self, given: dict[str, Any]) -> dict[str, Any]:
        """Keep state of planes from torch's loading, which would put all of it on the device; give it the scalars."""
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        state = dict(given["state"])
        if isinstance(self.optimizer, MasterWeightsOptimizer):
            # checked before anything is taken: a state dict that is refused must change nothing
            self.optimizer.check_loaded(given)
        self._loading = {}
        for number, parameter in zip(numbers, parameters_of(self.optimizer), strict=False):  # torch refuses others
            if number in state and self.window.has_planes(parameter):
                self._loading[parameter] = dict(state[number])
                state[number] = {
                    k: v for k, v in state[number].items() if not is_plane(v, parameter) and k not in OF_MASTERS
                }
        return {**given, "state": state}

    def _after_load(self) -> None:
        loaded, self._loading = self._loading, {}
        self._taken.clear()
        self._done.clear()
        self._is_under_way = False
        with torch.no_grad():
            self.window.load(loaded)
        self._find_state()


def _with_closure_called(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure, if any; return arguments of `step` in which it only returns that loss again."""
    position = 1 if len(args) > 1 else None  # after the optimizer itself
    closure = args[1] if position else kwargs.get("closure")
    if not callable(closure):
        return args, dict(kwargs)
    # as torch's own `step` does: the caller may be under `no_grad`
    with torch.enable_grad():
        loss = closure()

    def again() -> Any:
        return loss

    if position:
        return (args[0], again, *args[2:]), dict(kwargs)
    return args, {**kwargs, "closure": again}


def _is_reentrant() -> bool:
    """Tell whether this is a backward pass within one of `torch.utils.checkpoint`'s reentrant kind.

    torch runs it in the thread that has called it, also where devices have threads of their own.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


class _LeftGradient:
    """A gradient of zeros, of one small parameter, by which to see that a loop zeroes gradients and does not drop them.

    `zero_grad(set_to_none=False)` has torch step weights that get no gradient any more with zeros: moments and weight
    decay still change them. Where gradients are dropped as they come nothing is left to zero.
    """

    def __init__(self) -> None:
        self._found: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def leave(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give the smallest parameter such a gradient, after a step."""
        # the smallest, since it takes memory until the next pass
        smallest = min((p for p in parameters if p.requires_grad), key=torch.Tensor.numel, default=None)
        if smallest is not None and smallest.grad is None:
            smallest.grad = torch.zeros_like(smallest)
            self._found = smallest, smallest.grad, smallest.grad._version

    def take_back(self) -> bool:
        """Drop it, before another gradient is added; true where it has been zeroed."""
        if self._found is None:
            return False
        (parameter, gradient, version), self._found = self._found, None
        # the loop has dropped it or a pass has replaced it: nothing was zeroed
        if parameter.grad is not gradient:
            return False
        parameter.grad = None
        return gradient._version != version
