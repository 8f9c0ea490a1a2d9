"""TRL's trainer on two ranks that torchrun has started, each with an engine on its own replica of the weights."""

from pathlib import Path

import pytest

from colo.testing import tiny_checkpoint
from tests.trainers import ALPHABET

SCRIPT = Path(__file__).parent / "trl_ranks.py"
CLOSE = 1e-5


@pytest.fixture(scope="module", params=["vllm", "lora"])
def ranks(two_ranks, tmp_path_factory, request):
    """What both ranks have found, in order: by the flag on a vLLM each, or of an adapter on the embedded engine."""
    if request.param == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), alphabet=ALPHABET)
    return two_ranks(SCRIPT, checkpoint, request.param, timeout=1200)


def test_both_ranks_share_their_replica_and_end_with_the_same_weights(ranks):
    for found in ranks:
        assert found["wrapped"] == "DistributedDataParallel"
        assert found["shares"] and found["sent"] == 0
        assert found["same"] and found["changed"] and found["base"]
        assert (found["version"], found["closed"]) == (3, True)
        assert found["gap"] < CLOSE
    assert len(ranks[0]["rewards"]) == 3
    assert ranks[0]["evaluations"] >= 3


def test_ranks_draw_from_seeds_of_their_own(ranks):
    assert len(ranks[0]["drawn"]) >= 3
    assert ranks[0]["drawn"] != ranks[1]["drawn"]
