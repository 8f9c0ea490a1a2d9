"""Plain device memory that another process can map: the few calls of the CUDA driver that torch does not offer.

Memory from torch's allocator may be a part of a larger block, and with expandable segments, in torch-memory-saver or in
vLLM's sleep pool it cannot be exported at all. What is allocated here always can, is freed when its last tensor dies,
and needs no reference counts on the other side, so that a peer may be killed without holding on to it.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from functools import cache
from typing import Any

import torch

from colo.errors import BudgetError, TransferError, Unsupported
from colo.memory.probe import free_device_bytes
from colo.units import format_bytes

HANDLE_BYTES = 64
# the only flag that `cuIpcOpenMemHandle` allows
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Memory:
    """A range of device memory, as the interface through which torch makes a tensor over it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def allocate(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Exportable device memory as a tensor, uint8, shape [size_bytes]. Freed with the last tensor over it.

    Raises: `BudgetError` when the device has not enough free memory.
    """
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        _ensure_context()
        code = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes))
        if code == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # what torch caches is invisible to the driver
            code = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes))
    if code == _OUT_OF_MEMORY:
        free_bytes = free_device_bytes(device)
        raise BudgetError(
            f"weights need {format_bytes(size_bytes)} of {device}, which has {format_bytes(free_bytes)} free: release "
            "other memory of this or of other processes first, or make the model smaller",
            needed_bytes=size_bytes,
            free_bytes=free_bytes,
        )
    _check(code, "cuMemAlloc")
    return _tensor(address.value, size_bytes, device, "cuMemFree_v2")


def export(data: torch.Tensor) -> bytes:
    """The handle, 64 bytes, with which another process maps memory that `allocate` returned."""
    handle = _Handle()
    with torch.cuda.device(data.device):
        _ensure_context()  # the call may come from a thread that has none yet
        _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(data.data_ptr())), "cuIpcGetMemHandle")
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def export_range(data: torch.Tensor) -> tuple[bytes, int, int]:
    """Handle (64 bytes) and size of the allocation that a tensor of torch's lies in, and its offset there, in bytes.

    Lifetime: the allocation must not be freed while another process maps it.
    Raises: `Unsupported` for memory that CUDA IPC does not export: expandable segments, torch-memory-saver, cumem.
    """
    # CUDA IPC exports whole allocations, and a block of torch's allocator holds many tensors
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    address = ctypes.c_uint64(data.data_ptr())
    with torch.cuda.device(data.device):
        _ensure_context()
        _check(
            _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address), "cuMemGetAddressRange"
        )
        code = _driver().cuIpcGetMemHandle(ctypes.byref(handle), base)
    if code != 0:
        raise Unsupported(
            f"CUDA IPC does not export this memory ({_name_of(code)}): it is in expandable segments, "
            "torch-memory-saver or a sleep pool"
        )
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), size.value, data.data_ptr() - base.value


def open_exported(handle: bytes, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that another process of this machine exported, as a tensor, uint8, shape [size_bytes].

    Lifetime: mapped until the last tensor over it dies. Raises: `TransferError` when it cannot be mapped.
    """
    return _tensor(_open(handle, device), size_bytes, device, "cuIpcCloseMemHandle")


class Mapped:
    """Memory that another process exported, maybe another GPU's, at an address of this process.

    Lifetime: mapped until this dies. Kernels of `device` read and write it, over NVLink where it is another's; torch,
    which takes memory for its GPU's own, does not see it.
    """

    def __init__(self, handle: bytes, device: torch.device) -> None:
        """Map a whole allocation. Raises: `TransferError` when it cannot be mapped."""
        self.address = _open(handle, device)
        unmap = weakref.finalize(self, _release, "cuIpcCloseMemHandle", self.address, device.index or 0)
        unmap.atexit = False  # the driver unmaps what a process leaves behind


def _open(handle: bytes, device: torch.device) -> int:
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        _ensure_context()
        code = _driver().cuIpcOpenMemHandle_v2(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
    if code != 0:
        raise TransferError(f"CUDA IPC does not map memory of another process here ({_name_of(code)}, {code})")
    return address.value


def page_lock(owner: object, data: torch.Tensor, device: torch.device) -> weakref.finalize[..., Any] | None:
    """Pin the host memory of `data`, uint8, for copies to and from a GPU, until `owner` dies or the result is called.

    Nothing is done for a CPU, and where the driver refuses: copies are right all the same, and slower, which is warned
    of. Unlike the runtime's call this one leaves no error behind that a later one would be taken for.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        _ensure_context()
        address, size = ctypes.c_uint64(data.data_ptr()), ctypes.c_size_t(data.numel())
        code = _driver().cuMemHostRegister_v2(address, size, ctypes.c_uint(0))
    if code != 0:
        warnings.warn(
            f"{format_bytes(data.numel())} of host memory are not pinned ({_name_of(code)}), and copies slower: check "
            "`ulimit -l`",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    unlock = weakref.finalize(owner, _unlock, data, device)  # the argument keeps it mapped until then
    unlock.atexit = False
    return unlock


def _unlock(data: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        _driver().cuMemHostUnregister(ctypes.c_uint64(data.data_ptr()))


def view(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Device memory at `address`, owned by someone else, as a tensor, uint8, shape [size_bytes]."""
    return torch.as_tensor(_Memory(address, size_bytes), device=device)


def _tensor(address: int, size_bytes: int, device: torch.device, release: str) -> torch.Tensor:
    memory = _Memory(address, size_bytes)
    # torch's tensor refers to `memory` as long as anything lies over it
    finalizer = weakref.finalize(memory, _release, release, address, device.index or 0)
    finalizer.atexit = False  # the driver frees what a process leaves behind
    tensor = torch.as_tensor(memory, device=device)
    if tensor.data_ptr() != address:  # of another GPU, which torch would copy
        raise TransferError(f"the memory is not on {device}")
    return tensor


def _release(call: str, address: int, device_index: int) -> None:
    with torch.cuda.device(device_index):
        # kernels of any stream may still use it
        torch.cuda.synchronize()
        code = getattr(_driver(), call)(ctypes.c_uint64(address))
    if code != 0:
        # an exception in a finalizer would only be printed
        warnings.warn(f"{call} failed, memory is lost: {_name_of(code)} ({code})", RuntimeWarning, stacklevel=2)


def _ensure_context() -> None:
    # driver calls need a current context, which torch makes at a thread's first use of the device
    torch.cuda.current_stream().synchronize()


def _check(code: int, call: str) -> None:
    if code != 0:
        raise TransferError(f"{call} failed: {_name_of(code)} ({code})")


def _name_of(code: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"unknown").decode()


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
