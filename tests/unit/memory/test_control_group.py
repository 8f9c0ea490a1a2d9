"""Limits of control groups, in trees of files as the kernel has them."""

import pytest

from colo.memory.control_group import memory_limit, read_lines


def group(folder, limit, used, **statistics):
    """The files of one group in version 2; version 1 where the folder is the memory controller's."""
    v1 = "memory" in folder.parts
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    (folder / "memory.stat").write_text("anon 5\n" + "".join(f"{name} {size}\n" for name, size in statistics.items()))


@pytest.fixture
def tree(tmp_path):
    """A root folder whose process is in /job/step."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    return tmp_path


def figures(root):
    limit = memory_limit(root)
    return limit and (limit.limit_bytes, limit.used_bytes, limit.left_bytes)


def test_file_pages_that_the_kernel_can_drop_do_not_count_as_used(tree):
    group(tree / "sys/fs/cgroup", 1000, 900, inactive_file=300)
    assert figures(tree) == (1000, 900, 400)


def test_more_used_than_allowed_leaves_nothing(tree):
    group(tree / "sys/fs/cgroup", 1000, 1200)
    assert figures(tree) == (1000, 1200, 0)


@pytest.mark.parametrize("tightest", ["", "job", "job/step"], ids=["root", "parent", "own"])
def test_the_group_with_the_least_left_counts_on_the_way_to_the_root(tree, tightest):
    base = tree / "sys/fs/cgroup"
    for name in ("", "job", "job/step"):
        group(base / name, 1000, 100)
    group(base / tightest, 5000, 4900)  # a larger limit, of which less is left
    assert figures(tree) == (5000, 4900, 100)


def test_groups_without_a_limit_and_groups_of_others_do_not_count(tree):
    base = tree / "sys/fs/cgroup"
    group(base / "job", "max", 1)
    group(base / "other", 10, 10)
    group(base / "job/step/below", 10, 10)
    group(tree, 10, 10)  # above the mount
    assert memory_limit(tree) is None


def test_a_container_that_sees_its_group_at_the_mount(tree):
    group(tree / "sys/fs/cgroup", 1000, 100)  # /job/step is not there
    assert figures(tree) == (1000, 100, 900)


def test_version_1_has_a_tree_for_memory(tree):
    (tree / "proc/self/cgroup").write_text("9:cpu:/job\n4:memory:/job/step\n0::/\n")
    group(tree / "sys/fs/cgroup/memory/job/step", 1000, 900, inactive_file=1, total_inactive_file=200)
    group(tree / "sys/fs/cgroup/cpu/job", 1, 1)
    assert figures(tree) == (1000, 900, 300)


def test_a_colon_in_the_name_of_a_group_is_a_part_of_it(tree):
    (tree / "proc/self/cgroup").write_text("0::/job:1/step\n")
    group(tree / "sys/fs/cgroup/job:1/step", 1000, 100)
    assert figures(tree) == (1000, 100, 900)


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert memory_limit(tmp_path) is None
    assert read_lines(tmp_path) == []
