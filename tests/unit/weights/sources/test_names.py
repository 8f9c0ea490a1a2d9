"""Names of weights in checkpoints: of stacked experts, and of what Megatron has."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from colo.errors import Unsupported
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.names import FAMILIES, QKV, VOCABULARY, Names, checkpoint_views

LOCAL = [
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight_w",
    "mlp.linear_fc1.weight_v",
    "mlp.linear_fc2.weight",
]
FUSED = [  # by Transformer Engine
    "self_attention.linear_qkv.layer_norm_weight",
    *LOCAL[1:3],
    "mlp.linear_fc1.layer_norm_weight",
    *LOCAL[4:],
]
LATENT = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]


def names_of(family, keys, *, num_layers=4):
    names = Names(family, num_layers=num_layers)
    return [name for key in keys for name in names.of(key).names]


@pytest.mark.parametrize("keys", [LOCAL, FUSED])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe"])
def test_a_layer_has_the_same_names_with_and_without_transformer_engine(family, keys):
    found = names_of(family, [f"decoder.layers.12.{key}" for key in keys])
    assert found == [
        f"model.layers.12.{name}.weight"
        for name in (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ]


@pytest.mark.parametrize("norm", ["{}_layernorm.weight", "linear_{}_up_proj.layer_norm_weight"])
def test_latent_attention_has_the_same_names_with_and_without_transformer_engine(norm):
    keys = [*(f"{name}.weight" for name in LATENT), norm.format("q"), norm.format("kv")]
    found = names_of("deepseek_v3", [f"decoder.layers.0.self_attention.{key}" for key in keys])
    assert found == [
        f"model.layers.0.self_attn.{name}.weight"
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm")
    ]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_experts_keep_their_number_in_the_whole_model(family):
    key = "decoder.layers.7.mlp.experts.experts.131.linear_fc"
    found = names_of(family, [f"{key}1.weight_w", f"{key}1.weight_v", f"{key}2.weight"])
    assert found == [f"model.layers.7.mlp.experts.131.{part}_proj.weight" for part in ("gate", "up", "down")]


def test_mixtral_names_its_experts_in_its_own_way():
    keys = [
        "router.weight",
        *(f"experts.experts.3.linear_fc{part}" for part in ("1.weight_w", "1.weight_v", "2.weight")),
    ]
    found = names_of("mixtral", [f"decoder.layers.0.mlp.{key}" for key in keys])
    moe = "model.layers.0.block_sparse_moe"
    assert found == [f"{moe}.gate.weight", *(f"{moe}.experts.3.w{number}.weight" for number in (1, 3, 2))]


@pytest.mark.parametrize("within", ["transformer_layer.", "mtp_model_layer.", ""])
def test_layers_for_further_tokens_follow_the_others(within):
    keys = [f"mtp.layers.1.{within}input_layernorm.weight", "mtp.layers.0.eh_proj.weight"]
    found = names_of("glm4_moe", [*keys, "mtp.layers.0.final_layernorm.weight"], num_layers=46)
    assert found == [
        "model.layers.47.input_layernorm.weight",
        "model.layers.46.eh_proj.weight",
        "model.layers.46.shared_head.norm.weight",
    ]


def test_weights_are_in_groups_by_layers_and_experts_in_order():
    keys = [
        "output_layer.weight",
        "decoder.layers.10.mlp.experts.experts.10.linear_fc2.weight",
        "decoder.layers.10.mlp.experts.experts.2.linear_fc2.weight",
        "decoder.layers.10.mlp.experts.experts.2.linear_fc1.weight_w",
        "decoder.layers.10.mlp.router.weight",
        "mtp.layers.0.enorm.weight",
        "decoder.layers.9.input_layernorm.weight",
        "decoder.final_layernorm.weight",
        "embedding.word_embeddings.weight",
    ]
    names = Names("glm4_moe", num_layers=11)
    found = sorted((names.of(key) for key in keys), key=lambda named: (named.group, named.order))
    assert [(one.group, one.names[0].removeprefix("model.")) for one in found] == [
        (0, "embed_tokens.weight"),
        (10, "layers.9.input_layernorm.weight"),
        (11, "layers.10.mlp.gate.weight"),
        (11, "layers.10.mlp.experts.2.gate_proj.weight"),
        (11, "layers.10.mlp.experts.2.down_proj.weight"),
        (11, "layers.10.mlp.experts.10.down_proj.weight"),
        (12, "layers.11.enorm.weight"),
        (1 << 30, "norm.weight"),
        (1 << 30, "lm_head.weight"),
    ]


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "decoder.layers.0.mlp.linear_fc1.weight"),  # without a gate
        ("llama", "decoder.layers.0.mlp.router.weight"),
        ("qwen3_moe", "decoder.layers.0.mlp.router.expert_bias"),
        ("qwen3_moe", "mtp.layers.0.enorm.weight"),
        ("mixtral", "decoder.layers.0.mlp.shared_experts.linear_fc2.weight"),
        ("deepseek_v3", "decoder.layers.0.self_attention.linear_qkv.weight"),
        ("llama", "vision_model.patches.weight"),
    ],
)
def test_a_key_in_no_table_is_refused_by_name(family, key):
    with pytest.raises(Unsupported, match=f"Megatron's {key} has no name in a Hugging Face checkpoint of {family}"):
        Names(family, num_layers=1).of(key)


def test_a_family_without_a_table_is_refused_and_a_table_can_be_given():
    with pytest.raises(Unsupported, match="no table of Megatron's names for gemma3, only for llama, qwen2"):
        Names("gemma3", num_layers=1)
    table = FAMILIES["llama"] | {"mlp.gate.weight": "mlp.switch.weight"}
    assert names_of(table, ["decoder.layers.3.mlp.gate.weight"]) == ["model.layers.3.mlp.switch.weight"]


def test_layers_for_further_tokens_are_told_from_the_models_own():
    names = Names("glm4_moe", num_layers=2)
    (further,) = names.of("mtp.layers.0.enorm.weight").names
    (own,) = names.of("decoder.layers.1.mlp.linear_fc2.weight").names
    assert names.is_further(further) and not names.is_further(own) and not names.is_further("model.norm.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_has_no_name_twice_but_for_norms_that_are_fused_or_not(family):
    found = {}
    for entry, names in FAMILIES[family].items():
        for name in (names,) if isinstance(names, str) else names:
            found.setdefault(name, []).append(entry)
    doubled = {name: entries for name, entries in found.items() if len(entries) > 1}
    assert all(
        sum("layer_norm_weight" in entry for entry in entries) == len(entries) - 1 for entries in doubled.values()
    )
    assert all(name.endswith("layernorm.weight") for name in doubled)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_queries_keys_and_values_lie_in_one_tensor(family):
    table = FAMILIES[family]
    assert {entry for entry, names in table.items() if not isinstance(names, str)} == (QKV & table.keys())
    assert table.keys() >= VOCABULARY


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_experts_per_tok": 2,
}

CONFIGS = {
    "Qwen3MoeForCausalLM": Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=12, mlp_only_layers=[1]),
    "Qwen2MoeForCausalLM": Qwen2MoeConfig(
        **SIZES, num_experts=3, moe_intermediate_size=12, shared_expert_intermediate_size=8
    ),
    "MixtralForCausalLM": MixtralConfig(**SIZES, num_local_experts=3),
    "OlmoeForCausalLM": OlmoeConfig(**SIZES, num_experts=3),
    "LlamaForCausalLM": LlamaConfig(**SIZES),
    "Gemma3ForCausalLM": Gemma3TextConfig(**SIZES, tie_word_embeddings=True),
    "Phi3ForCausalLM": Phi3Config(**SIZES),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_names_and_values_are_those_that_transformers_saves(family, tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    assert type(model).__name__ == family
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    views = checkpoint_views(ModuleSource(model).tensors(), model.config.model_type)
    assert len(dict(views)) == len(views)
    assert set(dict(views)) == set(saved)
    assert all(torch.equal(view, saved[name]) for name, view in views)


@pytest.mark.parametrize("family", CONFIGS)
def test_meta_tensors_have_the_same_names_and_shapes_and_stay_views(family):
    config = CONFIGS[family]
    real = ModuleSource(AutoModelForCausalLM.from_config(config)).tensors()
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in real.items()}
    views = checkpoint_views(meta, config.model_type)
    assert [(n, v.shape) for n, v in views] == [(n, v.shape) for n, v in checkpoint_views(real, config.model_type)]
    storages = {tensor.untyped_storage()._cdata for tensor in meta.values()}
    assert {view.untyped_storage()._cdata for _, view in views} == storages


def test_views_are_the_parameters_own_memory():
    tensors = {
        "model.layers.0.mlp.gate.weight": torch.zeros(2, 4),
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 6, 4),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(2, 4, 3),
    }
    views = checkpoint_views(tensors, "mixtral")
    for value, (_, view) in enumerate(views, start=1):
        view.fill_(value)
    block = "model.layers.0.block_sparse_moe"
    experts = [f"{block}.experts.{e}.{part}.weight" for e in range(2) for part in ("w1", "w3")]
    assert [name for name, _ in views] == [
        f"{block}.gate.weight",
        *experts,
        f"{block}.experts.0.w2.weight",
        f"{block}.experts.1.w2.weight",
    ]
    assert tensors["model.layers.0.mlp.gate.weight"].eq(1).all()
    up, down = tensors["model.layers.0.mlp.experts.gate_up_proj"], tensors["model.layers.0.mlp.experts.down_proj"]
    assert up[:, :, 0].tolist() == [[2, 2, 2, 3, 3, 3], [4, 4, 4, 5, 5, 5]]
    assert down[:, 0, 0].tolist() == [6, 7]


@pytest.mark.parametrize("model_type", [None, "gpt_oss"])
def test_stacked_experts_of_an_unknown_type_are_passed_through(model_type):
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 6, 4), "norm.weight": torch.zeros(4)}
    views = checkpoint_views(tensors, model_type)
    assert [name for name, _ in views] == list(tensors)
    assert all(view is tensors[name] for name, view in views)


def test_a_single_expert_keeps_its_two_dimensions():
    views = checkpoint_views({"mlp.experts.down_proj": torch.zeros(1, 4, 1)}, "qwen3_moe")
    assert [(name, tuple(view.shape)) for name, view in views] == [("mlp.experts.0.down_proj.weight", (4, 1))]
