"""Let another process of this machine see a set of tensors.

    exported = Exported(tensors)                           here: where they lie (on a CPU they move into a memory file)
    opened.open(exported.wire); opened.tensors             there: the same bytes by name, until `opened` is dropped

Tensors that cannot be exported are copied into memory that can (`Staging`); the other side opens both alike. Below lies
`SharedMemory`: bytes that one process owns and others of the same user map, on a GPU by `cudaMalloc` and CUDA IPC, on a
CPU by a memory file. It has no name in a file system, so that nothing is left behind when a process is killed, and
lives until the last tensor over it dies on either side. Descriptions are strings and numbers, and travel as JSON.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from colo.errors import TransferError, Unsupported
from colo.memory import cuda_driver
from colo.memory.copy_plan import copy_all, wait_for_queued
from colo.memory.probe import device_id
from colo.memory.region import carve, carved_bytes
from colo.memory.specs import NOWHERE, Place, TensorSpec
from colo.memory.storage import hidden_bases, num_references, places_of, storage_key, with_own_storage
from colo.units import MIB, batches, format_bytes

Description = dict[str, Any]  # handle of some memory for a peer. No two are the same.

Wire = Mapping[str, Any]
"""A set of tensors for a peer: `tensors`, each as `Place.to_wire` gives it, and the `memory` that they lie in."""

GROUP_BYTES = 256 * MIB  # bytes that are staged at once, unless a single tensor is larger

_PROBE_BYTES = 512
_CPU = torch.device("cpu")
# this process's own memory, for descriptions to itself: CUDA IPC does not map a process's own handles
_local: weakref.WeakValueDictionary[int, SharedMemory] = weakref.WeakValueDictionary()
_keys = itertools.count()
_opened: dict[int, tuple[weakref.ref[torch.Tensor], Description]] = {}
"""Memory of other processes that this one has mapped, by address."""


class Exported:
    """Tensors by name, in memory that a peer maps. Keeps the memory until `close`, also if a tensor leaves it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Export tensors of one device: a GPU's where they lie; on a CPU they move, and stay the same objects.

        Raises: `Unsupported`, naming a tensor, for memory that cannot be exported, on a CPU for that of several
        tensors; nothing has changed then.
        """
        self._slab: SharedMemory | None = None
        self._kept: list[torch.Tensor] = []  # keep torch's allocator from reusing memory that a peer maps
        places, memory = self._in_place(tensors) if _all_on_gpu(tensors) else self._moved(tensors)
        self.wire: Wire = {"tensors": [place.to_wire() for place in places], "memory": memory}
        self._places = places_of(tensors)

    def is_current(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if `tensors` are still where they were exported from."""
        return places_of(tensors) == self._places

    def close(self) -> None:
        """Let go of the memory. Ordering: the peer has let go of it before. Idempotent."""
        self._kept = []
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _in_place(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Place], list[Description]]:
        allocations, places = Allocations(), []
        for name, tensor in tensors.items():
            try:
                where = allocations.place(tensor) if tensor.numel() else (NOWHERE, 0)  # without elements no address
            except Unsupported as error:
                raise Unsupported(f"{error} ({name}, {format_bytes(tensor.nbytes)})") from error
            places.append(Place(spec_of(name, tensor), *where))
        # tensors of our own: a parameter may be given other memory while a peer still maps this
        self._kept = [tensor.detach() for tensor in tensors.values()]
        return places, allocations.memory

    @torch.no_grad()
    def _moved(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Place], list[Description]]:
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        # views that somebody holds would stay behind, and tied tensors come apart
        holders = Counter(map(storage_key, tensors.values()))
        for name, tensor in tensors.items():
            if holders[storage_key(tensor)] > 1 or num_references(tensor) > 1 + len(hidden_bases([tensor])):
                raise Unsupported(f"{name} is not alone in its memory, from which an export would move it on a CPU")
        self._slab = SharedMemory(max(carved_bytes(list(layout.values())), 1), _CPU)
        views, places = _laid_out(self._slab, layout)
        for tensor, view in zip(tensors.values(), views, strict=True):
            view.copy_(tensor)
            tensor.data = with_own_storage(view)  # a view of the slab would count as tied with all the others
        return places, [self._slab.describe(to_pid=0)]


class Staging:
    """Copies of tensors in memory that a peer maps, taken when first needed and owned until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slab: SharedMemory | None = None
        self._layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._views: list[torch.Tensor] = []
        self._wire: Wire = {}

    # views made in inference mode could not be written to outside of it, where the next call may come from
    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, tensors: Mapping[str, torch.Tensor]) -> Wire:
        """Copy `tensors` in place of the last ones, and wait until they are there.

        What is returned is the same object while nothing has moved.
        """
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        # as lists, since dicts are equal in any order, and places follow the order
        if self._slab is None or list(layout.items()) != list(self._layout.items()):
            self._lay_out(layout)
        if tensors:
            copy_all(self._views, list(tensors.values()))
        wait_for_queued(self._device)
        return self._wire

    def put_groups(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Wire]:
        """Copy `tensors`, `GROUP_BYTES` at a time; the peer reads one group before the next is asked for."""
        for group in batches(tensors, lambda item: carved_bytes([(item[1].shape, item[1].dtype)]), GROUP_BYTES):
            yield self.put(dict(group))

    def move_to(self, device: torch.device) -> None:
        """Be memory of another device from now on."""
        if device != self._device:
            self.close()
            self._device = device

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._layout, self._views, self._wire = {}, [], {}
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _lay_out(self, layout: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        needed_bytes, slab = carved_bytes(list(layout.values())), self._slab
        if slab is None or slab.size_bytes < needed_bytes:
            self.close()
            slab = self._slab = SharedMemory(max(needed_bytes, MIB), self._device)
        self._views, places = _laid_out(slab, layout)
        self._wire = {"tensors": [place.to_wire() for place in places], "memory": [slab.describe(to_pid=0)]}
        self._layout = layout


class Opened:
    """Tensors of another process, by name. Keeps their memory mapped until it is dropped, or opens others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, MappedBuffer] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def open(self, wire: Wire) -> None:
        """Map what `Exported` or `Staging` has described, in place of the last. `TransferError` when that fails."""
        self.tensors = {}
        # by their text, since descriptions are dicts
        keys = list(map(repr, wire["memory"]))
        # unmap before mapping: old and new memory together may not fit
        self._memory = {key: self._memory[key] for key in keys if key in self._memory}
        for key, description in zip(keys, wire["memory"], strict=True):
            if key not in self._memory:
                self._memory[key] = MappedBuffer(description, self._device)
        for place in map(Place.from_wire, wire["tensors"]):
            spec, nowhere = place.tensor, place.memory == NOWHERE
            memory = None if nowhere else self._memory[keys[place.memory]].bytes
            self.tensors[spec.name] = empty(spec, self._device) if memory is None else view(place, memory)
        self.refresh()

    def refresh(self) -> None:
        """Copy what the owner has written since, if this process reads a copy. Queued."""
        for buffer in self._memory.values():
            buffer.refresh()


class Allocations:
    """Allocations of torch's on a GPU that hold given tensors, each described once."""

    def __init__(self) -> None:
        self.memory: list[Description] = []  # descriptions for `open_shared_memory`
        self._indices: dict[bytes, int] = {}

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Index of the memory of a non-empty tensor, and its offset in bytes. `Unsupported` without IPC."""
        handle, size_bytes, offset_bytes = cuda_driver.export_range(tensor)
        if handle not in self._indices:
            self._indices[handle] = len(self.memory)
            self.memory.append(_of_gpu(handle, tensor.device) | {"size_bytes": size_bytes, "pid": os.getpid()})
        return self._indices[handle], offset_bytes


class SharedMemory:
    """Memory of this process that others may map.

    Ownership: owns the bytes until `close`; tensors over `bytes` keep them longer.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Take the memory. Raises: `BudgetError` when the device has not enough free memory."""
        self.size_bytes = size_bytes
        self.device = device
        self._file: int | None = None
        self._key = next(_keys)
        if device.type == "cuda":
            self.bytes = cuda_driver.allocate(size_bytes, device)
        else:
            self._file = os.memfd_create("colo")
            self._close_file = weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size_bytes)
            self.bytes = _map(self._file, size_bytes)
        _local[self._key] = self

    def describe(self, *, to_pid: int) -> Description:
        """The argument of `open_shared_memory` in process `to_pid`; the same process gets the memory itself."""
        common = {"size_bytes": self.size_bytes, "pid": os.getpid(), "number": self._key}
        if to_pid == os.getpid():
            return {"kind": "local", **common}
        if self._file is not None:  # a file's number is given to another once it is closed, its inode is not
            path, inode = f"/proc/{os.getpid()}/fd/{self._file}", os.fstat(self._file).st_ino
            return {"kind": "host", "path": path, "inode": inode, **common}
        return _of_gpu(cuda_driver.export(self.bytes), self.device) | common

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self.bytes = self.bytes.new_empty(0)
        _local.pop(self._key, None)
        if self._file is not None:
            self._close_file()
            self._file = None


def description_of(tensor: torch.Tensor) -> tuple[Description, int]:
    """The memory that a tensor lies in, for `open_shared_memory` of any other process, and its offset there in bytes.

    Lifetime: the memory must not be freed while another process maps it.
    Raises: `Unsupported` for memory that no other process can map.
    """
    # memory of another process is described as its owner did: what CUDA IPC has mapped it does not export again
    for address, (mapped, description) in list(_opened.items()):
        memory = mapped()
        if memory is None:
            _opened.pop(address, None)  # another thread may have seen it too
        elif (offset := _offset_in(memory, tensor)) is not None:
            return description, offset
    # a list, since other threads take and close memory meanwhile
    for owner in list(_local.values()):
        if (offset := _offset_in(owner.bytes, tensor)) is not None:
            return owner.describe(to_pid=0), offset
    if tensor.device.type != "cuda":
        raise Unsupported("ordinary host memory cannot be mapped by another process")
    handle, size_bytes, offset = cuda_driver.export_range(tensor)
    return _of_gpu(handle, tensor.device) | {"size_bytes": size_bytes, "pid": os.getpid()}, offset


def _offset_in(memory: torch.Tensor, tensor: torch.Tensor) -> int | None:
    offset = tensor.data_ptr() - memory.data_ptr()
    return offset if memory.device == tensor.device and 0 <= offset < memory.numel() else None


def open_shared_memory(description: Description, device: torch.device) -> torch.Tensor:
    """Map memory that `SharedMemory.describe` described to this process: uint8, shape [size_bytes].

    Raises: `TransferError` when the owner has gone, the memory is another GPU's, or it cannot be mapped.
    """
    memory = _open(description, device)
    if description["kind"] != "local" and isinstance(memory, torch.Tensor):
        _opened[memory.data_ptr()] = weakref.ref(memory), description
    return memory


def _open(description: Description, device: torch.device) -> torch.Tensor:
    kind, size_bytes = description["kind"], int(description["size_bytes"])
    if kind == "local":
        memory = _local.get(description["number"])
        if memory is None or memory.size_bytes != size_bytes:
            raise TransferError("the shared memory has been closed by its owner")
        return memory.bytes
    if kind == "cuda":
        if description["device"] != device_id(device):  # to try would leave a context of this process on the other GPU
            raise TransferError(
                f"cannot map {format_bytes(size_bytes)} of GPU {description['device']}: this process runs on another "
                f"GPU, {device_id(device)}"
            )
        return cuda_driver.open_exported(bytes.fromhex(description["handle"]), size_bytes, device)
    try:
        file = os.open(description["path"], os.O_RDWR)
    except OSError as error:
        raise TransferError(
            f"cannot map {format_bytes(size_bytes)} of process {description['pid']}: {error}; it has ended, or runs as "
            "another user"
        ) from error
    try:
        found = os.fstat(file)
        if (found.st_ino, found.st_size) != (description["inode"], size_bytes):
            raise TransferError("the shared memory has been closed by its owner")
        return _map(file, size_bytes)
    finally:
        os.close(file)


class MappedBuffer:
    """Shared memory of another process, readable on `device`: mapped, or a copy of host memory where that is a GPU.

    CUDA IPC does not work everywhere: not between some containers, under some drivers, or for memory of another GPU.
    Host memory does, and a worker then reads it through a copy on its own device. `probing` tells beforehand.
    Ownership: keeps the memory mapped, and owns the copy, until it is dropped.
    """

    def __init__(self, description: Description, device: torch.device, *, copied: bool = False) -> None:
        """Map the memory; with `copied` there is a copy of it on a CPU too.

        Raises: `TransferError` when the memory cannot be mapped.
        """
        self._mapped = open_shared_memory(description, device)
        self.is_copy = copied or self._mapped.device.type != device.type
        self.bytes = self._mapped  # uint8, shape [size]; a copy holds what was there at the last `refresh`

        if self.is_copy:
            self.bytes = torch.empty_like(self._mapped, device=device)
            # `refresh` copies from it, which waits on the host unless it is pinned
            cuda_driver.page_lock(self, self._mapped, device)

    def refresh(self, start_bytes: int = 0, stop_bytes: int | None = None) -> None:
        """Copy these bytes, or all, once more, if this is a copy. Queued on the current stream."""
        if self.is_copy:
            part = slice(start_bytes, stop_bytes)
            self.bytes[part].copy_(self._mapped[part], non_blocking=True)


@contextmanager
def probing(device: torch.device) -> Iterator[Description | None]:
    """Share a little memory of a GPU for the time of the block, for a peer to try to map; `None` on a CPU."""
    if device.type != "cuda":
        yield None
        return
    memory = SharedMemory(_PROBE_BYTES, device)
    try:
        described = memory.describe(to_pid=0)
    except TransferError as error:
        described = {"kind": "none", "why": str(error)}
    try:
        yield described
    finally:
        memory.close()


def why_not_mapped(probe: Description | None, device: torch.device) -> str | None:
    """The reason why this process cannot map what `probing` shares; `None` if it can, or has nothing to map."""
    if probe is None:
        return None
    if probe["kind"] == "none":
        return str(probe["why"])
    try:
        open_shared_memory(probe, device)
    except (TransferError, Unsupported) as error:
        return str(error)
    wait_for_queued(device)
    return None


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's short name of a tensor's dtype, such as `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def spec_of(name: str, tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> TensorSpec:
    """Name, dtype, shape and strides of a tensor, its own unless they are given."""
    return TensorSpec(
        name, dtype_name(tensor), tuple(tensor.shape), tuple(tensor.stride()) if strides is None else strides
    )


def empty(spec: TensorSpec, device: torch.device | str = "meta") -> torch.Tensor:
    """A tensor of this dtype and shape, and these strides, which has no values yet."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.strides is None:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=device)


def view(place: Place, memory: torch.Tensor) -> torch.Tensor:
    """The tensor at a place in `memory`, uint8."""
    spec = place.tensor
    dtype: torch.dtype = getattr(torch, spec.dtype)
    strides = spec.strides or ()
    end = max(0, sum((size - 1) * step for size, step in zip(spec.shape, strides, strict=True)) + 1) * dtype.itemsize
    size_bytes = 0 if 0 in spec.shape else end
    flat = memory[place.offset_bytes : place.offset_bytes + size_bytes].view(dtype)
    return flat.as_strided(spec.shape, strides, int(flat.storage_offset()))


def _laid_out(
    slab: SharedMemory, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[list[torch.Tensor], list[Place]]:
    """Contiguous tensors in a slab, one after another, and where they lie."""
    views, base = carve(slab.bytes, list(layout.values())), slab.bytes.data_ptr()
    places = [
        Place(spec_of(name, view), *((0, view.data_ptr() - base) if view.numel() else (NOWHERE, 0)))
        for name, view in zip(layout, views, strict=True)
    ]
    return views, places


def _all_on_gpu(tensors: Mapping[str, torch.Tensor]) -> bool:
    return all(tensor.device.type == "cuda" for tensor in tensors.values())


def _of_gpu(handle: bytes, device: torch.device) -> Description:
    """CUDA IPC's handle, with the UUID of its GPU: numbers of GPUs differ between processes."""
    return {"kind": "cuda", "handle": handle.hex(), "device": device_id(device)}


def _map(file: int, size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size_bytes), dtype=torch.uint8)
