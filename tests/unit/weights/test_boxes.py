"""Boxes: which meet, what is left, recorded copies as boxes, and parts of weights that ranks hold."""

import math
from functools import partial
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from colo.errors import Unsupported
from colo.weights.boxes import Box, landings, parts_of, shard_of
from tests import forked


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


def on_every_rank(sizes, make):
    """What `make` returns, given a mesh, on each of several ranks that never answer; a process each."""

    def of_rank(rank):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(sizes))
        return make(init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("dp", "tp", "pp")[: len(sizes)]))

    return [forked.start(partial(of_rank, rank))() for rank in range(prod(sizes))]


def check_parts(whole, ranks, *, replicas=1):
    """Every part holds the elements that its box names, and all parts together hold each `replicas` times."""
    counts = torch.zeros(whole.shape, dtype=torch.int64)
    for rank, parts in enumerate(ranks):
        for part in parts:
            box = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
            assert part.rank == rank and torch.equal(part.tensor, whole[box])
            counts[box] += 1
    assert (counts == replicas).all()


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 3))
    placements = [draw(st.one_of(st.just(Replicate()), st.builds(Shard, dims), strided)) for _ in sizes]
    return shape, sizes, placements


@settings(max_examples=40)
@given(layouts())
def test_the_parts_of_all_ranks_are_the_tensor(layout):
    shape, sizes, placements = layout
    whole = torch.arange(prod(shape)).view(shape)

    def make(mesh):
        return parts_of("w", distribute_tensor(whole, mesh, placements, src_data_rank=None))

    replicas = prod(size for size, placement in zip(sizes, placements, strict=True) if placement.is_replicate())
    check_parts(whole, on_every_rank(sizes, make), replicas=replicas)


@pytest.mark.parametrize("rows", [8, 7, 5])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 3)])
def test_what_fsdp_and_tensor_parallelism_hold_is_the_model(sizes, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 6), nn.LayerNorm(6))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}

    def make(mesh):
        torch.manual_seed(0)
        own = nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 6), nn.LayerNorm(6))
        if mesh.ndim == 2:
            parallelize_module(own, mesh["tp"], plan, src_data_rank=None)
        fully_shard(own, mesh=mesh["dp"])
        return {name: parts_of(name, p) for name, p in own.named_parameters()}

    found = on_every_rank(sizes, make)
    for name, whole in model.named_parameters():
        is_cut_twice = name.startswith("0.") or name == "1.weight"
        replicas = sizes[1] if len(sizes) == 2 and not is_cut_twice else 1
        check_parts(whole.detach(), [of_rank[name] for of_rank in found], replicas=replicas)


def test_replicated_groups_of_ranks_hold_the_model_once_each():
    torch.manual_seed(0)
    whole = nn.Linear(3, 5)

    def make(mesh):
        own = nn.Linear(3, 5)
        own.load_state_dict(whole.state_dict())
        fully_shard(own, mesh=mesh)
        return parts_of("weight", own.weight)

    check_parts(whole.weight.detach(), on_every_rank((2, 2), make), replicas=2)


def test_a_plain_tensor_is_one_part_without_a_copy():
    tensor = torch.ones(3, 2)
    (part,) = parts_of("w", tensor)
    assert (part.offset, part.shape, part.rank) == ((0, 0), (3, 2), 0)
    assert part.tensor.data_ptr() == tensor.data_ptr()


def test_partial_sums_are_refused_by_name(mesh):
    with pytest.raises(Unsupported, match="w is a partial sum on each rank"):
        parts_of("w", DTensor.from_local(torch.ones(2), mesh, [Partial()]))


def test_a_part_of_another_shape_than_its_placement_says_is_refused(mesh):
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    tensor._local_tensor = torch.ones(3, 2)
    with pytest.raises(Unsupported, match=r"w has a part of shape \(3, 2\) here, and \(4, 2\) by"):
        parts_of("w", tensor)


def test_strided_shards_take_from_every_chunk():
    assert shard_of([(0, 8)], count=2, number=1, split_factor=2) == [(2, 4), (6, 8)]
    assert shard_of([(0, 4), (8, 12)], count=2, number=1) == [(8, 12)]
    assert shard_of([(0, 5)], count=4, number=3) == []
