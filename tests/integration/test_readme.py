"""What README has people run."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readmes_command_for_trl_trains_and_the_reward_rises(tmp_path):
    """As it stands there, with another place for what it writes."""
    command = re.search(
        r"^python (examples/trl_grpo.py .*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )[1]
    words = command.replace("\\\n", " ").split()
    words[words.index("--output_dir") + 1] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(word) for word in re.search(r"^reward (.*)$", done.stdout, re.MULTILINE)[1].split()]
    assert len(rewards) == 4 and rewards[-1] > rewards[0] + 0.3
    assert "weights are the engine's own memory" in done.stdout
