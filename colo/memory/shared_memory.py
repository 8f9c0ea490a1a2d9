"""Shared memory: one process owns it and others of the same user map it, on a GPU or on the host.

The owner allocates and describes; a peer opens the description. Both then hold the same bytes, until the last tensor
over them dies on either side. It has no name in a file system, so that nothing is left behind when a process is killed.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from typing import Any

import torch

from colo.errors import TransferError
from colo.memory import cuda_driver
from colo.units import format_bytes

Description = dict[str, Any]
"""Handle for a peer: strings and numbers only, so that it travels as JSON. No two are the same."""

_local: weakref.WeakValueDictionary[int, SharedMemory] = weakref.WeakValueDictionary()
_keys = itertools.count()


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
        return {"kind": "cuda", "handle": cuda_driver.export(self.bytes).hex(), **common}

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self.bytes = self.bytes.new_empty(0)
        _local.pop(self._key, None)
        if self._file is not None:
            self._close_file()
            self._file = None


def open_shared_memory(description: Description, device: torch.device) -> torch.Tensor:
    """Map memory that `SharedMemory.describe` described to this process: uint8, shape [size_bytes].

    Raises: `TransferError` when the owner has gone or the memory cannot be mapped.
    """
    kind, size_bytes = description["kind"], int(description["size_bytes"])
    if kind == "local":
        memory = _local.get(description["number"])
        if memory is None or memory.size_bytes != size_bytes:
            raise TransferError("the shared memory has been closed by its owner")
        return memory.bytes
    if kind == "cuda":
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


def _map(file: int, size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size_bytes), dtype=torch.uint8)
