"""Arguments of `launch` and `share`, checked before anything is made: each error says what to pass instead."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn

from colo.config import RuntimeConfig, unknown_name
from colo.engines.vllm import compat
from colo.errors import Unsupported
from colo.memory.region import check_allocator
from colo.memory.storage import is_dtensor
from colo.planning.model_shape import config_file, read_config
from colo.trainer.optimizers import OptimizerParts, as_torch, parameters_of
from colo.trainer.state import unwrapped
from colo.weights.sources.module import saved_buffers
from colo.weights.sources.peft import check_adapter_config, check_lora_config

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

ADAPTER_FILE = "adapter_config.json"
"""Name of the file that PEFT writes beside an adapter."""

_HOST = torch.device("cpu")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_SHORT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

_OPTIMIZER = "pass optimizer=lambda params: AdamW(params, lr=1e-6)"
_ELSEWHERE = {
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "betas", "optim"), _OPTIMIZER),
    **dict.fromkeys(("lora_config", "peft_config"), "pass lora=LoraConfig(...)"),
    **dict.fromkeys(("torch_dtype", "precision"), "pass dtype='bfloat16'"),
    **dict.fromkeys(("model_name", "model_name_or_path", "model_id", "pretrained_model_name_or_path"), "pass it first"),
    **{f.name: f"pass config=colo.RuntimeConfig({f.name}=...)" for f in fields(RuntimeConfig)},
    "optimizer": "launch takes a function that makes one, and share takes one",
    "gpu_memory_utilization": 'pass config=colo.RuntimeConfig(kv_cache_bytes="4GiB")',
}
"""Advice for names that `launch` and `share` do not take: the place of each."""

_TAKEN_BY_LAUNCH = {
    "model": "it first, launch(model, ...)",
    "dtype": "launch(model, dtype=...)",
    "device": "launch(model, device=...)",
    "kv_cache_bytes": "config=colo.RuntimeConfig(kv_cache_bytes=...)",
    "gpu_memory_utilization": 'the bytes of the KV cache, config=colo.RuntimeConfig(kv_cache_bytes="4GiB"), the only '
    "size that vLLM is given; device_limit_bytes=... limits everything together",
}


def names_checked(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function raise a `TypeError` with advice for an argument that it does not take."""
    valid = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> T:
        for name in given:
            if name not in valid:
                # before the call: Python's own `TypeError` says no more than that the name is unexpected
                raise unknown_name(f"{function.__name__}()", name, valid, _elsewhere(valid))
        return function(*args, **given)

    return checked


def _elsewhere(valid: Sequence[str]) -> Mapping[str, str]:
    # `start` takes no optimizer, and must not advise one
    known = {name: advice for name, advice in _ELSEWHERE.items() if advice != _OPTIMIZER or "optimizer" in valid}
    if "engine_options" in valid:
        options = ("max_model_len", "enforce_eager", "quantization", "tensor_parallel_size", "max_num_seqs", "seed")
        known |= {name: f"pass engine_options={{{name!r}: ...}}" for name in (*options, "own_process", "revision")}
    return known


def default_engine(device: torch.device, *, tell: bool = True) -> Literal["torch", "vllm"]:
    """Return the engine of every way in that is not told one: vLLM on a GPU where it is installed, else the embedded.

    The log says which, unless `tell` is false.
    """
    try:
        chosen: Literal["torch", "vllm"] = "vllm" if device.type == "cuda" and compat.vllm_version() else "torch"
    except Unsupported:
        chosen = "torch"
    others = "'torch' for the embedded one" if chosen == "vllm" else "'vllm' for vLLM, the default on a GPU that has it"
    if tell:
        logger.info("engine=%r, since none was named (%s)", chosen, others)
    return chosen


def check_launch(
    model: object, engine: object, options: object, lora: Any, optimizer: object, tokenizer: object, config: object
) -> None:
    """Raise `TypeError`, `ValueError` or `Unsupported` for what `launch` does not take."""
    check_common(tokenizer, config)
    _check_checkpoint(model)
    check_engine(engine, options, reads=isinstance(model, (str, os.PathLike)))
    if isinstance(optimizer, torch.optim.Optimizer) or (optimizer is not None and not _takes_one(optimizer)):
        raise TypeError(
            f"launch makes the model, and calls optimizer with its parameters: pass a function such as "
            f"optimizer=lambda params: AdamW(params, lr=1e-6), not {_named(optimizer)}, or use colo.share(engine, "
            "model, optimizer)"
        )
    if lora is not None:
        folds = isinstance(config, RuntimeConfig) and config.fold_adapter
        _check_lora(lora, folded=folds)
        if folds:
            raise Unsupported(
                "launch has the engine apply the adapter, and config has fold_adapter=True: leave that out, or put the "
                "adapter on yourself, engine, model = colo.start(...), and colo.share(engine, get_peft_model(model, "
                "lora), optimizer, config=config)"
            )


def check_share(model: object, optimizer: object, *, tokenizer: object, config: object) -> None:
    """Raise `TypeError` or `Unsupported` for what `share` does not take beside an engine."""
    check_common(tokenizer, config)
    if not isinstance(model, nn.Module):
        raise TypeError(f"share(engine, model, optimizer) takes an nn.Module second, not {_named(model)}")
    check_optimizer_type(optimizer, "share(engine, model, optimizer) takes an optimizer of the model's parameters")
    _check_wrapper(model, "share the module within, colo.share(engine, model.module, optimizer)")
    if any(parameter.is_cuda for parameter in model.parameters()):
        check_allocator()
    # Of buffers those alone that an engine is given: what a model only computes with may be (Unsloth's `inv_freq`).
    weights = chain(model.named_parameters(), saved_buffers(model))
    made_in_inference = [name for name, tensor in weights if tensor.is_inference()]
    if made_in_inference:
        raise Unsupported(
            f"{len(made_in_inference)} tensors of the model, {made_in_inference[0]} for one, were made under "
            "torch.inference_mode(), and torch cannot train them: make the model outside of it, or share "
            "copy.deepcopy(model)"
        )


def check_common(tokenizer: object, config: object) -> None:
    """Raise `TypeError` for a `config` or a `tokenizer` of another kind."""
    if config is not None and not isinstance(config, RuntimeConfig):
        given = ", ".join(f"{key}=..." for key in (config if isinstance(config, Mapping) else ["kv_cache_bytes"]))
        raise TypeError(f"config is a colo.RuntimeConfig, not {_named(config)}: pass colo.RuntimeConfig({given})")
    if isinstance(tokenizer, str):
        raise TypeError(
            f"tokenizer is an object, not a name: pass transformers.AutoTokenizer.from_pretrained({tokenizer!r})"
        )
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise TypeError(
            f"tokenizer is what transformers.AutoTokenizer.from_pretrained(...) returns, not {_named(tokenizer)}"
        )


def check_optimizer_type(optimizer: object, taken: str) -> None:
    """Raise `TypeError` for an object without parameter groups, such as a function; the message begins with `taken`."""
    if isinstance(optimizer, (list, tuple)) and optimizer:  # several, such as Muon for matrices and AdamW for the rest
        for one in optimizer:
            check_optimizer_type(one, taken)
    elif isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise TypeError(f"{taken}, such as AdamW(model.parameters(), lr=1e-6), not {_named(optimizer)}")


def chosen_device(device: str | int | torch.device | None) -> torch.device:
    """The device that is meant: the current GPU for `cuda`, and for `None` where there is one.

    Raises: `ValueError` for what is no name of a device, `Unsupported` for one that is not there, or of another kind.
    """
    has_cuda = torch.cuda.is_available()
    if device is None:
        device = "cuda" if has_cuda else "cpu"
    if isinstance(device, int):
        device = f"cuda:{device}"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'cuda', 'cuda:0' or 'cpu', not {device!r}") from None
    if found.type not in ("cuda", "cpu"):
        raise Unsupported(f"colo runs on CUDA and on the CPU: device must be 'cuda', 'cuda:0' or 'cpu', not {device!r}")
    if found.type == "cuda" and not has_cuda:
        raise Unsupported(
            f"device={str(device)!r} was asked for, but torch sees no CUDA device: run `colo doctor`, or pass 'cpu'"
        )
    # torch takes any number for a device, and fails at the first allocation
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise Unsupported(f"device={str(device)!r} was asked for, but torch sees {torch.cuda.device_count()} of them")
    if found.type == "cuda":
        check_allocator()
    if found.type == "cpu":
        return torch.device("cpu")  # tensors there know no number, which accelerate gives it
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def chosen_dtype(
    dtype: str | torch.dtype | None, device: torch.device, of_checkpoint: Callable[[], torch.dtype | None]
) -> torch.dtype:
    """The dtype that is meant by one of torch's, its name, `auto` for the checkpoint's own, or `None`.

    By default, and for a checkpoint that names none, bf16 on CUDA and fp32 on the CPU.
    Raises: `ValueError` for another.
    """
    found: object = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.").lower()
        found = of_checkpoint() if name == "auto" else _SHORT_DTYPES.get(name) or getattr(torch, name, dtype)
    if found is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if not isinstance(found, torch.dtype) or found not in _DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise ValueError(f"dtype must be a torch.dtype or its name, one of {names}, or 'auto', not {dtype!r}")
    return found


def check_engine(engine: object, options: object, *, reads: bool = False) -> None:
    """Raise `TypeError` or `ValueError` for an engine that is not started by name, or options that it does not take.

    Of a checkpoint that it `reads` the embedded engine takes the `revision`.
    """
    if not isinstance(engine, str):
        raise TypeError(
            f"launch starts the engine itself, 'torch' or 'vllm', and engine={_named(engine)} is neither: an engine "
            "that you have made goes to colo.share(engine, model, optimizer)"
        )
    if engine not in ("torch", "vllm"):
        raise ValueError(f"engine must be 'torch' or 'vllm', not {engine!r}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            "engine_options are options of vllm.LLM by name, such as {'max_model_len': 4096}, not " + _named(options)
        )
    given = dict(options or {})
    for name in _TAKEN_BY_LAUNCH.keys() & given:
        raise TypeError(f"engine_options has {name!r}, which launch takes itself: pass {_TAKEN_BY_LAUNCH[name]}")
    others = sorted(given.keys() - {"revision"} if reads else given)
    if engine == "torch" and others:
        raise ValueError(f"engine_options are those of vLLM: pass engine='vllm' with {others}")
    if engine == "vllm":
        compat.vllm_version()  # which is there, or says how to install it


def _check_checkpoint(model: object) -> None:
    """Raise unless `launch` can make a model to train of `model`."""
    takes = "launch takes a folder or a hub id, a transformers config, or a transformers model"
    # PEFT's models have it, and so do those that transformers has put an adapter on
    if hasattr(model, "peft_config"):
        raise TypeError(
            f"launch makes the adapter itself, and {_named(model)} has one: pass the model without it and "
            "lora=LoraConfig(...), or share a PEFT model of yours, colo.share(engine, model, optimizer)"
        )
    if isinstance(model, nn.Module):
        _check_wrapper(model, "launch(model.module, ...) and wrap rt.model")
        # a compiled model has another's `forward`: its parameters' names begin with `_orig_mod.`
        if hasattr(model, "_orig_mod"):
            raise TypeError(
                f"{takes}, not one that torch.compile has wrapped: launch(model._orig_mod, ...) and compile rt.model"
            )
    from transformers import PretrainedConfig, PreTrainedModel

    if isinstance(model, PreTrainedModel):
        if not model.can_generate():
            raise TypeError(f"{type(model).__name__} generates no tokens: load it with AutoModelForCausalLM")
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError("the model is on the meta device, without weights: launch(model.config) draws random ones")
    elif isinstance(model, nn.Module):
        raise TypeError(f"{takes}, not {_named(model)}: colo.share(engine, model, optimizer) takes other modules")
    elif isinstance(model, (str, os.PathLike)):
        check_path(model)
    elif not isinstance(model, PretrainedConfig):
        raise TypeError(f"{takes}, not {_named(model)}")


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` for a file, a folder without a config, and what can be no hub id and is not there either.

    Raises: `Unsupported` for an adapter.
    """
    # a hub id begins with none of these: what does must be a path
    if os.fspath(path).startswith((".", "/", "~")) and not Path(path).exists():
        raise FileNotFoundError(
            f"there is no {os.fspath(path)!r} in {os.fspath(Path.cwd())!r}: give a folder, with ~ expanded, or a hub id"
        )
    # a folder with both is a model with an adapter beside it
    if Path(path, ADAPTER_FILE).exists() and not Path(path, "config.json").exists():
        raise adapter_alone(os.fspath(path))
    if Path(path).exists():
        try:
            read_config(config_file(os.fspath(path)))
        except ValueError as error:
            # transformers says of a file that it is no hub's id, and of a folder without a config nothing of that
            raise OSError(str(error)) from None


def adapter_alone(checkpoint: str) -> Unsupported:
    """The error for a checkpoint that is an adapter of PEFT's, which transformers would put on its base."""
    return Unsupported(
        f"{checkpoint!r} is an adapter: launch the model that it was trained on, with lora=LoraConfig(...) for a new "
        f"one, or go on with it, PeftModel.from_pretrained(model, {checkpoint!r}, is_trainable=True), under colo.share"
    )


def _check_wrapper(model: nn.Module, advice: str) -> None:
    """Raise `Unsupported` for torch's wrappers of a whole model: DistributedDataParallel, DataParallel, averages."""
    names = [name for name, _ in model.named_parameters()]
    is_torchs = type(model).__module__.startswith("torch.")
    # torch's own wrappers alone: a user's module may have its parts in an attribute `module` too
    if is_torchs and names and all(name.startswith("module.") for name in names):
        raise Unsupported(
            f"the model is wrapped, and an engine does not know its weights by the names that {type(model).__name__} "
            f"gives them: {advice}"
        )


def _check_lora(lora: Any, *, folded: bool) -> None:
    from peft import LoraConfig

    if hasattr(lora, "peft_type"):
        check_adapter_config(lora, "the adapter")
    if not isinstance(lora, LoraConfig):
        raise TypeError(f"lora is a peft.LoraConfig, such as LoraConfig(r=16), not {_named(lora)}")
    check_lora_config(
        lora,
        folded=folded,
        advice="or put the adapter on yourself, engine, model = colo.start(...), and publish it folded into the "
        "weights, colo.share(engine, get_peft_model(model, lora), optimizer, config=RuntimeConfig(fold_adapter=True))",
    )


def _takes_one(function: object) -> bool:
    """True for what can be called with one argument, as far as that is known before it is."""
    try:
        inspect.signature(function).bind(None)  # type: ignore[arg-type]  # a TypeError for what is no function
    except TypeError:
        return False
    except ValueError:  # of a builtin that has no signature
        return True
    return True


def _named(value: object) -> str:
    """Describe a value in a few words: a class or function by name, a short value as it is, others by their class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    if value is None or isinstance(value, (int, float, str)):
        return repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"


def check_trainer(model: nn.Module, optimizer: Any, device: torch.device | None = None) -> None:
    """Raise `Unsupported` unless a runtime can drive a model and its optimizer, beside an engine's device."""
    _check_sharding(model)
    check_optimizer(optimizer, model)
    if device is not None:
        _check_devices(model, device)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise `Unsupported` for an optimizer without torch's hooks, or one that trains something else.

    It may train other parameters along, such as those of a value head, which no logits depend on.
    """
    stepped = as_torch(unwrapped(optimizer))
    if not hasattr(stepped, "_optimizer_step_pre_hooks") and not isinstance(stepped, OptimizerParts):
        raise Unsupported(
            f"{type(stepped).__name__} wraps an optimizer without torch's own hooks: pass the wrapped one "
            "(optimizer.optimizer)"
        )
    trained = {id(p): p for p in parameters_of(stepped)}
    own = {id(p): p for p in model.parameters()}
    # a value head's parameters are others too: they are foreign only where nothing of the model is trained, or a shape
    # fits
    others = [p for key, p in trained.items() if key not in own]
    # One that the model had before, and that was replaced, would be trained in vain.
    untrained = {p.shape for key, p in own.items() if p.requires_grad and key not in trained}
    foreign = others if len(others) == len(trained) else [p for p in others if p.shape in untrained]
    if foreign:
        raise Unsupported(
            f"{len(foreign)} parameters of the optimizer are not the model's, one with shape "
            f"{tuple(foreign[0].shape)}: build the optimizer from this model's parameters"
        )
    device = next(model.parameters()).device
    elsewhere = [p for p in others if p.device != device]
    if elsewhere:
        raise Unsupported(
            f"the optimizer trains {len(elsewhere)} parameters on {elsewhere[0].device} along with a model on "
            f"{device}: the runtime moves state of one device"
        )


def _check_devices(model: nn.Module, device: torch.device) -> None:
    """Raise `Unsupported` unless the model is where the engine is, or FSDP2 keeps its parts in host memory."""
    devices = {p.device for p in model.parameters()}
    if devices == {device} or (devices == {_HOST} and all(map(is_dtensor, model.parameters()))):
        return
    names = ", ".join(sorted(map(str, devices)))
    raise Unsupported(f"the engine is on {device} and the model on {names}: they share one device")


def _check_sharding(model: nn.Module) -> None:
    """Raise `Unsupported` for a model that FSDP's first version has flattened: its parameters are no weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without which none is
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        raise Unsupported(
            "FullyShardedDataParallel keeps weights flattened, which cannot be gathered one by one: shard the model "
            "with fully_shard (FSDP2; fsdp_version: 2 in accelerate)"
        )
