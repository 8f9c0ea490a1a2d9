"""Weights that are gathered in turn: in this process alone, and in two ranks, each a process forked from this one."""

import weakref

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from colo.errors import TransferError
from colo.weights.ranks import RankGroup
from colo.weights.sources.base import Gathered


def whole():
    return {"a": torch.arange(6.0).view(3, 2), "plain": torch.ones(2), "b": torch.arange(5.0), "c": torch.ones(4)}


def sharded(mesh):
    return {n: t if n == "plain" else distribute_tensor(t, mesh, [Shard(0)]) for n, t in whole().items()}


def test_every_rank_has_whole_weights_in_turn_and_the_rest_is_gathered_for_the_others(both):
    def body(rank):
        with Gathered(sharded(init_device_mesh("cpu", (2,)))) as gathered:
            found = {name: gathered[name] for name in (["a", "b"] if rank else ["a", "plain", "b", "c"])}
        return {name: tensor.tolist() for name, tensor in found.items()}

    expected = {name: tensor.tolist() for name, tensor in whole().items()}
    one, other = both(body)
    assert one == expected
    assert other == {name: expected[name] for name in ("a", "b")}


def test_a_failure_in_one_rank_is_told_in_the_others_and_the_next_block_is_in_step(both):
    def body(rank):
        mesh, said = init_device_mesh("cpu", (2,)), []
        for order in (None, ()):
            try:
                with Gathered(sharded(mesh), order=order) as gathered:
                    if rank:
                        raise ValueError("tested")
                    if order is None:
                        assert len(gathered["b"]) == 5
            except (ValueError, TransferError) as error:
                said.append(str(error))
        with Gathered(sharded(mesh)) as gathered:
            return said, gathered["b"].tolist()

    one, other = both(body)
    assert one == (["gathering the weights failed on rank 1: ValueError: tested"] * 2, [0, 1, 2, 3, 4])
    assert other == (["tested"] * 2, [0, 1, 2, 3, 4])


def test_the_smallest_count_is_that_of_all_ranks_along_every_dimension(both):
    def body(rank):
        flat, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
        one = distribute_tensor(torch.ones(4), flat, [Shard(0)])
        other = distribute_tensor(torch.ones(4), square, [Replicate(), Shard(0)])
        groups = [RankGroup([one]), RankGroup([torch.ones(1), other]), RankGroup([torch.ones(1)])]
        return tuple(group.min(count) for group, count in zip(groups, (7 + rank, 9 - rank, rank), strict=True))

    assert both(body) == [(7, 8, 0), (7, 8, 1)]


def test_what_is_not_sharded_is_there_as_it_is_in_any_order(mesh):
    tensors = sharded(mesh)
    with Gathered(tensors) as gathered:
        assert gathered["plain"] is tensors["plain"]
        assert torch.equal(gathered["b"], whole()["b"])
        assert gathered["plain"] is tensors["plain"]
        assert list(gathered) == list(tensors) and len(gathered) == 4


def test_a_weight_is_kept_until_the_next_one_is_asked_for(mesh):
    with Gathered(sharded(mesh), order=["b", "a"]) as gathered:
        first = gathered["b"]
        assert gathered["b"] is first
        assert torch.equal(gathered["a"], whole()["a"])
        with pytest.raises(IndexError):
            gathered["b"]  # whose turn has passed


def test_nothing_is_kept_after_the_block(mesh):
    with Gathered(sharded(mesh), order=["a"]) as gathered:
        last = weakref.ref(gathered["a"])
        assert last() is not None
    assert last() is None


def test_whole_weights_are_no_part_of_a_graph(mesh):
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    with Gathered({"w": parameter}) as gathered:
        assert not gathered["w"].requires_grad


def test_a_rank_in_which_a_gathering_fails_takes_part_in_none_that_follows(mesh, monkeypatch):
    asked = []

    def fail(tensor):
        asked.append(tensor)
        raise RuntimeError("tested")

    tensors = sharded(mesh)
    monkeypatch.setattr(DTensor, "full_tensor", fail)
    with pytest.raises(RuntimeError, match="tested"), Gathered(tensors) as gathered:
        gathered["a"]
    assert len(asked) == 1


def test_after_an_interrupt_nothing_is_gathered(mesh):
    with pytest.raises(KeyboardInterrupt), Gathered(sharded(mesh)):
        distributed.destroy_process_group()  # without which nothing can be gathered
        raise KeyboardInterrupt
