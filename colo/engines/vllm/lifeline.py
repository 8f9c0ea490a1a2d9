"""An engine's processes end with the process that drives them, however that ends.

vLLM's own outlive a client that is killed, and keep the device's memory.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

GRACE_S = 10.0
"""How long processes have to end in order before they are killed."""

_watched: set[int] = set()


def end_with(pid: int) -> None:
    """End this process, and those between it and `pid`, once process `pid` has ended. Idempotent.

    Nothing is watched where the kernel does not tell (Linux before 5.3).
    """
    if pid in _watched:
        return
    with suppress(OSError):
        ended = os.pidfd_open(pid)
        _watched.add(pid)
        threading.Thread(target=_wait, args=(ended, _down_from(pid)), name="colo-lifeline", daemon=True).start()


def _down_from(pid: int) -> list[psutil.Process]:
    """The descendants of `pid` that lead to this process; this one alone if it is none of them."""
    own = psutil.Process()
    above = own.parents()
    pids = [process.pid for process in above]
    return [*above[: pids.index(pid)], own] if pid in pids else [own]


def _wait(ended: int, processes: Sequence[psutil.Process]) -> None:
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.poll()
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.Error):
                end(process)
        time.sleep(GRACE_S)
