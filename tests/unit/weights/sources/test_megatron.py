"""Rows and stages of Megatron's, by fakes."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import colo
from colo.errors import Unsupported
from colo.weights.sources.megatron import Run, bare, is_megatron, num_rows, qkv_rows, same_rows, within

SIZES = st.integers(1, 5)


def test_rows_of_two_groups_of_heads():
    assert qkv_rows(num_groups=2, heads_per_group=3, head_dim=4) == (
        Run(0, 12, 0, 0),
        Run(12, 4, 1, 0),
        Run(16, 4, 2, 0),
        Run(20, 12, 0, 12),
        Run(32, 4, 1, 4),
        Run(36, 4, 2, 4),
    )


@given(num_groups=SIZES, heads_per_group=SIZES, head_dim=SIZES, columns=st.integers(0, 3), data=st.data())
def test_cut_anywhere_queries_keys_and_values_are_those_of_the_whole_once_each(
    num_groups, heads_per_group, head_dim, columns, data
):
    runs = qkv_rows(num_groups=num_groups, heads_per_group=heads_per_group, head_dim=head_dim)
    total = num_groups * (heads_per_group + 2) * head_dim
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=6))})
    shape = (total, columns) if columns else (total,)  # a weight, or a bias
    fused = torch.arange(total * max(1, columns)).view(shape)
    found = [torch.full((num_rows(runs, target), *shape[1:]), -1) for target in range(3)]
    for start, stop in pairwise(cuts):
        part = fused[start:stop]
        for run in within(runs, start, stop - start):
            place = found[run.target][run.first : run.first + run.count]
            assert (place == -1).all()
            place.copy_(part.narrow(0, run.start - start, run.count))
    heads = fused.view(num_groups, heads_per_group + 2, head_dim, *shape[1:])
    for target, rows in enumerate((heads[:, :-2], heads[:, -2:-1], heads[:, -1:])):
        assert torch.equal(found[target], rows.reshape(-1, *shape[1:]))


@given(count=st.integers(1, 40), padding=st.integers(0, 40), ranks=st.integers(1, 8))
def test_padding_is_in_no_part_and_every_other_row_in_one(count, padding, ranks):
    size = -(-(count + padding) // ranks)
    runs = same_rows(count)
    found = [run for rank in range(ranks) for run in within(runs, rank * size, size)]
    assert [row for run in found for row in range(run.first, run.first + run.count)] == list(range(count))
    assert all(run.start == run.first and run.target == 0 for run in found)
    assert num_rows(runs, 0) == count


@pytest.mark.parametrize("start", [0, 3])
def test_no_rows_are_in_no_run(start):
    assert list(within(same_rows(5), start, 0)) == []


def test_what_is_no_stage_is_refused_by_the_name_of_its_class():
    assert not any(map(is_megatron, [nn.Linear(2, 2), [nn.Linear(2, 2)], [], None]))
    with pytest.raises(Unsupported, match="a Linear is no stage of a Megatron model"):
        bare([nn.Linear(2, 2)])
    with pytest.raises(Unsupported, match="no stages"):
        bare([])


def test_no_module_imports_megatron_when_it_is_imported():
    found = []
    for path in Path(colo.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path}:{node.lineno}" for name in names if name.split(".")[0] == "megatron"]
    assert found == []
