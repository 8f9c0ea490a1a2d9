"""Engines of vLLM, its servers, ranks and commands, from a process that has imported what they need.

Two seconds in place of twenty.
"""

import faulthandler
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

IN_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Engine core and worker in one process, as on a single GPU. On a CPU vLLM takes two, the second one a spawned one."""

ENGINE = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "colo.engines.vllm.worker.agent",
    "colo.engines.vllm.worker.loader",
]

IMPORTED = [
    *ENGINE,
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "colo.assembly.launch",
    "colo.trl",
    "trl.trainer.grpo_trainer",
    "megatron.core",
    "megatron.core.models.gpt",
    __name__,
    "tests.frozen",  # after all others
]


def run(environment, blocked, target, *arguments, **named):
    """Call `target` with what a spawned process inherits: the environment and the signals that its starter blocks."""
    os.environ.clear()
    os.environ.update(environment, VLLM_WORKER_MULTIPROC_METHOD="fork")  # of an engine's workers, if it has some
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # Python's would start a server once more
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    target(*arguments, **named)


class Process(ForkServerProcess):
    def __init__(self, *arguments, target=None, **named):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        super().__init__(*arguments, target=partial(run, dict(os.environ), blocked, target), **named)


class Context(ForkServerContext):
    Process = Process


_context = Context()
_context.set_forkserver_preload(IMPORTED)


@contextmanager
def engines():
    """Engines of this process start in this way; nothing of it is in them, as nothing would be in spawned ones."""
    with mock.patch("vllm.v1.engine.utils.get_mp_context", lambda: _context):
        yield


@contextmanager
def spawned():
    """Processes that this one would spawn start in this way: of benchmarks, and vLLM's engines with their workers."""
    get = multiprocessing.get_context
    with mock.patch("multiprocessing.get_context", lambda method=None: _context if method == "spawn" else get(method)):
        yield


def serve(arguments, log, environment):
    """Start vLLM's server as `python -m` would, with a session and a process group of its own; returns its process."""
    server = _context.Process(target=_serve, args=(list(arguments), str(log), dict(environment)))
    server.start()
    return server


def _serve(arguments, log, environment):
    os.setsid()
    os.environ.update(environment)
    _write_to(log, 1, 2)
    serve_here(arguments)


def serve_here(arguments):
    """Be vLLM's server, whose engine is a fork and need not import vLLM again."""
    sys.argv[1:] = arguments
    os.register_at_fork(after_in_child=_close_address)
    here = multiprocessing.get_context("fork")
    with ExitStack() as forked:  # its engine and workers, which are its children, as spawned ones would be
        for module in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
            forked.enter_context(mock.patch(f"{module}.get_mp_context", lambda: here))
        runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)


def _close_address():
    """Leave a server's address to itself: nobody answers there once it is killed, though its engine goes on."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # what is no socket, and the folder itself
            found = socket.socket(fileno=int(path.name))
            if found.family == socket.AF_INET:
                found.close()
            else:
                found.detach()


def _write_to(log, *numbers):
    with Path(log).open("wb") as file:
        for number in numbers:
            os.dup2(file.fileno(), number)


# ---- commands --------------------------------------------------------------------------------------------------------


def run_python(*arguments, cwd, timeout=1200, **environment):
    """Run `python ARGUMENTS`, with `-m`, `-c` or a script first; returns what `subprocess.run` does, output as text.

    On a CPU what it would spawn is forked too. Nothing is left of its session.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [str(Path(folder, name)) for name in ("out", "err")]
        process = _context.Process(target=_run_python, args=(list(map(str, arguments)), str(cwd), logs, environment))
        process.start()
        process.join(timeout)
        is_late = process.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        out, err = (Path(log).read_text() if Path(log).exists() else "" for log in logs)
    if is_late:
        raise subprocess.TimeoutExpired(arguments, timeout, out, err)
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _run_python(arguments, cwd, logs, environment):
    os.setsid()
    os.chdir(cwd)
    os.environ.update(environment)
    for number, log in enumerate(logs, start=1):
        _write_to(log, number)
    how, *rest = arguments
    with nullcontext() if torch.cuda.is_available() else spawned():
        if how == "-m":
            sys.path.insert(0, cwd)
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.path.insert(0, cwd)
            sys.argv = ["-c", *rest[1:]]
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.path.insert(0, str(Path(how).resolve().parent))
            sys.argv = arguments
            runpy.run_path(how, run_name="__main__")


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _free_port():
    """A port that no connection of this machine takes by itself before a rank listens: those begin at 32768."""
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", random.SystemRandom().randrange(15000, 32000))) as free,
        ):
            return free.getsockname()[1]


def run_ranks(script, arguments, count, logs, *, timeout):
    """Run a script on `count` ranks, as torchrun does; returns what went wrong, "" if nothing did.

    What rank N writes goes to `logs`/N.log.
    """
    port = _free_port()
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for number in range(count):
        environment = {name: str(value) for name, value in (world | {"RANK": number, "LOCAL_RANK": number}).items()}
        given = (str(script), list(map(str, arguments)), environment, str(logs / f"{number}.log"))
        ranks.append(_context.Process(target=_run_rank, args=given))
        ranks[-1].start()
    end = time.monotonic() + timeout
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    is_late = time.monotonic() > end
    for rank in ranks:
        rank.join(0 if is_late else 10 if any(other.exitcode for other in ranks) else None)
        if rank.is_alive():
            os.kill(rank.pid, signal.SIGABRT)  # at which it tells where it is
            rank.join()
    for left in Path("/dev/shm").glob(f"colo-{port}-*"):  # see `_name_memory`
        left.unlink(missing_ok=True)
    if is_late:
        return f"after {timeout} s"
    return ", ".join(f"rank {number}: {rank.exitcode}" for number, rank in enumerate(ranks) if rank.exitcode)


def _run_rank(script, arguments, environment, log):
    os.environ.update(environment)
    _write_to(log, 1, 2)
    faulthandler.enable()
    with suppress(ImportError):
        _name_memory(environment["MASTER_PORT"])
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _name_memory(port):
    """Give shared memory that vLLM's ranks meet in, where the CPU can, a name of this run.

    vLLM's own is the same for every run of torchrun, and a process that was forked leaves it behind.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    name = Shared.make_group_name
    Shared.make_group_name = staticmethod(lambda group: f"colo-{port}-{name(group).strip('/')}")
