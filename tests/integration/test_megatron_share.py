"""`colo.share` of Megatron's stages on two ranks: they train as without colo, and engines sample as transformers."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("wants Megatron: pip install 'colo-rl[megatron]'", allow_module_level=True)

SCRIPT = Path(__file__).parent / "megatron_share.py"
CASES = ["replicas", "virtual stages", "experts", "further tokens", "torch's"]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def ranks(two_ranks):
    """What both ranks have found, in order."""
    return two_ranks(SCRIPT)


@pytest.mark.parametrize("case", CASES)
def test_engines_sample_from_what_the_stages_have_become(ranks, case):
    for found in (rank[case] for rank in ranks):
        assert found["transport"] == "slices"
        assert len(found["gaps"]) == 3 and max(found["gaps"]) < CLOSE
        assert found["versions"] == [0, 0, 1, 1]
        received, planned = found["received"]
        assert received == found["publications"] * planned
        assert (planned == 0) == (case == "replicas")


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_for_bit_what_it_is_without_colo(ranks, case):
    for rank in ranks:
        assert rank[case]["same"] == [True] * 3  # the last step is one after `close()`


@pytest.mark.parametrize("case", CASES)
def test_state_masters_and_gradients_are_away_while_the_engine_samples(ranks, case):
    for found in (rank[case] for rank in ranks):
        assert found["away"] == [[0, 0, 0], [0, 0, 0], [0, 0]] and found["kept"] == [0, 0]
        state, masters, _ = found["sizes"]
        counted, own = found["parameters"]
        assert counted >= own  # and buffers, such as a router's bias
        assert state > own and (masters > 0) == (case in CASES[:3])  # whose parameters are bf16


@pytest.mark.parametrize("case", CASES[:3])
def test_main_parameters_are_there_when_megatron_sets_their_gradients(ranks, case):
    for rank in ranks:  # which it does before any hook of a step runs
        assert rank[case]["ready"] == ["resident"] * 3


@pytest.mark.parametrize("case", CASES)
def test_a_runtime_is_found_by_its_stages_and_they_have_one_only(ranks, case):
    for found in (rank[case] for rank in ranks):
        assert found["owner"] == [True] * 4
        assert "PhaseError: this model has a runtime already" in found["taken"]
        assert "rt.log(mismatch=...)" in found["facts"]["mismatch"]


def test_what_cannot_be_shared_is_refused_on_every_rank(ranks):
    for rank, found in enumerate(ranks):
        by_name, stranger, empty, optimizer, family, compared, key, of_ones_own = found["refused"]
        assert "'torch' is started for a transformers model" in by_name and "colo.start(folder" in by_name
        assert "Unsupported: a Linear is no stage of a Megatron model" in stranger
        assert "no stages of a Megatron model in an empty list" in empty
        assert "parameters of the optimizer are not the model's" in optimizer
        assert optimizer.startswith("TransferError: " if rank == 0 else "Unsupported: ")
        assert "no parameter 'model.layers.0.self_attn.q_norm.weight'" in family
        assert "colo does not know how a ModuleList computes log-probabilities" in compared
        assert "decoder.layers.0.self_attention.linear_proj.weight has no name" in key
        assert of_ones_own is None  # a table of one's own
