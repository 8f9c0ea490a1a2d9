"""Sides of a benchmark that cannot share a process, each in one of its own, measured in turns."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any

_made: list[Any] = []
"""In a side's process: the object that is measured."""


class Side:
    """An object in a process of its own, whose methods are called from here. Arguments and results are pickled."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Start the process and make the object there. Raises: what making it raises."""
        self._process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            self._process.submit(_make, make, arguments).result()
        except BaseException:
            self._process.shutdown()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the object returns. Raises: what it raises; `BrokenProcessPool` when its process ends."""
        return self._process.submit(_call, method, arguments).result()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Call the object's `close`, and end its process."""
        try:
            self.call("close")
        finally:
            self._process.shutdown()


def _make(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _made.append(make(*arguments))


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_made[0], method)(*arguments)
