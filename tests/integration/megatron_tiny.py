"""Tiny Megatron models on a CPU with gloo, in a process of their own: importing this answers calls to CUDA.

Without Transformer Engine Megatron asks CUDA for a device where it builds routers with an expert bias, MLA's rotary
embedding and tied embeddings in two stages. They take "cpu" for an answer. The all-to-all dispatcher,
which makes a stream, does not: these models use "allgather".
"""

import re
import zlib
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

torch.cuda.current_device, torch.cuda.synchronize = lambda: torch.device("cpu"), lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self
random.CudaRNGStatesTracker.fork = lambda self, *_: nullcontext()  # a dropout of zero asks for random numbers
random.CudaRNGStatesTracker.add = lambda self, *_: None
moe_utils.te_general_gemm = None  # 0.16.1 names it without having it
for name in ("TELinear", "TEColumnParallelLinear"):  # 0.16.1 asks for their instances where there are no such classes
    setattr(multi_latent_attention, name, type(name, (), {}))

VOCAB = 131  # padded to a multiple of 16 * TP, so that the padding depends on the layout
NUM_LAYERS, NUM_EXPERTS = 4, 4

_SHARED = {
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
MODELS = {  # family, and how the config differs
    "llama": ("llama", {"qk_layernorm": False, "num_query_groups": None}),
    "qwen2": ("qwen2", {"qk_layernorm": False, "add_qkv_bias": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tied": True}),
    "qwen3_one_key_head": ("qwen3", {"num_query_groups": 1}),
    "qwen3_moe": ("qwen3_moe", {"moe": {}}),
    "mixtral": ("mixtral", {"moe": {}, "qk_layernorm": False}),
    "glm4_moe": ("glm4_moe", {"moe": _SHARED}),
    "glm4_moe_mtp": ("glm4_moe", {"moe": _SHARED, "mtp_num_layers": 1}),
    "deepseek_v3": ("deepseek_v3", {"moe": _SHARED, "latent": True}),
}


class Attention(nn.Module):
    """Attention of MLA, where a head's keys are longer than its values; Megatron's own for CPUs takes none."""

    def __init__(self, *args, softmax_scale=None, **kwargs):
        super().__init__()
        self.scale = softmax_scale

    def sharded_state_dict(self, *args, **kwargs):
        return {}

    def forward(self, query, key, value, *args, **kwargs):
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # (sequence, batch, head, size) before
        found = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return found.permute(2, 0, 1, 3).flatten(2)


def use_layout(text):
    """Begin with `tp2pp2vp2ep2etp1`, for example, instead of what there was before."""
    found = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", text)}
    layout = SimpleNamespace(**{name: found.get(name, 1) for name in ("tp", "pp", "vp", "ep")}, etp=found.get("etp"))
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(0)
    return layout


def config_of(layout, dtype, *, moe=None, latent=False, tied=False, **changes):
    options = {
        "num_layers": NUM_LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 48,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": 1e-6,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "gradient_accumulation_fusion": False,
    }
    if moe is not None:
        options |= {"num_moe_experts": NUM_EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 40}
        options |= {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"} | moe
    if latent:
        options |= {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8}
        options |= {"v_head_dim": 16, "rope_type": "rope", "multi_latent_attention": True}
        del options["num_query_groups"]
    return (MLATransformerConfig if latent else TransformerConfig)(**options | changes)


def build(name, layout, *, dtype=torch.bfloat16, **changes):
    """The stages of this rank, every value set by its name and place in the whole model."""
    options = MODELS[name][1] | changes
    config, tied = config_of(layout, dtype, **options), options.get("tied", False)
    stages = [_stage(config, layout, tied, number if layout.vp > 1 else None) for number in range(layout.vp)]
    fill(stages)
    return stages


def _stage(config, layout, tied, number):
    place = {"use_transformer_engine": False, "vp_stage": number}
    spec, mtp = get_gpt_decoder_block_spec(config, normalization="RMSNorm", **place), None
    if config.multi_latent_attention:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Attention
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec.layer_specs[-1], **place)
    return GPTModel(
        config,
        spec,
        vocab_size=-(-VOCAB // (16 * layout.tp)) * 16 * layout.tp,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        vp_stage=number,
    )


@torch.no_grad()
def fill(stages):
    """Give every weight random values that depend on its name in Megatron alone; norms are about one."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for stage in stages:
        told = stage.sharded_state_dict(metadata={"singleton_local_shards": True, "dp_cp_group": group})
        apply_factories(told)
        for part in nested_values(told):
            if not isinstance(part, ShardedTensor):
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(part.key.encode()))
            shape = list(part.global_shape)
            if part.key in ("embedding.word_embeddings.weight", "output_layer.weight"):
                whole = torch.full(shape, 7.0)
                whole[:VOCAB] = 0.2 * torch.randn(VOCAB, *shape[1:], generator=generator)
            else:
                whole = 0.2 * torch.randn(shape, generator=generator) + ("norm" in part.key)
            place = tuple(slice(o, o + n) for o, n in zip(part.global_offset, part.local_shape, strict=True))
            part.data.copy_(whole[place])
