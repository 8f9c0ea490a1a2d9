"""Tensors of this process that another process of this machine maps, described in strings and numbers.

On CUDA they stay where they are: their allocations are exported. On a CPU, where ordinary memory cannot be mapped,
parameters move into a memory file and stay the same objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from colo.memory import cuda_driver
from colo.memory.region import carve, carved_bytes
from colo.memory.shared_memory import Description, SharedMemory, open_shared_memory
from colo.memory.storage import with_own_storage
from colo.weights.manifest import TensorSpec
from colo.weights.place import NOWHERE, Place
from colo.weights.sources.placed import dtype_name as dtype_name


class Allocations:
    """Allocations of torch's on a GPU that hold given tensors, each described once."""

    def __init__(self) -> None:
        self.memory: list[Description] = []
        """What the peer opens with `open_shared_memory`, each once."""

        self._indices: dict[bytes, int] = {}

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Index of the memory of a non-empty tensor, and its offset in bytes. `Unsupported` without IPC."""
        handle, size_bytes, offset_bytes = cuda_driver.export_range(tensor)
        if handle not in self._indices:
            self._indices[handle] = len(self.memory)
            self.memory.append({"kind": "cuda", "handle": handle.hex(), "size_bytes": size_bytes, "pid": os.getpid()})
        return self._indices[handle], offset_bytes


class Exported:
    """Tensors by name, in memory that a peer can map. Keeps the memory until `close`, also if a parameter leaves it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Export. Raises: `Unsupported` for memory that cannot be, and nothing has changed then."""
        self.memory: list[Description] = []
        """What the peer opens with `open_shared_memory`, each once."""

        self.places: list[Place] = []
        self._slab: SharedMemory | None = None
        self._kept: list[torch.Tensor] = []
        """What keeps allocations of torch's."""

        if all(tensor.device.type == "cuda" for tensor in tensors.values()):
            self._export(tensors)
        else:
            self._move(tensors)
        self._facts = _facts(tensors)

    def is_current(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether `tensors` are still where they were exported from."""
        return _facts(tensors) == self._facts

    def close(self) -> None:
        """Let go of the memory. Ordering: the peer has let go of it before. Idempotent."""
        self._kept = []
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _export(self, tensors: Mapping[str, torch.Tensor]) -> None:
        allocations = Allocations()
        for name, tensor in tensors.items():
            place = allocations.place(tensor) if tensor.numel() else (NOWHERE, 0)  # without elements no address
            self.places.append(Place(spec_of(name, tensor), *place))
        self.memory = allocations.memory
        self._kept = [tensor.detach() for tensor in tensors.values()]

    @torch.no_grad()
    def _move(self, tensors: Mapping[str, torch.Tensor]) -> None:
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors.values()]
        self._slab = SharedMemory(max(carved_bytes(specs), 1), torch.device("cpu"))
        base = self._slab.bytes.data_ptr()
        for (name, tensor), memory in zip(tensors.items(), carve(self._slab.bytes, specs), strict=True):
            memory.copy_(tensor)
            tensor.data = with_own_storage(memory)
            where = (0, memory.data_ptr() - base) if tensor.numel() else (NOWHERE, 0)
            self.places.append(Place(spec_of(name, tensor), *where))
        self.memory.append(self._slab.describe(to_pid=0))


def open_places(places: Sequence[Place], memory: list[Description], device: torch.device) -> dict[str, torch.Tensor]:
    """The exported tensors by name, in a peer, which keep the memory mapped. `TransferError` when that fails."""
    mapped = [open_shared_memory(description, device) for description in memory]
    return {
        place.tensor.name: empty(place.tensor, device) if place.memory == NOWHERE else view(place, mapped[place.memory])
        for place in places
    }


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


def spec_of(name: str, tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> TensorSpec:
    """Name, dtype, shape and strides of a tensor, its own unless they are given."""
    return TensorSpec(
        name, dtype_name(tensor), tuple(tensor.shape), tuple(tensor.stride()) if strides is None else strides
    )


def _facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in tensors.items()}
