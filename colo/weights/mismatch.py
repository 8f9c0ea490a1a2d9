"""How far the engine's log-probabilities are from the trainer's, on the same weights and the same tokens.

Two implementations of one model never agree to the last bit; a gap that grows tells of a numerical setting, or of
weights, that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from colo.engine import Completion

MAX_TOKENS = 64
"""Tokens of a completion that are compared; bounds the logits."""


@torch.no_grad()
def logprob_difference(
    model: nn.Module, completions: Sequence[Completion], *, temperature: float, device: torch.device
) -> float | None:
    """Mean |log p(engine) - log p(trainer)| over the first tokens of `completions`; `None` without any.

    The completions were sampled from `softmax(logits / temperature)`, unfiltered. The model runs in evaluation mode and
    is left as it was.
    """
    differences: list[torch.Tensor] = []
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for completion in completions:
            num_tokens = min(len(completion.token_ids), len(completion.logprobs), MAX_TOKENS)
            if num_tokens:
                differences.append(_differences(model, completion, num_tokens, temperature, device))
    finally:
        for module, training in modes:
            module.training = training
    return float(torch.cat(differences).abs().mean()) if differences else None


def _differences(
    model: Any, completion: Completion, num_tokens: int, temperature: float, device: torch.device
) -> torch.Tensor:
    tokens = torch.tensor(completion.token_ids[:num_tokens], device=device)
    prompt = torch.tensor(completion.prompt_token_ids, device=device)
    ids = torch.cat([prompt, tokens])[None]
    logits = model(input_ids=ids, logits_to_keep=num_tokens + 1, use_cache=False).logits[0, -num_tokens - 1 : -1]
    logprobs: torch.Tensor = (logits.float() / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return logprobs - torch.tensor(completion.logprobs[:num_tokens], dtype=torch.float32, device=device)
