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


@dataclass
class Stopwatch:
    """Seconds of a step and of its parts. Runs from when it is made until `stop`."""

    device: torch.device
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    sent_bytes: int = 0
    """Bytes of weights that have left the trainer's memory."""

    total_s: float = 0.0
    start_s: float = field(default_factory=time.perf_counter)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what a block takes, until the device has done what it queues, to a part."""
        start_s = time.perf_counter()
        yield
        synchronize(self.device)
        self.parts_s[name] += time.perf_counter() - start_s

    def stop(self) -> None:
        """Wait for the device, and count what no part has counted as switching."""
        synchronize(self.device)
        self.total_s = time.perf_counter() - self.start_s
        self.parts_s["switch"] = self.total_s - sum(self.parts_s[name] for name in PARTS if name != "switch")


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
