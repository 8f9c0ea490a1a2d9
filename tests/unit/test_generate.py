"""What goes into `generate`, and what must not come out of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    MambaConfig,
    OpenAIGPTConfig,
    PretrainedConfig,
    Qwen3Config,
)

import colo
from colo.engines.layout import Adapters
from colo.engines.torch import TorchEngine
from colo.memory.offload import Mover
from colo.units import MIB

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=None, eos_token_id=None)
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def qwen3(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**(SIZES | changes))


def launch(config: PretrainedConfig, **options: Any) -> colo.Runtime:
    torch.manual_seed(0)
    return colo.launch(config, device="cpu", config=colo.RuntimeConfig(kv_cache_bytes=MIB), **options)


@torch.no_grad()
def logprobs_of(model: nn.Module, completion: Any) -> torch.Tensor:
    """Of a completion's tokens, at temperature 1, by one pass of the trainer's model over all of them."""
    token_ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
    logits = model(input_ids=token_ids).logits[0, len(completion.prompt_token_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def assert_sampled_from(model: nn.Module, completions: list[Any]) -> None:
    model.eval()
    for completion in completions:
        expected = logprobs_of(model, completion)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_prompts_from_a_generator_are_all_read_also_as_generators_of_token_ids():
    with launch(qwen3()) as rt:
        prompts = [[1, 2], [3], [4, 5, 6]]
        expected = rt.generate(prompts, max_tokens=3, temperature=0)
        assert rt.generate((p for p in prompts), max_tokens=3, temperature=0) == expected
        assert rt.generate((iter(p) for p in prompts), max_tokens=3, temperature=0) == expected
        params = colo.SamplingParams(max_tokens=3, temperature=0)
        with rt.rollout():
            found = rt.engine.generate((p for p in prompts), params)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
