"""`colo grpo` as people use it: what it trains, prints and saves, and what it refuses before anything is loaded."""

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import colo.grpo
from colo import cli_options
from colo.grpo import GRPORun, load_function
from colo.rl import dataset
from colo.rl.problems import Problem
from tests.checkpoints import save_checkpoint

SUMS = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in range(4) for b in range(3)]
REWARDS = """
import signal

calls = []

def right(completions, solution):
    return [float(answer in text) for text, answer in zip(completions, solution)]

def varied(prompts, completions, completion_ids, **columns):
    return [float(ids[0]) for ids in completion_ids]

def printing(prompts, completions, **columns):
    print("from a reward")
    return [float(len(text)) for text in completions]

def interrupted(prompts, completions, completion_ids, **columns):
    calls.append(1)
    if len(calls) == 3:
        signal.raise_signal(signal.SIGINT)
    return [float(ids[0]) for ids in completion_ids]

def breaks_later(prompts, completions, completion_ids, **columns):
    calls.append(1)
    return [float(ids[0]) / (2 - len(calls)) for ids in completion_ids]

def breaks_at_once(prompts, completions, **columns):
    return None

NUMBER = 1
"""


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    """A folder with a checkpoint, a dataset and rewards, in which commands run."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint("checkpoint")
    write_rows(SUMS)
    Path("scores.py").write_text(REWARDS)
    capsys.readouterr()
    return tmp_path


def write_rows(rows, name="sums.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(*more, reward="scores.py:varied", data="sums.jsonl", model="checkpoint"):
    given = ["grpo", "--model_name_or_path", model, "--dataset_name", data, "--reward_funcs", reward]
    given += ["--output_dir", "out", "--max_steps", "3", "--num_generations", "4", "--max_completion_length", "5"]
    return [*given, "--learning_rate", "1e-2", "--kv_cache_mib", "1", "--device", "cpu", "--seed", "0", *more]


@pytest.fixture
def unloaded(monkeypatch):
    """Makes it an error to load a model."""

    def launch(*arguments, **options):
        raise AssertionError("the model is being loaded")

    monkeypatch.setattr(colo.grpo, "launch", launch)


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def assert_trained(folder="out"):
    before, after = weights("checkpoint"), weights(folder)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_prints_a_json_line_a_step_and_saves_what_it_trained(colo, place):
    more = ["--json", "--reward_funcs", "scores.py:printing", "--reward-weights", "1", "--reward_weights", "0.5"]
    code, out, err = colo(*arguments(*more, "--beta", "0.1", "--gradient-accumulation-steps", "2"))
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["max_steps"] == 3
        assert line["epoch"] == pytest.approx(line["step"] * 4 / 12)
        assert line["reward"] == pytest.approx(line["rewards/varied"] + 0.5 * line["rewards/printing"])
        assert line["learning_rate"] == 1e-2
        assert all(math.isfinite(line[name]) for name in ("loss", "kl", "mismatch", "completion_tokens", "seconds"))
    assert "from a reward" in err and "saved to out" in err
    assert_trained()
    assert not list(Path("out").glob(".saving-*"))
    tokenizer, model = AutoTokenizer.from_pretrained("out"), AutoModelForCausalLM.from_pretrained("out")
    assert tokenizer("1+2=")["input_ids"] == AutoTokenizer.from_pretrained("checkpoint")("1+2=")["input_ids"]
    assert model.config.eos_token_id == 1
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[5, 14, 6]])).logits.isfinite().all()


def test_a_seed_repeats_a_run_and_lines_are_means(colo, place):
    write_rows([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in SUMS], "talks.jsonl")
    code, out, err = colo(*arguments("--json", "--output_dir", "a", data="talks.jsonl"))
    assert code == 0, err
    means = [json.loads(line)["rewards/varied"] for line in out.splitlines()]
    code, out, err = colo(*arguments("--logging_steps", "2", "--output_dir", "b", data="talks.jsonl"))
    assert code == 0, err
    first, second = out.splitlines()
    assert first.startswith(f"step 2/3  rewards/varied {(means[0] + means[1]) / 2:.4g}  reward ")
    assert second.startswith(f"step 3/3  rewards/varied {means[2]:.4g}  reward ")
    assert all(torch.equal(a, b) for a, b in zip(weights("a").values(), weights("b").values(), strict=True))


def test_an_adapter_is_saved_by_itself(colo, place):
    code, _, err = colo(*arguments("--use_peft", "--lora_r", "4", "--lora-target-modules", "q_proj", "--beta", "0.1"))
    assert code == 0, err
    assert not Path("out/model.safetensors").exists()
    config = json.loads(Path("out/adapter_config.json").read_text())
    assert (config["r"], config["target_modules"], config["base_model_name_or_path"]) == (4, ["q_proj"], "checkpoint")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("checkpoint"), "out")
    assert any(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_epochs_are_counted_where_steps_are_not_given(place):
    run = a_run(per_device_train_batch_size=8, num_generations=4, num_train_epochs=1.5)
    assert (run.prompts_per_step, run.num_steps(12), run.num_steps(1)) == (2, 9, 1)
    assert a_run(max_steps=7).num_steps(12) == 7


# ---- ends that are not the end ---------------------------------------------------------------------------------------


def test_ctrl_c_saves_what_was_trained_and_ends_with_130(colo, place, interrupts_raise):
    code, out, err = colo(*arguments("--json", reward="scores.py:interrupted"))
    assert code == 130
    assert [json.loads(line)["step"] for line in out.splitlines()] == [1, 2]
    assert "saving what was trained in 2 steps" in err and "saved to out" in err and "interrupted" in err
    assert_trained()
    AutoTokenizer.from_pretrained("out")


def test_a_reward_that_fails_later_loses_nothing_that_was_trained(colo, place):
    code, out, err = colo(*arguments("--json", reward="scores.py:breaks_later"))
    assert code == 1
    assert len(out.splitlines()) == 1
    assert "error: reward 'breaks_later' raised ZeroDivisionError at step 2: " in err and "(scores.py, line " in err
    assert_trained()


def test_nothing_is_saved_of_a_run_that_trained_nothing(colo, place):
    code, out, err = colo(*arguments(reward="scores.py:breaks_at_once"))
    assert (code, out) == (1, "")
    assert "error: reward 'breaks_at_once' returned None at step 1: return a list of 8 numbers" in err
    assert list(Path("out").iterdir()) == []


# ---- whose folder it is ----------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_is_not_overwritten_unless_asked(colo, place, unloaded):
    save_checkpoint("out")
    before = Path("out/model.safetensors").read_bytes()
    code, out, err = colo(*arguments())
    assert (code, out) == (2, "")
    assert "out has the checkpoint of another run (config.json" in err and "pass --overwrite_output_dir" in err
    assert Path("out/model.safetensors").read_bytes() == before
    with pytest.raises(AssertionError, match="the model is being loaded"):
        colo(*arguments("--overwrite_output_dir"))


def test_overwriting_leaves_no_weights_of_the_other_run(colo, place):
    Path("out").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        Path("out", name).write_text("old")
    code, _, err = colo(*arguments("--overwrite_output_dir", "--max_steps", "1"))
    assert code == 0, err
    assert {path.name for path in Path("out").glob("*model*")} == {"model.safetensors"}
    assert Path("out/notes.txt").read_text() == "old"


def test_a_checkpoint_that_another_run_saved_meanwhile_is_kept(colo, place):
    Path("later.py").write_text(
        "from tests.checkpoints import save_checkpoint\n"
        "def late(prompts, completions, completion_ids, **columns):\n"
        "    save_checkpoint('out')\n"
        "    return [float(ids[0]) for ids in completion_ids]\n"
    )
    code, _, err = colo(*arguments("--max_steps", "1", reward="later.py:late"))
    assert code == 0, err
    assert "saved to out-2" in err
    assert_trained("out-2")


@pytest.mark.parametrize("folder", ["file", "file/new"])
def test_a_folder_that_cannot_be_written_is_refused_first(colo, place, unloaded, folder):
    Path("file").touch()
    code, out, err = colo(*arguments("--output_dir", folder))
    assert (code, out) == (2, "")
    assert "--output_dir" in err and folder in err


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_first(colo, place, unloaded):
    Path("locked").mkdir(mode=0o500)
    code, _, err = colo(*arguments("--output_dir", "locked/new"))
    assert code == 2 and "locked/new cannot be written to" in err


# ---- bad input, before the model is loaded ---------------------------------------------------------------------------


def bad(colo, *given, **options):
    code, out, err = colo(*arguments(*given, **options))
    assert out == ""
    return code, err


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "dataset sums.jsonl is empty"),
        (
            [{"question": "1", "solution": "1"}],
            "sums.jsonl, line 1: there is no 'prompt', but question, solution: rename",
        ),
        ([{"prompt": "1"}, {"promt": "2"}], "sums.jsonl, line 2: there is no 'prompt', but promt"),
        ([{"prompt": "1"}, {"prompt": ""}], "row 2 of sums.jsonl: its prompt is empty"),
        ([{"prompt": "1"}, {"prompt": "1" * 64}], "row 2 of sums.jsonl: its prompt has 64 tokens, the model knows 64"),
        ([{"prompt": None}], "row 1 of sums.jsonl: its prompt is neither a text nor"),
        ([{"prompt": {"role": "user", "content": "1"}}], "row 1 of sums.jsonl: its prompt is a single message"),
        ([{"prompt": [{"content": "1"}]}], "row 1 of sums.jsonl: message 0 of its prompt is not a mapping with 'role'"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            "message 0 of its prompt has a part of type 'image'",
        ),
        (["1+2="], "sums.jsonl, line 1: '1+2=' is not an object"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(colo, place, unloaded, rows, words):
    write_rows(rows)
    code, err = bad(colo)
    assert code == 1 and words in err
    assert len(err.splitlines()) == 1


def test_what_is_not_json_is_named_by_its_line(colo, place, unloaded):
    Path("sums.jsonl").write_text('{"prompt": "1"}\n\n{"prompt": \n')
    code, err = bad(colo)
    assert code == 1 and "sums.jsonl, line 3: not JSON" in err
    assert bad(colo, data="none.jsonl")[1].startswith("error: there is no file none.jsonl: give a file of JSON lines")


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ("query_key_value", "query_key_value'} not found in the base model. Please check the target modules"),
        ("embed_tokens", "adapts model.embed_tokens, an embedding, .*: leave it out of target_modules"),
        ("lm_head", "an adapter on it would not be trained: leave the output layer out of target_modules"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_named_before_that_is_loaded(colo, place, unloaded, modules, words):
    code, err = bad(colo, "--use_peft", "--lora_target_modules", modules)
    assert code == 1 and re.search(words, err)
    assert len(err.splitlines()) == 1


def test_an_adapter_in_the_place_of_a_model_is_named(colo, place, unloaded):
    model = AutoModelForCausalLM.from_pretrained("checkpoint")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained("adapter")
    code, err = bad(colo, model="adapter")
    assert code == 1 and "'adapter' is an adapter: launch the model that it was trained on" in err


def test_a_checkpoint_without_a_weight_is_named_before_an_engine_starts(colo, place, monkeypatch):
    monkeypatch.setattr("colo.assembly.starting.make_torch_engine", lambda *_: pytest.fail("an engine was started"))
    tensors = load_file("checkpoint/model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, "checkpoint/model.safetensors", metadata={"format": "pt"})
    code, err = bad(colo)
    assert code == 1 and "lacks 1 of the model's weights, model.norm.weight for one: copy or save it again" in err


def test_a_column_that_a_reward_needs_is_missed_before_the_model_is_loaded(colo, place, unloaded):
    write_rows([{"prompt": "1", "answer": "1"}])
    code, err = bad(colo, reward="scores.py:right")
    assert code == 1
    assert "reward 'right' takes solution, and of columns the dataset has answer: rename the column" in err


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("scores.py:wrong", "scores.py has no function 'wrong', but breaks_at_once, breaks_later, interrupted,"),
        ("scores.py:NUMBER", "scores.py has no function 'NUMBER'"),
        ("none.py:right", "reward 'none.py:right' cannot be loaded (FileNotFoundError: there is no file none.py)"),
        ("no_such_module:right", "cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')"),
        ("broken.py:right", "cannot be loaded (ZeroDivisionError: division by zero)"),
        ("right", "'right' names no reward: give module:function, or path.py:function"),
    ],
)
def test_a_reward_that_is_not_there_is_named(colo, place, unloaded, reward, words):
    Path("broken.py").write_text("1 / 0\n")
    code, err = bad(colo, reward=reward)
    assert code == 1 and words in err


def test_rewards_come_from_modules_too(place):
    found = load_function("scores:right")
    assert found(completions=["3"], solution=["3"]) == [1.0]
    assert load_function("operator:itemgetter") is __import__("operator").itemgetter
    sys.modules.pop("scores")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--num_generations", "1"], "num_generations must be at least 2, but is 1: advantages compare"),
        (["--num_generations", "3"], "is 8 completions a step, which are not whole groups of num_generations 3"),
        (["--reward_weights", "1", "--reward_weights", "2"], "there are 2 reward_weights for 1 reward_funcs"),
        (["--learning_rate", "0"], "learning_rate must be positive and finite, but is 0.0"),
        (["--temperature", "0"], "temperature must be positive and finite, but is 0.0"),
        (["--max_steps", "0"], "max_steps must be at least 1, or -1 for num_train_epochs, but is 0"),
        (["--beta", "-1"], "kl_coefficient must be at least 0 and finite, but is -1.0"),
        (["--per_device_train_batch_size", "0"], "0 is not in the range"),
        (["--engine", "tensorrt"], "'tensorrt' is not one of"),
        (["--max-step", "3"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_ends_with_2(colo, place, unloaded, given, words):
    code, err = bad(colo, *given)
    assert code == 2 and words in err


def test_vllm_and_datasets_that_are_not_installed_are_named_with_what_to_install(colo, place, unloaded, monkeypatch):
    monkeypatch.setattr(cli_options, "find_spec", lambda name: None)
    code, err = bad(colo, "--engine", "vllm")
    assert code == 2 and "--engine vllm needs vLLM" in err

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(dataset, "import_module", missing)
    code, err = bad(colo, data="someone/sums")
    assert code == 1 and "needs datasets: pip install 'colo-rl[trl]', or give a file of JSON lines" in err


def test_a_dataset_of_hugging_faces_is_read_by_its_split(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sums").mkdir()
    for split, rows in (("train", SUMS), ("test", SUMS[:2])):
        write_rows(rows, tmp_path / "sums" / f"{split}.jsonl")
    datasets.disable_progress_bars()
    found = dataset.load_rows(str(tmp_path / "sums"), split="test")
    assert (len(found.rows), found.columns) == (2, ("solution",))
    assert found.problem(1) == Problem(prompt="0+1=", columns={"solution": "1"})
    with pytest.raises(ValueError, match="validation"):
        dataset.load_rows(str(tmp_path / "sums"), split="validation")


def test_columns_that_some_rows_lack_are_none_there(place):
    write_rows([{"prompt": "1", "level": 3}, {"prompt": "2", "unit": "m"}])
    found = dataset.load_rows("sums.jsonl")
    assert found.columns == ("level", "unit")
    assert found.problem(1).columns == {"level": None, "unit": "m"}


def test_every_row_comes_once_before_any_comes_again():
    steps = dataset.shuffled(5, 3, 10, seed=0)
    order = [row for step in steps for row in step]
    assert [len(step) for step in steps] == [3] * 10
    assert all(sorted(order[start : start + 5]) == [0, 1, 2, 3, 4] for start in range(0, 30, 5))
    assert order[:5] != order[5:10]
    assert steps == dataset.shuffled(5, 3, 10, seed=0) != dataset.shuffled(5, 3, 10, seed=1)
    assert sorted(dataset.shuffled(2, 5, 1, seed=0)[0]) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def a_run(**changes):
    given = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ("r",), "output_dir": Path("o")}
    return GRPORun(**given | changes)


def test_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl", reason="trl is not installed")
    names = ["learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"]
    names += ["max_completion_length", "temperature", "beta", "seed", "max_steps", "num_train_epochs"]
    theirs = trl.GRPOConfig(output_dir="o", use_cpu=True, bf16=False)
    assert {name: getattr(a_run(), name) for name in names} == {name: getattr(theirs, name) for name in names}
    lora = trl.ModelConfig()
    assert (a_run().lora_r, a_run().lora_alpha) == (lora.lora_r, lora.lora_alpha)


def test_help_has_both_spellings(colo):
    code, out, _ = colo("grpo", "--help")
    assert code == 0
    assert "--max_steps, --max-steps" in out and "--json" in out
