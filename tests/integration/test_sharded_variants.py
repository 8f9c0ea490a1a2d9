"""FSDP2 as people write it, with masters, adapters, gradients not reduced yet, accelerate's plugin; two ranks."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sharded_variants.py"
CLOSE = 1e-5


@pytest.fixture(scope="module")
def ranks(two_ranks):
    """What both ranks have found, in order."""
    return two_ranks(SCRIPT)


def test_16_bit_weights_with_masters_are_trained_as_unsharded_ones_and_half_the_bytes_travel(ranks):
    for found in ranks:
        assert found["masters"]["same"] == [True] * 3
        assert found["masters"]["masters"]
        assert found["masters"]["away"] == [0] * 3
        received, expected = found["masters"]["received"]
        assert received == expected


def test_a_sharded_adapter_is_trained_as_an_unsharded_one_and_reaches_every_engine(ranks):
    for found in ranks:
        assert found["adapters"]["same"] == [True] * 3
        assert len(found["adapters"]["gaps"]) == 4
        assert max(found["adapters"]["gaps"]) < CLOSE
        adapter_bytes, first, *others = found["adapters"]["adapter"]
        assert first > adapter_bytes and others == [adapter_bytes] * 2


@pytest.mark.parametrize("policy", ["plain", "mixed"])
def test_whole_gradients_that_are_not_reduced_yet_are_counted_parked_and_come_back(ranks, policy):
    for found in ranks:
        of_policy = found["unreduced"][policy]
        assert of_policy["same"]
        assert of_policy["whole"] == of_policy["expected"]  # in fp32, whole, on every rank
        assert of_policy["away"] == 0
        assert of_policy["host"] >= of_policy["expected"]


def test_what_accelerates_fsdp2_plugin_prepares_is_taken_as_it_is(ranks):
    for found in ranks:
        of_accelerate = found["accelerated"]
        assert of_accelerate["kinds"] == ["FSDPQwen3ForCausalLM", "AcceleratedOptimizer", "slices"]
        assert of_accelerate["same"] == [True] * 3
        assert max(of_accelerate["gaps"]) < CLOSE
        assert of_accelerate["away"] == 0


def test_what_does_not_fit_on_one_rank_is_refused_on_all(ranks):
    here, there = (found["admission"] for found in ranks)
    assert there.startswith("BudgetError: ")
    assert here == f"TransferError: planning the phases failed on rank 1: {there}"


def test_ranks_of_which_one_caught_an_exception_alone_and_skipped_a_phase_are_told_at_once(ranks):
    (here, gap), (there, other_gap) = (found["out_of_step"] for found in ranks)
    assert "out of step: this one, rank 0, is at 'entering a training phase', and others are elsewhere" in here[0]
    assert there[0] == "ValueError"
    assert "out of step: this one, rank 1, is at 'entering a rollout', and others are elsewhere" in there[1]
    assert max(gap, other_gap) < CLOSE
