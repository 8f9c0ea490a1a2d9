"""What `launch` makes of a model that it is given."""

import copy
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlavaConfig, Qwen2_5_VLConfig, T5Config

import colo
from colo.assembly import launch
from colo.assembly.launch import _check_complete
from colo.assembly.share import _adapted_modules
from colo.config import RuntimeConfig, Weights
from colo.errors import Unsupported
from colo.units import MIB
from colo.weights.sources.base import plain_name
from colo.weights.sources.module import ModuleSource
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
    monkeypatch.setattr("colo.assembly.launch.copy", counting)
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
    trained = {
        n for n, p in rt.model.named_parameters() if "lora_" not in n and not torch.equal(p, before[plain_name(n)][1])
    }
    assert trained == (set() if lora else before.keys() - {"model.embed_tokens.weight"})
    assert not model.training
    assert modules == {name: type(module) for name, module in model.named_modules()}
    assert before.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        identity, value, requires_grad = before[name]
        assert (id(parameter), parameter.requires_grad) == (identity, requires_grad)
        assert torch.equal(parameter, value)
        assert parameter.grad is None


@pytest.mark.parametrize("weights", list(Weights))
@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["full", "lora"])
def test_attention_and_checkpointing_of_a_model_that_is_given_are_those_that_train(weights, lora):
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.model.layers[1].gradient_checkpointing = False  # as of every second layer
    ran = []
    rt = colo.launch(
        model, lora=lora, config=RuntimeConfig(kv_cache_bytes=MIB, weights=weights), device="cpu", engine="torch"
    )
    trained = rt.model.get_base_model() if lora else rt.model
    assert trained.config._attn_implementation == "eager"
    for layer in trained.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda module, _: ran.append(module.layer_idx))
    with rt.train():
        ids = torch.tensor([[1, 2, 3]])
        rt.model(input_ids=ids, labels=ids).loss.backward()
        assert ran == [0, 1, 0], "the first layer again in the backward pass"
        assert all(parameter.grad is not None for parameter in rt.model.parameters() if parameter.requires_grad)
        rt.optimizer.step()
    rt.close()


def test_attention_of_a_config_that_is_given_is_that_which_trains():
    config = copy.deepcopy(CONFIG)
    config._attn_implementation = "eager"
    rt = colo.launch(config, config=RuntimeConfig(kv_cache_bytes=MIB), device="cpu", engine="torch")
    assert rt.model.config._attn_implementation == "eager"
    rt.close()


def untie(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)


def share_a_layer(model):
    model.model.layers[1] = model.model.layers[0]


def take_a_layer_out(model):
    del model.model.layers[1]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (untie, "lm_head.weight for one, are in the model alone"),
        (share_a_layer, r"model.layers.1\S+ for one, are in what the config builds alone"),
        (share_a_layer, "model.layers.0 and model.layers.1 of the model are one module, and the engine has one"),
        (take_a_layer_out, r"model.layers.1\S+ for one, are in what the config builds alone"),
    ],
)
def test_a_model_that_its_config_does_not_build_is_refused_before_an_engine_starts(started, engine, change, named):
    model = AutoModelForCausalLM.from_config(CONFIG)
    change(model)
    with pytest.raises(Unsupported, match=named):
        begin(model, engine)
    assert not started


def test_a_checkpoint_that_its_config_does_not_build_is_refused(started, tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIG)
    untie(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="tie_word_embeddings"):
        begin(str(tmp_path))
    assert not started


@pytest.fixture
def started(monkeypatch):
    """Engines that are started; each fails at once."""
    kinds = []

    def make(kind):
        def start(*_, **__):
            kinds.append(kind)
            raise RuntimeError("started")

        return start

    for kind in ("torch", "vllm"):
        monkeypatch.setattr(launch, f"make_{kind}_engine", make(kind))
    return kinds


def begin(model, engine="torch", **options):
    return colo.start(model, engine=engine, device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB), **options)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize(
    ("modules", "kind", "words"),
    [
        (["q_proj", "embed_tokens"], colo.Unsupported, "adapts model.embed_tokens, an embedding"),
        (["query_key_value"], ValueError, "query_key_value.* not found in the base model. Please check"),
    ],
    ids=["embedding", "another model's"],
)
def test_an_adapter_that_cannot_be_is_refused_before_an_engine_starts(started, engine, modules, kind, words):
    with pytest.raises(kind, match=words):
        begin(CONFIG, engine, lora=LoraConfig(r=2, target_modules=modules))
    assert started == []


def test_vllm_holds_matrices_for_adapted_modules_alone():
    assert _adapted_modules(CONFIG, LoraConfig(r=2, target_modules=["q_proj", "down_proj"])) == ["down_proj", "q_proj"]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "own"])
def test_an_adapter_on_a_tied_output_layer_is_warned_about_once_before_an_engine_starts(started, engine, is_tied):
    config = tiny_qwen3(tie_word_embeddings=is_tied)
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    with warnings.catch_warnings(record=True) as caught, pytest.raises(RuntimeError, match="started"):
        warnings.simplefilter("always")
        begin(config, engine, lora=lora)
    said = [str(warning.message) for warning in caught if "merging the adapter" in str(warning.message)]
    assert len(said) == is_tied and len(caught) == is_tied
    assert all("other logits" in words and "Leave the output layer out of target_modules" in words for words in said)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")  # PEFT's
def test_share_warns_of_such_an_adapter_of_the_users():
    lora = LoraConfig(r=2, target_modules=["lm_head"])
    model = get_peft_model(AutoModelForCausalLM.from_config(tiny_qwen3(tie_word_embeddings=True)), lora)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with pytest.warns(UserWarning, match="merging the adapter changes the embedding with it"):
        colo.share("torch", model, optimizer, config=RuntimeConfig(kv_cache_bytes=MIB)).close()


def test_it_is_not_warned_about_again_by_share():
    lora = LoraConfig(r=2, target_modules=["lm_head"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, model = begin(tiny_qwen3(tie_word_embeddings=True), lora=lora)
        colo.share(engine, model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)).close()
        engine.close()
    assert len([warning for warning in caught if "output layer" in str(warning.message)]) == 1


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_checkpoint_without_a_weight_is_refused_before_an_engine_starts(started, tmp_path, engine):
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 of the model's weights, model\.layers\.1\.mlp\.up_proj\.weight for one"
    ):
        begin(str(tmp_path), engine)
    assert started == []


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_checkpoint_with_code_of_its_own_is_refused_and_not_asked_about(started, tmp_path, engine, monkeypatch):
    """transformers asks at the terminal whether to run it, for 15 seconds."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "mine"}
    config["auto_map"] = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise RuntimeError('run')")
    with pytest.raises(Unsupported, match=r"code of its own, .* whatever trust_remote_code says: register its classes"):
        begin(str(tmp_path), engine)
    assert started == []


@pytest.mark.parametrize("config", [Qwen2_5_VLConfig, LlavaConfig, T5Config], ids=lambda c: c.__name__)
def test_a_model_that_generates_from_more_than_text_is_refused_in_a_line(config):
    with pytest.raises(Unsupported, match=f"no causal language model of .*{config.__name__}") as caught:
        begin(config(), "torch")
    assert len(str(caught.value)) < 400


def test_a_checkpoint_that_transformers_cannot_read_is_left_to_vllm(started, tmp_path):
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="started"):
        begin(str(tmp_path), "vllm")
    assert started == ["vllm"]


@pytest.mark.parametrize("kind", ["named", "given", "without"])
def test_a_model_over_vllms_memory_has_the_checkpoints_end_tokens(tmp_path, monkeypatch, kind):
    model = AutoModelForCausalLM.from_config(CONFIG)
    model.generation_config = GenerationConfig(eos_token_id=[2, 5], top_k=20, do_sample=True)
    model.save_pretrained(tmp_path)
    if kind == "without":
        (tmp_path / "generation_config.json").unlink()
    plan = SimpleNamespace(aliases=ModuleSource(model).tensors())
    monkeypatch.setattr(launch, "make_vllm_engine", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(launch, "record_plan", lambda *_: ({}, plan))
    monkeypatch.setattr(launch, "why_not_shared", lambda *_: None)
    _, made = begin(model if kind == "given" else str(tmp_path), "vllm")
    found = made.generation_config.eos_token_id, made.generation_config.top_k
    assert found == ((CONFIG.eos_token_id, None) if kind == "without" else ([2, 5], 20))
    assert made.generation_config is not model.generation_config


def test_looking_at_adapter_and_checkpoint_draws_no_random_numbers(started, tmp_path):
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="started"):
        begin(str(tmp_path), "vllm", lora=LoraConfig(r=2, target_modules="all-linear"))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_cannot_be_read_end_a_start_of_vllm_before_its_own_does(tmp_path):
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is a pointer of Git LFS"):
        _check_complete(tmp_path, torch.float32, "main")
