"""Adapters of PEFT's that an engine cannot apply: refused by PEFT's name before anything is started."""

import warnings

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.errors import Unsupported
from colo.testing import tiny_checkpoint
from tests.models import add_adapter
from tests.trainers import SMALL_CACHE

QV = {"target_modules": ["q_proj", "v_proj"]}
LORA = {"r": 4, "init_lora_weights": False, **QV}
LM = {"task_type": "CAUSAL_LM"}
KINDS = {
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VERA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, r=0, **QV),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, **QV),
    "LOHA": lambda: peft.LoHaConfig(**QV),
    "LOKR": lambda: peft.LoKrConfig(**QV),
    "ADALORA": lambda: peft.AdaLoraConfig(total_step=20, init_r=4, target_r=2, **QV),
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **LM),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **LM),
    "P_TUNING": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **LM),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(token_indices=[5, 6], target_modules=["embed_tokens"]),
    "MISS": lambda: peft.MissConfig(r=4, **QV),
    "HRA": lambda: peft.HRAConfig(r=4, **QV),
    "FOURIERFT": lambda: peft.FourierFTConfig(n_frequency=8, **QV),
    "VBLORA": lambda: peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=32, topk=1, **QV),
    "RANDLORA": lambda: peft.RandLoraConfig(r=4, **QV),
    "SHIRA": lambda: peft.ShiraConfig(r=4, **QV),
    "C3A": lambda: peft.C3AConfig(block_size=8, **QV),
    "ROAD": lambda: peft.RoadConfig(group_size=8, **QV),
    "POLY": lambda: peft.PolyConfig(r=4, n_tasks=1, n_skills=1, n_splits=1, **QV),
}
SETTINGS = {
    "use_dora=True": {"use_dora": True},
    "bias='lora_only'": {"bias": "lora_only"},
    "trainable_token_indices": {"trainable_token_indices": [5, 6]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [17], **LM},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def base(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.fixture
def refused(monkeypatch):
    """Returns the words with which a model is refused; an engine that was started would fail the test."""

    def start(*_):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("colo.assembly.share.start_for", start)

    def said(model, engine="torch"):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(Unsupported) as caught:
            colo.share(engine, model, optimizer, config=SMALL_CACHE)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        return str(caught.value)

    return said


@pytest.mark.filterwarnings("ignore")  # of PEFT's
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_is_more_than_lora_is_refused_by_name_before_an_engine_is_started(base, refused, kind):
    config = KINDS[kind]()
    for engine in ("torch", "vllm"):
        words = refused(peft.get_peft_model(base, config) if engine == "torch" else base_of(base, config), engine)
        assert f"adapter default is {kind} ({type(config).__name__}), and engines apply LoRA only" in words


def base_of(model, config):
    """The model once more with the same adapter: PEFT has changed the first in place."""
    fresh = AutoModelForCausalLM.from_config(model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(fresh, config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_lora_that_engines_lack_is_refused_by_name(base, refused, setting):
    model = peft.get_peft_model(base, peft.LoraConfig(**LORA, **SETTINGS[setting]))
    assert f"LoraConfig({setting}" in refused(model)


def test_several_adapters_at_once_are_refused(base, refused, checkpoint):
    model = peft.get_peft_model(base, peft.LoraConfig(**LORA))
    model.add_adapter("other", peft.LoraConfig(**LORA))
    model.base_model.set_adapter(["default", "other"])
    assert "2 adapters are active (default, other)" in refused(model)
    mixed = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), peft.LoraConfig(**LORA), mixed=True)
    assert "a PeftMixedModel mixes adapters" in refused(mixed)


def test_launch_refuses_another_adapter_by_name(checkpoint):
    with pytest.raises(Unsupported, match=r"the adapter is IA3 \(IA3Config\), and engines apply LoRA only"):
        colo.launch(checkpoint, lora=KINDS["IA3"]())


@pytest.mark.parametrize("added", ["by transformers", "by peft"])
def test_an_adapter_that_transformers_has_added_is_served(base, added):
    """`model.add_adapter` puts it into the model, without PEFT's wrapper."""
    config, model = peft.LoraConfig(**LORA), base
    if added == "by transformers":
        add_adapter(model, config)
    else:
        model = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rt = colo.share("torch", model, optimizer, config=SMALL_CACHE)
    try:
        for _ in range(2):
            (found,) = rt.generate([[1, 2, 3]], max_tokens=4, ignore_eos=True)
            ids = torch.tensor([[1, 2, 3, *found.token_ids]])
            with rt.train():
                logits = model(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
                own = logits.gather(-1, ids[0, 3:, None])[:, 0]
                assert torch.allclose(own, torch.tensor(found.logprobs), atol=1e-5)
                own.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert rt.transport.shares and rt.weights_version == 2
    finally:
        rt.close()
