"""Texts on the way into an engine and out of it; engines themselves know token ids only."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from colo.engine import Completion

_TAKEN = "prompts is a list of prompts, each a text or a list of token ids"


def encode_prompts(prompts: Iterable[str | Iterable[int]], tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt; `tokenizer` may be `None` where no prompt is a text.

    Raises: `TypeError` for a single prompt, chat messages, or anything but texts and token ids; `ValueError` for a text
    without a tokenizer.
    """
    if isinstance(prompts, Mapping):
        raise TypeError(
            f"prompts is a list of prompts, each a text or a list of token ids, not a {type(prompts).__name__}: pass "
            "the texts, or the 'input_ids' of a tokenizer that has not padded them"
        )
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise TypeError(f"{_TAKEN}, not {prompts!r}: pass [prompt] for one")
    given = list(prompts)
    if any(_is_token_id(prompt) for prompt in given):
        raise TypeError(f"{_TAKEN}: pass [prompt] for one")
    return [_encode(index, prompt, tokenizer) for index, prompt in enumerate(given)]


def with_text(completion: Completion, tokenizer: Any) -> Completion:
    """The completion with its decoded text, where there is a tokenizer and the engine has produced none."""
    if tokenizer is None or completion.text is not None:
        return completion
    return replace(completion, text=tokenizer.decode(completion.token_ids, skip_special_tokens=True))


def _encode(index: int, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, Mapping) or (isinstance(prompt, Sequence) and any(isinstance(p, Mapping) for p in prompt)):
        raise TypeError(
            "prompts are texts or token ids, not messages: apply the tokenizer's chat template first "
            f"(prompt {index} is a {type(prompt).__name__})"
        )
    if not isinstance(prompt, str):
        with suppress(TypeError):
            if not isinstance(prompt, bytes):
                return list(map(operator.index, prompt))
        raise TypeError(f"prompt {index} is neither a text nor a list of token ids, but {prompt!r:.200}")
    if tokenizer is None:
        raise ValueError(
            "prompts are texts, but the runtime has no tokenizer: pass token ids, or tokenizer=... to colo.launch or "
            "colo.share"
        )
    return list(tokenizer(prompt)["input_ids"])


def _is_token_id(prompt: Any) -> bool:
    """Whether this is an integer: one token id of a prompt, where a prompt is wanted."""
    try:
        operator.index(prompt)
    except (TypeError, ValueError):
        return False
    return True
