"""How far the engine's log-probabilities are from the trainer's, on the same weights and the same tokens.

Two implementations of one model never agree to the last bit; a gap that grows tells of a numerical setting, or of
weights, that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colo.engine import Completion
from colo.memory.dtensor import is_dtensor
from colo.weights.sources.base import WeightSource

MAX_TOKENS = 64
"""Tokens of a completion that are compared; bounds the logits."""


@torch.no_grad()
def logprob_difference(
    model: nn.Module, completions: Sequence[Completion], *, temperature: float, device: torch.device
) -> float | None:
    """Mean |log p(engine) - log p(trainer)| over the first tokens of `completions`; `None` without any.

    They were sampled from `softmax(logits / temperature)`, unfiltered. The model runs in evaluation mode meanwhile.
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
    # Hooks of the root module are the user's, and this pass is not; FSDP2 gathers weights in a hook of its own.
    run = model if any(is_dtensor(p) for p in model.parameters()) else model.forward
    logits = run(input_ids=ids, logits_to_keep=num_tokens + 1, use_cache=False).logits[0, -num_tokens - 1 : -1]
    logprobs: torch.Tensor = (logits.float() / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return logprobs - torch.tensor(completion.logprobs[:num_tokens], dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far an engine was from the trainer."""

    mean: float
    """Mean |log p(engine) - log p(trainer)| of a token."""

    temperature: float
    """The temperature at which the tokens were sampled."""


class MismatchCheck:
    """Compares a rollout's first completions with what the trainer computes of the same tokens, on the same weights."""

    def __init__(self, *, num_sequences: int, max_mismatch: float | None) -> None:
        """See `RuntimeConfig.mismatch_sequences` and `max_mismatch`."""
        self._num_sequences = num_sequences
        self._max_mismatch = max_mismatch
        self._noted: tuple[float, Sequence[Completion]] | None = None

    @property
    def has_noted(self) -> bool:
        """Whether there is something to compare."""
        return self._noted is not None and bool(self._noted[1])

    def note(self, temperature: float, completions: Sequence[Completion]) -> None:
        """Keep the first of `completions`, which were sampled from `softmax(logits / temperature)`."""
        self._noted = (temperature, completions[: self._num_sequences])

    def measure(self, source: WeightSource, model: nn.Module, *, version: int, device: torch.device) -> Mismatch | None:
        """The difference for completions of this `version`, which are then forgotten; `None` without any.

        Ranks of a sharded model compute each pass together, as many passes as the rank with the fewest completions has.
        """
        temperature, completions = self._noted or (1.0, ())
        self._noted = None
        comparable = [c for c in completions if c.weights_version == version and c.token_ids]
        count = source.ranks.min(len(comparable), "comparing log-probabilities")
        if not count:
            return None
        difference = logprob_difference(model, comparable[:count], temperature=temperature, device=device)
        source.reshard()
        return None if difference is None else Mismatch(difference, temperature)

    def why_too_large(self, mismatch: Mismatch) -> str | None:
        """Why the engine is not to be trained on, with what to do; `None` where it may be."""
        most = self._max_mismatch
        difference, temperature = mismatch.mean, mismatch.temperature
        if most is None or difference * min(1.0, temperature) <= most:  # which divides logits, and so differences
            return None
        return (
            f"log-probabilities of the engine differ from the trainer's by {difference:.3g} on average at temperature "
            f"{temperature:g}, and max_mismatch allows {most:g}: the engine samples from another model. Compare "
            "dtypes, quantization, rope settings and chat templates of the two, or raise RuntimeConfig.max_mismatch"
        )
