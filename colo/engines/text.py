"""Prompts on the way into an engine and texts on the way out of it; engines themselves know token ids only."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from colo.engine import Completion
from colo.errors import BudgetError, Unsupported
from colo.memory.probe import available_host_bytes
from colo.units import check_digits, format_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

Message: TypeAlias = Mapping[str, Any]
"""One turn of a conversation: {"role": ..., "content": ...}."""

Prompts: TypeAlias = (
    "Iterable[str | Iterable[int] | Iterable[Message] | Mapping[str, Any]] | Iterable[Message] | Mapping[str, Any] "
    "| Tensor"
)
"""Forms of prompts that `encode_prompts` takes."""

_TAKEN = "prompts is a list of prompts, each a text or a list of token ids, or a list of messages"
_NOT_TEXT = ("pixel_values", "image", "audio", "video", "input_features")
"""First letters of the names of a processor's outputs beside token ids."""


def encode_prompts(prompts: Prompts, tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt; `tokenizer` may be `None` where no prompt has to be encoded.

    A prompt is a text, token ids (a list, or a tensor of one dimension) or a conversation: a list of messages, each
    with "role" and "content", which the tokenizer's chat template renders and ends where the assistant's turn begins.
    As for `vllm.LLM.chat`, one conversation may stand for a list of one. What a tokenizer returns, a mapping with
    "input_ids", is one prompt or a batch of them, from which padding goes where "attention_mask" is 0; other tensors
    are taken as they are. So are vLLM's own prompts, mappings with "prompt_token_ids" or "prompt".

    Raises: `TypeError` for a single text, or token ids of one, in place of a list, and for what is no prompt;
    `ValueError` without a tokenizer or a chat template, or for a mask that is not padding; `Unsupported` for images.
    """
    if isinstance(prompts, Mapping):
        # a mapping is one prompt or a tokenizer's batch: iterating it would give its keys
        return [_encode(0, prompts, tokenizer)] if _is_vllms(prompts) else _unpadded(prompts)
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise TypeError(f"{_TAKEN}, not {prompts!r}: pass [prompt] for one")
    given: list[Any] = list(prompts)
    # before single prompts: one conversation would be read as several messages
    if given and all(_is_message(prompt) for prompt in given):
        return [_rendered(0, given, tokenizer)]
    if any(_is_token_id(prompt) for prompt in given):
        raise TypeError(f"{_TAKEN}: pass [prompt] for one")
    return [_encode(index, prompt, tokenizer) for index, prompt in enumerate(given)]


def with_text(completion: Completion, tokenizer: Any) -> Completion:
    """The completion with the text that the tokenizer decodes when it is read; an engine's own is given its form."""
    if tokenizer is None:
        return completion
    return completion.with_text(partial(_text, tokenizer, completion.token_ids, completion.finish_reason == "stop"))


def _text(tokenizer: Any, token_ids: tuple[int, ...], is_stopped: bool, own: str | None) -> str:
    # alone, as TRL does: of Llama's tokenizers this drops a space before the first word
    if own is None:
        return _decoded(tokenizer, token_ids[:-1] if is_stopped else token_ids)  # the stop token is not shown
    alone = _decoded(tokenizer, token_ids)
    # engines decode behind the prompt: they keep that space, and leave out a character that is not whole at the end
    if _num_spaces(own) == _num_spaces(alone) + 1:
        own = own[1:]
    return alone if not is_stopped and alone.rstrip("\ufffd") == own.rstrip("\ufffd") else own


def _decoded(tokenizer: Any, token_ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _num_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _encode(index: int, prompt: Any, tokenizer: Any) -> list[int]:
    # exact type: a `bool` is an `int`, and no token
    if isinstance(prompt, (list, tuple)) and set(map(type, prompt)) == {int}:
        return list(prompt)  # what most are, told in a tenth of the time
    if isinstance(prompt, Mapping) and _is_vllms(prompt):
        if others := sorted(prompt.keys() - {*_VLLMS, "cache_salt"}):
            raise Unsupported(f"prompt {index} comes with {', '.join(others)}: colo samples from text alone")
        given = (prompt[key] for key in _VLLMS if prompt.get(key) is not None)
        return _encode(index, next(given, None), tokenizer)
    if isinstance(prompt, Mapping):
        rows = _unpadded(prompt, at=index)
        if len(rows) > 1:
            raise ValueError(f"prompt {index} is a batch of {len(rows)} prompts: pass each of them by itself")
        return rows[0] if rows else []
    if isinstance(prompt, Sequence) and any(isinstance(part, Mapping) for part in prompt):
        return _rendered(index, prompt, tokenizer)
    if not isinstance(prompt, str):
        return _token_ids(index, prompt)
    if tokenizer is None:
        raise ValueError(
            "prompts are texts, but the runtime has no tokenizer: pass token ids, or tokenizer=... to colo.launch or "
            "colo.share"
        )
    _check_text(f"prompt {index}", prompt)
    return list(tokenizer(prompt)["input_ids"])


def _check_text(name: str, text: str) -> None:
    """Raise `ValueError` for a text with half of a character, of which tokenizers say that it is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half of a character ({error}): write it whole, or leave it out with "
            "text.encode(errors='ignore').decode()"
        ) from None


_VLLMS = ("prompt_token_ids", "prompt")
"""Keys of a prompt dict as `vllm.LLM.generate` takes it; the first that is present counts."""


def _is_vllms(prompt: Mapping[str, Any]) -> bool:
    return any(key in prompt for key in _VLLMS)


def _token_ids(index: int, prompt: Any) -> list[int]:
    """A list of token ids, or a tensor of one dimension, as integers."""
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    with suppress(TypeError):
        if not isinstance(given, (str, bytes)):
            return list(map(operator.index, given))
    raise TypeError(f"prompt {index} is neither a text nor a list of token ids, but {prompt!r:.200}")


# ---- conversations --------------------------------------------------------------------------------------------------


def _is_message(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "role" in prompt


def _rendered(index: int, messages: Sequence[Any], tokenizer: Any) -> list[int]:
    """Token ids of a conversation, up to where the assistant is to begin."""
    plain = [_plain(index, number, message) for number, message in enumerate(messages)]
    if tokenizer is None:
        raise ValueError(
            "prompts are conversations, but the runtime has no tokenizer: pass token ids, or tokenizer=... to "
            "colo.launch or colo.share"
        )
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None or getattr(tokenizer, "chat_template", "") is None:
        raise ValueError(
            f"prompt {index} is a conversation, and the tokenizer has no chat template: set tokenizer.chat_template, "
            "take an instruction-tuned checkpoint's tokenizer, or pass texts"
        )
    try:
        found = apply(plain, add_generation_prompt=True, tokenize=True)
    except Exception as error:  # jinja2's, or whatever else a template's own words raise
        raise ValueError(
            f"prompt {index}: the tokenizer's chat template cannot render it ({error}): change its messages, or the "
            "template"
        ) from error
    return _unpadded(found, at=index)[0] if isinstance(found, Mapping) else _token_ids(index, found)


def _plain(index: int, number: int, message: Any) -> dict[str, Any]:
    """A message whose content is a text. Raises: `TypeError` for what is no message, `Unsupported` for images."""
    where = f"message {number} of prompt {index}"
    if not _is_message(message):
        raise TypeError(f"{where} is not a mapping with 'role' and 'content', but {message!r:.200}")
    content = message.get("content")
    if isinstance(content, str):
        _check_text(where, content)
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Iterable):
        raise TypeError(f"the content of {where} is neither a text nor a list of its parts, but {content!r:.200}")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(text, str):
            raise Unsupported(f"{where} has a part of type {kind!r}: colo samples from text alone, leave it out")
        _check_text(where, text)
        texts.append(text)
    return dict(message) | {"content": "\n".join(texts)}


# ---- what a tokenizer returns ----------------------------------------------------------------------------------------


def _unpadded(encoding: Mapping[str, Any], *, at: int | None = None) -> list[list[int]]:
    """The prompts of "input_ids" without padding, for prompt `at` of several or for all of them."""
    what = "prompts" if at is None else f"prompt {at}"
    if _is_message(encoding):
        raise TypeError(f"{what} is a single message: pass a list of messages for a conversation")
    if "input_ids" not in encoding:
        raise TypeError(f"{what} is a {type(encoding).__name__} without 'input_ids', but with {sorted(encoding)}")
    if others := sorted(key for key in encoding if str(key).startswith(_NOT_TEXT)):
        raise Unsupported(f"{what} comes with {', '.join(others)}: colo samples from text alone, leave images out")
    ids, masks = _rows(encoding["input_ids"]), encoding.get("attention_mask")
    prompts = [_token_ids(index if at is None else at, row) for index, row in enumerate(ids)]
    if masks is None:
        return prompts
    kept = [[bool(bit) for bit in _token_ids(index, row)] for index, row in enumerate(_rows(masks))]
    if list(map(len, kept)) != list(map(len, prompts)):
        raise ValueError(f"{what}: input_ids and attention_mask are not of the same lengths")
    return [_within(index if at is None else at, *pair) for index, pair in enumerate(zip(prompts, kept, strict=True))]


def _rows(given: Any) -> list[Any]:
    """A batch as a list, also where it is a single row."""
    rows = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(rows, Iterable):
        raise TypeError(f"input_ids and attention_mask are lists with a row for each prompt, not {rows!r}")
    rows = list(rows)
    return [rows] if any(_is_token_id(row) for row in rows) else rows


def _within(index: int, prompt: list[int], kept: list[bool]) -> list[int]:
    """The part of a prompt that its mask keeps. Raises: `ValueError` where the mask leaves out more than padding."""
    if True not in kept:
        return []
    first, last = kept.index(True), len(kept) - kept[::-1].index(True)
    if not all(kept[first:last]):
        raise ValueError(
            f"the attention_mask of prompt {index} is 0 between tokens that count: leave those tokens out of input_ids"
        )
    return prompt[first:last]


def _is_token_id(prompt: Any) -> bool:
    """Tell an integer, one token id of a prompt, from a prompt."""
    if getattr(prompt, "ndim", 0):
        return False  # a tensor, which is an index too if it has a single element
    try:
        operator.index(prompt)
    except (TypeError, ValueError):
        return False
    return True


# ---- checks ----------------------------------------------------------------------------------------------------------

COMPLETION_BYTES = 512
"""Host memory of a `Completion` of one token, with what decodes its text; what engines keep of it comes on top."""


def check_prompts(
    prompts: Sequence[Sequence[int]], vocab_size: int, num_positions: int | None, *, or_else: str = ""
) -> None:
    """Raise `ValueError` for an empty prompt, one that leaves no position, or an id outside the vocabulary.

    `or_else` says what gives the model more positions, after a comma.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompt {index} is empty: there is nothing to continue; give it at least one token, such as the "
                "tokenizer's bos_token"
            )
        if num_positions is not None and len(prompt) >= num_positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, the model knows {num_positions} positions: shorten it, so "
                f"that at least one is left for what is sampled{or_else}"
            )
        # `min` and `max` run in C: the loop below is for the error alone
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            token = next(t for t in prompt if not 0 <= t < vocab_size)
            check_digits(f"a token id of prompt {index}", token)
            raise ValueError(f"prompt {index} has token id {token}, outside the vocabulary of {vocab_size}")


def check_count(num_prompts: int, n: int) -> None:
    """Raise `BudgetError` for more completions than the host would hold if each had one token only."""
    # counted before anything is sampled: `n=10**9` would end the process, not the call
    needed_bytes, free_bytes = num_prompts * n * COMPLETION_BYTES, available_host_bytes()
    if needed_bytes > free_bytes:
        raise BudgetError(
            f"n={n} for {num_prompts} prompts asks for {num_prompts * n} completions, which take at least "
            f"{format_bytes(needed_bytes)} of host memory, and {format_bytes(free_bytes)} are available: lower n, or "
            "generate for some of them at a time",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


# ---- positions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """The positions that a model can compute with."""

    count: int | None = None
    """Number of positions; `None` for a model that has no such limit."""

    boundary: int | None = None
    """Sequences that are longer are computed with other frequencies from their first token on (LongRoPE)."""

    def limits(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[int]:
        """Limit of the tokens that each prompt may grow by: `max_tokens`, or, as in vLLM, the positions that are left.

        No sequence grows over the boundary, where a trainer would compute its first tokens with other frequencies than
        they were drawn with. `ValueError` for a prompt that ends right at it.
        """
        for index, prompt in enumerate(prompts):
            if len(prompt) == self.boundary:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens, after which LongRoPE computes the whole sequence with "
                    "other frequencies: add or leave out a token"
                )
        return [min(max_tokens, last - len(prompt)) for prompt in prompts for last in [self._last(len(prompt))]]

    def is_long(self, prompt: tuple[int, ...]) -> bool:
        """Tell whether a prompt is beyond the boundary, and cannot run beside shorter ones."""
        return self.boundary is not None and len(prompt) > self.boundary

    def _last(self, length: int) -> int:
        ends = [end for end in (self.boundary, self.count) if end is not None and length < end]
        return min(ends, default=1 << 62)


NO_LIMIT = Positions()

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")
"""Config keys for the number of positions, a subset of those that vLLM reads."""


def positions_of(config: PretrainedConfig) -> Positions:
    """The positions of a model of `config`: the smallest limit that it names, as in vLLM.

    Dynamic NTK frequencies change with every token beyond `max_position_embeddings`. A trainer could not compute such
    tokens again, so that they are not offered.
    """
    text = config.get_text_config()
    found = [value for key in _KEYS if isinstance(value := getattr(text, key, None), int) and value > 0]
    boundaries = [
        rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for rope in _ropes(getattr(text, "rope_parameters", None))
        if rope.get("rope_type", rope.get("type")) == "longrope"
    ]
    return Positions(count=min(found, default=None), boundary=min(filter(None, boundaries), default=None))


def _ropes(parameters: Any) -> Iterable[Mapping[str, Any]]:
    """The settings of rotary embeddings: one set, or one for every kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]
