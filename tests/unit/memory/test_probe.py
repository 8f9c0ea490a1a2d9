import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from colo.memory import probe
from colo.memory.control_group import MemoryLimit
from colo.memory.probe import (
    PeakMeter,
    _parse_cpu_list,
    available_host_bytes,
    free_device_bytes,
    local_cpus,
    total_device_bytes,
    used_device_bytes,
)
from colo.units import MIB

CPU = torch.device("cpu")


def test_cpu_lists_of_the_kernel_are_read():
    assert _parse_cpu_list("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert _parse_cpu_list("\n") == set()


def test_a_cpu_is_measured_by_the_operating_system():
    assert 0 < available_host_bytes() <= free_device_bytes(CPU) + 2**30
    assert free_device_bytes(CPU) < total_device_bytes(CPU)
    assert used_device_bytes(CPU) is None
    assert probe.device_id(CPU) == "cpu"
    assert torch.cuda.is_initialized() or probe.torch_pinned_bytes() == 0
    assert total_device_bytes(CPU) == psutil.virtual_memory().total


def test_every_cpu_is_local_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: {2, 5}}[pid], raising=False)
    assert local_cpus(CPU) == {2, 5}
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, expected in ((3, {0, 1, 2}), (None, {0})):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert local_cpus(CPU) == expected


def test_cpus_near_a_gpu_are_those_of_its_node_that_the_process_may_use(monkeypatch, tmp_path):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3}, raising=False)
    near = tmp_path / "0000:1b:00.0" / "local_cpulist"
    near.parent.mkdir()
    for text, expected in (("2-8\n", {2, 3}), ("9\n", {1, 2, 3}), (None, {1, 2, 3})):
        near.write_text(text) if text else near.unlink()
        assert local_cpus(torch.device("cuda"), tmp_path) == expected


def test_host_memory_ends_at_the_limit_of_a_control_group(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    limit = MemoryLimit(limit_bytes=1000, used_bytes=900, cached_bytes=300)
    monkeypatch.setattr(probe, "memory_limit", lambda: limit)
    assert available_host_bytes() == 400
    monkeypatch.setattr(probe, "memory_limit", lambda: MemoryLimit(limit_bytes=1 << 60, used_bytes=0, cached_bytes=0))
    assert available_host_bytes() == 5000


# ---- peaks ---------------------------------------------------------------------------------------------------------


class FakeAllocator:
    """torch.cuda's counters. It has no way to reset the peak but the user's."""

    def __init__(self):
        self.allocated = self.peak = 0

    def memory_allocated(self, device):
        return self.allocated

    def max_memory_allocated(self, device):
        return self.peak

    def hold(self, *sizes):
        for size in sizes:
            self.allocated = size
            self.peak = max(self.peak, size)

    def reset(self):
        self.peak = self.allocated


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeAllocator()
    monkeypatch.setattr(probe, "torch", SimpleNamespace(cuda=fake))
    return fake


@pytest.fixture
def meter(cuda):
    return PeakMeter(torch.device("cuda"))


def test_a_new_peak_is_measured_exactly_and_stays_the_users(cuda, meter):
    cuda.hold(500, 100)
    meter.start()
    cuda.hold(900, 300)
    meter.sample()
    assert meter.stop() == 800
    assert cuda.peak == 900


def test_below_an_older_peak_the_largest_sample_counts(cuda, meter):
    cuda.hold(1000, 100)
    meter.start()
    for size in (300, 700, 200):
        cuda.hold(size)
        meter.sample()
    assert meter.stop() == 600
    assert cuda.peak == 1000


def test_below_an_older_peak_nothing_is_known_without_samples(cuda, meter):
    cuda.hold(1000, 100)
    meter.start()
    cuda.hold(700, 100)
    assert meter.stop() is None


def test_samples_belong_to_one_phase(cuda, meter):
    cuda.hold(1000, 100)
    meter.sample()  # before any start
    meter.start()
    cuda.hold(700)
    meter.sample()
    assert meter.stop() == 600
    meter.sample()
    meter.start()
    assert meter.stop() is None


def test_a_peak_that_the_user_resets_meanwhile_counts_from_there(cuda, meter):
    cuda.hold(1000, 100)
    meter.start()
    cuda.reset()
    cuda.hold(400, 100)
    assert meter.stop() == 300


@pytest.mark.parametrize(("afterwards", "rise"), [(300, 300), (700, 700)])
def test_what_counts_elsewhere_and_comes_meanwhile_is_no_part_of_the_rise(cuda, afterwards, rise):
    regions = [50]
    meter = PeakMeter(torch.device("cuda"), lambda: regions[0])
    cuda.hold(500, 150)
    meter.start()
    cuda.hold(450)  # activations, as a gradient arrives
    meter.sample()
    cuda.hold(150)
    regions[0] += 4000  # state comes back, for the step
    cuda.hold(4150, 4150 + afterwards, 4150)
    assert meter.stop() == rise
    meter.start()
    cuda.hold(4150 + 200)
    meter.sample()
    assert meter.stop() == 200


def test_without_a_start_there_is_no_peak(meter):
    assert meter.stop() is None


def test_peaks_are_not_counted_on_a_cpu():
    meter = PeakMeter(CPU)
    meter.start()
    meter.sample()
    assert meter.stop() is None


def test_room_for_a_copy_is_twice_its_bytes_and_what_the_allocator_takes_at_least(monkeypatch):
    monkeypatch.setattr(probe, "free_device_bytes", lambda device: 30 * MIB)
    cuda = torch.device("cuda")
    assert probe.has_room(torch.empty(MIB, dtype=torch.float32), cuda)
    assert not probe.has_room(torch.empty(6 * MIB, dtype=torch.uint8), cuda)
    monkeypatch.setattr(probe, "free_device_bytes", lambda device: MIB)
    assert not probe.has_room(torch.empty(8), cuda), "torch takes 2 MiB for it"
    assert probe.has_room(torch.empty(8), CPU)
