import os
from types import SimpleNamespace

import psutil
import torch

from colo.memory import probe
from colo.memory.probe import (
    PeakMeter,
    _cgroup_free_bytes,
    _parse_cpu_list,
    available_host_bytes,
    free_device_bytes,
    local_cpus,
    total_device_bytes,
    used_device_bytes,
)

CPU = torch.device("cpu")


def write_group(root, limit, current, inactive_file):
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{current}\n")
    (root / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")
    return root


def test_a_control_groups_limit_counts_and_its_file_cache_does_not(tmp_path):
    assert _cgroup_free_bytes(write_group(tmp_path, 1000, 900, 300)) == 400
    assert _cgroup_free_bytes(write_group(tmp_path, 1000, 1200, 0)) == 0
    assert _cgroup_free_bytes(write_group(tmp_path, "max", 900, 300)) is None


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert _cgroup_free_bytes(tmp_path) is None


def test_a_control_group_that_says_nothing_of_its_file_cache_has_none(tmp_path):
    write_group(tmp_path, 1000, 900, 300)
    (tmp_path / "memory.stat").write_text("anon 5\n")
    assert _cgroup_free_bytes(tmp_path) == 100


def test_the_host_has_the_less_of_what_the_system_and_the_control_group_have(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    for limit_bytes, expected in ((400, 400), (4000, 1000), (None, 1000)):
        monkeypatch.setattr(probe, "_cgroup_free_bytes", lambda limit_bytes=limit_bytes: limit_bytes)
        assert available_host_bytes() == expected


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


def test_peaks_are_not_counted_on_a_cpu():
    meter = PeakMeter(CPU)
    meter.start()
    assert meter.stop() is None
