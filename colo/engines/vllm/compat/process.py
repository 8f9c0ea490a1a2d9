"""The processes that vLLM runs in, and what they take from their environment."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def in_this_process(wanted: bool) -> Iterator[None]:
    """Let an engine that is built meanwhile run in this process, or in its own, by vLLM's documented variable.

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

    python, numpys = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(numpys)


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Give an environment variable a value meanwhile, or none."""
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
    """Whether a server's clients may add and remove adapters (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`).

    vLLM: Every version. Stays.
    """
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def is_in_this_process(llm: Any) -> bool:
    """Whether the engine core of a `vllm.LLM` lives here.

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
