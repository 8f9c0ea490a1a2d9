"""The commands of docs/recipes.md that start a script on several ranks: on two of a CPU, with a tiny model."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from colo.testing import tiny_checkpoint

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(
    r"^```\n((?:torchrun|accelerate launch) .*?)^```$", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE | re.DOTALL
)
ON_A_CPU = """--use_cpu --bf16 false --ddp_backend gloo --colo_engine torch --colo_kv_cache_bytes 1MiB --max_steps 1
--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 4 --report_to none --save_strategy no"""


def test_both_launchers_are_there():
    assert [command.split()[0] for command in COMMANDS] == ["torchrun", "accelerate"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=["torchrun", "accelerate"])
def test_a_launcher_trains_on_two_ranks(command, tmp_path):
    words = command.replace("\\\n", " ").split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not on the path")
    words[words.index("Qwen/Qwen3-0.6B")] = str(tiny_checkpoint(tmp_path / "tiny"))
    words[words.index("--output_dir") + 1] = str(tmp_path / "out")
    done = subprocess.run(
        [*words, *ON_A_CPU.split(), "--logging_steps", "1"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("weights are the engine's own memory") == 2
