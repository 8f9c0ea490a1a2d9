"""A mapped buffer: another process's shared memory, or a copy of it where that is host memory and the reader a GPU.

CUDA IPC does not work everywhere: not between some containers, under some drivers, or for memory of another GPU. Host
memory does, and a worker then reads it through a copy on its own device. A probe tells beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from colo.errors import TransferError, Unsupported
from colo.memory import cuda_driver
from colo.memory.fence import wait_for_queued
from colo.memory.probe import device_id
from colo.memory.shared_memory import Description, SharedMemory, open_shared_memory

_PROBE_BYTES = 512


class MappedBuffer:
    """Shared memory of another process, readable on `device`.

    Ownership: keeps the memory mapped, and owns the copy, until it is dropped.
    """

    def __init__(self, description: Description, device: torch.device, *, copied: bool = False) -> None:
        """Map the memory; with `copied` there is a copy of it on a CPU too.

        Raises: `TransferError` when the memory cannot be mapped.
        """
        self._mapped = open_shared_memory(description, device)
        self.is_copy = copied or self._mapped.device.type != device.type
        self.bytes = self._mapped
        """uint8, shape [size]; a copy holds what was there at the last `refresh`."""

        if self.is_copy:
            self.bytes = torch.empty_like(self._mapped, device=device)
            cuda_driver.page_lock(self, self._mapped, device)

    def refresh(self, size_bytes: int | None = None) -> None:
        """Copy the first bytes, or all of them, once more, if this is a copy. Queued on the current stream."""
        if self.is_copy:
            self.bytes[:size_bytes].copy_(self._mapped[:size_bytes], non_blocking=True)


@contextmanager
def probing(device: torch.device) -> Iterator[Description | None]:
    """Share a little memory of a GPU for the time of the block, for a peer to try to map; `None` on a CPU."""
    if device.type != "cuda":
        yield None
        return
    memory = SharedMemory(_PROBE_BYTES, device)
    try:
        described = memory.describe(to_pid=0) | {"device": device_id(device)}
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
    if probe["device"] != device_id(device):  # to try would leave a context of this process on the other GPU
        return "it runs on another GPU than the trainer"
    try:
        open_shared_memory(probe, device)
    except (TransferError, Unsupported) as error:
        return str(error)
    wait_for_queued(device)
    return None
