import importlib.metadata
import re
from types import SimpleNamespace

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from trl.generation import vllm_generation

from colo.errors import Unsupported
from colo.integrations.trl.contract import READ_OF_TRAINER, check_contract, check_trainer

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
    ],
)
def test_what_colo_does_not_do_is_refused_by_name(trainer, error, words):
    with pytest.raises(error, match=words):
        check_trainer(trainer)


def test_tensor_parallelism_is_refused_by_name():
    trainer = a_trainer()
    trainer.args.vllm_tensor_parallel_size = 2
    with pytest.raises(Unsupported, match="vllm_tensor_parallel_size=2: .* leave 1"):
        check_trainer(trainer)
