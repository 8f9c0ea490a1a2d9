"""Texts on the way into an engine and out of it; engines themselves know token ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from colo.engines.base import Completion


def encode_prompts(prompts: Sequence[str | Sequence[int]], tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt; `tokenizer` may be `None` where no prompt is a text.

    Raises: `TypeError` for a single prompt in place of a list of them, or for chat messages; `ValueError` for a text
    without a tokenizer.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
        raise TypeError("prompts is a list of prompts, each a text or a list of token ids: pass [prompt] for one")
    return [_encode(prompt, tokenizer) for prompt in prompts]


def with_text(completion: Completion, tokenizer: Any) -> Completion:
    """The completion with its decoded text, where there is a tokenizer and the engine has produced none."""
    if tokenizer is None or completion.text is not None:
        return completion
    return replace(completion, text=tokenizer.decode(completion.token_ids, skip_special_tokens=True))


def _encode(prompt: str | Sequence[int], tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        if any(isinstance(part, Mapping) for part in prompt):
            raise TypeError("prompts are texts or token ids, not messages: apply the tokenizer's chat template first")
        return list(prompt)
    if tokenizer is None:
        raise ValueError(
            "prompts are texts, but the runtime has no tokenizer: pass token ids, or tokenizer=... to colo.launch or "
            "colo.share"
        )
    return list(tokenizer(prompt)["input_ids"])
