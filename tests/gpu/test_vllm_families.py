"""What vLLM's own loader makes of a checkpoint on CUDA, family by family: recorded, compared, replayed byte by byte."""

import pytest
import torch
from tiny_vllm import CUDA, MARKS, PROMPTS, difference
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from colo.units import GIB
from colo.weights.sources.module import ModuleSource

pytestmark = MARKS

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}

ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
GEMMA4 = {
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 64,
    "tie_word_embeddings": True,
}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "num_key_value_heads": 8, "first_k_dense_replace": 2}
OWN_LOADER = ", vLLM's own loader"

DENSE = {
    "llama": (LlamaConfig, {}, 0),
    "llama for adapters": (LlamaConfig, {}, 8),
    "mistral": (MistralConfig, {"sliding_window": 64}, 0),
    "qwen2 with biases": (Qwen2Config, {}, 0),
    "qwen3 tied": (Qwen3Config, {"tie_word_embeddings": True}, 0),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 64, "tie_word_embeddings": True}, 0),
    "gemma4, which has buffers": (Gemma4TextConfig, GEMMA4, 0),
    "phi3": (Phi3Config, {}, 0),
    "deepseek-v2": (DeepseekV2Config, LATENT, 0),
    "deepseek-v2" + OWN_LOADER: (DeepseekV2Config, LATENT, 0),
}
MIXED = {
    "glm4-moe, whose router has buffers": (Glm4MoeConfig, EXPERTS | ROUTED, 0),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS, 0),
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}, 0),
    "mixtral" + OWN_LOADER: (MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}, 0),
}


@pytest.fixture(params=[*DENSE, *MIXED])
def family(request, tmp_path):
    """Its name, a model of random weights, and an engine of the same in this process."""
    pytest.importorskip("vllm")
    from colo.engines.vllm.engine import VLLMEngine

    kind, changes, max_lora_rank = (DENSE | MIXED)[request.param]
    model = AutoModelForCausalLM.from_config(kind(**(SIZES | changes)), dtype=torch.bfloat16).to(CUDA)
    randomize(model, seed=0)
    model.save_pretrained(tmp_path)
    engine = VLLMEngine(
        tmp_path,
        max_lora_rank=max_lora_rank,
        own_process=False,
        share_memory=OWN_LOADER not in request.param,
        kv_cache_bytes=GIB // 4,
        device=CUDA,
        enforce_eager=True,
        enable_sleep_mode=False,  # of which vLLM has one for each process
        max_model_len=256,
        disable_log_stats=True,
    )
    engine.commit(0)
    yield request.param, model.eval(), engine
    engine.close()


@torch.no_grad()
def randomize(model, seed):
    generator = torch.Generator(CUDA).manual_seed(seed)  # vLLM, as it starts, sets the seed of torch's own
    for name, tensor in ModuleSource(model):
        is_scale = "norm" in name or not isinstance(tensor, torch.nn.Parameter)
        tensor.normal_(float(is_scale), 0.05, generator=generator)


def test_every_byte_is_recorded_and_replayed(family):
    name, model, engine = family
    parameters = ModuleSource(model).tensors()
    plan = engine.record_plan(parameters)
    assert plan.fallbacks == {}
    assert name in MIXED or plan.aliases.keys() == parameters.keys()
    assert plan.differences(parameters) == []
    for seed in (1, 2):
        assert difference(model, sample(engine)) < 0.05
        randomize(model, seed)
        assert set(plan.differences(parameters)) == set(parameters)
        plan.replay(parameters)
        assert plan.differences(parameters) == []


def sample(engine):
    engine.reset_prefix_cache()
    return engine.generate(PROMPTS, engine.sampling_params(temperature=0, max_tokens=16, ignore_eos=True))
