"""Which tensor is named when log-probabilities are not numbers."""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from colo.weights import finite
from colo.weights.finite import first_not_finite, not_numbers

NAN = float("nan")


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_first_tensor_with_such_values_is_named_with_their_number(value, dtype):
    bad = torch.zeros(2, 3, dtype=dtype)
    bad[0, 1] = bad[1, 2] = value
    tensors = [("good", torch.ones(4)), ("bad", bad), ("worse", torch.full((3,), NAN))]
    assert first_not_finite(tensors) == "bad (2, 3) has 2 values that are NaN or infinite"


def test_finite_weights_codes_and_tensors_without_elements_are_passed_over():
    tensors = [("codes", torch.tensor([1, 255], dtype=torch.uint8)), ("none", torch.empty(0, 4)), ("w", torch.ones(3))]
    assert first_not_finite(tensors) is None
    assert first_not_finite([*tensors, ("bad", torch.tensor(NAN))]) == ("bad () has 1 values that are NaN or infinite")


def test_a_tensor_is_looked_at_to_its_end():
    long = torch.zeros(2, finite._CHUNK_ELEMENTS, dtype=torch.float16)[:, : finite._CHUNK_ELEMENTS // 2 + 1]
    long[0, 0] = long[1, -1] = NAN
    assert first_not_finite([("long", long)]) == f"long {tuple(long.shape)} has 2 values that are NaN or infinite"


def test_of_a_sharded_tensor_the_part_is_looked_at_and_the_whole_shape_is_told(mesh):
    sharded = distribute_tensor(torch.tensor([[1.0, NAN], [2.0, 3.0]]), mesh, [Shard(0)])
    assert first_not_finite([("w", sharded)]) == "w (2, 2) has 1 values that are NaN or infinite"


def test_the_message_has_the_culprit_or_says_that_there_is_none():
    assert "are not numbers: w has 1 values. Load weights that are finite" in not_numbers("w has 1 values")
    assert "are not numbers: every weight is finite, so that an activation has overflowed" in not_numbers(None)
