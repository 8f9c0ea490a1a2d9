"""Invariant 4: nothing of another library is changed. With vLLM it is tested in test_vllm_commands.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_importing_colo_and_a_run_change_no_environment_setting_or_class_of_another_library():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.unchanged", "embedded"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
