"""Bytes of KV cache, layer by layer, against the formulas of vLLM and against what transformers keeps."""

from math import prod

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from colo.engines.caches import NO_LIMIT, Footprint
from colo.planning.kv_cache import LayerCache, kv_bytes, layer_caches

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
DEEPSEEK = {
    **SIZES,
    "num_experts_per_tok": 2,
    **MLA,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
GATED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
QWEN3_NEXT = {**SIZES, **EXPERTS, **GATED, "head_dim": 16, "num_key_value_heads": 2}


def build(kind, **options):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))


def caches(kind, **options):
    return layer_caches(build(kind, **options))


def test_every_layer_keeps_keys_and_values_of_its_heads():
    found = caches("qwen3", **SIZES, num_key_value_heads=2, head_dim=32)
    assert found == (LayerCache(num_heads=2, key_size=32, value_size=32),) * 4
    assert kv_bytes(found, 10) == 4 * 2 * (32 + 32) * 2 * 10
    assert kv_bytes(found, 10, tp=2, dtype_bytes=4) == kv_bytes(found, 10)
    assert kv_bytes(found, 10, tp=4) == kv_bytes(found, 10, tp=2)  # one head is the least


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "falcon", "bloom", "gptj", "opt", "mpt", "gpt_neox"])
def test_layers_of_every_style_of_attention_are_found(kind):
    model = build(kind)
    found, config = layer_caches(model), model.config
    heads = config.num_attention_heads
    width = 2 * config.hidden_size if kind != "falcon" else 2 * config.hidden_size // heads  # one head for all
    assert len(found) == config.num_hidden_layers
    assert {cache.token_bytes(dtype_bytes=1) for cache in found} == {width}


def test_layers_with_a_window_drop_what_is_behind_it():
    kinds = ["sliding_attention", "full_attention"] * 2
    found = caches("gpt_oss", **{**SIZES, "layer_types": kinds, "sliding_window": 8, "head_dim": 16})
    assert [cache.window for cache in found] == [8, None, 8, None]
    token_bytes = found[0].token_bytes()
    assert kv_bytes(found, 100) == token_bytes * (2 * 8 + 2 * 100)


def test_layers_that_attend_to_a_chunk_keep_no_more_than_one():
    kinds = ["chunked_attention", "full_attention"] * 2
    options = {**SIZES, "layer_types": kinds, "attention_chunk_size": 16, "head_dim": 16, "num_key_value_heads": 4}
    assert [cache.window for cache in caches("llama4_text", **options)] == [16, None, 16, None]


def test_layers_that_share_the_keys_of_others_keep_none():
    options = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_kv_shared_layers": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    assert len(caches("gemma3n_text", **options, **kinds)) == 2


def test_a_latent_vector_stands_for_all_heads_and_is_held_whole_by_every_rank():
    (found, *rest) = caches("deepseek_v3", **DEEPSEEK)
    assert len(rest) == 3
    assert (found.num_heads, found.key_size, found.value_size) == (4, 16 + 8, 12)  # once they are expanded
    assert found.token_bytes() == found.token_bytes(tp=2) == (32 + 8) * 2


def test_states_do_not_grow_with_the_sequence():
    options = {**QWEN3_NEXT, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    found = caches("qwen3_next", **options)
    assert [cache.sequence_bytes(100) == cache.sequence_bytes(200) for cache in found] == [True] * 3 + [False]
    assert found[0].sequence_bytes(100, tp=2) == found[0].sequence_bytes(100) // 2


def test_states_are_in_fp32_where_the_config_says_so():
    options = {**QWEN3_NEXT, "layer_types": ["linear_attention"] * 4}
    narrow = caches("qwen3_next", **options)[0]
    wide = caches("qwen3_next", **options, mamba_ssm_dtype="float32")[0]
    assert (wide.wide_state_size, wide.state_size) == (4 * 8 * 16, narrow.state_size - 4 * 8 * 16)
    assert wide.sequence_bytes(1) - narrow.sequence_bytes(1) == 2 * 4 * 8 * 16


def test_a_hybrid_layer_has_two():
    found = caches("falcon_h1", **SIZES, num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16)
    assert len(found) == 8
    assert sum(cache.state_size > 0 for cache in found) == sum(cache.num_heads > 0 for cache in found) == 4


# ---- against vLLM --------------------------------------------------------------------------------------------------

SPEC = {"block_size": 16, "dtype": torch.bfloat16}


def test_a_token_takes_what_vllms_specs_say():
    specs = pytest.importorskip("vllm.v1.kv_cache_interface")
    full = caches("qwen3", **SIZES, num_key_value_heads=2, head_dim=32)[0]
    assert full.token_bytes() * 16 == specs.FullAttentionSpec(num_kv_heads=2, head_size=32, **SPEC).page_size_bytes
    sliding = caches("mistral", **SIZES, num_key_value_heads=2, head_dim=32, sliding_window=64)[0]
    spec = specs.SlidingWindowSpec(num_kv_heads=2, head_size=32, sliding_window=64, **SPEC)
    assert sliding.token_bytes() * 16 == spec.page_size_bytes
    blocks = spec.max_admission_blocks_per_request(max_in_flight_tokens=1, max_model_len=1000)
    assert sliding.sequence_bytes(1000) == (blocks - 1) * spec.page_size_bytes  # but for where the window begins
    latent = caches("deepseek_v3", **DEEPSEEK)[0]
    assert latent.token_bytes() * 16 == specs.MLAAttentionSpec(num_kv_heads=1, head_size=40, **SPEC).page_size_bytes


def vllm_states(kind):
    """The options of a model, and the shapes of its states as vLLM has them on one rank."""
    shapes = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator
    if kind == "mamba":
        options = {"intermediate_size": 96, "state_size": 8, "conv_kernel": 4, "expand": 2, "hidden_size": 48}
        return options, shapes.mamba1_state_shape(1, 96, 8, 4)
    if kind == "mamba2":
        options = {"hidden_size": 64, "expand": 2, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2}
        return {**options, "conv_kernel": 4}, shapes.mamba2_state_shape(1, 128, 2, 8, 16, 8, 4)
    if kind == "qwen3_next":
        options = {**QWEN3_NEXT, "layer_types": ["linear_attention"] * 4}
        return options, shapes.gated_delta_net_state_shape(1, 2, 4, 8, 16, 4)
    if kind == "minimax":
        options = {**SIZES, "layer_types": ["linear_attention"] * 4, "head_dim": 16}
        return options, shapes.linear_attention_state_shape(4, 1, 16)
    options = {**SIZES, "layer_types": ["conv"] * 3 + ["full_attention"], "conv_L_cache": 3}
    return options, shapes.short_conv_state_shape(1, 64, 3)


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "qwen3_next", "minimax", "lfm2"])
def test_a_state_has_the_elements_that_vllm_gives_it(kind):
    options, shapes = vllm_states(kind)
    assert caches(kind, **options)[0].state_size == sum(map(prod, shapes))


# ---- against transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {**SIZES, "num_key_value_heads": 2, "head_dim": 32}),
        ("gpt2", {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}),
        ("gpt_neox", SIZES),
        ("gpt_neox_japanese", {**SIZES, "intermediate_multiple_size": 2}),
        ("deepseek_v3", DEEPSEEK),
        ("mistral", {**SIZES, "num_key_value_heads": 2, "sliding_window": 64}),
    ],
)
def test_a_token_takes_what_transformers_keeps_of_it(kind, options):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()
    kept = Footprint.of(model, NO_LIMIT).token_bytes
    assert kv_bytes(layer_caches(model), 1, dtype_bytes=4) == kept
