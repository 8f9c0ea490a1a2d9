"""Bytes of KV cache that a model takes, layer by layer, as vLLM's `KVCacheSpec` of each layer counts them.

Read from the instantiated modules of a transformers model, on any device. Blocks, which round every sequence up, and
pages padded to one size among layers of several kinds are not counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv")
"""One matrix for queries, keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """The cache of one layer: keys and values, a latent vector in their place, or a recurrent state."""

    num_heads: int = 0  # key/value heads
    key_size: int = 0  # elements of a key, for each head and token
    value_size: int = 0
    window: int | None = None  # tokens after which keys and values are dropped (vLLM's SlidingWindowSpec)
    latent_size: int = 0  # elements of the one vector that multi-head latent attention keeps for all heads (MLA)
    state_size: int = 0  # elements for each sequence, whatever its length (MambaSpec), in the model's dtype
    wide_state_size: int = 0  # those in fp32

    def token_bytes(self, *, dtype_bytes: int = 2, tp: int = 1) -> int:
        """Bytes of one token on one of `tp` ranks: heads are cut, at most to one; a latent vector is held whole."""
        if self.latent_size:
            return self.latent_size * dtype_bytes
        return max(1, self.num_heads // tp) * (self.key_size + self.value_size) * dtype_bytes

    def sequence_bytes(self, context: int, *, dtype_bytes: int = 2, tp: int = 1) -> int:
        """Bytes of a sequence of `context` tokens.

        While vLLM reads a prompt, a layer with a window may hold a prefill chunk more.
        """
        num_tokens = context if self.window is None else min(context, self.window)
        state_bytes = self.state_size * dtype_bytes + self.wide_state_size * 4
        return num_tokens * self.token_bytes(dtype_bytes=dtype_bytes, tp=tp) + -(-state_bytes // tp)


def kv_bytes(layers: Iterable[LayerCache], context: int, *, dtype_bytes: int = 2, tp: int = 1) -> int:
    """KV cache of one sequence of `context` tokens over all layers, on one of `tp` ranks."""
    return sum(layer.sequence_bytes(context, dtype_bytes=dtype_bytes, tp=tp) for layer in layers)


def layer_caches(model: Any) -> tuple[LayerCache, ...]:
    """The cache of each layer of a transformers model that has one; a layer with two kinds comes twice."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    found: list[LayerCache] = []
    for index, layer in enumerate(decoder_layers(model)):
        kind = kinds[index] if index < len(kinds) else None
        found += (cache for module in layer.modules() for cache in _caches_of(module, config, kind))
    return tuple(found)


def decoder_layers(model: Any) -> list[Any]:
    """The layers of the text model, in order."""
    from torch import nn

    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    return list(next((stack for stack in stacks if len(stack) == num_layers), stacks[0] if stacks else ()))


def width_of(linear: Any) -> int:
    """Output elements of a linear layer, also of GPT-2's own kind."""
    return int(getattr(linear, "out_features", None) or linear.nf)


def _caches_of(module: Any, config: Any, kind: str | None) -> Iterator[LayerCache]:
    from torch import nn

    children = dict(module.named_children())
    convolution = next((child for child in children.values() if isinstance(child, nn.Conv1d)), None)
    head_size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)  # the latter of GPT-NeoX
    fused = next((name for name in _FUSED if name in children), None)
    if convolution is not None:
        yield _recurrent(module, config, convolution)
    elif "kv_a_proj_with_mqa" in children:
        key_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        latent_size, heads = width_of(children["kv_a_proj_with_mqa"]), config.num_attention_heads
        yield LayerCache(num_heads=heads, key_size=key_size, value_size=config.v_head_dim, latent_size=latent_size)
    elif head_size and kind == "linear_attention" and fused is not None:  # lightning attention
        yield LayerCache(state_size=config.num_attention_heads * head_size**2)
    elif head_size and "k_proj" in children and not getattr(module, "is_kv_shared_layer", False):
        key_width = width_of(children["k_proj"])
        value_width, heads = width_of(children.get("v_proj", children["k_proj"])), key_width // head_size
        sizes = {"num_heads": heads, "key_size": head_size, "value_size": value_width // heads}
        yield LayerCache(**sizes, window=_window(module, config, kind))
    elif head_size and fused is not None:
        width = width_of(children[fused]) - config.num_attention_heads * head_size
        sizes = {"num_heads": width // (2 * head_size), "key_size": head_size, "value_size": head_size}
        yield LayerCache(**sizes, window=_window(module, config, kind))


def _window(module: Any, config: Any, kind: str | None) -> int | None:
    """Tokens that an attention layer sees; `None` for all of them."""
    if kind == "chunked_attention":
        return int(config.attention_chunk_size)
    if kind is not None:
        return int(config.sliding_window) if kind == "sliding_attention" and config.sliding_window else None
    if "sliding_window" not in inspect.signature(type(config)).parameters:  # a stray key in the file
        return None
    window: int | None = getattr(module, "sliding_window", config.sliding_window)
    return window


def _recurrent(module: Any, config: Any, convolution: Any) -> LayerCache:
    """The states of a convolution and, where there is one, of a state space or a linear attention behind it."""
    kept = convolution.weight.shape[0] * (convolution.kernel_size[0] - 1)
    decay = getattr(module, "A_log", None)
    dtype = getattr(config, "mamba_ssm_dtype", None)
    if hasattr(module, "head_k_dim"):  # gated delta net
        state = module.num_v_heads * module.head_k_dim * module.head_v_dim
    elif decay is not None and decay.dim() == 2:  # Mamba
        state = decay.numel()
    elif hasattr(module, "ssm_state_size"):  # Mamba 2
        state = module.num_heads * module.head_dim * module.ssm_state_size
    elif hasattr(module, "head_dim"):  # Kimi's delta attention
        state, dtype = module.num_heads * module.head_dim**2, dtype or "float32"
    else:  # a short convolution alone
        state = 0
    is_wide = str(dtype).removeprefix("torch.") == "float32"
    return LayerCache(state_size=kept + state * (not is_wide), wide_state_size=state * is_wide)
