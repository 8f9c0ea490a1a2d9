"""The flag: `fast_inference=True` in a config that is TRL's in everything else."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from transformers import AutoConfig, AutoProcessor, BitsAndBytesConfig, Trainer, set_seed
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.models.activation_offloading import OffloadActivations
from trl.trainer import grpo_trainer

from colo.assembly.arguments import chosen_device, default_engine
from colo.assembly.launch import check_attention, refuse_adapted_head, revision_of, start, tokenizer_of
from colo.config import MomentDtype, Offload, OptimizerState, RuntimeConfig
from colo.errors import Unsupported
from colo.trl.attachment import ATTACHED, add_tokenizer, add_vllm_options, attach
from colo.trl.checks import (
    PromptReader,
    check_args,
    check_checkpoint,
    check_columns,
    check_json,
    check_options,
    check_output,
    check_released,
)
from colo.trl.generation import initialized_once
from colo.trl.partial import PartialRollouts, check_partial
from colo.units import check_digits
from colo.weights.sources.peft import active_adapters, check_lora_config

if TYPE_CHECKING:
    from colo.runtime import Runtime

_OPTIONS_OF_A_START = ("dtype", "revision", "attn_implementation", "quantization_config", "trust_remote_code")
"""Keys of `model_init_kwargs` that colo takes. The last TRL writes there; a model with its own code is refused."""

_SWITCHES = (
    "fast_inference",
    "colo_release_gradients",
    "colo_offload_activations",
    "colo_fold_adapter",
    "colo_seeded",
    "colo_partial_rollouts",
)

_OF_OPTIMIZER = ("optimizers", "optimizer_cls_and_kwargs")
"""Arguments of a trainer in the place of options for an optimizer."""

T = TypeVar("T")

FOLDED = "or publish it folded into the weights: colo_fold_adapter=True"
"""Advice for an adapter that is more than LoRA."""

_FLAG = "pass args=ColoGRPOConfig(..., fast_inference=True), or ColoRLOOConfig"


@dataclass
class ColoOptions:
    """The fields that colo adds to a config of TRL's."""

    fast_inference: bool = field(
        default=False, metadata={"help": "Generate with an engine that has the trainer's own weights."}
    )
    colo_engine: str = field(
        default="auto", metadata={"help": "`vllm`, or `torch` for the embedded one; vLLM on a GPU where it is there."}
    )
    colo_engine_options: dict | str | None = field(  # type: ignore[type-arg]
        default=None, metadata={"help": "Options of `vllm.LLM` by name, and `own_process`; as JSON on a command line."}
    )
    colo_kv_cache_bytes: str | None = field(
        default=None,
        metadata={"help": "Size of the KV cache, such as 4GiB; by default 64 sequences of 4,096 tokens, if they fit."},
    )
    colo_offload: str = field(
        default="auto", metadata={"help": "When trainer state leaves for a rollout: `auto`, `always` or `never`."}
    )
    colo_optimizer: str = field(
        default="auto",
        metadata={"help": "Where the optimizer's state is while it steps: `auto`, `resident` or `streamed`."},
    )
    colo_resident_state_bytes: str | None = field(
        default=None,
        metadata={"help": "Streamed state that stays on the GPU, such as 30GiB; with `auto` what fits."},
    )
    colo_moment_dtype: str = field(
        default="float32",
        metadata={"help": "Precision of the optimizer's moments between steps: `float32`, or `bfloat16` in half."},
    )
    colo_release_gradients: bool = field(
        default=False,
        metadata={"help": "Step and drop each gradient within the backward pass; its optimizer's state is streamed."},
    )
    colo_offload_activations: bool = field(
        default=False,
        metadata={"help": "Keep what a forward pass saves, such as layers' inputs, in host memory until its backward."},
    )
    colo_fold_adapter: bool = field(
        default=False,
        metadata={"help": "Publish an adapter folded into the weights: one that is more than LoRA, such as DoRA."},
    )
    colo_seeded: bool = field(
        default=False,
        metadata={"help": "Seed every rollout by its step: a resumed run draws what the first would have."},
    )
    colo_partial_rollouts: bool = field(
        default=False,
        metadata={"help": "Train on the prompts that end first; the others go on in later steps, from newer weights."},
    )
    colo_max_age: int | None = field(
        default=None,
        metadata={"help": "With partial rollouts: completions with tokens of more versions back begin anew."},
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            check_digits(each.name, getattr(self, each.name))
        for name in self._VALID_DICT_FIELDS:  # type: ignore[attr-defined]  # of transformers, which reads them
            check_json(name, getattr(self, name, None))
        for name in _SWITCHES:
            if getattr(self, name) not in (True, False):  # "false" would be true
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if not self.num_generations:  # type: ignore[attr-defined]  # TRL's, which it divides by
            raise ValueError("num_generations must be at least 2, not 0: rewards are compared within a group")
        self.refuse_use_vllm()
        self.colo_offload = _choice("colo_offload", self.colo_offload, Offload)
        self.colo_optimizer = _choice("colo_optimizer", self.colo_optimizer, OptimizerState)
        self.colo_moment_dtype = _choice("colo_moment_dtype", self.colo_moment_dtype, MomentDtype)
        if self.colo_partial_rollouts and self.colo_seeded:
            raise ValueError(
                "colo_seeded seeds completions by their step, and colo_partial_rollouts spreads them over several "
                "of them: leave one out"
            )
        if self.colo_max_age is not None and not self.colo_partial_rollouts:
            raise ValueError("colo_max_age is of colo_partial_rollouts: set that too, or leave it out")
        self.choose_engine()
        if self.colo_engine not in ("torch", "vllm"):
            raise ValueError(f"colo_engine must be 'auto', 'vllm' or 'torch', not {self.colo_engine!r}")
        # the runtime's own checks, with the names of the flag's fields
        try:
            self.colo_config()
        except (TypeError, ValueError) as error:
            raise ValueError(f"colo_{error}") from None
        super().__post_init__()  # type: ignore[misc]
        if self.colo_release_gradients:
            check_released(self)
        # after `super()`, which has parsed JSON
        if not isinstance(self.colo_engine_options, dict | None):
            raise ValueError(f"colo_engine_options must be a mapping, or JSON of one, not {self.colo_engine_options!r}")

    def refuse_use_vllm(self) -> None:
        """Raise `ValueError` for TRL's own vLLM beside colo's engine; either may have been set later."""
        if self.fast_inference and getattr(self, "use_vllm", False):
            raise ValueError("fast_inference takes the place of use_vllm: leave use_vllm out")

    def get_warmup_steps(self, *args: Any, **given: Any) -> int:
        """Return TRL's, which every trainer asks for as it begins to train; warn in one that has not read the flag."""
        if self.fast_inference and not hasattr(self, ATTACHED):
            warnings.warn(
                "fast_inference=True is in the config of a trainer that trains as TRL's own, without colo's engine: "
                "make a ColoGRPOTrainer or ColoRLOOTrainer with it, or call colo.attach(trainer)",
                stacklevel=2,
            )
        return super().get_warmup_steps(*args, **given)  # type: ignore[misc, no-any-return]

    def choose_engine(self) -> None:
        """Put the engine that is there in the place of `auto`."""
        if self.colo_engine == "auto":
            device = "cpu" if getattr(self, "use_cpu", False) else None
            self.colo_engine = default_engine(chosen_device(device), tell=self.fast_inference)

    def colo_config(self) -> RuntimeConfig:
        """The runtime's settings."""
        return RuntimeConfig(
            offload=Offload(self.colo_offload),
            optimizer=OptimizerState(self.colo_optimizer),
            moment_dtype=MomentDtype(self.colo_moment_dtype),
            kv_cache_bytes=self.colo_kv_cache_bytes,  # type: ignore[arg-type]  # read as a size
            resident_state_bytes=self.colo_resident_state_bytes,  # type: ignore[arg-type]  # read as a size
            release_gradients=self.colo_release_gradients,
            accumulation_steps=self.gradient_accumulation_steps,  # type: ignore[attr-defined]  # TRL's
            fold_adapter=self.colo_fold_adapter,
        )


def _choice(name: str, value: str, kind: type[Offload] | type[OptimizerState] | type[MomentDtype]) -> str:
    if value not in tuple(kind):
        raise ValueError(f"{name} must be one of {', '.join(kind)}, not {value!r}")
    return kind(value).value


def _with_old_name(kind: type[T]) -> type[T]:
    """Let a config take `colo_kv_cache_mib`, the earlier name of `colo_kv_cache_bytes`, with a warning."""
    init = kind.__init__

    @functools.wraps(init)
    def with_old_name(self: Any, *args: Any, colo_kv_cache_mib: int | None = None, **given: Any) -> None:
        if colo_kv_cache_mib is not None:
            new = f'colo_kv_cache_bytes="{colo_kv_cache_mib}MiB"'
            if "colo_kv_cache_bytes" in given:
                raise TypeError(f"colo_kv_cache_mib is the earlier name of colo_kv_cache_bytes: pass {new} alone")
            warnings.warn(f"colo_kv_cache_mib has another name now: pass {new}", FutureWarning, stacklevel=2)
            given["colo_kv_cache_bytes"] = f"{colo_kv_cache_mib}MiB"
        init(self, *args, **given)

    kind.__init__ = with_old_name  # type: ignore[method-assign]  # a field would be saved beside the new one
    return kind


@_with_old_name
@dataclass
class ColoGRPOConfig(ColoOptions, GRPOConfig):  # type: ignore[misc]
    """`GRPOConfig` with `fast_inference` and colo's options."""

    # TRL parses the JSON of these fields from a command line
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "colo_engine_options"]  # noqa: RUF012


@_with_old_name
@dataclass
class ColoRLOOConfig(ColoOptions, RLOOConfig):  # type: ignore[misc]
    """`RLOOConfig` with `fast_inference` and colo's options."""

    _VALID_DICT_FIELDS = [*RLOOConfig._VALID_DICT_FIELDS, "colo_engine_options"]  # noqa: RUF012


class _NoRuntime:
    """Stands for the runtime of a trainer that has none, as an attribute of its class."""

    def __get__(self, trainer: Any, kind: type) -> Any:
        raise AttributeError(f"this trainer has no runtime: it was closed, or made without the flag; {_FLAG}")


class _WithEngine:
    """Starts the engine first for a model that is named, and attaches to one that is given.

    A model that accelerate will shard is loaded by TRL: a rank's engine has memory of its own.
    """

    overrides_steps = True  # which options in `OF_FLAG` need: see `attach`

    # on the class, without `__set__`: the attribute that `attach` sets on the instance wins
    colo: Runtime = cast("Runtime", _NoRuntime())

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *positional: Any, **options: Any
    ) -> None:
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        # positional arguments behind `args` go by the names of TRL's own signature, which grows with versions
        taken = inspect.signature(super().__init__)
        options |= zip(list(taken.parameters)[3:], positional, strict=False)
        if not getattr(args, "fast_inference", False):
            warnings.warn(
                f"{type(self).__name__} without fast_inference=True trains as TRL's own trainer, without colo's "
                f"engine{_unused(args)}: {_FLAG}",
                stacklevel=2,
            )
            super().__init__(model, reward_funcs, args, **options)  # type: ignore[call-arg]
            return
        # here, before an engine is started, which takes a minute
        # a TypeError for a name that TRL does not take; this one an older TRL does not, and colo does
        taken.bind(model, reward_funcs, args, **{n: v for n, v in options.items() if n != "quantization_config"})
        args.refuse_use_vllm()
        check_args(args)
        is_made = getattr(type(self), "create_optimizer", None) is Trainer.create_optimizer  # by the options
        check_options(args, makes_optimizer=is_made and not any(options.get(name) for name in _OF_OPTIMIZER))
        check_output(args.output_dir)
        if args.colo_partial_rollouts:
            check_partial(args, options)
        rewards = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
        datasets = options.get("train_dataset"), options.get("eval_dataset")
        others = {"rollout_func": options.get("rollout_func"), "environments": options.get("environment_factory")}
        read_by = functools.partial(_prompt_reader, model, args, options)
        check_columns(rewards, *datasets, **others, read_by=read_by)
        # both ways in which accelerate is told: by TRL's arguments, or by its launcher's environment
        is_sharded = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        if not isinstance(model, str) or is_sharded:
            with initialized_once(model, args.beta):
                super().__init__(model, reward_funcs, args, **options)  # type: ignore[call-arg]
            # the trainer has made and prepared the model: only the engine is missing
            self._attach(args, args.colo_engine, args.colo_engine_options)
            return
        # a copy: TRL writes into those that it reads, for rewards that are named and for the reference
        given, args.model_init_kwargs = args.model_init_kwargs, dict(args.model_init_kwargs or {})
        folders = ExitStack()
        try:
            engine, made = _started(model, args, options, folders)
            try:
                if (attention := args.model_init_kwargs.get("attn_implementation")) is not None:
                    made.set_attn_implementation(attention)
                with initialized_once(made, args.beta), _read_by_start():
                    super().__init__(made, reward_funcs, args, **options)  # type: ignore[call-arg]
                self._attach(args, engine, None)
                self.colo.at_close(folders.close)  # until then vLLM may start again, and read them
            except BaseException:
                # the trainer does not own the engine yet
                engine.close()
                raise
        except BaseException:
            folders.close()
            raise
        finally:
            # as it was given: the config is saved with checkpoints
            args.model_init_kwargs = given

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        trained = self.model if model is None else model  # type: ignore[attr-defined]  # TRL's
        if getattr(self, "colo", None) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        check_checkpoint(resume_from_checkpoint, trained)
        active = active_adapters(trained) if hasattr(trained, "peft_config") else []
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        if len(getattr(trained, "peft_config", ())) > 1 and "default" in active:
            # transformers before 5.23 reads folders of further adapters alone, such as the reference's
            trained.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
        if len(active) > 1:
            trained.base_model.set_adapter(active)  # of which transformers has left the first one active

    def _load_best_model(self) -> None:
        trained = self.model  # type: ignore[attr-defined]  # TRL's
        has_runtime = getattr(self, "colo", None) is not None
        if has_runtime and hasattr(trained, "peft_config") and active_adapters(trained) != ["default"]:
            # transformers would load "default" in the place of the adapter that trains
            self._load_from_checkpoint(self.state.best_model_checkpoint)  # type: ignore[attr-defined]
        else:
            super()._load_best_model()  # type: ignore[misc]

    def train(self, *args: Any, **given: Any) -> Any:
        """Train as TRL does. Whatever ends it, the runtime is in no phase afterwards."""
        try:
            return super().train(*args, **given)  # type: ignore[misc]
        except BaseException:
            # no callback is told of it, and `rollout()` after Ctrl-C would be within the rollout that was interrupted
            if (runtime := getattr(self, "colo", None)) is not None:
                runtime.enter(None)
            raise

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:
        """Enter what a loss is computed in; activations leave for host memory there, where the config says so."""
        with ExitStack() as stack:
            stack.enter_context(super().compute_loss_context_manager())  # type: ignore[misc]
            if getattr(self, "colo", None) is not None and self.args.colo_offload_activations:  # type: ignore[attr-defined]
                # not whole training steps, as TRL's other trainers do: this one's begins with the rollout; and not
                # within `compute_loss`, which a subclass may call twice: entered anew, it forgets the first graph
                self._activations.update_model_params(self.model)  # type: ignore[attr-defined]  # they are no activations
                stack.enter_context(self._activations)
            yield

    @functools.cached_property
    def _activations(self) -> Any:
        # one tensor or two, by torch's version, are saved for a layer that is checkpointed: the inputs of one or two
        # layers leave while the next layer computes
        return OffloadActivations(max_fwd_stash_size=2)

    def _attach(self, args: Any, engine: Any, engine_options: Any) -> None:
        attach(self, engine=engine, engine_options=engine_options, config=args.colo_config(), seeded=args.colo_seeded)
        if args.colo_partial_rollouts:
            try:
                generation = self.vllm_generation  # type: ignore[attr-defined]  # set by `attach`
                generation.partial = PartialRollouts(
                    self, self.colo, generation.sampling, check=generation.check, max_age=args.colo_max_age
                )
            except BaseException:
                self.colo.close()
                raise

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        partial = getattr(getattr(self, "vllm_generation", None), "partial", None)
        if partial is None or not self.model.training:  # type: ignore[attr-defined]  # TRL's
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        inputs = partial.exchange(inputs)
        try:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        finally:
            partial.forget()


class ColoGRPOTrainer(_WithEngine, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` that generates on an engine with its own weights, where its config says `fast_inference`.

    Arguments are those of `GRPOTrainer`. A model that is named by a folder or a hub id is loaded once, into the memory
    of the engine: in bf16 on CUDA unless `model_init_kwargs` has a `dtype`, with fp32 masters for the optimizer.
    """


class ColoRLOOTrainer(_WithEngine, RLOOTrainer):  # type: ignore[misc]
    """`RLOOTrainer` in the same way; see `ColoGRPOTrainer`."""


def _prompt_reader(model: Any, args: Any, options: Mapping[str, Any]) -> PromptReader | None:
    """Reads prompts as the trainer will; `None` where `attach` has more to read them by, or the checkpoint has less."""
    if not isinstance(model, str):
        return None
    given = {**(args.colo_engine_options or {}), **(args.model_init_kwargs or {})}
    trusts = getattr(args, "trust_remote_code", False)
    how: dict[str, Any] = {"revision": revision_of(given), "trust_remote_code": trusts}
    with suppress(OSError, ValueError):  # what a checkpoint lacks is told as it is loaded
        tokenizer, config = options.get("processing_class"), AutoConfig.from_pretrained(model, **how)
        tokenizer = tokenizer_of(model, **how) if tokenizer is None else tokenizer
        if hasattr(tokenizer, "convert_ids_to_tokens"):
            return PromptReader.of(tokenizer, config, args)
    return None


def _unused(args: Any) -> str:
    """Name colo's options that were given without the flag."""
    known = {one.name: one.default for one in fields(ColoOptions)}
    given = [name for name, default in known.items() if getattr(args, name, default) != default]
    given = [name for name in given if name != "colo_engine"]  # which is chosen for all
    return f", and {', '.join(given)} without effect" if given else ""


@contextmanager
def _read_by_start() -> Iterator[None]:
    """Keep TRL from saying that `model_init_kwargs` are ignored: the model that it is given was made with them."""

    def is_true(record: logging.LogRecord) -> bool:
        return "`model_init_kwargs` will be ignored" not in record.getMessage()

    loggers = [logging.getLogger(kind.__module__) for kind in (GRPOTrainer, RLOOTrainer)]
    for logger in loggers:
        logger.addFilter(is_true)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_true)


def _started(model: str, args: Any, options: dict[str, Any], folders: ExitStack) -> tuple[Any, Any]:
    """The engine and the model; what they are made with is taken out of the trainer's `options`.

    A revision is in `args.model_init_kwargs` afterwards, and the tokenizer in `options`: for a model that exists TRL
    would read the reference of a KL term and the tokenizer at the hub's "main".
    """
    engine_options = _engine_options(model, args, options.pop("quantization_config", None))
    if (attention := args.model_init_kwargs.get("attn_implementation")) is not None:
        check_attention(model, attention, revision_of(engine_options or {}))
    given, folded = options.get("peft_config"), args.colo_fold_adapter
    if getattr(given, "peft_type", None) == "LORA":
        check_lora_config(given, folded=folded, advice=FOLDED)
        # a TRL with the fused head computes from the head's weight alone, and would not train an adapter on it
        if hasattr(grpo_trainer, "add_fused_lm_head"):
            refuse_adapted_head(model, given, revision_of(engine_options or {}), folded=folded)
    # one that will be folded is TRL's to add: the engine has none
    lora = None if folded else options.pop("peft_config", None)
    if revision := (engine_options or {}).get("revision"):
        args.model_init_kwargs["revision"] = revision
        if options.get("processing_class") is None:
            # as TRL reads it, whose versions differ in whether they trust code
            options["processing_class"] = AutoProcessor.from_pretrained(
                model,
                revision=revision,
                truncation_side="left",
                padding_side="left",
                trust_remote_code=getattr(args, "trust_remote_code", False),
            )
    if args.colo_engine == "vllm" and options.get("processing_class") is not None:  # else they have the same one
        assert engine_options is not None, "vLLM always has some"
        add_tokenizer(engine_options, args, options["processing_class"], folders)
    set_seed(args.seed)  # as TRL does before it makes a model, whose adapter is random
    return start(
        model,
        engine=args.colo_engine,
        engine_options=engine_options,
        lora=lora,
        device=args.device,
        dtype=args.model_init_kwargs.get("dtype"),
        config=args.colo_config(),
    )


def _engine_options(model: str, args: Any, quantization_config: Any) -> dict[str, Any] | None:
    """Options for `start`. Raises: `Unsupported` for what would be dropped, by name."""
    model_init_kwargs = args.model_init_kwargs
    others = [name for name in model_init_kwargs if name not in _OPTIONS_OF_A_START]
    if others:
        raise Unsupported(
            f"model_init_kwargs has {', '.join(others)}, which fast_inference does not pass on: load the model "
            "yourself and give that to the trainer"
        )
    options = dict(args.colo_engine_options or {})
    if model_init_kwargs.get("revision"):
        _add(options, "revision", model_init_kwargs["revision"])
    if (among := model_init_kwargs.get("quantization_config")) is not None:
        if quantization_config is not None:
            raise ValueError("quantization_config is among model_init_kwargs too: leave one out")
        quantization_config = among
    if quantization_config is not None:
        if isinstance(quantization_config, dict):
            quantization_config = BitsAndBytesConfig(**quantization_config)
        if args.colo_engine != "vllm":
            raise Unsupported("fast_inference shares a quantized model with vLLM alone: colo_engine='vllm'")
        if not getattr(quantization_config, "load_in_4bit", False):
            raise Unsupported("fast_inference shares a quantized model with vLLM in 4 bits: load_in_4bit=True")
        from colo.engines.vllm.client.start import check_packing

        check_packing(quantization_config, model, options)
        _add(options, "quantization", "bitsandbytes")
    if args.colo_engine != "vllm":
        return options or None
    add_vllm_options(options, args, args.world_size, model)
    return options


def _add(options: dict[str, Any], name: str, value: str) -> None:
    """Add an option. Raises: `Unsupported` where `colo_engine_options` has another."""
    if options.setdefault(name, value) != value:
        raise Unsupported(
            f"colo_engine_options has {name}={options[name]!r}, and the trainer is to have {value!r}: leave one out"
        )
