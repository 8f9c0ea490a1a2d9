"""The runtime: an engine and a trainer that take turns on one device, through two verbs.

    with rt.rollout():            # weights current, KV cache there, trainer state out of the way
        completions = rt.generate(prompts, n=8)
    with rt.train():              # KV cache gone, trainer state back by the time the optimizer steps
        loss(...).backward()
        rt.optimizer.step()       # raises the version of the weights: nothing else to call

The runtime wires engine, trainer state, scheduler and publisher together. It has no loss, no data and no launcher.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from colo.config import Offload, RuntimeConfig
from colo.engine import Completion, Engine, EngineState, SleepLevel
from colo.engines.text import encode_prompts, with_text
from colo.errors import BudgetError, EngineLost, PhaseError, StaleWeights
from colo.memory.dtensor import part_bytes
from colo.memory.fence import wait_for_queued
from colo.memory.offload import Mover
from colo.memory.probe import PeakMeter, free_device_bytes, total_device_bytes, used_device_bytes
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import (
    ENGINE_KV_CACHE,
    ENGINE_WEIGHTS,
    TRAINER_ADAPTER,
    TRAINER_GRADIENTS,
    TRAINER_MASTER_WEIGHTS,
    TRAINER_OPTIMIZER,
    TRAINER_PARAMETERS,
    Phase,
    Residency,
)
from colo.phases.scheduler import Budget, Scheduler
from colo.phases.segment import FixedSegment, Segment
from colo.phases.trace import Trace
from colo.trainer.backward import BackwardWatch
from colo.trainer.gradients import parameters_of
from colo.trainer.inventory import Kept
from colo.trainer.optimizer_state import StateOffloader
from colo.weights.finite import first_not_finite, not_numbers
from colo.weights.mismatch import logprob_difference
from colo.weights.publish import Publication, Publisher
from colo.weights.sources.heads import causal_lm
from colo.weights.sources.peft import adapter_weights, is_disabled, is_peft_model
from colo.weights.transports.shared import SharedTransport
from colo.weights.watch import WriteWatch

if TYPE_CHECKING:
    from peft import PeftModel

    from colo.report.report import Report
    from colo.weights.transports.base import Transport

_SPARE_FRACTION = 0.05
"""Share of a GPU that stays free when state comes back beside a backward pass."""

_LATE = (TRAINER_OPTIMIZER, TRAINER_MASTER_WEIGHTS)

_runtimes: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()
"""The open runtime of every model, optimizer and engine, by their identity."""


def check_free(model: nn.Module, optimizer: torch.optim.Optimizer, engine: object) -> None:
    """Raise `PhaseError` when a model, an optimizer or an engine (also a `vllm.LLM`) has an open runtime."""
    driven = [getattr(runtime.engine, "llm", None) for runtime in list(_runtimes.values())]
    for name, part in (("model", model), ("optimizer", optimizer), ("engine", engine)):
        if id(part) in _runtimes or any(part is llm for llm in driven):
            raise PhaseError(
                f"this {name} has a runtime already: close that one before building another; colo.Runtime.of({name}) "
                "finds it, which lives as long as what it works on"
            )


class Runtime:
    """An engine, a model and its optimizer on one device. Made by `colo.launch` or `colo.share`.

    Ownership: owns the engine, the host arena and the memory of the trainer's state until `close`.
    Not thread-safe: one caller at a time.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        transport: Transport,
        mover: Mover,
        config: RuntimeConfig,
        capacity_bytes: int,
        tokenizer: Any = None,
        owns_model: bool = False,
    ) -> None:
        check_free(model, optimizer, engine)
        if is_peft_model(model):
            adapter_weights(cast("PeftModel", model))  # refuse what an engine could not apply
        self.engine = engine
        self.model = model
        self.optimizer = optimizer
        self.tokenizer = tokenizer
        self.config = config
        self.transport = transport
        self.trace = Trace(capacity_bytes=capacity_bytes)
        self._owns_model = owns_model
        self._device = mover.device
        self._mover = mover
        mover.trace = self.trace
        self._inside: Phase | None = None
        self._block: PhaseBlock | None = None
        self._entered_s = 0.0
        self._generating = False
        self._closing: list[Callable[[], None]] = []
        self._stepped = False
        self._gradients_before = 0
        self._to_compare: tuple[float | None, list[Completion]] = (None, [])
        self._writes_logits = isinstance(model, PreTrainedModel) or is_peft_model(model)
        self._implicit_train = False
        self._closed = False
        self._switching = RLock()
        self._meter = PeakMeter(self._device)
        self._writes = WriteWatch(transport.source)
        with ExitStack() as undo:
            self._offloader = StateOffloader(
                optimizer,
                mover,
                region_bytes=config.region_bytes,
                before_step=self._before_step,
                after_step=self._after_step,
                on_touch=lambda name: self.scheduler.require(name),
            )
            undo.callback(self._return_state)
            self._offloader.gradients.on_touch = self._return_gradients
            self.scheduler = self._make_scheduler(capacity_bytes)
            self._publisher = self._make_publisher()
            self._backward = BackwardWatch(
                parameters_of(optimizer),
                modules=transport.source.outermost_sharded(),
                admit=self._admit_gradient,
                on_pass=self._on_backward,
                on_progress=self.scheduler.sample,
            )
            undo.callback(self._backward.remove)
            self._prepare_arena()
            self._publish()
            self.engine.before_generate = self._refresh_now
            undo.pop_all()
        _runtimes.update({id(part): self for part in (model, optimizer, engine)})

    @classmethod
    def of(cls, part: object) -> Runtime:
        """The open runtime of a model, an optimizer or an engine. Raises: `ValueError` when it has none."""
        runtime = _runtimes.get(id(causal_lm(part) if isinstance(part, nn.Module) else part))
        if runtime is None:
            raise ValueError(f"this {type(part).__name__} has no open runtime")
        return runtime

    # ---- what a loop calls --------------------------------------------------------------------------------------

    def rollout(self) -> PhaseBlock:
        """Let the engine generate: publish the weights if they have changed, and make room for the KV cache.

        A block: `with rt.rollout():`. Gradients that the loop still has are as they were when it ends; `zero_grad` and
        assigning others have their effect within it.
        Raises: `PhaseError` inside another phase; `BudgetError` when the phase does not fit (nothing has changed);
        `StaleWeights` when trainer and engine cannot be shown to hold the same weights (generation then refuses).
        """
        return PhaseBlock(self, Phase.ROLLOUT)

    def train(self) -> PhaseBlock:
        """Let the trainer work: the KV cache goes if its bytes are needed, parked state comes back for the step.

        A block: `with rt.train():`. Gradients are the loop's, as without colo: drop them after the step
        (`optimizer.zero_grad()`), and no rollout has to move them.
        Raises: `PhaseError` inside another phase; `BudgetError` when the phase does not fit (nothing has changed);
        `StaleWeights` when the engine's log-probabilities of the last rollout are further from the trainer's than
        `RuntimeConfig.max_mismatch`.
        """
        return PhaseBlock(self, Phase.TRAIN)

    def enter(self, phase: Phase | None) -> None:
        """Go to `Phase.ROLLOUT` or `Phase.TRAIN`, out of whichever phase there is, or with `None` just leave that.

        Idempotent. For code that has no block to indent, such as hooks of a trainer; the blocks stand on it. What a
        block was left in by an interrupt is left by `enter(None)`.
        Raises: as `rollout` and `train`, but for being inside another phase; then no phase is entered.
        """
        if phase not in (None, Phase.ROLLOUT, Phase.TRAIN):
            raise ValueError(f"enter() takes Phase.ROLLOUT, Phase.TRAIN or None, not {phase!r}")
        phase = None if phase is None else Phase(phase)  # from a name, which is equal to it
        with self._switching, uninterrupted():
            if self._inside is not phase:
                if self._inside is not None:
                    self._leave()
                if phase is not None:
                    self._enter(phase)

    def generate(self, prompts: Sequence[str | Sequence[int]], params: Any = None, **sampling: Any) -> list[Completion]:
        """Sample completions from the current weights, in prompt order, then sample order.

        `prompts` are texts (the runtime needs a tokenizer then) or lists of token ids. Sampling options are the
        engine's, given as its `SamplingParams` or by name: `rt.generate(prompts, n=8, max_tokens=512)`.
        Outside any phase the call is a rollout of its own. Within one, weights that were written to since the last
        call, in whichever way, are published first; sharded ones are `StaleWeights` where torch has not counted it.
        Calls of several threads wait for each other.

        Raises: `PhaseError` inside `train()` or after `close()`; as `Engine.generate` for everything else.
        """
        with self._switching:
            return self._generate(prompts, params, sampling)

    def _generate(
        self, prompts: Sequence[str | Sequence[int]], params: Any, sampling: Mapping[str, Any]
    ) -> list[Completion]:
        self._require_open()
        if self._inside == Phase.TRAIN:
            raise PhaseError("generate() inside train(): leave the block first, then use `with rt.rollout():`")
        if self._inside is None:
            with self.rollout():
                return self._generate(prompts, params, sampling)
        params = self.engine.sampling_params(params, **sampling)
        token_ids = encode_prompts(prompts, self.tokenizer)
        self._refresh()
        adapter = self._adapter_to_apply()
        self._generating = True
        try:
            completions = self.engine.generate(token_ids, params, adapter=adapter)
        except FloatingPointError as error:
            self._name_not_finite(error)
            raise
        finally:
            self._generating = False
        self.scheduler.sample()
        # Of what a base has sampled without the adapter that it is trained with there is nothing to compare.
        temperature = self.engine.sampling_temperature(params)
        if temperature is not None and adapter == self._publisher.adapter_name:
            self._to_compare = (temperature, completions[: self.config.mismatch_sequences])
        return [with_text(completion, self.tokenizer) for completion in completions]

    def _name_not_finite(self, error: Exception) -> None:
        """Raise `FloatingPointError` if a weight of the trainer's is why what was sampled is not made of numbers."""
        weights = list(self.transport.source)
        if is_peft_model(self.model):
            weights += adapter_weights(cast("PeftModel", self.model)).named_tensors()
        culprit = first_not_finite(weights)
        if culprit is not None:
            raise FloatingPointError(not_numbers(culprit)) from error

    @torch.inference_mode(False)
    def recover(self) -> None:
        """Start a lost engine again on the trainer's weights, and publish their present version to it.

        Every rank of a model that is sharded over them calls, also where the engine is not the one that was lost.
        Raises: `PhaseError` inside a phase, or for an engine that is not lost or not ours to start; `BudgetError` when
        its KV cache does not fit; whatever the engine raises.
        """
        self._require_idle("recover")
        is_lost = self.engine.state is EngineState.LOST
        is_lost_elsewhere = self.transport.source.in_any_rank(is_lost) and not is_lost
        with self.transport.source.together():
            self.scheduler.plan(Phase.ROLLOUT)  # refuse while nothing has changed
            self.scheduler.anticipate(Phase.ROLLOUT)
            self.scheduler.settle()
            if not is_lost_elsewhere:
                self.engine.recover()
                self._publisher.start_over()
                self.transport.reconnect()
        self._publish()

    def log(self, **metrics: float) -> None:
        """Add one value to each of the named series of the report, such as `reward`."""
        for name, value in metrics.items():
            self.trace.metric(name, value)

    def report(self) -> Report:
        """Where time and memory went, and why the runtime chose what it did; print it, or show it in a notebook."""
        from colo.report.report import Report
        from colo.runtime.facts import facts_of

        facts = facts_of(
            self.engine,
            self.transport,
            self._publisher,
            self.trace,
            self.config,
            device=self._device,
            kept=self.kept_state,
        )
        return Report(facts=facts, trace=self.trace)

    def plot(self, path: str | Path, *, title: str = "colo run") -> Path:
        """Write the memory timeline, step times and rewards: one static HTML file, or a picture for `.png`.

        Raises: `ValueError` for another suffix, `Unsupported` for `.png` without matplotlib.
        """
        return self.report().write(Path(path), title=title)

    def close(self) -> None:
        """Leave the present phase, end the runtime and give its memory back. Idempotent.

        The optimizer keeps its state and the model its weights, in ordinary memory: on the device when they were yours
        (`share`), on the host when the runtime made the model (`launch`), so that the device is free. What was taken
        from the model before, such as a `state_dict()`, stays valid and keeps the memory that it is in.
        After an interrupt a second call goes on where the first one was interrupted.
        Raises: `BudgetError` when the device has no room for the optimizer's state, and the runtime is open as before,
        or to wake a `vllm.LLM` of yours: free some and close again.
        """
        with self._switching, torch.inference_mode(False):
            if not self._closed:
                self._begin_to_close()
            elif not self._closing:
                self.engine.close()  # which may have found no room before
            self._go_on_closing()

    def _begin_to_close(self) -> None:
        with uninterrupted():
            if self._inside is not None:
                with suppress(Exception):  # what cannot be left in order is closed all the same
                    self._leave()
            self._be_idle()
            if not self._owns_model and any(segment.host_bytes for segment in self._offloader.segments):
                with suppress(Exception):  # which is raised below
                    self._drop_kv_cache()
                self._offloader.bring_back()
            for part in (self.model, self.optimizer, self.engine):
                _runtimes.pop(id(part), None)
            self._closing = [
                self._publisher.start_over,  # whose sums refer to the engine's memory
                self._drop_kv_cache,
                self._backward.remove,
                self._return_state,
                self._take_weights_home,
                self.transport.close,
                self.engine.close,
                self._mover.close,
            ]
            self.engine.before_generate = None
            self._closed = True

    def _go_on_closing(self) -> None:
        """Do what is left of closing, and raise the first error when all of it has been tried."""
        errors: list[Exception] = []
        while self._closing:
            try:
                with uninterrupted():
                    self._closing[0]()
            except Exception as error:  # noqa: BLE001 - one failure must not keep the others' memory
                errors.append(error)
            del self._closing[0]  # not reached when interrupted: what was begun is then done again
        if errors:
            raise errors[0]

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- what a report reads ------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase the runtime is in."""
        return self.scheduler.phase

    @property
    def weights_version(self) -> int:
        """Version of the trainer's weights: the number of optimizer steps, or of other changes it has noticed."""
        return self._publisher.version

    @property
    def bytes_synced(self) -> int:
        """Bytes that all publications together have copied out of the trainer's memory, adapters included."""
        return self._publisher.bytes_synced

    @property
    def publications(self) -> Sequence[Publication]:
        """Every publication so far."""
        return tuple(self._publisher.published)

    @property
    def kept_state(self) -> Sequence[Kept]:
        """State of the optimizer that stays on the device in every phase, by name, and why."""
        return tuple(self._offloader.kept.items)

    @property
    def device(self) -> torch.device:
        """The device that engine and trainer share."""
        return self._device

    # ---- phases -------------------------------------------------------------------------------------------------

    def _begin(self, block: PhaseBlock) -> None:
        """Enter the phase of a block, or none. Threads that generate meanwhile are waited for."""
        with self._switching:
            try:
                with uninterrupted():
                    self._enter(block.phase)
                    self._block = block
            except BaseException:  # an interrupt that has waited until the phase was entered
                if self._block is block:
                    self._end(block, None)
                raise

    def _end(self, block: PhaseBlock, raised: BaseException | None) -> None:
        """Leave the phase of a block, unless that has been done by other means."""
        with ExitStack() as held:
            try:
                held.enter_context(self._switching)
            finally:  # also when an interrupt ends the wait for other threads
                try:
                    with uninterrupted():
                        if self._block is block:
                            self._leave()
                except Exception as error:
                    if raised is None:
                        raise
                    raised.add_note(f"and {block.phase}() could not be left in order: {type(error).__name__}: {error}")

    def _enter(self, phase: Phase) -> None:
        # What is made on the way in or out outlives a caller's inference mode, in which it could not be written later.
        with torch.inference_mode(False):
            self._require_idle(phase)
            (self._enter_rollout if phase is Phase.ROLLOUT else self._enter_train)()
            self._inside, self._block, self._entered_s = phase, None, self.trace.now_s()

    def _leave(self) -> None:
        phase = self._inside
        assert phase is not None, "there is a phase to leave"
        try:
            self.trace.add(phase, self._entered_s, category="phase", phase=phase, resource=_RESOURCES[phase])
            with torch.inference_mode(False):
                (self._leave_rollout if phase is Phase.ROLLOUT else self._leave_train)()
        finally:
            self._inside = self._block = None

    def _enter_rollout(self) -> None:
        with self.trace.span("switch to rollout", category="switch", phase=Phase.ROLLOUT):
            self._backward.watch(parameters_of(self.optimizer))
            self._offloader.refresh()
            self._notice_writes(compare=True)
            is_current = not self.transport.source.in_any_rank(not self._publisher.is_current)
            with self.transport.source.together():
                if is_current:  # else publishing checks
                    self._publisher.check()
                self.engine.reset_prefix_cache()  # writes through `.data` raise no version that could be noticed
                self.scheduler.plan(Phase.ROLLOUT)  # refuse before publishing, while nothing has changed
            if not is_current:
                self._publish()
            try:
                with self.transport.source.together():
                    self.scheduler.enter(Phase.ROLLOUT)
                    wait_for_queued(self._device)  # writes to weights that an engine in another process maps
                    self.engine.resume()
            except BaseException:
                with suppress(Exception):  # of which the first is raised
                    self._leave_rollout()
                raise
            self._publisher.note_contents()

    def _leave_rollout(self) -> None:
        """Gradients of an accumulation that goes on are back: outside a rollout they may be zeroed, clipped or read.

        Where they have no room they stay away, and `train()` and `step()` ask for them again.
        """
        self._be_idle()
        if self._offloader.gradients.residency is not Residency.OFFLOADED:
            return
        try:
            self._make_room_to_train()
        except (BudgetError, torch.OutOfMemoryError):
            pass
        except BaseException as error:
            with suppress(Exception):  # an engine that is lost holds no memory, and an interrupt has been heard
                self._be_idle()
                self._make_room_to_train()
            if not isinstance(error, EngineLost):
                raise
        finally:
            self._be_idle()

    def _publish(self) -> None:
        with self.transport.source.together():
            self.scheduler.enter(Phase.SYNC)
        try:
            with self.trace.span(Phase.SYNC, category="phase", phase=Phase.SYNC, resource="device"):
                self._publisher.publish()
        finally:
            self.scheduler.enter(Phase.IDLE)

    def _enter_train(self) -> None:
        with self.trace.span("switch to train", category="switch", phase=Phase.TRAIN):
            self._backward.watch(parameters_of(self.optimizer))
            self._offloader.refresh()
            with self.transport.source.together():
                self._make_room_to_train()
        self._stepped = False
        self._gradients_before = self._offloader.gradients.device_bytes
        self._meter.start()
        try:
            self._measure_mismatch()
        except BaseException:
            self._be_idle()
            raise

    def _measure_mismatch(self) -> None:
        """Compare the engine's log-probabilities of the last rollout with the trainer's, on the same weights."""
        temperature, completions = self._to_compare
        self._to_compare = (None, [])
        if not self._writes_logits:
            return
        if completions:
            self._notice_writes(compare=False)  # of a loop that has changed weights since it sampled
        comparable = [c for c in completions if c.weights_version == self.weights_version and c.token_ids]
        # Ranks of a model that is sharded over them compute each pass together.
        count = self.transport.source.fewest(0 if temperature is None else len(comparable))
        if temperature is None or not count:
            return
        difference = logprob_difference(self.model, comparable[:count], temperature=temperature, device=self._device)
        self.transport.source.reshard()
        if difference is not None:
            self.log(mismatch_sampled=difference)
            self._judge(difference, temperature)

    def _judge(self, difference: float, temperature: float) -> None:
        """Raise `StaleWeights`, and poison the engine, when it computes something else than the trainer."""
        most = self.config.max_mismatch
        if most is None or difference * min(1.0, temperature) <= most:  # which divides logits, and so differences
            return
        cause = (
            f"log-probabilities of the engine differ from the trainer's by {difference:.3g} on average at temperature "
            f"{temperature:g}, and max_mismatch allows {most:g}: the engine samples from another model. Compare "
            "dtypes, quantization, rope settings and chat templates of the two, or raise RuntimeConfig.max_mismatch"
        )
        self.engine.poison(cause)
        raise StaleWeights(cause)

    def _make_room_to_train(self) -> None:
        """Enter the phase, with gradients that a rollout parked: to be added to, clipped, read or zeroed."""
        if self.engine.state is EngineState.AWAKE:
            self.engine.pause()
        self.scheduler.enter(Phase.TRAIN)
        if self._offloader.gradients.residency is not Residency.OFFLOADED:
            return
        try:
            self.scheduler.require(TRAINER_GRADIENTS)
        except BaseException:
            self.scheduler.enter(Phase.IDLE)
            raise

    def _leave_train(self) -> None:
        with self.trace.span("switch from train", category="switch", phase=Phase.TRAIN):
            self._learn_working_bytes()
            self.scheduler.enter(Phase.IDLE)
            if self._stepped:
                if self.scheduler.offload is Offload.ALWAYS and self._device.type == "cuda":
                    # Of activations and gradients. Before anything leaves: the driver frees nothing beside copies.
                    torch.cuda.empty_cache()
                # A rollout is what follows a step: what has to leave for it starts leaving now, beside other work. The
                # loop may still read, clip or drop its gradients.
                self._offloader.refresh()
                self.scheduler.anticipate(Phase.ROLLOUT, but_for={TRAINER_GRADIENTS})

    def _before_step(self) -> None:
        if self._inside == Phase.ROLLOUT:
            raise PhaseError("optimizer.step() inside rollout(): leave the block first, then use `with rt.train():`")
        self._require_open()
        with uninterrupted():
            self._implicit_train = self._inside is None
            if self._implicit_train:
                self._require_idle("step")
                self._enter_train()
            for name in (*_LATE, TRAINER_GRADIENTS):
                self.scheduler.require(name)

    def _after_step(self) -> None:
        with uninterrupted():
            self._note_step()

    def _note_step(self) -> None:
        self._publisher.version += 1
        self._writes.accept()
        self._stepped = True
        self._backward.forget()
        fraction = getattr(self.optimizer, "changed_fraction", None)
        if fraction is not None:
            self.log(changed_fraction=fraction)
        self.scheduler.sample()
        if self._implicit_train:
            self.scheduler.enter(Phase.IDLE)

    def _admit_gradient(self) -> None:
        if self._inside == Phase.ROLLOUT:
            raise PhaseError("backward() inside rollout(): leave the block first, then use `with rt.train():`")
        if self._offloader.gradients.is_parked:
            self._return_gradients()

    def _return_gradients(self) -> None:
        """Bring gradients back that something touches. Raises: `PhaseError` where they cannot be, with what to do."""
        try:
            if Phase.ROLLOUT is self._inside or self.scheduler.phase is Phase.TRAIN:
                self.scheduler.require(TRAINER_GRADIENTS)
            else:
                self._make_room_to_train()
                self.scheduler.enter(Phase.IDLE)
        except (BudgetError, torch.OutOfMemoryError) as error:
            raise PhaseError(
                "gradients are in host memory, and have no room on the device now: zero_grad() has its effect all the "
                "same; for anything else leave the rollout and touch them within `with rt.train():`"
            ) from error

    def _on_backward(self, number: int) -> None:
        if number == self.config.accumulation_steps:
            self._prefetch()

    def _prefetch(self) -> None:
        """Start bringing parked state back beside the backward pass, where there is room for both."""
        if self._inside != Phase.TRAIN or not self.scheduler.side_by_side:
            return
        for name in _LATE:
            segment = self.scheduler.segments[name]
            if segment.residency is Residency.OFFLOADED and self.scheduler.fits(name) and self._is_roomy(segment):
                try:
                    self.scheduler.fetch(name)
                except BudgetError:
                    return  # the driver has less than the plan assumed: the step will ask again, without activations

    def _is_roomy(self, segment: Segment) -> bool:
        """Whether the driver has the segment's bytes and some to spare, which the backward pass may yet ask for."""
        spare_bytes = int(_SPARE_FRACTION * total_device_bytes(self._device))
        return self._device.type != "cuda" or free_device_bytes(self._device) > segment.size_bytes + spare_bytes

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _make_scheduler(self, capacity_bytes: int) -> Scheduler:
        budget = Budget(
            capacity_bytes=capacity_bytes,
            host_capacity_bytes=self._mover.arena.limit_bytes,
            offload=self.config.offload,
        )
        scheduler = Scheduler(
            self._all_segments(),
            budget,
            trace=self.trace,
            used_device_bytes=lambda: used_device_bytes(self._device),
        )
        scheduler.working_bytes[Phase.TRAIN] = self.config.train_working_bytes
        scheduler.working_bytes[Phase.SYNC] = self.transport.working_bytes
        return scheduler

    def _make_publisher(self) -> Publisher:
        model = self.model
        adapter = (lambda: adapter_weights(cast("PeftModel", model))) if is_peft_model(model) else None
        return Publisher(
            self.engine,
            self.transport,
            self.trace,
            adapter=adapter,
            fingerprint=self.transport.source.fingerprint,
            verify=self.config.verify,
        )

    def _all_segments(self) -> list[Segment]:
        weights = [tensor for _, tensor in self.transport.source]
        size_bytes = sum(map(part_bytes, weights))
        is_shared = self.transport.name == "shared"
        residency = Residency.SHARED if is_shared else Residency.RESIDENT
        fixed = [FixedSegment(TRAINER_PARAMETERS, size_bytes, residency)]
        base = {id(tensor) for tensor in weights}
        adapter_bytes = sum(part_bytes(p) for p in self.model.parameters() if id(p) not in base)
        if adapter_bytes:
            fixed.append(FixedSegment(TRAINER_ADAPTER, adapter_bytes, Residency.RESIDENT))
        return [*self.engine.segments, *fixed, *self._offloader.segments, self._offloader.kept]

    def _prepare_arena(self) -> None:
        """Pin host memory in the background for the state that will have to leave, so that no step waits for it."""
        if self._device.type != "cuda":
            return
        ledger = self.scheduler.ledger()  # and what it will be between a step and the rollout that follows
        for name, residency in ((ENGINE_KV_CACHE, Residency.DISCARDED), *((n, Residency.RESIDENT) for n in _LATE)):
            holding = ledger.holdings[name]
            if holding.residency is not residency and (holding.away or residency is Residency.RESIDENT):
                ledger = ledger.moved(name, residency)
        expected_bytes = self.scheduler.expected_departures(Phase.ROLLOUT, ledger)
        if 0 < expected_bytes <= self._mover.arena.limit_bytes:
            self._mover.arena.prepare(expected_bytes)

    def _learn_working_bytes(self) -> None:
        """What the phase used beside its segments is kept free the next time, on a CUDA device without a set limit."""
        peak_bytes = self._meter.stop()
        if self.config.device_limit_bytes is not None or peak_bytes is None:
            return
        if self.weights_version > 1:  # the first step makes the optimizer's state
            # Gradients are a segment of their own, also where the loop has dropped them by now.
            beside_bytes = peak_bytes - (self._offloader.gradients.size_bytes - self._gradients_before)
            known_bytes = self.scheduler.working_bytes[Phase.TRAIN]
            self.scheduler.working_bytes[Phase.TRAIN] = max(known_bytes, beside_bytes)

    def _notice_writes(self, *, compare: bool) -> None:
        """Weights that were changed without the optimizer, by `load_state_dict` for one, are a new version too.

        With `compare`, copied weights and adapters are compared, since writes through `.data` leave no other trace.
        """
        source = self.transport.source
        changed = self._writes.has_changed() or self._publisher.has_other_contents()
        if compare:  # ranks compare together, and publish together
            changed = source.in_any_rank(changed or self._publisher.has_changed_part())
        if compare and not changed:
            is_current = not source.in_any_rank(not self._publisher.is_current)
            if is_current and (self.config.verify or source.is_sharded):  # torch counts few of the writes to parts
                changed = not self._compare()
        if changed:
            self._publisher.version += 1

    def _compare(self) -> bool:
        """Whether the engine holds what the trainer does: its weights come back for that, if they are away."""
        is_away = self.scheduler.segments[ENGINE_WEIGHTS].residency in (Residency.OFFLOADED, Residency.DISCARDED)
        takes_memory = is_away or self.transport.working_bytes > 0
        with self.transport.source.together():
            if takes_memory:
                self.scheduler.enter(Phase.SYNC)
        try:
            return self.transport.is_current() and self._publisher.has_adapter()
        finally:
            if takes_memory:
                self.scheduler.enter(Phase.IDLE)

    def _refresh_now(self) -> None:
        """Refresh for a call of the engine's own `generate`, which need not come from this runtime's."""
        if self._inside is Phase.ROLLOUT and not self._generating:
            self._refresh()

    def _refresh(self) -> None:
        """Publish what has changed since the rollout began, so that no call samples from older weights."""
        with uninterrupted(), torch.inference_mode(False):
            self._publish_changes()

    def _publish_changes(self) -> None:
        self._notice_writes(compare=False)
        self._publisher.check()
        # A poisoned engine alone, of many that weights are gathered for, would wait for the others: it refuses.
        waits = self.transport.source.is_sharded and self.engine.weights_version is None
        if not self._publisher.is_current and not waits:
            self._publisher.publish()
            self.engine.resume()
            self._publisher.note_contents()
        wait_for_queued(self._device)

    def _adapter_to_apply(self) -> str | None:
        """The published adapter, or none within PEFT's `disable_adapter()`."""
        return None if is_peft_model(self.model) and is_disabled(self.model) else self._publisher.adapter_name

    def _require_open(self) -> None:
        if self._closed:
            raise PhaseError("the runtime is closed: build a new one with colo.launch or colo.share")

    def _require_idle(self, wanted: str) -> None:
        self._require_open()
        if self._block is not None and self._block.is_over:  # what ended it did not let it leave its phase
            self._leave()
        if self._inside is not None:
            raise PhaseError(
                f"{wanted}() inside {self._inside}(): phases do not nest, leave the block first, or the phase with "
                "enter(None)"
            )
        self._be_idle()  # a step outside train() may have failed on its way

    def _be_idle(self) -> None:
        if self.scheduler.phase is not Phase.IDLE:
            self.scheduler.enter(Phase.IDLE)

    def _return_state(self) -> None:
        """Return the optimizer's state to ordinary memory, and the hooks with it."""
        self._offloader.close(torch.device("cpu") if self._owns_model else None)

    def _drop_kv_cache(self) -> None:
        self.scheduler.settle()
        if self.scheduler.segments[ENGINE_KV_CACHE].away is None:
            return
        with suppress(EngineLost):  # its memory went with it
            self.engine.sleep(SleepLevel.KEEP_WEIGHTS)

    def _take_weights_home(self) -> None:
        """Give the model memory of its own again, where it has been living in the engine's."""
        if isinstance(self.transport, SharedTransport):
            self.transport.move_out(torch.device("cpu") if self._owns_model else self._device)
        if self._owns_model:
            self.model.to("cpu")


class PhaseBlock(AbstractContextManager[Runtime]):
    """What `rollout()` and `train()` return: a block within which the runtime is in that phase."""

    def __init__(self, runtime: Runtime, phase: Phase) -> None:
        self.phase = phase
        self.is_over = True
        """Whether its body is not running: it has not begun, or has ended in whichever way."""

        self._runtime = runtime

    def __enter__(self) -> Runtime:
        self._runtime._begin(self)
        self.is_over = False
        return self._runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.is_over = True
        self._runtime._end(self, error)


_RESOURCES = {Phase.ROLLOUT: "engine", Phase.TRAIN: "device"}
