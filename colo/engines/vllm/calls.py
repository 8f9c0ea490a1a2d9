"""Calls into an engine in another process that end when that process does.

vLLM's client waits for an answer without a deadline, also when the process is killed in between. So the call is made in
a thread, and whoever waits for it looks at the process, at the clock, and at what moves meanwhile.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

_LOOK_EVERY_S = 0.2
_START_ENDS_S = 15.0
"""How long vLLM may take to notice that a process which it waits for has been killed."""


class ProcessEnded(Exception):  # noqa: N818 - an event, which the engine turns into `EngineLost`
    """The engine's process ended before it answered."""


class NoAnswer(Exception):  # noqa: N818 - as above
    """The engine's process did not answer, and nothing of it moved, within the deadline."""


class Caller:
    """Makes one call after another in a thread of its own.

    Ordering: calls run in the order in which they were made, also when the wait for one was interrupted.
    """

    def __init__(self, progress: Callable[[], object] = lambda: None) -> None:
        """`progress` is something that changes while the process works, looked at from the thread that waits."""
        self._progress = progress
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._processes: list[psutil.Process] = []
        threading.Thread(target=self._run, name="colo-vllm", daemon=True).start()

    def watch(self, pids: Sequence[int]) -> None:
        """Give up on calls when one of these processes ends."""
        self._processes = [psutil.Process(pid) for pid in pids]

    def call(self, function: Callable[[], T], *, deadline_s: float | None) -> T:
        """What `function` returns or raises.

        Raises: `ProcessEnded`; `NoAnswer` once it has taken `deadline_s` without any progress, counted from its begin,
        which is after the calls before it.
        """
        future: Future[T] = Future()

        def answer() -> None:
            future.set_running_or_notify_cancel()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
                future.set_exception(error)

        self._queue.put(answer)
        moved_s, seen = time.monotonic(), (False, self._progress())
        while True:
            try:
                return future.result(timeout=_LOOK_EVERY_S)
            except TimeoutError:
                if future.done():
                    return future.result()
            if self.has_ended():
                raise ProcessEnded
            before, seen = seen, (future.running(), self._progress())
            if seen != before:
                moved_s = time.monotonic()
            elif deadline_s is not None and time.monotonic() > moved_s + deadline_s:
                raise NoAnswer

    def end_calls(self, end: Callable[[], None], *, within_s: float) -> None:
        """Wait until every call made so far has returned, for `within_s`, and call `end` to that purpose till then."""
        returned: Future[None] = Future()
        self._queue.put(lambda: returned.set_result(None))
        last_s = time.monotonic() + within_s
        while not returned.done() and not self.has_ended() and time.monotonic() < last_s:
            end()
            wait([returned], timeout=_LOOK_EVERY_S)

    def has_ended(self) -> bool:
        """Whether one of the watched processes has ended."""
        return not all(lives(process) for process in self._processes)

    def close(self) -> None:
        """End the thread once the calls before have returned, if they ever do."""
        self._queue.put(None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()


def start_apart_from_interrupts(start: Callable[[], T]) -> T:
    """What `start` returns, with Ctrl-C kept from the processes that it starts: terminals and notebooks send it to all.

    A mask of signals belongs to a thread and to what it starts, hence the thread. An interrupt meanwhile ends what has
    been started. Raises: what `start` raises.
    """
    resource_tracker.ensure_running()  # where it is not, spawning lifts the mask
    before = {process.pid for process in active_children()}
    started: Future[T] = Future()

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            started.set_result(start())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            started.set_exception(error)

    threading.Thread(target=run, name="colo-start", daemon=True).start()
    try:
        return started.result()
    except KeyboardInterrupt:
        for process in active_children():
            if process.pid not in before:
                process.kill()
        wait([started], timeout=_START_ENDS_S)
        raise


def pid_namespace() -> int:
    """Which process ids this process sees: a container has its own."""
    return Path("/proc/self/ns/pid").stat().st_ino


def lives(process: psutil.Process) -> bool:
    """Whether it is there and is still the same one."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
