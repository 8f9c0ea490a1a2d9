"""The real Unsloth on a CPU, in a process of its own, with an accelerator that is imitated."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "unsloth_run.py"


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("unsloth"), reason="Unsloth is not installed: see docs/unsloth.md")
@pytest.mark.parametrize(
    "given",
    [
        [],
        pytest.param(
            ["--four-bits"],
            marks=pytest.mark.skipif(not find_spec("vllm_bnb_plugin"), reason="vllm-bnb-plugin is not installed"),
        ),
        ["--notebook"],
    ],
    ids=["all", "four bits", "notebook"],
)
def test_models_and_trainers_of_unsloths_are_shared_trained_and_given_back(cpu_build, tmp_path, given):
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, *given],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "unexpected: nothing" in done.stdout
