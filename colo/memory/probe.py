"""The one place that asks how much memory there is: the driver for a GPU, the operating system for the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import torch


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


def device_id(device: torch.device) -> str:
    """A name for a device that all processes of a machine agree on."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def torch_pinned_bytes() -> int:
    """Bytes of pinned host memory that torch's own allocator has taken in this process, in use or cached."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping, the limit of this control group included."""
    available_bytes = int(psutil.virtual_memory().available)
    limit_bytes = _cgroup_free_bytes()
    return available_bytes if limit_bytes is None else min(available_bytes, limit_bytes)


class PeakMeter:
    """How far torch's allocations on a CUDA device rise above where they were at `start`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base_bytes: int | None = None

    def start(self) -> None:
        """Begin to measure. Resets torch's peak statistics, as `torch.cuda.reset_peak_memory_stats` does."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base_bytes = torch.cuda.memory_allocated(self._device)

    def stop(self) -> int | None:
        """Bytes above the start; `None` on the CPU, which does not count them, or without a start."""
        base_bytes, self._base_bytes = self._base_bytes, None
        return None if base_bytes is None else torch.cuda.max_memory_allocated(self._device) - base_bytes


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
    return (_parse_cpu_list(text) & allowed) or allowed


def _parse_cpu_list(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left under the memory limit of control group version 2, or `None` without a limit.

    Files that were read once are counted as used until somebody needs the memory; they do not count here.
    """
    try:
        limit = (root / "memory.max").read_text().strip()
        used_bytes = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    cached_bytes = int(statistics.get("inactive_file", 0))
    return None if limit == "max" else max(0, int(limit) - used_bytes + cached_bytes)
