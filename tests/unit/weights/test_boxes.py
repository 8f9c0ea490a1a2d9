"""Boxes of elements, and any copy of a loader's as boxes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.errors import Unsupported
from colo.weights.boxes import Box, landings


@st.composite
def boxes(draw, shape):
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offset, tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True)))


def elements(box):
    return torch.cartesian_prod(*(torch.arange(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))).tolist()


@given(st.data())
def test_boxes_meet_and_leave_what_sets_of_their_elements_do(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3))
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    sets = [{tuple(e) for e in elements(box)} for box in (one, other)]
    met = one.meet(other)
    assert ({tuple(e) for e in elements(met)} if met else set()) == sets[0] & sets[1]
    if met:
        rest = [tuple(e) for box in one.without(met) for e in elements(box)]
        assert sorted(rest) == sorted(sets[0] - sets[1])


@given(st.data(), st.integers(1, 30))
def test_a_box_is_cut_into_small_ones_in_order(data, num_elements):
    box = data.draw(boxes(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3))))
    parts = list(box.cut(num_elements))
    assert all(part.num_elements <= num_elements for part in parts)
    assert [e for part in parts for e in elements(part)] == elements(box)


@st.composite
def views(draw, tensor):
    """What a loader may do to a tensor before it copies it."""
    for _ in range(draw(st.integers(0, 4))):
        kinds = ["flatten", "t"] + (["narrow", "select", "step", "split"] if tensor.dim() and tensor.numel() else [])
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, max(0, tensor.dim() - 1)))
        size = tensor.shape[dim] if tensor.dim() else 1
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "select":
            tensor = tensor.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 3))),)]
        elif kind == "split" and size % 2 == 0 and size:
            tensor = tensor.unflatten(dim, (2, size // 2))
        elif kind == "t" and tensor.dim() > 1:
            tensor = tensor.transpose(0, dim)
        elif kind == "flatten" and tensor.is_contiguous():
            tensor = tensor.view(-1)
    return tensor


@given(st.data())
def test_any_copy_puts_the_same_elements_to_the_same_places_box_by_box(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3))
    tensor = torch.arange(1, math.prod(shape) + 1).view(shape)
    if len(shape) > 1 and data.draw(st.booleans()):
        tensor = tensor.t() if len(shape) == 2 else tensor.transpose(0, 2)
    source = data.draw(views(tensor))
    memory = torch.zeros(3 + 2 * source.numel(), dtype=torch.int64)
    target = data.draw(st.sampled_from([memory[3 : 3 + source.numel()].view(source.shape), None]))
    if target is None:  # every second element
        target = memory[3:].as_strided(source.shape, [2 * s for s in torch.empty(source.shape).stride()])
    expected = memory.clone()
    expected.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
    found = landings(
        (tensor.shape, tensor.stride()),
        source.shape,
        (source.stride(), target.stride()),
        (source.storage_offset(), target.storage_offset()),
    )
    written = torch.zeros_like(memory)
    for landing in found:
        region = tensor[tuple(slice(o, o + n) for o, n in zip(landing.box.offset, landing.box.shape, strict=True))]
        offset, size, stride = landing.of(landing.box)
        memory.as_strided(size, stride, offset).copy_(region)
        written.as_strided(size, stride, offset).add_(1)
    assert torch.equal(memory, expected)
    assert int(written.max()) <= 1 and int(written.sum()) == source.numel()


def test_usual_copies_are_one_box_each():
    experts = ((4, 6, 8), (48, 8, 1))
    matrix = landings(experts, (3, 8), ((8, 1), (8, 1)), (2 * 48 + 3 * 8, 0))  # the up projection of one of them
    assert [landing.box for landing in matrix] == [Box((2, 3, 0), (1, 3, 8))]
    flat = landings(experts, (192,), ((1,), (1,)), (0, 7))
    assert [(landing.box, landing.offset) for landing in flat] == [(Box((0, 0, 0), (4, 6, 8)), 7)]
    columns = landings(((6, 8), (8, 1)), (6, 4), ((8, 1), (4, 1)), (4, 0))
    assert [landing.box for landing in columns] == [Box((0, 4), (6, 4))]
    assert columns[0].of(Box((2, 5), (3, 2))) == (9, (3, 2), (4, 1))


def test_gaps_are_refused_and_so_is_what_lies_outside():
    with pytest.raises(Unsupported, match=r"shape \(4, 3\) has strides \(6, 2\), with gaps"):
        landings(((4, 3), (6, 2)), (4, 3), ((6, 2), (3, 1)), (0, 0))
    with pytest.raises(ValueError, match="reads element 12 of a tensor of 12"):
        landings(((4, 3), (3, 1)), (3,), ((1,), (1,)), (12, 0))
