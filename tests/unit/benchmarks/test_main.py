"""`python -m benchmarks`: what it lists and refuses, and that an interrupted run keeps its rows."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import logprob
from colo import cli

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `python -m benchmarks ARGUMENTS` in this process: exit code, standard output and standard error."""

    def ended(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            command.main()
        return end.value.code, *capsys.readouterr()

    return ended


def test_it_lists_its_benchmarks_without_a_name_and_each_has_a_module(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run()
    listed = out.partition("Commands:")[2]
    assert code == 0 and "..." not in listed
    assert {line.split()[0] for line in listed.splitlines() if line.strip()} == command.app.commands.keys()
    assert command.app.commands.keys() == set(NAMES) - {"__init__", "__main__", "common", "workload", "tenants"}


@pytest.mark.parametrize("name", [name for name in command.app.commands if name != "house"])
def test_a_gpu_that_is_not_there_is_wrong_usage(run, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run(name, "--device", "cuda")
    assert (code, out) == (2, "")
    assert "torch sees no CUDA device here" in err


@pytest.mark.parametrize("name", ["share", "generation", "rollouts", "sync", "lora", "sleep", "step"])
def test_a_benchmark_that_needs_vllm_says_so_before_it_begins(run, monkeypatch, name):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    code, out, err = run(name, "--device", "cpu")
    assert (code, out) == (2, "")
    assert f"python -m benchmarks {name} needs vLLM: pip install" in err


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["offload", "--size", "large"], ["offload", "--size", "9"], ["sync", "--shape", "7b"]]
)
def test_wrong_usage_ends_with_2_and_names_what_was_wrong(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert arguments[-1] in err


def test_an_error_of_colos_is_one_line_and_the_file_says_it(run, tmp_path):
    path = tmp_path / "figures.json"
    code, out, err = run("offload", "--device", "cpu", "--size", "1000TiB", "--json", path)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and "smaller --size" in err and "Traceback" not in err
    assert json.loads(path.read_text())["ended"].startswith("failed: Unsupported")


def test_rounds_measure_everything_so_often_and_the_command_says_it(run, monkeypatch, tmp_path):
    calls, path = iter([3.0, 1.0, 2.0]), tmp_path / "figures.json"
    monkeypatch.setattr(logprob, "run", lambda record, **_: record.add({"way": "ours", "step_s": next(calls)}))
    code, out, _ = run("logprob", "--device", "cpu", "--rounds", 3, "--json", path)
    found = json.loads(path.read_text())
    assert (code, found["ended"], found["rows"]) == (0, "complete", [{"way": "ours", "step_s": 2.0}])
    assert found["rounds"] == [[{"way": "ours", "step_s": seconds}] for seconds in (3.0, 1.0, 2.0)]
    assert found["command"] == "python -m benchmarks logprob --device cpu --rounds 3"
    assert "2.00 s (1.00 s to 3.00 s)" in out
    assert run("logprob", "--rounds", 0)[0] == 2


SLOW = """
import signal, sys, time
from benchmarks import __main__ as command, logprob

def run(record, **_):
    record.add({"way": "first"})
    print("begun", flush=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    time.sleep(60)
    record.add({"way": "second"})

logprob.run = run
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # the time is not up before there is a row
command.main()
"""


@pytest.mark.parametrize(
    ("number", "minutes", "code", "words"),
    [
        (signal.SIGINT, "8", 130, "interrupted by Ctrl-C"),
        (signal.SIGTERM, "8", 143, "interrupted by SIGTERM"),
        (None, "0.01", 124, "ended after 0.01 minutes"),
    ],
    ids=["Ctrl-C", "SIGTERM", "time"],
)
def test_what_is_interrupted_keeps_the_rows_it_has(tmp_path, number, minutes, code, words):
    path = tmp_path / "figures.json"
    arguments = ["logprob", "--device", "cpu", "--minutes", minutes, "--json", str(path)]
    awake = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell may have it ignored
    process = subprocess.Popen(
        [sys.executable, "-c", awake + SLOW, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "begun\n"
        if number is not None:
            process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    found = json.loads(path.read_text())
    assert (process.returncode, found["ended"], found["rows"]) == (code, words, [{"way": "first"}])
    assert "first" in out and f"{words}: 1 rows are kept" in err and "Traceback" not in err


HUNG = """
import benchmarks.__main__ as command
from benchmarks import logprob

def run(record, **options):
    print("begun", flush=True)
    sum(range(10**12))  # holds the GIL

logprob.run = run
command.GRACE_S = 3.0
command.main()
"""


def test_what_hangs_with_the_gil_held_is_ended_with_its_stack():
    arguments = ["logprob", "--device", "cpu", "--minutes", "0.01"]
    ended = subprocess.run(
        [sys.executable, "-c", HUNG, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1 and "Timeout (" in ended.stderr and "in run" in ended.stderr


@pytest.mark.parametrize(
    "written",
    [
        "--shape 0.6b --card 24064MiB --released --sides 'bf16, sleep'",
        "--shape 8b --optimizer streamed --steps 3 --engine torch",
    ],
)
def test_the_command_that_is_written_down_runs_again(run, monkeypatch, tmp_path, written):
    from benchmarks import trl

    given = []
    monkeypatch.setattr(trl, "run", lambda record, **options: given.append(options))
    commands = []
    arguments = ["trl", *shlex.split(written), "--device", "cpu"]
    for number in range(2):
        path = tmp_path / f"{number}.json"
        assert run(*arguments, "--json", path)[0] == 0
        commands.append(json.loads(path.read_text())["command"])
        arguments = shlex.split(commands[-1].removeprefix("python -m benchmarks "))
    assert commands[0] == commands[1] and given[0] == given[1]
    assert all(word in shlex.split(commands[0]) for word in shlex.split(written))
