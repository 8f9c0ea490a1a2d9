"""Counting bytes that leave a trainer's memory, where nobody who copies them counts."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colo.memory.load_plan import tensors_in

_running = threading.local()


def count_read(num_bytes: int) -> None:
    """Count bytes of watched memory that another process has read at this thread's request."""
    for meter in _meters():
        meter.num_bytes += num_bytes


@contextmanager
def uncounted() -> Iterator[None]:
    """Stop this thread's meters within the block: copies in it stay the trainer's."""
    meters = _meters()
    _running.meters = ()
    try:
        yield
    finally:
        _running.meters = meters


def _meters() -> tuple[CopyMeter, ...]:
    """Meters of this thread that count, the innermost last."""
    return getattr(_running, "meters", ())


class CopyMeter(TorchDispatchMode):
    """Counts the bytes that operations of this thread, not of other ones, read from given memory to write elsewhere."""

    def __init__(self, memory: Callable[[], Iterable[torch.Tensor]]) -> None:
        """`memory` gives the tensors to watch; it is called when an operation is seen for the first time."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves the mode untyped
        self.num_bytes = 0
        self._memory = memory

    def __enter__(self) -> CopyMeter:
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        _running.meters = (*_meters(), self)
        return self

    def __exit__(self, *raised: Any) -> None:
        _running.meters = tuple(meter for meter in _meters() if meter is not self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or self not in _meters():
            return result
        # an operation counts if it reads watched memory and writes anywhere else
        names = {argument.name: _is_written(argument) for argument in func._schema.arguments}
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        written = [given[name] for name, is_written in names.items() if is_written and name in given] or [result]
        if any(not self._holds(tensor) for tensor in tensors_in(written)):
            read = tensors_in(value for name, value in given.items() if not names[name])
            self.num_bytes += sum(tensor.nbytes for tensor in read if self._holds(tensor))
        return result

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """Address of every watched tensor and of what follows it, sorted."""
        return sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in self._memory())

    def _holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        position = bisect_right(self._ranges, address, key=lambda bounds: bounds[0]) - 1
        return position >= 0 and address < self._ranges[position][1]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)
