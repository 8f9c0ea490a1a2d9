"""Moving segments between the device and the host arena, asynchronously and in pieces.

A `Mover` owns the arena and one copy stream for each direction. A `RegionSegment` is a segment made of regions: it is
what the scheduler moves. It does not know the tensors in its regions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from colo.errors import PhaseError
from colo.memory.arena import ALIGNMENT_BYTES, Extent, PinnedArena
from colo.memory.region import Region, close_all
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import Done, Move, Residency, check_move
from colo.units import MIB, align_up

if TYPE_CHECKING:
    from colo.phases.trace import Trace


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Transfer:
    """A copy between host and device: queued or, on a CPU, done already."""

    def __init__(
        self, *, started: torch.cuda.Event | None = None, finished: torch.cuda.Event | None = None, seconds: float = 0.0
    ) -> None:
        self._started = started
        self._finished = finished
        self._seconds = seconds

    @property
    def done(self) -> bool:
        """True once the bytes have arrived."""
        return self._finished is None or bool(self._finished.query())

    def wait(self) -> None:
        """Return when the bytes have arrived."""
        if self._finished is not None:
            self._finished.synchronize()

    @property
    def seconds(self) -> float:
        """Seconds that the copy itself took. Ordering: after `wait`."""
        if self._started is None or self._finished is None:
            return self._seconds
        return float(self._started.elapsed_time(self._finished)) / 1e3


class Mover:
    """The host arena of one device and the streams that copy to and from it.

    Ownership: owns the arena; `close` ends it, after every segment that uses it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        host_limit_bytes: int | None = None,
        chunk_bytes: int = 64 * MIB,
        trace: Trace | None = None,
    ) -> None:
        if str(device) == "cuda":  # tensors name their device with its number
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.arena = PinnedArena(device, limit_bytes=host_limit_bytes)
        self.trace = trace
        self.chunk_bytes = chunk_bytes
        self._streams: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {lane: torch.cuda.Stream(device, priority=-1) for lane in ("d2h", "h2d")}
            self._since_tick = dict.fromkeys(self._streams, 0)
            self._ticks = {lane: torch.zeros((), dtype=torch.int32, device=device) for lane in self._streams}

    def copy_out(self, pairs: Pairs) -> Transfer:
        """Queue copies from the device to the host (pairs of source and target, uint8) and return at once.

        Ordering: kernels queued on the current stream finish before the copies read.
        """
        return self._copy("d2h", pairs, after_queued=True)

    def copy_in(self, pairs: Pairs, *, after_queued: bool = True) -> Transfer:
        """Queue copies from the host to the device, as `copy_out` does.

        Without `after_queued` the copies do not wait for the current stream: only for memory that no queued kernel
        uses, such as a region that has just been restored.
        """
        return self._copy("h2d", pairs, after_queued=after_queued)

    def record(self, name: str, lane: str, start_s: float, transfers: Sequence[Transfer], num_bytes: int) -> None:
        """Add one span for copies that have finished to the trace."""
        if self.trace is not None and transfers:
            end_s = start_s + sum(transfer.seconds for transfer in transfers)
            self.trace.add(name, start_s, end_s=end_s, category="copy", resource=lane, num_bytes=num_bytes)

    def now_s(self) -> float:
        """Seconds since the trace began."""
        return self.trace.now_s() if self.trace is not None else 0.0

    def _copy(self, lane: str, pairs: Pairs, *, after_queued: bool) -> Transfer:
        if not self._streams:
            start_s = time.perf_counter()
            for source, target in pairs:
                target.copy_(source)
            return Transfer(seconds=time.perf_counter() - start_s)
        stream = self._streams[lane]
        if after_queued:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        started, finished = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            started.record(stream)
            for source, target, length in self._chunks(pairs):
                if self._since_tick[lane] + length > self.chunk_bytes:
                    # A copy engine serves one stream for as long as that has copies ready; small copies of other
                    # streams, such as a sampled token's, wait. A kernel between two chunks lets them in. Generation
                    # during an offload took 1.7 times as long without this kernel, and no longer than usual with it.
                    self._ticks[lane].add_(1)
                    self._since_tick[lane] = 0
                target.copy_(source, non_blocking=True)
                self._since_tick[lane] += length
            finished.record(stream)
        return Transfer(started=started, finished=finished)

    def _chunks(self, pairs: Pairs) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Cut pairs into pieces of at most `chunk_bytes`; yield the length of each too."""
        for source, target in pairs:
            for offset in range(0, source.numel(), self.chunk_bytes):
                length = min(self.chunk_bytes, source.numel() - offset)
                yield source.narrow(0, offset, length), target.narrow(0, offset, length), length

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
        """Residency of the bytes, or the one they are going to while a move is under way."""
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
        """Add resident regions to the segment. Raises: `PhaseError` unless the segment is resident or empty."""
        if self._regions and self._residency is not Residency.RESIDENT:
            raise PhaseError(f"segment {self.name} is {self._residency}; regions join it while it is resident")
        self._regions.extend(regions)
        if self._regions:
            self._residency = Residency.RESIDENT

    def begin(self, target: Residency) -> Move:
        """Start moving to `target`; see `colo.phases.phase.Segment.begin`."""
        with uninterrupted():  # regions and the records of them change together
            if target is self._residency:
                # on its way there already: whoever asks again waits for the same move
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

    def poll(self) -> bool:
        """Give back what a departure under way has freed so far, without waiting; true once no move is under way."""
        return self._move is None or self._move.poll()

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
        self._take_out(regions)
        close_all([region.close for region in regions])

    def _take_out(self, regions: Sequence[Region]) -> None:
        """Take regions out of the segment as they are, and return their extents to the arena."""
        for region in regions:
            self._regions.remove(region)
            extent = self._extents.pop(region, None)
            if extent is not None:
                self._mover.arena.release(extent)
        if not self._regions:
            self._residency = Residency.DISCARDED

    def close(self) -> None:
        """Release the regions and the extents. Idempotent."""
        self.remove(list(self._regions))

    def _left(self, region: Region) -> None:
        """Free a region whose bytes have been copied to the host."""
        region.release()

    def _arrived(self) -> None:
        """Called when the bytes are on the device again, perhaps twice; for subclasses."""

    def _depart(self) -> Move:
        self.settle()
        # may refuse, and must do so before a byte has been copied
        self._take_extents()
        self._move = _Departure(self)
        self._residency = Residency.OFFLOADED
        return self._move

    def _arrive(self) -> Move:
        if isinstance(self._move, _Departure):  # turned round on the way: what has not been freed is whole
            kept_bytes = self._move.cancel()
            if kept_bytes == self.size_bytes:
                self._residency, self._move = Residency.RESIDENT, None
                self._arrived()
                return Done()
        source = self._residency
        try:
            arrival = _Arrival(self, copies=source is Residency.OFFLOADED)
        except BaseException:
            for region in list(self._regions):  # the host has complete copies of all
                if region.resident:
                    self._left(region)
            raise
        self._residency = Residency.RESIDENT
        self._move = arrival
        return arrival

    def _discard(self) -> Move:
        self.settle()  # a copy under way still writes to the extents, which others are lent next
        for region in self._regions:
            if region.resident:
                region.release()
        while self._extents:
            self._mover.arena.release(self._extents.popitem()[1])
        self._residency = Residency.DISCARDED
        return Done()

    def _take_extents(self) -> None:
        missing = [region for region in self._regions if region not in self._extents]
        # all at once, so that a host without room refuses before the first extent is lent; each is whole pages
        self._mover.arena.reserve(sum(align_up(region.size_bytes, ALIGNMENT_BYTES) for region in missing))
        for region in missing:
            self._extents[region] = self._mover.arena.allocate(region.size_bytes)

    def _host_view(self, region: Region) -> torch.Tensor:
        return self._mover.arena.view(self._extents[region]).narrow(0, 0, region.size_bytes)


class _Departure:
    """Copies to the host under way; a region's bytes go back to the driver as soon as its copy has finished."""

    def __init__(self, segment: RegionSegment) -> None:
        self._segment = segment
        self.moved_bytes = segment.size_bytes
        self._start_s = segment._mover.now_s()
        copy = segment._mover.copy_out
        self._pending = [(region, copy(region.pairs(segment._host_view(region)))) for region in segment._regions]
        # kept after the pending ones have gone, for the seconds that they took
        self._transfers = [transfer for _, transfer in self._pending]

    def wait(self) -> None:
        while self._pending:
            self._pending[0][1].wait()
            self.poll()
        self._finish()

    def poll(self) -> bool:
        """Release the regions whose copies have finished; true when none is left."""
        while self._pending:
            region, transfer = self._pending[0]
            if not transfer.done:  # nor is any later one: copies of one stream end in order
                return False
            with uninterrupted():
                self._segment._left(region)
                self._pending.pop(0)
        self._finish()
        return True

    def cancel(self) -> int:
        """Stop releasing regions and return the bytes still on the device; copies under way finish unused."""
        for _, transfer in self._pending:
            # it still reads the memory that its owner is about to use again
            transfer.wait()
        kept_bytes = sum(region.size_bytes for region, _ in self._pending)
        self._pending.clear()
        self._finish()
        return kept_bytes

    def _finish(self) -> None:
        segment = self._segment
        # whoever holds a finished move may wait for it after the segment has begun another
        if segment._move is self:
            segment._move = None
            segment._mover.record(f"out {segment.name}", "d2h", self._start_s, self._transfers, self.moved_bytes)


class _Arrival:
    """Regions mapped again and, if they had been offloaded, copies to the device under way."""

    def __init__(self, segment: RegionSegment, *, copies: bool) -> None:
        self._segment = segment
        regions = [region for region in segment._regions if not region.resident]
        self.moved_bytes = sum(region.size_bytes for region in regions) if copies else 0
        self._start_s = segment._mover.now_s()
        self._transfers: list[Transfer] = []
        for region in regions:
            region.restore()
        # Copies do not progress while the driver maps memory, so they start after all regions are mapped.
        if copies and regions:
            pairs = [(h, d) for region in regions for d, h in region.pairs(segment._host_view(region))]
            is_reused = any(region.reuses_memory for region in regions)
            self._transfers.append(segment._mover.copy_in(pairs, after_queued=is_reused))

    def wait(self) -> None:
        segment = self._segment
        if segment._move is not self:
            return
        for transfer in self._transfers:
            transfer.wait()
        with uninterrupted():
            segment._arrived()
            segment._move = None
        segment._mover.record(f"back {segment.name}", "h2d", self._start_s, self._transfers, self.moved_bytes)

    def poll(self) -> bool:
        """True when every copy has finished."""
        return all(transfer.done for transfer in self._transfers)
