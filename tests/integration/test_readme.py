"""What README has people run."""

import re
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("engine", "steps"), [("torch", 40), ("vllm", 30)], ids=["torch", "vllm"])
def test_readmes_command_for_trl_trains_and_the_reward_rises(tmp_path, engine, steps):
    """As it stands there, with another place for what it writes; with vLLM fewer steps."""
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    command = re.search(
        r"^python (examples/trl_grpo.py .*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )[1]
    words = command.replace("\\\n", " ").split()
    given = {"--output_dir": str(tmp_path), "--colo_engine": engine, "--max_steps": str(steps)}
    for name, value in given.items():
        words[words.index(name) + 1] = value
    done = warm.run_python(*words, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(word) for word in re.search(r"^reward (.*)$", done.stdout, re.MULTILINE)[1].split()]
    assert len(rewards) == steps / 10 and rewards[-1] > rewards[0] + 0.3
    assert "weights are the engine's own memory" in done.stdout
