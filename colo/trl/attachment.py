"""`attach`: colo beneath a TRL trainer that exists. Nothing of TRL is replaced: attributes of the trainer are set."""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from colo import unsloth
from colo.assembly.arguments import default_engine
from colo.assembly.check import check
from colo.assembly.share import share
from colo.config import RuntimeConfig
from colo.engine import Engine, SamplingParams
from colo.engines.sampling import distorting, needing_tokenizer
from colo.engines.text import positions_of
from colo.errors import Unsupported
from colo.memory.storage import local_shard
from colo.runtime import Runtime
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.state import unwrapped
from colo.trl.checks import (
    PromptReader,
    check_columns,
    check_contract,
    check_fused_head,
    check_output,
    check_released,
    check_trainer,
    checked,
    warn_of_unused,
)
from colo.trl.generation import (
    ColoGeneration,
    PhaseCallback,
    completions_at_once,
    keep_initial_adapter,
    watch_forwards,
)
from colo.trl.partial import SURPLUS
from colo.weights.ranks import RankGroup

logger = logging.getLogger(__name__)

BATCHED_TOKENS = 4096
"""Tokens of one step of vLLM, as TRL sets them for its own."""

OF_FLAG = ("colo_partial_rollouts", "colo_offload_activations")
"""Options that a trainer's own methods carry out: of the flag's trainers alone."""

ATTACHED = "_colo_attached"
"""Attribute of a config of which a trainer has been attached: its flag was read."""


def attach(
    trainer: Any,
    *,
    engine: str | Engine | Any = None,
    engine_options: Mapping[str, Any] | None = None,
    config: RuntimeConfig | None = None,
    seeded: bool | None = None,
) -> Runtime:
    """Let a TRL trainer generate on an engine that has its own weights, and take turns with it.

    `trainer` is a `GRPOTrainer`, a `RLOOTrainer` or a subclass, made without `use_vllm`; train with it as ever. The
    runtime that is returned is `trainer.colo` too; `trainer.colo.close()`, or `detach(trainer)`, gives its memory
    back and leaves the trainer as it was made. `engine` is "vllm", the default on a GPU that has it, "torch" (the
    embedded one), or an engine that runs already, as `colo.share` takes it. vLLM runs in this process unless there
    are several ranks or `engine_options` has `own_process=True`; a process that ends is started again in the middle
    of a step. What is left out is taken from the `colo_` options of a `ColoGRPOConfig` or `ColoRLOOConfig`, where the
    trainer has one. A trainer of Unsloth's generates on its model's own vLLM. Rewards that are not finite
    numbers are refused. An optimizer that the trainer has not made yet is made now, with fp32 masters (`MasterWeights`)
    where weights that train are in 16 bits. With `seeded` every rollout draws from a seed of its own, by run and step:
    a resumed run draws what the first would have. vLLM draws for each sequence apart then, which is slower. With `beta`
    a copy of an adapter that adds something from the start is the reference, as adapter "ref".
    The engine's sampling is the trainer's: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`,
    `max_completion_length`, `generation_kwargs` and `vllm_structured_outputs_regex`.
    With accelerate's FSDP2 plugin the model is sharded now, as `trainer.train()` would, and stays so; every rank calls.
    Raises: `Unsupported` for what colo does not do, by name (images, tensor parallelism, DeepSpeed, FSDP's first
    version, a TRL that is another inside); `OSError` for an `output_dir` that cannot be written to; `ValueError` for a
    column that a reward takes and the dataset lacks; as `colo.share`. The trainer is as it was then.
    """
    # the contract first: every later line reads what it names
    check_contract(trainer)
    check_trainer(trainer)
    llm = unsloth.engine_of(trainer.model)
    given = trainer.args if hasattr(trainer.args, "colo_config") else None
    if given is not None:
        if not (given.fast_inference and hasattr(trainer, "overrides_steps")):
            for name in OF_FLAG:
                if getattr(given, name):
                    raise Unsupported(
                        f"{name} needs a ColoGRPOTrainer with fast_inference=True, whose steps are its own, and this "
                        f"is a {type(trainer).__name__}: make one, or leave the option out"
                    )
        config = given.colo_config() if config is None else config
        seeded = given.colo_seeded if seeded is None else seeded
        if llm is None and engine is None:
            engine = given.colo_engine
            engine_options = given.colo_engine_options if engine_options is None else engine_options
    if llm is None:
        warn_of_unused(trainer.args)
    else:
        engine = _unsloths(trainer, llm, engine, engine_options)
    check_fused_head(trainer.model)
    check_output(trainer.args.output_dir)
    others: dict[str, Any] = {"rollout_func": getattr(trainer, "rollout_func", None)}
    # of a TRL whose environments may have prompts of their own
    others["environments"] = getattr(trainer, "environment_factories", None)
    others["read_by"] = partial(PromptReader.of, trainer.processing_class, trainer.model.config, trainer.args)
    check_columns(trainer.reward_funcs, trainer.train_dataset, trainer.eval_dataset, **others)
    engine = default_engine(trainer.accelerator.device) if engine is None else engine
    options = dict(engine_options or {})
    if config is not None and config.release_gradients:
        check_released(trainer.args)
    # the trainer's own number: a config made without it must not bring state back in the wrong pass
    config = replace(config or RuntimeConfig(), accumulation_steps=trainer.args.gradient_accumulation_steps)
    before = trainer.optimizer, trainer.model_wrapped
    rt, forget, folders = None, keep_initial_adapter(trainer), ExitStack()
    try:
        if engine == "vllm":
            add_vllm_options(options, trainer.args, trainer.accelerator.num_processes, trainer.model.config)
            add_tokenizer(options, trainer.args, trainer.processing_class, folders)
        # the optimizer is made now: `share` hooks it, and TRL would make it within `train()`
        prepare(trainer)
        rt = share(
            engine,
            trainer.model,
            trainer.optimizer,
            # `share` refuses options for an engine that runs already
            engine_options=options if isinstance(engine, str) and (options or engine == "vllm") else None,
            tokenizer=trainer.processing_class,
            config=config,
        )
        # vLLM has read the tokenizer's folder by then, but may start again: it stays until the end
        rt.at_close(folders.close)
        context = _context_of(trainer, rt)
        sampling = sampling_of(trainer, rt, context)
        rt.engine.sampling_params(None, **sampling)  # which refuses by name what the engine lacks
        # an engine that ignores an option, or computes another model, is refused before the first step
        check(rt, sampling=sampling)
        _set(trainer, rt, ColoGeneration(trainer, rt, sampling, context=context, seeded=bool(seeded)))
    except BaseException:
        if rt is not None:
            rt.close()
        folders.close()
        trainer.optimizer, trainer.model_wrapped = before
        forget()
        raise
    rt.at_close(forget)
    _warn_of_sampling(trainer, sampling, rt.engine, seeded=bool(seeded))
    logger.info("attached: %s; %s", rt.engine.placement, rt.transport.reason)
    return rt


def detach(trainer: Any) -> None:
    """Close the trainer's runtime, and leave the trainer as it was made. Does nothing without one."""
    runtime = getattr(trainer, "colo", None)
    if runtime is not None:
        runtime.close()


def _unsloths(trainer: Any, llm: Any, engine: Any, engine_options: Mapping[str, Any] | None) -> Any:
    """Make the vLLM of Unsloth's model ready to be attached, and return it. Raises: as `unsloth.check_engine`."""
    if engine_options:
        raise TypeError(f"engine_options are for an engine that attach() starts: {sorted(engine_options)}")
    if engine is None or engine == "vllm":
        engine = llm
    unsloth.forget_rank(trainer.accelerator)
    unsloth.wake(llm)
    unsloth.check_engine(trainer.model, engine)
    return engine


def sampling_of(trainer: Any, rt: Runtime, context: int) -> dict[str, Any]:
    """The engine's sampling options, by name, that a trainer asks for."""
    args, max_tokens = trainer.args, trainer.max_completion_length
    if max_tokens is None and rt.engine.name != "vllm":  # to which it means the rest of the context
        if context == sys.maxsize:
            raise ValueError("this model's context has no end: set max_completion_length in the trainer's config")
        max_tokens = context
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
    }
    if trainer.repetition_penalty != 1.0:
        sampling["repetition_penalty"] = trainer.repetition_penalty
    given = dict(args.generation_kwargs or {})
    given.pop("n", None)  # see `check_args`
    # TRL's list has the generation config's end tokens too; without one there is the tokenizer's
    if not given.get("ignore_eos"):
        ends = getattr(trainer, "eos_token_ids", None) or [trainer.processing_class.eos_token_id]
        more = given.pop("stop_token_ids", None)
        # beside, not instead: vLLM is started without a tokenizer, and knows the end of a sequence from here
        more = () if more is None else SamplingParams(stop_token_ids=more).stop_token_ids
        sampling["stop_token_ids"] = [*dict.fromkeys(token for token in (*ends, *more) if token is not None)]
    if args.vllm_structured_outputs_regex is not None:
        if rt.engine.name != "vllm":
            raise Unsupported("vllm_structured_outputs_regex needs vLLM: attach with engine='vllm', or leave it out")
        given["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}  # before another, as with TRL
    return sampling | given


def _set(trainer: Any, rt: Runtime, generation: ColoGeneration) -> None:
    """Set the trainer's attributes by which it generates with colo; the runtime's end restores them."""
    callback = PhaseCallback(trainer, rt, generation)
    new = {
        "colo": rt,
        "vllm_generation": generation,
        # as for a vLLM of TRL's in this process: TRL's code asks `vllm_generation` then
        "use_vllm": True,
        "vllm_mode": "colocate",
        # no step has this number: TRL calls `sync_weights` before its next generation
        "_last_loaded_step": -1,
        "reward_funcs": [
            checked(reward, name, trainer)
            for reward, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        ],
    }
    # first what takes back: whatever fails on the way, the runtime is closed then
    undo = ExitStack()
    rt.at_close(undo.close)
    for handle in watch_forwards(trainer.model, rt):
        undo.callback(handle.remove)
    trainer.add_callback(callback)
    undo.callback(trainer.remove_callback, callback)
    for name, value in new.items():
        # attributes that were not there are deleted again
        is_there, before = hasattr(trainer, name), getattr(trainer, name, None)
        undo.callback(setattr, trainer, name, before) if is_there else undo.callback(delattr, trainer, name)
        setattr(trainer, name, value)
    # stays when the runtime is closed: who trains on after that has said so, and is not warned
    setattr(trainer.args, ATTACHED, True)


def choose_process(options: dict[str, Any], num_ranks: int, model: Any = None) -> None:
    """Let vLLM run in this process, or in one of its own for each of several ranks, unless `options` say otherwise.

    A `model` that vLLM serves by transformers' own class, which it changes, has a process of its own too.
    Raises: `Unsupported` for engines within several ranks, which would take the ranks' process group for their own.
    """
    if "own_process" not in options:
        from colo.engines.vllm.client.start import architectures, changes_transformers

        options["own_process"] = num_ranks > 1 or (
            model is not None and changes_transformers(architectures(model, options), options)
        )
    if not options["own_process"] and num_ranks > 1:
        raise Unsupported(f"vLLM within each of {num_ranks} ranks takes them for its own: leave own_process=False out")


def add_vllm_options(options: dict[str, Any], args: Any, num_ranks: int, model: Any) -> None:
    """Add options of vLLM that follow from TRL's `args`: for a `model` that exists its config, else its name."""
    choose_process(options, num_ranks, model)
    if args.vllm_max_model_length is not None:
        options.setdefault("max_model_len", args.vllm_max_model_length)
    # TRL's own two: by default vLLM captures graphs and keeps buffers for 1,024 sequences and 16,384 tokens
    at_once = completions_at_once(args)
    if getattr(args, "colo_partial_rollouts", False):
        at_once += math.ceil(SURPLUS * at_once)
    options.setdefault("max_num_seqs", at_once)
    if options.get("enable_chunked_prefill", True):  # a prompt has to fit otherwise
        options.setdefault("max_num_batched_tokens", max(BATCHED_TOKENS, options["max_num_seqs"]))


def add_tokenizer(options: dict[str, Any], args: Any, tokenizer: Any, folders: ExitStack) -> None:
    """Give vLLM the trainer's tokenizer where an option reads text: it may have tokens that the checkpoint's lacks."""
    given = {"structured_outputs": args.vllm_structured_outputs_regex} | (args.generation_kwargs or {})
    if needing_tokenizer(given) and "tokenizer" not in options:
        options["tokenizer"] = folders.enter_context(tempfile.TemporaryDirectory(prefix="colo-tokenizer-"))
        tokenizer.save_pretrained(options["tokenizer"])  # with what was added to it
        options.setdefault("skip_tokenizer_init", False)


def _context_of(trainer: Any, rt: Runtime) -> int:
    """The most tokens of a prompt and its completion."""
    # vLLM may have cut the context to what its KV cache holds
    llm = getattr(rt.engine, "llm", None)
    found = llm.llm_engine.model_config.max_model_len if llm is not None else positions_of(trainer.model.config).count
    return min(limit for limit in (found, trainer.args.vllm_max_model_length, sys.maxsize) if limit)


def _warn_of_sampling(trainer: Any, sampling: Mapping[str, Any], engine: Engine, *, seeded: bool) -> None:
    """Warn of a seed that repeats itself, and of what TRL computes of another distribution than is sampled from."""
    if sampling.get("seed") is not None and not seeded:
        warnings.warn(
            f"generation_kwargs has seed={sampling['seed']}, and every step draws the same random numbers: leave it "
            "out, and set colo_seeded=True (attach(seeded=True)) for a seed of its own in every step, from the run's",
            stacklevel=3,
        )
    filters = (*distorting(sampling), *getattr(getattr(engine, "link", None), "distorting", ()))
    if filters and getattr(trainer, "vllm_importance_sampling_correction", False):
        warnings.warn(
            f"sampling with {', '.join(filters)} changes which tokens are likely, and TRL's importance correction "
            "compares their probabilities with those that the model gives without: its ratio is biased "
            "(huggingface/trl#6789), and TRL takes no mask of them (vLLM's return_sampling_mask). Sample without, or "
            "set vllm_importance_sampling_correction=False",
            stacklevel=3,
        )
    if sampling["temperature"] != trainer.temperature:
        warnings.warn(
            f"generation_kwargs has temperature={sampling['temperature']}, and TRL computes log-probabilities and the "
            f"loss at temperature={trainer.temperature}: their ratio is biased (huggingface/trl#6789). Set temperature "
            "in the trainer's config",
            stacklevel=3,
        )


# ---- what `train()` makes of a model and an optimizer, made before weights are shared ------------------------------


def prepare(trainer: Any) -> None:
    """Make the optimizer, and shard or wrap the model where `trainer.train()` would; it leaves both as they are then.

    With accelerate's FSDP2 plugin every rank calls.
    Raises: `Unsupported` for an optimizer that cannot be made so, by name; with FSDP2 also for a rank that holds
    nothing of several weights, and then `TransferError` on the others.
    """
    if trainer.is_fsdp_enabled:
        _shard(trainer)
    _make_optimizer(trainer)
    if trainer.is_fsdp_enabled:
        _prepare_sharded(trainer)
    elif trainer.accelerator.num_processes > 1 and trainer.accelerator.device.type == "cpu":
        # Before the memory is shared: accelerate would copy it to `cpu:0`, and again where an evaluation begins.
        if trainer.model_wrapped is trainer.model:
            trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, device_placement=False)
        trainer.model._is_accelerate_prepared = True


def _make_optimizer(trainer: Any) -> None:
    """Make the optimizer that `trainer.train()` would make, with fp32 masters for weights in 16 bits."""
    model, made = trainer.model, trainer.optimizer
    in_16_bits = any(p.requires_grad and p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    if made is None and in_16_bits:
        # a class that the trainer was given counts before that of the arguments
        known = trainer.optimizer_cls_and_kwargs
        kind, options = known or trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
        if not isinstance(kind, type):
            raise Unsupported(
                f"optim={trainer.args.optim!r} makes several optimizers, and colo keeps fp32 masters for one: load the "
                "model in float32, or take another optim"
            )
        if hasattr(kind, "eval"):  # such as schedule-free ones, which the trainer would switch
            raise Unsupported(
                f"optim={trainer.args.optim!r} trains other weights than it evaluates, and colo keeps fp32 masters of "
                "one: load the model in float32, or take another optim"
            )

        class WithMasters(MasterWeightsOptimizer):  # a class, since transformers takes a function for a factory
            def __init__(self, groups: Any, **given: Any) -> None:
                super().__init__(groups, lambda params: kind(params, **given))

        # `create_optimizer` groups parameters by weight decay, which is kept so
        trainer.optimizer_cls_and_kwargs = WithMasters, options
        try:
            trainer.create_optimizer()
        finally:
            trainer.optimizer_cls_and_kwargs = known
    elif made is None:
        trainer.create_optimizer()
    # also of one that a subclass has made in a way of its own
    if in_16_bits and not hasattr(unwrapped(trainer.optimizer), "inner"):
        warnings.warn(
            "weights in 16 bits swallow updates smaller than 1/256 of them: give the trainer an optimizer made by "
            "colo.optim.MasterWeights, or leave making it to colo, without a create_optimizer of your own",
            stacklevel=4,
        )
    _prepare_optimizer(trainer)


def _prepare_optimizer(trainer: Any) -> None:
    """Wrap the optimizer in place, where accelerate's own preparation copies all state to the host and back."""
    if not getattr(trainer.optimizer, "_is_accelerate_prepared", False):
        trainer.optimizer = trainer.accelerator.prepare_optimizer(trainer.optimizer, device_placement=False)
        trainer.optimizer._is_accelerate_prepared = True


def _shard(trainer: Any) -> None:
    """Shard the model in place, and switch an optimizer that exists to the shards."""
    from accelerate.utils import fsdp2_prepare_model

    if trainer.optimizer is None:
        trainer.model = fsdp2_prepare_model(trainer.accelerator, trainer.model)
    elif hasattr(unwrapped(trainer.optimizer), "inner"):
        raise Unsupported(
            "the masters of this optimizer are of whole weights, and FSDP shards those: give the trainer no optimizer, "
            "colo makes it with masters of the shards"
        )
    else:
        _prepare_sharded(trainer)
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    with RankGroup(trained.values()).fail_together("sharding the model"):
        empty = [name for name, p in trained.items() if not local_shard(p).numel()]
        if len(empty) > 1:
            raise Unsupported(
                f"this rank holds nothing of {empty[0]} and {len(empty) - 1} other weights, which accelerate takes for "
                "one another in the optimizer: use fewer ranks"
            )


def _prepare_sharded(trainer: Any) -> None:
    """Give model and optimizer to accelerate, which shards a model that is not sharded."""
    _prepare_optimizer(trainer)
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = trainer.model
