"""What vLLM's own loader makes of a checkpoint on CUDA, family by family: recorded, compared, replayed byte by byte."""

import pytest
from families import assert_every_byte_is_recorded_and_replayed, both
from tiny_vllm import MARKS
from transformers import (
    DeepseekV2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

pytestmark = MARKS

GEMMA4 = {
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 64,
    "tie_word_embeddings": True,
}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "num_key_value_heads": 8, "first_k_dense_replace": 2}

FAMILIES = {
    "llama": (LlamaConfig, {}, {}),
    "llama for adapters": (LlamaConfig, {}, {"max_lora_rank": 8}),
    "mistral": (MistralConfig, {"sliding_window": 64}, {}),
    "qwen2 with biases": (Qwen2Config, {}, {}),
    "qwen3 tied": (Qwen3Config, {"tie_word_embeddings": True}, {}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 64, "tie_word_embeddings": True}, {}),
    "gemma4, which has buffers": (Gemma4TextConfig, GEMMA4, {}),
    "phi3": (Phi3Config, {}, {}),
    "deepseek-v2": (DeepseekV2Config, LATENT, {}),
    "deepseek-v2, vLLM's own loader": (DeepseekV2Config, LATENT, {"own_loader": True}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_is_recorded_and_replayed(family, tmp_path):
    kind, changes, options = FAMILIES[family]
    with both(kind, changes, tmp_path, **options) as (model, engine):
        assert_every_byte_is_recorded_and_replayed(model, engine, all_are_aliases=True, close=0.05)
