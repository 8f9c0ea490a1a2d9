"""What `launch` makes of a model that it is given."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import colo
from colo.assembly.starting import _adapted_modules
from colo.config import RuntimeConfig, Weights
from colo.units import MIB
from tests.models import tiny_qwen3

CONFIG = tiny_qwen3(num_hidden_layers=2, tie_word_embeddings=True)


@pytest.mark.parametrize("weights", list(Weights))
@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["full", "lora"])
def test_a_model_that_is_given_is_left_alone(weights, lora, monkeypatch):
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = {name: (id(p), p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    modules = {name: type(module) for name, module in model.named_modules()}
    copied = []
    counting = SimpleNamespace(deepcopy=lambda thing: copied.append(thing is model) or copy.deepcopy(thing))
    monkeypatch.setattr("colo.assembly.starting.copy", counting)
    rt = colo.launch(
        model,
        lora=lora,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        config=RuntimeConfig(kv_cache_bytes=MIB, weights=weights),
        device="cpu",
    )
    assert sum(copied) == (weights is not Weights.AUTO)
    with rt.train():
        ids = torch.tensor([[1, 2, 3]])
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
    assert rt.generate([[1, 2, 3]], max_tokens=2)[0].weights_version == 1
    rt.close()
    assert not model.training
    assert modules == {name: type(module) for name, module in model.named_modules()}
    assert before.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        identity, value, requires_grad = before[name]
        assert (id(parameter), parameter.requires_grad) == (identity, requires_grad)
        assert torch.equal(parameter, value)
        assert parameter.grad is None


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")  # PEFT's
def test_an_adapter_of_an_embedding_is_refused_before_vllm_starts():
    lora = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(colo.Unsupported, match="adapts model.embed_tokens, an embedding"):
        _adapted_modules(CONFIG, lora)
    assert _adapted_modules(CONFIG, LoraConfig(r=2, target_modules=["q_proj", "down_proj"])) == ["down_proj", "q_proj"]
