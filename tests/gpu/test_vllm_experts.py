"""What vLLM's own loader makes of experts on CUDA: recorded, compared, replayed byte by byte."""

import pytest
from families import assert_every_byte_is_recorded_and_replayed, both
from tiny_vllm import MARKS
from transformers import Glm4MoeConfig, MixtralConfig, Qwen3MoeConfig

pytestmark = MARKS

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

CLOSE = 0.15
"""Wider than without experts: of two that are nearly as good, bf16 decides differently on the two sides."""

FAMILIES = {
    "glm4-moe, whose router has buffers": (Glm4MoeConfig, EXPERTS | ROUTED, {}),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS, {}),
    "mixtral": (MixtralConfig, MIXTRAL, {}),
    "mixtral, vLLM's own loader": (MixtralConfig, MIXTRAL, {"own_loader": True}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_is_recorded_and_replayed(family, tmp_path):
    kind, changes, options = FAMILIES[family]
    with both(kind, changes, tmp_path, **options) as (model, engine):
        assert_every_byte_is_recorded_and_replayed(model, engine, all_are_aliases=False, close=CLOSE)
