"""The first tensor that is to blame, and how it is named."""

import math

import pytest
import torch

from colo.weights import finite
from colo.weights.finite import first_not_finite, not_numbers


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(finite, "_CHUNK_ELEMENTS", 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_with_such_values_is_named_with_how_many_it_has(dtype, value):
    bad, worse = torch.zeros(3, 5, dtype=dtype), torch.full((2,), value)
    bad[0, 1] = bad[2, 3] = bad[2, 4] = value
    good = [("integers", torch.arange(4)), ("nothing", torch.zeros(0)), ("numbers", torch.randn(9, requires_grad=True))]
    found = first_not_finite([*good, ("bad", bad), ("worse", worse)])
    assert found == "bad (3, 5) has 3 values that are NaN or infinite"
    assert first_not_finite(good) is None
    assert first_not_finite([("columns", bad.t())]) == "columns (5, 3) has 3 values that are NaN or infinite"


def test_the_message_names_the_culprit_or_says_that_there_is_none():
    assert "not numbers: w (2,) has 1 values. Load weights that are finite" in not_numbers("w (2,) has 1 values")
    assert "not numbers: every weight is finite, so that an activation has overflowed" in not_numbers(None)
