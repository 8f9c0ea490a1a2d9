"""TRL's trainer on two ranks that torchrun has started, whose model accelerate's FSDP2 plugin shards."""

from pathlib import Path

import pytest

from colo.testing import tiny_checkpoint
from tests.trainers import ALPHABET

SCRIPT = Path(__file__).parent / "trl_sharded.py"
CLOSE = {"masters": 2e-3, "lora": 1e-5}
"""Largest gap of log-probabilities, in bf16 and in fp32: on CPUs without instructions for bf16 the rounding of a
product depends on how many rows it has."""


@pytest.fixture(scope="module")
def both(two_ranks, tmp_path_factory):
    """What both ranks have found, in order."""
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), alphabet=ALPHABET)
    return two_ranks(SCRIPT, checkpoint)


@pytest.fixture(params=["masters", "lora"])
def ranks(both, request):
    """Of weights in bf16 with fp32 masters, or of an adapter."""
    return [runs[request.param] | {"close": CLOSE[request.param]} for runs in both]


def test_engines_get_slices_of_the_weights_and_sample_from_what_was_trained(ranks):
    assert len(ranks[0]["rewards"]) == 3
    for found in ranks:
        assert found["transport"] == "slices"
        assert len(found["gaps"]) == 3 and max(found["gaps"]) < found["close"]
        assert found["version"] == 3
        assert found["changed"] == found["trained"] > 0
        assert found["sum"] == ranks[0]["sum"]
        assert found["gap"] < found["close"]


def test_each_rank_parks_its_part_of_the_state(ranks):
    for found in ranks:
        assert 0 < found["away"] < sum(theirs["away"] for theirs in ranks)


def test_what_is_saved_is_whole_and_a_resumed_run_is_bit_equal(ranks):
    for found in ranks:
        assert found["saved"] and found["resumed"]
