"""What ranks tell each other, and the plan of who sends what to whom."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.errors import TransferError
from colo.memory.specs import DTYPE_BYTES, TensorSpec
from colo.weights.boxes import Box, Slice
from colo.weights.exchange import Told, check_told, make_plan


def sent_bytes(plan, rank):
    """Bytes that `rank` sends to others."""
    return sum(delivery.num_bytes for bucket in plan.buckets for delivery in bucket if delivery.sender == rank)


def staged_bytes(plan, rank):
    """The most bytes that `rank` sends and receives in one bucket."""
    return max((sum(m.num_bytes for m in b if rank in (m.sender, m.receiver)) for b in plan.buckets), default=0)


def region(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


@st.composite
def partitions(draw, box, depth=3):
    """Boxes that together are one, each once."""
    dims = [dim for dim, size in enumerate(box.shape) if size > 1]
    if not depth or not dims or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.shape[dim] - 1))
    low = Box(box.offset, (*box.shape[:dim], at, *box.shape[dim + 1 :]))
    return [part for half in (low, *box.without(low)) for part in draw(partitions(half, depth=depth - 1))]


@st.composite
def worlds(draw):
    """Tensors, what ranks hold of them (each box on one rank or several), and what ranks take of them."""
    ranks = range(draw(st.integers(1, 4)))
    shapes = {name: draw(st.lists(st.integers(1, 6), max_size=3)) for name in "abc"[: draw(st.integers(1, 3))]}
    held, taken = {rank: [] for rank in ranks}, {rank: [] for rank in ranks}
    dtypes = st.sampled_from(["bfloat16", "float32"])
    for name, shape in shapes.items():
        whole, dtype = Box((0,) * len(shape), tuple(shape)), draw(dtypes)
        for box in draw(partitions(whole)):
            for rank in draw(st.sets(st.sampled_from(ranks), min_size=1)):
                held[rank].append(Slice(name, box, dtype))
        for rank in ranks:
            engines = draw(dtypes)
            boxes = draw(partitions(whole))
            taken[rank] += [Slice(name, box, engines) for box in boxes if draw(st.booleans())]
    return shapes, held, taken


@given(worlds(), st.integers(4, 64))
def test_every_element_arrives_once_and_is_the_right_one(world, bucket_bytes):
    shapes, held, taken = world
    plan = make_plan(held, taken, order=list(shapes), bucket_bytes=bucket_bytes)
    numbers = {name: torch.arange(torch.tensor(shape).prod()).view(shape) for name, shape in shapes.items()}
    arrived = {rank: [torch.full(shapes[p.name], -1) for p in slices] for rank, slices in taken.items()}
    for delivery in (*plan.local, *(delivery for bucket in plan.buckets for delivery in bucket)):
        source, target = held[delivery.sender][delivery.held], taken[delivery.receiver][delivery.taken]
        assert source.name == target.name
        assert source.box.meet(delivery.box) == delivery.box and target.box.meet(delivery.box) == delivery.box
        assert (arrived[delivery.receiver][delivery.taken][region(delivery.box)] == -1).all(), "written twice"
        arrived[delivery.receiver][delivery.taken][region(delivery.box)] = numbers[source.name][region(delivery.box)]
        assert DTYPE_BYTES[delivery.dtype] == min(DTYPE_BYTES[source.dtype], DTYPE_BYTES[target.dtype])
    for rank, slices in taken.items():
        for part, found in zip(slices, arrived[rank], strict=True):
            assert torch.equal(found[region(part.box)], numbers[part.name][region(part.box)])
    assert all(delivery.sender == delivery.receiver for delivery in plan.local)
    assert all(delivery.sender != delivery.receiver for bucket in plan.buckets for delivery in bucket)


@given(worlds(), st.integers(4, 64))
def test_what_a_rank_has_does_not_travel_and_buckets_are_bounded_on_every_rank(world, bucket_bytes):
    shapes, held, taken = world
    plan = make_plan(held, taken, order=list(shapes), bucket_bytes=bucket_bytes)
    for rank in held:
        assert staged_bytes(plan, rank) <= bucket_bytes
        expected = 0
        for wanted in taken[rank]:
            own = torch.zeros(shapes[wanted.name], dtype=torch.bool)
            for part in held[rank]:
                if part.name == wanted.name:
                    own[region(part.box)] = True
            trainers = next(p.dtype for slices in held.values() for p in slices if p.name == wanted.name)
            width = min(DTYPE_BYTES[trainers], DTYPE_BYTES[wanted.dtype])
            expected += int((~own[region(wanted.box)]).sum()) * width
        assert plan.received_bytes(rank) == expected
    assert sum(sent_bytes(plan, rank) for rank in held) == sum(map(plan.received_bytes, held))


def rows(name, start, count, dtype="bfloat16", width=4):
    return Slice(name, Box((start, 0), (count, width)), dtype)


def test_replicas_share_the_sending():
    names = [f"w{i}" for i in range(6)]
    held = {rank: [rows(name, 0, 8) for name in names] if rank < 3 else [] for rank in range(4)}
    taken = {rank: [rows(name, 0, 8) for name in names] if rank == 3 else [] for rank in range(4)}
    plan = make_plan(held, taken, order=names, bucket_bytes=1 << 20)
    assert [sent_bytes(plan, rank) for rank in range(4)] == [2 * 64, 2 * 64, 2 * 64, 0]
    assert plan.received_bytes(3) == 6 * 64


def test_equal_cuts_of_trainer_and_engine_send_nothing():
    held = {rank: [rows("w", 4 * rank, 4)] for rank in range(2)}
    plan = make_plan(held, held, order=["w"], bucket_bytes=64)
    assert plan.buckets == () and len(plan.local) == 2
    assert staged_bytes(plan, 0) == plan.received_bytes(1) == 0


def test_fp32_parts_travel_in_the_engines_dtype():
    held = {0: [rows("w", 0, 4, "float32")], 1: [rows("w", 4, 4, "float32")]}
    taken = {rank: [rows("w", 0, 8)] for rank in range(2)}
    plan = make_plan(held, taken, order=["w"], bucket_bytes=64)
    assert [plan.received_bytes(rank) for rank in range(2)] == [4 * 4 * 2] * 2


def test_weights_travel_in_order():
    held = {0: [rows("a", 0, 4), rows("b", 0, 4)], 1: []}
    taken = {0: [], 1: [rows("a", 0, 4), rows("b", 0, 4)]}
    plan = make_plan(held, taken, order=["b", "a"], bucket_bytes=32)
    assert [[held[0][delivery.held].name for delivery in bucket] for bucket in plan.buckets] == [["b"], ["a"]]


def test_what_no_rank_holds_and_what_is_unknown_is_named():
    held = {0: [rows("w", 0, 3)], 1: [rows("w", 3, 2)]}
    taken = {0: [rows("w", 0, 8)], 1: []}
    with pytest.raises(TransferError, match=r"holds 12 of the 32 elements of w that the engine of rank 0 takes, from "):
        make_plan(held, taken, order=["w"], bucket_bytes=64)
    with pytest.raises(TransferError, match="rank 0 takes w, which is no weight of the trainer"):
        make_plan(held, taken, order=["v"], bucket_bytes=64)


def test_empty_parts_hold_and_take_nothing():
    held = {0: [rows("w", 0, 2)], 1: [rows("w", 2, 0)]}
    taken = {0: [], 1: [rows("w", 0, 2), rows("w", 0, 0)]}
    plan = make_plan(held, taken, order=["w"], bucket_bytes=64)
    assert [len(bucket) for bucket in plan.buckets] == [1] and plan.received_bytes(1) == 16


A, B, C = (TensorSpec(name, "float32", (4, 2)) for name in "abc")


def told(*specs, held=()):
    return Told(tuple(specs), tuple(held), ())


def part(name, offset, shape, dtype="float32"):
    return Slice(name, Box(offset, shape), dtype)


def test_ranks_that_have_parts_of_the_same_weights_agree():
    check_told({0: told(A, B, held=[part("a", (0, 0), (2, 2))]), 3: told(A, B, held=[part("b", (3, 1), (1, 1))])})


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((A,), "b is missing"),
        ((A, B, C), "c is one more"),
        ((A, B, B), "a weight is named twice"),
        ((B, A), "they are in another order"),
        ((A, TensorSpec("b", "bfloat16", (4, 2))), "b is (4, 2) in bfloat16, not (4, 2) in float32"),
        ((A, TensorSpec("b", "float32", (4, 3))), "b is (4, 3) in float32, not (4, 2) in float32"),
    ],
)
def test_other_weights_than_those_of_the_first_rank_are_named(second, words):
    with pytest.raises(TransferError) as caught:
        check_told({1: told(A, B), 2: told(*second)})
    assert str(caught.value) == f"rank 2 has other weights than rank 1: {words}"


def test_a_name_that_the_first_rank_has_twice_is_named():
    with pytest.raises(TransferError, match="the weights of rank 0 cannot travel: .*'?a'?"):
        check_told({0: told(A, A), 1: told(A, A)})


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (part("z", (0,), (1,)), "rank 1 holds a part of z, which is no weight of the trainer"),
        (part("a", (3, 0), (2, 2)), "rank 1 holds (2, 2) of a at (3, 0) in float32, which is (4, 2) in float32"),
        (part("a", (0,), (4,)), "rank 1 holds (4,) of a at (0,) in float32, which is (4, 2) in float32"),
        (part("a", (0, 0), (1, 1), "bfloat16"), "rank 1 holds (1, 1) of a at (0, 0) in bfloat16, which is (4, 2) in"),
    ],
)
def test_a_part_that_is_none_of_its_weight_is_named(held, words):
    with pytest.raises(TransferError) as caught:
        check_told({0: told(A), 1: told(A, held=[held])})
    assert words in str(caught.value)
