"""The models of transformers that compute what those of `megatron_tiny` do.

python megatron_twins.py FOLDER   # writes a checkpoint of one, in sizes that vLLM takes
"""

import sys
import tempfile
from pathlib import Path

import megatron_tiny as tiny
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from colo.weights.sources.module import ModuleSource
from colo.weights.sources.names import checkpoint_views

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": tiny.NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": tiny.VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
MOE = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 40}
SHARED = MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
SHARED |= {"n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
CONFIGS = {
    "llama": {"num_key_value_heads": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_tied": {"tie_word_embeddings": True},
    "qwen3_one_key_head": {"num_key_value_heads": 1},
    "qwen3_moe": MOE | {"num_experts": 4},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4, "intermediate_size": 40},
    "glm4_moe": SHARED | {"use_qk_norm": True, "partial_rotary_factor": 1.0},
    "deepseek_v3": SHARED | LATENT | {"num_key_value_heads": 4, "head_dim": 8, "rope_interleave": True},
}


def config_of(name, **changes):
    return AutoConfig.for_model(tiny.MODELS[name][0], **SIZES | CONFIGS[name.removesuffix("_mtp")] | changes)


def of_transformers(name, weights):
    """The fp32 model with the weights of a checkpoint, and what transformers has told of loading it."""
    with tempfile.TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)


@torch.no_grad()
def filled(name, weights, **changes):
    """The same without transformers' loader, which the stand-ins of `megatron_steps` would confuse."""
    model = AutoModelForCausalLM.from_config(config_of(name, **changes), dtype=torch.float32).eval()
    for weight, view in checkpoint_views(ModuleSource(model).tensors(), model.config.model_type):
        view.copy_(weights[weight])
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    config = config_of("qwen3", hidden_size=64, head_dim=32, intermediate_size=96)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(sys.argv[1])
