"""Weights that are no parameters, such as a router's correction bias."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig

import colo
from colo.config import RuntimeConfig
from colo.engines.layout import empty_model
from colo.engines.torch import TorchEngine
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
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
