"""Tiny models that tests share: thousands of parameters, made and trained in milliseconds on a CPU."""

import pytest
from transformers import Qwen3Config

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "eos_token_id": None,
}
"""One layer; two heads share a key and a value."""

SMALL = TINY | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
"""Two layers with two keys and values each, so that names and shapes of layers and heads differ."""


def tiny_qwen3(**changes):
    """A Qwen3 of one layer; its output layer is a weight of its own unless `changes` tie it."""
    return Qwen3Config(**(TINY | changes))


def small_qwen3(**changes):
    """A Qwen3 of two layers; its output layer is a weight of its own unless `changes` tie it."""
    return Qwen3Config(**(SMALL | changes))


def add_adapter(model, config, *name):
    """transformers' own `model.add_adapter`; skips the test where that asks for a newer PEFT, as 5.24 does."""
    try:
        model.add_adapter(config, *name)
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))
