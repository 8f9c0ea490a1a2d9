"""Weights that are no parameters, such as a router's correction bias."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import colo
from colo.config import RuntimeConfig
from colo.engines.layout import empty_model
from colo.engines.torch import TorchEngine
from colo.errors import StaleWeights
from colo.units import MIB
from tests.runtimes import adamw, make_engine, qwen3, train_step


def glm(**changes):
    options = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
    }
    own = qwen3().to_dict()
    sizes = {key: own[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    return Glm4MoeConfig(**(sizes | heads | options | changes), eos_token_id=None, pad_token_id=None)


@pytest.fixture
def routed(tmp_path):
    """A model whose router has a correction bias, a buffer, that decides for other experts than its weights do."""
    model = AutoModelForCausalLM.from_config(glm()).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 3, generator=generator)
    model.save_pretrained(tmp_path)
    return model


@torch.no_grad()
def assert_samples_from(model, rt):
    (completion,) = rt.generate([[1, 2, 3, 4]], max_tokens=8, temperature=0)
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    logprobs = model(input_ids=ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
    assert float((logprobs - torch.tensor(completion.logprobs)).abs().max()) < 1e-4


@pytest.mark.parametrize("weights", ["auto", "copy"])
@pytest.mark.parametrize("given", ["folder", "model"])
def test_buffers_of_a_checkpoint_are_the_engines_and_the_trainers(routed, tmp_path, weights, given):
    twin = copy.deepcopy(routed)
    source = str(tmp_path) if given == "folder" else routed
    rt = colo.launch(source, optimizer=adamw, device="cpu", config=RuntimeConfig(weights=weights, kv_cache_bytes=MIB))
    assert_samples_from(twin, rt)
    assert all(
        torch.equal(a, b) for a, b in zip(twin.state_dict().values(), rt.model.state_dict().values(), strict=True)
    )
    name, _ = next((n, b) for n, b in rt.model.named_buffers() if "correction_bias" in n)
    for model in (twin, rt.model):
        with torch.no_grad():
            model.get_buffer(name).neg_()
    assert_samples_from(twin, rt)
    assert rt.weights_version == 1
    rt.close()
    assert rt.model.get_buffer(name).device.type == "cpu"


def test_buffers_of_your_own_model_move_into_the_engine_and_home_again(routed):
    twin = copy.deepcopy(routed)
    engine = TorchEngine(glm(), device="cpu", dtype=torch.float32, kv_cache_bytes=MIB)
    rt = colo.share(engine, routed, adamw(routed.parameters()))
    assert rt.transport.name == "shared"
    assert_samples_from(twin, rt)
    rt.close()
    engine.close()
    assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), routed.state_dict().values(), strict=True))


def test_buffers_of_yours_are_no_weights_of_an_engines():
    model = AutoModelForCausalLM.from_config(qwen3())
    model.register_buffer("reward_mean", torch.zeros(1))
    model.model.layers[0].register_buffer("scale", torch.ones(1))
    rt = colo.share(make_engine(), model, adamw(model.parameters()))
    assert rt.transport.name == "shared"
    with rt.train():
        train_step(rt)
        model.reward_mean.add_(1)
    assert rt.generate([[1]])[0].weights_version == 1
    rt.close()


def test_a_bias_that_checkpoints_hold_in_fp32_stays_so_beside_16_bits():
    config = DeepseekV3Config(
        **{
            key: getattr(qwen3(), key)
            for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        },
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )
    model = empty_model(config, dtype=torch.bfloat16, attn_implementation=None)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert [bias.dtype for bias in biases] == [torch.float32]
    others = {name: p.dtype for name, p in model.named_parameters()}
    # transformers keeps the router in fp32, too, from 5.24 on
    router = {name: dtype for name, dtype in others.items() if name.endswith("mlp.gate.weight")}
    assert list(router.values()) == [
        torch.float32 if "gate.weight" in model._keep_in_fp32_modules_strict else torch.bfloat16
    ]
    assert {dtype for name, dtype in others.items() if name not in router} == {torch.bfloat16}


# ---- buffers that each side computes ---------------------------------------------------------------------------------


def lengthened(rotary):
    """Rotary embeddings that know positions further apart, as of another config."""
    with torch.no_grad():
        rotary.inv_freq.mul_(0.5)


def through_data(rotary):
    rotary.inv_freq.data[0] += 1


def replaced(rotary):
    rotary.inv_freq = rotary.inv_freq * 2


def registered(rotary):
    rotary.register_buffer("inv_freq", rotary.inv_freq.to(torch.bfloat16), persistent=False)


def rotary_of(model):
    return next(module for module in model.modules() if isinstance(module, Qwen3RotaryEmbedding))


@pytest.mark.parametrize("write", [lengthened, through_data, replaced, registered])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"config": RuntimeConfig(weights="copy", kv_cache_bytes=MIB)},
        {"lora": LoraConfig(r=2, target_modules=["q_proj"])},
    ],
    ids=["shared", "copy", "lora"],
)
def test_a_write_to_a_buffer_that_engines_compute_is_stale_until_it_is_put_back(options, write):
    config = RuntimeConfig(kv_cache_bytes=MIB)
    rt = colo.launch(qwen3(), **({"optimizer": adamw, "device": "cpu", "config": config} | options))
    kept = rotary_of(rt.model).inv_freq.clone()
    (before,) = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)
    write(rotary_of(rt.model))
    for _ in range(2):
        with pytest.raises(StaleWeights, match=r"model\.rotary_emb\.inv_freq has been written to: no checkpoint holds"):
            rt.generate([[1, 2, 3]], max_tokens=4)
    rotary_of(rt.model).inv_freq = kept
    (after,) = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)
    assert after.logprobs == before.logprobs
    with rt.rollout():
        rt.generate([[1]])
        write(rotary_of(rt.model))
        with pytest.raises(StaleWeights, match="has been written to: no checkpoint holds"):
            rt.generate([[1]])
    rt.close()


def test_other_rotary_embeddings_in_the_place_of_the_models_are_stale():
    rt = colo.launch(qwen3(), optimizer=adamw, device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB))
    changed = copy.deepcopy(rt.model.config)
    changed.rope_parameters["rope_theta"] *= 100
    rt.model.model.rotary_emb = Qwen3RotaryEmbedding(changed)
    with pytest.raises(StaleWeights, match="inv_freq has been written to"):
        rt.generate([[1]])
    rt.model.model.rotary_emb = Qwen3RotaryEmbedding(rt.model.config)
    rt.generate([[1]])
    rt.close()


class Counted(nn.Module):
    """A part of the user's own, which counts what it has seen in a buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=False)


def test_buffers_that_are_not_the_architectures_may_be_written_to():
    rt = colo.launch(qwen3(), optimizer=adamw, device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB))
    rt.model.counted = Counted()
    first, second = [], []
    for sampled in (first, second):
        with rt.rollout():
            sampled += rt.generate([[1]], max_tokens=3, temperature=0)
        rt.model.counted.seen.add_(1)
    assert rt.model.counted.seen == 2
    assert [(c.token_ids, c.weights_version) for c in first] == [(c.token_ids, c.weights_version) for c in second]
    rt.close()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_frequencies_that_a_pass_computes_for_its_length_may_change(rope):
    config = qwen3(max_position_embeddings=64, rope_parameters=rope)
    rt = colo.launch(config, optimizer=adamw, device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB))
    kept = rotary_of(rt.model).inv_freq.clone()
    with rt.train():
        train_step(rt, [[i % 50 for i in range(80)]])
    assert not torch.equal(rotary_of(rt.model).inv_freq, kept)
    rt.generate([[1, 2]], max_tokens=2)
    rt.close()
