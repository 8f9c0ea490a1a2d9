"""A trainer and its engine, in whichever way they share the device, as something that takes steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from colo.bench.common import synchronize
from colo.bench.workload import Setup, peak_device_bytes

PARTS = ("rollout", "publish", "train", "switch")
"""What a step consists of; `switch` is whatever belongs to none of the others."""


class Moment:
    """A point in what a device has been given to do on its current stream; on a CPU a time."""

    def __init__(self, device: torch.device) -> None:
        self._time_s = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: Moment) -> float:
        """Seconds from this to `later`. Ordering: the device has been waited for."""
        if self._event is None or later._event is None:
            return later._time_s - self._time_s
        return float(self._event.elapsed_time(later._event)) / 1e3


@dataclass
class Stopwatch:
    """Seconds of a step and of its parts. Runs from when it is made until `stop`."""

    device: torch.device
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    exposed_s: float | None = None
    """Seconds of copies between device and host beside neither sampling nor gradients; `None` if unknown."""

    sent_bytes: int = 0
    """Bytes of weights that have left the trainer's memory."""

    total_s: float = 0.0
    start_s: float = field(default_factory=time.perf_counter)
    _within_s: float = 0.0
    """Seconds of parts within the one that runs."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what a block takes, until the device has done what it queues, to a part; less parts within it."""
        start_s, before_s, self._within_s = time.perf_counter(), self._within_s, 0.0
        yield
        synchronize(self.device)
        spent_s = time.perf_counter() - start_s
        self.parts_s[name] += spent_s - self._within_s
        self._within_s = before_s + spent_s

    def stop(self, rest: str = "switch") -> None:
        """Wait for what the trainer has queued, and count what no part has counted as `rest`.

        Copies of state to the host may go on: the next rollout does not wait for them.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.total_s = time.perf_counter() - self.start_s
        self.parts_s[rest] = self.total_s - sum(self.parts_s[name] for name in PARTS if name != rest)


class Tenants(ABC):
    """What is measured, in a process of its own."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def step(self, way: str) -> Stopwatch:
        """One step of rollout and training, in one of several ways to go about it."""

    @abstractmethod
    def rest(self) -> None:
        """Hold as little device memory as can be, while others are measured."""

    @abstractmethod
    def close(self) -> None:
        """End the engine."""

    def peak_bytes(self, way: str) -> int:
        """The most device memory in use during a step, all processes together; 0 on a CPU."""
        with peak_device_bytes(self.setup.device) as peak:
            self.step(way)
        return peak[0]
