import asyncio
import dataclasses
import functools
import importlib.metadata
import inspect
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Json
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

import colo.trl
from colo.errors import Unsupported
from colo.testing import tiny_checkpoint
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from colo.trl.checks import (
    READ_OF_TRAINER,
    PromptReader,
    check_checkpoint,
    check_columns,
    check_contract,
    check_fused_head,
    check_output,
    check_trainer,
    checked,
)
from tests.models import tiny_qwen3
from tests.trainers import ALPHABET, SMALL_CACHE, logged, options, sums, trained

VERSION = re.escape(importlib.metadata.version("trl"))


def a_trainer(*, args=None, **changes):
    """What the checks read of a trainer that can be attached to; `changes` are other values."""
    known = dict.fromkeys(READ_OF_TRAINER) | {
        "use_vllm": False,
        "processing_class": SimpleNamespace(convert_ids_to_tokens=None),
        "is_deepspeed_enabled": False,
        "is_fsdp_enabled": False,
        "args": SimpleNamespace(vllm_tensor_parallel_size=1, **(args or {})),
    }
    return SimpleNamespace(**(known | changes))


def sharded_by(**changes):
    """What they read of a trainer with accelerate's FSDP plugin."""
    plugin = {"fsdp_version": 2, "activation_checkpointing": False, "cpu_offload": OffloadPolicy()} | changes
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**plugin))
    return a_trainer(is_fsdp_enabled=True, accelerator=SimpleNamespace(state=state))


def test_this_trl_is_the_one_that_colo_knows():
    check_contract(a_trainer())
    check_trainer(a_trainer())
    check_trainer(sharded_by())


@pytest.mark.parametrize("method", ["generate", "sync_weights"])
def test_a_method_that_takes_something_else_is_named_with_the_version(monkeypatch, method):
    class Drifted(vllm_generation.VLLMGeneration):
        pass

    setattr(Drifted, method, lambda self, requests: None)
    monkeypatch.setattr(vllm_generation, "VLLMGeneration", Drifted)
    with pytest.raises(Unsupported, match=rf"VLLMGeneration\.{method} of TRL {VERSION} takes self, requests, where"):
        check_contract(a_trainer())


def test_a_class_that_is_gone_is_named_with_the_version(monkeypatch):
    monkeypatch.delattr(vllm_generation, "VLLMGeneration")
    with pytest.raises(Unsupported, match=rf"TRL {VERSION} has no trl\.generation\.vllm_generation\.VLLMGeneration"):
        check_contract(a_trainer())


@pytest.mark.parametrize("name", READ_OF_TRAINER)
def test_what_a_trainer_lacks_is_named_with_the_version(name):
    trainer = a_trainer()
    delattr(trainer, name)
    with pytest.raises(Unsupported, match=rf"SimpleNamespace of TRL {VERSION} has no {name}: colo attaches to GRPO"):
        check_contract(trainer)


@pytest.mark.parametrize(
    ("trainer", "error", "words"),
    [
        (a_trainer(use_vllm=True), ValueError, "leave use_vllm out"),
        (a_trainer(processing_class=SimpleNamespace()), Unsupported, "a processor for images"),
        (a_trainer(_is_vlm=True), Unsupported, "a processor for images"),
        (a_trainer(is_deepspeed_enabled=True), Unsupported, "DeepSpeed"),
        (a_trainer(args={"deepspeed": "zero3.json"}), Unsupported, "DeepSpeed"),
        (sharded_by(fsdp_version=1), Unsupported, "flattens weights: set fsdp_version: 2"),
        (sharded_by(activation_checkpointing=True), Unsupported, "set gradient_checkpointing=True instead"),
        (sharded_by(cpu_offload=CPUOffloadPolicy()), Unsupported, "offload_params keeps weights in host memory"),
        (a_trainer(args={"use_transformers_continuous_batching": True}), ValueError, "use_transformers_continuous"),
        (a_trainer(args={"cast_lm_head_to_fp32": True}), Unsupported, "cast_lm_head_to_fp32=True makes"),
        (a_trainer(args={"temperature": 0.0}), ValueError, "temperature must be above 0, not 0.0"),
        (a_trainer(args={"temperature": 1e-300}), ValueError, "temperature must be above 0, not 1e-300: .* in fp32"),
        (a_trainer(args={"reward_weights": [1.0, math.nan]}), ValueError, "reward_weights must be finite .*, not nan"),
        (a_trainer(args={"reward_weights": [-math.inf]}), ValueError, "reward_weights must be finite .*, not -inf"),
    ],
    ids=[
        "use_vllm",
        "processor",
        "vlm",
        "deepspeed",
        "its config",
        "fsdp 1",
        "fsdp ac",
        "fsdp offload",
        "continuous batching",
        "cast head",
        "temperature",
        "tiny temperature",
        "weight nan",
        "weight inf",
    ],
)
def test_what_colo_does_not_do_is_refused_by_name(trainer, error, words):
    with pytest.raises(error, match=words):
        check_trainer(trainer)


OFFLOADING = {"colo_offload_activations": True, "device": torch.device("cuda")}


def test_activations_under_a_trl_without_its_fused_head_are_refused_by_name(monkeypatch):
    monkeypatch.delattr(grpo_trainer, "add_fused_lm_head", raising=False)
    with pytest.raises(Unsupported, match=r"colo_offload_activations=True needs TRL 1\.15 or newer, not"):
        check_trainer(a_trainer(args=OFFLOADING))


def test_activations_of_layers_that_fsdp_gathers_are_refused_unless_they_are_checkpointed(monkeypatch):
    monkeypatch.setattr(grpo_trainer, "add_fused_lm_head", None, raising=False)
    trainer = sharded_by()
    vars(trainer.args).update(OFFLOADING, gradient_checkpointing=False)
    with pytest.raises(Unsupported, match="with FSDP needs gradient_checkpointing=True"):
        check_trainer(trainer)
    trainer.args.gradient_checkpointing = True
    check_trainer(trainer)


def test_tensor_parallelism_is_refused_by_name():
    trainer = a_trainer()
    trainer.args.vllm_tensor_parallel_size = 2
    with pytest.raises(Unsupported, match="vllm_tensor_parallel_size=2: .* leave 1"):
        check_trainer(trainer)


VESPO = {"loss_type": "vespo", "vllm_importance_sampling_correction": True}


def vespo(mode, **changes):
    return a_trainer(args=VESPO | {"vllm_importance_sampling_mode": mode} | changes)


def test_the_mode_that_trl_asks_for_with_use_vllm_is_asked_for():
    for mode in ("sequence_mask", "sequence_truncate"):
        with pytest.raises(ValueError, match=f"vespo.*mode='{mode}' is of sequences: set 'token_truncate' or"):
            check_trainer(vespo(mode))
    for fits in (
        vespo("token_mask"),
        vespo("token_truncate"),
        vespo("sequence_mask", vllm_importance_sampling_correction=False),
        vespo("sequence_mask", loss_type="dapo"),
    ):
        check_trainer(fits)


FLAG = {"fast_inference": True, "colo_engine": "torch", "colo_kv_cache_bytes": "1MiB"}
LORA = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])


def model_of(checkpoint, lora=False):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, tie_word_embeddings=not lora)
    if not lora:
        return model
    return get_peft_model(model, dataclasses.replace(LORA, **(lora if isinstance(lora, dict) else {})))


def test_a_folder_that_can_be_made_is_not_made(tmp_path):
    check_output(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"output_dir .*/file/out cannot be made, .*/file is a file: choose"):
        check_output(tmp_path / "file" / "out")


def test_a_closed_folder_is_refused(tmp_path, monkeypatch):
    def closed(dir):
        raise PermissionError(f"{dir} is closed")

    (tmp_path / "closed").mkdir(mode=0o500)
    if os.geteuid() == 0:  # to whom it is open
        monkeypatch.setattr("colo.trl.checks.TemporaryFile", closed)
    with pytest.raises(PermissionError, match="cannot be written to"):
        check_output(tmp_path / "closed" / "out")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_that_takes_no_file_is_refused():
    with pytest.raises(PermissionError, match="output_dir /proc/new/out cannot be written to, /proc is closed"):
        check_output("/proc/new/out")


@pytest.mark.parametrize("lora", [False, True, {"use_dora": True}], ids=["full", "lora", "dora"])
@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_what_a_model_has_saved_is_its_checkpoint(checkpoint, tmp_path, lora, shard):
    model = model_of(checkpoint, lora)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if lora or shard == "1GB" else 15)
    check_checkpoint(tmp_path, model)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_missing_and_misshapen_weights_are_named(checkpoint, tmp_path, lora):
    model = model_of(checkpoint, lora)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(key for key in tensors if "layers.1.mlp.up_proj" in key)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(ValueError, match=rf"it lacks 1 of \d+ weights, {re.escape(name)} for one; resume from"):
        check_checkpoint(tmp_path, model)
    save_file(tensors | {name: torch.zeros(3, 2)}, file)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has shape \(3, 2\) there, and \(\d+, \d+\) here"):
        check_checkpoint(tmp_path, model)


def test_the_adapter_that_trains_is_looked_for_in_its_own_folder(checkpoint, tmp_path):
    model = get_peft_model(model_of(checkpoint), LoraConfig(r=4, target_modules="all-linear"))
    model.add_adapter("mine", LoraConfig(r=2, target_modules="all-linear"))
    model.set_adapter("mine")
    model.save_pretrained(tmp_path)
    check_checkpoint(tmp_path, model)
    shutil.copy(tmp_path / "adapter_model.safetensors", tmp_path / "mine" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has shape \(4, 64\) there, and \(2, 64\) here"):
        check_checkpoint(tmp_path, model)
    (tmp_path / "mine").rename(tmp_path / "other")
    with pytest.raises(ValueError, match="it has adapters, and 'mine' is none of them; resume from"):
        check_checkpoint(tmp_path, model)
    (tmp_path / "adapter_model.safetensors").unlink()
    model.set_adapter("default")
    with pytest.raises(ValueError, match="it has adapters, and 'default' is none of them; resume from"):
        check_checkpoint(tmp_path, model)


def test_a_folder_without_weights_is_left_to_transformers(checkpoint, tmp_path):
    check_checkpoint(tmp_path, model_of(checkpoint))


def test_resuming_from_another_runs_checkpoint_changes_nothing(make, tmp_path):
    trainer = make(
        kind=ColoGRPOTrainer, config=ColoGRPOConfig, save_strategy="steps", save_steps=1, max_steps=1, **FLAG
    )
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    before = trained(trainer.model)
    other = tiny_checkpoint(tmp_path / "other", alphabet=ALPHABET + "abc")
    shutil.copy(folder / "model.safetensors", tmp_path / "good.safetensors")
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ValueError, match="is not of this model: model.embed_tokens.weight has shape"):
        trainer.train(resume_from_checkpoint=str(folder))
    assert all(torch.equal(before[name], p) for name, p in trained(trainer.model).items())
    shutil.copy(tmp_path / "good.safetensors", folder / "model.safetensors")
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("by_name", [True, False], ids=["named", "given"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_an_engine_is_started(make, checkpoint, tmp_path, by_name):
    (tmp_path / "file").write_text("")
    model = None if by_name else model_of(checkpoint)
    with pytest.raises(NotADirectoryError, match="choose another output_dir"):
        make(
            model=model, kind=ColoGRPOTrainer, config=ColoGRPOConfig, output_dir=str(tmp_path / "file" / "out"), **FLAG
        )


def test_attach_refuses_such_a_folder_too(make, tmp_path):
    trainer = make()
    (tmp_path / "file").write_text("")
    trainer.args.output_dir = str(tmp_path / "file" / "out")
    with pytest.raises(NotADirectoryError, match="choose another output_dir"):
        colo.trl.attach(trainer, engine="torch", config=SMALL_CACHE)
    assert not hasattr(trainer, "colo")


TRAINER = SimpleNamespace(state=SimpleNamespace(global_step=2), model=torch.nn.Linear(1, 1))
GOOD = [[1.0, 0.0], [1, True], [None, 0.5], [None, None], (0.1, 0.2), torch.ones(2), [torch.tensor(1.0), 0]]


def run(returned, **options):
    def mine(prompts, completions, **_):
        return returned

    return checked(mine, "mine", TRAINER)(prompts=["a", "b"], completions=["c", "d"], **options)


@pytest.mark.parametrize("returned", GOOD, ids=str)
def test_what_trl_takes_is_handed_on_as_it_is(returned):
    assert run(returned, answer=["e", "f"]) is returned


def test_rewards_that_can_be_read_once_are_handed_on_as_a_list():
    assert run(iter([1, 0.5])) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], "1 values for 2 completions"),
        (["1", 1.0], "'1' for completion 0"),
        ([1.0, float("nan")], "nan for completion 1"),
        ([-float("inf"), 1.0], "-inf for completion 0"),
        ("ab", "'ab'"),
        (None, "None"),
        (1.0, r"1\.0"),
        ({0: 1.0, 1: 1.0}, "{0: 1.0, 1: 1.0}"),
        ([[1.0], [1.0]], r"\[1.0\] for completion 0"),
        ([1j, 1.0], "1j for completion 0"),
    ],
    ids=str,
)
def test_anything_else_is_refused_with_the_reward_and_the_step(returned, words):
    with pytest.raises(ValueError, match=f"reward 'mine' returned {words}.* at step 3: return a .*None where it has"):
        run(returned)


def test_a_reward_whose_square_fp32_does_not_hold_is_refused():
    """TRL's deviation of its group would be infinite, and the advantages 0, or NaN above 3.4e38."""
    for value, shown in ((1e300, r"1e\+300"), (-2e19, r"-2e\+19")):
        words = f"reward 'mine' returned {shown} for completion 1 of 2 at step 3, and TRL .*: return numbers below 1e18"
        with pytest.raises(ValueError, match=words):
            run([None, value])
    assert run([1e18, -1e18]) == [1e18, -1e18]


def test_the_step_is_the_one_that_is_being_made_or_the_last_before_an_evaluation():
    model = torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=0), model=model)
    call = checked(lambda completions, **_: None, "mine", trainer)
    with pytest.raises(ValueError, match="returned None at step 1:"):
        call(completions=["c"])
    trainer.state.global_step = 2
    model.eval()
    with pytest.raises(ValueError, match="returned None at step 2:"):
        call(completions=["c"])


def test_names_stay_and_a_reward_model_passes_through():
    def mine(completions, **_):
        """Says something."""
        return [1.0]

    class Callable:
        def __call__(self, completions, **_):
            return ["no"]

    assert (checked(mine, "mine", TRAINER).__name__, checked(mine, "mine", TRAINER).__doc__) == ("mine", mine.__doc__)
    model = torch.nn.Linear(1, 1)
    assert checked(model, "other", TRAINER) is model
    for reward in (Callable(), functools.partial(Callable())):
        with pytest.raises(ValueError, match="returned 'no' for completion 0"):
            checked(reward, "other", TRAINER)(completions=["a"])


def test_what_an_asynchronous_reward_returns_is_checked_too():
    async def mine(completions, **_):
        return returned[0]

    class Judge:
        async def __call__(self, completions, **_):
            return returned[0]

    for reward in (mine, Judge()):
        call = checked(reward, "mine", TRAINER)
        assert inspect.iscoroutinefunction(call)
        returned = [[1.0, None]]
        assert asyncio.run(call(completions=["c", "d"])) is returned[0]
        returned = [[1.0, float("nan")]]
        with pytest.raises(ValueError, match="reward 'mine' returned nan for completion 1 of 2 at step 3"):
            asyncio.run(call(completions=["c", "d"]))


def answered(completions, answer, trainer_state, **_):
    return [0.0] * len(completions)


def test_columns_that_are_there_are_enough():
    check_columns([answered, len, torch.nn.Linear(1, 1), "a/model"], sums())
    check_columns([answered], sums().to_iterable_dataset().map(lambda row: row))  # whose columns are not known
    check_columns([answered], None)
    check_columns(
        [torch.nn.Linear(1, 1), "a/model"], sums().add_column("prompts", ["3"] * 32)
    )  # called with texts alone


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (
            sums().remove_columns("answer"),
            r"reward 'answered' takes answer, and the dataset has prompt: add the column",
        ),
        (sums().rename_column("prompt", "question"), r"the dataset has question, answer, and no 'prompt': rename"),
        (
            sums().add_column("completions", ["3"] * 32),
            r"'answered' is called with the completions of a step, and the dataset has prompt, .*, completions: rename",
        ),
        (sums().add_column("prompts", ["3"] * 32), r"the prompts of a step, and the dataset has prompt, .*: rename"),
    ],
    ids=["a reward's", "the prompt", "completions twice", "prompts twice"],
)
def test_a_column_that_is_missing_is_named(dataset, words):
    with pytest.raises(ValueError, match=words):
        check_columns([answered], dataset)


CONVERSATION = [{"role": "user", "content": "1+2="}]


@pytest.mark.parametrize("prompt", [1, None, 1.5, True, [1, 2], ["1+", "2="], [], [{"content": "1+2="}]], ids=str)
def test_prompts_that_trl_cannot_tokenize_are_refused_before_anything_starts(make, prompt, tmp_path):
    rows = Dataset.from_dict({"prompt": [prompt] * 8})
    with pytest.raises(ValueError, match=r"the prompt of row 1 of the dataset is .*, and TRL takes texts or lists"):
        make(dataset=rows, kind=ColoGRPOTrainer, config=ColoGRPOConfig, model=str(tmp_path / "not read"), **FLAG)
    with pytest.raises(ValueError, match="the prompt of row 1 of eval_dataset is "):
        check_columns([], sums(), rows)
    check_columns([], rows, rollout_func=answered)
    check_columns([], Dataset.from_dict({"prompt": [CONVERSATION]}))


@pytest.mark.parametrize(
    ("first", "prompt", "words"),
    [
        ("1+2=", None, "is None, and TRL takes texts or lists"),
        (CONVERSATION, None, "is None, and TRL takes texts or lists"),
        (CONVERSATION, [], r"is \[\], and TRL takes texts or lists"),
        (CONVERSATION, [None], r"is \[None\], and TRL takes texts or lists"),
        ("1+2=", [1, 2], r"is \[1, 2\], and TRL takes texts or lists"),
        ("1+2=", CONVERSATION, "is a conversation, and that of row 1 a text"),
        (CONVERSATION, "1+2=", "is a text, and that of row 1 a conversation"),
    ],
    ids=str,
)
def test_a_later_prompt_that_trl_cannot_tokenize_is_refused_by_its_row(make, first, prompt, words, tmp_path):
    features = Features({"prompt": Json()})  # a column that may have values of several types
    rows = Dataset.from_dict({"prompt": [prompt] + [first] * 1200}, features=features).select(range(1200, -1, -1))
    with pytest.raises(ValueError, match=f"the prompt of row 1201 of the dataset {words}"):
        make(dataset=rows, kind=ColoGRPOTrainer, config=ColoGRPOConfig, model=str(tmp_path / "not read"), **FLAG)
    check_columns([], rows.with_transform(lambda batch: {"prompt": ["1+2="] * len(batch["prompt"])}))
    check_columns([], rows.to_iterable_dataset())


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ prefix }}{{ m.content }}{% endfor %}"
)


def chat(*contents, role="user"):
    return [{"role": role, "content": content} for content in contents]


@pytest.mark.parametrize("way", ["flag", "named", "attach"])
@pytest.mark.parametrize(
    ("first", "prompt", "error", "words"),
    [
        ("1+2=", "", ValueError, "the prompt of row 31 of the dataset has no tokens, so that there is nothing"),
        ("1+2=", "1" * 64, ValueError, "the prompt of row 31 of the dataset has 64 tokens and the context 64: shorten"),
        (chat("1+2="), chat(""), ValueError, "the prompt of row 31 of the dataset has no tokens"),
        (chat("1+2="), chat(None), ValueError, "the prompt of row 31 of the dataset has no tokens"),
        (chat("1+2="), chat("1" * 40, "2" * 40), ValueError, "has 80 tokens and the context 64"),
        (
            chat("1+2="),
            chat("1", role="system") + chat("2"),
            ValueError,
            r"the tokenizer cannot read the prompt of row 31 of the dataset \(no system\): change its messages",
        ),
        (
            chat("1+2="),
            chat([{"type": "text", "text": "1"}, {"type": "image", "text": None}]),
            Unsupported,
            "the prompt of row 31 of the dataset has a part of type 'image': colo generates from text",
        ),
    ],
    ids=["empty", "long", "empty chat", "chat of None", "long chat", "refused by the template", "image"],
)
def test_a_prompt_of_which_nothing_can_be_sampled_is_refused_by_its_row(
    make, attach, checkpoint, tmp_path, way, first, prompt, error, words
):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATE
    folder = shutil.copytree(checkpoint, tmp_path / "with template")
    tokenizer.save_pretrained(folder)
    rows = Dataset.from_dict({"prompt": [first] * 30 + [prompt]}, features=Features({"prompt": Json()}))
    given = {"dataset": rows, "vllm_max_model_length": 64, "max_completion_length": 4}
    if way == "attach":
        trainer = make(made_with={"processing_class": tokenizer}, **given)
        with pytest.raises(error, match=words):
            attach(trainer)
        return
    made_with = {"processing_class": tokenizer} if way == "flag" else {}
    started = {"kind": ColoGRPOTrainer, "config": ColoGRPOConfig, "model": str(folder), "made_with": made_with}
    with pytest.raises(error, match=words):
        # with a KV cache of which no engine would start
        make(**given, **started, **(FLAG | {"colo_kv_cache_bytes": "1"}))


def test_prompts_that_look_empty_or_refused_and_are_not_are_taken(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "of bytes")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATE
    args = SimpleNamespace(vllm_max_model_length=None, chat_template_kwargs={"prefix": "1"})
    reader = PromptReader.of(tokenizer, AutoConfig.from_pretrained(checkpoint), args)
    texts = Dataset.from_dict({"prompt": [" ", "\n\t", "...", "\u200b", tokenizer.eos_token]})
    check_columns([], texts, read_by=lambda: reader)
    chats = Dataset.from_dict({"prompt": [chat(""), chat("1", "", "2")]})  # to which the template adds
    check_columns([], chats, read_by=lambda: reader)
    check_columns([], Dataset.from_dict({"prompt": [""]}))  # by whoever has no tokenizer yet
    check_columns([], Dataset.from_dict({"prompt": [""]}), rollout_func=answered, read_by=lambda: reader)


def test_columns_of_images_are_refused_and_those_of_none_are_not():
    with pytest.raises(Unsupported, match=r"the dataset has images in column 'images', .*remove_columns\('images'\)"):
        check_columns([], Dataset.from_dict({"prompt": ["1"] * 2, "images": [None, [b"x"]]}))
    check_columns([], Dataset.from_dict({"prompt": ["1"], "image": [None]}))


@pytest.mark.parametrize("known", [True, False], ids=["columns known", "columns unknown"])
@pytest.mark.parametrize(
    ("row", "error", "words"),
    [
        ({"prompt": "1", "image": "x"}, Unsupported, "the dataset has images in column 'image', and colo generates"),
        ({"prompt": "1", "images": ["x"]}, Unsupported, r"in column 'images', .*remove_columns\('images'\)"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "text": ""}]}]},
            Unsupported,
            "the prompt of row 1 of the dataset has a part of type 'image'",
        ),
        ({"prompt": 3}, ValueError, "the prompt of row 1 of the dataset is 3, and TRL takes texts or lists"),
    ],
    ids=["image", "images", "messages", "number"],
)
def test_the_first_row_of_a_stream_is_checked_before_anything_is_loaded(make, monkeypatch, row, error, words, known):
    monkeypatch.setattr("colo.trl.flag.start", None)
    rows = Dataset.from_list([row] * 20).to_iterable_dataset()
    rows = rows if known else rows.map(lambda given: given)
    assert (rows.column_names is not None) == known
    with pytest.raises(error, match=words):
        make(kind=ColoGRPOTrainer, config=ColoGRPOConfig, dataset=rows, max_steps=1, **FLAG)


def test_streams_of_texts_and_of_no_image_are_taken_whole():
    rows = IterableDataset.from_generator(lambda: ({"prompt": str(number), "image": None} for number in range(3)))
    check_columns([], rows)
    assert [row["prompt"] for row in rows] == ["0", "1", "2"]
    check_columns([], IterableDataset.from_generator(lambda: iter(())))


def test_columns_that_a_rollout_may_return_are_not_missed(make, attach, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def answered(completions, verdict, **_):
        return [1.0] * len(completions)

    def rolled_out(prompts, trainer):
        raise AssertionError("not called")

    attach(make(reward=answered, made_with={"rollout_func": rolled_out}))
    with pytest.raises(ValueError, match="takes verdict, and the dataset has"):
        attach(make(reward=answered))


class Asking:
    """An environment that has prompts and rewards of its own, which TRL knows since 1.15."""

    def reset(self, **_):
        return "1+2="

    def get_reward(self):
        return 1.0


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory':UserWarning")
@pytest.mark.parametrize(
    ("factory", "columns"), [({"a": Asking}, {"environment": ["a"] * 8}), (Asking, {"level": [1] * 8})], ids=str
)
@pytest.mark.skipif("environment_factories" not in inspect.getsource(grpo_trainer), reason="this TRL needs prompts")
def test_an_environment_has_prompts_of_its_own(make, attach, tmp_path, factory, columns):
    rows, chat = Dataset.from_dict(columns), str(tiny_checkpoint(tmp_path / "chat"))
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.response_template = {}
    tokenizer.parse_response = lambda ids, **_: {"role": "assistant", "content": tokenizer.decode(ids)}
    made_with = {"environment_factory": factory, "processing_class": tokenizer}
    given = {"model": chat, "dataset": rows, "made_with": made_with}
    trainer = make(**given, reward=[])
    attach(trainer)
    given |= FLAG | {"kind": ColoGRPOTrainer, "config": ColoGRPOConfig}
    flagged = make(**given, reward=[])
    for each in (trainer, flagged):
        each.train()
        assert logged(each) == [1.0, 1.0]
    with pytest.raises(Unsupported, match="colo_partial_rollouts does not go with environments"):
        make(**given, reward=[], colo_partial_rollouts=True)


def test_a_column_that_an_evaluation_would_miss_is_named():
    lacking = sums().remove_columns("answer")
    check_columns([answered], sums(), {"one": sums(), "other": sums().to_iterable_dataset().map(lambda row: row)})
    with pytest.raises(ValueError, match="takes answer, and eval_dataset has prompt: add the column"):
        check_columns([answered], sums(), lacking)
    with pytest.raises(ValueError, match="takes answer, and eval_dataset other has prompt: add the column"):
        check_columns([answered], sums(), {"one": sums(), "other": lacking})


def test_a_missing_column_is_named_before_a_model_is_loaded(tmp_path):
    args = ColoGRPOConfig(**options(tmp_path), fast_inference=True, colo_engine="torch")
    with pytest.raises(ValueError, match="takes answer, and the dataset has prompt"):
        ColoGRPOTrainer("no/such-model", answered, args, train_dataset=sums().remove_columns("answer"))
    with pytest.raises(ValueError, match="is called with the prompts of a step"):
        ColoGRPOTrainer("no/such-model", len, args, train_dataset=sums().add_column("prompts", ["3"] * 32))


# ---- TRL's fused LM head ---------------------------------------------------------------------------------------------


class OwnForward(torch.nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 2


class NoLinear(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.weight, self.bias = head.weight, None

    def forward(self, hidden):
        return (hidden @ self.weight.T).tanh()


def own_class(model):
    model.lm_head.__class__ = OwnForward


def own_attribute(model):
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden) + 1


def no_linear(model):
    model.lm_head = NoLinear(model.lm_head)


def scaled_after(model):
    model.lm_head.register_forward_hook(lambda head, given, logits: logits * 2)


def scaled_before(model):
    model.lm_head.register_forward_pre_hook(lambda head, given: (given[0] * 2,))


def scaled_outside(model):
    model.register_forward_hook(lambda whole, given, output: type(output)(logits=output.logits * 2))


def cast(model):
    """As TRL does for `cast_lm_head_to_fp32`."""
    model.lm_head.register_forward_pre_hook(lambda head, given: (given[0].to(torch.float32),))


def observed(model):
    model.lm_head.register_forward_hook(lambda head, given, logits: None)


def parametrized(model):
    register_parametrization(model.lm_head, "weight", torch.nn.Identity())


@pytest.fixture
def fused():
    model = AutoModelForCausalLM.from_config(tiny_qwen3(), dtype=torch.float32)
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has another head")
    utils.add_fused_lm_head(model)
    return model


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (own_class, "the LM head is OwnForward with a forward of its own"),
        (own_attribute, "the LM head is Linear with a forward of its own"),
        (no_linear, "the LM head is NoLinear, not a plain linear layer"),
        (scaled_after, r"this model's logits are 2 \* logits, where TRL reads 1 \* logits"),
        (scaled_before, r"this model's logits are 2 \* logits, where TRL reads 1 \* logits"),
        (scaled_outside, r"this model's logits are 2 \* logits, where TRL reads 1 \* logits"),
    ],
)
def test_a_head_that_is_more_than_a_linear_layer_is_refused(fused, change, why):
    change(fused)
    with pytest.raises(Unsupported, match=f"on other log-probabilities than its own: .*{why}"):
        check_fused_head(fused)


@pytest.mark.parametrize("change", [cast, observed, parametrized])
def test_a_head_that_computes_what_its_weight_does_is_taken(fused, change):
    change(fused)
    check_fused_head(fused)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        own = fused(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        assert torch.allclose(fused(input_ids=ids, labels=ids, fused_lm_head=True).log_probs, own, atol=1e-5)
