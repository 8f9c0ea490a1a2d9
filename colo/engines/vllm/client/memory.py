"""The segments of a vLLM engine in the trainer's process: the workers move them, and their bytes are counted here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from colo.engine import SleepLevel
from colo.engines.vllm import wire
from colo.engines.vllm.client.link import WorkerLink
from colo.engines.vllm.client.weights import WorkerWeights
from colo.errors import PhaseError
from colo.memory.probe import free_device_bytes
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency, check_move
from colo.phases.segment import Done, Move


class WorkerMemory:
    """The segments `engine.weights` and `engine.kv_cache`, the same objects also after an engine's restart."""

    def __init__(self, before_leaving: Callable[[str, Residency], None]) -> None:
        """`before_leaving(name, target)` sees to it that nobody uses a segment any more."""
        self.weights, self.kv_cache = WorkerSegment(self, ENGINE_WEIGHTS), WorkerSegment(self, ENGINE_KV_CACHE)
        self.segments = (self.weights, self.kv_cache)
        self._shared = self._weights_outlive = False
        self._before_leaving = before_leaving

    def hold(self, link: WorkerLink, weights: WorkerWeights) -> None:
        """Be what an engine that has just started holds. Host memory for weights that can leave is pinned meanwhile."""
        info = link.infos[0]
        weights_away = Residency.OFFLOADED if info.weights_can_leave and not self._shared else None
        if weights_away is not None:
            link.call(wire.Prepare())
        self.weights.reset(info.weights_bytes, weights_away)
        self.kv_cache.reset(info.kv_cache_bytes, Residency.DISCARDED if info.kv_cache_can_leave else None)
        self._link, self._weights = link, weights
        self._weights_outlive = weights.outlive_the_engine

    def lose(self) -> None:
        """Mark what the engine's process held as lost: it has ended."""
        for segment in self.segments:
            if segment is self.kv_cache or not self._weights_outlive:
                segment.vanish()

    def release(self) -> None:
        """Bring everything back, and have the workers forget that it ever left: the engine is about to end."""
        self._link.call(wire.Release())
        for segment in self.segments:
            segment.residency, segment.device_bytes = Residency.RESIDENT, segment.size_bytes

    def share_weights(self) -> None:
        """Keep the weights where they are from now on, in all lives of the engine."""
        self._shared = True
        self.weights.away = None

    def settle(self) -> None:
        """Wait until everything that is on its way back has arrived."""
        for segment in self.segments:
            if segment.device_bytes != segment.size_bytes:
                segment.settle()

    # ---- what segments ask -------------------------------------------------------------------------------------------

    def why_it_stays(self, name: str) -> str:
        """The reason why a segment never leaves, in words that follow `it is`."""
        if name == ENGINE_KV_CACHE:
            return f"not in vLLM's sleep pool ({self._link.how_to_free['pool']})"
        return "the trainer's memory too" if self._shared else self._weights.why_they_stay

    def before_move(self, name: str, target: Residency) -> None:
        """Make ready for a segment's move: room in the device, or nobody who uses what leaves."""
        if target is not Residency.RESIDENT:
            self._before_leaving(name, target)
            return
        device, segment = self._link.device, self.weights if name == ENGINE_WEIGHTS else self.kv_cache
        if device.type == "cuda" and free_device_bytes(device) < segment.size_bytes:
            torch.cuda.empty_cache()  # what torch keeps in this process, and the engine's will need

    def begin_move(self, name: str, source: Residency, target: Residency) -> None:
        """Start a move in every worker; where one refuses, the others go back."""
        answers = self._link.ask(wire.Begin(segment=name, target=str(target)))
        failed = [answer for answer in answers if isinstance(answer, wire.WorkerError)]
        if failed:
            if len(failed) < len(answers):
                self._link.ask(wire.Begin(segment=name, target=str(source)))
            raise failed[0].error()

    def wait_for(self, name: str) -> int:
        """Return, when every worker has moved a segment, the device bytes that it holds."""
        return int(self._link.call(wire.Wait(segment=name))[0])


class WorkerSegment:
    """A segment of the engine's memory, moved by its workers."""

    def __init__(self, holder: WorkerMemory, name: str) -> None:
        self.name = name
        self.size_bytes = self.device_bytes = self.host_bytes = 0
        self.away: Residency | None = None
        self.residency = Residency.RESIDENT
        self._holder = holder

    def reset(self, size_bytes: int, away: Residency | None) -> None:
        """Be what an engine that has just started holds."""
        self.size_bytes = self.device_bytes = size_bytes
        self.away = away
        self.residency = Residency.RESIDENT

    def vanish(self) -> None:
        """Be gone, with the process that held it."""
        self.residency, self.device_bytes, self.host_bytes = Residency.DISCARDED, 0, 0

    def begin(self, target: Residency) -> Move:
        """Start moving to `target`, engine paused; see `Segment.begin`. `PhaseError` when it must not leave."""
        source = self.residency
        if target is source:
            return Done()
        if self.away is None:
            raise PhaseError(
                f"segment {self.name} cannot become {target}: it is {self._holder.why_it_stays(self.name)}. Level "
                f"'{SleepLevel.KEEP_WEIGHTS}' drops the KV cache only"
            )
        check_move(self.name, source, target)
        self._holder.before_move(self.name, target)
        try:
            self._holder.begin_move(self.name, source, target)
        except Exception:
            raise
        except BaseException:  # an interrupt: whether the workers have moved it is unknown, and to move twice is not
            self.residency = source if target is Residency.RESIDENT else target
            raise
        self.residency = target
        if target is Residency.DISCARDED:
            self.settle()
            return Done()
        return _WorkerMove(self, self.size_bytes if Residency.OFFLOADED in (source, target) else 0)

    def settle(self) -> None:
        """Wait until the workers have moved it."""
        self.device_bytes = self._holder.wait_for(self.name)
        self.host_bytes = max(self.host_bytes, self.size_bytes if self.residency is Residency.OFFLOADED else 0)


class _WorkerMove:
    def __init__(self, segment: WorkerSegment, moved_bytes: int) -> None:
        self._segment = segment
        self.moved_bytes = moved_bytes
        self._target = segment.residency
        self._done = False
        if self._target is Residency.RESIDENT:
            segment.device_bytes = segment.size_bytes

    def wait(self) -> None:
        if not self._done and self._segment.residency is self._target:
            self._segment.settle()
        self._done = True

    def poll(self) -> bool:
        return self._done
