"""Rows of a checkpoint's tensor for each row of Megatron's.

Nearly always they are the same. A fused attention layer has, for each group of heads, the rows of its queries, of its
key and of its value; tensors with a row for each token end in padding. Tensor parallelism cuts such tensors wherever it
likes, also within a head where there are fewer key heads than ranks. So a rank's rows are met with all runs of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that follow one another in Megatron's tensor, and in one of the checkpoint's."""

    start: int
    """The first, in Megatron's tensor."""

    count: int
    target: int
    """Index of the checkpoint's tensor."""

    first: int
    """First of the rows in the checkpoint's tensor."""


def same_rows(count: int) -> tuple[Run, ...]:
    """The first `count` rows, which one tensor consists of; what follows them is padding."""
    return (Run(0, count, 0, 0),)


def qkv_rows(*, num_groups: int, heads_per_group: int, head_dim: int) -> tuple[Run, ...]:
    """Rows of queries (target 0), keys (1) and values (2), group after group."""
    counts = (heads_per_group * head_dim, head_dim, head_dim)
    found, start = [], 0
    for group in range(num_groups):
        for target, count in enumerate(counts):
            found.append(Run(start, count, target, group * count))
            start += count
    return tuple(found)


def num_rows(runs: Sequence[Run], target: int) -> int:
    """Rows of one of the checkpoint's tensors."""
    return sum(run.count for run in runs if run.target == target)


def within(runs: Sequence[Run], start: int, count: int) -> Iterator[Run]:
    """Cut `runs` to `count` rows from `start` on."""
    for run in runs:
        low, high = max(start, run.start), min(start + count, run.start + run.count)
        if low < high:
            yield Run(low, high - low, run.target, run.first + low - run.start)
