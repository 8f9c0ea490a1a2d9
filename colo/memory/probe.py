"""The one place that asks how much memory there is: the driver for a GPU, the operating system for the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from colo.errors import Unsupported
from colo.memory.control_group import memory_limit
from colo.units import MIB


def free_device_bytes(device: torch.device) -> int:
    """Bytes that the driver (CUDA) or the operating system (CPU) could hand out now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def total_device_bytes(device: torch.device) -> int:
    """Bytes that the device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


def used_device_bytes(device: torch.device) -> int | None:
    """Bytes in use on a GPU as the driver sees it, other processes included; `None` on the CPU."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes - free_bytes)


def has_room(tensor: torch.Tensor, device: torch.device) -> bool:
    """True if a copy of a tensor fits on the device, and as much again; of a CPU always.

    torch's allocator takes 2 MiB for a small tensor and 20 MiB for those up to 10 MiB.
    """
    needed_bytes = 2 * tensor.numel() * tensor.element_size() + 20 * MIB
    return device.type != "cuda" or free_device_bytes(device) > needed_bytes


def device_id(device: torch.device) -> str:
    """A name for a device that all processes of a machine agree on."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def device_of(device: torch.device | str | None) -> torch.device:
    """The device itself: the current GPU for `cuda`, and for `None` where there is one.

    Raises: `ValueError` for what is no name of a GPU or the CPU, `Unsupported` for a GPU where torch sees none.
    """
    named = f"device must be 'cuda', 'cuda:0' or 'cpu', not {device!r}"
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        raise ValueError(named) from None
    if found.type not in ("cuda", "cpu"):
        raise ValueError(named)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"{named}: torch sees no CUDA device, run `colo doctor`, or pass 'cpu'")
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def torch_pinned_bytes() -> int:
    """Bytes of pinned host memory that torch's own allocator has taken in this process, in use or cached."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping and within the limits of this process's control groups."""
    available_bytes = int(psutil.virtual_memory().available)
    limit = memory_limit()
    return available_bytes if limit is None else min(available_bytes, limit.left_bytes)


class PeakMeter:
    """Measures how far torch's allocations on a CUDA device rise between `start` and `stop`, but for `counted` ones.

    It never resets torch's peak statistics: `torch.cuda.max_memory_allocated` and a user's own profiling read the same
    numbers as without colo. A phase that sets a new peak is therefore measured exactly. One that stays below an older
    peak is only known to do so; its figure is then the most that `sample` saw. Call that as gradients arrive in
    `backward()`, where a training step holds the most.
    """

    def __init__(self, device: torch.device, counted: Callable[[], int] = lambda: 0) -> None:
        """`counted` tells how many of the bytes that torch has allocated count elsewhere, as those of regions do."""
        self._device, self._counted = device, counted
        self._before: tuple[int, int] | None = None  # bytes allocated at the start, and the peak until then
        self._sampled_bytes: int | None = None

    def start(self) -> None:
        """Begin to measure."""
        if self._device.type == "cuda":
            self._before = self._allocated_bytes(), torch.cuda.max_memory_allocated(self._device)
            self._sampled_bytes = None

    def sample(self) -> None:
        """Look at what is allocated now. Does nothing before `start` and on the CPU."""
        if self._before is not None:
            now_bytes = self._allocated_bytes()
            self._sampled_bytes = now_bytes if self._sampled_bytes is None else max(now_bytes, self._sampled_bytes)

    def _allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device)) - self._counted()

    def stop(self) -> int | None:
        """The rise in bytes; `None` on the CPU, without a start, or for a phase below an older peak without samples."""
        before, self._before = self._before, None
        if before is None:
            return None
        base_bytes, older_peak_bytes = before
        seen = [] if self._sampled_bytes is None else [self._sampled_bytes]
        peak_bytes = int(torch.cuda.max_memory_allocated(self._device))
        if peak_bytes != older_peak_bytes:  # a smaller one was reset by the user since: it is of this phase
            # counted memory that has come meanwhile was there at the peak: samples tell of a peak before it
            seen.append(peak_bytes - self._counted())
        return max(seen) - base_bytes if seen else None


def local_cpus(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """CPUs on the NUMA node of a GPU, or every CPU this process may use where the node is not known."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    if device.type != "cuda":
        return allowed
    properties: Any = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        text = (devices / address / "local_cpulist").read_text()
    except OSError:
        return allowed
    # a container may have none of the CPUs that are near the GPU
    return (_parse_cpu_list(text) & allowed) or allowed


def _parse_cpu_list(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
