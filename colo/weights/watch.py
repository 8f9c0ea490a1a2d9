"""Noticing what happens to weights: writes of others than the optimizer, and bytes that are read out of them."""

from __future__ import annotations

import itertools
import operator
import threading
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colo.memory.load_plan import tensors_in
from colo.weights.sources.base import WeightSource
from colo.weights.sources.module import all_modules, held_by

_version_of = operator.attrgetter("_version")


class WriteWatch:
    """Remembers a model's weights, how often torch has written to each in place, and an adapter's settings.

    Writes through `.data` are not noticed. Keeps the tensors, so that a new tensor cannot be taken for an old one.
    """

    def __init__(self, source: WeightSource) -> None:
        """Buffers called like those of `source` that are foreign to its engine are not watched."""
        self._source = source
        self._foreign = {name.rpartition(".")[2] for name in source.foreign}
        self._seen = self._state()

    def accept(self) -> None:
        """Accept the weights as they are now: an optimizer's step has written them."""
        self._seen = self._state()

    def has_changed(self) -> bool:
        """True if something has changed since the last call, or `accept`."""
        # identities first: a replaced tensor may have the count of the one before
        (tensors, counts, adapter), self._seen = self._seen, self._state()
        is_same = len(tensors) == len(self._seen[0]) and all(map(operator.is_, tensors, self._seen[0]))
        return not is_same or (counts, adapter) != self._seen[1:]

    def _state(self) -> tuple[list[torch.Tensor], list[int], Hashable]:
        models = self._source.modules
        settings = self._source.settings()
        # where FSDP2 has left weights whole, the model's parameters are other tensors than the shards
        self._source.reshard()
        modules = list(itertools.chain.from_iterable(map(all_modules, models)))
        ignored = [
            id(buffer)
            for module in modules
            if module._buffers
            for name, buffer in module._buffers.items()
            # no weights: no checkpoint has them, and a pass may write to them, as to caches of rotary embeddings
            if name in module._non_persistent_buffers_set or name in self._foreign
        ]
        tensors = [t for t in held_by(modules)[1] if t is not None and id(t) not in ignored]
        return tensors, list(map(_version_of, tensors)), settings


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
        # an operation that writes to no argument writes what it returns
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
