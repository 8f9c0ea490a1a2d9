"""Tensors on their way to workers in another process, in memory that those map.

They are told where each tensor lies as [name, dtype, shape, offset], and of the slab as its owner describes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from colo.memory.fence import wait_for_queued
from colo.memory.region import carve, carved_bytes
from colo.memory.shared_memory import Description, SharedMemory
from colo.units import MIB

GROUP_BYTES = 256 * MIB
"""How much is staged at once, unless a single tensor is larger."""

Named = tuple[str, torch.Tensor]
Staged = tuple[list[list[Any]], Description]
"""Where tensors lie: [name, dtype, shape, offset] of each, and the slab."""


def staged(memory: torch.Tensor, described: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
    """The tensors by name, in a worker that has mapped the slab: views of `memory` (uint8)."""
    named = {}
    for name, dtype_name, shape, offset in described:
        dtype = getattr(torch, dtype_name)
        named[name] = memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
    return named


def end_bytes(described: Sequence[Sequence[Any]]) -> int:
    """Where the last of the tensors ends in the slab."""
    ends = (offset + math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape, offset in described)
    return max(ends, default=0)


class Staging:
    """Memory that workers can map, taken when first needed and owned until `close`. A `put` replaces the last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slab: SharedMemory | None = None
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._views: list[torch.Tensor] = []
        self._described: list[list[Any]] = []

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, tensors: Sequence[Named], *, to_pid: int) -> Staged:
        """Copy `tensors`, and wait until they are there. The list is the same object while nothing has moved."""
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        if self._slab is None or layout != self._layout:
            self._slab = self._lay_out(layout)
        if tensors:
            torch._foreach_copy_(self._views, [tensor for _, tensor in tensors])
        wait_for_queued(self._device)
        return self._described, self._slab.describe(to_pid=to_pid)

    def put_groups(self, tensors: Iterable[Named], *, to_pid: int) -> Iterator[Staged]:
        """Copy `tensors`, `GROUP_BYTES` at a time; the workers read one group before the next is asked for."""
        group: list[Named] = []
        specs: list[tuple[tuple[int, ...], torch.dtype]] = []
        for name, tensor in tensors:
            spec = (tuple(tensor.shape), tensor.dtype)
            if group and carved_bytes([*specs, spec]) > GROUP_BYTES:
                yield self.put(group, to_pid=to_pid)
                group, specs = [], []
            group.append((name, tensor))
            specs.append(spec)
        if group:
            yield self.put(group, to_pid=to_pid)

    def move_to(self, device: torch.device) -> None:
        """Be memory of another device from now on."""
        if device != self._device:
            self.close()
            self._device = device

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._layout, self._views, self._described = [], [], []
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _lay_out(self, layout: list[tuple[str, torch.Size, torch.dtype]]) -> SharedMemory:
        specs = [(tuple(shape), dtype) for _, shape, dtype in layout]
        needed_bytes, slab = carved_bytes(specs), self._slab
        if slab is None or slab.size_bytes < needed_bytes:
            self.close()
            slab = SharedMemory(max(needed_bytes, MIB), self._device)
        base = slab.bytes.data_ptr()
        self._views = carve(slab.bytes, specs)
        self._described = [
            [name, str(dtype).removeprefix("torch."), list(shape), view.data_ptr() - base]
            for (name, shape, dtype), view in zip(layout, self._views, strict=True)
        ]
        self._layout = layout
        return slab
