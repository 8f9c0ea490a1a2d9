"""Regions: device memory whose bytes can go back to the driver and return, while tensors over it stay valid objects.

On CUDA a region is an allocation of torch-memory-saver without that library's host backup: releasing unmaps the
physical pages, restoring maps new ones at the same address, so CUDA graphs and fused optimizers that hold the pointer
stay right. Elsewhere a region is a storage that is resized to nothing and back, which views follow by themselves.

A region does not know what its bytes mean, or where they are kept in between (see `colo.memory.offload`).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from colo.errors import BudgetError, PhaseError, Unsupported
from colo.memory.probe import free_device_bytes
from colo.memory.storage import num_references
from colo.memory.uninterrupted import uninterrupted
from colo.units import MIB, align_up, format_bytes

ALIGNMENT_BYTES = 256
"""Offset alignment of tensors within a region: what the CUDA allocator gives, and vectorized kernels expect."""

Spec = tuple[Sequence[int], torch.dtype]  # shape and dtype of a tensor to place in a region


class Region(ABC):
    """A byte range on a device that can be released and restored.

    Ownership: the region owns the bytes until `close`; tensors that still refer to them keep them longer. Tensors over
    `bytes` may outlive a release, but must not be read or written before the next `restore`.
    """

    reuses_memory = False
    """True where restored bytes may be memory that kernels in the current stream's queue still use."""

    def __init__(self, name: str, data: torch.Tensor) -> None:
        self.name = name
        self.bytes = data
        self.size_bytes = data.numel()
        self.device = data.device
        self.resident = True
        self.closed = False

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device now."""
        return self.size_bytes if self.resident else 0

    def release(self) -> None:
        """Give the bytes back to the driver; their content is lost.

        Ordering: everything that reads or writes the region must have finished, on the device too.
        Raises: `PhaseError` when released already.
        """
        if not self.resident:
            raise PhaseError(f"region {self.name} is released already ({format_bytes(self.size_bytes)})")
        with uninterrupted():
            self._release()
            self.resident = False

    def restore(self) -> None:
        """Take the bytes again; their content is undefined.

        Raises: `BudgetError` when the device has not enough free memory, `PhaseError` when resident or closed.
        """
        if self.resident or self.closed:
            raise PhaseError(f"region {self.name} is {'closed' if self.closed else 'resident'} and cannot be restored")
        with uninterrupted():
            self._restore()
            self.resident = True

    @property
    def is_referred_to(self) -> bool:
        """True while tensors outside of the region lie over its bytes, as views or with storages of their own."""
        return num_references(self.bytes) > 1

    def pairs(self, host: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) memory of the bytes that move; `host` (uint8) is as large as the region."""
        return [(self.bytes, host)]

    def close(self) -> None:
        """Release the memory for good; bytes that tensors refer to go when the last of them dies. Idempotent."""
        if not self.closed:
            with uninterrupted():
                self.closed = True
                if self.resident and self.is_referred_to:
                    self._leave()
                else:
                    if self.resident:
                        self._release()
                    self._retire()
                self.resident = False

    @abstractmethod
    def _release(self) -> None: ...

    @abstractmethod
    def _restore(self) -> None: ...

    def _leave(self) -> None:
        """Drop the region's own reference; tensors that others hold keep the bytes."""
        self.bytes = self.bytes.new_empty(0)

    def _retire(self) -> None:
        self.bytes = self.bytes.new_empty(0)


class ResizedRegion(Region):
    """A region that resizes its storage, for devices whose allocator returns memory at once, such as the CPU.

    On CUDA its memory is that of torch's allocator, which keeps what is released and orders its use by streams.
    """

    reuses_memory = True

    def __init__(self, name: str, size_bytes: int, device: torch.device) -> None:
        super().__init__(name, torch.empty(size_bytes, dtype=torch.uint8, device=device))

    @property
    def is_referred_to(self) -> bool:
        """See `Region.is_referred_to`. NumPy arrays over the bytes are not counted, but leave a mark on the storage."""
        return super().is_referred_to or not self.bytes.untyped_storage().resizable()

    def _release(self) -> None:
        self.bytes.untyped_storage().resize_(0)

    def _restore(self) -> None:
        self.bytes.untyped_storage().resize_(self.size_bytes)


class PausableRegion(Region):
    """A region in torch-memory-saver, for CUDA: its address stays while pages are unmapped and mapped."""

    def __init__(self, name: str, size_bytes: int, device: torch.device) -> None:
        require_free(name, _mapped_bytes(size_bytes), device)
        with uninterrupted():
            # Ctrl-C in between would leave pages that nobody gives back
            self._tag, data = _pages.take(size_bytes, device)
            super().__init__(name, data)

    def _release(self) -> None:
        # The library does not wait for work on the memory it unmaps, and ends the process on a second pause.
        torch.cuda.current_stream(self.device).synchronize()
        memory_saver().pause(self._tag)

    def _restore(self) -> None:
        # The library ends the process when memory is missing in resume, so it is asked for only when it is there.
        require_free(self.name, _mapped_bytes(self.size_bytes), self.device)
        memory_saver().resume(self._tag)

    def _leave(self) -> None:
        storage, address = self.bytes.untyped_storage(), self.bytes.data_ptr()
        # the pages can be paused only once nobody reads them any more
        last = weakref.finalize(storage, _pages.reclaim, self._tag, address, self.size_bytes, self.device)
        last.atexit = False  # the driver takes the memory with the process
        super()._leave()

    def _retire(self) -> None:
        address = self.bytes.data_ptr()
        super()._retire()
        _pages.give_back(self._tag, address, self.size_bytes, self.device)


def _mapped_bytes(size_bytes: int) -> int:
    """Bytes that torch asks its allocator for, when a pool of its own is to have one tensor of so many."""
    if size_bytes <= MIB:
        return 2 * MIB
    return 20 * MIB if size_bytes < 10 * MIB else align_up(size_bytes, 2 * MIB)


def allocate_region(size_bytes: int, device: torch.device, *, name: str) -> Region:
    """Take `size_bytes` of `device` as a region of the kind that suits the device.

    Raises: `BudgetError` when the device has not enough free memory.
    """
    size_bytes = align_up(max(size_bytes, 1), ALIGNMENT_BYTES)
    kind: type[ResizedRegion | PausableRegion] = PausableRegion if device.type == "cuda" else ResizedRegion
    return kind(name, size_bytes, device)


def carved_bytes(specs: Sequence[Spec]) -> int:
    """Bytes that `carve` needs for `specs`, padding included."""
    return sum(align_up(_spec_bytes(spec), ALIGNMENT_BYTES) for spec in specs)


def carve(data: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Contiguous tensors over `data` (uint8, shape [num_bytes]), one after another at 256-byte offsets.

    Raises: `ValueError` when they do not fit.
    """
    if (needed_bytes := carved_bytes(specs)) > data.numel():
        raise ValueError(f"{len(specs)} tensors need {needed_bytes} bytes, but the region has {data.numel()}")
    views, offset_bytes = [], 0
    for shape, dtype in specs:
        size_bytes = _spec_bytes((shape, dtype))
        views.append(data.narrow(0, offset_bytes, size_bytes).view(dtype).view(tuple(shape)))
        offset_bytes += align_up(size_bytes, ALIGNMENT_BYTES)
    return views


def _spec_bytes(spec: Spec) -> int:
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize


def make_room(size_bytes: int, device: torch.device) -> int:
    """Give back what torch caches, where the driver has less than so much free; returns what it has free then.

    The driver, which maps pages for us and for other processes, does not see that torch would do without them.
    """
    if (free_bytes := free_device_bytes(device)) < size_bytes:
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # memory that was exported, and that the other process has let go of
        torch.cuda.empty_cache()
        free_bytes = free_device_bytes(device)
    return free_bytes


def require_free(name: str, size_bytes: int, device: torch.device) -> None:
    """Raise `BudgetError` unless the driver has `size_bytes` free, after what torch caches has been given back."""
    if (free_bytes := make_room(size_bytes, device)) < size_bytes:
        raise BudgetError(
            f"region {name} needs {format_bytes(size_bytes)} of {device}, which has {format_bytes(free_bytes)} free; "
            "release other memory of this or of other processes first",
            needed_bytes=size_bytes,
            free_bytes=free_bytes,
        )


class _Pages:
    """Allocations of torch-memory-saver by tag, with those of closed regions kept, paused, to be taken again.

    Its pools live as long as the process and never return an address range, so that a range is worth reusing; a paused
    one holds no memory.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.taken_bytes: Counter[torch.device] = Counter()
        """Bytes of ranges that are taken, mapped or not: torch counts them as allocated."""

        self._retired: dict[tuple[torch.device, int], list[tuple[str, int]]] = {}

    def take(self, size_bytes: int, device: torch.device) -> tuple[str, torch.Tensor]:
        spare = self._retired.get((device, size_bytes), [])
        while spare:
            tag, address = spare.pop()
            # mapped before torch gives the range out again: what it returns must be there
            memory_saver().resume(tag)
            data = self._allocate(tag, size_bytes, device)
            if data.data_ptr() == address:
                self.taken_bytes[device] += size_bytes
                return tag, data
            # Somebody still holds a tensor over the old range: it cannot be reused, and goes back to sleep.
            del data
            memory_saver().pause(tag)
        tag = f"colo.{next(self._numbers)}"
        data = self._allocate(tag, size_bytes, device)
        self.taken_bytes[device] += size_bytes
        return tag, data

    def reclaim(self, tag: str, address: int, size_bytes: int, device: torch.device) -> None:
        """Take back a range whose last tensor has died after its region was closed."""
        torch.cuda.current_stream(device).synchronize()
        memory_saver().pause(tag)
        self.give_back(tag, address, size_bytes, device)

    def give_back(self, tag: str, address: int, size_bytes: int, device: torch.device) -> None:
        self.taken_bytes[device] -= size_bytes
        self._retired.setdefault((device, size_bytes), []).append((tag, address))

    def _allocate(self, tag: str, size_bytes: int, device: torch.device) -> torch.Tensor:
        with torch.cuda.device(device), memory_saver().region(tag=tag, enable_cpu_backup=False):
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)


_pages = _Pages()


def pausable_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch counts as allocated and that are regions', the released ones' too; 0 on a CPU."""
    return _pages.taken_bytes[device]


def check_allocator() -> None:
    """Raise `Unsupported` for a setting of torch's allocator with which torch-memory-saver does not start."""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    if "expandable_segments:True" in os.environ.get(name, ""):  # its own words, by which it looks for it
        raise Unsupported(
            f"{name} has expandable_segments:True, with which torch-memory-saver refuses to start: leave that out, or "
            "set PYTORCH_ALLOC_CONF, torch's newer name for the same, in its place"
        )


@cache
def memory_saver() -> Any:
    """torch-memory-saver without LD_PRELOAD: an object of our own, which leaves the library's, and its mode, alone."""
    check_allocator()
    try:
        from torch_memory_saver import TorchMemorySaver
    except ImportError as error:
        raise Unsupported(
            "releasing CUDA memory needs torch-memory-saver, which has wheels for Linux on x86-64: "
            "pip install 'torch-memory-saver>=0.0.10'"
        ) from error
    saver = TorchMemorySaver()
    saver.hook_mode = "torch"
    # The saver and its pools live until the process ends. The pools' ranges hold no memory once their regions are
    # closed. When the interpreter exits it destroys the pools, which frees their blocks outside a region of the
    # library, and the library (0.0.10) then ends the process. One reference more, which is never given back, keeps the
    # pools alive; the driver takes the memory with the process. (Entering a region at exit would work for us, but
    # torch then refuses to destroy other pools, such as vLLM's, and that ends the process too.)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(saver))
    return saver


def close_all(closers: Sequence[Callable[[], None]]) -> None:
    """Call every closer, also after one has failed, then raise the first error."""
    errors: list[Exception] = []
    for closer in closers:
        try:
            closer()
        except Exception as error:  # noqa: BLE001 - collected and raised below
            errors.append(error)
    if errors:
        raise errors[0]
