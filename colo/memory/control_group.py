"""Memory limits of the control groups that this process is in. Imports no torch: `colo doctor` runs without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_V2 = ("memory.max", "memory.current", "inactive_file")
# in version 1 only the figures that begin with `total_` include the groups within
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """The limit of one control group, and how much of it is taken."""

    limit_bytes: int
    used_bytes: int
    cached_bytes: int  # file pages among the used bytes that the kernel drops as soon as somebody needs the memory

    @property
    def left_bytes(self) -> int:
        """Bytes that processes of the group can still take."""
        return max(0, self.limit_bytes - self.used_bytes + self.cached_bytes)


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The limit with the least memory left, of this process's group and every group around it; `None` without one.

    Reads `proc/self/cgroup` and `sys/fs/cgroup` below `root`, in version 2 and version 1.
    """
    return min(_limits(root), key=lambda limit: (limit.left_bytes, limit.limit_bytes), default=None)


def read_lines(path: Path) -> list[str]:
    """The lines of a small system file; none where it does not exist or may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _limits(root: Path) -> Iterator[MemoryLimit]:
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        # version 2 names no controller; in version 1 every controller has a hierarchy, and one of them limits memory
        if controllers not in ("", "memory"):
            continue
        base = root / "sys/fs/cgroup" / controllers
        # joined as it is, an absolute path would replace `base`
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = _limit_of(folder, *(_V1 if controllers else _V2))
            if limit is not None:
                yield limit
            if folder == base:  # a container without a namespace of its own sees its group here, not at `group`
                break


def _limit_of(folder: Path, limit_file: str, used_file: str, cache_name: str) -> MemoryLimit | None:
    limit, used = read_lines(folder / limit_file), read_lines(folder / used_file)
    if not limit or not used or limit == ["max"]:
        return None
    statistics = dict(line.split() for line in read_lines(folder / "memory.stat"))
    cached_bytes = int(statistics.get(cache_name, 0))
    return MemoryLimit(limit_bytes=int(limit[0]), used_bytes=int(used[0]), cached_bytes=cached_bytes)
