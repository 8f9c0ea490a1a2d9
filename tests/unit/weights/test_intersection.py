"""Pieces of a tensor reach exactly the elements that a copy of the whole would have written."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import Unsupported
from colo.memory.load_plan import Copy
from colo.weights.intersection import intersect


@st.composite
def copies(draw):
    """A contiguous source, and a copy of some of its rows and columns into a part of other memory."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    source = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
    region = source[top : draw(st.integers(top + 1, rows)), left : draw(st.integers(left + 1, columns))]
    wide = torch.full((region.shape[0] + 1, region.shape[1] + draw(st.integers(0, 3))), -1.0)
    target = wide[1:, : region.shape[1]]
    copy = Copy(
        name="w",
        shape=tuple(region.shape),
        stride=tuple(region.stride()),
        offset=int(region.storage_offset()),
        target=target,
    )
    cuts = sorted({0, source.numel(), *draw(st.lists(st.integers(0, source.numel()), max_size=6))})
    return source, region, wide, copy, cuts


@settings(max_examples=400, deadline=None)
@given(copies())
def test_pieces_write_what_one_copy_would_each_element_once(given):
    source, region, wide, copy, cuts = given
    expected = wide.clone()
    expected[1:, : region.shape[1]] = region
    written = 0
    for start, stop in pairwise(cuts):
        piece = torch.full((stop - start + 5,), -7.0)[3:-2]  # memory that begins elsewhere
        piece.copy_(source.view(-1)[start:stop])
        for target, part in intersect(copy, start, piece):
            assert target.shape == part.shape
            target.copy_(part)
            written += target.numel()
    assert torch.equal(wide, expected)
    assert written == region.numel()


def test_several_dimensions_that_lie_in_a_row_are_one():
    source, target = torch.arange(24.0), torch.zeros(2, 3, 4)
    copy = Copy(name="w", shape=(2, 3, 4), stride=(12, 4, 1), offset=0, target=target)
    for start in (0, 7, 20):
        stop = {0: 7, 7: 20, 20: 24}[start]
        for part, piece in intersect(copy, start, source[start:stop].clone()):
            part.copy_(piece)
    assert torch.equal(target.view(-1), source)


def test_a_region_that_is_not_made_of_rows_is_refused():
    source = torch.arange(12.0).view(3, 4)
    turned = source.t()
    copy = Copy(name="w", shape=(4, 3), stride=tuple(turned.stride()), offset=0, target=torch.zeros(4, 3))
    with pytest.raises(Unsupported, match="w is not copied by rows"):
        intersect(copy, 0, source.view(-1))
