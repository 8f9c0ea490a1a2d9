"""Processes on both sides: which still live, and ending with the one that drives them, however that ends.

vLLM's own outlive a client that is killed, and keep the device's memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

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
    above = own.parents()
    pids = [process.pid for process in above]
    return [*above[: pids.index(pid)], own] if pid in pids else [own]


def _watch(driver: psutil.Process | None, processes: Sequence[psutil.Process]) -> None:
    while driver is not None and lives(driver):
        time.sleep(_INTERVAL_S)
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
