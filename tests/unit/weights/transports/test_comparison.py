"""The comparison of digests: what differs is found on every rank, in engines and in parts that several ranks hold."""

import torch
from torch import distributed

from colo.memory.copy_plan import CopyPlan
from colo.weights.boxes import Box, PlacedPart, Slice
from colo.weights.exchange import ExchangePlan, make_plan
from colo.weights.ranks import RankGroup
from colo.weights.transports.slices import Comparison, Differences

CPU = torch.device("cpu")
BOXES = {  # of which ranks hold what
    0: [("whole", (0,), (5,)), ("cut", (0, 0), (2, 3)), ("two", (0, 0), (2, 2)), ("empty", (0,), (0,))],
    1: [("cut", (2, 0), (2, 3)), ("two", (0, 0), (2, 2)), ("whole", (0,), (5,)), ("empty", (0,), (0,))],
    2: [("whole", (0,), (5,)), ("two", (0, 1), (2, 2))],
}


NOTHING = Differences(failed=False, different=[], apart=[])


def held():
    return {rank: [Slice(n, Box(o, s), "bfloat16") for n, o, s in boxes] for rank, boxes in BOXES.items()}


def all_ranks():
    return RankGroup.of(distributed.group.WORLD, CPU)


def parts_of(rank):
    """Parts whose values are the same on every rank; some are no whole words, or no row of elements."""
    found = []
    for name, offset, shape in BOXES[rank]:
        values = torch.arange(float(torch.tensor(shape).prod())).view(shape).to(torch.bfloat16)
        tensor = values.t().contiguous().t() if rank == 1 and len(shape) == 2 else values
        found.append(PlacedPart(name, offset, shape, rank, tensor))
    return found


def test_a_difference_between_replicas_is_named_on_every_rank_and_parts_of_one_rank_alone_are_no_replicas(ranks):
    def body(rank):
        comparison, said = Comparison(ExchangePlan(buckets=(), local=()), held(), all_ranks()), []
        parts = parts_of(rank)

        def apart():
            shared = [parts[index].tensor for index in comparison.shared]
            found = comparison.of([CopyPlan([(part, part) for part in shared]).digests()])
            assert not found.failed and not found.different
            return found.apart

        said.append(apart())
        for name, changed in (("cut", 1), ("whole", 2), ("two", 0)):
            if rank == changed:
                tensor = next(part for part in parts if part.name == name).tensor
                tensor[(-1,) * tensor.dim()] += 1
            said.append(apart())
        return said

    whole, two = "whole on ranks 0, 1, 2", "two on ranks 0, 1"
    assert ranks(body, 3) == [[[], [], [whole], [whole, two]]] * 3


def test_what_an_engine_lacks_is_known_to_all(ranks):
    """Rank 2 takes all of "cut" from the other two, rank 0 its own half."""
    taken = {
        0: [Slice("cut", Box((0, 0), (2, 3)), "float32")],
        1: [],
        2: [Slice("cut", Box((0, 0), (4, 3)), "float32")],
    }

    def body(rank):
        plan = make_plan(held(), taken, order=["cut"], bucket_bytes=1 << 20)
        comparison, said = Comparison(plan, {r: [] for r in held()}, all_ranks()), []
        sent = torch.tensor([100 + d.box.offset[0] for d in plan.every if d.sender == rank], dtype=torch.int64)
        there = torch.tensor([100 + d.box.offset[0] for d in plan.every if d.receiver == rank], dtype=torch.int64)
        for changed in (None, 0, 2):
            other = there + 7 if rank == changed else there
            found = comparison.of([sent, other])
            said.append((found.failed, [(d.receiver, d.taken) for d in found.different]))
        return said

    assert ranks(body, 3) == [[(False, []), (False, [(0, 0)]), (False, [(2, 0), (2, 0)])]] * 3


def test_a_rank_without_digests_has_failed_for_all(ranks):
    def body(rank):
        comparison = Comparison(ExchangePlan(buckets=(), local=()), held(), all_ranks())
        found = comparison.of(None if rank == 1 else [torch.zeros(len(comparison.shared), dtype=torch.int64)])
        return found.failed, found.different

    assert ranks(body, 3) == [(True, [])] * 3


def test_a_rank_alone_compares_its_own():
    alone = Comparison(ExchangePlan(buckets=(), local=()), {0: [Slice("w", Box((0,), (1,)), "float32")]}, RankGroup())
    assert alone.of([]) == NOTHING
    assert alone.of(None) == Differences(failed=True, different=[], apart=[])
