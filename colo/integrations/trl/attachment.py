"""`attach`: colo beneath a TRL trainer that exists. Nothing of TRL is replaced: attributes of the trainer are set."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from colo.assembly.check import check
from colo.assembly.share import share
from colo.config import RuntimeConfig
from colo.engine import Engine
from colo.engines.embedded.waves import positions_of
from colo.errors import Unsupported
from colo.integrations.trl.contract import check_contract, check_trainer
from colo.integrations.trl.folders import check_output
from colo.integrations.trl.generation import ColoGeneration
from colo.integrations.trl.phases import PhaseCallback, watch_forwards
from colo.integrations.trl.preparation import prepare
from colo.integrations.trl.reference import keep_initial_adapter
from colo.integrations.trl.rewards import check_columns, checked
from colo.runtime import Runtime

logger = logging.getLogger(__name__)


def attach(
    trainer: Any,
    *,
    engine: str | Engine | Any = "vllm",
    engine_options: Mapping[str, Any] | None = None,
    config: RuntimeConfig | None = None,
    seeded: bool = False,
) -> Runtime:
    """Have a TRL trainer generate on an engine that has the trainer's own weights, and take turns with it.

    `trainer` is a `GRPOTrainer`, a `RLOOTrainer` or a subclass, made without `use_vllm`; train with it as ever. The
    runtime that is returned is `trainer.colo` too; `trainer.colo.close()`, or `detach(trainer)`, gives its memory back
    and leaves the trainer as it was made. `engine` is "vllm", "torch" (the embedded one), or an engine that runs
    already, as `colo.share` takes it. vLLM runs in this process unless there are several ranks or `engine_options` has
    `own_process=True`; a process that ends is started again in the middle of a step. Rewards that are not finite
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
    check_contract(trainer)
    check_trainer(trainer)
    check_output(trainer.args.output_dir)
    check_columns(trainer.reward_funcs, trainer.train_dataset, trainer.eval_dataset)
    options = dict(engine_options or {})
    if engine == "vllm":
        _add_vllm_options(trainer, options)
    config = _config_of(trainer, config or RuntimeConfig())
    before = trainer.optimizer, trainer.model_wrapped
    rt, forget = None, keep_initial_adapter(trainer)
    try:
        prepare(trainer)
        rt = share(
            engine,
            trainer.model,
            trainer.optimizer,
            engine_options=options if isinstance(engine, str) and (options or engine == "vllm") else None,
            tokenizer=trainer.processing_class,
            config=config,
        )
        sampling = sampling_of(trainer, rt)
        rt.engine.sampling_params(None, **sampling)  # which refuses by name what the engine lacks
        check(rt, sampling=sampling)
        _set(trainer, rt, ColoGeneration(trainer, rt, sampling, context=_context_of(trainer, rt), seeded=seeded))
    except BaseException:
        if rt is not None:
            rt.close()
        trainer.optimizer, trainer.model_wrapped = before
        forget()
        raise
    rt.at_close(forget)
    _warn_of_filters(trainer)
    logger.info("attached: %s; %s", rt.engine.placement, rt.transport.reason)
    return rt


def detach(trainer: Any) -> None:
    """Close the trainer's runtime, and leave the trainer as it was made. Does nothing without one."""
    runtime = getattr(trainer, "colo", None)
    if runtime is not None:
        runtime.close()


def _config_of(trainer: Any, config: RuntimeConfig) -> RuntimeConfig:
    """Settings with the trainer's accumulation. Raises: `ValueError` for what would clip gradients that are gone."""
    config = replace(config, accumulation_steps=trainer.args.gradient_accumulation_steps)
    if config.release_gradients and trainer.args.max_grad_norm:
        raise ValueError(
            f"release_gradients=True leaves no gradients for max_grad_norm={trainer.args.max_grad_norm} to clip: pass "
            "max_grad_norm=0 to the trainer's config"
        )
    return config


def sampling_of(trainer: Any, rt: Runtime) -> dict[str, Any]:
    """The engine's sampling options, by name, that a trainer asks for."""
    args = trainer.args
    sampling: dict[str, Any] = {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
    }
    if trainer.repetition_penalty != 1.0:
        sampling["repetition_penalty"] = trainer.repetition_penalty
    given = dict(args.generation_kwargs or {})
    if not given.get("ignore_eos"):
        ends = getattr(trainer, "eos_token_ids", None) or [trainer.processing_class.eos_token_id]
        sampling["stop_token_ids"] = [token for token in ends if token is not None]
    if args.vllm_structured_outputs_regex is not None:
        sampling["structured_outputs"] = _structured_outputs(rt, args.vllm_structured_outputs_regex)
    return sampling | given


def _set(trainer: Any, rt: Runtime, generation: ColoGeneration) -> None:
    """Set what makes a trainer generate with colo, and have the runtime's end take it back."""
    handles = watch_forwards(trainer.model, rt)
    callback = PhaseCallback(trainer, rt, generation)
    trainer.add_callback(callback)
    new = {
        "colo": rt,
        "vllm_generation": generation,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "_last_loaded_step": -1,
        "reward_funcs": [
            checked(reward, name, trainer)
            for reward, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        ],
    }
    before = {name: getattr(trainer, name) for name in new if hasattr(trainer, name)}
    for name, value in new.items():
        setattr(trainer, name, value)

    def take_back() -> None:
        for handle in handles:
            handle.remove()
        trainer.remove_callback(callback)
        for name in new:
            if name in before:
                setattr(trainer, name, before[name])
            else:
                delattr(trainer, name)

    rt.at_close(take_back)


def choose_process(options: dict[str, Any], num_ranks: int) -> None:
    """Have vLLM run in this process, or in one of its own for each of several ranks, unless `options` say otherwise.

    Raises: `Unsupported` for engines within several ranks, which would take the ranks' process group for their own.
    """
    if not options.setdefault("own_process", num_ranks > 1) and num_ranks > 1:
        raise Unsupported(f"vLLM within each of {num_ranks} ranks takes them for its own: leave own_process=False out")


def _add_vllm_options(trainer: Any, options: dict[str, Any]) -> None:
    """Options of vLLM that follow from the trainer's."""
    args = trainer.args
    choose_process(options, trainer.accelerator.num_processes)
    if args.vllm_max_model_length is not None:
        options.setdefault("max_model_len", args.vllm_max_model_length)
    if args.vllm_structured_outputs_regex is not None:
        options.setdefault("tokenizer", trainer.processing_class.name_or_path)
        options.setdefault("skip_tokenizer_init", False)


def _context_of(trainer: Any, rt: Runtime) -> int:
    """The most tokens of a prompt and its completion."""
    llm = getattr(rt.engine, "llm", None)
    found = llm.llm_engine.model_config.max_model_len if llm is not None else positions_of(trainer.model.config).count
    return min(limit for limit in (found, trainer.args.vllm_max_model_length, sys.maxsize) if limit)


def _structured_outputs(rt: Runtime, regex: str) -> Any:
    """vLLM's option for completions that match `regex`. Raises: `Unsupported` for another engine."""
    if rt.engine.name != "vllm":
        raise Unsupported("vllm_structured_outputs_regex needs vLLM: attach with engine='vllm', or leave it out")
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(regex=regex)


def _warn_of_filters(trainer: Any) -> None:
    filters = [
        name
        for name, neutral in (("top_p", (1.0,)), ("top_k", (0, -1, None)), ("min_p", (0.0, None)))
        if getattr(trainer, name) not in neutral
    ]
    if filters and getattr(trainer, "vllm_importance_sampling_correction", False):
        warnings.warn(
            f"sampling with {', '.join(filters)} cuts tokens off, and TRL's importance correction compares "
            "probabilities of what is left with those of all tokens: its ratio is biased (huggingface/trl#6789), and "
            "TRL takes no mask of them (vLLM's return_sampling_mask). Sample without filters, or set "
            "vllm_importance_sampling_correction=False",
            stacklevel=3,
        )
