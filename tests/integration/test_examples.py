"""The examples, run as a reader would run them: each in a process of its own, in an empty folder, without flags."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from colo.testing import tiny_checkpoint
from tests import warm

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path):
    """Runs an example on the CPU to its end and returns what it printed."""

    def start(name):
        done = warm.run_python(EXAMPLES / name, "--device", "cpu", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


def rewards(text):
    return [float(value) for value in re.findall(r"^step +\d+  reward (\d\.\d\d)$", text, re.MULTILINE)]


def figure(text, pattern):
    (value,) = re.findall(pattern, text)
    return int(value)


@pytest.mark.slow
def test_grpo_on_every_weight_learns_and_sends_nothing(run, tmp_path):
    text = run("grpo_full.py")
    assert rewards(text)[-1] >= rewards(text)[0] + 0.15
    assert figure(text, r"bytes copied from trainer to engine: (\d+)") == 0
    assert "trainer.optimizer left the device for rollouts" in text
    assert (tmp_path / "grpo_full.html").stat().st_size > 1000


@pytest.mark.slow
def test_on_a_device_that_only_streaming_fits_training_makes_the_weights_of_resident_state(run):
    text = run("grpo_full_streamed.py")
    half = len(rewards(text)) // 2
    assert rewards(text)[half - 1] >= rewards(text)[0] + 0.1
    assert rewards(text)[:half] == rewards(text)[half:]
    assert "with resident state: " in text and "streamed: with the whole of it on the device" in text
    assert "weights equal, bit for bit: True" in text


@pytest.mark.slow
def test_grpo_on_an_adapter_answers_more_sums_than_its_base(run, tmp_path):
    text = run("grpo_lora.py")
    assert rewards(text)[-1] >= rewards(text)[0] + 0.1
    base = figure(text, r"right answers, base: (\d+) of 100")
    tuned = figure(text, r"right answers, tuned: (\d+) of 100")
    assert tuned >= base + 10
    assert figure(text, r"bytes copied from trainer to engine: (\d+)") == 0
    assert (tmp_path / "grpo_lora.html").stat().st_size > 1000


@pytest.mark.slow
def test_what_is_your_own_is_shared_learns_and_resumes_bit_for_bit(run):
    text = run("share_your_own.py")
    first, last = re.search(r"reward (\d\.\d\d) in the first step, (\d\.\d\d) in the last", text).groups()
    assert float(last) >= float(first) + 0.3
    assert figure(text, r"bytes copied from trainer to engine: (\d+)") == 0
    assert "resumed at step 15: rewards equal: True" in text
    assert "resumed at step 15: weights equal, bit for bit: True" in text
    assert "trainer.master_weights, trainer.optimizer left the device for rollouts" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp_two_gpus.py", "megatron_two_gpus.py"])
def test_a_model_that_is_spread_over_two_ranks_learns_and_half_of_it_travels(tmp_path, name):
    """With what torchrun sets; that it starts ranks is in test_recipes.py."""
    if name == "megatron_two_gpus.py" and find_spec("megatron") is None:
        pytest.skip("wants Megatron: pip install 'colo-rl[megatron]'")
    wrong = warm.run_ranks(EXAMPLES / name, ["--device", "cpu"], 2, tmp_path, timeout=1200)
    text = (tmp_path / "0.log").read_text()
    assert not wrong, "\n\n".join([wrong, text, (tmp_path / "1.log").read_text()])
    assert rewards(text)[-1] >= rewards(text)[0] + 0.15
    own, others = map(int, re.search(r"(\d+) bytes are this rank's own and (\d+) come from other ranks", text).groups())
    assert 0.9 < others / own < 1.1
    assert figure(text, r"bytes that a publication brings from other ranks: (\d+)") == others
    assert float(re.search(r"^mismatch +(\S+) mean", text, re.MULTILINE)[1]) < 1e-5


@pytest.mark.slow
def test_the_benchmark_beside_trls_own_mode_runs_its_side_of_colo(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'colo-rl[trl]'")
    figures = tmp_path / "trl.json"
    small = ["--steps", "3", "--batch", "8", "--tokens", "8", "--kv-cache", "16MiB", "--engine", "torch"]
    command = ["-m", "benchmarks", "trl", *small, "--device", "cpu", "--json", figures]
    done = warm.run_python(*command, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (row,) = json.loads(figures.read_text())["rows"]
    assert row["way"].startswith("colo's flag") and row["mismatch"] < 1e-2
    assert 0 <= row["between_s"] < row["step_s"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_short_explains_itself_and_has_the_same_flags(path):
    text = path.read_text()
    assert len(text.splitlines()) < 150
    launcher = "torchrun --nproc-per-node 2" if path.name.endswith("_two_gpus.py") else "python"
    assert f"{launcher} examples/{path.name} " in ast.get_docstring(ast.parse(text))
    if not path.name.startswith("trl_"):  # whose options are those of TRL
        of_servers = ["--url"] if path.name.startswith("server_") else []
        assert re.findall(r'add_argument\("(--\w+)"', text) == ["--model", "--steps", "--device", *of_servers]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="missing: pip install -e '.[examples]'")
def test_an_instruct_model_is_asked_trained_and_asked_again(tmp_path):
    """A tiny model in place of the real one, which tests/unit/test_testing.py reads: a step of that takes a minute."""
    few = ["--max_steps", "2", "--held_out", "3", "--per_device_train_batch_size", "8", "--max_completion_length", "8"]
    given = ["--output_dir", tmp_path, "--model_name_or_path", tiny_checkpoint(tmp_path / "tiny")]
    done = warm.run_python(EXAMPLES / "trl_instruct.py", *given, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("before", "after"):
        assert re.search(rf"^{name}: [0-9]+% of answers to 3 held-out questions are right$", done.stdout, re.MULTILINE)
    assert re.search(r"^Calculate \d \+ \d\.$", done.stdout, re.MULTILINE)
    assert (tmp_path / "run.html").stat().st_size > 1000 and (tmp_path / "model.safetensors").exists()
