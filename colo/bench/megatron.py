"""A Qwen3 as a Megatron model whose layers are cut over ranks, for benchmarks. Imports Megatron when it is made."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_SAME = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
}
"""Options of Megatron's, and what transformers calls them."""

_PADDING = 128
"""The vocabulary has a multiple of so many rows on each rank."""


def tensor_parallel_stage(config: Any, ranks: int, device: torch.device) -> Any:
    """The one stage of this rank, with random weights, of the model that a transformers config of a Qwen3 describes.

    Ordering: the process group is there. Layers are Megatron's own, which need no Transformer Engine.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)  # weights are drawn on the CPU
    torch.manual_seed(0)
    fusions = ("bias_activation", "masked_softmax", "apply_rope", "bias_dropout", "gradient_accumulation")
    options = TransformerConfig(
        **{name: getattr(config, other) for name, other in _SAME.items()},
        **{f"{name}_fusion": False for name in fusions},
        tensor_model_parallel_size=ranks,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        params_dtype=config.dtype,
        bf16=config.dtype is torch.bfloat16,
    )
    rows = _PADDING * ranks
    stage = GPTModel(
        options,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=-(-config.vocab_size // rows) * rows,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )
    return stage.to(device)
