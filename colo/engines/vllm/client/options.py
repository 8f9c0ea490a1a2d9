"""Starting `vllm.LLM`: its options, its device, and scripts that would start it twice."""

from __future__ import annotations

import ast
import copy
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from colo.engines.vllm import compat
from colo.engines.vllm.wire import BITSANDBYTES, COLO, FORMAT_KEY, STORE_KEY, WORKER_EXTENSION
from colo.errors import Unsupported

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for log-probabilities of the distribution that was sampled from, which training needs."""


def packs_weights(model: str | os.PathLike[str], options: Mapping[str, Any]) -> bool:
    """Tell whether vLLM, started with `options`, packs the weights of a checkpoint, or finds them packed."""
    return quantization_of(model, options) == BITSANDBYTES


def quantization_of(model: str | os.PathLike[str], options: Mapping[str, Any]) -> str | None:
    """Name the quantization of a checkpoint in vLLM started with `options`, or its own; `None` without any."""
    if options.get("quantization") is not None:
        return str(options["quantization"])
    found = _config_dict(model, options)
    of_text = found.get("text_config") or {}
    places = (found.get("quantization_config"), of_text.get("quantization_config"), found.get("compression_config"))
    return next((method for place in places if (method := _method_of(place)) is not None), None)


def _config_dict(model: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    place = os.fspath(options.get("hf_config_path") or model)
    try:
        found: dict[str, Any] = PretrainedConfig.get_config_dict(
            place, revision=options.get("revision"), token=options.get("hf_token")
        )[0]
    except OSError:  # what vLLM reads in another way, such as GGUF
        return {}
    return found


def changes_transformers(
    model: str | os.PathLike[str] | PretrainedConfig | PreTrainedModel, options: Mapping[str, Any]
) -> bool:
    """Tell whether vLLM serves a model by transformers' own class (SmolLM3, OLMo 2, StarCoder 2).

    vLLM changes that class in place, so that no other model of it works in the same process.
    """
    compat.vllm_version()  # which is there, or says how to install it
    from vllm.model_executor.models import ModelRegistry

    if isinstance(model, (str, os.PathLike)):
        names = _config_dict(model, options).get("architectures")
    else:
        config = model if isinstance(model, PretrainedConfig) else model.config
        kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
        names = config.architectures or (kind and [kind.__name__])
    if options.get("model_impl") == "transformers" or not names:
        return bool(names)
    known = [ModelRegistry.models.get(name) for name in names]
    return all(found is None or getattr(found, "module_name", "").endswith(".transformers") for found in known)


def is_packed_config(found: Any) -> bool:
    """Tell whether a model's `quantization_config`, if it has one, is bitsandbytes' own."""
    return _method_of(found) == BITSANDBYTES


def _method_of(found: Any) -> str | None:
    method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def device_of(device: torch.device | str | None) -> torch.device:
    """The device itself: the current GPU for `cuda`, and for `None` where there is one."""
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def save_config(model: PretrainedConfig | PreTrainedModel, folder: str) -> None:
    """Write the config from which vLLM builds the same model, and the generation config with its end tokens."""
    config = copy.deepcopy(model if isinstance(model, PretrainedConfig) else model.config)
    if not config.architectures:
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    if isinstance(model, PreTrainedModel) and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def llm_options(
    model: str,
    store: str | None,
    *,
    kv_cache_bytes: int,
    device: torch.device,
    dtype: torch.dtype,
    max_lora_rank: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments for `vllm.LLM`. Raises: `Unsupported` for a dtype that its LoRA kernels do not take."""
    given = dict(options)
    if max_lora_rank and device.type == "cuda" and dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(
            f"vLLM applies LoRA on CUDA to float16 and bfloat16 only, and the weights would be {dtype}: pass "
            "dtype=torch.bfloat16 (the adapter itself may stay in fp32)"
        )
    chosen: dict[str, Any] = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_cache_memory_bytes": kv_cache_bytes,
        "gpu_memory_utilization": compat.smallest_utilization(),
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": LOGPROBS_MODE,
        "enable_sleep_mode": device.type == "cuda",
        "skip_tokenizer_init": Path(model).is_dir() and not any(Path(model).glob("tokenizer*")),
    }
    if store is not None:
        extra = dict(given.pop("model_loader_extra_config", None) or {})
        extra |= {STORE_KEY: store, FORMAT_KEY: given.pop("load_format", "auto")}
        chosen |= {"load_format": COLO, "model_loader_extra_config": extra}
    if max_lora_rank:
        chosen |= {"enable_lora": True, "max_lora_rank": max_lora_rank, "max_loras": 2}
    return chosen | given


# ---- scripts without a `__main__` guard ------------------------------------------------------------------------------


def check_main_guard() -> None:
    """Raise `RuntimeError` when vLLM's process would import a main script that starts vLLM as it is imported.

    It is always spawned: on a GPU since CUDA is in use by then, on a CPU since vLLM says so.
    """
    line = _line_of_main()
    if line is None:
        return
    path = Path(str(sys.modules["__main__"].__file__))
    try:
        statements = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, UnicodeDecodeError):  # a zip file or the like
        return
    if not any(
        _is_guard(statement) and statement.lineno <= line <= (statement.end_lineno or 0) for statement in statements
    ):
        raise RuntimeError(
            f"{path.name}, line {line}, starts vLLM in a process of its own, which imports {path.name} again and would "
            'start another: put what starts it under `if __name__ == "__main__":`, or pass '
            'engine_options={"own_process": False}'
        )


def _line_of_main() -> int | None:
    """The line of the main script that is being run; `None` in a notebook, a shell, a thread or a console script."""
    main = sys.modules["__main__"]
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is main.__dict__:
            return frame.f_lineno if getattr(main, "__file__", None) else None
        frame = frame.f_back
    return None


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )
