"""The runtime: an engine and a trainer that take turns on one device, through two verbs.

    with rt.rollout():            # weights current, KV cache there, trainer state out of the way
        completions = rt.generate(prompts, n=8)
    with rt.train():              # KV cache gone, trainer state back by the time the optimizer steps
        loss(...).backward()
        rt.optimizer.step()       # raises the version of the weights: nothing else to call

The runtime wires engine, trainer state, scheduler and publisher together. It has no loss, no data and no launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from colo.config import RuntimeConfig
from colo.engine import Completion, Engine
from colo.engines.text import Prompts
from colo.memory.offload import Mover
from colo.memory.parking import Kept
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import Phase
from colo.phases.trace import Trace
from colo.runtime.closing import Closing
from colo.runtime.construction import Parts, has_logits, prepare_arena
from colo.runtime.facts import facts_of
from colo.runtime.generation import Generation
from colo.runtime.registry import check_free, collect_dropped, forget, register, runtime_of
from colo.runtime.states import Verb
from colo.runtime.turns import PhaseBlock, Turns
from colo.trainer.state import unwrapped
from colo.weights.mismatch import MismatchCheck
from colo.weights.publish import Publication
from colo.weights.sources.peft import adapter_weights, is_peft_model

if TYPE_CHECKING:
    from peft import PeftModel

    from colo.report.report import Report
    from colo.weights.transports.base import Transport


class Runtime:
    """An engine, a model and its optimizer on one device. Made by `colo.launch` or `colo.share`.

    Ownership: owns the engine, the host arena and the memory of the trainer's state until `close`.
    Lifetime: lives as long as its model, its optimizer or its engine; with all of them out of reach it goes, and so do
    the engine's processes.
    Not thread-safe, but for `generate`: one caller at a time. Every call in a forked child is a `PhaseError`.
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
        stepped = unwrapped(optimizer)
        check_free({"model": model, "optimizer": stepped, "engine": engine})
        if is_peft_model(model):
            adapter_weights(cast("PeftModel", model))  # refuse what an engine could not apply
        self.engine = engine
        self.model = model
        self.optimizer = optimizer
        self.tokenizer = tokenizer
        self.config = config
        self.transport = transport
        self.trace = mover.trace = Trace(capacity_bytes=capacity_bytes)
        self._device = mover.device
        self._has_logits = has_logits(model)
        parts = Parts(
            engine=engine,
            model=model,
            optimizer=stepped,
            transport=transport,
            mover=mover,
            config=config,
            trace=self.trace,
            capacity_bytes=capacity_bytes,
        )
        num_sequences = config.mismatch_sequences if self._has_logits else 0
        mismatch = MismatchCheck(num_sequences=num_sequences, max_mismatch=config.max_mismatch)
        with ExitStack() as undo:
            self._turns = turns = Turns(parts, mismatch, undo)
            self.scheduler, self.versions = turns.side.scheduler, turns.versions
            prepare_arena(turns.side.rollout, mover)  # pins in the background, beside the first publication
            self.versions.publish()
            self._generation = Generation(engine, model, turns, self.scheduler, self.versions, mismatch)
            self._closing = Closing(engine, model, transport, turns.side.session, mover, owns_model=owns_model)
            engine.before_generate = self._generation.before_generate
            undo.pop_all()
        self._has_begun = False
        register(self)

    @classmethod
    def of(cls, part: object) -> Runtime:
        """The open runtime of a model, an optimizer or an engine. Raises: `ValueError` when it has none."""
        return cast("Runtime", runtime_of(part))

    # ---- what a loop calls --------------------------------------------------------------------------------------

    def rollout(self) -> PhaseBlock[Runtime]:
        """Let the engine generate: publish the weights if they have changed, and make room for the KV cache.

        A block: `with rt.rollout():`. Gradients that the loop still has are as they were when it ends; `zero_grad` and
        assigning others have their effect within it.
        Raises: `PhaseError` inside another phase; `BudgetError` when the phase does not fit (nothing has changed);
        `StaleWeights` when trainer and engine cannot be shown to hold the same weights (generation then refuses).
        """
        return self._block(Phase.ROLLOUT)

    def train(self) -> PhaseBlock[Runtime]:
        """Let the trainer work: the KV cache goes if its bytes are needed, parked state comes back for the step.

        A block: `with rt.train():`. Gradients are the loop's, as without colo: drop them after the step
        (`optimizer.zero_grad()`), and no rollout has to move them.
        Raises: `PhaseError` inside another phase; `BudgetError` when the phase does not fit (nothing has changed);
        `StaleWeights` when the engine's log-probabilities of the last rollout are further from the trainer's than
        `RuntimeConfig.max_mismatch`.
        """
        return self._block(Phase.TRAIN)

    def enter(self, phase: Phase | None) -> None:
        """Go to `Phase.ROLLOUT` or `Phase.TRAIN`, out of whichever phase there is, or with `None` just leave that.

        Idempotent. For code that has no block to indent, such as hooks of a trainer; the blocks stand on it. What a
        block was left in by an interrupt is left by `enter(None)`.
        Raises: as `rollout` and `train`, but for being inside another phase; then no phase is entered.
        """
        if phase not in (None, Phase.ROLLOUT, Phase.TRAIN):
            raise ValueError(f"enter() takes Phase.ROLLOUT, Phase.TRAIN or None, not {phase!r}")
        self._turns.enter(None if phase is None else Phase(phase))  # a name is equal to a phase

    def generate(self, prompts: Prompts, params: Any = None, **sampling: Any) -> list[Completion]:
        """Sample completions from the current weights, in prompt order, then sample order.

        `prompts` are texts, conversations (the runtime needs a tokenizer for both), token ids, or what a tokenizer
        returns; see `colo.engines.text.encode_prompts`. Sampling options are the engine's, given as its
        `SamplingParams` or by name: `rt.generate(prompts, n=8, max_tokens=512)`; those that change nothing are taken
        whether the engine has them or not. A completion's text is decoded when it is read.
        Outside any phase the call is a rollout of its own. Within one, weights that were written to since the last
        call, in whichever way, are published first; sharded ones are `StaleWeights` where torch has not counted it.
        Calls of several threads wait for each other.

        Raises: `PhaseError` inside `train()` or after `close()`; as `Engine.generate` for everything else.
        """
        self._turns.check_process()
        with self._turns.lock:
            self._turns.require(Verb.GENERATE)
            if self._turns.phase is None:
                with self.rollout():
                    return self._generation.run(prompts, params, sampling, self.tokenizer)
            return self._generation.run(prompts, params, sampling, self.tokenizer)

    @torch.inference_mode(False)
    def recover(self) -> None:
        """Start a lost engine again on the trainer's weights, and publish their present version to it.

        Every rank of a model that is sharded over them calls, also where the engine is not the one that was lost.
        Raises: `PhaseError` inside a phase, or for an engine that is not lost or not ours to start; `BudgetError` when
        its KV cache does not fit; whatever the engine raises.
        """
        self._turns.require(Verb.RECOVER)
        self._turns.be_idle()
        self.versions.recover()

    def log(self, **metrics: float) -> None:
        """Add one value to each of the named series of the report, such as `reward`."""
        self._turns.check_process()
        for name, value in metrics.items():
            self.trace.metric(name, value)

    def report(self) -> Report:
        """Report where time and memory went, with the reason of each choice; print it, or show it in a notebook."""
        from colo.report.report import Report

        self._turns.check_process()
        parts = (self.engine, self.transport, self.versions.publisher, self.trace, self.config)
        facts = facts_of(
            *parts,
            device=self._device,
            kept=self.kept_state,
            why_optimizer=self._turns.side.why,
            num_stepped_elsewhere=self._turns.side.session.num_stepped_elsewhere,
            is_compared=self._has_logits,
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
        self._turns.check_process()
        with self._turns.lock, torch.inference_mode(False):
            if not self._closing.has_begun:
                with uninterrupted():
                    self._closing.begin(self.scheduler, self._turns, self.versions)
                    forget(self)
            self._closing.go_on()

    def at_close(self, function: Callable[[], object]) -> None:
        """Call a function once the runtime has been closed; of several the last one given runs first."""
        self._turns.check_process()
        self._closing.last.callback(function)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._turns.is_elsewhere:
            self.close()

    def __del__(self) -> None:
        closing = vars(self).get("_closing")
        if closing is not None and not sys.is_finalizing() and not self._turns.is_elsewhere:
            closing.abandon()

    def _block(self, phase: Phase) -> PhaseBlock[Runtime]:
        self._turns.check_process()
        if not self._has_begun:
            self._has_begun = True
            collect_dropped(but=self)  # such as that of the same notebook cell, run before
        return PhaseBlock(self, self._turns, phase)

    # ---- what a report reads ------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Present phase."""
        return self.scheduler.phase

    @property
    def weights_version(self) -> int:
        """Version of the trainer's weights: the number of optimizer steps, or of other changes it has noticed."""
        return self.versions.current

    @property
    def bytes_synced(self) -> int:
        """Bytes that all publications together have copied out of the trainer's memory, adapters included."""
        return self.versions.publisher.bytes_synced

    @property
    def publications(self) -> Sequence[Publication]:
        """The last publications, at most `MOST_PUBLICATIONS` of colo/weights/publish.py."""
        return tuple(self.versions.publisher.published)

    @property
    def kept_state(self) -> Sequence[Kept]:
        """State of the optimizer that stays on the device in every phase, by name, and why."""
        return self._turns.side.session.kept

    @property
    def device(self) -> torch.device:
        """The device that engine and trainer share."""
        return self._device

    @property
    def accumulation_steps(self) -> int:
        """Backward passes before each `optimizer.step()`; may be changed between steps."""
        return self._turns.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: int) -> None:
        self._turns.accumulation_steps = replace(self.config, accumulation_steps=steps).accumulation_steps
