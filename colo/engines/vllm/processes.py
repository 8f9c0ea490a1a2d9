"""Processes on both sides: calls that end when vLLM's process does, its start, and the end with its driver.

vLLM's client waits for an answer without a deadline, also when the process is killed in between. So the call is made in
a thread, and whoever waits for it looks at the process, at the clock, and at what moves meanwhile.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from typing import TypeVar

import psutil

from colo.memory.uninterrupted import end_wait

T = TypeVar("T")

_LOOK_EVERY_S = 0.2
_marks = itertools.cycle(range(signal.SIGRTMAX - 8, signal.SIGRTMAX))
"""Signals that nobody sends. A process inherits the mask of the thread that starts it, which tells whose it is."""

_START_ENDS_S = 15.0
"""Time in which vLLM notices that a process which it waits for has been killed."""


class ProcessEnded(Exception):  # noqa: N818 - an event, which the engine turns into `EngineLost`
    """The engine's process ended before it answered."""


class NoAnswer(Exception):  # noqa: N818 - as above
    """The engine's process did not answer, and nothing of it moved, within the deadline."""


class Caller:
    """Makes one call after another in its own thread, in order, also when the wait for one was interrupted."""

    def __init__(self, progress: Callable[[], object] = lambda: ()) -> None:
        """`progress` is something that changes while the process works, looked at from the thread that waits.

        Where it is `None`, unknown, the processes count as working while they use a processor.
        """
        self._progress = progress
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._processes: list[psutil.Process] = []
        threading.Thread(target=_run, args=(self._queue,), name="colo-vllm", daemon=True).start()
        # at the engine's end, and not at Python's, when the thread is gone
        weakref.finalize(self, self._queue.put, None).atexit = False

    def watch(self, pids: Sequence[int]) -> None:
        """Give up on calls when one of these processes ends. Raises: `ProcessEnded` where one has."""
        try:
            self._processes = [psutil.Process(pid) for pid in pids]
        except psutil.NoSuchProcess as error:
            raise ProcessEnded from error

    def call(self, function: Callable[[], T], *, deadline_s: float | None) -> T:
        """Return what `function` returns. `ProcessEnded`; `NoAnswer` after `deadline_s` of its run without progress."""
        future: Future[T] = Future()

        def answer() -> None:
            # running from here on: the wait counts from its own beginning
            future.set_running_or_notify_cancel()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
                future.set_exception(error)

        self._queue.put(answer)
        moved_s, seen = time.monotonic(), (False, self._seen())
        while True:
            try:
                return future.result(timeout=_LOOK_EVERY_S)
            except TimeoutError:
                # the function itself may raise `TimeoutError`
                if future.done():
                    return future.result()
            # a second Ctrl-C ends the wait; the first one only notes
            end_wait("the engine")
            if self.has_ended():
                raise ProcessEnded
            # that a queued call begins to run counts as progress, too
            before, seen = seen, (future.running(), self._seen())
            if seen != before:
                moved_s = time.monotonic()
            elif deadline_s is not None and time.monotonic() > moved_s + deadline_s:
                raise NoAnswer

    def end_calls(self, end: Callable[[], None], then: Callable[[], None], *, within_s: float) -> None:
        """Call `end` until the calls so far have returned and `then` has run behind them, or `within_s` has passed.

        `end` runs in this thread, `then` in the thread of the calls, never both at once, and `end` not after `then`.
        Errors of `then` are dropped: the next call will find out.
        """
        one_at_a_time = threading.Lock()
        returned: Future[None] = Future()

        def last() -> None:
            with one_at_a_time:
                with suppress(Exception):
                    then()
                returned.set_result(None)

        self._queue.put(last)
        last_s = time.monotonic() + within_s
        while True:
            with one_at_a_time:
                if returned.done():
                    return
                end()
            if self.has_ended() or time.monotonic() > last_s:
                return
            wait([returned], timeout=_LOOK_EVERY_S)
            end_wait("the engine")

    def _seen(self) -> object:
        """Return a value that differs from the last one while the processes work."""
        found = self._progress()
        return found if found is not None else [_processor_time(process) for process in self._processes]

    def has_ended(self) -> bool:
        """Tell whether one of the watched processes has ended."""
        return not all(lives(process) for process in self._processes)

    def close(self) -> None:
        """End the thread once the calls before have returned, if they ever do."""
        self._queue.put(None)


def _run(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Run tasks until `None` comes. Refers to nothing in between: a thread that waits keeps no engine alive."""
    while (task := tasks.get()) is not None:
        task()
        del task


def _processor_time(process: psutil.Process) -> int:
    """Half seconds of processor time that a process has used; threads that only look around need minutes for one."""
    with suppress(psutil.Error):
        used = process.cpu_times()
        return int(2 * (used.user + used.system))
    return -1


def start_apart_from_interrupts(start: Callable[[], T], discard: Callable[[T], None]) -> T:
    """Run `start` in a thread with SIGINT blocked, since terminals and notebooks send Ctrl-C to the children too.

    An interrupt of this thread kills the processes that are being started, and no others that come meanwhile;
    `discard` gets what has been started all the same. Raises: what `start` raises.
    """
    resource_tracker.ensure_running()  # where it is not, spawning lifts the mask
    mark = next(_marks)
    started: Future[T] = Future()
    one_at_a_time = threading.Lock()
    begun, abandoned, finished = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        # inherited by the children: Ctrl-C in a terminal goes to the whole group
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, mark})
        # the thread must not start anything before the wait can be interrupted in order
        begun.wait()
        try:
            if abandoned.is_set():
                return
            result = start()
            with one_at_a_time:
                if not abandoned.is_set():
                    started.set_result(result)
                    return
            discard(result)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            started.set_exception(error)
        finally:
            finished.set()

    try:
        threading.Thread(target=run, name="colo-start", daemon=True).start()
        begun.set()  # an interrupt before has nothing to end
        return started.result()
    except BaseException:
        with one_at_a_time:
            abandoned.set()
        if not begun.is_set():
            begun.set()
            raise
        if started.done() and started.exception() is None:  # just before
            discard(started.result())
        _kill_children(finished, mark)
        raise


def _kill_children(until: threading.Event, mark: int) -> None:
    """Kill children that block the signal `mark`, present and new ones, until the event is set or time is up."""
    last_s = time.monotonic() + _START_ENDS_S
    while not until.is_set() and time.monotonic() < last_s:
        # the resource tracker and other children of the program do not block the mark
        for process in active_children():
            if process.pid is not None and _blocks(process.pid, mark):
                process.kill()
        until.wait(_LOOK_EVERY_S)


def _blocks(pid: int, number: int) -> bool:
    """Read whether a process, in its first thread, blocks a signal."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:")]
        return any(mask >> (number - 1) & 1 for mask in masks)
    return False


# ---- ending with the process that drives this one --------------------------------------------------------------------

# vLLM's own outlive a client that is killed, and keep the device's memory.

GRACE_S = 10.0
"""Seconds that processes have to end in order before they are killed."""

_INTERVAL_S = 1.0

_watched: set[int] = set()


def end_with(pid: int) -> None:
    """End this process, and those between it and `pid`, once process `pid` has ended. Idempotent; not for its own."""
    if pid == os.getpid() or pid in _watched:
        return
    _watched.add(pid)
    own = psutil.Process()
    try:
        driver, processes = psutil.Process(pid), _down_from(pid, own)
    except psutil.Error:  # it has ended already, and nobody waits for this process
        driver, processes = None, [own]
    threading.Thread(target=_watch, args=(driver, processes), name="colo-lifeline", daemon=True).start()


def _down_from(pid: int, own: psutil.Process) -> list[psutil.Process]:
    """The descendants of `pid` that lead to `own`; that alone if it is none of them."""
    # the engine core between driver and worker would stay, waiting for its worker
    above = own.parents()
    pids = [process.pid for process in above]
    return [*above[: pids.index(pid)], own] if pid in pids else [own]


def _watch(driver: psutil.Process | None, processes: Sequence[psutil.Process]) -> None:
    while driver is not None and lives(driver):
        time.sleep(_INTERVAL_S)
    # in order first: processes may clean up behind them
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.Error):
                end(process)
        time.sleep(GRACE_S)


def pid_namespace() -> int:
    """Number of the namespace whose process ids this process sees: a container has its own."""
    return Path("/proc/self/ns/pid").stat().st_ino


def lives(process: psutil.Process) -> bool:
    """True if the process runs and its id has not been given to another."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
