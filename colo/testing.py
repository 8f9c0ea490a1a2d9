"""Fakes that count bytes, and tiny models, for tests of code that uses colo. Public, and kept as stable as the rest.

device = FakeDevice(capacity_bytes=100)
kv = FakeSegment("engine.kv_cache", 60, device, away=Residency.DISCARDED)
scheduler = Scheduler([kv], Budget(capacity_bytes=100, host_capacity_bytes=0))
"""

from __future__ import annotations

from collections.abc import Callable

from colo.memory.segment import Done, Move
from colo.phases.phase import Residency, check_move


class FakeDevice:
    """A device that counts the bytes of its segments and, like a real one, fails when they exceed its capacity."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Allocate. Raises: `MemoryError` past the capacity, which a correct plan never lets happen."""
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise MemoryError(f"{self.used_bytes} + {num_bytes} bytes on a device of {self.capacity_bytes}")
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def free(self, num_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= num_bytes


class FakeSegment:
    """A segment without memory. Departures hold their device bytes until they are waited for, as real ones do.

    `before_begin(segment, target)` and `before_wait(segment, target)` run first in each move and may raise, to make
    that step fail; the segment then stays, or is again, where it was.
    """

    def __init__(
        self,
        name: str,
        size_bytes: int,
        device: FakeDevice,
        *,
        away: Residency | None = Residency.OFFLOADED,
        residency: Residency = Residency.RESIDENT,
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.away = away
        self.device_bytes = 0
        self.host_bytes = 0
        self.before_begin: Callable[[FakeSegment, Residency], None] = lambda segment, target: None
        self.before_wait: Callable[[FakeSegment, Residency], None] = lambda segment, target: None
        self._device = device
        self._residency = residency
        self._departure: _FakeDeparture | None = None
        if residency is Residency.RESIDENT:
            self._hold(size_bytes)
        elif residency is Residency.OFFLOADED:
            self.host_bytes = size_bytes

    @property
    def residency(self) -> Residency:
        """Where the bytes are, or are going while a move is under way."""
        return self._residency

    def begin(self, target: Residency) -> Move:
        """Start moving; see `colo.memory.segment.Segment.begin`."""
        if target is self._residency:
            return self._departure or Done()
        check_move(self.name, self._residency, target)
        self.before_begin(self, target)
        if target is Residency.OFFLOADED:
            self._departure = _FakeDeparture(self)
            self._residency, self.host_bytes = target, self.size_bytes
            return self._departure
        if self._departure is not None:
            self._departure.wait()
        moved_bytes = self.size_bytes if self._residency is Residency.OFFLOADED else 0
        if target is Residency.RESIDENT:
            self._hold(self.size_bytes)
        elif self._residency is Residency.RESIDENT:
            self._let_go()
        self._residency, self.host_bytes = target, 0
        return Done(moved_bytes)

    def _hold(self, num_bytes: int) -> None:
        self._device.take(num_bytes)
        self.device_bytes = num_bytes

    def _let_go(self) -> None:
        self._device.free(self.device_bytes)
        self.device_bytes = 0

    def _finish_departure(self) -> None:
        try:
            self.before_wait(self, Residency.OFFLOADED)
        except BaseException:
            self._residency, self.host_bytes, self._departure = Residency.RESIDENT, 0, None
            raise
        self._departure = None
        self._let_go()


class _FakeDeparture:
    def __init__(self, segment: FakeSegment) -> None:
        self._segment = segment
        self.moved_bytes = segment.size_bytes

    def wait(self) -> None:
        if self._segment._departure is self:
            self._segment._finish_departure()

    def poll(self) -> bool:
        return self._segment._departure is not self  # its bytes stay until somebody waits for them
