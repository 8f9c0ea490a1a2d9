"""A trainer of two ranks, which torchrun has started, whose weights FSDP2 has sharded, and an engine for each."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sharded.py"
CLOSE = 1e-5
SLICED = "cannot be shared: it is sharded over the trainer's ranks, and engines take other parts; of 24 recorded copies"


@pytest.fixture(scope="module")
def ranks(two_ranks):
    """What both ranks have found, in order."""
    return two_ranks(SCRIPT)


def test_every_rank_samples_from_the_weights_of_all(ranks):
    for found in ranks:
        assert found["transport"] == "slices"
        assert SLICED in found["reason"]
        assert max(found["gaps"]) < CLOSE
        num_bytes, publications = found["synced"]
        assert num_bytes == publications * found["whole"]


def test_training_is_bit_for_bit_what_it_is_without_colo(ranks):
    for found in ranks:
        assert found["same"] == [True] * 4
        assert found["snapshot"]


def test_every_rank_parks_its_parts_of_state_and_gradients(ranks):
    assert sum(found["parts"] for found in ranks) == ranks[0]["whole"]
    assert ranks[0]["parts"] > ranks[1]["parts"]  # 101 rows do not divide evenly
    for found in ranks:
        parameters, state = found["bytes"]
        assert parameters == found["parts"]
        assert state >= 2 * found["parts"]
        assert found["away"][0] == ["discarded", 0]
        assert [residency for residency, _ in found["away"][1:]] == ["offloaded"] * 2
        assert min(host_bytes for _, host_bytes in found["away"][1:]) >= state
        assert found["gradients_away"]


def test_room_for_two_buckets_is_kept_free(ranks):
    for found in ranks:
        assert 16 << 10 < found["working"] <= 2 * (16 << 10) + 4 * 16  # aligned, a message for each direction


def test_every_rank_receives_what_lies_in_the_other_and_no_more(ranks):
    for found in ranks:
        received, planned = found["received"]
        assert planned == found["whole"] - found["parts"]
        assert received == found["synced"][1] * planned


def test_a_backward_pass_within_a_rollout_is_refused_in_every_rank(ranks):
    for found in ranks:  # and what follows is bit for bit the same
        assert found["refused"] == (
            "PhaseError: backward() inside rollout(): leave the block first, then use `with rt.train():`"
        )


def test_the_gap_is_measured_where_ranks_have_sampled_different_numbers_of_completions(ranks):
    assert [found["mismatches"] for found in ranks] == [4, 4]


def test_what_fails_in_one_rank_fails_in_both_and_is_mended_by_the_next_rollout(ranks):
    refuses = "PhaseError: rank 1 refuses"
    stumbles, in_rollout, differs, in_train = ranks[1]["failures"][::2]
    assert [stumbles, in_rollout, in_train] == ["ValueError: rank 1 stumbles", refuses, refuses]
    assert "tensors differ after the transfer, a weight for one" in differs
    operations = [
        "sending slices of the weights",
        "making room to compare weights",
        "publishing version 6",
        "entering a training phase",
    ]
    for operation, here, there in zip(operations, *(found["failures"][::2] for found in ranks), strict=True):
        assert here == f"TransferError: {operation} failed on rank 1: {there}"
    for found in ranks:
        assert max(found["failures"][1::2]) < CLOSE
        assert found["phases"] == ["idle"] * 2, "no phase is entered that another rank has refused"


def test_a_write_to_what_lies_in_one_rank_reaches_both_engines(ranks):
    for found in ranks:
        versions, gap, _ = found["writes"]
        assert (versions, gap < CLOSE) == (2, True)


def test_a_write_within_a_rollout_that_torch_does_not_count_is_refused(ranks):
    for found in ranks:
        refused, still = found["writes"][2]
        assert "StaleWeights: what lies in this rank of the weights is not what was published" in refused
        assert "StaleWeights" in still
