"""Turns of an engine and a trainer on one device: who may work when, as a table, and what each change does.

IDLE  --rollout-->  ROLLOUT  --leave-->  IDLE
IDLE  --train--->   TRAIN    --leave-->  IDLE
IDLE  --step---->   STEP     ----------> IDLE     a step outside `train()` is a turn of its own
any   --close--->   CLOSED
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from enum import StrEnum
from functools import partial
from threading import RLock
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TypeVar

import torch

from colo.config import Offload
from colo.engine import EngineState
from colo.errors import BudgetError, EngineLost, PhaseError, StaleWeights
from colo.memory.communicators import Communicators, megatron_groups
from colo.memory.copy_plan import wait_for_queued
from colo.memory.probe import free_device_bytes, total_device_bytes
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import TRAINER_GRADIENTS, Need, Phase, Residency, Segment
from colo.phases.trace import EVALUATION
from colo.phases.transition import Transition
from colo.runtime.construction import Parts, check_phases, make_trainer_side, make_versions
from colo.runtime.parked import ParkedModule
from colo.trainer.master_weights import fraction_of
from colo.trainer.session import LATE
from colo.weights.mismatch import MismatchCheck

T = TypeVar("T")

_SPARE_FRACTION = 0.05
"""Share of a GPU that stays free when state comes back beside a backward pass."""

_RESOURCES = {Phase.ROLLOUT: "engine", Phase.TRAIN: "device"}


class Turn(StrEnum):
    """Who works: the engine, the trainer, nobody, or nobody ever again."""

    IDLE = "idle"
    ROLLOUT = "rollout"
    TRAIN = "train"
    STEP = "step"
    """The trainer, in an optimizer step outside `train()`; after one that has failed, nobody."""

    CLOSED = "closed"


class Verb(StrEnum):
    """Requests to a runtime, by the loop or by torch's hooks."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    LEAVE = "leave"
    GENERATE = "generate"
    BACKWARD = "backward"
    STEP = "step"
    RECOVER = "recover"
    PARK = "park"
    CLOSE = "close"


_HERE = (Turn.IDLE, Turn.STEP)
EDGES: Mapping[tuple[Verb, Turn], Turn] = MappingProxyType(
    {
        **{(Verb.ROLLOUT, turn): Turn.ROLLOUT for turn in _HERE},
        **{(Verb.TRAIN, turn): Turn.TRAIN for turn in _HERE},
        **{(Verb.LEAVE, turn): Turn.IDLE for turn in (Turn.ROLLOUT, Turn.TRAIN)},
        **{(Verb.GENERATE, turn): Turn.ROLLOUT for turn in (*_HERE, Turn.ROLLOUT)},
        **{(verb, turn): turn for turn in (*_HERE, Turn.TRAIN) for verb in (Verb.BACKWARD, Verb.PARK)},
        **{(Verb.STEP, turn): Turn.STEP for turn in _HERE},
        (Verb.STEP, Turn.TRAIN): Turn.TRAIN,
        **{(Verb.RECOVER, turn): Turn.IDLE for turn in _HERE},
        **{(Verb.CLOSE, turn): Turn.CLOSED for turn in Turn},
    }
)
"""Next turn by verb and present turn; a pair that is missing is refused with `PhaseError`."""

NOT_BESIDE = frozenset({Verb.ROLLOUT, Verb.GENERATE, Verb.RECOVER})
"""Verbs that are refused in every turn while an engine elsewhere samples beside the trainer."""

_BEGIN = (Verb.ROLLOUT, Verb.TRAIN, Verb.RECOVER)
_CALLS = {Verb.STEP: "optimizer.step()"}
_INSTEAD = {
    Verb.GENERATE: "`with rt.rollout():`",
    **dict.fromkeys((Verb.STEP, Verb.BACKWARD), "`with rt.train():`"),
    Verb.PARK: "`rt.park(module)`",
}

_BY_DCP = (
    "All learning rates are 0, as get_state_dict of torch.distributed.checkpoint sets them while it makes a step to "
    "begin an optimizer's state: call it outside of rollout(), and before that set the learning rates, which it leaves "
    "at 0, and call optimizer.zero_grad()"
)


def next_turn(verb: Verb, turn: Turn) -> Turn:
    """Whose turn it is after `verb`. Raises: `PhaseError`, with what to do, where the verb is not allowed."""
    if (verb, turn) in EDGES:
        return EDGES[verb, turn]
    call = _CALLS.get(verb, f"{verb}()")
    if turn is Turn.CLOSED:
        raise PhaseError("the runtime is closed: build a new one with colo.launch or colo.share")
    if verb in _INSTEAD:
        raise PhaseError(f"{call} inside {turn}(): leave the block first, then use {_INSTEAD[verb]}")
    raise PhaseError(
        f"{call} inside {turn}(): phases do not nest, leave the block first, or the phase with enter(None)"
    )


class Beside(Protocol):
    """Sampling beside the trainer (colo/runtime/asynchronous.py)."""

    is_over: bool
    """Its block has been left."""

    def close(self) -> None:
        """End it. Idempotent."""


class Turns:
    """Lets engine and trainer work in turns; a `TrainerEvents`.

    Thread-safe as far as turns change one after another; a thread that generates is waited for.
    """

    def __init__(self, parts: Parts, mismatch: MismatchCheck, undo: ExitStack) -> None:
        """Hook the trainer up, whose events these turns are; `undo` takes that back where something fails later.

        Raises: as `make_trainer_side`; `Unsupported` where communicators cannot be suspended.
        """
        self.turn = Turn.IDLE
        # reentrant: hooks of a phase that is being entered may ask for a phase themselves
        self.lock = RLock()
        self._pid = os.getpid()
        self._admits_in = 0  # the process whose backward passes were admitted since a phase was entered
        self._engine = parts.engine
        self._model = parts.model
        self._config = config = parts.config
        self._mismatch = mismatch
        self._source = parts.transport.source
        self._device = parts.engine.device
        self._trace = parts.trace
        self.accumulation_steps = config.accumulation_steps
        """Backward passes before each step, of which the last has parked state brought back beside it."""

        self._block: PhaseBlock[Any] | None = None
        self._is_implied = False  # nobody has asked for the phase by name
        self._entered_s = 0.0
        self._is_changing = False
        self._steps_expected = 1  # training phases with a step, between two rollouts: as many as there were last time
        self._steps_taken = 0
        groups = [*self._source.ranks.groups(), *megatron_groups()] if config.suspend_nccl else []
        # before the trainer's side: what may be refused here has hooked nothing yet
        self._communicators = Communicators(groups, self._device)
        self.side = make_trainer_side(parts, self)
        self._session, self._scheduler = self.side.session, self.side.scheduler
        undo.callback(self._session.close)
        self.versions = self._versions = make_versions(parts, self._scheduler)
        self.parked: list[ParkedModule] = []
        self.beside: Beside | None = None
        """Sampling beside the trainer, on an engine elsewhere, if there is any."""

    # ---- what the runtime asks --------------------------------------------------------------------------------------

    @property
    def is_elsewhere(self) -> bool:
        """True in a child that was forked from the runtime's process."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise `PhaseError` in a forked child, which has neither the runtime's threads nor its device."""
        if self.is_elsewhere:
            raise PhaseError(
                f"the runtime belongs to process {self._pid}, and this is {os.getpid()}, a child that was forked from "
                "it: use the runtime there, and give children what they need as plain data"
            )

    def check_open(self) -> None:
        """Raise `PhaseError` after `close()`, and in a forked child."""
        self.check_process()
        if self.turn is Turn.CLOSED:
            next_turn(Verb.LEAVE, self.turn)

    def require(self, verb: Verb, *, called: str | None = None) -> None:
        """Raise `PhaseError` unless `verb` is allowed now. What nobody is in by name is left first.

        That is a phase whose block has ended or that was implied, and sampling beside the trainer whose block has.
        `called` is what the loop has called.
        """
        self.check_process()
        if self.beside is not None and self.beside.is_over:
            self.beside.close()  # what ended its block did not let it end
        is_over = self._block is not None and self._block.is_over  # what ended the block did not let it leave
        # in a rollout that is over other threads may generate yet, for which its block waits
        begins = verb in _BEGIN or (verb is Verb.GENERATE and self.turn is Turn.TRAIN)
        if (begins and is_over) or (verb in (*_BEGIN, Verb.GENERATE) and self._is_implied):
            with uninterrupted():
                self._leave()
        if self.beside is not None and verb in NOT_BESIDE:
            raise PhaseError(
                f"{called or verb}() while an async_rollout() samples: take() from that, or leave its block first"
            )
        next_turn(verb, self.turn)

    def enter(self, phase: Phase | None, *, implied: bool = False) -> None:
        """Go to a phase, out of whichever there is, or with `None` just leave that. Idempotent.

        A hook that is called while the phase changes may call it: nothing happens then. `implied`: see `Runtime.enter`.
        """
        self.check_process()
        # the lock first: Ctrl-C must be able to end the wait for a thread that generates
        with self.lock, uninterrupted():
            if self.phase is not phase and not self._is_changing:
                self.leave()
                if phase is not None:
                    self._enter(phase)
                    self._is_implied = implied

    def leave(self) -> None:
        """Leave the phase that there is, if any."""
        if self.phase is Phase.TRAIN and not self._is_implied:
            # no block tells whether an error has ended its pass: the pass does, or the error that is being handled
            self._session.note_end(in_order=self._session.has_whole_pass and sys.exception() is None)
        if self.phase is not None:
            self._leave()

    @property
    def phase(self) -> Phase | None:
        """The phase that was entered and not left."""
        return {Turn.ROLLOUT: Phase.ROLLOUT, Turn.TRAIN: Phase.TRAIN}.get(self.turn)

    def be_idle(self) -> None:
        """Let nobody work: a step outside `train()` may have failed on its way."""
        if self.turn is Turn.STEP:
            self.turn = Turn.IDLE
        self._scheduler.leave()

    def park(self, parked: ParkedModule) -> Transition:
        """Let a module leave for rollouts from now on; returns the plan of the next one.

        Raises: `PhaseError` inside a rollout or after `close()`, `ValueError` for a name that is taken, `BudgetError`
        when a phase would not fit with it.
        """
        segment = parked.segment
        with self.lock, uninterrupted():
            self.require(Verb.PARK)  # in a rollout it is resident, which that one's plan does not know
            if segment.name in self._scheduler.segments:
                raise ValueError(f"there is a segment {segment.name!r} already: give park() another name")
            self._scheduler.add(segment, {Phase.TRAIN: Need.RESIDENT})
            try:
                plan = check_phases(self._scheduler)
            except BaseException:
                self._scheduler.remove(segment.name)
                raise
            self.parked.append(parked)
            return plan

    # ---- an engine that samples beside the trainer ------------------------------------------------------------------

    def begin_beside(self, beside: Beside) -> None:
        """Publish, and let the engine sample while the trainer works. Raises: `PhaseError` inside a phase."""
        with self.lock:
            self.require(Verb.ROLLOUT, called="async_rollout")
            try:
                with uninterrupted():
                    self.be_idle()
                    self.beside = beside
                    self.publish_beside()
            except BaseException:  # an interrupt that has waited until the engine was ready, too
                self.end_beside(beside)
                raise

    def end_beside(self, beside: Beside) -> None:
        """Pause the engine, which samples no more. Idempotent. Does nothing in a forked child."""
        if self.beside is beside and not self.is_elsewhere:
            self.beside = None
            self._pause_unless_lost()

    @property
    def is_alone(self) -> bool:
        """True without other ranks of the trainer."""
        return self._source.ranks.is_alone

    def require_beside(self, beside: Beside) -> None:
        """Raise `PhaseError` outside its block, and where the trainer works."""
        self.check_process()
        if self.beside is not beside:
            raise PhaseError("an async_rollout() is used within its block: `with rt.async_rollout() as rollout:`")
        if self.turn is Turn.TRAIN:
            raise PhaseError("put() or take() inside train(): leave the block first")

    def publish_beside(self) -> None:
        """Publish the present weights to an engine that samples nothing at the moment, unless it has them."""
        with self.lock, uninterrupted(), torch.inference_mode(False):
            self.be_idle()
            self._look_again()
            self._versions.notice_and_compare()
            if not self._versions.is_engine_current():
                self._versions.publish()
                wait_for_queued(self._device)
            self._engine.resume()  # a publication pauses it

    def close(self) -> None:
        """Allow nothing any more."""
        self.turn = next_turn(Verb.CLOSE, self.turn)

    def begin(self, block: PhaseBlock[Any]) -> None:
        """Enter the phase of a block, or none. Threads that generate meanwhile are waited for."""
        self.check_process()  # before the lock, which a thread of the parent may have held
        with self.lock:
            try:
                with uninterrupted():
                    self._enter(block.phase)
                    self._block = block
            except BaseException:  # an interrupt that has waited until the phase was entered
                # `__exit__` will not run, since `__enter__` raises
                if self._block is block:
                    self.end(block, None)
                raise

    def end(self, block: PhaseBlock[Any], raised: BaseException | None) -> None:
        """Leave the phase of a block, unless that has been done by other means. Does nothing in a forked child."""
        if self.is_elsewhere:
            return
        with ExitStack() as held:
            try:
                held.enter_context(self.lock)
            finally:  # also when an interrupt ends the wait for other threads
                try:
                    with uninterrupted():
                        if self._block is block:
                            if block.phase is Phase.TRAIN:
                                self._session.note_end(in_order=raised is None)
                            self._leave()
                except Exception as error:
                    if raised is None:
                        raise
                    raised.add_note(f"and {block.phase}() could not be left in order: {type(error).__name__}: {error}")

    # ---- changes of turns -------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        verb = Verb.ROLLOUT if phase is Phase.ROLLOUT else Verb.TRAIN
        # What is made on the way in or out outlives a caller's inference mode, in which it could not be written later.
        with torch.inference_mode(False):
            self.require(verb)
            self._is_changing, self._admits_in = True, 0
            try:
                self.be_idle()  # a step outside `train()` that failed has left its phase entered
                (self._enter_rollout if phase is Phase.ROLLOUT else self._enter_train)()
            finally:
                self._is_changing = False
            # an entry that failed has left the turn as it was
            self.turn, self._block, self._entered_s = next_turn(verb, self.turn), None, self._trace.now_s()

    def _leave(self) -> None:
        phase = self.phase
        assert phase is not None, "there is a phase to leave"
        try:
            trained = phase is Phase.ROLLOUT or self._session.has_trained
            name = phase if trained else EVALUATION
            self._trace.add(name, self._entered_s, category="phase", phase=phase, resource=_RESOURCES[phase])
            with torch.inference_mode(False):
                (self._leave_rollout if phase is Phase.ROLLOUT else self._leave_train)()
        finally:
            # also after an error: the phase is over, whatever could not be put back
            self.turn, self._block, self._is_implied = Turn.IDLE, None, False

    def _enter_rollout(self) -> None:
        # only after steps: an evaluation between two rollouts says nothing about how many there will be
        if self._steps_taken:
            self._steps_expected, self._steps_taken = self._steps_taken, 0
        with self._trace.span("switch to rollout", category="switch", phase=Phase.ROLLOUT):
            self._look_again()  # first: an optimizer's late gather may still write weights
            self._versions.notice_and_compare()
            is_current = self._versions.is_engine_current()
            with self._source.ranks.fail_together("entering a rollout"):
                if is_current:  # else publishing checks
                    self._versions.publisher.check()
                self._engine.reset_prefix_cache()  # writes through `.data` raise no version that could be noticed
                self._scheduler.plan(Phase.ROLLOUT)  # refuse before publishing, while nothing has changed
            if not is_current:
                self._versions.publish()
            try:
                with self._source.ranks.fail_together("entering a rollout"):
                    self._scheduler.enter(Phase.ROLLOUT)
                    wait_for_queued(self._device)  # writes to weights that an engine in another process maps
                    self._engine.resume()
                # after the last collective of this entry: suspended communicators carry none
                self._communicators.suspend()
            except BaseException:
                # the engine may be awake and the KV cache mapped: both go back, whatever else fails
                with suppress(Exception):  # of which the first is raised
                    self._leave_rollout()
                raise
            self._versions.publisher.note_contents()

    def _leave_rollout(self) -> None:
        """Pause the engine, and bring gradients of an accumulation that goes on back: they may be zeroed or read now.

        Where they have no room they stay away, and `train()` and `step()` ask for them again.
        """
        with ExitStack() as left:  # each is done whatever has become of those before it
            left.callback(self.be_idle)
            left.callback(self._pause_unless_lost)
            self._communicators.resume()
        if self._session.has_parked_gradients:
            with suppress(BudgetError, torch.OutOfMemoryError):
                self._scheduler.require(TRAINER_GRADIENTS)

    def _enter_train(self) -> None:
        try:
            with self._trace.span("switch to train", category="switch", phase=Phase.TRAIN):
                self._look_again()
                with self._source.ranks.fail_together("entering a training phase"):
                    self._pause()
                    # the engine pauses before its KV cache is taken from it
                    self._scheduler.enter(Phase.TRAIN)
                    # those that a rollout parked will be added to, clipped, read or zeroed
                    if self._session.has_parked_gradients:
                        self._scheduler.require(TRAINER_GRADIENTS)
            # before the comparison, whose activations belong to the phase
            self._session.begin_training()
            self._measure_mismatch()
        except BaseException:
            self.be_idle()
            raise

    def _look_again(self, *, parameters: bool = True) -> None:
        self._session.look_again(parameters=parameters)
        for parked in self.parked:
            parked.look()

    def _leave_train(self) -> None:
        with self._trace.span("switch from train", category="switch", phase=Phase.TRAIN):
            # the peak of the phase is known now, before anything moves: torch still has what it has cached
            self._scheduler.sample()
            self._learn_working_bytes()
            self._scheduler.enter(Phase.IDLE)
            self._steps_taken += self._session.has_stepped
            # as many as came between the last two rollouts
            if self._session.has_stepped and self._steps_taken == self._steps_expected:
                gives_back = self._scheduler.offload is Offload.ALWAYS or self._scheduler.budget.drop_cache
                if gives_back and self._device.type == "cuda":
                    # Of activations and gradients, which would lie beside the KV cache. Before anything leaves: the
                    # driver frees nothing beside copies.
                    torch.cuda.empty_cache()
                # What has to leave for the rollout starts leaving now, beside other work. The loop may still read, clip
                # or drop its gradients.
                self._look_again(parameters=False)
                self._scheduler.anticipate(Phase.ROLLOUT, but_for={TRAINER_GRADIENTS})

    def _pause(self) -> None:
        # an engine elsewhere samples on: it has nothing that the trainer needs
        if self.beside is None and self._engine.state is EngineState.AWAKE:
            self._engine.pause()

    def _pause_unless_lost(self) -> None:
        with suppress(EngineLost):  # who has called it has heard of that
            self._pause()

    def _measure_mismatch(self) -> None:
        """Compare the engine's log-probabilities of the last rollout with the trainer's, on the same weights.

        Raises: `StaleWeights`, and the engine is poisoned, when it computes something else than the trainer.
        """
        # the sampled tokens came from weights that the trainer may not have any more: those are not compared
        if self._mismatch.has_noted:
            self._versions.notice_writes()  # of a loop that has changed weights since it sampled
        version = self._versions.current
        by_age = self._mismatch.measure_by_age(self._source, self._model, version=version, device=self._device)
        for age, mean in by_age.items():
            self._trace.metric(f"mismatch_age_{age}", mean)
        found = self._mismatch.measure(self._source, self._model, version=version, device=self._device)
        if found is None:
            return
        self._trace.metric("mismatch_sampled", found.mean)
        if found.own_routing is not None:
            self._trace.metric("mismatch_own_routing", found.own_routing)
        cause = self._mismatch.why_too_large(found)
        if cause is not None:
            # poisoned before it raises: a loop that catches the error must not sample on
            self._engine.poison(cause)
            raise StaleWeights(cause)

    def _learn_working_bytes(self) -> None:
        """Keep free the next time what the phase used beside its segments, on a CUDA device without a set limit."""
        beside_bytes = self._session.end_training()
        if self._config.device_limit_bytes is not None or beside_bytes is None:
            return
        if self._versions.current > 1:  # the first step makes workspaces, and compiles
            known_bytes = self._scheduler.working_bytes[Phase.TRAIN]
            self._scheduler.working_bytes[Phase.TRAIN] = max(known_bytes, beside_bytes)
            try:
                self._scheduler.plan(Phase.TRAIN, self._scheduler.ledger())
            except BudgetError as error:
                # torch may use what is not planned with: a phase that has run is not to be refused for that
                fitting_bytes = self._scheduler.working_bytes[Phase.TRAIN] - error.missing_bytes
                self._scheduler.working_bytes[Phase.TRAIN] = max(known_bytes, fitting_bytes)

    # ---- what torch's hooks tell ------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Bring everything to the device that the optimizer needs. Raises: `PhaseError` inside a rollout."""
        self.check_process()
        try:
            turn = next_turn(Verb.STEP, self.turn)
        except PhaseError as error:
            rates = [group["lr"] for group in self._session.optimizer.param_groups if "lr" in group]
            if rates and not any(rates):
                raise PhaseError(f"{error}. {_BY_DCP}") from None
            raise
        with uninterrupted():
            if turn is Turn.STEP:
                self.be_idle()
                self._enter_train()
                self.turn = turn
            # a foreach step has decayed the weights before it finds a moment on the host
            for name in (*LATE, TRAINER_GRADIENTS):
                self._scheduler.require(name)

    def after_step(self) -> None:
        """Raise the version of the weights."""
        with uninterrupted():
            self._versions.note_step()
            if not self._session.note_step():  # another optimizer's, of the same gradients
                del self._trace.steps[-1:]
            self._trace.steps.append(self._trace.now_s())
            changes = getattr(self._session.optimizer, "changes", None)
            if changes is not None:  # read when somebody asks: the device is still at the step
                self._trace.metric("changed_fraction", partial(fraction_of, *changes))
            self._scheduler.sample()
            if self.turn is Turn.STEP:
                self.be_idle()

    def on_gradient(self) -> None:
        """Bring gradients to the device that others are about to be added to. Raises: `PhaseError` inside a rollout."""
        # asked for every gradient: within `train()` what holds for one holds for all
        if self.turn is Turn.TRAIN and self._admits_in == os.getpid():
            return
        self.check_process()
        next_turn(Verb.BACKWARD, self.turn)
        if self.turn is Turn.TRAIN:
            self._session.end_earlier_pass()
        for name in self._session.parked_early:
            self._pause()
            self._scheduler.require(name)
        self._admits_in = self._pid

    def may_release(self) -> bool:
        """Tell whether a backward pass may step now: within `train()`."""
        return self.turn is Turn.TRAIN

    def on_backward(self, number: int) -> None:
        """Start bringing parked state back beside the last backward pass, where there is room for both.

        Raises: `PhaseError` in a second pass where the first has stepped already.
        """
        if self._session.releases_gradients and number > 1:
            raise PhaseError(
                "release_gradients=True steps within the backward pass, and this is the second one since "
                "optimizer.step(), or another part of one, from a reentrant checkpoint: call step() after every "
                "backward pass, also one that has failed, checkpoint with use_reentrant=False, or leave "
                "release_gradients out"
            )
        is_last = number == self.accumulation_steps
        if not is_last or self.turn is not Turn.TRAIN or not self._scheduler.side_by_side or self._session.is_streamed:
            return
        for name in LATE:
            segment = self._scheduler.segments[name]
            # three questions: is it away, does the plan have room, and does the driver have it too
            if segment.residency is Residency.OFFLOADED and self._scheduler.fits(name) and self._is_roomy(segment):
                try:
                    self._scheduler.fetch(name)
                except BudgetError:
                    return  # the driver has less than the plan assumed: the step will ask again, without activations

    def on_progress(self) -> None:
        """Take back what departures have freed."""
        self._scheduler.sample()

    def _is_roomy(self, segment: Segment) -> bool:
        """Tell if the driver has the segment's bytes and some to spare, which the backward pass may yet ask for."""
        spare_bytes = int(_SPARE_FRACTION * total_device_bytes(self._device))
        return self._device.type != "cuda" or free_device_bytes(self._device) > segment.size_bytes + spare_bytes


class PhaseBlock(AbstractContextManager[T]):
    """A block within which the runtime is in a phase; `rollout()` and `train()` return one."""

    def __init__(self, runtime: T, turns: Turns, phase: Phase) -> None:
        self.phase = phase
        self.is_over = True
        """True unless its body is running."""

        self._runtime = runtime
        self._turns = turns

    def __enter__(self) -> T:
        self._turns.begin(self)
        # only now: a block whose entry is interrupted counts as over, and the next verb leaves it
        self.is_over = False
        return self._runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # before leaving: an interrupt within `end` leaves a block that `require` recognizes
        self.is_over = True
        self._turns.end(self, error)
