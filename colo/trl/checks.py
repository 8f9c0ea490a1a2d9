"""Checks of a trainer, its LM head, folders and reward functions, before an engine is started or a step is made."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin
from datasets import Dataset, IterableDataset
from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it has no __all__
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import GenerationConfig, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.training_args import ParallelMode
from transformers.utils import is_liger_kernel_available

from colo import unsloth
from colo.engine import SamplingParams
from colo.engines.sampling import TAKEN, check_taken
from colo.engines.text import positions_of
from colo.engines.torch import TorchEngine
from colo.errors import Unsupported
from colo.memory.storage import is_dtensor
from colo.rl.logit_tiles import LogitStep
from colo.rl.logprob import SeenPass, why_not_linear
from colo.rl.rewards import check_rewards
from colo.weights.mismatch import evaluating
from colo.weights.sources.peft import active_adapters

# ---- the trainer ----------------------------------------------------------------------------------------------------

GENERATE = ("self", "prompts", "images", "num_generations", "profiler")
"""Parameters of `VLLMGeneration.generate`, in whose place colo's stands."""

_IN_FILES = ("accelerator_config", "fsdp_config", "deepspeed")
"""Options that may name a file of JSON instead."""

READ_OF_TRAINER = (
    "accelerator",
    "args",
    "max_completion_length",
    "min_p",
    "model",
    "num_generations",
    "processing_class",
    "repetition_penalty",
    "reward_func_names",
    "reward_funcs",
    "state",
    "temperature",
    "top_k",
    "top_p",
    "use_vllm",
    "_metrics",
)
"""Attributes of a trainer that colo reads."""


def check_contract(trainer: Any) -> None:
    """Raise `Unsupported`, with method and version, where this TRL is not the one that colo knows (1.4 to 1.16)."""
    version = importlib.metadata.version("trl")
    try:
        from trl.generation.vllm_generation import VLLMGeneration
    except ImportError as error:
        raise Unsupported(f"TRL {version} has no trl.generation.vllm_generation.VLLMGeneration: {_TESTED}") from error
    # by signature, not by version: a changed TRL is refused where it differs, not where it is new
    for method, expected in (("generate", GENERATE), ("sync_weights", ("self",))):
        found = tuple(inspect.signature(getattr(VLLMGeneration, method)).parameters)
        if found != expected:
            raise Unsupported(
                f"VLLMGeneration.{method} of TRL {version} takes {', '.join(found)}, where colo gives "
                f"{', '.join(expected)}: {_TESTED}"
            )
    lacking = [name for name in READ_OF_TRAINER if not hasattr(trainer, name)]
    if lacking:
        raise Unsupported(
            f"{type(trainer).__name__} of TRL {version} has no {', '.join(lacking)}: colo attaches to GRPOTrainer, "
            f"RLOOTrainer and subclasses of them; {_TESTED}"
        )


_TESTED = "colo is tested with TRL 1.4 to 1.16"


def check_json(name: str, given: Any) -> None:
    """Raise `ValueError` for an option whose text, or the file that it names, is no object in JSON, by its name."""
    if not isinstance(given, str):
        return
    is_text = given.startswith("{")  # as transformers tells them apart
    is_file = not is_text and name in _IN_FILES and Path(given).is_file()
    if not is_text and not is_file:
        return

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    place = f"{name}: {given}" if is_file else name
    try:
        text = Path(given).read_text(encoding="utf-8") if is_file else given
        found = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{place} is not JSON in UTF-8 ({error}): write an object, such as {{"key": 1}}') from None
    if not isinstance(found, dict):
        raise ValueError(f'{place} is {found!r:.80}, and not an object, such as {{"key": 1}}')


def check_args(args: Any) -> None:
    """Raise `Unsupported` or `ValueError` for what a config asks for and colo does not do."""
    if getattr(args, "use_transformers_continuous_batching", False) or getattr(args, "use_transformers_paged", False):
        raise ValueError("use_transformers_continuous_batching and colo exclude each other: leave it out")
    if getattr(args, "vllm_tensor_parallel_size", 1) != 1:
        raise Unsupported(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}: colo runs an engine on each GPU, leave 1"
        )
    if getattr(args, "cast_lm_head_to_fp32", False):
        raise Unsupported(
            "cast_lm_head_to_fp32=True makes the trainer's head another than the engine's: leave it out, colo computes "
            "log-probabilities in fp32"
        )
    for name in ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"):
        if (given := getattr(args, name, None)) and not isinstance(given, Mapping):
            raise ValueError(f"{name} must be a mapping, or JSON of one, not {given!r:.80}")
    if not 1e-30 <= getattr(args, "temperature", 1.0) < math.inf:
        raise ValueError(
            f"temperature must be above 0, not {args.temperature}: logits are divided by it, in fp32, which takes "
            "1e-30 and more"
        )
    if others := [weight for weight in getattr(args, "reward_weights", None) or [] if not math.isfinite(weight)]:
        raise ValueError(
            f"reward_weights must be finite numbers, not {others[0]}: TRL would leave such rewards out, or have no "
            "advantage to train on"
        )
    # the numbers that TRL asks its vLLM in this process and its server for
    size, n = getattr(args, "num_generations", None), (getattr(args, "generation_kwargs", None) or {}).get("n")
    if n not in (None, 1, size):
        raise ValueError(
            f"generation_kwargs has n={n}, and num_generations={size} says how many completions a prompt has: leave n "
            "out"
        )
    if getattr(args, "deepspeed", None):
        raise Unsupported(_DEEPSPEED)
    if getattr(args, "colo_offload_activations", False):
        _check_offloading(args)
    if getattr(args, "vllm_importance_sampling_correction", False):
        _check_correction(args)
    # TRL asks only where `use_vllm` is set as a trainer is made, and colo sets it later
    if getattr(args, "loss_type", None) == "vespo" and args.vllm_importance_sampling_correction:
        mode = args.vllm_importance_sampling_mode
        if mode not in ("token_truncate", "token_mask"):
            raise ValueError(
                f"loss_type='vespo' takes a correction of each token, and vllm_importance_sampling_mode={mode!r} is of "
                "sequences: set 'token_truncate' or 'token_mask', or vllm_importance_sampling_correction=False"
            )


def _check_correction(args: Any) -> None:
    """Raise `ValueError` for a correction that TRL does not know, or with which losses are zero or turned round."""
    mode, low = args.vllm_importance_sampling_mode, getattr(args, "vllm_importance_sampling_clip_min", None)
    if mode not in _CORRECTIONS:
        raise ValueError(f"vllm_importance_sampling_mode must be one of {', '.join(_CORRECTIONS)}, not {mode!r}")
    # TRL's earlier name of it, too
    names = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    name = names[0] if hasattr(args, names[0]) else names[1]
    high = math.inf if (given := getattr(args, name, None)) is None else given
    if high <= 0 or (mode.endswith("mask") and not (low or 0) <= 1 <= high):
        raise ValueError(
            f"vllm_importance_sampling_mode={mode!r} with {name}={high:g} and vllm_importance_sampling_clip_min={low} "
            "leaves nothing to train on, since ratios of equal probabilities are 1: set limits below and above 1"
        )


_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def _check_offloading(args: Any) -> None:
    from trl.trainer import grpo_trainer

    if args.device.type == "cpu":
        raise ValueError(
            "colo_offload_activations=True moves activations to host memory, where those of a CPU are: leave it out"
        )
    # Without it the logits of all tokens are saved. TRL's class kept tensors of reused addresses on the device up to
    # 1.7, and in 1.4 from step to step; Liger's loss, up to 1.13, is a backward pass within the forward pass.
    if not hasattr(grpo_trainer, "add_fused_lm_head"):
        raise Unsupported(
            "colo_offload_activations=True needs TRL 1.15 or newer, not "
            f"{importlib.metadata.version('trl')}: older ones would move the logits of all tokens too"
        )


def check_options(args: Any, *, makes_optimizer: bool = True) -> None:
    """Raise `ValueError` for options with which TRL's trainer fails only once its model is there.

    What it makes of them is made here of one number, and dropped.
    """
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and field.name in _FINITE)):
            raise ValueError(f"{field.name} must be a finite number, not {value}")
        if isinstance(value, float) and _LARGEST < abs(value) < math.inf:
            raise ValueError(f"{field.name} must be a number of fp32, {_LARGEST:.1e} at most, not {value}")
    for name, (least, most) in _RANGES.items():
        value = getattr(args, name, None)
        if isinstance(value, (int, float)) and not least <= value <= most:
            limits = f"at least {least}" if most == math.inf else f"in {least} to {most}"
            raise ValueError(f"{name} must be {limits}, not {value}")
    if not args.output_dir:
        raise ValueError("output_dir is empty: name a folder")
    if not 0 <= args.seed <= 2**32 - args.world_size:  # a rank adds its own number
        raise ValueError(f"seed must be in 0 to {2**32 - args.world_size}, as NumPy takes it, not {args.seed}")
    alpha = args.neftune_noise_alpha
    if alpha is not None and not 0 <= alpha < 2**127:
        raise ValueError(f"neftune_noise_alpha must be at least 0, and a number of fp32, not {alpha}")
    if args.fsdp:
        _check_fsdp(args)
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError("use_liger_kernel needs liger-kernel: pip install liger-kernel, or leave it out")
    if (args.save_strategy == "best" or args.load_best_model_at_end) and args.metric_for_best_model is None:
        raise ValueError("save_strategy 'best' compares a metric: set metric_for_best_model, or another save_strategy")
    of_evaluation = ("per_device_eval_batch_size", "eval_accumulation_steps", "num_generations_eval")
    for name in ("num_iterations", "vllm_max_model_length", *(of_evaluation if args.eval_strategy != "no" else ())):
        if (count := getattr(args, name, None)) is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    for what, names, make in _MADE:
        if make is _make_optimizer and not makes_optimizer:
            continue
        try:
            make(args)
        except Exception as error:
            words = " ".join(str(error).split())
            raise ValueError(f"{what} cannot be had ({words}): change {names}") from error


_FINITE = ("learning_rate", "weight_decay", "beta", "warmup_steps", "num_train_epochs", "entropy_coef")
_LARGEST = torch.finfo(torch.float32).max
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("num_train_epochs", "weight_decay", "beta", "epsilon", "epsilon_high", "delta"), (0, math.inf)),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), (1e-30, math.inf)),
    **dict.fromkeys(("ref_model_mixup_alpha", "top_entropy_quantile"), (0, 1)),
    "ref_model_sync_steps": (1, math.inf),
    "pad_to_multiple_of": (1, 2**20),
}
"""The least and the most of numbers with which a step would fail, or train on nothing."""

_MOST_WORKERS = 1024


def _check_hub(args: Any) -> None:
    """Raise for a name that the hub does not take, or a hub that is not there; makes nothing there."""
    if args.push_to_hub:
        validate_repo_id(args.hub_model_id or Path(args.output_dir).absolute().name)
        if args.process_index == 0:  # which pushes
            HfApi(token=args.hub_token).whoami()


def _check_reports(args: Any) -> None:
    wanted = [name for name in args.report_to if name not in ("none", "azure_ml", "flyte")]  # two that are not listed
    get_reporting_integration_callbacks(wanted)
    there = get_available_reporting_integrations()
    if lacking := [name for name in wanted if name not in there]:
        raise ImportError(f"{', '.join(lacking)} is not installed here, but {', '.join(there) or 'none'}")


def _make_optimizer(args: Any) -> None:
    kind: Any = torch.optim.SGD
    options: dict[str, Any] = {"lr": args.learning_rate}
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    except ValueError as error:
        if "`model`" not in str(error):  # a few read the model's layers: of those the schedule alone is made
            raise
    optimizer = kind([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **options)
    steps = TrainingArguments.get_warmup_steps(args, 2)
    get_scheduler(args.lr_scheduler_type, optimizer, steps, 2, scheduler_specific_kwargs=args.lr_scheduler_kwargs)


def _make_loader(args: Any) -> None:
    workers = args.dataloader_num_workers
    if workers > _MOST_WORKERS:
        raise ValueError(f"dataloader_num_workers={workers} would start as many processes: {_MOST_WORKERS} at most")
    options: dict[str, Any] = {"persistent_workers": args.dataloader_persistent_workers, "pin_memory": False}
    options |= {"prefetch_factor": args.dataloader_prefetch_factor} if workers else {}
    context = getattr(args, "dataloader_multiprocessing_context", None)
    size, one = args.per_device_train_batch_size * args.steps_per_generation, Dataset.from_dict({"prompt": [""]})
    DataLoader(one, size, num_workers=workers, multiprocessing_context=context, **options)


def _checkpoint(args: Any) -> None:
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        given = getattr(args, f"{name}_kwargs", None)
        if given is not None and getattr(args, name, False):
            if not isinstance(given, Mapping):
                raise TypeError(f"{given!r} is not a mapping")
            one = torch.zeros(1, device="cpu", requires_grad=True)
            checkpoint(torch.neg, one, **{"use_reentrant": False, **given})


def _compile(args: Any) -> None:
    if args.torch_compile:
        DynamoBackend(str(args.torch_compile_backend).upper())
        if args.torch_compile_mode is not None and str(args.torch_compile_backend).lower() == "inductor":
            torch._inductor.list_mode_options(args.torch_compile_mode)


def _sample(args: Any) -> None:
    given = {"max_tokens": args.max_completion_length, "temperature": args.temperature, "top_p": args.top_p}
    given |= {"top_k": args.top_k or 0, "min_p": args.min_p or 0.0, "repetition_penalty": args.repetition_penalty}
    given |= {"structured_outputs": args.vllm_structured_outputs_regex} | (args.generation_kwargs or {})
    given = {name: value for name, value in given.items() if value is not None}
    if getattr(args, "colo_engine", None) == "torch":
        given = check_taken(given, TorchEngine.called, TorchEngine.or_else)
    SamplingParams(**{name: value for name, value in given.items() if name in TAKEN})
    GenerationConfig(cache_implementation=getattr(args, "cache_implementation", None))  # which TRL makes in any case


_MADE: Sequence[tuple[str, str, Callable[[Any], None]]] = (
    ("loggers", "report_to", _check_reports),
    ("the hub's repository", "push_to_hub, hub_model_id, output_dir or hub_token", _check_hub),
    (
        "optimizer and schedule",
        "optim, optim_args, learning_rate, adam_beta1, adam_beta2, adam_epsilon, lr_scheduler_type, "
        "lr_scheduler_kwargs or warmup_steps",
        _make_optimizer,
    ),
    (
        "batches",
        "per_device_train_batch_size, steps_per_generation, generation_batch_size or what begins with dataloader_",
        _make_loader,
    ),
    ("checkpointed activations", "gradient_checkpointing_kwargs or activation_checkpointing_kwargs", _checkpoint),
    ("torch.compile", "torch_compile_backend or torch_compile_mode", _compile),
    (
        "completions",
        "max_completion_length, temperature, top_p, top_k, min_p, repetition_penalty, cache_implementation, "
        "vllm_structured_outputs_regex or generation_kwargs",
        _sample,
    ),
)
"""Parts of a run, the options that they are made of, and what makes them."""


_DEEPSPEED = "colo does not know DeepSpeed's partitioned state: train without it"


def check_released(args: Any) -> None:
    """Raise `ValueError` where gradients that are released within the backward pass would have been clipped."""
    if args.max_grad_norm:
        raise ValueError(
            f"release_gradients=True leaves no gradients for max_grad_norm={args.max_grad_norm} to clip: pass "
            "max_grad_norm=0 to the trainer's config"
        )


_OF_TRLS_VLLM = (
    *("vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_model_impl", "vllm_group_port"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
)


def warn_of_unused(args: Any) -> None:
    """Warn of settings of the vLLM that TRL would start, which is none of colo's."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    given = {name: getattr(args, name) for name in _OF_TRLS_VLLM if name in defaults}
    if unused := [f"{name}={value!r}" for name, value in given.items() if value != defaults[name]]:
        warnings.warn(
            f"{', '.join(unused)} are of TRL's own vLLM and have no effect on colo's engine: the KV cache has "
            "kv_cache_bytes (colo_kv_cache_bytes), and vLLM's options are engine_options (colo_engine_options)",
            stacklevel=3,
        )


def check_trainer(trainer: Any) -> None:
    """Raise `Unsupported` or `ValueError` for what a trainer was made with and colo does not do."""
    if getattr(trainer, "colo", None) is not None:
        raise ValueError(
            "this trainer has a runtime, trainer.colo: train with it, or call colo.trl.detach(trainer) before it is "
            "attached anew"
        )
    # Unsloth's trainer has `use_vllm` set, and its model brings the vLLM
    if trainer.use_vllm and unsloth.engine_of(trainer.model) is None:
        raise ValueError("this trainer has a vLLM of its own: leave use_vllm out, colo starts the engine")
    if getattr(trainer, "_is_vlm", False) or not hasattr(trainer.processing_class, "convert_ids_to_tokens"):
        raise Unsupported("colo generates from text: a trainer with a processor for images is not supported")
    check_args(trainer.args)
    if trainer.is_deepspeed_enabled:
        raise Unsupported(_DEEPSPEED)
    if trainer.is_fsdp_enabled:
        _check_plugin(trainer.accelerator.state.fsdp_plugin)
        if getattr(trainer.args, "colo_offload_activations", False) and not trainer.args.gradient_checkpointing:
            raise Unsupported(
                "colo_offload_activations=True with FSDP needs gradient_checkpointing=True: without it a layer's "
                "gathered weights are saved too, and FSDP frees them while they are copied to host memory"
            )


def _check_fsdp(args: Any) -> None:
    """Raise for FSDP in one process, and for what `check_trainer` refuses of it, where transformers has read that."""
    if args.parallel_mode != ParallelMode.DISTRIBUTED:
        raise ValueError(
            "Using fsdp only works in distributed training, and this process is alone: start it with torchrun or "
            "accelerate launch, or leave fsdp out"
        )
    if plugin := getattr(args, "fsdp_plugin_args", None):
        _check_plugin(FullyShardedDataParallelPlugin(**plugin))


def _check_plugin(plugin: Any) -> None:
    """Raise `Unsupported` for a plugin of accelerate's that does not leave the shards of each weight on the device."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if getattr(plugin, "fsdp_version", 1) != 2:
        raise Unsupported("FSDP's first version flattens weights: set fsdp_version: 2 in accelerate's fsdp_config")
    if plugin.activation_checkpointing:
        raise Unsupported("FSDP's activation_checkpointing wraps layers anew: set gradient_checkpointing=True instead")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise Unsupported(
            "FSDP's offload_params keeps weights in host memory, and engines take them from the device: leave it out, "
            "colo moves the optimizer's state to the host for rollouts"
        )


# ---- folders: where a run will write, and what it resumes from -----------------------------------------------------

_WHOLE, _ADAPTER = "model.safetensors", "adapter_model.safetensors"


def check_output(folder: str | os.PathLike[str]) -> None:
    """Raise `OSError` where a run could not make a folder and write to it. Leaves nothing there."""
    path = Path(folder).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"output_dir {folder} cannot be made, {there} is a file: choose another output_dir")
    try:
        TemporaryFile(dir=there).close()
    except OSError:
        raise PermissionError(
            f"output_dir {folder} cannot be written to, {there} is closed: choose another output_dir"
        ) from None


def check_checkpoint(folder: str | os.PathLike[str], model: nn.Module) -> None:
    """Raise `ValueError` where a checkpoint has not all weights that train in `model`, or has them in other shapes.

    transformers loads what it finds there, warns of the rest, and trains on. Only safetensors files are looked at.
    """
    said = f"the checkpoint {folder} is not of this model:"
    change = "resume from a checkpoint of this run, or pass resume_from_checkpoint=None to begin anew"
    for adapter in active_adapters(model) if hasattr(model, "peft_config") else [None]:
        place = _place_of(Path(folder), adapter)
        if place is None:
            raise ValueError(f"{said} it has adapters, and {adapter!r} is none of them; {change}")
        if (found := _shapes(place)) is None:
            continue
        names = _names(model, adapter)
        missing = [shown[0] for shown, _ in names if not any(name in found for name in shown)]
        if missing:
            raise ValueError(f"{said} it lacks {len(missing)} of {len(names)} weights, {missing[0]} for one; {change}")
        for shown, shape in names:
            name = next(name for name in shown if name in found)
            if found[name] != shape:
                raise ValueError(f"{said} {name} has shape {found[name]} there, and {shape} here; {change}")


def _place_of(folder: Path, adapter: str | None) -> Path | None:
    """The folder of a checkpoint that has an adapter; `None` where it has others alone.

    PEFT saves each adapter in a folder of its name, but "default" beside them; transformers loads them from there.
    """
    others = {path.parent.name for path in folder.glob(f"*/{_ADAPTER}")}
    if adapter is None or not others or (folder / _WHOLE).is_file():
        return folder
    if adapter != "default":
        return folder / adapter if adapter in others else None
    return folder if (folder / _ADAPTER).is_file() else None


def _names(model: nn.Module, adapter: str | None) -> list[tuple[list[str], tuple[int, ...]]]:
    """For each weight that a checkpoint of `model`, or of its adapter, holds: the names that it may have there, and its
    shape.
    """
    names: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    # tied weights too: a checkpoint may have either name
    for name, p in model.named_parameters(remove_duplicate=False):
        # the last of equal names: PEFT's own come after those of modules
        head, found, tail = (name, "", "") if adapter is None else f"{name}.".rpartition(f".{adapter}.")
        if adapter is None or (p.requires_grad and found):
            plain = name if adapter is None else f"{head}.{tail}".removesuffix(".")
            # PEFT saves `modules_to_save` with and without its wrapper's name, and DoRA's vectors without `.weight`
            known = {plain: 1, plain.replace(".modules_to_save", ""): 1}
            if ".lora_magnitude_vector" in plain:
                known[plain.removesuffix(".weight")] = 1
            names.setdefault(id(p), []).extend(known)
            shapes[id(p)] = tuple(p.shape)
    return [(names[key], shapes[key]) for key in names]


def _shapes(folder: Path) -> Mapping[str, tuple[int, ...]] | None:
    """Shapes by name, from the headers of a checkpoint's files; `None` where there is no safetensors file."""
    from safetensors import safe_open

    # an adapter's file is looked at only where there is no whole model
    files = [path for name in (_WHOLE, _ADAPTER) if (path := folder / name).is_file()][:1]
    index = folder / f"{_WHOLE}.index.json"
    if not files and index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            names: Any = opened.keys()
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return shapes or None


# ---- reward functions ----------------------------------------------------------------------------------------------

_GIVEN_BY_TRL = frozenset(
    ("prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra", "log_metric")
)
"""Arguments that TRL gives a reward function beside the columns of the dataset."""


def checked(reward: Any, name: str, trainer: Any) -> Any:
    """`reward`, whose values are checked: one number or `None` for each completion, whose square fp32 holds.

    TRL takes NaN for `None` and trains on nothing, or fails in torch. A reward model is returned as it is.
    """
    if isinstance(reward, torch.nn.Module):
        return reward

    def check(rewards: Any, columns: Mapping[str, Any]) -> Any:
        count = len(columns["completions"])
        step = trainer.state.global_step + trainer.model.training  # which counts the steps that are done
        found = check_rewards(name, rewards, count, step=step, allow_none=True)
        for index, value in enumerate(found):
            if abs(value) > 1e18:  # TRL's deviation of a group would be infinite, and advantages 0 or NaN
                raise ValueError(
                    f"reward {name!r} returned {value:g} for completion {index} of {count} at step {step}, and TRL "
                    "computes with its square in fp32: return numbers below 1e18"
                )
        # a generator has been read by now, so that the list goes on; a tensor stays a tensor
        return rewards if isinstance(rewards, Sequence) or hasattr(rewards, "tolist") else found

    if is_awaited(reward):

        @functools.wraps(reward)
        async def call_and_await(*arguments: Any, **columns: Any) -> Any:
            return check(await reward(*arguments, **columns), columns)

        return call_and_await

    @functools.wraps(reward)
    def call(*arguments: Any, **columns: Any) -> Any:
        return check(reward(*arguments, **columns), columns)

    return call


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptReader:
    """The tokenizer and the limits by which a prompt can be sampled from."""

    tokenizer: Any
    context: int | None
    """The most tokens of a prompt and its completion; `None` without a limit."""

    template_kwargs: Mapping[str, Any]
    """More arguments of the chat template."""

    @classmethod
    def of(cls, tokenizer: Any, config: Any, args: Any) -> PromptReader:
        """A reader by a model's config and a trainer's: the shorter context is taken."""
        limits = [limit for limit in (positions_of(config).count, args.vllm_max_model_length) if limit]
        kwargs = getattr(args, "chat_template_kwargs", None) or {}
        return cls(tokenizer=tokenizer, context=min(limits, default=None), template_kwargs=kwargs)

    def check(self, prompt: Any, where: str) -> None:
        """Raise `ValueError` for a prompt that has no tokens or too many, or that the chat template refuses."""
        try:
            # as TRL does
            if isinstance(prompt, str):
                (token_ids,) = self.tokenizer(text=[prompt])["input_ids"]
            else:
                options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **self.template_kwargs}
                (token_ids,) = self.tokenizer.apply_chat_template(conversation=[prompt], **options)["input_ids"]
        except Exception as error:  # jinja2's, or whatever else a template's own words raise
            raise ValueError(
                f"the tokenizer cannot read {where} ({error}): change its messages, or the chat template"
            ) from error
        if not token_ids:
            raise ValueError(
                f"{where} has no tokens, so that there is nothing to continue: leave the row out, or begin prompts "
                "with a token such as the tokenizer's bos_token"
            )
        if self.context is not None and len(token_ids) >= self.context:
            raise ValueError(
                f"{where} has {len(token_ids)} tokens and the context {self.context}: shorten or filter prompts, or "
                "raise vllm_max_model_length where that is less than the model's"
            )


def check_columns(
    rewards: Sequence[Any],
    train: Any,
    evaluation: Any = None,
    *,
    rollout_func: Any = None,
    environments: Any = None,
    read_by: Callable[[], PromptReader | None] = lambda: None,
) -> None:
    """Raise `TypeError` for what is no reward or no dataset, and `ValueError` for columns that a dataset lacks.

    Those are what TRL or a reward function asks for.
    Also for columns that are called as what TRL gives every reward, which would have two of them.
    Also for a row whose prompt TRL could not tokenize, or of which nothing could be sampled: the error would come with
    the step that draws it. Of prompts of several kinds one of each is read with what `read_by` returns, if anything.
    Raises `Unsupported` for images.
    Of a stream the first row is read; the columns of a dataset that does not know them are not checked. `evaluation`
    may be several, by name.
    A `rollout_func` may return what rewards take, and `environments` have prompts of their own.
    """
    for reward in rewards:
        if not isinstance(reward, str) and not callable(reward):
            raise TypeError(f"a reward is a function, a model or the name of one, not {reward!r:.80}")
    own_prompts = rollout_func is not None or environments is not None
    rewards = [] if rollout_func is not None else rewards
    others = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
    for dataset, name in ((train, "the dataset"), *((o, f"eval_dataset {n}".rstrip()) for n, o in others.items())):
        if isinstance(dataset, str | os.PathLike):
            raise TypeError(f"{name} is one of the library datasets, not {dataset!r}: load it, by load_dataset(...)")
        columns = getattr(dataset, "column_names", None)
        if isinstance(dataset, IterableDataset) and not own_prompts:
            _check_head(dataset, name)
        if isinstance(columns, (list, tuple)):
            has = f"{name} has {', '.join(columns) or 'no columns'}"
            _check_columns(rewards, columns, has, needs_prompt=environments is None)
            if not own_prompts and isinstance(dataset, Dataset) and len(dataset):
                _check_images(dataset, name)
                doubtful = _check_prompts(dataset, name)
                if reader := read_by():
                    for number, prompt in sorted(doubtful.items()):
                        reader.check(prompt, f"the prompt of row {number} of {name}")


def _check_columns(rewards: Sequence[Any], columns: Sequence[str], has: str, *, needs_prompt: bool) -> None:
    if needs_prompt and "prompt" not in columns:
        raise ValueError(f"{has}, and no 'prompt': rename the column with dataset.rename_column(..., 'prompt')")
    for reward in rewards:
        if isinstance(reward, torch.nn.Module) or not callable(reward):
            continue
        name = getattr(reward, "__name__", type(reward).__name__)
        if twice := [given for given in ("prompts", "completions") if given in columns]:
            raise ValueError(
                f"reward {name!r} is called with the {' and '.join(twice)} of a step, and {has}: rename the column, "
                "which would be the same argument"
            )
        try:
            parameters = inspect.signature(reward).parameters.values()
        except (TypeError, ValueError):  # of a builtin, which has none
            continue
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if lacking := [needs for needs in needed if needs not in columns and needs not in _GIVEN_BY_TRL]:
            raise ValueError(
                f"reward {name!r} takes {', '.join(lacking)}, and {has}: add the column, or give it a default"
            )


def _check_images(dataset: Dataset, name: str) -> None:
    for column in _OF_IMAGES:
        if column in dataset.column_names and dataset.data.column(column).null_count < len(dataset.data):
            raise _has_images(name, column)


_OF_IMAGES = ("image", "images")


def _has_images(name: str, column: str) -> Unsupported:
    return Unsupported(
        f"{name} has images in column {column!r}, and colo generates from text: take them out with "
        f"dataset.remove_columns({column!r})"
    )


def _check_head(stream: IterableDataset, name: str) -> None:
    """Raise for the first row of a stream, which is begun anew to train on, as `check_columns` does."""
    row: Mapping[str, Any] = next(iter(stream), {})
    for column in _OF_IMAGES:
        if row.get(column) is not None:
            raise _has_images(name, column)
    if "prompt" in row:
        _known_kind(row["prompt"], f"the prompt of row 1 of {name}")
        _parts(row["prompt"], f"the prompt of row 1 of {name}")


def _check_prompts(dataset: Dataset, name: str) -> dict[int, Any]:
    """The prompts, by row, that may have no tokens or too many, and one for each order of roles."""
    doubtful: dict[int, Any] = {}
    longest, most_characters, orders = (1, None), -1, set()
    first = dataset[0]["prompt"]
    # a million texts take two seconds, a transform of the user's any time
    batches = [] if dataset.format["type"] == "custom" else dataset.select_columns("prompt").iter(1000)
    rows = enumerate((prompt for batch in batches for prompt in batch["prompt"]), start=1)
    for number, prompt in chain([(1, first)], rows):
        kind = _known_kind(prompt, f"the prompt of row {number} of {name}")
        if kind != _kind(first):
            raise ValueError(
                f"the prompt of row {number} of {name} is {kind}, and that of row 1 {_kind(first)}: TRL takes all of a "
                "batch for what its first is, map the column to one of the two"
            )
        texts, order = _parts(prompt, f"the prompt of row {number} of {name}")
        # a letter or a digit is a token at least
        if order not in orders or not any(map(_HAS_LETTER, texts)):
            doubtful[number] = prompt
        orders.add(order)
        if (characters := sum(map(len, texts))) > most_characters:
            longest, most_characters = (number, prompt), characters
    return dict([*doubtful.items(), longest])


_HAS_LETTER = re.compile(r"\w").search


def _parts(prompt: Any, where: str) -> tuple[list[str], tuple[str, ...]]:
    """Texts and roles of a prompt. Raises: `Unsupported` for images."""
    if isinstance(prompt, str):
        return [prompt], ()
    texts = []
    for message in prompt:
        content = message["content"]
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind != "text":
                raise Unsupported(f"{where} has a part of type {kind!r}: colo generates from text, leave it out")
            texts.append(str(part.get("text") or "") if isinstance(part, Mapping) else str(part or ""))
    return texts, tuple(str(message["role"]) for message in prompt)


def _known_kind(prompt: Any, where: str) -> str:
    """`_kind` of a prompt. Raises: `ValueError` where TRL fails with it."""
    if (kind := _kind(prompt)) is None:
        raise ValueError(
            f"{where} is {prompt!r:.80}, and TRL takes texts or lists of messages: map the column to those, token ids "
            "with the tokenizer's decode, or leave the row out"
        )
    return kind


def _kind(prompt: Any) -> str | None:
    """Name a prompt as TRL takes it for a text or a conversation; `None` where it fails with it."""
    if isinstance(prompt, str):
        return "a text"
    is_conversation = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in prompt)
    )
    return "a conversation" if is_conversation else None


def is_awaited(reward: Any) -> bool:
    """Tell a reward that is awaited from one that is called."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


# ---- TRL's fused LM head: log-probabilities from hidden states and the head's weight -------------------------------


# TRL reads a scale and a cap from the config, by the names that it knows. Models that do more, or call it otherwise,
# get other log-probabilities from it than their own logits have, without a word.


def check_fused_head(model: Any) -> None:
    """Raise `Unsupported` where TRL's fused head computes something else than the model does; one pass of two tokens.

    Decided by the code that runs between the backbone and the logits, not by their values. Not for sharded models.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = getattr(base.forward, "__func__", None)
    # TRL replaces `forward` by a closure, whose variables are what it has read from the config
    known = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    head = base.get_output_embeddings()
    if "logit_scale" not in known or head is None or any(map(is_dtensor, base.parameters())):
        return
    why = why_not_linear(head) or _why_not(base, head, known["logit_scale"], known.get("final_logit_softcapping"))
    if why is not None:
        raise Unsupported(
            f"TRL would train {type(base).__name__} on other log-probabilities than its own: its fused LM head knows "
            f"hidden states, a scale and a cap, and {why}. Use colo.rl.logprob.model_logprobs in a loop of your own"
        )


@torch.no_grad()
def _why_not(base: Any, head: torch.nn.Linear, scale: float, cap: float | None) -> str | None:
    # TRL calls the backbone, and some models their backbone's decoder; of both, the last to end is the outer one
    outputs: list[Any] = []
    seen = SeenPass(head)
    ids = torch.arange(2, device=head.weight.device)[None]
    # a dictionary, since both may be the same module
    watched = dict.fromkeys((base.base_model, base.get_decoder()))
    handles = [module.register_forward_hook(lambda _m, _a, output: outputs.append(output)) for module in watched]
    try:
        with evaluating(base), seen.watching():
            logits = base(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if (why := seen.why_not(logits, ids.shape)) is not None:
        return why
    last = getattr(outputs[-1], "last_hidden_state", None) if outputs else None
    factor = None if last is None or last.shape != seen.hidden_BTD.shape else _factor(last, seen.hidden_BTD)
    if factor is None or (factor != 1 and head.bias is not None):
        return "this model computes something between its last hidden state and the head"
    if seen.vocab_size != head.weight.shape[0]:
        return f"this model's logits are the first {seen.vocab_size} of {head.weight.shape[0]}"
    before, after, is_capped = _scales(seen.steps)
    before *= factor
    expected = (scale / cap, cap) if cap else (scale, 1.0)
    tolerance = 1e-9 if factor == 1 else 0.01  # a factor that is measured is rounded
    if is_capped != bool(cap) or not all(
        math.isclose(found, wanted, rel_tol=tolerance) for found, wanted in zip((before, after), expected, strict=True)
    ):
        found = f"{after:g} * tanh({before:g} * logits)" if is_capped else f"{before:g} * logits"
        theirs = f"{cap:g} * tanh({scale / cap:g} * logits)" if cap else f"{scale:g} * logits"
        return f"this model's logits are {found}, where TRL reads {theirs} from its config"
    return None


def _factor(last: torch.Tensor, hidden: torch.Tensor) -> float | None:
    """Factor from the last hidden state to the head's input (MiniCPM3 has one); `None` where that is more."""
    # the same memory: nothing was computed in between
    if last.data_ptr() == hidden.data_ptr():
        return 1.0
    # in fp64, and where nothing is divided by zero
    ratio = (hidden.double() / last.double())[last != 0]
    factor = float(ratio.median()) if len(ratio) else 1.0
    is_constant = bool(((ratio - factor).abs() <= 2 * torch.finfo(hidden.dtype).eps * abs(factor)).all())
    return factor if is_constant else None


def _scales(steps: tuple[LogitStep, ...]) -> tuple[float, float, bool]:
    """Products of the scales before and after a tanh, and if there is one."""
    products, is_capped = [1.0, 1.0], False
    for name, value in steps:
        is_capped |= name == "tanh"
        if name in ("mul", "div"):
            products[is_capped] *= value if name == "mul" else 1 / value
    return products[0], products[1], is_capped
