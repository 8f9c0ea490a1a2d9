"""Blocks that Ctrl-C, or another signal, must not split, such as an action and the record of it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that loops handle: Ctrl-C, the end that a scheduler announces, and the end of a time."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C, and other signals that a function handles, until the block has ended.

    Does nothing outside the main thread, which alone is interrupted. A block may wait for an engine or for other ranks
    only through code that calls `end_wait`. A block within another one adds nothing.
    """
    found = _handlers()
    if not found or _present(found) is not None:
        yield
        return
    handlers = {number: _within(number, handler) for number, handler in found.items()}
    block = _Block(handlers)
    try:
        for number in handlers:
            signal.signal(number, block)
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or any(error is raised for raised in block.raised):
            block.noted.clear()  # `end_wait` has raised it
        raise
    finally:
        block.is_over = True  # first: a handler that raises may leave others to be put back, and the block hands on
        for number, handler in handlers.items():
            if signal.getsignal(number) is block:
                signal.signal(number, handler)
        for number in dict.fromkeys(number for number, _ in block.noted):
            handlers[number](number, next(frame for noted, frame in block.noted if noted == number))


def end_wait(awaited: str) -> None:
    """Raise `KeyboardInterrupt` when Ctrl-C has come twice in this block, and what the handlers of other signals raise.

    Whoever waits calls it every so often. Every later wait of the same block ends, too: whoever cleans up would wait
    for the same that does not answer.
    """
    block = _present(_handlers())
    if block is None:
        return
    for noted in [noted for noted in block.noted if noted[0] != signal.SIGINT]:
        block.tell(*noted)  # at once: who has sent it does not send it again
        block.noted.remove(noted)  # the handler is one that goes on
    interrupts = [noted for noted in block.noted if noted[0] == signal.SIGINT]
    if len(interrupts) > 1:
        block.tell(*interrupts[-1])
        block.noted[:] = interrupts[:1]  # the handler is somebody's own, which goes on
    elif interrupts and not block.is_told:
        block.is_told = True
        logger.warning("Ctrl-C is noted, and waits for %s: press it again to end the wait", awaited)


class _Block:
    """The handler of signals within an outermost block: it notes them."""

    def __init__(self, handlers: Mapping[int, Handler]) -> None:
        self.handlers = handlers
        self.noted: list[tuple[int, FrameType | None]] = []
        self.raised: list[BaseException] = []  # by handlers that were told within the block
        self.is_told = False
        self.is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:
            self.handlers[number](number, frame)
        else:
            self.noted.append((number, frame))

    def tell(self, number: int, frame: FrameType | None) -> None:
        """Call the handler of a signal that was noted. Raises: what that raises."""
        try:
            self.handlers[number](number, frame)
        except BaseException as error:
            self.raised.append(error)
            raise


def _handlers() -> dict[int, Handler]:
    """The functions that handle signals; none in threads that are never interrupted."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    # others are ignored, or end the process at once
    return {number: handler for number, handler in found.items() if callable(handler)}


def _within(number: int, handler: Handler) -> Handler:
    """The handler that a block which is over, and was not put back, stands for."""
    while isinstance(handler, _Block) and handler.is_over:
        handler = handler.handlers[number]
    return handler


def _present(handlers: Mapping[int, Handler]) -> _Block | None:
    """The block that the main thread is in, if it is in one."""
    return next((one for one in handlers.values() if isinstance(one, _Block) and not one.is_over), None)
