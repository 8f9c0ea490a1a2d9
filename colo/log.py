"""colo's own messages, by standard `logging` under the logger `colo`.

The environment variable COLO_LOG is its level, `info` by default; `debug` leaves the engine's log on the terminal, too.
A program that has handlers of its own gets the messages there, one that has none on standard error.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("colo")


class _Terminal(logging.Handler):
    """Writes to standard error where the program has set up no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"colo: {record.getMessage()}\n")
            sys.stderr.flush()


class _Spinners:
    """The spinner on the terminal, at most one."""

    shown: Status | None = None


def set_up(name: str) -> None:
    """Give the logger the level that is called `name`, and its handler once; another name is taken for `info`."""
    logger.setLevel(name.upper() if name.lower() in LEVELS else logging.INFO)
    if not any(isinstance(handler, _Terminal) for handler in logger.handlers):
        logger.addHandler(_Terminal())


def shows_engines() -> bool:
    """True when the engine's own log is shown on the terminal: at level DEBUG."""
    return logger.isEnabledFor(logging.DEBUG)


@contextmanager
def waiting(text: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show a spinner beside `text` meanwhile, on a terminal; what is yielded changes the text.

    Within another `waiting` it changes that one's text for its time.
    """
    outer = _Spinners.shown
    if outer is not None:
        before = outer.status
        outer.update(text)
        try:
            yield outer.update
        finally:
            outer.update(before)
        return
    from rich.console import Console

    console = console or Console(stderr=True)
    if not console.is_terminal or shows_engines() or not logger.isEnabledFor(logging.INFO):
        yield lambda text: None
        return
    with console.status(text) as status:
        _Spinners.shown = status
        try:
            yield status.update
        finally:
            _Spinners.shown = None


set_up(os.environ.get("COLO_LOG", "info"))
