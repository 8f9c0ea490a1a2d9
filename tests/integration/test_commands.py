"""Whole runs of commands: what they write, and how they end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.sharded import STAGES
from tests import warm
from tests.checkpoints import save_checkpoint

DEMO_KEYS = {
    "command",
    "date",
    "machine",
    "versions",
    "engine",
    "device",
    "mode",
    "steps",
    "rewards",
    "weights_bytes",
    "bytes_synced",
    "weights_version",
    "phase_peak_bytes",
    "peak_bytes",
    "optimizer_bytes",
    "base_unchanged",
    "seconds",
}


def python(code, *arguments):
    """Runs code in a process of its own, which nothing has been imported into and no handler been taken from."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_demo_writes_what_it_promises(colo, tmp_path):
    html, figures = tmp_path / "pictures" / "demo.html", tmp_path / "new" / "demo.json"
    code, out, _ = colo("demo", "--steps", 2, "--device", "cpu", "--html", html, "--json", figures)
    found = json.loads(figures.read_text())
    assert code == 0
    assert set(found) == DEMO_KEYS
    assert found["command"] == "colo demo --steps 2 --engine torch --device cpu --mode full --seed 0"
    assert (found["engine"], found["device"], found["mode"], found["steps"]) == ("torch", "cpu", "full", 2)
    assert (found["bytes_synced"], found["weights_version"], len(found["rewards"])) == (0, 2, 2)
    assert set(found["phase_peak_bytes"]) == {"rollout", "train"}
    assert found["peak_bytes"] == max(found["phase_peak_bytes"].values()) > found["weights_bytes"]
    assert found["optimizer_bytes"] > 2 * found["weights_bytes"] * 0.97
    assert set(found["seconds"]) == {"rollout", "train", "switch"}
    assert min(found["seconds"].values()) > 0
    assert html.read_text().lower().startswith("<!doctype html>")
    assert "0 B copied" in out
    last = r"^step 2/2  reward \d\.\d\d  length .* mismatch .* tokens/s .* memory \d\.\d\d MiB  left 0:00$"
    assert re.search(last, out, re.M)
    assert f"reward: {sum(found['rewards']) / 2:.2f}" in out
    assert re.search(r"^Memory of .* MiB: peak \d\.\d\d MiB, without taking turns \d\.\d\d MiB$", out, re.M)


def test_ctrl_c_of_a_training_run_saves_it_and_leaves_json_alone_on_standard_output(tmp_path):
    save_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+2="}\n')
    (tmp_path / "scores.py").write_text(
        "import os\n"
        "def varied(prompts, completions, completion_ids, **columns):\n"
        "    print('a reward prints'); os.write(1, b'and a library does\\n')\n"
        "    return [float(ids[0]) for ids in completion_ids]\n"
    )
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from colo import cli; cli.main()"
    names = {"model_name_or_path": "checkpoint", "dataset_name": "sums.jsonl", "output_dir": "out"}
    given = [word for name, value in names.items() for word in (f"--{name}", str(tmp_path / value))]
    given += ["--reward_funcs", f"{tmp_path}/scores.py:varied", "--max_steps", "100000", "--max_completion_length", "4"]
    process = python(
        code, "grpo", *given, "--kv_cache_mib", "1", "--learning_rate", "1e-3", "--device", "cpu", "--json"
    )
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        os.kill(process.pid, signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    steps = [json.loads(line)["step"] for line in [*lines, *rest.splitlines()]]
    assert steps == list(range(1, len(steps) + 1))
    assert "a reward prints" in err and "and a library does" in err and "interrupted: everything is released" in err
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint", "out"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_ctrl_c_ends_with_130_and_leaves_no_process_behind(tmp_path):
    # A parent that ignores SIGINT, as shells do for background jobs, would pass that on.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from colo import cli; cli.main()"
    html = tmp_path / "demo.html"
    process = python(code, "demo", "--steps", "100000", "--device", "cpu", "--html", str(html))
    try:
        assert "warmed up" in process.stdout.readline()
        time.sleep(1)  # into the training loop
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted: everything is released"  # below what torchao logs as it is imported
    assert "Traceback" not in err
    assert not html.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def benchmark(*arguments):
    """Exit code and standard output of `python -m benchmarks ARGUMENTS`."""
    done = warm.run_python("-m", "benchmarks", *arguments, cwd=Path(__file__).parents[2])
    return done.returncode, done.stdout


def test_the_benchmark_of_offload_writes_figures_with_their_circumstances(tmp_path):
    figures = tmp_path / "offload.json"
    code, out = benchmark("offload", "--size", "8MiB", "--device", "cpu", "--json", figures)
    found = json.loads(figures.read_text())
    assert code == 0
    assert found["ended"] == "complete"
    assert found["benchmark"] == "offload"
    assert found["command"] == "python -m benchmarks offload --size 8MiB --device cpu"
    ours = next(row for row in found["rows"] if row["way"] == "colo")
    assert (ours["bytes"], ours["equal"], ours["freed_bytes"]) == (8 << 20, True, 8 << 20)
    assert "growth over 100" in out


def test_the_benchmark_of_sharded_weights_sets_slices_beside_what_others_do(tmp_path):
    figures = tmp_path / "sharded.json"
    code, _ = benchmark("sharded", "--ranks", "2", "--device", "cpu", "--json", figures)
    found = json.loads(figures.read_text())
    assert code == 0
    assert found["command"] == "python -m benchmarks sharded --shape 0.6b --device cpu"
    trainers = ["fsdp2", *(["megatron"] if find_spec("megatron") is not None else [])]
    ways = ["slices", "whole", "as verl", "as slime"]
    expected = [(trainer, tp, way) for trainer in trainers for tp in (1, 2) for way in ways]
    rows = {(row["trainer"], row["tp"], row["way"]): row for row in found["rows"]}
    assert list(rows) == expected
    for (trainer, tp, way), row in rows.items():
        slices = rows[trainer, tp, "slices"]
        assert slices["received_bytes"] == slices["planned_bytes"] <= row["received_bytes"]
        assert row["median_s"] > 0 and row["to_all_ranks_bytes"] <= 2 * row["received_bytes"]
        if way == "slices":
            shares = [row[f"{stage}_share"] for stage in STAGES]
            assert sum(shares) == pytest.approx(1) and min(shares) >= 0
    assert rows[trainers[-1], 2, "slices"]["received_bytes"] < 0.1 * rows[trainers[-1], 2, "whole"]["received_bytes"]


def test_the_benchmark_of_log_probabilities_writes_figures(tmp_path):
    figures = tmp_path / "logprob.json"
    code, out = benchmark("logprob", "--device", "cpu", "--json", figures)
    found = json.loads(figures.read_text())
    assert code == 0
    assert (found["benchmark"], found["command"]) == ("logprob", "python -m benchmarks logprob --device cpu")
    cases = [("chunked", 512), ("chunked", 128), ("full", 128)]
    assert [(row["case"], row["tokens"]) for row in found["rows"]] == 2 * cases
    assert "ratio to full" in out


def test_a_streamed_step_is_measured_beside_the_bus(tmp_path):
    figures = tmp_path / "stream.json"
    code, out = benchmark("stream", "--range", "64", "--resident-state", "200MiB", "--device", "cpu", "--json", figures)
    assert code == 0, out
    step, half, *training = json.loads(figures.read_text())["rows"]
    for row in (step, half):
        assert row["of_bus"] == pytest.approx(row["step_s"] / row["bus_s"])
        assert 0 < row["window_bytes"] < row["state_bytes"] == step["state_bytes"]
    assert step["resident_bytes"] == 0 < half["resident_bytes"] <= 200 * 1024
    assert [row["way"] for row in training] == ["training", "training, gradients released"]
    assert all(row["step_s"] > 0 for row in training)
