"""Parts that several ranks hold: who holds which is known to all, and values that differ are found on every rank."""

import torch
from torch import distributed

from colo.weights.boxes import Box
from colo.weights.exchange.plan import Slice
from colo.weights.exchange.replicas import Replicas
from colo.weights.ranks import RankGroup
from colo.weights.sources.parts import PlacedPart

CPU = torch.device("cpu")
BOXES = {  # of which ranks hold what
    0: [("whole", (0,), (5,)), ("cut", (0, 0), (2, 3)), ("two", (0, 0), (2, 2)), ("empty", (0,), (0,))],
    1: [("cut", (2, 0), (2, 3)), ("two", (0, 0), (2, 2)), ("whole", (0,), (5,)), ("empty", (0,), (0,))],
    2: [("whole", (0,), (5,)), ("two", (0, 1), (2, 2))],
}


def replicas():
    held = {rank: [Slice(n, Box(o, s), "bfloat16") for n, o, s in boxes] for rank, boxes in BOXES.items()}
    return Replicas(held, RankGroup.of(distributed.group.WORLD, CPU))


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
        compared, said = replicas(), []
        parts = parts_of(rank)
        said.append(compared.apart(parts, CPU))
        for name, changed in (("cut", 1), ("whole", 2), ("two", 0)):
            if rank == changed:
                tensor = next(part for part in parts if part.name == name).tensor
                tensor[(-1,) * tensor.dim()] += 1
            said.append(compared.apart(parts, CPU))
        return said

    whole, two = "whole on ranks 0, 1, 2", "two on ranks 0, 1"
    assert ranks(body, 3) == [[[], [], [whole], [whole, two]]] * 3


def test_ranks_that_hold_different_parts_compare_nothing():
    alone = Replicas({0: [Slice("w", Box((0,), (1,)), "float32")], 1: []}, RankGroup())
    assert alone.apart([], CPU) == []
