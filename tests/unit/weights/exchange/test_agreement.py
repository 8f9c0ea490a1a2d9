"""What ranks tell each other of their weights: whatever does not fit together is named, with its rank."""

import pytest

from colo.errors import TransferError
from colo.memory.specs import TensorSpec
from colo.weights.boxes import Box
from colo.weights.exchange.plan import Slice, Told, check_told

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
