"""Tensors of this process that another process of this machine maps, described in strings and numbers.

On CUDA they stay where they are: their allocations are exported. On a CPU, where ordinary memory cannot be mapped,
parameters move into a memory file and stay the same objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from colo.memory import cuda_driver
from colo.memory.region import carve, carved_bytes
from colo.memory.shared_memory import Description, SharedMemory
from colo.memory.shared_memory import open_shared_memory as open_slab

Place = list[Any]
"""[name, dtype, shape, strides in elements, index of the memory, offset in bytes]."""

NOWHERE = -1
"""Index of the memory of a tensor without elements."""


class Allocations:
    """Allocations of torch's on a GPU that hold given tensors, each described once."""

    def __init__(self) -> None:
        self.memory: list[Description] = []
        """What the peer opens with `open_slab`, each once."""

        self._indices: dict[bytes, int] = {}

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Index of the memory of a tensor, which has elements, and its offset there in bytes.

        Raises: `Unsupported` for memory that CUDA IPC does not export.
        """
        handle, size_bytes, offset_bytes = cuda_driver.export_range(tensor)
        if handle not in self._indices:
            self._indices[handle] = len(self.memory)
            self.memory.append({"kind": "cuda", "handle": handle.hex(), "size_bytes": size_bytes, "pid": os.getpid()})
        return self._indices[handle], offset_bytes


class Exported:
    """Tensors by name, in memory that a peer can map.

    Ownership: keeps the memory alive until `close`, also where a parameter has been given other memory meanwhile.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Export. Raises: `Unsupported` for memory that cannot be, and nothing has changed then."""
        self.memory: list[Description] = []
        """What the peer opens with `open_slab`, each once."""

        self.places: list[Place] = []
        self._slab: SharedMemory | None = None
        self._kept: list[torch.Tensor] = []
        if all(tensor.device.type == "cuda" for tensor in tensors.values()):
            self._export(tensors)
        else:
            self._move(tensors)
        self._facts = _facts(tensors)
        self._kept = [tensor.detach() for tensor in tensors.values()]

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
            self.places.append(_place(name, tensor, *place))
        self.memory = allocations.memory

    @torch.no_grad()
    def _move(self, tensors: Mapping[str, torch.Tensor]) -> None:
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors.values()]
        self._slab = SharedMemory(max(carved_bytes(specs), 1), torch.device("cpu"))
        base = self._slab.bytes.data_ptr()
        for (name, tensor), view in zip(tensors.items(), carve(self._slab.bytes, specs), strict=True):
            view.copy_(tensor)
            tensor.data = view
            self.places.append(_place(name, tensor, 0, view.data_ptr() - base))
        self.memory.append(self._slab.describe(to_pid=0))


def opened(places: list[Place], memory: list[Description], device: torch.device) -> dict[str, torch.Tensor]:
    """The exported tensors by name, in a peer. Lifetime: mapped until the last tensor over a memory dies.

    Raises: `TransferError` when memory cannot be mapped.
    """
    mapped = [open_slab(description, device) for description in memory]
    tensors = {}
    for name, dtype_name, shape, stride, index, offset_bytes in places:
        dtype = getattr(torch, dtype_name)
        if index == NOWHERE:
            tensors[name] = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
            continue
        start = mapped[index][offset_bytes:offset_bytes].view(dtype)  # for its place: the elements may end anywhere
        tensors[name] = start.as_strided(tuple(shape), tuple(stride), int(start.storage_offset()))
    return tensors


def _place(name: str, tensor: torch.Tensor, index: int, offset_bytes: int) -> Place:
    return [name, dtype_name(tensor), list(tensor.shape), list(tensor.stride()), index, offset_bytes]


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's short name of a tensor's dtype, such as `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def _facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in tensors.items()}
