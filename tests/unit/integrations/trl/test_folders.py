import os
import re
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import colo.trl
from colo.integrations.trl.folders import check_checkpoint, check_output
from colo.testing import tiny_checkpoint
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from tests.trainers import ALPHABET, SMALL_CACHE, trained

FLAG = {"fast_inference": True, "colo_engine": "torch", "colo_kv_cache_mib": 1}
LORA = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])


def model_of(checkpoint, lora=False):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, tie_word_embeddings=not lora)
    return get_peft_model(model, LORA) if lora else model


def test_a_folder_that_can_be_made_is_not_made(tmp_path):
    check_output(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"output_dir .*/file/out cannot be made, .*/file is a file: choose"):
        check_output(tmp_path / "file" / "out")


def test_a_closed_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir(mode=0o500)
    if os.geteuid() == 0:  # to whom it is open
        monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path))
    with pytest.raises(PermissionError, match="cannot be written to"):
        check_output(tmp_path / "closed" / "out")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
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
