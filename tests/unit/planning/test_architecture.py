"""What is read off the modules that transformers builds."""

import pytest

from colo.errors import Unsupported
from colo.planning.kv_cache import decoder_layers
from colo.planning.model_shape import (
    TensorGroup,
    build_on_meta,
    check_sizes,
    mlp_widths,
    norms_queries,
    num_norms,
    tensor_groups,
)

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
QWEN3 = {"model_type": "qwen3", **SIZES, **HEADS, "tie_word_embeddings": True}


def groups(config):
    return set(tensor_groups(build_on_meta(config)))


def linear(module, shape, axis, count, granule=1):
    options = {"rank_factor": 1, "quantizable": True, "granule": granule}
    return TensorGroup(module=module, shape=shape, split_axis=axis, count=count, **options)


def test_parameters_are_grouped_by_module_shape_and_the_axis_that_ranks_cut():
    assert groups(QWEN3) == {
        TensorGroup(module="embedding", shape=(64, 32), split_axis=0),  # the head is tied to it
        linear("attention", (64, 32), 0, 2),
        linear("attention", (32, 32), 0, 4, granule=16),  # keys and values, a head at the least
        linear("attention", (32, 64), 1, 2),
        linear("mlp", (48, 32), 0, 4),
        linear("mlp", (32, 48), 1, 2),
        TensorGroup(module="norms", shape=(16,), count=4),
        TensorGroup(module="norms", shape=(32,), count=5),
    }


def test_a_head_of_its_own_is_cut_like_the_embedding():
    found = groups({**QWEN3, "tie_word_embeddings": False})
    assert TensorGroup(module="lm_head", shape=(64, 32), split_axis=0) in found


def test_a_bias_follows_its_matrix_unless_it_is_added_after_a_reduction():
    found = groups({**QWEN3, "attention_bias": True})
    assert TensorGroup(module="attention", shape=(64,), split_axis=0, count=2) in found
    assert TensorGroup(module="attention", shape=(32,), split_axis=0, count=4, granule=16) in found
    assert TensorGroup(module="attention", shape=(32,), split_axis=None, count=2) in found


def test_packed_experts_and_their_router():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    found = groups({**QWEN3, **experts, "model_type": "qwen3_moe"})
    up = TensorGroup(module="experts", shape=(4, 48, 32), split_axis=1, count=2, rank_factor=2)
    down = TensorGroup(module="experts", shape=(4, 32, 24), split_axis=2, count=2, rank_factor=1)
    assert {up, down, TensorGroup(module="router", shape=(4, 32), count=2, rank_factor=1)} <= found


def test_gpt2_has_matrices_of_its_own_kind_and_no_plan_for_ranks():
    model = build_on_meta({"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4})
    found = {(group.module, group.shape): group for group in tensor_groups(model)}
    assert found["attention", (32, 96)] == linear("attention", (32, 96), None, 2)
    assert found["embedding", (1024, 32)].count == 1  # positions
    assert found["norms", (32,)].count == 10  # weights and biases
    assert [mlp_widths(layer, 32) for layer in decoder_layers(model)] == [(128, 0)] * 2


@pytest.mark.parametrize(("kind", "count"), [("qwen3", 2), ("gemma3_text", 4)])
def test_norms_over_the_hidden_size_are_counted(kind, count):
    model = build_on_meta({**QWEN3, "model_type": kind})
    assert [num_norms(layer, 32) for layer in decoder_layers(model)] == [count] * 2


def test_what_the_checkpoint_says_of_its_files_does_not_matter():
    files = {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "x.Y"}, "torch_dtype": "odd"}
    assert groups({**QWEN3, **files, "architectures": ["Odd"]}) == groups(QWEN3)


def test_a_type_that_transformers_does_not_know():
    with pytest.raises(Unsupported, match="'nothing': transformers .* does not know it"):
        build_on_meta({"model_type": "nothing"})


def test_a_rank_holds_its_share_and_whole_heads():
    group = TensorGroup(module="attention", shape=(33, 5), split_axis=0, granule=16)
    assert [group.local_shape(tp) for tp in (1, 2, 8)] == [(33, 5), (17, 5), (16, 5)]
    assert TensorGroup(module="experts", shape=(4, 6, 8), split_axis=1).local_shape(2) == (4, 3, 8)
    assert TensorGroup(module="norms", shape=(33,)).local_shape(2) == (33,)


@pytest.mark.parametrize("value", [0, -1, True, "8", 2.0])
def test_sizes_are_positive_integers(value):
    with pytest.raises(ValueError, match=f"head_dim of the model config .* at least 1, but is {value!r}"):
        check_sizes({"hidden_size": 32, "head_dim": value})


def test_sizes_may_be_one_left_out_and_some_of_them_null():
    check_sizes({"num_hidden_layers": 1, "head_dim": None})
    with pytest.raises(ValueError, match="hidden_size"):
        check_sizes({"hidden_size": None})


def test_widths_of_a_dense_layer_of_experts_and_of_the_expert_that_every_token_takes():
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
    config = {**QWEN3, **experts, "model_type": "glm4_moe", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    assert [mlp_widths(layer, 32) for layer in decoder_layers(build_on_meta(config))] == [(48, 0), (48, 24)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_norm.weight", True),
        ("model.layers.0.self_attn.q_proj.weight", False),
        ("model.layers.0.self_attn_layer_norm.weight", False),
        ("model.layers.0.input_layernorm.weight", False),
    ],
)
def test_norms_of_queries_are_those_within_attention(name, expected):
    assert norms_queries(name) is expected


@pytest.mark.parametrize("tied", [True, False])
def test_the_config_around_a_text_model_says_whether_its_head_is_tied(tied):
    text = {key: value for key, value in QWEN3.items() if key not in ("model_type", "tie_word_embeddings")}
    model = build_on_meta({"model_type": "gemma3", "text_config": text, "tie_word_embeddings": tied})
    assert any(group.module == "lm_head" for group in tensor_groups(model)) is not tied
