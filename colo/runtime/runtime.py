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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from colo.config import RuntimeConfig
from colo.engine import Completion, Engine, plain
from colo.engines.text import Prompts, encode_prompts, with_text
from colo.errors import Unsupported, named_extra
from colo.memory.offload import Mover
from colo.memory.parking import Kept
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import ENGINE_WEIGHTS, Phase
from colo.phases.trace import Trace
from colo.runtime.asynchronous import AsyncRollout
from colo.runtime.carried import Carried, Until, check_until, listed_keys, options_of
from colo.runtime.construction import Parts, TrainerSide, has_logits, prepare_arena
from colo.runtime.lifetime import Closing, check_free, collect_dropped, forget, register, runtime_of
from colo.runtime.parked import ParkedModule
from colo.runtime.turns import PhaseBlock, Turns, Verb
from colo.trainer.state import unwrapped
from colo.units import format_bytes
from colo.weights.mismatch import MismatchCheck, first_not_finite, not_numbers
from colo.weights.publish import Publication
from colo.weights.sources.folded import FoldedSource
from colo.weights.sources.peft import is_disabled
from colo.weights.transports.base import Transport

if TYPE_CHECKING:
    from colo.report import Report


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
        # accelerate's wrapper has no hooks
        stepped = unwrapped(optimizer)
        check_free({"model": model, "optimizer": stepped, "engine": engine})
        transport.source.adapter()  # refuse what an engine could not apply
        self.engine = engine
        self.model = model
        self.optimizer = optimizer
        self.tokenizer = tokenizer
        self.config = config
        self.transport = transport
        self.trace = mover.trace = Trace(capacity_bytes=capacity_bytes)
        self._device = mover.device
        self._mover = mover
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
        self._mismatch = mismatch = MismatchCheck(num_sequences=num_sequences, max_mismatch=config.max_mismatch)
        # whatever fails from here on, the optimizer is left without hooks
        with ExitStack() as undo:
            self._turns = turns = Turns(parts, mismatch, undo)
            self.scheduler, self.versions = turns.side.scheduler, turns.versions
            prepare_arena(turns.side.rollout, mover)  # pins in the background, beside the first publication
            # before the first rollout: an engine that cannot take the weights is refused at once
            self.versions.publish()
            self._closing = Closing(parts, turns, owns_model=owns_model)
            self._has_begun = False
            self._is_sampling = False
            self._carried = Carried()
            self.carried_for: str | None = None  # whose completions those are, beside which no call has its own
            undo.callback(forget, self)
            register(self)
            # calls of the engine's own `generate` are guarded too
            engine.before_generate = self._before_generate
            turns.side.session.accept()  # last: whatever is refused before has rounded nothing
            undo.pop_all()

    @classmethod
    def of(cls, part: object) -> Runtime:
        """The open runtime of a model, an optimizer or an engine. Raises: `ValueError` when it has none."""
        return cast("Runtime", runtime_of(part))

    # ---- what a loop calls ------------------------------------------------------------------------------------------

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

    def enter(self, phase: Phase | None, *, implied: bool = False) -> None:
        """Go to `Phase.ROLLOUT` or `Phase.TRAIN`, out of whichever phase there is, or with `None` just leave that.

        Idempotent. For code that has no block to indent, such as hooks of a trainer; the blocks stand on it. What a
        block was left in by an interrupt is left by `enter(None)`. One that is `implied`, which nobody has asked for by
        name, is left by `generate`, `rollout` and `train` themselves.
        Raises: as `rollout` and `train`, but for being inside another phase; then no phase is entered.
        """
        if phase not in (None, Phase.ROLLOUT, Phase.TRAIN):
            raise ValueError(f"enter() takes Phase.ROLLOUT, Phase.TRAIN or None, not {phase!r}")
        self._turns.enter(None if phase is None else Phase(phase), implied=implied)  # a name is equal to a phase

    def generate(
        self,
        prompts: Prompts,
        params: Any = None,
        *,
        until: Until | None = None,
        max_age: int | None = None,
        keys: Iterable[Any] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Sample completions from the current weights, in prompt order, then sample order.

        `prompts` are texts, conversations (the runtime needs a tokenizer for both), token ids, or what a tokenizer
        returns; see `colo.engines.text.encode_prompts`. Sampling options are the engine's, given as its
        `SamplingParams` or by name: `rt.generate(prompts, n=8, max_tokens=512)`; those that change nothing are taken
        whether the engine has them or not. A completion's text is decoded when it is read.
        Outside any phase the call is a rollout of its own. Within one, weights that were written to since the last
        call, in whichever way, are published first; sharded ones are `StaleWeights` where torch has not counted it.
        Calls of several threads wait for each other.

        With `until` the call ends once so many prompts have all of their samples: a share (0.9) or a number of those
        under way, or a time (`timedelta`). It returns these; the others, `rt.carried`, go on in the next call with
        `until`, from the weights of that time, whatever prompts it is given (`[]` for none). `keys` has an object for
        each prompt, which its completions have as `key`; `prompt_index` counts prompts on from call to call.
        `Completion.spans` says which tokens are of which version. A sample with tokens of more than `max_age` versions
        back begins anew. After an error prompts are under way if any of them has tokens: look at `rt.carried` before
        asking for them again.

        Raises: `PhaseError` inside `train()` or after `close()`; `Unsupported` for options that look at earlier tokens,
        such as penalties, with `until`; as `Engine.generate` for everything else.
        """
        until, max_age = plain(until), plain(max_age)
        check_until(until, max_age, keys)
        keys = listed_keys(keys)
        if until is not None:
            self._check_own_calls()
        how = {} if until is None else {"until": until, "max_age": max_age, "keys": keys}
        self._turns.check_process()
        # the lock covers the phase as well: another thread's `generate` must not find it half entered
        with self._turns.lock:
            self._turns.require(Verb.GENERATE)
            # before memory moves for them
            if how:  # asked for by name, in parts
                params, sampling = None, options_of(self.engine, params, sampling)
            params = self.engine.sampling_params(params, **sampling)
            token_ids = encode_prompts(prompts, self.tokenizer)
            if self._turns.phase is None:
                with self.rollout():
                    return self._sample(token_ids, params, sampling, how)
            return self._sample(token_ids, params, sampling, how)

    def async_rollout(self, *, max_age: int | None = None) -> AsyncRollout:
        """Let engines elsewhere sample while the trainer works: `with rt.async_rollout() as rollout:`.

        `rollout.put(prompts, n=8, max_tokens=512)` has completions sampled in the background, `rollout.take(count)`
        publishes the present weights and waits for so many prompts' completions. Within the block are `train()` and
        steps, and no other rollout. Requests go on while weights change: `Completion.spans` says which tokens are of
        which version, and a sample with tokens of more than `max_age` versions back begins anew.
        Raises: `Unsupported` for an engine that has memory of the trainer's device; see `AsyncRollout`.
        """
        self._check_own_calls()
        return AsyncRollout(
            self.engine,
            self._turns,
            self.versions.publisher,
            self._carried,
            max_age=max_age,
            tokenizer=self.tokenizer,
            finish=self._finished,
        )

    def _sample(
        self, token_ids: list[list[int]], params: Any, sampling: Mapping[str, Any], how: Mapping[str, Any]
    ) -> list[Completion]:
        self.versions.refresh()
        published = self.versions.publisher.adapter_name
        # a model whose adapter is switched off is asked as its base
        adapter = None if published is not None and is_disabled(self.model) else published
        self._is_sampling = True
        try:
            if not how:
                completions = self.engine.generate(token_ids, params, adapter=adapter)
            else:
                completions = self._carried.run(token_ids, sampling, engine=self.engine, adapter=adapter, **how)
        except FloatingPointError as error:
            self._name_not_finite(error)
            raise
        finally:
            self._is_sampling = False
        self.scheduler.sample()
        # Of what a base has sampled without the adapter that it is trained with there is nothing to compare.
        return self._finished(completions, params, is_compared=adapter == published, is_carried=bool(how))

    def _finished(
        self, completions: list[Completion], params: Any, *, is_compared: bool = True, is_carried: bool = True
    ) -> list[Completion]:
        """Check what an engine has sampled with `params`, keep some to compare, and add texts and metrics."""
        if is_carried:
            for name, value in self._carried.metrics(completions, self.weights_version).items():
                self.trace.metric(name, value)
        for completion in completions:
            if len(completion.logprobs) != len(completion.token_ids):
                raise ValueError(
                    f"the engine {self.engine.name} gave {len(completion.logprobs)} log-probabilities for the "
                    f"{len(completion.token_ids)} tokens of a completion: each needs its own"
                )
        temperature = self.engine.sampling_temperature(params)
        if temperature is not None and is_compared:
            # an earlier call's prompts may have been asked for at another temperature
            self._mismatch.note(
                temperature, [c for c in completions if not is_carried or c.prompt_index in self._carried.alike]
            )
        return [with_text(completion, self.tokenizer) for completion in completions]

    def _check_own_calls(self) -> None:
        """Raise `Unsupported` for calls that go on where they are another's, or this rank cannot make its own."""
        if self.carried_for is not None:
            raise Unsupported(
                f"completions under way are those of {self.carried_for}, and this call, with until=... or "
                "async_rollout(), would take them: leave until out, or call rt.drop_carried() once training has ended"
            )
        if getattr(self.engine, "asks_together", False):
            raise Unsupported(
                "with a MainRankEngine all ranks sample in the same calls, and with until=... or async_rollout() each "
                "rank would make another number of them: give each rank an engine of its own, or leave until out"
            )

    def _before_generate(self) -> None:
        """Refresh the weights for a call of the engine's own `generate`, which need not come from `_sample`."""
        self._turns.check_process()
        if self._turns.phase is Phase.ROLLOUT and not self._is_sampling:
            self.versions.refresh()

    def _name_not_finite(self, error: Exception) -> None:
        """Raise `FloatingPointError` if a weight of the trainer's is why what was sampled is not made of numbers."""
        weights = [(part.name, part.tensor) for part in self.versions.source.parts() if part.tensor is not None]
        if (adapter := self.versions.source.adapter()) is not None:
            weights += adapter.named_tensors()
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
        self._turns.require(Verb.RECOVER)
        self._turns.be_idle()
        self.versions.recover()

    def park(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, name: str | None = None
    ) -> None:
        """Let another module of the loop leave the device for rollouts: a critic with its optimizer, a reward model.

        Its weights, gradients and state are on the device within `rt.train()`, and in pinned host memory during
        rollouts where their bytes are needed (always with `offload="always"`); read or saved there they are ordinary
        host tensors. They are a segment of the report, `name` or else the class's. Called on every rank, or on none.
        Raises: `PhaseError` inside a rollout or after `close()`; `Unsupported` for tensors that are not plain or not on
        the device, for those of the runtime itself or of a module that is parked, and DistributedDataParallel;
        `BudgetError` when a phase would not fit with it. The module's own calls raise `PhaseError` while it is away.
        """
        self._turns.check_process()
        others = [tensor for parked in self._turns.parked for tensor in parked.tensors()]
        taken = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers(), *others)}
        parked = ParkedModule(module, optimizer, self._mover, name=name or type(module).__name__, taken=taken)
        try:
            prepare_arena(self._turns.park(parked), self._mover)
        except BaseException:
            parked.close()
            raise

    @property
    def carried(self) -> list[Completion]:
        """Completions that go on in the next `generate` with `until`, as far as they are, whole groups in order."""
        return [with_text(completion, self.tokenizer) for completion in self._carried.completions()]

    def drop_carried(self) -> None:
        """Give up the completions of `carried`."""
        self._turns.check_process()
        self.carried_for = None
        self._carried.clear()

    def log(self, **metrics: float) -> None:
        """Add one value to each of the named series of the report, such as `reward`.

        Raises: `ValueError` for what is no number; nothing has been added then.
        """
        self._turns.check_process()
        values = {name: _number(name, value) for name, value in metrics.items()}
        for name, value in values.items():
            self.trace.metric(name, value)

    def report(self) -> Report:
        """Report where time and memory went, with the reason of each choice; print it, or show it in a notebook."""
        with named_extra("rt.report()"):
            from colo.report import Report

        self._turns.check_process()
        facts = facts_of(self, self._turns.side, is_compared=self._has_logits)
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
        if self._turns.beside is not None:
            self._turns.beside.close()
        with self._turns.lock, torch.inference_mode(False):
            if not self._closing.has_begun:
                with uninterrupted():
                    self._closing.begin()
                    # at once: parts can be shared anew even where a later step of closing fails
                    forget(self)
            self._closing.go_on()

    def at_close(self, function: Callable[[], object]) -> None:
        """Call a function once the runtime has been closed, at once where it is; the last one given runs first."""
        self._turns.check_process()
        if not callable(function):
            raise TypeError(f"at_close() takes a function without arguments, not {function!r}")
        self._closing.at_end(function)

    def __repr__(self) -> str:
        state = "closed" if self._closing.has_begun else f"phase {self.phase}, version {self.weights_version}"
        return (
            f"<colo.Runtime of {type(self.model).__name__} and {self.engine.name} on {self.device}, weights "
            f"{self.transport.name}: {state}>"
        )

    def __enter__(self) -> Runtime:
        self._turns.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._turns.is_elsewhere:
            self.close()

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled: a copy that goes would end the engine of both."""
        raise TypeError(
            "a runtime is neither copied nor pickled, since it owns an engine and memory: hand on what is to be kept, "
            "such as rt.model.state_dict(), rt.optimizer.state_dict() and rt.report().to_json()"
        )

    def __del__(self) -> None:
        # `__init__` may have failed before there was anything to end
        closing = vars(self).get("_closing")
        # while Python ends, modules that closing needs may be gone
        if closing is not None and not sys.is_finalizing() and not self._turns.is_elsewhere:
            closing.abandon()

    def _block(self, phase: Phase) -> PhaseBlock[Runtime]:
        self._turns.check_process()
        if not self._has_begun:
            self._has_begun = True
            collect_dropped(but=self)  # such as that of the same notebook cell, run before
        return PhaseBlock(self, self._turns, phase)

    # ---- what a report reads ----------------------------------------------------------------------------------------

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
        self._turns.check_open()
        # checked by the config's own rules
        self._turns.accumulation_steps = replace(self.config, accumulation_steps=steps).accumulation_steps


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"rt.log({name}=...) takes one number, not {value!r:.100}: log its mean, say") from error


# ---- what a report says first --------------------------------------------------------------------------------------


def facts_of(rt: Runtime, side: TrainerSide, *, is_compared: bool) -> dict[str, str]:
    """Name to sentence, in the order in which a report shows them; `is_compared`: colo runs the model's own passes."""
    engine, transport, publisher, trace = rt.engine, rt.transport, rt.versions.publisher, rt.trace
    rollout, train, ever = (format_bytes(trace.peak_bytes(phase)) for phase in (Phase.ROLLOUT, Phase.TRAIN, None))
    facts = {
        "engine": f"{engine.name} on {rt.device}: {engine.placement}",
        "weights": f"{transport.name}: {transport.reason}{_cost_of_copies(engine, transport)}",
        "version": f"{publisher.version}, {publisher.num_published} publications, "
        f"{format_bytes(publisher.bytes_synced)} copied",
        "peak": f"rollout {rollout}, train {train}, ever {ever}",
        "offload": f"{rt.config.offload}: {_why_offload(trace)}",
        "optimizer": side.why,
    }
    if elsewhere := side.session.unseen.num_stepped_elsewhere:
        facts["offload"] += f"; {elsewhere} parameters are stepped by an optimizer that colo was not given"
    if without := side.session.unseen.num_without_state:
        facts["offload"] += f"; {without} parameters are stepped without state where colo looks for it"
    if isinstance(transport.source, FoldedSource):
        folded = transport.source.folded
        facts["adapter"] = (
            f"folded into {len(folded)} weights at each publication; a second copy of those takes "
            f"{format_bytes(sum(tensor.nbytes for tensor in folded.values()))}"
        )
    if residual := engine.residual_bytes:
        parts = ", ".join(f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in residual.items())
        facts["asleep"] = f"{format_bytes(sum(residual.values()))} stay with the engine: {parts}"
    if kept := rt.kept_state:
        facts["kept"] = _what_is_kept(kept)
    if changed := trace.metrics.get("changed_fraction"):
        facts["changed"] = f"{changed[-1]:.1%} of the 16-bit weights in the last step"
    if carried := trace.metrics.get("carried"):
        facts["carried"] = f"{carried[-1]:.0%} of the prompts under way went on into a later rollout"
        # a loop may log values of its own by some of these names
        ages, most = (trace.metrics.get(f"token_age{end}") for end in ("", "_max"))
        if ages and most:
            facts["carried"] += (
                f"; tokens of the last one are {ages[-1]:.2g} versions old on average, {max(most):g} at most"
            )
    mismatch = trace.metrics.get("mismatch") or trace.metrics.get("mismatch_sampled")
    if mismatch:
        facts["mismatch"] = f"{mismatch[-1]:.2g} mean |log p(engine) - log p(trainer)| in the last step"
        own, sampled = (trace.metrics.get(f"mismatch_{of}") for of in ("own_routing", "sampled"))
        if own and sampled:
            facts["routing"] = (
                f"the engine tells its experts: {sampled[-1]:.2g} with them, {own[-1]:.2g} "
                "with those that the trainer's routers choose (colo.replay_routing)"
            )
    elif not is_compared:
        facts["mismatch"] = "not measured, since colo runs no passes of this model: rt.log(mismatch=...) adds yours"
    return facts


def _cost_of_copies(engine: Engine, transport: Transport) -> str:
    """Say how much memory the engine's own copy of the weights takes; nothing where they are shared."""
    held = next((segment.size_bytes for segment in engine.segments if segment.name == ENGINE_WEIGHTS), 0)
    if transport.shares or not held:
        return ""
    return f"; the engine's copy takes {format_bytes(held)}, and each version is copied into it"


def _what_is_kept(kept: Sequence[Kept]) -> str:
    """State that stays on the device: how much, and by reason one name for all."""
    by_reason: dict[str, list[Kept]] = {}
    for item in kept:
        by_reason.setdefault(item.reason, []).append(item)
    parts = [
        f"{items[0].name}" + (f" and {len(items) - 1} others" if len(items) > 1 else "") + f": {reason}"
        for reason, items in by_reason.items()
    ]
    size = format_bytes(sum(item.size_bytes for item in kept))
    return f"{size} of the optimizer's state stay on the device: {'; '.join(parts)}"


def _why_offload(trace: Trace) -> str:
    moved = sorted({s.name.removeprefix("out ") for s in trace.spans if s.name.startswith("out ")})
    if moved:
        return f"{', '.join(moved)} left the device for rollouts"
    return "no state of the trainer had to leave the device"
