"""One process of `test_megatron.py`: unsharded Megatron models beside transformers' with the same weights.

python megatron_alone.py RESULTS
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import megatron_ranks as ranks
import megatron_tiny as tiny
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

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
    "qwen3_moe": MOE | {"num_experts": 4},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4, "intermediate_size": 40},
    "glm4_moe": SHARED | {"use_qk_norm": True, "partial_rotary_factor": 1.0},
    "deepseek_v3": SHARED | LATENT | {"num_key_value_heads": 4, "head_dim": 8, "rope_interleave": True},
}


def names_of(model):
    """Names and shapes of the checkpoint that transformers writes of a model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: list(tensor.shape) for name, tensor in load_file(Path(folder, "model.safetensors")).items()}


@torch.no_grad()
def compare(name):
    """How far logits of both are apart, how large they are, and the names and shapes that only one of them has."""
    stages = tiny.build(name, tiny.use_layout("tp1"), dtype=torch.float32)
    wholes, _ = ranks.joined(ranks.source_of(name, stages))
    family = tiny.MODELS[name][0]
    config = AutoConfig.for_model(family, **SIZES | CONFIGS[name])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(wholes, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    ids = torch.randint(0, tiny.VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(16)[None].expand(2, -1)
    theirs = stages[0].eval()(ids, positions, mask)[..., : tiny.VOCAB]
    mine = model.eval()(ids).logits
    ours = {name: list(tensor.shape) for name, tensor in wholes.items()}.items()
    return {
        "difference": float((mine - theirs).abs().max()),
        "largest": float(mine.abs().max()),
        "spread": float(mine.std()),
        "told": [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in told[kind]],
        "others": [name for name, shape in names_of(model).items() if (name, shape) not in ours],
    }


def main(results):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    layout = tiny.use_layout("tp1")
    found = {"sums": {name: ranks.look(name, layout) for name in tiny.MODELS}}
    found["transformers"] = {name: compare(name) for name in CONFIGS}
    Path(results, "0.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
