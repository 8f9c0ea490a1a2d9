"""Ours in vLLM's types, and back: sampling parameters on the way in, completions on the way out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from colo.engine import Completion, SamplingParams
from colo.engines.sampling import check_seeds, completion_seed, distorting, without_neutral
from colo.engines.text import continuation
from colo.errors import StaleWeights, Unsupported
from colo.weights.mismatch import not_numbers


def sampling_params(params: Any, sampling: Mapping[str, Any]) -> Any:
    """vLLM's `SamplingParams` from options by name; colo's and vLLM's own stay what they are.

    Options that change nothing may be any that other engines have. Texts are decoded by colo, when they are read, where
    no option asks for more than the tokens' own.
    Raises: `TypeError` for both parameters and options, `Unsupported` for parameters of another kind, such as a list.
    """
    from vllm import SamplingParams as VLLMSamplingParams

    if params is not None and sampling:
        raise TypeError(f"give {sorted(sampling)} within the sampling parameters, or all options by name")
    if params is None:
        options = without_neutral(sampling, VLLMSamplingParams.__struct_fields__)
        given = VLLMSamplingParams(**options)
        if not options.keys() & _OF_TEXT and not given.stop:
            given.detokenize = False
        return _with_logprobs(given)
    if isinstance(params, VLLMSamplingParams):
        return _with_logprobs(params.clone())
    if isinstance(params, SamplingParams):
        return params
    raise Unsupported(
        f"generate takes one SamplingParams for all prompts, not a {type(params).__name__}: call it once for each "
        "within one `with rt.rollout():`"
    )


def for_prompts(params: Any, num_prompts: int) -> Any:
    """Make vLLM's parameters, for all prompts alike or for each, of colo's or of vLLM's own.

    vLLM gives every prompt the same seed, and each of its samples the next number. With a seed of colo's parameters,
    or a list of them, prompts draw apart.
    """
    from vllm import SamplingParams as VLLMSamplingParams

    check_seeds(params.seed, num_prompts)
    seed, asked = params.seed, params
    if isinstance(params, SamplingParams):
        given = {field: getattr(params, field) for field in params.__dataclass_fields__}
        given |= {"stop_token_ids": list(params.stop_token_ids), "seed": None, "detokenize": False}
        asked = _with_logprobs(VLLMSamplingParams(**given))
    elif not isinstance(seed, Sequence):
        return asked
    return asked if seed is None else [_seeded(asked, completion_seed(seed, i, 0)) for i in range(num_prompts)]


def _seeded(params: Any, seed: int) -> Any:
    found = params.clone()
    found.seed = seed
    return found


def _with_logprobs(params: Any) -> Any:
    if params.logprobs is None:
        params.logprobs = 0  # that of the sampled token
        if hasattr(params, "flat_logprobs"):
            params.flat_logprobs = True  # a dictionary for every token costs as much as a small model's kernels
    return params


_OF_TEXT = {
    "bad_words",
    "detokenize",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
}
"""Options with which vLLM decodes by itself."""


def check_logprobs(params: Any, mode: str, advice: str) -> None:
    """Raise `Unsupported` unless `logprobs_mode` returns log-probabilities of the distribution that is sampled from."""
    if mode == "processed_logprobs":
        return
    if mode != "raw_logprobs" or params.temperature not in (0, 1) or distorting(params):
        raise Unsupported(
            f"vLLM was started with logprobs_mode={mode!r} and returns no log-probabilities of what is sampled at "
            f"temperature {params.temperature} with these filters: {advice}"
            + (", or sample at temperature 1 without filters" if mode == "raw_logprobs" else "")
        )


def check_numbers(logprobs: Sequence[float]) -> None:
    """Raise `FloatingPointError` unless every log-probability of what was sampled is a finite number."""
    if not math.isfinite(sum(logprobs)):
        raise FloatingPointError(not_numbers(None))


def completions(
    outputs: Sequence[Any], version: int, adapter: str | None, *, has_text: bool, tokenizer: Any = None
) -> list[Completion]:
    """Every sample of vLLM's `RequestOutput`s, in prompt order, then sample order.

    Without `has_text` vLLM has decoded nothing, and its texts, all empty, are none: with its `tokenizer` they are
    decoded when they are read.
    Raises: `StaleWeights` where vLLM itself (from 0.33) names another version for some of the tokens;
    `FloatingPointError` for log-probabilities that are not numbers.
    """
    return [
        _completion(
            prompt_index, output, sample, version, adapter, text=_text(output, sample, tokenizer, has_text=has_text)
        )
        for prompt_index, output in enumerate(outputs)
        for sample in sorted(output.outputs, key=lambda sample: sample.index)
    ]


def _text(output: Any, sample: Any, tokenizer: Any, *, has_text: bool) -> str | Callable[[], str] | None:
    if has_text or tokenizer is None:
        return str(sample.text) if has_text else None
    prompt, token_ids = tuple(output.prompt_token_ids), tuple(sample.token_ids)
    if sample.finish_reason == "stop":
        token_ids = token_ids[:-1]  # the stop token, of which vLLM shows nothing
    return partial(continuation, tokenizer, prompt, token_ids)


def _completion(
    prompt_index: int,
    output: Any,
    sample: Any,
    version: int,
    adapter: str | None,
    *,
    text: str | Callable[[], str] | None,
) -> Completion:
    for span in getattr(sample, "weight_versions", None) or ():
        if span.version != str(version):
            raise StaleWeights(
                f"vLLM sampled tokens {span.start} to {span.end} of prompt {prompt_index} from weights that it calls "
                f"{span.version!r}, not from version {version}: publish anew, and leave update_weight_version to colo"
            )
    token_ids = tuple(sample.token_ids)
    rows: Any = sample.logprobs or ()
    if list(token_ids) == getattr(rows, "token_ids", None):  # flat, and nothing but what was sampled
        logprobs = tuple(rows.logprobs)
    else:
        logprobs = tuple(row[token].logprob for token, row in zip(token_ids, rows, strict=True))
    check_numbers(logprobs)
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample.index,
        prompt_token_ids=tuple(output.prompt_token_ids),
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sample.finish_reason or "abort",
        weights_version=version,
        adapter=adapter,
        text=text,
        output=sample,
    )
