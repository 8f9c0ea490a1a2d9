"""Tiny configs of the causal language models that transformers has: two layers, 64 tokens, well under a second each."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig


def _named(*groups: tuple[str, Any]) -> dict[str, Any]:
    """Every one of the names of each group, with the group's value."""
    return {name: value for names, value in groups for name in names.split()}


SIZES = _named(
    ("hidden_size n_embd d_model dim n_embed embedding_size lru_width", 32),
    ("intermediate_size ffn_dim n_inner d_ff dff ffn_hidden_size dim_ff decoder_ffn_dim encoder_ffn_dim", 64),
    ("max_position_embeddings n_positions max_seq_len max_target_positions", 64),
    ("vocab_size vocab_size_per_layer_input", 64),
    ("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers", 2),
    ("num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads", 4),
    ("num_key_value_heads num_kv_heads", 2),
    ("head_dim attention_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim swa_head_dim rel_extent", 8),
    ("kv_lora_rank q_lora_rank index_n_heads", 16),  # many heads: with few, a sparse index has scores that are equal
    ("index_head_dim index_topk hidden_size_per_layer_input", 8),
    ("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    ("num_experts_per_tok num_experts_per_token moe_topk moe_k top_k", 2),
    ("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size", 16),
    ("moe_shared_expert_intermediate_size", 16),
    ("n_group topk_group mamba_n_groups max_window_layers", 1),
    ("sliding_window attention_window_size", 5),
    ("attention_chunk_size", 4),
    ("linear_num_key_heads linear_num_value_heads linear_num_heads mamba_expand n_groups", 2),
    ("linear_key_head_dim linear_value_head_dim linear_head_dim", 8),
    ("state_size ssm_state_size mamba_d_state mamba_d_conv mamba_dt_rank", 4),
    ("mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim mamba_chunk_size chunk_size", 8),
    ("pad_token_id bos_token_id eos_token_id", None),
)
"""By the names that configs give them; each config takes those that it has."""

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _TOKENS | {"is_decoder": True}
_LATENT = {"num_key_value_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}

CHANGES: dict[str, dict[str, Any]] = _named(
    ("axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3", _LATENT),
    ("sarvam_mla youtu", _LATENT),
    ("qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next", _HYBRID),
    ("kimi_linear", _HYBRID | _LATENT | {"num_experts": 4}),
    ("bamba", {"attn_layer_indices": [1]}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
    ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    ("lfm2 lfm2_moe", {"layer_types": ["conv", "full_attention"]}),
    ("zamba2", {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8, "num_mem_blocks": 1}),
    ("falcon_h1", {"mamba_d_ssm": 64}),
    ("mamba2", {"num_heads": 8, "expand": 2}),
    ("recurrent_gemma", {"num_hidden_layers": 3}),
    ("gemma3n gemma3n_text", {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
    ("codegen gptj", {"rotary_dim": 4}),
    ("dots1", {"n_shared_experts": 1}),
    ("zaya", {"num_experts_per_tok": 1}),
    ("cwm modernbert-decoder", _TOKENS),
    ("bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert prophetnet", _DECODER),
    ("rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl", _DECODER),
    ("xmod", _DECODER | {"default_language": "en_XX"}),
)
"""What an architecture needs beside them, or otherwise."""

LEFT_OUT = _named(
    ("emu3 mllama musicgen musicgen_melody gemma4_assistant gemma4_unified_assistant", "its text model has no class"),
    ("git phi4_multimodal blt reformer xlm xlstm zamba", "does not build, or not small, from these sizes"),
    ("bailing_hybrid dots3_note dots3_note_text lfm3", "new in transformers 5.18 to 5.24, and not looked at yet"),
    ("dory inkling2_loop_text inkling2_text", "new in transformers 5.18 to 5.24, and not looked at yet"),
    ("cohere_compass_text dbrx qwen4_exp qwen4_exp_text", "does not build, or not small, from these sizes"),
)
"""Architectures that are not tried, and why."""

REFUSED = _named(
    ("openai-gpt rwkv xlnet", "it takes no cache"),
    ("recurrent_gemma", "it returns NoneType"),
    ("cpmant", "must match the size"),
    ("big_bird megatron-bert prophetnet rembert roformer", "otherwise with a cache than without"),
    ("camembert data2vec-text roberta roberta-prelayernorm", "its positions leave out tokens"),
    ("xlm-roberta xlm-roberta-xl xmod", "its positions leave out tokens"),
)
"""Architectures that the embedded engine refuses, and what it says."""


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A config of the text model of `model_type`."""
    kind = type(CONFIG_MAPPING[model_type]().get_text_config())
    known = kind().to_dict().keys()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return kind(**(sizes | CHANGES.get(model_type, {}) | changes))
