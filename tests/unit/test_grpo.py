"""`colo grpo` as people use it: what it trains, prints and saves, and what it refuses before anything is loaded."""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import colo.grpo as colo_grpo
from colo import cli
from colo.grpo import GRPORunConfig, load_function, load_rows
from tests.checkpoints import save_checkpoint, save_revisions

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

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

async def waits_and_breaks(prompts, completions):
    raise KeyError("score")

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

    def trainer(*arguments, **options):
        raise AssertionError("the model is being loaded")

    monkeypatch.setattr(colo_grpo, "ColoGRPOTrainer", trainer)


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
        means = line["rewards/varied/mean"], line["rewards/printing/mean"]
        assert line["reward"] == pytest.approx(means[0] + 0.5 * means[1])
        names = "loss", "kl", "colo/mismatch", "completions/mean_length", "step_time", "learning_rate"
        assert all(math.isfinite(line[name]) for name in names)
    assert "from a reward" in err and "saved to out" in err
    assert_trained()
    tokenizer, model = AutoTokenizer.from_pretrained("out"), AutoModelForCausalLM.from_pretrained("out")
    assert tokenizer("1+2=")["input_ids"] == AutoTokenizer.from_pretrained("checkpoint")("1+2=")["input_ids"]
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[5, 14, 6]])).logits.isfinite().all()


def test_a_seed_repeats_a_run_and_lines_are_means(colo, place):
    write_rows([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in SUMS], "talks.jsonl")
    code, out, err = colo(*arguments("--json", "--output_dir", "a", data="talks.jsonl"))
    assert code == 0, err
    means = [json.loads(line)["reward"] for line in out.splitlines()]
    code, out, err = colo(*arguments("--logging_steps", "3", "--output_dir", "b", data="talks.jsonl"))
    assert code == 0, err
    (line,) = out.splitlines()
    assert line.startswith(f"step 3/3  reward {sum(means) / 3:.4g}  rewards/varied/mean ")
    assert all(torch.equal(a, b) for a, b in zip(weights("a").values(), weights("b").values(), strict=True))


def test_a_revision_and_an_attention_are_taken(colo, place, monkeypatch):
    """Of a repository without "main"."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    name = save_revisions(place / "hub", v2="checkpoint")
    more = ["--model_revision", "v2", "--attn_implementation", "eager"]
    code, _, err = colo(*arguments(*more, model=name))
    assert code == 0, err
    assert_trained()

    def trainer(model, rewards, args, **options):
        raise ValueError(f"room for {args.vllm_max_model_length}")

    monkeypatch.setattr(colo_grpo, "ColoGRPOTrainer", trainer)
    code, _, err = colo(*arguments(*more, "--engine", "vllm", "--output_dir", "other", model=name))
    assert code == 1 and f"error: room for {4 + 5}" in err


def test_an_adapter_is_saved_by_itself(colo, place):
    code, _, err = colo(*arguments("--use_peft", "--lora_r", "4", "--lora-target-modules", "q_proj", "--beta", "0.1"))
    assert code == 0, err
    assert not Path("out/model.safetensors").exists()
    config = json.loads(Path("out/adapter_config.json").read_text())
    assert (config["r"], config["target_modules"], config["base_model_name_or_path"]) == (4, ["q_proj"], "checkpoint")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("checkpoint"), "out")
    assert any(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_an_adapter_that_is_more_than_lora_is_trained_folded(colo, place):
    more = ["--use_peft", "--use_dora", "--colo_fold_adapter", "--lora_modules_to_save", "norm"]
    code, _, err = colo(*arguments(*more))
    assert code == 0, err
    trained = load_file("out/adapter_model.safetensors")
    assert any(name.endswith("lora_magnitude_vector") for name in trained)
    assert not torch.equal(trained["base_model.model.model.norm.weight"], weights("checkpoint")["model.norm.weight"])


def test_it_evaluates_saves_and_a_resumed_run_ends_where_the_whole_one_does(colo, place):
    write_rows(SUMS[:4], "held_out.jsonl")
    more = ["--json", "--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset_name", "held_out.jsonl"]
    more += ["--per_device_eval_batch_size", "8", "--save_steps", "2", "--max_steps", "4", "--colo_seeded"]
    code, out, err = colo(*arguments(*more, "--output_dir", "whole"))
    assert code == 0, err
    whole = [json.loads(line) for line in out.splitlines()]
    assert [line["step"] for line in whole if "eval_reward" in line] == [2, 4]
    assert {path.name for path in Path("whole").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    shutil.copytree("whole/checkpoint-2", "resumed/checkpoint-2")
    code, out, err = colo(*arguments(*more, "--output_dir", "resumed", "--resume_from_checkpoint", "true"))
    assert code == 0, err
    resumed = [json.loads(line) for line in out.splitlines()]
    assert [line["step"] for line in resumed if "reward" in line] == [3, 4]
    assert [line["reward"] for line in resumed if "reward" in line] == [
        line["reward"] for line in whole if "reward" in line and line["step"] > 2
    ]
    a, b = weights("whole"), weights("resumed")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_trls_options_reach_its_trainer_from_words_and_from_yaml(colo, place, monkeypatch):
    found = {}

    def trainer(model, rewards, args, **options):
        found.update(model=model, rewards=rewards, args=args, **options)
        raise ValueError("seen")

    monkeypatch.setattr("colo.grpo.ColoGRPOTrainer", trainer)
    Path("run.yaml").write_text(
        "loss_type: dr_grpo\nepsilon_high: 0.28\nlr_scheduler_type: cosine\nnum_iterations: 2\n"
    )
    more = ["--config", "run.yaml", "--epsilon-high", "0.3", "--report_to", "none", "--scale_rewards", "none"]
    more += ["--top_p", "0.9", "--weight_decay=0.1", "--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
    code, _, err = colo(*arguments(*more, "--dtype", "bfloat16", "--use_rslora", "--model_revision", "main"))
    assert code == 1 and "error: seen" in err
    args = found["args"]
    assert (args.loss_type, args.epsilon_high, args.num_iterations) == ("dr_grpo", 0.3, 2)
    assert (args.lr_scheduler_type, args.scale_rewards, args.top_p, args.weight_decay) == ("cosine", "none", 0.9, 0.1)
    assert (args.fast_inference, args.colo_engine, args.use_cpu) == (True, "torch", True)
    assert args.colo_kv_cache_bytes == "1MiB"
    assert args.model_init_kwargs == {"dtype": "bfloat16"}
    assert found["peft_config"].target_modules == {"q_proj", "v_proj"} and found["peft_config"].use_rslora
    assert found["rewards"][0].__name__ == "varied"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dataset_columns: prompt=text", "has no column 'text' to call 'prompt'"),
        ("reward_funcs: nothing.py:right", "nothing.py"),
    ],
)
def test_one_of_a_list_may_stand_alone_in_yaml(colo, place, unloaded, line, words):
    Path("run.yaml").write_text(line)
    given = arguments("--config", "run.yaml")
    if (name := f"--{line.partition(':')[0]}") in given:
        del given[given.index(name) : given.index(name) + 2]
    code, _, err = colo(*given)
    assert code == 1 and words in err


def test_every_option_of_trls_configs_is_there(colo):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    code, out, _ = colo("grpo", "--help")
    assert code == 0
    for config in (trl.GRPOConfig, trl.ModelConfig):
        for field in dataclasses.fields(config):
            assert f"--{field.name}" in out, field.name
    assert "--max_steps" in out and "--max-steps" in out and "--json" in out


def test_defaults_are_those_of_trl_but_for_what_the_flag_needs():
    trl = pytest.importorskip("trl", reason="trl is not installed")
    theirs = trl.GRPOConfig(output_dir="o", use_cpu=True, bf16=False, disable_tqdm=True)
    ours = GRPORunConfig(output_dir="o", use_cpu=True)
    names = [field.name for field in dataclasses.fields(trl.GRPOConfig)]
    plain = {name for name in names if isinstance(getattr(theirs, name), str | int | float | bool | None | list)}
    assert {name for name in plain if getattr(ours, name) != getattr(theirs, name)} == {"logging_steps"}


@pytest.mark.parametrize(
    ("given", "seeded"),
    [
        ([], True),
        (["--colo_seeded", "false"], False),
        (["--colo_partial_rollouts", "true"], False),
        (["--colo_partial_rollouts", "--colo_seeded", "false"], False),
        (["--colo_partial_rollouts", "false"], True),
        (["--config", "partial.yaml"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_embedded_engine_is_seeded_unless_that_or_partial_rollouts_are_given(
    colo, place, monkeypatch, given, seeded
):
    found = []

    def trainer(model, rewards, args, **options):
        found.append(args.colo_seeded)
        raise ValueError("seen")

    monkeypatch.setattr("colo.grpo.ColoGRPOTrainer", trainer)
    Path("partial.yaml").write_text("colo_partial_rollouts: true\n")
    code, _, err = colo(*arguments(*given))
    assert code == 1 and "error: seen" in err
    assert found == [seeded]


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
    assert "saving what was trained in 1 steps" in err
    assert_trained()


def test_an_awaited_reward_that_fails_is_named(colo, place):
    code, _, err = colo(*arguments(reward="scores.py:waits_and_breaks"))
    assert code == 1
    assert "error: reward 'waits_and_breaks' raised KeyError at step 1: 'score' (scores.py, line " in err


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
    assert (code, out) == (1, "")
    assert "out has the checkpoint of another run (config.json" in err and "or pass --overwrite_output_dir" in err
    assert Path("out/model.safetensors").read_bytes() == before
    with pytest.raises(AssertionError, match="the model is being loaded"):
        colo(*arguments("--overwrite_output_dir"))


def test_overwriting_leaves_no_weights_of_the_other_run(colo, place):
    Path("out").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        Path("out", name).write_text("old")
    Path("out/checkpoint-900").mkdir()
    code, _, err = colo(*arguments("--overwrite_output_dir", "--max_steps", "1"))
    assert code == 0, err
    assert {path.name for path in Path("out").glob("*model*")} == {"model.safetensors"}
    assert Path("out/notes.txt").read_text() == "old"
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("true", "there is no checkpoint in out to resume from: leave resume_from_checkpoint out"),
        ("elsewhere", "resume_from_checkpoint elsewhere has no trainer_state.json: give a checkpoint-N"),
    ],
)
def test_a_checkpoint_to_resume_from_is_looked_for_first(colo, place, unloaded, given, words):
    code, _, err = colo(*arguments("--resume_from_checkpoint", given))
    assert code == 1 and words in err


@pytest.mark.parametrize("folder", ["file", "file/new"])
def test_a_folder_that_cannot_be_written_is_refused_first(colo, place, unloaded, folder):
    Path("file").touch()
    code, out, err = colo(*arguments("--output_dir", folder))
    assert (code, out) == (1, "")
    assert f"output_dir {folder} cannot be written to" in err


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_first(colo, place, unloaded):
    Path("locked").mkdir(mode=0o500)
    code, _, err = colo(*arguments("--output_dir", "locked/new"))
    assert code == 1 and "locked/new cannot be written to" in err


# ---- bad input, before the model is loaded ---------------------------------------------------------------------------


def said(err):
    """Lines of errors, without those that name options of now."""
    return [line for line in err.splitlines() if " now, as in " not in line]


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
            "dataset sums.jsonl has no column 'prompt', but question, solution: say which is sampled for",
        ),
        ([{"prompt": "1"}, {"promt": "2"}], "row 2 of sums.jsonl: its prompt is neither a text nor"),
        ([{"prompt": "1"}, {"prompt": 2}], "sums.jsonl, column 'prompt' has values of several types"),
        ([{"prompt": "1"}, {"prompt": ""}], "row 2 of sums.jsonl: its prompt is empty"),
        ([{"prompt": "1"}, {"prompt": "1" * 64}], "row 2 of sums.jsonl: its prompt has 64 tokens, the model knows 64"),
        ([{"prompt": None}], "row 1 of sums.jsonl: its prompt is neither a text nor"),
        ([{"prompt": 2}], "row 1 of sums.jsonl: its prompt is neither a text nor a list of messages, but 2"),
        (
            [{"prompt": [1, 2]}],
            "the prompt of row 1 of the dataset is [1, 2], and TRL takes texts or lists of messages",
        ),
        ([{"prompt": {"role": "user", "content": "1"}}], "row 1 of sums.jsonl: its prompt is a single message"),
        ([{"prompt": [{"content": "1"}]}], "row 1 of sums.jsonl: message 0 of its prompt is not a mapping with 'role'"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            "message 0 of its prompt has a part of type 'image'",
        ),
        (["1+2="], "sums.jsonl, line 1: '1+2=' is not an object"),
        ([{"prompt": "1\ud83d"}], "sums.jsonl, column 'prompt' has a text that is not UTF-8 ("),
        ([{"prompt": "1", "a": [{"b": "\ud83d"}]}], "sums.jsonl, column 'a' has a text that is not UTF-8 ("),
        ([{"prompt": "1", "\ud83d": 1}], r"sums.jsonl, column '\ud83d' has a text that is not UTF-8 ("),
        ([{"prompt": "1", "a": 2**64}], "sums.jsonl, column 'a' has a number of more than 64 bits ("),
        (
            [{"prompt": "1", "a": 0.5}, {"prompt": "1", "a": -(10**30)}],
            "column 'a' has a number of more than 64 bits (",
        ),
        (
            [{"prompt": "1", "a": [[1]]}, {"prompt": "1", "a": [2]}],
            "sums.jsonl, column 'a' has values of several types",
        ),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(colo, place, unloaded, rows, words):
    write_rows(rows)
    code, err = bad(colo)
    assert code == 1 and words in err
    assert len(said(err)) == 1


def test_what_is_not_json_is_named_by_its_line(colo, place, unloaded):
    Path("sums.jsonl").write_text('{"prompt": "1"}\n\n{"prompt": \n')
    code, err = bad(colo)
    assert code == 1 and "sums.jsonl, line 3: not JSON" in err
    Path("sums.jsonl").write_text('{"prompt": ' + 5000 * "[" + 5000 * "]" + "}\n")
    assert "error: sums.jsonl, line 1: not JSON (maximum recursion depth exceeded" in bad(colo)[1]
    Path("sums.jsonl").write_bytes('{"prompt": "1"}\n{"prompt": "é"}\n'.encode("latin-1"))
    assert "error: sums.jsonl, line 2: not JSON ('utf-8' codec can't decode" in bad(colo)[1]
    assert "error: there is no file none.jsonl: give a file of JSON lines" in bad(colo, data="none.jsonl")[1]


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ("query_key_value", "query_key_value'} not found in the base model. Please check the target modules"),
        ("embed_tokens", "adapts model.embed_tokens, an embedding, .*: leave it out of target_modules"),
        ("lm_head", "an adapter on it would not be trained: leave the output layer out of target_modules"),
        ("q_proj k_porj", "names 'k_porj', and no module of the model is called so: .*, k_proj, .*'all-linear' stands"),
        ("all-linear q_proj", "names 'all-linear', and no module of the model is called so"),
        ("[", r"PEFT cannot put the adapter on the model \(unterminated character set"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_named_before_that_is_loaded(colo, place, unloaded, modules, words):
    code, err = bad(colo, "--use_peft", "--lora_target_modules", *modules.split())
    assert code == 1 and re.search(words, err)
    assert len(said(err)) == 1


def test_an_adapter_in_the_place_of_a_model_is_named(colo, place, unloaded):
    model = AutoModelForCausalLM.from_pretrained("checkpoint")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained("adapter")
    code, err = bad(colo, model="adapter")
    assert code == 1 and "'adapter' is an adapter: launch the model that it was trained on" in err


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ("tokenizer*", "the folder checkpoint has no tokenizer, and prompts are texts: save that of its model there"),
        ("config.json", "the folder checkpoint has no config.json: pass the folder of a Hugging Face model"),
        ("*", "the folder checkpoint has no config.json"),
    ],
)
def test_what_a_checkpoint_lacks_is_named_before_it_is_loaded(colo, place, unloaded, lacking, words):
    for path in Path("checkpoint").glob(lacking):
        path.unlink()
    code, err = bad(colo)
    assert code == 1 and f"error: {words}" in err
    assert len(said(err)) == 1


@pytest.mark.parametrize("given", [{"model": "nosuch"}, {"more": ["--reward_model_name_or_path", "nosuch"]}], ids=str)
def test_a_model_that_is_not_there_is_named_before_anything_is_loaded(colo, place, unloaded, given):
    code, err = bad(colo, *given.pop("more", []), **given)
    assert code == 1 and "error: found no folder 'nosuch' and could not read its config.json from the Hugging" in err
    assert err.rstrip().endswith("pass a folder with a config.json, or check the name and the network")


@pytest.mark.parametrize("named", [["--model_revision", "v2"], ["--model_init_kwargs", '{"revision": "v2"}']], ids=str)
def test_a_reward_model_is_looked_for_at_the_revision_that_is_loaded(colo, place, monkeypatch, named):
    loaded = []

    def trainer(model, rewards, args, **options):
        loaded.append(args.model_init_kwargs["revision"])
        raise ValueError("enough")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr(colo_grpo, "ColoGRPOTrainer", trainer)
    name = save_revisions(place / "hub", v2="checkpoint")
    code, err = bad(colo, *named, "--reward_model_name_or_path", name, model=name)
    assert code == 1 and "error: enough" in err and loaded == ["v2"]
    shutil.move(place / "hub/models--me--tiny/refs/v2", place / "hub/models--me--tiny/refs/main")
    code, err = bad(colo, *named, "--reward_model_name_or_path", name)
    assert code == 1 and "error: found no folder 'me/tiny' and could not read its config.json" in err
    assert loaded == ["v2"]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "model.safetensors is a pointer of Git LFS, in the place of"),
        (b"{}", "the weights of checkpoint cannot be read .*: copy or save them again, whole"),
    ],
)
def test_weights_that_cannot_be_read_are_named_before_an_engine_starts(colo, place, monkeypatch, start, words):
    monkeypatch.setattr("colo.assembly.launch.make_torch_engine", lambda *_: pytest.fail("an engine was started"))
    Path("checkpoint/model.safetensors").write_bytes(start)
    code, err = bad(colo)
    assert code == 1 and re.search(words, err)


def test_a_checkpoint_without_a_weight_is_named_before_an_engine_starts(colo, place, monkeypatch):
    monkeypatch.setattr("colo.assembly.launch.make_torch_engine", lambda *_: pytest.fail("an engine was started"))
    tensors = load_file("checkpoint/model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, "checkpoint/model.safetensors", metadata={"format": "pt"})
    code, err = bad(colo)
    assert code == 1 and "lacks 1 of the model's weights, model.norm.weight for one: copy or save it again" in err


def test_a_column_that_a_reward_needs_is_missed_before_the_model_is_loaded(colo, place, unloaded):
    write_rows([{"prompt": "1", "answer": "1"}])
    code, err = bad(colo, reward="scores.py:right")
    assert code == 1
    assert "reward 'right' takes solution, and the dataset has prompt, answer: add the column, or give it" in err


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("scores.py:wrong", "scores.py has no function 'wrong', but breaks_at_once, breaks_later, interrupted,"),
        ("scores.py:NUMBER", "scores.py has no function 'NUMBER'"),
        ("none.py:right", "reward 'none.py:right' cannot be loaded (FileNotFoundError: there is no file none.py)"),
        ("no_such_module:right", "cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')"),
        ("broken.py:right", "cannot be loaded (ZeroDivisionError: division by zero)"),
        ("right", "'right' names no reward: give module:function, path.py:function, or one of TRL's"),
    ],
)
def test_a_reward_that_is_not_there_is_named(colo, place, unloaded, reward, words):
    Path("broken.py").write_text("1 / 0\n")
    code, err = bad(colo, reward=reward)
    assert code == 1 and words in err


NAMELESS = """
import functools

def near(completions, target, **columns):
    return [-abs(len(text) - target) for text in completions]

class Longest:
    def __call__(self, completions, **columns):
        return [float(len(text)) for text in completions]

short, long = functools.partial(near, target=1), functools.partial(near, target=5)
longest = Longest()
none = lambda completions, **columns: [0.0 for text in completions]
"""


def test_rewards_without_a_name_of_their_own_have_that_by_which_they_are_given(colo, place):
    Path("nameless.py").write_text(NAMELESS)
    rewards = [
        word for name in ("short", "long", "longest", "none") for word in ("--reward_funcs", f"nameless.py:{name}")
    ]
    code, out, err = colo(*arguments("--json", "--max_steps", "1", *rewards))
    assert code == 0, err
    names = {name for name in json.loads(out) if name.startswith("rewards/") and name.endswith("/mean")}
    assert names == {f"rewards/{name}/mean" for name in ("varied", "short", "long", "longest", "none")}


def test_two_rewards_of_one_name_are_refused_with_what_a_command_can_do(colo, place, unloaded):
    Path("other.py").write_text("def varied(completions): return [1.0 for text in completions]\n")
    for name in ("other.py:varied", "scores.py:varied"):
        code, err = bad(colo, "--reward_funcs", name)
        assert code == 1
        assert "error: several rewards are called varied: rename the functions, and give each of them once" in err


def test_rewards_come_from_modules_too(place):
    found = load_function("scores:right")
    assert found(completions=["3"], solution=["3"]) == [1.0]
    assert load_function("operator:itemgetter") is __import__("operator").itemgetter
    sys.modules.pop("scores")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--num_generations", "1"], "at least 2 generations per prompt"),
        (["--num_generations", "3"], "(3)"),
        (["--num_generations", "0"], "num_generations must be at least 2, not 0"),
        (["--config", "bad.yaml"], '--config is not YAML (while parsing a flow sequence in "bad.yaml", line 1'),
        (["--engine", "tensorrt"], "colo_engine must be 'auto', 'vllm' or 'torch', not 'tensorrt'"),
        (["--max-step", "3"], "No such option: --max_step. Did you mean --max_steps?"),
        (["--learning_rate", "fast"], "argument --learning_rate/--learning-rate: invalid float value: 'fast'"),
        (["--eval_strategy", "sometimes"], "sometimes"),
        (["--colo_seeded", "--colo_partial_rollouts"], "spreads them over several of them: leave one out"),
        (["--use_vllm"], "fast_inference takes the place of use_vllm: leave use_vllm out"),
        (["--load_in_4bit", "--load_in_8bit"], "8 bit and 4 bit"),
        (["--device", "tpu"], "--device ['tpu'] is not one of cpu and cuda"),
        (["--output_dir", "my", "run"], "Got unexpected extra argument (run). Quote what has spaces in it."),
        (["--dataset_name=my", "sums.jsonl"], "Got unexpected extra argument (sums.jsonl)."),
        (["--config", "my", "run.yaml"], "Got unexpected extra argument (run.yaml)."),
        (["--device", "cpu", "cuda"], "Got unexpected extra argument (cuda)."),
        (["--max_steps", "3", "4"], "Got unexpected extra argument (4)."),
        (["--overwrite_output_dir", "true", "false"], "Got unexpected extra argument (false)."),
        (["--reward_func", "scores.py:right", "scores.py:varied"], "Did you mean --reward_funcs?"),
        (["--config", "none.yaml"], "--config=none.yaml cannot be read (No such file or directory): name a file"),
        (["--accelerator_config", "."], "--accelerator_config=. cannot be read (Is a directory): name a file that is"),
        (["--json", "lines.jsonl"], "--json takes no file here (lines.jsonl): it prints to standard output"),
        (["--json=lines.jsonl"], "--json takes no file here (lines.jsonl)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_ends_with_2(colo, place, unloaded, given, words):
    Path("bad.yaml").write_text("loss_type: [dapo\n")
    code, err = bad(colo, *given)
    assert code == 2 and words in " ".join(err.split())
    assert len(err.splitlines()) < 12


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--reward_weights", "1", "--reward_weights", "2"], "there are 2 reward_weights for 1 rewards: give one for"),
        (["--per_device_train_batch_size", "64"], "the dataset has 12 rows, and a rollout takes 16 prompts"),
        (
            ["--dataset_train_split", "train[:8]"],
            "sums.jsonl is a file, all of which is trained on: leave --dataset_train",
        ),
        (["--eval_strategy", "steps"], "sums.jsonl has no split to evaluate on: pass --eval_dataset_name"),
        (["--dataset_name="], "the name of a dataset is empty: give a file of rows, a folder or a dataset of the hub"),
        (["--dataset_columns", "prompt"], "dataset_columns 'prompt' renames nothing: write the new name, =, and"),
        (["--dataset_columns", "prompt=text"], "has no column 'text' to call 'prompt', but prompt, solution"),
        (["--use_peft", "--use_dora"], "LoraConfig(use_dora=True) is not supported: DoRA changes"),
        (
            ["--lora_r", "8", "--use_rslora"],
            "lora_r, use_rslora would be of no use without use_peft: pass --use_peft, or leave",
        ),
        (["--load_in_4bit"], "load_in_4bit would be of no use without use_peft"),
        (["--colo_fold_adapter"], "colo_fold_adapter would be of no use without use_peft"),
        (["--bnb_4bit_quant_type", "fp4"], "bnb_4bit_quant_type would be of no use without load_in_4bit"),
        (
            ["--use_peft", "--lora_alpha", "0"],
            "lora_alpha scales the adapter: it must be a number of fp32 but 0, not 0",
        ),
        (["--use_peft", "--lora_dropout", "1"], "lora_dropout must be in [0, 1), not 1.0: PEFT would drop nothing, or"),
        (["--use_peft", "--lora_dropout", "nan"], "lora_dropout must be in [0, 1), not nan"),
        (["--use_peft", "--lora_r", "1000000000000000"], "PEFT cannot put the adapter on the model ("),
        (
            ["--use_peft", "--lora_task_type", "SEQ_CLS"],
            "LoraConfig(task_type='SEQ_CLS') is not supported: PEFT would train that task's head",
        ),
        (
            ["--use_peft", "--colo_fold_adapter", "--lora_modules_to_save", "nrom"],
            "LoraConfig(modules_to_save=...) names 'nrom', and no module of the model is called so",
        ),
        (
            ["--use_peft", "--colo_fold_adapter", "--lora_modules_to_save", "lm_head"],
            "would not be trained: leave the output layer out of target_modules and modules_to_save",
        ),
        (["--vllm_tensor_parallel_size", "2"], "vllm_tensor_parallel_size=2: colo runs an engine on each GPU"),
        (["--temperature", "0"], "temperature must be above 0, not 0.0: logits are divided by it"),
        (
            ["--reward_weights", "nan"],
            "reward_weights must be finite numbers, not nan: TRL would leave such rewards out",
        ),
        (["--reward_model_name_or_path", "./none"], "there is no './none' in"),
        (["--report_to", "comet_ml"], "loggers cannot be had (comet_ml is not installed here, but "),
        (["--report_to", "nonsense"], "loggers cannot be had (nonsense is not supported, only "),
        (["--seed", "-1"], "seed must be in 0 to 4294967295, as NumPy takes it, not -1"),
        (["--seed", "4294967296"], "seed must be in 0 to 4294967295, as NumPy takes it, not 4294967296"),
        (["--output_dir="], "output_dir is empty: name a folder"),
        (["--learning_rate", "nan"], "learning_rate must be a finite number, not nan"),
        (["--learning_rate", "inf"], "learning_rate must be a finite number, not inf"),
        (
            ["--learning_rate", "-1"],
            "optimizer and schedule cannot be had (Invalid learning rate: -1.0): change optim, ",
        ),
        (["--optim", "galore_adamw"], "optimizer and schedule cannot be had (You need to install `galore_torch`"),
        (["--optim_args", "none"], "optimizer and schedule cannot be had (not enough values to unpack"),
        (["--lr_scheduler_type", "warmup_stable_decay"], "optimizer and schedule cannot be had (get_wsd_schedule()"),
        (["--lr_scheduler_kwargs", "none"], "optimizer and schedule cannot be had ("),
        (["--steps_per_generation", "0"], "batches cannot be had (batch_size should be a positive integer"),
        (["--dataloader_num_workers", "-1"], "batches cannot be had (num_workers option should be non-negative"),
        (["--dataloader_persistent_workers"], "batches cannot be had (persistent_workers option needs num_workers"),
        (["--dataloader_num_workers", "9999999999"], "dataloader_num_workers=9999999999 would start as many processes"),
        (["--push_to_hub", "--hub_token", "hf_none"], "the hub's repository cannot be had ("),
        (["--push_to_hub", "--hub_model_id", "a b/c"], "the hub's repository cannot be had (Repo id must use"),
        (["--num_train_epochs", "inf"], "num_train_epochs must be a finite number, not inf"),
        (["--num_train_epochs", "-3"], "num_train_epochs must be at least 0, not -3.0"),
        (["--weight_decay", "1e308"], "weight_decay must be a number of fp32, 3.4e+38 at most, not 1e+308"),
        (["--epsilon", "1e308"], "epsilon must be a number of fp32, 3.4e+38 at most, not 1e+308"),
        (["--beta", "-1"], "beta must be at least 0, not -1.0"),
        (["--epsilon", "-1"], "epsilon must be at least 0, not -1.0"),
        (["--entropy_coef", "inf"], "entropy_coef must be a finite number, not inf"),
        (["--top_entropy_quantile", "-1"], "top_entropy_quantile must be in 0 to 1, not -1.0"),
        (["--ref_model_sync_steps", "0"], "ref_model_sync_steps must be at least 1, not 0"),
        (["--pad_to_multiple_of", "0"], "pad_to_multiple_of must be in 1 to 1048576, not 0"),
        (["--loss_type", "sapo", "--sapo_temperature_pos", "0"], "sapo_temperature_pos must be at least 1e-30, not 0"),
        (["--loss_type", "nonsense"], "loss_type must be one of grpo, dapo, dr_grpo, bnpo, cispo, sapo, luspo, vespo"),
        (["--scale_rewards", "std"], "scale_rewards must be one of group, batch, none, not 'std'"),
        (["--importance_sampling_level", "word"], "importance_sampling_level must be one of token, sequence, not"),
        (["--model_init_kwargs", "3"], "model_init_kwargs must be a mapping, or JSON of one, not '3'"),
        (["--generation_kwargs", "[3]"], "generation_kwargs must be a mapping, or JSON of one, not '[3]'"),
        (["--gradient_checkpointing_kwargs="], "checkpointed activations cannot be had ('' is not a mapping): change"),
        (["--gradient_checkpointing_kwargs", '{"deep": 1}'], "checkpointed activations cannot be had ("),
        (["--torch_compile", "--torch_compile_backend", "none"], "torch.compile cannot be had ('NONE' is not a valid"),
        (["--torch_compile", "--torch_compile_mode", "fast"], "torch.compile cannot be had (Unrecognized mode=fast"),
        (["--neftune_noise_alpha", "-1"], "neftune_noise_alpha must be at least 0, and a number of fp32, not -1.0"),
        (["--vllm_max_model_length", "0"], "vllm_max_model_length must be at least 1, not 0"),
        (["--vllm_importance_sampling_mode", "mask"], "vllm_importance_sampling_mode must be one of token_truncate, "),
        (
            ["--vllm_importance_sampling_clip_max", "0.5"],
            "vllm_importance_sampling_mode='sequence_mask' with vllm_importance_sampling_clip_max=0.5 and "
            "vllm_importance_sampling_clip_min=None leaves nothing to train on",
        ),
        (
            ["--vllm_importance_sampling_clip_min", "1.5"],
            "clip_max=3 and vllm_importance_sampling_clip_min=1.5 leaves nothing to train on",
        ),
        (
            ["--vllm_importance_sampling_mode", "token_truncate", "--vllm_importance_sampling_clip_max", "-1"],
            "'token_truncate' with vllm_importance_sampling_clip_max=-1 and",
        ),
        (
            ["--colo_partial_rollouts", "--colo_max_age", "-1"],
            "colo_max_age=-1, and 1 versions lie between two generations",
        ),
        (
            ["--colo_partial_rollouts", "--vllm_importance_sampling_correction", "false"],
            "colo_partial_rollouts does not go with a loss without importance ratios: leave it out",
        ),
        (["--fsdp", "full_shard"], "Using fsdp only works in distributed training, and this process is alone: start"),
        (["--num_iterations", "-1"], "num_iterations must be at least 1, not -1"),
        (
            ["--eval_strategy", "steps", "--eval_accumulation_steps", "0", "--eval_dataset_name", "sums.jsonl"],
            "eval_accumulation_steps must be at least 1, not 0",
        ),
        (["--save_strategy", "best"], "save_strategy 'best' compares a metric: set metric_for_best_model, or another"),
        (["--top_p", "-1"], "completions cannot be had (top_p must be in (0, 1], but is -1.0): change "),
        (["--repetition_penalty", "2"], "completions cannot be had (the embedded engine does not take repetition_"),
        (["--max_completion_length", "-1"], "completions cannot be had (max_tokens must be at least 1, but is -1)"),
        (["--cache_implementation", "none"], "completions cannot be had (Invalid `cache_implementation` (none)."),
        (
            ["--generation_kwargs", '{"stop_token_ids": ["a"]}'],
            "completions cannot be had (stop_token_ids must be a list of token ids, such as [2], not ['a']): change ",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_trained_is_an_error_before_anything_is_loaded(colo, place, unloaded, given, words):
    code, err = bad(colo, *given)
    assert code == 1 and words in err
    assert len(said(err)) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b'{"a": 1,,}',
            "not JSON in UTF-8 (Expecting property name enclosed in double quotes: line 1 column 9 (char 8))",
        ),
        (b"", "not JSON in UTF-8 (Expecting value: line 1 column 1 (char 0)): write an object"),
        (b"[" * 100_000, "not JSON in UTF-8 (maximum recursion depth exceeded"),
        (b"[1]", "[1], and not an object"),
        (b'{"a": NaN}', "not JSON in UTF-8 (NaN is no number of JSON): write an object"),
        ('{"a": 1}'.encode("utf-16"), "not JSON in UTF-8 ('utf-8' codec can't decode byte 0xff in position 0"),
    ],
    ids=["comma", "empty", "deep", "list", "nan", "utf-16"],
)
@pytest.mark.parametrize("name", ["accelerator_config", "deepspeed", "fsdp_config"])
@pytest.mark.parametrize("is_in_yaml", [False, True])
def test_json_that_cannot_be_read_is_named_by_its_option_and_file(
    colo, place, unloaded, is_in_yaml, name, content, words
):
    Path("given.json").write_bytes(content)
    Path("options.yaml").write_text(f"{name}: given.json\n")
    code, err = bad(colo, *(["--config", "options.yaml"] if is_in_yaml else [f"--{name}", "given.json"]))
    assert code == 2 and f"Error: {name}: given.json is {words}" in err


@pytest.mark.parametrize("name", ["colo_engine_options", "model_init_kwargs", "accelerator_config"])
def test_json_on_the_command_line_that_cannot_be_read_is_named_by_its_option(colo, place, unloaded, name):
    code, err = bad(colo, f"--{name}", '{"a": 1,,}')
    assert code == 2 and f"Error: {name} is not JSON in UTF-8 (Expecting property name" in err
    assert "line 1 column 9" in err


def test_a_config_in_another_encoding_is_named(colo, place, unloaded):
    Path("options.yaml").write_text("beta: 0.1\n", encoding="utf-16")
    code, err = bad(colo, "--config", "options.yaml")
    assert code == 2 and "Error: --config is not in UTF-8 ('utf-8' codec can't decode byte 0xff" in err


COMPARED = ["--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset_name", "sums.jsonl"]


@pytest.mark.parametrize("metric", ["accuracy", "eval_accuracy", "rewards/rihgt/mean"])
def test_a_metric_that_no_evaluation_has_is_an_error_before_anything_is_loaded(colo, place, unloaded, metric):
    code, err = bad(colo, *COMPARED, "--metric_for_best_model", metric, reward="scores.py:right")
    assert code == 1 and f"metric_for_best_model {metric!r} is none of an evaluation's, which are " in err
    assert "loss, num_tokens, " in err and "rewards/right/mean" in err and len(said(err)) == 1


def test_the_divergence_is_no_metric_where_beta_is_none(colo, place, unloaded):
    code, err = bad(colo, *COMPARED, "--metric_for_best_model", "kl", reward="scores.py:right")
    assert code == 1 and "metric_for_best_model 'kl' is none of an evaluation's, which are " in err
    assert " kl" not in err.partition("which are ")[2] and len(said(err)) == 1


@pytest.mark.parametrize("metric", ["loss", "eval_runtime", "eval_reward", "rewards/varied/std", "solved"])
def test_a_metric_that_an_evaluation_has_is_compared(colo, place, metric):
    Path("scores.py").write_text(
        "def varied(completion_ids, log_metric, **columns):\n"
        "    log_metric('solved', 1.0)\n"
        "    return [float(ids[0]) for ids in completion_ids]\n"
    )
    code, _, err = colo(*arguments(*COMPARED, "--metric_for_best_model", metric, "--save_strategy", "best"))
    assert code == 0 and ("'solved' is none of an evaluation's" in err) is (metric == "solved")
    assert Path("out/checkpoint-2").is_dir()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "null", "config.json holds a NoneType, not a JSON object: it is no model config"),
        ("config.json", "[1]", "config.json holds a list, not a JSON object: it is no model config"),
        ("config.json", '{"model_type": "qw', "config.json is not valid JSON (Unterminated string"),
        ("tokenizer.json", "{", "the tokenizer of checkpoint cannot be read (Expecting property name"),
        ("tokenizer_config.json", "[", "the tokenizer of checkpoint cannot be read (Expecting value"),
        ("model.safetensors.index.json", "{", "the weights of checkpoint cannot be read (Expecting property name"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {}}',
            "the weights of checkpoint cannot be read (no 'metadata'",
        ),
    ],
)
def test_a_damaged_file_of_a_checkpoint_is_named(colo, place, name, text, words):
    if "index" in name:
        Path("checkpoint/model.safetensors").unlink()
    Path("checkpoint", name).write_text(text)
    code, err = bad(colo)
    assert code == 1 and words in err and "Traceback" not in err


@pytest.mark.parametrize("attention", ["flash_attention_2", "kernels-community/flash-attn2", "nonsense", ""])
def test_an_attention_that_cannot_be_had_is_an_error_before_an_engine_starts(colo, place, monkeypatch, attention):
    monkeypatch.setattr("colo.trl.flag.start", None)
    for name in ("is_flash_attn_2_available", "is_kernels_available"):
        monkeypatch.setattr(f"transformers.modeling_utils.{name}", lambda *_, **__: False, raising=False)
    code, err = bad(colo, f"--attn_implementation={attention}")
    assert code == 1 and f"error: attn_implementation={attention!r} cannot be had (" in err
    assert "Traceback" not in err


def test_a_package_that_an_option_needs_is_an_error_of_usage(colo, place, unloaded, monkeypatch):
    # transformers keeps a config of DeepSpeed's that has failed as long as anything refers to it
    monkeypatch.setattr("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", None)
    code, err = bad(colo, "--deepspeed", "ds.json")
    assert code == 2 and "Traceback" not in err and "deepspeed" in err


@pytest.mark.parametrize("name", ["model_name_or_path", "dataset_name", "reward_funcs", "output_dir"])
def test_what_has_to_be_given_is_named(colo, place, unloaded, name):
    given = arguments()
    start = given.index(f"--{name}")
    code, _, err = colo(*given[:start], *given[start + 2 :])
    assert code == 2 and f"--{name}" in err and ("required" in err or "Missing option" in err)


def test_vllm_and_trl_that_are_not_installed_are_named_with_what_to_install(colo, place, unloaded, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "vllm" else name)
    code, err = bad(colo, "--engine", "vllm")
    assert code == 2 and "--colo_engine vllm needs vLLM" in err
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    code, err = bad(colo)
    assert code == 2 and "colo grpo needs TRL: pip install 'colo-rl[trl]'" in err


# ---- datasets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "csv", "json", "jsonl", "folder", "saved", "saved splits"])
def test_datasets_are_read_from_files_and_folders_and_columns_are_renamed(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = datasets.Dataset.from_list([{"question": row["prompt"], "answer": row["solution"]} for row in SUMS])
    path = tmp_path / f"sums.{kind}"
    if kind == "folder":
        path.mkdir()
        rows.to_json(path / "train.jsonl")
        rows.select(range(2)).to_json(path / "test.jsonl")
    elif kind.startswith("saved"):
        (datasets.DatasetDict({"test": rows}) if kind == "saved splits" else rows).save_to_disk(str(path))
    else:
        getattr(rows, f"to_{kind.removesuffix('l')}")(path)
    columns = ["prompt=question", "solution=answer"]
    found = load_rows(str(path), "test", columns=columns)
    assert set(found.column_names) == {"prompt", "solution"}
    assert found[1]["prompt"] == "0+1="
    assert len(found) == (2 if kind == "folder" else 12)
    if kind in ("folder", "saved splits"):
        with pytest.raises((ValueError, KeyError), match="validation"):
            load_rows(str(path), "validation", columns=columns)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
def test_lines_end_where_json_lines_do(place, start, ending):
    prompts = ["a\u2028b", "c\u2029d", "e\x85f"]
    lines = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + ending for prompt in prompts)
    Path("sums.jsonl").write_bytes(start + lines.encode())
    assert list(load_rows("sums.jsonl", "train")["prompt"]) == prompts


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("a.csv", b"prompt,solution\n1,2\n3,4,5\n", "Expected 2 fields in line 3, saw 3"),
        ("a.csv", "prompt\n\u00e9\n".encode("latin-1"), "'utf-8' codec can't decode byte 0xe9"),
        ("a.csv", b"prompt,solution\n", "no data"),
        ("a.json", b"[]", "no data"),
        ("a.json", b'{"prompt": ', "JSON"),
        ("a.parquet", b"prompt", "[Pp]arquet"),
    ],
    ids=str,
)
@pytest.mark.parametrize("folder", [".", "rows"])
def test_files_that_cannot_be_read_are_named_with_the_cause(
    colo, place, unloaded, monkeypatch, name, content, cause, folder
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place / "cache"))
    Path(folder).mkdir(exist_ok=True)
    Path(folder, name).write_bytes(content)
    data = name if folder == "." else folder
    code, err = bad(colo, data=data)
    assert code == 1 and re.search(rf"error: dataset {data} cannot be read \(.*{cause}.*\): give a split", err)


def test_columns_that_some_rows_lack_are_none_there(place):
    write_rows([{"prompt": "1", "level": 3}, {"prompt": "2", "unit": "m"}])
    found = load_rows("sums.jsonl", "train")
    assert found.column_names == ["prompt", "level", "unit"]
    assert found[1] == {"prompt": "2", "level": None, "unit": "m"}
