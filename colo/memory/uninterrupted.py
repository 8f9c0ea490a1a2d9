"""Blocks that Ctrl-C must not split, such as an action and the record of it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended. Does nothing outside the main thread, which alone is interrupted.

    A block may wait for an engine or for other ranks only through code that calls `end_wait`. A block within another
    one adds nothing.
    """
    handler = _handler()
    if not callable(handler) or isinstance(handler, _Block):  # else interrupts are ignored, or end the process at once
        yield
        return
    block = _Block(handler)
    signal.signal(signal.SIGINT, block)
    try:
        yield
    except KeyboardInterrupt:
        block.noted.clear()  # `end_wait` has raised it
        raise
    finally:
        # before what was noted is told: the handler raises
        signal.signal(signal.SIGINT, handler)
        if block.noted:
            handler(*block.noted[0])


def end_wait(awaited: str) -> None:
    """Raise `KeyboardInterrupt` when Ctrl-C has come twice in this block. Whoever waits calls it every so often.

    Every later wait of the same block ends, too: whoever cleans up would wait for the same that does not answer.
    """
    block = _handler()
    if not isinstance(block, _Block) or not block.noted:
        return
    if len(block.noted) > 1:
        block.handler(*block.noted[-1])
        del block.noted[1:]  # the handler is somebody's own, which goes on
    elif not block.is_told:
        block.is_told = True
        logger.warning("Ctrl-C is noted, and waits for %s: press it again to end the wait", awaited)


class _Block:
    """The handler of SIGINT within an outermost block: it notes interrupts."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.noted: list[tuple[int, FrameType | None]] = []
        self.is_told = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted.append((number, frame))


def _handler() -> Any:
    """The handler of SIGINT; `None` in threads that are never interrupted."""
    return signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
