"""vLLM's processes from a server that has imported vLLM already: two seconds for an engine in place of twenty."""

import os
import signal
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest import mock

IN_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Engine core and worker in one process, as on a single GPU. On a CPU vLLM takes two, the second one a spawned one."""

IMPORTED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "colo.engines.vllm.worker.agent",
    "colo.engines.vllm.worker.loader",
    __name__,
]


def run(environment, blocked, target, *arguments, **named):
    """Call `target` with what a spawned process inherits: the environment and the signals that its starter blocks."""
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    target(*arguments, **named)


class Process(ForkServerProcess):
    def __init__(self, *arguments, target=None, **named):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        super().__init__(*arguments, target=partial(run, dict(os.environ), blocked, target), **named)


class Context(ForkServerContext):
    Process = Process


@contextmanager
def engines():
    """Engines of this process start in this way; nothing of it is in them, as nothing would be in spawned ones."""
    context = Context()
    context.set_forkserver_preload(IMPORTED)
    with mock.patch("vllm.v1.engine.utils.get_mp_context", lambda: context):
        yield
