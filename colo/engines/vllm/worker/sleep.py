"""Sleep at the speed of the bus: vLLM's sleep pool as regions, moved by colo's own mover.

vLLM tags the allocations of its pool `weights` or `kv_cache`. Here each is a region: unmapped once its bytes are in the
pinned arena, or at once when they are not needed; mapped again at the same address, after a look at what is free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from colo.engines.base import TAGS
from colo.engines.vllm import compat
from colo.engines.vllm.worker.loader import placed_models
from colo.errors import PhaseError
from colo.memory import cuda_driver
from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import Region, require_free
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency
from colo.units import MIB

CHUNK_BYTES = 256 * MIB
"""Larger than a trainer's: while an engine falls asleep or wakes up it generates nothing that copies could hold up."""

_AWAY = {"weights": Residency.OFFLOADED, "kv_cache": Residency.DISCARDED}


class _Borrowed(Region):
    """Memory that is vLLM's: it is there again when the region is closed."""

    def close(self) -> None:
        """Bring the memory back."""
        if not self.closed and not self.resident:
            self._restore()
            self.resident = True
        self.closed = True
        self._retire()


class PoolRegion(_Borrowed):
    """One allocation of vLLM's sleep pool, which vLLM frees as it allocated it: mapped."""

    def __init__(self, name: str, address: int, record: Any, device: torch.device) -> None:
        super().__init__(name, cuda_driver.view(address, record.handle[1], device))
        self._record = record

    def _release(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()  # a kernel on unmapped memory ends the process
        compat.unmap(self._record)

    def _restore(self) -> None:
        require_free(self.name, self.size_bytes, self.device)
        compat.remap(self._record)


class StorageRegion(_Borrowed):
    """The memory of tensors that someone else made, on a device whose storages can be resized."""

    def __init__(self, name: str, storage: torch.UntypedStorage) -> None:
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        super().__init__(name, data.set_(storage, 0, (storage.nbytes(),), (1,)))

    def _release(self) -> None:
        self.bytes.untyped_storage().resize_(0)

    def _restore(self) -> None:
        self.bytes.untyped_storage().resize_(self.size_bytes)
        self.bytes.zero_()  # attention multiplies what it masks, and fresh memory may hold NaN


class WorkerSegments:
    """Memory that a vLLM worker can give back: its KV cache, weights in the sleep pool. Owns the host arena only."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._pool = compat.sleep_pool(worker)
        device = torch.device(worker.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.mover = Mover(device, chunk_bytes=CHUNK_BYTES)
        self.by_name = _segments(self._regions, self.mover)
        self._others = OtherTensors()

    def prepare(self) -> None:
        """Pin host memory for the weights in the background, so that the first sleep does not wait for it."""
        size_bytes = self.by_name[ENGINE_WEIGHTS].size_bytes
        if size_bytes and self.mover.device.type == "cuda":
            self.mover.arena.prepare(size_bytes)

    def begin(self, name: str, target: Residency) -> None:
        """Start moving a segment. Raises: as `Segment.begin`."""
        segment = self.by_name[name]
        source = segment.residency
        if name == ENGINE_WEIGHTS:
            # before the move: afterwards there is nothing to read
            self._others.before(target, segment, [self._worker.get_model()])
        segment.begin(target)
        # vLLM's scheduler can be resumed by anybody, past colo; block tables leave with the cache, so that no step may
        # even begin
        if name == ENGINE_KV_CACHE and target is not Residency.RESIDENT:
            self._worker.execute_model = _refuse_without_cache
        if target is not Residency.RESIDENT and self.mover.device.type == "cuda":
            torch.cuda.empty_cache()  # another process cannot use what torch caches in this one
        if target is Residency.RESIDENT and source is Residency.DISCARDED and name == ENGINE_WEIGHTS:
            self._others.bring_back()

    def wait(self, name: str) -> None:
        """Return when a segment has arrived where it is going."""
        segment = self.by_name[name]
        segment.settle()
        if name == ENGINE_KV_CACHE and segment.residency is Residency.RESIDENT:
            self._let_pass()
            compat.after_kv_cache_wake(self._worker)

    def close(self) -> None:
        """Bring everything back and release the host arena. Raises: `BudgetError` without room; all is as it was."""
        for name, segment in self.by_name.items():
            if segment.regions and segment.residency is not Residency.RESIDENT:
                self.begin(name, Residency.RESIDENT)
                self.wait(name)
        for segment in self.by_name.values():
            segment.close()
        self._let_pass()
        self.mover.close()

    def _let_pass(self) -> None:
        vars(self._worker).pop("execute_model", None)

    def _regions(self, tag: str) -> Iterator[Region]:
        if self._pool is not None:
            yield from _pool_regions(self._pool, tag, self.mover.device)
        elif tag == "kv_cache" and self.mover.device.type == "cpu":
            for storage in compat.kv_cache_storages(self._worker):
                if storage.nbytes():
                    yield StorageRegion(ENGINE_KV_CACHE, storage)


def _refuse_without_cache(*_: Any, **__: Any) -> None:
    """Refuse a step for requests of somebody who has resumed vLLM: it would read memory that is gone."""
    raise PhaseError(
        "vLLM was asked to generate while its KV cache is away, as it is outside a rollout: generate within "
        "`with rt.rollout():`"
    )


class OtherTensors:
    """Buffers, LoRA matrices and other tensors among the weights that are no parameters: level 2 would lose them."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensor and what it held

    def before(self, target: Residency, segment: RegionSegment, models: Iterable[nn.Module]) -> None:
        """Keep their bytes, read from the device or the arena, if the move to `target` would lose them."""
        if target is Residency.DISCARDED and segment.residency is not target:
            segment.settle()  # what is on its way back has to be there
            places = [place for model in models for place in _places(model, segment.regions)]
            self._kept = [(tensor, _held(tensor, segment, region, start)) for tensor, region, start in places]

    def bring_back(self) -> None:
        """Write the kept bytes back and forget them."""
        with torch.no_grad():
            for tensor, held in self._kept:
                tensor.copy_(held)
        self._kept.clear()


def _places(model: nn.Module, regions: Sequence[Region]) -> Iterator[tuple[torch.Tensor, Region, int]]:
    """Tensors, with their region and offset in bytes; addresses tell also while nothing is mapped there."""
    # by address: a parameter may have a view among the attributes
    parameters = {p.data_ptr() for p in model.parameters()}
    starts = sorted((region.bytes.data_ptr(), index) for index, region in enumerate(regions))
    for tensor in _other_tensors(model):
        address = tensor.data_ptr()
        at = bisect_right(starts, (address, len(regions))) - 1
        if at < 0 or address in parameters:
            continue
        start, index = starts[at]
        if address < start + regions[index].size_bytes:
            yield tensor, regions[index], address - start


def _held(tensor: torch.Tensor, segment: RegionSegment, region: Region, start_bytes: int) -> torch.Tensor:
    """A copy of a tensor in host memory, since its own memory is about to go."""
    if segment.residency is not Residency.OFFLOADED:
        return tensor.detach().to("cpu", copy=True)
    elements = segment.host_copy(region)[start_bytes:]
    # elements, not bytes: `as_strided` counts in them
    elements = elements[: elements.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    offset = int(elements.storage_offset())
    return elements.as_strided(tensor.shape, tensor.stride(), offset).clone()


def _segments(regions: Callable[[str], Iterable[Region]], mover: Mover) -> dict[str, RegionSegment]:
    """The segments by name, from the regions of every tag."""
    return {
        name: RegionSegment(name, regions=list(regions(tag)), away=_AWAY[tag], mover=mover)
        for tag, name in TAGS.items()
    }


def _pool_regions(pool: Any, tag: str, device: torch.device) -> Iterator[Region]:
    for address, record in sorted(pool.pointer_to_data.items()):
        if record.tag == tag:
            yield PoolRegion(f"{TAGS[tag]}@{address:x}", address, record, device)


def _other_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers and tensors held as attributes, also in tuples, lists and dictionaries; each once."""
    seen: set[int] = set()
    for module in model.modules():
        # `_parameters` are published, `_modules` are visited on their own
        held = [value for name, value in vars(module).items() if name not in ("_parameters", "_modules")]
        for tensor in _within(held):
            if id(tensor) not in seen and tensor.numel():
                seen.add(id(tensor))
                yield tensor


def _within(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _within(item)


class ColoSleepBackend(SleepModeBackend):  # type: ignore[misc]  # vLLM ships no types that mypy reads
    """vLLM's `sleep` and `wake_up` over colo's mover, for engines driven through vLLM's own API.

    If colo's loader has built the model, only the KV cache leaves: the weights are in slabs. Otherwise level 2 drops
    the weights, and keeps buffers as vLLM does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[str, RegionSegment] = {}
        self._mover: Mover | None = None

    def suspend(self, level: int = 1) -> None:
        """Drop the KV cache; take the weights to the host (level 1) or drop them too (level 2). Idempotent."""
        self._build()
        weights = Residency.OFFLOADED if level == 1 else Residency.DISCARDED
        moves = [
            self._segments[name].begin(target)
            for name, target in ((ENGINE_WEIGHTS, weights), (ENGINE_KV_CACHE, Residency.DISCARDED))
            if self._segments[name].residency is Residency.RESIDENT and self._segments[name].regions
        ]
        for move in moves:
            move.wait()
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring back the segments of `tags`, unless they are there. `BudgetError` when memory is missing."""
        self._state = "RESUMING"
        for name in (TAGS[tag] for tag in (tags or TAGS) if tag in TAGS):
            # wake may come before any sleep: nothing is built then
            if self._segments and self._segments[name].regions:
                self._segments[name].begin(Residency.RESIDENT).wait()
        self._state = "RUNNING"

    def discard(self, tags: Iterable[str]) -> None:
        """Drop what the tags name (vLLM 0.33)."""
        self._build()
        for tag in tags:
            if tag in TAGS and self._segments[TAGS[tag]].regions:
                self._segments[TAGS[tag]].begin(Residency.DISCARDED).wait()

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Communicators are not touched."""
        return True

    def _build(self) -> None:
        if self._segments:
            return
        from vllm.device_allocator.cumem import CuMemAllocator

        device = torch.device("cuda", torch.cuda.current_device())
        pool = CuMemAllocator.get_instance()
        self._mover = Mover(device, chunk_bytes=CHUNK_BYTES)

        def regions(tag: str) -> Iterator[Region]:
            # Of a model that colo's loader has built the pool has what is no weight, and is read when weights change.
            if tag != "weights" or not placed_models():
                yield from _pool_regions(pool, tag, device)

        self._segments = _segments(regions, self._mover)
