"""What ranks hold of sharded tensors. Ranks are asked one after another: cutting asks no other."""

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
from colo.weights.sources.placed import parts_of, shard_of
from tests import forked


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


@settings(deadline=None, max_examples=40)
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
