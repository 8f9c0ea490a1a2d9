"""Moving segments between the device and the host arena, asynchronously and in pieces.

A `Mover` owns the arena and one copy stream for each direction. A `RegionSegment` is a segment made of regions: it is
what the scheduler moves. Which tensors live in the regions is its maker's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from colo.errors import PhaseError
from colo.memory.arena import Extent, PinnedArena
from colo.memory.region import Region, close_all
from colo.memory.segment import Done, Move
from colo.phases.phase import Residency, check_move
from colo.units import MIB

if TYPE_CHECKING:
    from colo.report.trace import Trace


class Mover:
    """The host arena of one device and the streams that copy to and from it.

    Ownership: owns the arena; `close` ends it, after every segment that uses it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        host_limit_bytes: int | None = None,
        chunk_bytes: int = 16 * MIB,
        trace: Trace | None = None,
    ) -> None:
        self.device = device
        self.arena = PinnedArena(device, limit_bytes=host_limit_bytes)
        self.trace = trace
        self._chunk_bytes = chunk_bytes
        self._streams: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {lane: torch.cuda.Stream(device) for lane in ("d2h", "h2d")}

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """Queue a copy from the device to the host (both uint8, same length) and return at once.

        Ordering: kernels queued on the current stream finish before the copy reads. The returned event is complete when
        the bytes have arrived; `None` says that they have already.
        """
        return self._copy("d2h", source, target)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """Queue a copy from the host to the device; as `copy_out` in all else."""
        return self._copy("h2d", source, target)

    def _copy(self, lane: str, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        if not self._streams:
            target.copy_(source)
            return None
        stream = self._streams[lane]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # One huge copy holds up every small copy behind it on the same engine, a token's way to the host for one.
            for offset in range(0, source.numel(), self._chunk_bytes):
                length = min(self._chunk_bytes, source.numel() - offset)
                target.narrow(0, offset, length).copy_(source.narrow(0, offset, length), non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def close(self) -> None:
        """Wait for the streams and release the arena. Idempotent."""
        for stream in self._streams.values():
            stream.synchronize()
        self.arena.close()


class RegionSegment:
    """A segment whose bytes are regions, moved through a `Mover`.

    Ownership: owns its regions and, once it has been offloaded, one arena extent for each of them, kept until `close`
    so that later cycles allocate nothing.
    """

    def __init__(self, name: str, *, regions: Sequence[Region], away: Residency | None, mover: Mover) -> None:
        self.name = name
        self.away = away
        self._mover = mover
        self._regions = list(regions)
        self._extents: dict[Region, Extent] = {}
        self._residency = Residency.RESIDENT if regions else Residency.DISCARDED
        self._move: _Departure | _Arrival | None = None

    @property
    def residency(self) -> Residency:
        """Where the bytes are, or are going while a move is under way."""
        return self._residency

    @property
    def regions(self) -> Sequence[Region]:
        """The regions, in the order in which they were added."""
        return tuple(self._regions)

    @property
    def size_bytes(self) -> int:
        """Device bytes when resident."""
        return sum(region.size_bytes for region in self._regions)

    @property
    def device_bytes(self) -> int:
        """Device bytes held at this moment."""
        return sum(region.device_bytes for region in self._regions)

    @property
    def host_bytes(self) -> int:
        """Bytes of the arena held, whether or not they are current."""
        return sum(extent.size_bytes for extent in self._extents.values())

    def add(self, regions: Sequence[Region]) -> None:
        """Let more regions, resident ones, join. Raises: `PhaseError` unless the segment is resident or empty."""
        if self._regions and self._residency is not Residency.RESIDENT:
            raise PhaseError(f"segment {self.name} is {self._residency}; regions join it while it is resident")
        self._regions.extend(regions)
        if self._regions:
            self._residency = Residency.RESIDENT

    def begin(self, target: Residency) -> Move:
        """Start moving to `target`; see `colo.memory.segment.Segment.begin`."""
        if target is self._residency:
            return self._move or Done()
        check_move(self.name, self._residency, target)
        if target is Residency.OFFLOADED:
            return self._depart()
        if target is Residency.RESIDENT:
            return self._arrive()
        return self._discard()

    def settle(self) -> None:
        """Wait for a move that is under way, if there is one."""
        if self._move is not None:
            self._move.wait()

    def host_copy(self, region: Region) -> torch.Tensor:
        """The bytes of a region while the segment is offloaded, as a view of the arena (uint8).

        Lifetime: valid until the segment moves again. Raises: `PhaseError` unless offloaded.
        """
        if self._residency is not Residency.OFFLOADED:
            raise PhaseError(f"segment {self.name} is {self._residency}; only an offloaded one has a host copy")
        self.settle()
        return self._host_view(region)

    def remove(self, regions: Sequence[Region]) -> None:
        """Close some of the regions and return their extents; without any left the segment is discarded."""
        self.settle()
        for region in regions:
            self._regions.remove(region)
            extent = self._extents.pop(region, None)
            if extent is not None:
                self._mover.arena.release(extent)
        if not self._regions:
            self._residency = Residency.DISCARDED
        close_all([region.close for region in regions])

    def close(self) -> None:
        """Release the regions and the extents. Idempotent."""
        self.remove(list(self._regions))

    def _depart(self) -> Move:
        self.settle()
        self._take_extents()
        self._move = _Departure(self)
        self._residency = Residency.OFFLOADED
        return self._move

    def _arrive(self) -> Move:
        if isinstance(self._move, _Departure):
            kept_bytes = self._move.cancel()
            if kept_bytes == self.size_bytes:
                self._residency, self._move = Residency.RESIDENT, None
                return Done()
        source = self._residency
        arrival = _Arrival(self, copies=source is Residency.OFFLOADED)
        self._residency = Residency.RESIDENT
        self._move = arrival
        return arrival

    def _discard(self) -> Move:
        self.settle()
        for region in self._regions:
            if region.resident:
                region.release()
        while self._extents:
            self._mover.arena.release(self._extents.popitem()[1])
        self._residency = Residency.DISCARDED
        return Done()

    def _take_extents(self) -> None:
        missing = [region for region in self._regions if region not in self._extents]
        self._mover.arena.reserve(sum(region.size_bytes for region in missing))
        for region in missing:
            self._extents[region] = self._mover.arena.allocate(region.size_bytes)

    def _host_view(self, region: Region) -> torch.Tensor:
        return self._mover.arena.view(self._extents[region]).narrow(0, 0, region.size_bytes)


class _Departure:
    """Copies to the host under way; a region's bytes go back to the driver as soon as its copy has finished."""

    def __init__(self, segment: RegionSegment) -> None:
        self._segment = segment
        self._mover = segment._mover
        self.moved_bytes = segment.size_bytes
        self._record = _recorder(self._mover, f"out {segment.name}", "d2h", self.moved_bytes)
        self._pending = [(r, self._mover.copy_out(r.bytes, segment._host_view(r))) for r in segment._regions]

    def wait(self) -> None:
        self.poll(block=True)

    def poll(self, *, block: bool = False) -> bool:
        """Release the regions whose copies have finished; with `block`, all of them. True when none is left."""
        while self._pending:
            region, event = self._pending[0]
            if event is not None and not block and not event.query():
                return False
            if event is not None:
                event.synchronize()
            region.release()
            self._pending.pop(0)
        self._finish()
        return True

    def cancel(self) -> int:
        """Stop releasing and return the bytes that never left the device; the copies run out unused."""
        for _, event in self._pending:
            if event is not None:
                event.synchronize()
        kept_bytes = sum(region.size_bytes for region, _ in self._pending)
        self._pending.clear()
        self._finish()
        return kept_bytes

    def _finish(self) -> None:
        if self._segment._move is self:
            self._segment._move = None
            self._record()


class _Arrival:
    """Regions mapped again and, if they had been offloaded, copies to the device under way."""

    def __init__(self, segment: RegionSegment, *, copies: bool) -> None:
        self._segment = segment
        self._mover = segment._mover
        regions = [region for region in segment._regions if not region.resident]
        self.moved_bytes = sum(region.size_bytes for region in regions) if copies else 0
        restored: list[Region] = []
        try:
            for region in regions:
                region.restore()
                restored.append(region)
        except BaseException:
            for region in restored:
                region.release()
            raise
        self._record = _recorder(self._mover, f"back {segment.name}", "h2d", self.moved_bytes)
        self._events = [self._mover.copy_in(segment._host_view(r), r.bytes) for r in regions] if copies else []

    def wait(self) -> None:
        """Let the current stream wait for the copies; the host does not."""
        if self._segment._move is not self:
            return
        for event in self._events:
            if event is not None:
                event.synchronize()
        self._segment._move = None
        self._record()

    def poll(self) -> bool:
        """True when every copy has finished."""
        return all(event is None or event.query() for event in self._events)


def _recorder(mover: Mover, name: str, resource: str, num_bytes: int) -> Callable[[], None]:
    """A function that adds the span from now to its call to the mover's trace."""
    trace = mover.trace
    if trace is None or num_bytes == 0:
        return lambda: None
    start_s = trace.now_s()
    return lambda: trace.add(name, start_s, category="copy", resource=resource, num_bytes=num_bytes)
