"""The host arena: pinned memory that is registered once and reused on every cycle.

Pinning costs 0.4 s/GB when it comes fresh from the driver and 0.04 s/GB for pages that exist already, copying 0.02 s/GB
(examples/bench/results/offload.json). So pages are mapped once, touched by several threads on the GPU's NUMA node,
registered once with the driver, and never returned before `close`.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from colo.errors import BudgetError, ColoError, PhaseError
from colo.memory.probe import available_host_bytes, local_cpus
from colo.units import GIB, MIB, align_up, format_bytes

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 4096  # extents start and end on pages, so that no two share one

BLOCK_ALIGNMENT_BYTES = 2 * MIB  # blocks are whole huge pages

MAX_BLOCK_BYTES = 448 * GIB
"""The most that one call registers with the driver, which fails from 512 GiB on (LMCache#5177).

A kind of streamed state is one extent, 61 GiB for 32 billion parameters at two bytes: of smaller blocks none would have
room for it, and the arena would grow by as much again.
"""

MAX_TOUCH_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A byte range of the arena, lent to one region.

    Ownership: the arena owns the pages; an extent is returned with `PinnedArena.release`, once.
    """

    block: int  # index of the block in the arena
    offset_bytes: int
    size_bytes: int


class PinnedArena:
    """Host memory for the bytes of offloaded segments: pinned for a CUDA device, plain for the CPU.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, device: torch.device, *, limit_bytes: int | None = None) -> None:
        self._device = device
        self.limit_bytes = limit_bytes if limit_bytes is not None else available_host_bytes()
        """The most bytes the arena may hold. Lowering it gives nothing back."""

        self._blocks: list[_PinnedBlock] = []
        # reentrant, since `_take_back` releases extents under it
        self._lock = threading.RLock()  # never held while pages are pinned, which takes seconds
        # one grows at a time: two would find the same bytes missing, and pin them twice
        self._growing = threading.Lock()
        self._setup: ThreadPoolExecutor | None = None
        self._closed = False
        self._returned: deque[Extent] = deque()  # by `release_after`, at any moment; taken back by the next call

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size_bytes for block in self._blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes lent out as extents."""
        with self._lock:
            self._take_back()
        return sum(block.size_bytes - block.free_bytes for block in self._blocks)

    def prepare(self, num_bytes: int) -> Future[None]:
        """Set up room for `num_bytes` more in a background thread; the future raises what `reserve` would.

        A failure is logged, too: extents are lent all the while, and find the room that there is.
        """
        with self._lock:
            self._check_open()
            if self._setup is None:
                self._setup = ThreadPoolExecutor(max_workers=1, thread_name_prefix="colo-arena")
            future = self._setup.submit(self.reserve, num_bytes)
        future.add_done_callback(_tell_of_failure)
        return future

    def reserve(self, num_bytes: int) -> None:
        """Make sure that extents of `num_bytes` in all can be lent without growing.

        Raises: `BudgetError` when that would exceed the limit or the memory of the host; nothing has changed then.
        """
        with self._growing:
            with self._lock:
                self._check_open()
                self._take_back()
                # free bytes may be in pieces: `allocate` grows for an extent that none of them holds
                free_bytes = (block.free_bytes for block in self._blocks)
                # the ends of blocks that an extent has been too small for are of no use to a large one
                missing_bytes = num_bytes - sum(size for size in free_bytes if size >= BLOCK_ALIGNMENT_BYTES)
            if missing_bytes > 0:
                self._grow(missing_bytes, MAX_BLOCK_BYTES)

    def allocate(self, size_bytes: int) -> Extent:
        """Lend `size_bytes`, rounded up to whole pages, in one piece.

        Raises: `BudgetError` when the arena cannot grow; nothing has changed then.
        """
        size_bytes = align_up(max(size_bytes, 1), ALIGNMENT_BYTES)
        extent = self._lend(size_bytes)
        if extent is not None:
            return extent
        with self._growing:  # after what is being prepared, which may have room for it
            while (extent := self._lend(size_bytes)) is None:
                self._grow(size_bytes, size_bytes)
        return extent

    def release(self, extent: Extent) -> None:
        """Take an extent back. Raises: `PhaseError` when it was not lent, or was returned already."""
        with self._lock:
            self._check_open()
            self._blocks[extent.block].give_back(extent.offset_bytes, extent.size_bytes)

    def release_after(self, extent: Extent, memory: Sequence[torch.Tensor]) -> None:
        """Take an extent back once no tensor lies over `memory` any more: parts with storages of their own."""
        waiting = {storage._cdata for storage in map(torch.Tensor.untyped_storage, memory)}
        if not waiting:
            self.release(extent)

        def died(key: int) -> None:  # runs in whatever thread and line drops the last tensor: it takes no lock
            waiting.discard(key)
            if not waiting:
                self._returned.append(extent)

        for tensor in memory:
            # torch keeps a storage's Python object as long as the storage: it ends with the last tensor over it
            storage = tensor.untyped_storage()
            weakref.finalize(storage, died, storage._cdata).atexit = False

    def view(self, extent: Extent) -> torch.Tensor:
        """The bytes of an extent as a CPU tensor (uint8, shape [size_bytes])."""
        return self._blocks[extent.block].data.narrow(0, extent.offset_bytes, extent.size_bytes)

    def tensor(self, extent: Extent, start_bytes: int, size_bytes: int) -> torch.Tensor:
        """A part of an extent as a CPU tensor (uint8) with a storage of its own, so that saving it saves nothing else.

        Lifetime: the tensor keeps the memory mapped, also after `close`; nothing keeps the arena from lending it again.
        """
        block = self._blocks[extent.block]
        return torch.frombuffer(
            block.mapping, dtype=torch.uint8, count=size_bytes, offset=extent.offset_bytes + start_bytes
        )

    def close(self) -> None:
        """Unregister and unmap everything. Idempotent.

        Ordering: no copy from or to the arena may be under way.
        """
        if self._setup is not None:
            # before the lock, which the thread that prepares needs to come to its end
            self._setup.shutdown(wait=True)
        with self._lock:
            self._closed = True
            while self._blocks:
                self._blocks.pop().close()

    def _check_open(self) -> None:
        if self._closed:
            raise PhaseError("the host arena is closed")

    def _take_back(self) -> None:
        # a closed arena has no blocks: `release` would raise in whoever drops a late tensor
        while self._returned and not self._closed:
            self.release(self._returned.popleft())

    def _lend(self, size_bytes: int) -> Extent | None:
        """Lend from the first block that has room."""
        with self._lock:
            self._check_open()
            self._take_back()
            for index, block in enumerate(self._blocks):
                offset_bytes = block.lend(size_bytes)
                if offset_bytes is not None:
                    return Extent(block=index, offset_bytes=offset_bytes, size_bytes=size_bytes)
        return None

    def _grow(self, num_bytes: int, max_block_bytes: int) -> None:
        num_bytes = align_up(num_bytes, BLOCK_ALIGNMENT_BYTES)
        # the limit is older than this moment: beyond what is available the kernel ends the process, without an error
        allowed_bytes = min(self.limit_bytes - self.pinned_bytes, available_host_bytes())
        if num_bytes > allowed_bytes:
            raise BudgetError(
                f"the host arena holds {format_bytes(self.pinned_bytes)} and would have to grow by "
                f"{format_bytes(num_bytes)}, but only {format_bytes(max(0, allowed_bytes))} are allowed: "
                f"its limit is {format_bytes(self.limit_bytes)}, and the host has "
                f"{format_bytes(available_host_bytes())} available. Raise host_limit_bytes, or offload less",
                needed_bytes=num_bytes,
                free_bytes=max(0, allowed_bytes),
            )
        max_block_bytes = align_up(max_block_bytes, BLOCK_ALIGNMENT_BYTES)
        while num_bytes > 0:
            block = _PinnedBlock(min(num_bytes, max_block_bytes), self._device)
            with self._lock:
                if self._closed:  # meanwhile
                    block.close()
                self._check_open()
                self._blocks.append(block)
            num_bytes -= block.size_bytes


def _tell_of_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("host memory is not pinned ahead, so that the first copies wait for it: %s", error)


class _PinnedBlock:
    """One mapping, its registration with the driver, and a list of what is free in it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        # not cudaHostAlloc, as torch's pinned allocator: pages that exist already are pinned ten times as fast
        self.mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # fewer pages to touch and to pin
            self.mapping.madvise(mmap.MADV_HUGEPAGE)
        if device.type == "cuda" and hasattr(mmap, "MADV_DONTFORK"):
            # a fork copies pinned pages at once, all of them: the workers of a DataLoader would have an arena each
            self.mapping.madvise(mmap.MADV_DONTFORK)
        self.data = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self._free: list[tuple[int, int]] = [(0, size_bytes)]  # (offset, size), sorted, never adjacent
        self._unregister: weakref.finalize[..., _PinnedBlock] | None = None
        _touch(self.data, local_cpus(device))
        if device.type == "cuda":
            self._register(device)

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def lend(self, size_bytes: int) -> int | None:
        for index, (offset, size) in enumerate(self._free):
            if size >= size_bytes:
                self._free[index : index + 1] = [(offset + size_bytes, size - size_bytes)] if size > size_bytes else []
                return offset
        return None

    def give_back(self, offset_bytes: int, size_bytes: int) -> None:
        end_bytes = offset_bytes + size_bytes
        if any(offset < end_bytes and offset_bytes < offset + size for offset, size in self._free):
            raise PhaseError(f"the extent at {offset_bytes} of {format_bytes(size_bytes)} was returned already")
        insort(self._free, (offset_bytes, size_bytes))
        merged: list[tuple[int, int]] = []
        for offset, size in self._free:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged

    def close(self) -> None:
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        # The last tensor over the mapping unmaps it.
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        del self.mapping

    def _register(self, device: torch.device) -> None:
        address = self.data.data_ptr()
        with torch.cuda.device(device):
            if (code := _code(torch.cuda.cudart().cudaHostRegister(address, self.size_bytes, 0))) != 0:
                with suppress(RuntimeError):
                    # the runtime keeps its error for the next kernel of this thread, which is this one
                    torch.zeros(1, device=device)
                raise BudgetError(
                    f"{format_bytes(self.size_bytes)} of host memory are not pinned (cudaHostRegister, error {code}): "
                    "check `ulimit -l` and the free host memory (colo doctor)",
                    needed_bytes=self.size_bytes,
                    free_bytes=0,
                )
        # Pages that are unmapped while registered make the driver refuse the address for good (checkpoint-engine#67),
        # so a block that was never closed is unregistered when it is collected; `self.mapping` stays mapped until then.
        self._unregister = weakref.finalize(self, _unregister, address, self.mapping, device)
        self._unregister.atexit = False


def _unregister(address: int, mapping: mmap.mmap, device: torch.device) -> None:
    if hasattr(mmap, "MADV_DOFORK"):
        mapping.madvise(mmap.MADV_DOFORK)  # tensors of the loop may outlive the arena, and its forks read them
    with torch.cuda.device(device):
        code = _code(torch.cuda.cudart().cudaHostUnregister(address))
    if code != 0:
        raise ColoError(f"cudaHostUnregister failed with CUDA error {code}")
    del mapping


def _touch(data: torch.Tensor, cpus: set[int]) -> None:
    """Make the kernel back every page, from several threads that run on `cpus` (first touch decides the NUMA node)."""
    num_threads = min(MAX_TOUCH_THREADS, len(cpus))
    step_bytes = align_up(-(-data.numel() // num_threads), BLOCK_ALIGNMENT_BYTES)
    address, size_bytes = data.data_ptr(), data.numel()

    def touch(start_bytes: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread
        ctypes.memset(address + start_bytes, 0, min(step_bytes, size_bytes - start_bytes))  # releases the GIL

    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        list(pool.map(touch, range(0, size_bytes, step_bytes)))


def _code(result: Any) -> int:
    """The number of an error of the runtime, which is an enum or a number."""
    return int(getattr(result, "value", result))
