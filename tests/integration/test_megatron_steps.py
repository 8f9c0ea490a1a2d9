"""Megatron's optimizers on two ranks: their state, main parameters among it, leaves for host memory between steps."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("wants Megatron: pip install 'colo-rl[megatron]'", allow_module_level=True)

SCRIPT = Path(__file__).parent / "megatron_steps.py"
MIXED = ["distributed", "overlapped", "experts", "virtual stages", "main parameters"]
"""Whose parameters are bf16, and their main parameters fp32."""

CASES = [*MIXED, "distributed, fp32", "fp32", "torch's"]


@pytest.fixture(scope="module")
def ranks(two_ranks):
    """What both ranks have found, in order."""
    return two_ranks(SCRIPT)


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_for_bit_what_it_is_without_colo(ranks, case):
    for found in (rank[case] for rank in ranks):
        assert found["same"] == [True] * 3  # parameters, main parameters and state
        assert found["changed"] == [1.0] * 3  # every weight, by every step
        assert found["steps"] == 3  # however many of torch's optimizers have stepped
        assert found["at the end"] == [True] * len(found["at the end"])


@pytest.mark.parametrize("case", CASES)
def test_all_state_is_away_between_steps(ranks, case):
    for found in (rank[case] for rank in ranks):
        assert (found["copies"] > 3.8 * found["mains"]) == (case in MIXED)  # all but norms, which are fp32
        for parked in found["parked"]:
            assert [device for _, device in parked.values()] == [0, 0, 0]  # gradients may have stayed, see below
            for name, num_bytes in (("trainer.master_weights", "copies"), ("trainer.optimizer", "moments")):
                assert 0 <= parked[name][0] - found[num_bytes] < 512 * 100  # each is aligned
        assert found["expected"]["trainer.optimizer"] == found["parked"][-1]["trainer.optimizer"][0]  # before a step


@pytest.mark.parametrize("case", CASES)
def test_moments_stay_away_until_the_step_and_main_parameters_until_training_begins(ranks, case):
    for found in (rank[case] for rank in ranks):
        masters = found["parked"][-1]["trainer.master_weights"][0]
        assert found["late"] == [[0, masters]] * 3  # after zero_grad, a backward pass, and what follows it
        assert found["passes"] == [0 if case == "virtual stages" else 1] * 3


def test_a_rank_of_the_distributed_optimizer_has_its_share_of_main_parameters(ranks):
    for case in ("distributed", "overlapped", "distributed, fp32"):
        first, second = (rank[case] for rank in ranks)
        assert first["mains"] + second["mains"] == first["model"] == second["model"]
    assert ranks[0]["experts"]["optimizers"] == 2


@pytest.mark.parametrize("case", [case for case in CASES if case != "torch's"])
def test_ranks_that_hold_the_same_parts_have_them_after_a_step(ranks, case):
    for rank in ranks:  # also where Megatron gathers them in the next forward pass only
        assert rank[case]["replicas"] == [[]] * 3


@pytest.mark.parametrize("case", [*MIXED[:-1], "distributed, fp32"])
def test_buffers_of_gradients_leave_once_nothing_else_lies_in_them(ranks, case):
    for found in (rank[case] for rank in ranks):
        num_bytes = found["model"] * (4 if "fp32" in case else 2)
        assert found["kept"][0] == {}
        stays = found["kept"][1]  # of main parameters, without zero_grad after the step
        assert stays.pop("gradients of main parameters", 0) == found["copies"]
        assert set(stays) == {"a buffer of gradients"}
        parked, kept = found["zeroed"]
        assert kept == {}
        for size, on_device in (parked["trainer.gradients"], found["between"]):
            assert num_bytes <= size < 1.1 * num_bytes and on_device == 0


@pytest.mark.parametrize("case", ["main parameters", "fp32"])
def test_buffers_that_an_optimizer_does_not_know_stay_and_are_told(ranks, case):
    for found in (rank[case] for rank in ranks):
        for kept in (found["kept"][0], found["zeroed"][1]):
            assert set(kept) == {"a buffer of gradients"}
            assert kept["a buffer of gradients"] >= found["model"] * (4 if case == "fp32" else 2)


def test_gradients_of_bare_stages_leave_as_of_any_model(ranks):
    for found in (rank["torch's"] for rank in ranks):
        assert found["zeroed"][1] == found["kept"][0] == found["kept"][1] == {}
        size, on_device = found["between"]
        assert 0 <= size - found["gradients"] < 512 * 100 and on_device == 0  # each is aligned


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_of_other_stages_is_refused(ranks, case):
    for rank in ranks:
        own, others = rank[case]["checked"]
        assert own is None
        assert "parameters of the optimizer are not the model's" in others
