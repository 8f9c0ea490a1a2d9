"""Methods and hooks of an attached trainer: rollouts on colo's engine, phases, the reference of a KL term."""

from __future__ import annotations

import copy
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback

from colo.engine import Completion
from colo.engines.sampling import row_seed
from colo.errors import EngineLost, Unsupported
from colo.phases.phase import Phase
from colo.report.table import switching_s
from colo.runtime import Runtime
from colo.trainer.state import UncopiedHook, untraced
from colo.trl.partial import PartialRollouts
from colo.units import GIB
from colo.weights.sources.folded import changes_nothing
from colo.weights.sources.peft import active_adapters, is_disabled

Generated = tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]
"""Prompts, completions, and for each token of those a list with its log-probability, and one with its id."""


class ColoGeneration:
    """Has the two methods of TRL's `VLLMGeneration` that a trainer calls."""

    def __init__(
        self, trainer: Any, runtime: Runtime, sampling: Mapping[str, Any], *, context: int, seeded: bool
    ) -> None:
        """`sampling` are the engine's options by name; `context` is the most tokens of a prompt and its completion."""
        self.runtime = runtime
        self.sampling = dict(sampling)
        self.num_tokens = 0
        self.seconds = 0.0
        self.recoveries = 0
        self.partial: PartialRollouts | None = None
        self._trainer = trainer
        self._context = context
        self._seeded = seeded
        self._calls: dict[str, tuple[int, int]] = {}
        self.llm = _NoLLM(context)

    def sync_weights(self) -> None:
        """Do nothing: a rollout begins with the trainer's present weights."""

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> Generated:
        """Sample one completion for every entry of `prompts`, in which each prompt stands `num_generations` times.

        An engine whose process has ended is started again on the same weights, once, and asked again.
        Raises: `Unsupported` for images; `ValueError` for a prompt that is empty or leaves no room for a completion.
        """
        if images is not None and any(image for image in images):
            raise Unsupported("colo generates from text: images in a dataset are not supported")
        self.check(prompts)
        if self.partial is not None and self._trainer.model.training and (found := self.partial.take(prompts)):
            self.seconds += self.partial.seconds
            return self._told(prompts, found)
        unique, n = _grouped(prompts, num_generations)
        sampling = {**self.sampling, "n": n} | self._seeds(len(prompts), num_generations, n)
        began_s = time.perf_counter()
        with profiler or nullcontext():
            try:
                completions = self._sample(unique, sampling)
            except EngineLost:
                # the phase that failed is left first: `recover` is refused within one
                self.runtime.enter(None)
                self.runtime.recover()
                self.recoveries += 1
                completions = self._sample(unique, sampling)
        self.seconds += time.perf_counter() - began_s
        return self._told(prompts, completions)

    def _told(self, prompts: list[list[int]], completions: Sequence[Completion]) -> Generated:
        ids = [list(completion.token_ids) for completion in completions]
        self.num_tokens += sum(map(len, ids))
        logprobs = [[[logprob] for logprob in completion.logprobs] for completion in completions]
        return prompts, ids, logprobs, [[[token] for token in row] for row in ids]

    def _sample(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[Completion]:
        self.runtime.enter(Phase.ROLLOUT)
        return self.runtime.generate(prompts, **sampling)

    def begin_run(self) -> None:
        """Draw in every step as a trainer that is new does, with nothing under way."""
        self._calls.clear()
        if self.partial is not None:
            self.partial.begin_run()

    def check(self, prompts: Iterable[Sequence[int]]) -> None:
        """Raise `ValueError` for a prompt that is empty or leaves no room for a completion."""
        longest = self._context - 1
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {index} of this step has no tokens: remove empty prompts from the dataset")
            if len(prompt) > longest:
                raise ValueError(
                    f"prompt {index} of this step has {len(prompt)} tokens and the engine's context {self._context}: "
                    "shorten or filter prompts, or raise vllm_max_model_length"
                )

    def _seeds(self, num_prompts: int, num_generations: int, n: int) -> dict[str, list[int]]:
        """A seed for each of the prompts that are asked for `n` times, by run, step and the prompt's place in it.

        A completion has the same seed on however many ranks, in whole groups or in parts of them, and when the run is
        resumed: that of its prompt in the batch of all ranks, plus its number among the prompt's.
        """
        if not self._seeded:
            return {}
        trainer, args = self._trainer, self._trainer.args
        mode, rank = "train" if trainer.model.training else "eval", trainer.accelerator.process_index
        step, count = self._calls.get(mode, (-1, 0))
        # several calls in one step (tools, or several batches) draw apart
        count = count + 1 if step == trainer.state.global_step else 0
        self._calls[mode] = trainer.state.global_step, count
        run = f"{args.seed}/{mode}/{trainer.state.global_step}/{count}"
        usual = completions_at_once(args) if mode == "train" else args.per_device_eval_batch_size
        # A part of a batch, such as what tools are called for, is of another size on every rank.
        first, run = (rank * num_prompts, run) if num_prompts == usual else (0, f"{run}/{rank}/{num_prompts}")
        size = max(1, num_generations)
        # one seed for each request of `n` samples, which count up from it
        rows = range(first, first + num_prompts, n)
        return {"seed": [row_seed(run, row // size, 0) + row % size for row in rows]}


def completions_at_once(args: Any) -> int:
    """Number of completions that TRL asks a rank for at once: those of all micro-batches until its next generation."""
    number: int = args.per_device_train_batch_size * (args.steps_per_generation or args.gradient_accumulation_steps)
    return number


class _NoLLM:
    """Stands for TRL's `vllm.LLM`: TRL's tool loop reads the context length from it."""

    def __init__(self, context: int) -> None:
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=context))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"vllm_generation.llm.{name}: the engine takes turns with the trainer, and is asked by "
            "trainer.vllm_generation.generate(prompts, None, num_generations), as TRL does, or by "
            "trainer.colo.generate(prompts, max_tokens=..., n=...), both with token ids"
        )


def _grouped(prompts: list[list[int]], num_generations: int) -> tuple[list[list[int]], int]:
    """Each prompt once, and how many completions of it are wanted: 1 where they do not come in equal groups."""
    size = max(1, num_generations)
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    # equal prompts in equal numbers: only then can one request stand for a group
    if all(len(group) == group.count(group[0]) == size for group in groups):
        return [group[0] for group in groups], size
    return prompts, 1


# ---- phases --------------------------------------------------------------------------------------------------------


def watch_forwards(model: Any, runtime: Runtime) -> list[Any]:
    """Hooks that enter the training phase before the model computes; returns their handles.

    One is on the embeddings, since some losses call the layers below the model itself. They run before the hooks of
    FSDP2: a pass that compares log-probabilities would otherwise begin within one that FSDP2 takes for begun.
    """

    policy = active_adapters(model)[0] if hasattr(model, "peft_config") else None

    def before_forward(*_: Any) -> None:
        # TRL has no call where training begins: its first forward pass tells
        in_rollout = runtime.phase is Phase.ROLLOUT
        # in a rollout any pass, also one without gradients: the engine's memory is in its way
        if in_rollout or (model.training and torch.is_grad_enabled() and runtime.phase is not Phase.TRAIN):
            with as_policy(model, policy):
                runtime.enter(Phase.TRAIN, implied=True)

    # untraced, or torch.compile would trace the runtime with the model; uncopied: an EMA's pass enters nothing
    hook = UncopiedHook(untraced(before_forward))
    watched = (model, model.get_input_embeddings())
    return [module.register_forward_pre_hook(hook, prepend=True) for module in watched]


_REPORTED = re.compile("(eval_)?reward|reward_std|loss|kl|entropy|grad_norm|completions/mean_length|rewards/.*/mean")
_NAMES = {"completions/mean_length": "completion_tokens"}
"""Names of TRL's metrics in colo's reports, where these differ."""


class PhaseCallback(TrainerCallback):  # type: ignore[misc]
    """Leaves a phase where a trainer comes to rest, and adds colo's metrics to the trainer's."""

    def __init__(self, trainer: Any, runtime: Runtime, generation: ColoGeneration) -> None:
        self._trainer = trainer
        self._runtime = runtime
        self._generation = generation
        self._since_s = 0.0
        self._sent_bytes = 0

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """Take over how many backward passes a step has: it may be another than when the trainer was attached."""
        self._runtime.accumulation_steps = args.gradient_accumulation_steps
        self._generation.begin_run()  # the step that an earlier run was in may be made again
        self._since_s, self._sent_bytes = self._runtime.trace.now_s(), self._runtime.bytes_synced

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Leave only where a rollout follows: what left for it would come back unused for another step."""
        every = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        every *= getattr(self._trainer, "num_iterations", 1)
        # TRL's `_step` counts micro-batches, and a new generation comes after `every` of them
        if getattr(self._trainer, "_step", 0) % every == 0:
            self._runtime.enter(None)
        self._add_metrics()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Leave a phase of passes without a backward one, which FSDP2 ends with whole weights where `train()` begins.

        accelerate would look for those in the optimizer.
        """
        self._runtime.enter(None)
        self._runtime.transport.source.reshard()
        self._since_s = self._runtime.trace.now_s()  # of the next step's metrics, which evaluation is no part of
        self._generation.num_tokens, self._generation.seconds = 0, 0.0

    on_predict = on_evaluate

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the phase that training was in."""
        self._runtime.enter(None)

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        """Pass the trainer's metrics of steps and evaluations on to the runtime's report."""
        found = {
            _NAMES.get(name, name): value
            for name, value in (logs or {}).items()
            if _REPORTED.fullmatch(name) and value is not None  # of a reward without an opinion on any
        }
        self._runtime.log(**found)

    def _add_metrics(self) -> None:
        """Add the last step's to what `trainer.log` averages; what a callback adds later is not in its history."""
        trace, generation, since_s = self._runtime.trace, self._generation, self._since_s
        self._since_s = trace.now_s()
        new: dict[str, float] = defaultdict(float)
        # from the newest back: a report's history may be long
        spans = list(takewhile(lambda span: span.end_s > since_s, reversed(trace.spans)))
        for span in spans:
            if span.category == "phase":
                new[f"{span.name}_s"] += span.duration_s
        new["switch_s"] = switching_s(spans)
        for sample in takewhile(lambda sample: sample.time_s > since_s, reversed(trace.samples)):
            if sample.phase in (Phase.ROLLOUT, Phase.TRAIN):
                name = f"{sample.phase}_gib"
                new[name] = max(new[name], sample.total_bytes / GIB)
        if generation.seconds:
            new["tokens_per_s"] = generation.num_tokens / generation.seconds
            generation.num_tokens, generation.seconds = 0, 0.0
        new["sent_bytes"] = float(self._runtime.bytes_synced - self._sent_bytes)
        self._sent_bytes = self._runtime.bytes_synced
        for series in ("mismatch_sampled", "changed_fraction", "carried", "token_age"):
            if values := trace.metrics.get(series):
                new[series.removesuffix("_sampled")] = values[-1]
        for name, value in new.items():
            # TRL averages and empties these lists when it logs
            self._trainer._metrics["train"][f"colo/{name}"].append(value)


# ---- the reference of a KL term where an adapter adds something from the start -------------------------------------

# TRL compares with the model without its adapter, or with an adapter "ref" where there is one. An initialization that
# rewrites the base and adds the rest back (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) makes the first another policy than
# training began with, and TRL makes the second by running that initialization again, which rewrites the base again.

REF = "ref"
"""The adapter that TRL switches to for its reference."""

_COPIED = "default"
"""The adapter that TRL copies for it, of a model that has one."""

_REWRITE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@contextmanager
def initialized_once(model: Any, beta: float) -> Iterator[None]:
    """Keep a trainer that is made within from initializing the base of a PEFT model again for its reference."""
    config: Any = getattr(model, "peft_config", {}).get("default") if beta else None
    if not hasattr(config, "init_lora_weights"):
        yield
        return
    # True is LoRA's own start, which touches no base weight
    before, config.init_lora_weights = config.init_lora_weights, True
    try:
        yield
    finally:
        # the user's setting is what is saved
        config.init_lora_weights = before
        if REF in model.peft_config and changes_nothing(model):
            model.delete_adapter(REF)  # the model without its adapter is the same, takes nothing, and is not saved
        elif REF in model.peft_config:
            model.peft_config[REF] = copy.copy(config)
            model.peft_config[REF].init_lora_weights = True


def keep_initial_adapter(trainer: Any) -> Callable[[], None]:
    """Give the trainer a frozen copy of its adapter as "ref", if it needs one and has none; return what takes it back.

    Raises: `Unsupported` where TRL has initialized the base twice, or copied another adapter than the one that trains,
    and for several adapters that train.
    """
    model = trainer.model
    if not getattr(trainer, "beta", 0.0) or not hasattr(model, "add_adapter") or not hasattr(model, "get_base_model"):
        return lambda: None
    if REF not in model.peft_config and changes_nothing(model):
        return lambda: None
    (name, *others) = active_adapters(model)
    if others:
        raise Unsupported(
            f"{1 + len(others)} adapters train ({', '.join([name, *others])}), and TRL's reference of "
            f"beta={trainer.beta} is a copy of one, after which only {name!r} would train: pass beta=0, or train one"
        )
    if REF in model.peft_config:
        init = getattr(model.peft_config[REF], "init_lora_weights", True)
        if str(init).lower().startswith(_REWRITE):
            raise Unsupported(
                f"TRL made the reference of beta={trainer.beta} by init_lora_weights={init!r} once more, which changed "
                "the base weights again: the model is not the one you gave. Set model.peft_config['default']."
                "init_lora_weights = True before the trainer is made, or give the model to ColoGRPOTrainer"
            )
        if name not in (REF, _COPIED):
            raise Unsupported(
                f"TRL made the reference of beta={trainer.beta} from adapter {_COPIED!r}, and {name!r} is the one that "
                f"trains: give the model that one alone, under the name {_COPIED!r}"
            )
        _copy_to_reference(model, _COPIED, is_last=True)  # which TRL, that looks for ".default.", has left out
        return lambda: None
    config = copy.copy(model.peft_config[name])
    config.init_lora_weights = True
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # its values are replaced: they must not be drawn from the numbers that training draws from
    with torch.random.fork_rng(list(devices)):
        model.add_adapter(REF, config)
    _copy_to_reference(model, name)
    return lambda: model.delete_adapter(REF)


def _copy_to_reference(model: Any, name: str, *, is_last: bool = False) -> None:
    """Copy an adapter's tensors to the reference: all, or those whose names end with the adapter's (`is_last`)."""
    for key, parameter in list(model.named_parameters()):
        parts = key.split(".")
        if name in (parts[-1:] if is_last else parts):
            copied = ".".join(REF if part == name else part for part in parts)
            # `.data`: the parameter stays the frozen one that PEFT has made
            model.get_parameter(copied).data = parameter.detach().clone()


@contextmanager
def as_policy(model: Any, policy: str | None) -> Iterator[None]:
    """Switch a PEFT model to `policy`, the adapter that trains, within a pass of TRL's reference too.

    That pass may be the first after a rollout, whose log-probabilities are compared with the policy's then.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        yield
    elif is_disabled(model):
        model.base_model.enable_adapter_layers()
        try:
            yield
        finally:
            model.base_model.disable_adapter_layers()
    elif model.active_adapter == REF != policy:
        model.set_adapter(policy)
        try:
            yield
        finally:
            model.set_adapter(REF)
    else:
        yield
