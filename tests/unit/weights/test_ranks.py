"""What ranks decide together: of this process alone, and of two processes forked from it."""

import os

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from colo.errors import TransferError
from colo.weights.ranks import RankGroup


def group_of_two(*, square=False):
    """Ranks along the last dimension of their mesh; a tensor of this process alone does not count."""
    mesh = init_device_mesh("cpu", (1, 2) if square else (2,))
    placements = [Replicate(), Shard(0)] if square else [Shard(0)]
    return RankGroup([torch.ones(1), distribute_tensor(torch.ones(4), mesh, placements)])


def test_without_sharded_tensors_nobody_is_asked():
    for group in (RankGroup(), RankGroup([torch.ones(2)])):
        assert group.is_alone
        assert group.min(7) == 7
        assert group.any(True) is True and group.any(False) is False
        with group.fail_together("testing"):
            pass
        with pytest.raises(ValueError, match="mine"), group.fail_together("testing"):
            raise ValueError("mine")


def test_one_rank_of_a_sharded_model_agrees_with_itself(mesh):
    group = RankGroup([distribute_tensor(torch.ones(4), mesh, [Shard(0)])])
    assert not group.is_alone
    assert group.min(7) == 7
    assert group.any(True) is True and group.any(False) is False
    group.report_failure("testing", None)
    group.report_failure("testing", ValueError("mine"))  # which the caller raises


@pytest.mark.parametrize("square", [False, True])
def test_ranks_agree_along_every_dimension_of_their_meshes(both, square):
    def body(rank):
        group = group_of_two(square=square)
        counts = group.min(7 + rank), group.min(9 - rank), group.min(0)
        return counts, [group.any(flag) for flag in (False, True, rank == 0, rank == 1)]

    assert both(body) == [((7, 8, 0), [False, True, True, True])] * 2


@pytest.mark.parametrize("square", [False, True])
def test_a_block_fails_on_every_rank_if_it_fails_on_one(both, square):
    def body(rank):
        group, said = group_of_two(square=square), []
        for failing in ((), (1,), (0,), (0, 1)):
            try:
                with group.fail_together("baking"):
                    if rank in failing:
                        raise KeyError(f"flour of {rank}")
                said.append("done")
            except (KeyError, TransferError) as error:
                said.append(f"{type(error).__name__}: {error.args[0]}")
        return said

    one, other = both(body)
    first, second = (f"TransferError: baking failed on rank {rank}: KeyError: 'flour of {rank}'" for rank in (0, 1))
    assert one == ["done", second, "KeyError: flour of 0", "KeyError: flour of 0"]
    assert other == ["done", "KeyError: flour of 1", first, "KeyError: flour of 1"]


def test_an_interrupt_of_one_rank_is_not_told(mesh):
    group = RankGroup([distribute_tensor(torch.ones(4), mesh, [Shard(0)])])
    torch.distributed.destroy_process_group()  # without which nothing can be told
    with pytest.raises(KeyboardInterrupt), group.fail_together("testing"):
        raise KeyboardInterrupt


def test_ranks_that_are_at_different_points_are_told_at_once_and_can_go_on(both):
    def body(rank):
        group, said = group_of_two(), []
        for operations in (["baking 1", "baking 2"], ["baking", "eating"], ["baking", ""], ["eating", "eating"]):
            try:
                with group.fail_together(operations[rank]):
                    pass
                said.append("done")
            except TransferError as error:
                said.append(str(error).partition(", and")[0])
        return said

    words = "the trainer's ranks are out of step: this one, rank {}, is at {!r}"
    here, there = both(body)
    assert here == ["done", words.format(0, "baking"), words.format(0, "baking"), "done"]
    assert there == ["done", words.format(1, "eating"), words.format(1, "a comparison"), "done"]


def test_a_group_of_processes_agrees_without_any_tensor(ranks):
    def body(rank):
        group = RankGroup.of(distributed.new_group([0, 2]), torch.device("cpu"))
        if rank == 1:
            return None
        return group.min(5 + rank), group.gather(f"rank {rank}"), group.is_alone, group.rank == rank

    first, _, last = ranks(body, 3)
    assert first == last == (5, {0: "rank 0", 2: "rank 2"}, False, True)


def test_what_ranks_gather_comes_by_rank_along_every_dimension(both):
    assert both(lambda rank: group_of_two(square=True).gather(rank + 7)) == [{0: 7, 1: 8}] * 2
    assert RankGroup().gather("mine") == {0: "mine"}


def test_rows_of_numbers_come_by_rank_once_each_along_every_dimension(both):
    def body(rank):
        group = group_of_two(square=True)
        return [group.rows(torch.tensor([3 - rank, n])).tolist() for n in (0, 1)]

    assert both(body) == [[[[3, 0], [2, 0]], [[3, 1], [2, 1]]]] * 2
    assert RankGroup().rows(torch.tensor([7])).tolist() == [[7]]


def test_a_rank_that_has_ended_is_told_by_where_the_others_were(both):
    def body(rank):
        group = group_of_two()
        if rank:
            os._exit(1)
        with pytest.raises(TransferError) as caught:
            group.min(1, "entering a rollout")
        return str(caught.value)

    here, there = both(body)
    assert there is None
    assert here.startswith("rank 0 has lost the others at 'entering a rollout': ")
    assert here.endswith("Another rank of the trainer has ended or is too late; its own output says why")
