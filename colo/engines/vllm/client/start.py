"""Starting `vllm.LLM`: the start itself, its options, its log, and scripts that would start it twice."""

from __future__ import annotations

import ast
import copy
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from colo import log
from colo.engines.base import EngineStatus
from colo.engines.vllm import compat
from colo.engines.vllm.client.llm_link import InProcessLink, LLMLink, OwnProcessLink
from colo.engines.vllm.processes import start_apart_from_interrupts
from colo.engines.vllm.wire import COLO, FORMAT_KEY, STORE_KEY, WORKER_EXTENSION
from colo.errors import Unsupported, named_misfits
from colo.memory.probe import used_device_bytes
from colo.units import format_bytes
from colo.weights.packed import BITSANDBYTES, method_of, refuse_quantized

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for log-probabilities of the distribution that was sampled from, which training needs."""


def link_to(llm: Any, device: torch.device, status: EngineStatus, *, own_process: bool, **options: Any) -> LLMLink:
    """A link to a `vllm.LLM`; `options` are those of its class. Raises: `Unsupported`, as the links do."""
    return (OwnProcessLink if own_process else InProcessLink)(llm, device, status, **options)


def start_llm(
    options: Mapping[str, Any], device: torch.device, status: EngineStatus, *, own_process: bool, deadline_s: float
) -> LLMLink:
    """Start vLLM with `options`, those of `vllm.LLM`, and connect to it. Raises: also what vLLM raises."""
    from vllm import LLM

    if not own_process and compat.runs_in_this_process():
        raise Unsupported(
            "a vLLM runs in this process already, and closing one of two breaks the other: start this one in a process "
            "of its own (own_process=True), or close the other first"
        )
    with told_start(own_process=own_process, kv_cache_bytes=options.get("kv_cache_memory_bytes", 0)) as log_says:
        # what vLLM takes beyond its segments is reported as residual
        before_bytes = used_device_bytes(device) or 0
        with compat.in_this_process(not own_process):
            start = partial(LLM, **options)
            if own_process:
                llm = start_apart_from_interrupts(start, _shut_down)
            else:
                with compat.own_random_state(device):  # vLLM seeds everybody's generators as it starts
                    llm = start()
        taken_bytes = (used_device_bytes(device) or 0) - before_bytes
        seeded = {} if own_process else {"seed": options.get("seed")}
        link = link_to(llm, device, status, own_process=own_process, deadline_s=deadline_s, is_own=True, **seeded)
        link.taken_bytes = taken_bytes
        link.log_says = log_says
        return link


def _shut_down(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


# ---- options --------------------------------------------------------------------------------------------------------


_OF_CHECKPOINTS = (
    *("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "moe_wna16"),
    *("compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "quark"),
)
"""Methods of vLLM's that read quantized weights, and make none of whole ones."""


def check_quantization(
    model: str | os.PathLike[str] | PretrainedConfig | PreTrainedModel, options: Mapping[str, Any]
) -> None:
    """Raise `Unsupported` for quantized weights that vLLM, started with `options`, would not share.

    Those are a checkpoint's that are not packed by bitsandbytes, and a model's, of which there are no files to pack.
    """
    if (asked := options.get("quantization")) in _OF_CHECKPOINTS:
        raise Unsupported(
            f"quantization={asked!r} is of checkpoints whose weights are quantized, and an engine samples from weights "
            "as they are trained: leave it out, or take 'fp8', which vLLM makes of whole weights"
        )
    config = _config(model, options)
    # vLLM's quantization of whole weights (`fp8`) is made anew from the trainer's; a checkpoint's cannot be
    if method_of(config) != BITSANDBYTES:
        refuse_quantized(config)
    if packs_weights(model, options) and isinstance(model, (PretrainedConfig, PreTrainedModel)):
        raise Unsupported("vLLM packs weights as it reads a checkpoint: give a folder or a hub id")


def packs_weights(
    model: str | os.PathLike[str] | PretrainedConfig | PreTrainedModel, options: Mapping[str, Any]
) -> bool:
    """Tell whether vLLM, started with `options`, packs the weights of a checkpoint, or finds them packed."""
    return quantization_of(model, options) == BITSANDBYTES


def quantization_of(
    model: str | os.PathLike[str] | PretrainedConfig | PreTrainedModel, options: Mapping[str, Any]
) -> str | None:
    """Name the quantization of a model in vLLM started with `options`, or its own; `None` without any."""
    if options.get("quantization") is not None:
        return str(options["quantization"])
    return method_of(_config(model, options))


def _config(
    model: str | os.PathLike[str] | PretrainedConfig | PreTrainedModel, options: Mapping[str, Any]
) -> PretrainedConfig | dict[str, Any]:
    """A model's config, or what `config.json` of a checkpoint says."""
    if isinstance(model, PretrainedConfig):
        return model
    if isinstance(model, PreTrainedModel):
        return model.config
    place = os.fspath(options.get("hf_config_path") or model)
    try:
        found: dict[str, Any] = PretrainedConfig.get_config_dict(
            place, revision=options.get("revision"), token=options.get("hf_token")
        )[0]
    except OSError:  # what vLLM reads in another way, such as GGUF
        return {}
    return found


def changes_transformers(names: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Tell whether vLLM serves a model of these `names` by transformers' own class (SmolLM3, OLMo 2, StarCoder 2).

    vLLM changes that class in place, so that no other model of it works in the same process.
    """
    compat.vllm_version()  # which is there, or says how to install it
    from vllm.model_executor.models import ModelRegistry

    if options.get("model_impl") == "transformers" or not names:
        return bool(names)
    known = [ModelRegistry.models.get(name) for name in names]
    return all(found is None or getattr(found, "module_name", "").endswith(".transformers") for found in known)


def architectures(
    model: str | os.PathLike[str] | PretrainedConfig | PreTrainedModel, options: Mapping[str, Any]
) -> list[str]:
    """List a model's architectures: its config's, or else the class that transformers has for the config."""
    config = _config(model, options)
    if isinstance(config, dict):
        return config.get("architectures") or []
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return config.architectures or ([kind.__name__] if kind else [])


PACKING: Mapping[str, Any] = {
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.bfloat16,
    "bnb_4bit_quant_storage": torch.uint8,
    "llm_int8_skip_modules": None,
}
"""vLLM's packing of what it reads, as a `BitsAndBytesConfig` has it: constants of 0.26 and of `vllm-bnb-plugin`."""


def check_packing(config: Any, model: str, options: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for a `BitsAndBytesConfig` in 4 bits of which vLLM would make another model."""
    if quantization_of(model, {**options, "quantization": None}) == BITSANDBYTES:
        return  # packed already: transformers takes the checkpoint's own config too
    others = [f"{name}={value!r}" for name, value in PACKING.items() if getattr(config, name) != value]
    if others:
        raise Unsupported(
            f"vLLM packs to 4 bits in one way, and quantization_config asks for another: set {', '.join(others)} (on a "
            "command line --use_bnb_nested_quant, --dtype bfloat16)"
        )


def save_config(model: PretrainedConfig | PreTrainedModel, folder: str) -> None:
    """Write the config from which vLLM builds the same model, and the generation config with its end tokens."""
    # `architectures` is written into the caller's config otherwise
    config = copy.deepcopy(model if isinstance(model, PretrainedConfig) else model.config)
    if not config.architectures:
        # vLLM finds its class by this name
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
        # the model's own, or as many as the KV cache holds of one sequence, without which vLLM would not start
        "max_model_len": -1,
        "gpu_memory_utilization": compat.smallest_utilization(),
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": LOGPROBS_MODE,
        "enable_sleep_mode": device.type == "cuda",
        # a folder without a tokenizer has none to initialize; a hub id is vLLM's to look up
        "skip_tokenizer_init": Path(model).is_dir() and not any(Path(model).glob("tokenizer*")),
    }
    if store is not None:
        extra = dict(given.pop("model_loader_extra_config", None) or {})
        # vLLM's own loader is named within: ours passes everything but memory on to it
        extra |= {STORE_KEY: store, FORMAT_KEY: given.pop("load_format", "auto")}
        chosen |= {"load_format": COLO, "model_loader_extra_config": extra}
    if max_lora_rank:
        # two: while one version is replaced by the next, both have a slot
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
    # the guard has to be around the line that is running now, not anywhere in the file
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


# ---- its log, which goes to a file: in hundreds of lines a run a user's own would be lost ----------------------------


CONFIG = "VLLM_LOGGING_CONFIG_PATH"
FORMAT = "%(levelname)s %(asctime)s [%(processName)s %(process)d] [%(fileinfo)s:%(lineno)d] %(message)s"
ERROR = re.compile(r"(?:ERROR|CRITICAL) \S+ \S+ \[.*?\] \[.*?\] ?(.*\S)")

EXCEPTION = re.compile(r"[\w.]+(?:Error|Exception|Exit|Interrupt|Unsupported): ")
"""Beginning of the last line of a traceback; what follows it, such as that other processes end, says less."""


@contextmanager
def logs_to_file() -> Iterator[None]:
    """Send the log of a vLLM that is imported within the block, here or in a child process, to the file.

    By its documented variable, which is as before afterwards. Where the user has set vLLM's logging up, or COLO_LOG is
    `debug`, nothing changes; a vLLM that this process has imported before goes on as it did.
    """
    if not _is_ours():
        yield
        return
    with compat.variable(CONFIG, str(_write_config())):
        yield


@contextmanager
def told_start(*, own_process: bool, kv_cache_bytes: int = 0) -> Iterator[Callable[[], str | None]]:
    """Say that vLLM is being started, where its log is, and how long it has taken.

    Yields what says, later, where the log is and which error of this vLLM it ends with; a failing start has that
    noted, and where its KV cache of `kv_cache_bytes` is too small or too large, what to change.
    """
    path = log_file() if _is_ours() and (own_process or _logs_here()) else None
    # an earlier engine's errors are before this byte
    begins_at = path.stat().st_size if path is not None and path.exists() else 0

    def log_says() -> str | None:
        if path is None or not path.exists():
            return None
        last = last_error(path, begins_at)
        return f"vLLM's log is {path}" + (f"; its last error: {last}" if last else "")

    log.logger.info("starting vLLM (about a minute)%s", f"; its log: {path}" if path is not None else "")
    start_s = time.monotonic()
    try:
        with log.waiting("starting vLLM (about a minute)"), logs_to_file():
            yield log_says
    except Exception as error:
        if (said := log_says()) is not None:
            error.add_note(said)
        words = f"{error} {said}"
        if "increasing `gpu_memory_utilization`" in words:  # which has no part in it here
            error.add_note(
                f"the KV cache has {format_bytes(kv_cache_bytes)}, of which vLLM gives a sequence whole blocks of "
                "tokens: raise kv_cache_bytes (colo_kv_cache_bytes under TRL's flag), or lower a max_model_len that "
                "was given; colo plan says what a token takes"
            )
        elif "out of memory" in words:
            error.add_note(
                f"vLLM needs memory beside the weights and the KV cache of {format_bytes(kv_cache_bytes)} to start in: "
                "lower kv_cache_bytes (colo_kv_cache_bytes under TRL's flag), or the engine's options "
                "max_num_batched_tokens and max_num_seqs"
            )
        raise
    log.logger.info("vLLM has started, in %.0f s", time.monotonic() - start_s)


@cache
def log_file() -> Path:
    """The file that vLLM's log goes to, the same for all engines of this process."""
    # one file for all: vLLM sets its logging up once in a process
    return Path(tempfile.mkdtemp(prefix="colo-log-")) / "vllm.log"


def last_error(path: Path, begins_at: int = 0) -> str | None:
    """The last exception in the log, from a byte on, or else the last line of an error."""
    with path.open("rb") as file:
        file.seek(begins_at)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [match[1] for line in reversed(lines) if (match := ERROR.match(line))]
    return next(filter(EXCEPTION.match, errors), errors[0] if errors else None)


def _is_ours() -> bool:
    # Unless somebody else has said where vLLM's log goes.
    others = os.environ.get(CONFIG) or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0"
    return not others and not log.shows_engines()


def _logs_here() -> bool:
    """Tell whether vLLM in this process logs to the file, or will when it is imported."""
    handlers = logging.getLogger("vllm").handlers
    to_file = any(getattr(handler, "baseFilename", None) == str(log_file()) for handler in handlers)
    return to_file or "vllm.logger" not in sys.modules


def _write_config() -> Path:
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    handler = {"class": "logging.FileHandler", "filename": str(log_file()), "formatter": "vllm", "level": level}
    formatter = {"class": "vllm.logging_utils.NewLineFormatter", "datefmt": "%m-%d %H:%M:%S", "format": FORMAT}
    config: dict[str, Any] = {
        "version": 1,
        # loggers of the user's program must go on
        "disable_existing_loggers": False,
        "formatters": {"vllm": formatter},
        "handlers": {"vllm": handler | {"encoding": "utf-8"}},
        "loggers": {"vllm": {"handlers": ["vllm"], "level": level, "propagate": False}},
    }
    path = log_file().with_name("logging.json")
    path.write_text(json.dumps(config, indent=1))
    return path


def import_apart() -> None:
    """Import vLLM where no frame of the caller's is on the stack, unless it has been imported.

    Its modules keep the errors of optional imports (0.30 that of torchcodec), and with them every frame below: those
    of whoever builds an engine first, whose models and memory would stay for the life of the process.

    vLLM: Every version up to 0.30; no ticket. Delete when vLLM's optional imports keep no errors.
    """
    if "vllm.entrypoints.llm" in sys.modules:
        return
    with logs_to_file(), named_misfits(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="colo-import") as pool:
        pool.submit(import_module, "vllm.entrypoints.llm").result()
