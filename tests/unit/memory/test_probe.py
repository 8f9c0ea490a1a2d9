import torch

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


def test_cpu_lists_of_the_kernel_are_read():
    assert _parse_cpu_list("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert _parse_cpu_list("\n") == set()


def test_a_cpu_is_measured_by_the_operating_system():
    assert 0 < available_host_bytes() <= free_device_bytes(CPU) + 2**30
    assert free_device_bytes(CPU) < total_device_bytes(CPU)
    assert used_device_bytes(CPU) is None
    assert local_cpus(CPU)


def test_peaks_are_not_counted_on_a_cpu():
    meter = PeakMeter(CPU)
    meter.start()
    assert meter.stop() is None
