"""The oldest TRL that colo runs beneath: `.ci/run` installs it apart, in the folder that COLO_OLDEST_TRL names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[2]
OLDEST = os.environ.get("COLO_OLDEST_TRL")


pytestmark = pytest.mark.skipif(
    OLDEST is None, reason="COLO_OLDEST_TRL names no folder: pip install --no-deps --target F trl==1.4.0"
)


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([OLDEST, str(ROOT)]), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def test_the_contract_and_the_flag_are_those_of_the_oldest_trl():
    vllms = "ignore:TRL currently supports vLLM"  # older ones, it says
    files = "tests/unit/trl/test_checks.py", "tests/unit/trl/test_flag.py"
    done = run("-m", "pytest", "-q", "-W", vllms, *files, PYTEST_ADDOPTS="")
    assert done.returncode == 0, done.stdout[-2000:]
    assert re.search(r"^\d{3} passed", done.stdout, re.MULTILINE)


def test_the_flag_trains_with_the_oldest_trl(tmp_path):
    command = ["examples/trl_grpo.py", "--fast_inference", "--colo_engine", "torch", "--use_cpu", "--bf16", "false"]
    command += ["--output_dir", str(tmp_path), "--max_steps", "3", "--logging_steps", "1", "--report_to", "none"]
    command += ["--per_device_train_batch_size", "16", "--max_completion_length", "8", "--save_strategy", "no"]
    shown = "import runpy, sys, trl; print('trl', trl.__version__); del sys.argv[0]; "
    done = run("-c", f"{shown}runpy.run_path(sys.argv[0], run_name='__main__')", *command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^trl 1\.4\.", done.stdout, re.MULTILINE)
    assert len(re.search(r"^reward (.*)$", done.stdout, re.MULTILINE)[1].split()) == 3
    assert "weights are the engine's own memory" in done.stdout


def test_the_command_trains_evaluates_and_saves_with_the_oldest_trl(tmp_path):
    save_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "sums.jsonl").write_text('{"question": "1+2=", "sum": "3"}\n' * 4)
    (tmp_path / "scores.py").write_text(
        "def varied(prompts, completions, completion_ids, **columns):\n"
        "    return [float(ids[0]) for ids in completion_ids]\n"
    )
    places = {"model_name_or_path": "checkpoint", "dataset_name": "sums.jsonl", "eval_dataset_name": "sums.jsonl"}
    command = [word for name, value in places.items() for word in (f"--{name}", str(tmp_path / value))]
    command += ["--dataset_columns", "prompt=question", "--reward_funcs", f"{tmp_path}/scores.py:varied", "--use_peft"]
    command += [
        "--output_dir",
        str(tmp_path / "out"),
        "--max_steps",
        "2",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "1",
    ]
    command += ["--max_completion_length", "4", "--beta", "0.1", "--device", "cpu", "--kv_cache_mib", "1", "--json"]
    done = run("-m", "colo.cli", "grpo", *command)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2]
    assert [line["step"] for line in lines if "eval_reward" in line] == [1, 2]
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
