"""Whose turn it is with a slab: counts in host memory that the sender and its readers map.

The sender counts buckets that it has filled, every reader those that it is done with, and each waits for the other by
looking. A call into an engine's process takes about a millisecond, in which a slab is filled and read several times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from colo.errors import TransferError
from colo.memory.shared_memory import Description, SharedMemory, open_shared_memory

_CPU = torch.device("cpu")
_WORD_BYTES = 8
_FILLED, _STOPPED, _FIRST_READER = 0, 1, 2
"""Places of the counts, in words."""

_BY_SENDER, _BY_READER = 1, 2
"""Who has stopped."""

_SPIN_S, _SLEEP_S = 2e-3, 5e-5
"""Turns take fractions of a millisecond; who has waited longer gives the core away."""

DEADLINE_S = 60.0
"""How long a reader waits for the next bucket."""


class SenderHandoff:
    """The sender's end, which owns the memory until `close`."""

    def __init__(self, readers: int) -> None:
        self._slab = SharedMemory((_FIRST_READER + readers) * _WORD_BYTES, _CPU)
        self._words = self._slab.bytes.view(torch.int64).numpy()
        self.readers = readers

    def describe(self) -> Description:
        """For `ReaderHandoff`."""
        return self._slab.describe(to_pid=0)

    def begin(self) -> None:
        """Count from nothing. Ordering: no reader waits."""
        self._words[:] = 0

    def fill(self, count: int) -> None:
        """Say that `count` buckets have been filled."""
        self._words[_FILLED] = count

    def wait_read(self, count: int, has_ended: Callable[[], bool]) -> bool:
        """Wait until every reader is done with `count` buckets; false when one has failed or all have ended before."""
        return _until(
            lambda: int(self._words[_FIRST_READER:].min()) >= count,
            lambda: has_ended() or self._words[_STOPPED] == _BY_READER,
        )

    def stop(self) -> None:
        """Let readers wait no longer."""
        self._words[_STOPPED] = self._words[_STOPPED] or _BY_SENDER

    def close(self) -> None:
        """Let go of the memory."""
        del self._words
        self._slab.close()


class ReaderHandoff:
    """A reader's end."""

    def __init__(self, description: Description, *, readers: int, number: int, deadline_s: float = DEADLINE_S) -> None:
        """Reader `number` of the engine's; of those that this sender counts it is one of `readers`."""
        self._words = open_shared_memory(description, _CPU).view(torch.int64).numpy()
        self._place = _FIRST_READER + number % readers
        self._sender = Path(f"/proc/{description['pid']}")
        self._deadline_s = deadline_s

    def wait_filled(self, count: int) -> bool:
        """Wait until `count` buckets have been filled; false when another reader has failed, which says why.

        Raises: `TransferError` when the sender has stopped or ended, or says nothing for too long.
        """
        give_up_s = time.monotonic() + self._deadline_s
        reason = None

        def gives_up() -> bool:
            nonlocal reason
            if self._words[_STOPPED]:
                reason = "has stopped"
            elif not self._sender.exists():
                reason = "has ended"
            elif time.monotonic() > give_up_s:
                reason = f"has said nothing for {self._deadline_s:.0f} s"
            return reason is not None

        if not _until(lambda: bool(self._words[_FILLED] >= count), gives_up):
            if self._words[_STOPPED] == _BY_READER:
                return False
            raise TransferError(f"the sender {reason} before bucket {count}")
        return True

    def fail(self) -> None:
        """Let neither the sender nor other readers wait any longer."""
        self._words[_STOPPED] = _BY_READER

    def read(self, count: int) -> None:
        """Say that this reader is done with `count` buckets."""
        self._words[self._place] = count


def _until(holds: Callable[[], bool], gives_up: Callable[[], bool]) -> bool:
    """Poll until `holds` is true, or `gives_up`; returns the last value of `holds`."""
    spin_until_s = time.monotonic() + _SPIN_S
    while not holds():
        if time.monotonic() < spin_until_s:
            time.sleep(0)
        elif gives_up():
            return holds()
        else:
            time.sleep(_SLEEP_S)
    return True
