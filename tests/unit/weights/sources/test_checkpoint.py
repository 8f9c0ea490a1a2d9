"""Parameters by the names in a checkpoint, against what transformers itself saves."""

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

from colo.weights.sources.checkpoint import checkpoint_views
from colo.weights.sources.module import ModuleSource

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
