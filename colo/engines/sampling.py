"""Drawing tokens from logits, and keeping what was drawn.

Knows token ids, rows and steps; knows nothing about engines, caches or text.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any

import torch

from colo.engine import SamplingParams, plain

_BLOCK_STEPS = 64
"""Uniforms drawn for a row at a time. Fixed, so that a row's numbers do not depend on how many of them are used."""

_CHUNK_ELEMENTS = 1 << 23
"""Logits processed at a time: about 200 MB of workspace, whatever the number of rows and the vocabulary."""

TAKEN = tuple(option.name for option in fields(SamplingParams))
"""Sampling options that every engine has."""

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("guided", "guided_decoding", "prompt_logprobs", "repetition_detection", "structured_outputs"), ()),
    **dict.fromkeys(("thinking_token_budget", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("detokenize", "do_sample", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("flat_logprobs", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("frequency_penalty", "logprobs", "min_tokens", "presence_penalty"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "num_beams", "repetition_penalty"), (1,)),
    **dict.fromkeys(("extra_args", "logit_bias"), ({},)),
    **dict.fromkeys(("bad_words", "logits_processors"), ([], ())),
    "allowed_token_ids": ([],),
    "stop": ("", [], ()),
}
"""Options of vLLM's and of trainers', and the values, beside `None`, with which they change nothing here."""

_OF_TRANSFORMERS = {
    "do_sample": "temperature=0 is greedy, and anything else samples",
    "max_length": "max_tokens counts the completion alone",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens, on vLLM",
    "num_beams": "n completions of each prompt; there is no beam search",
    "num_return_sequences": "n",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop, on vLLM",
}
"""Names of transformers' generation options, each with the option here that means the same."""


def without_neutral(options: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """The options without those that change nothing: not `taken` by an engine, or `None` in place of a neutral value.

    What is neither taken nor neutral is left in, but for transformers' names, which raise `ValueError`. Numbers of
    NumPy's and torch's are Python's own in them.
    """
    # extra_args are a plugin's of vLLM, which may take tensors
    given = {name: value if name == "extra_args" else plain(value) for name, value in options.items()}
    left = {name: value for name, value in given.items() if not _is_left_out(name, value, taken)}
    if others := [name for name in left if name in _OF_TRANSFORMERS]:
        advice = "; ".join(f"in place of {name}, {_OF_TRANSFORMERS[name]}" for name in others)
        raise ValueError(f"{', '.join(others)} of transformers' generate: sampling options have vLLM's names. {advice}")
    return left


def _is_left_out(name: str, value: Any, taken: Collection[str]) -> bool:
    if name in TAKEN or name not in _NEUTRAL:
        return False
    return value is None or (name not in taken and value in _NEUTRAL[name])


def check_taken(options: Mapping[str, Any], engine: str, advice: str) -> dict[str, Any]:
    """The options for `SamplingParams`, neutral ones left out.

    Raises: `ValueError` for others that `engine`, which has no more than those, does not take.
    """
    left = without_neutral(options, TAKEN)
    if unknown := sorted(left.keys() - set(TAKEN)):
        raise ValueError(f"{engine} does not take {', '.join(unknown)}, but {', '.join(TAKEN)}: {advice}")
    return left


# ---- what options do to the distribution, and what they need ---------------------------------------------------------

_KEEPS_DISTRIBUTION = frozenset[str]().union(
    # how many and how long, from which random numbers
    ("n", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "repetition_detection", "seed"),
    # what is returned of it, and how
    ("logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens"),
    ("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "output_text_buffer_length"),
    ("stream_interval", "skip_clone", "skip_reading_prefix_cache", "routed_experts_prompt_start"),
    # only a watermark that the engine was started with, see `LLMLink`
    ("watermarking",),
)
"""Options that leave `softmax(logits / temperature)` as it is. Any other, known or of a later vLLM, may change it."""

_FILTERS = ("top_p", "top_k", "min_p")
_PLAIN: Mapping[str, Sequence[Any]] = {"top_p": (1,), "top_k": (0, -1), "repetition_penalty": (1,)}
"""Neutral values of options, beside false ones: they change nothing."""


def distorting(params: Any) -> tuple[str, ...]:
    """Names of options with which tokens are not drawn from `softmax(logits / temperature)`.

    `params` are colo's or vLLM's parameters, or options by name. Greedy sampling is told by its temperature alone,
    whatever the filters.
    """
    options = _options(params)
    is_greedy = options.get("temperature") == 0
    skipped = _KEEPS_DISTRIBUTION | {"temperature", *(_FILTERS if is_greedy else ())}
    return tuple(
        name
        for name, value in options.items()
        if not name.startswith("_")
        and name not in skipped
        and _is_given(name, value)
        and value not in _PLAIN.get(name, ())
    )


def _is_given(name: str, value: Any) -> bool:
    return value is not None if name == "thinking_token_budget" else bool(value)  # of which 0 ends the thinking at once


def sampling_temperature(params: Any) -> float | None:
    """The temperature that log-probabilities have in them; `None` where other options change them too."""
    temperature: float | None = _options(params).get("temperature")
    return None if distorting(params) else (1.0 if temperature is None else temperature) or 1.0


def needing_tokenizer(params: Any) -> tuple[str, ...]:
    """Names of options with which vLLM reads or writes text while it samples; without a tokenizer it skips them."""
    options = _options(params)
    asked = [name for name in _OF_TOKENIZER if _is_given(name, options.get(name))]
    return (*asked, *(name for name in _OF_DECODER if options.get(name) is False))


_OF_TOKENIZER = ("bad_words", "stop", "structured_outputs", "thinking_token_budget")
_OF_DECODER = ("skip_special_tokens", "spaces_between_special_tokens")


def _options(params: Any) -> Mapping[str, Any]:
    if isinstance(params, Mapping):
        return params
    names = getattr(params, "__struct_fields__", None) or TAKEN
    return {name: getattr(params, name) for name in names}


def processed_logprobs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities (float32, shape of `logits`: [rows, vocab]) of the distribution that `params` draws from.

    Temperature comes first, then min-p, then top-k, then top-p on what top-k has left, the order of vLLM's sampler.
    Tokens that are equally likely are ranked by id. Temperature 0 gives the unscaled softmax, without filters.
    """
    scores = logits.float()
    if params.temperature == 0:
        return scores.log_softmax(-1)
    # Relative to the largest, so that a tiny temperature overflows to -inf (probability zero) and never to inf.
    scores = (scores - scores.amax(-1, keepdim=True)) / params.temperature
    if params.min_p > 0:
        scores = scores.masked_fill(scores < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < scores.shape[-1] or params.top_p < 1:
        scores = _keep_top(scores, params.top_k, params.top_p)
    return scores.log_softmax(-1)


def _keep_top(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`scores` [rows, vocab] with -inf where a token is neither among the `top_k` nor within `top_p`."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        ordered[..., top_k:] = -math.inf
    if top_p < 1:
        # in fp64: cumulative sums of a large vocabulary round at the boundary of `top_p`
        probabilities = ordered.softmax(-1, dtype=torch.float64)
        # exclusive: the first token that passes `top_p` still counts
        more_likely = probabilities.cumsum(-1) - probabilities
        ordered = ordered.masked_fill(more_likely >= top_p, -math.inf)
    return scores.scatter(-1, order, ordered)


def invert_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids (int64 [rows]) where the cumulative `probabilities` [rows, vocab] pass `uniforms` [rows] in [0, 1).

    Never a token of probability zero. Sums are taken in float64: in float32 the tail of a large vocabulary is lost.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # the row's own sum, since probabilities in fp32 do not add up to 1
    targets = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_max(probabilities.shape[-1] - 1)
    # A parallel scan may round two equal sums differently, so that about once in 1e15 draws it points at a token of
    # probability zero.
    possible = probabilities.gather(-1, tokens) > 0
    return torch.where(possible, tokens, probabilities.argmax(-1, keepdim=True))[:, 0]


def row_seed(seed: int | str, prompt_index: int, sample_index: int) -> int:
    """A seed in [0, 2**63) for one completion: the same in every process, on every platform and in every batch."""
    key = f"{seed}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def completion_seed(seed: int | Sequence[int], prompt_index: int, sample_index: int) -> int:
    """The seed of one completion, where `seed` is the call's or has one for each prompt, as `SamplingParams` says."""
    if isinstance(seed, Sequence):
        return int(seed[prompt_index]) + sample_index
    return row_seed(seed, prompt_index, sample_index)


def check_seeds(seed: Any, num_prompts: int) -> None:
    """Raise `ValueError` for a list of seeds that has not one for each prompt."""
    if isinstance(seed, Sequence) and len(seed) != num_prompts:
        raise ValueError(f"seed has {len(seed)} seeds for {num_prompts} prompts: give one for each, or a single one")


def seeded_each(params: SamplingParams, num_prompts: int) -> SamplingParams:
    """The same with a seed for each prompt, if it has any: who samples others must not matter. As `check_seeds`."""
    seed: Any = params.seed
    check_seeds(seed, num_prompts)
    if not isinstance(seed, Integral):
        return params
    return replace(params, seed=[row_seed(int(seed), index, 0) >> 2 for index in range(num_prompts)])


class Sampler:
    """Draws one token a step for each row of a batch.

    Every row has a generator of its own, so that what it draws depends on `(seed, prompt index, sample index, step)`
    and on its logits, and not on the rows beside it. Torch's global generators are not touched.
    """

    def __init__(self, params: SamplingParams, rows: Sequence[tuple[int, int]], device: torch.device) -> None:
        """`rows` are (prompt index, sample index) of the completions, in the order of the rows of the logits."""
        self._params = params
        self._greedy = params.temperature == 0
        self._step = 0
        self._device = device
        self._uniforms = torch.zeros(len(rows), _BLOCK_STEPS, dtype=torch.float64, device=device)
        self._generators: list[torch.Generator] = []
        if not self._greedy:
            seed = secrets.randbits(63) if params.seed is None else params.seed
            # generators on the host: the same numbers on every device
            self._generators = [torch.Generator().manual_seed(completion_seed(seed, *row)) for row in rows]

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw from `logits` [rows, vocab]: token ids (int64 [rows]) and their log-probabilities (float32 [rows])."""
        num_rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
        chunks = zip(logits.split(num_rows), self._next_uniforms().split(num_rows), strict=True)
        tokens, logprobs = zip(*(self._draw(*chunk) for chunk in chunks), strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows `index` (int64) only, in that order."""
        self._uniforms = self._uniforms[index]
        if self._generators:
            self._generators = [self._generators[row] for row in index.tolist()]

    def _draw(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = processed_logprobs(logits, self._params)
        tokens = logits.argmax(-1) if self._greedy else invert_cdf(logprobs.exp(), uniforms)
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]

    def _next_uniforms(self) -> torch.Tensor:
        """One number in [0, 1) for each row (float64 [rows])."""
        column = self._step % _BLOCK_STEPS
        if column == 0 and self._generators:
            # a block of steps at once: one copy to the device instead of one for every token
            blocks = torch.empty(len(self._generators), _BLOCK_STEPS, dtype=torch.float64, device="cpu")
            for block, generator in zip(blocks, self._generators, strict=True):
                block.uniform_(generator=generator)
            self._uniforms = blocks.to(self._device)
        self._step += 1
        return self._uniforms[:, column]


class Transcript:
    """Tokens drawn for each row so far, and the rows that go on.

    A row ends with the first of the stop tokens, which it keeps, or at its limit. Rows that have ended may stay in the
    batch: what is drawn for them afterwards is dropped.
    """

    def __init__(self, limits: Sequence[int], stop_token_ids: Collection[int], device: torch.device) -> None:
        """`limits` are the most tokens of each row."""
        num_rows, max_tokens = len(limits), max(limits)
        self._tokens = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(num_rows, max_tokens, dtype=torch.float32, device=device)
        self._lengths = torch.tensor(limits, dtype=torch.int64, device=device)
        self._ends_together = min(limits) == max_tokens and not stop_token_ids
        self._stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._rows = torch.arange(num_rows, device=device)
        self._stop_token_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64, device=device)
        self._step = 0

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> int:
        """Note one step of the rows in the batch (int64 and float32 [rows]) and return how many of them go on.

        Waits for the device once, unless nothing can stop a row.
        """
        self._tokens[self._rows, self._step] = tokens
        self._logprobs[self._rows, self._step] = logprobs
        self._step += 1
        if self._step == self._tokens.shape[1]:
            return 0
        if self._ends_together:
            return len(self._rows)
        stopped, lengths = self._stopped[self._rows], self._lengths[self._rows]
        stops_now = (torch.isin(tokens, self._stop_token_ids) | (lengths == self._step)) & ~stopped
        self._lengths[self._rows] = torch.where(stops_now, self._step, lengths)
        self._stopped[self._rows] = stopped | stops_now
        return len(self._rows) - int((stopped | stops_now).sum())

    def shrink(self) -> torch.Tensor:
        """Drop the rows that have ended from the batch; returns the positions (int64) of those that go on."""
        index = (~self._stopped[self._rows]).nonzero()[:, 0]
        self._rows = self._rows[index]
        return index

    def has_nan(self) -> bool:
        """Tell whether a log-probability of a drawn token is not a finite number. Waits for the device."""
        counts = torch.arange(self._step, device=self._lengths.device) < self._lengths[:, None]
        return bool((self._logprobs[:, : self._step].isfinite().logical_not() & counts).any())

    def results(self) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Tokens and their log-probabilities of every row, in the order of the first batch."""
        tokens, logprobs = self._tokens[:, : self._step].tolist(), self._logprobs[:, : self._step].tolist()
        lengths = self._lengths.tolist()
        return [(tuple(t[:n]), tuple(p[:n])) for t, p, n in zip(tokens, logprobs, lengths, strict=True)]


def sample_rows(
    logits: torch.Tensor,
    rows: Sequence[tuple[int, int]],
    params: SamplingParams,
    stop_token_ids: Collection[int],
    *,
    advance: Callable[[torch.Tensor], torch.Tensor],
    keep: Callable[[torch.Tensor], None],
    limits: Sequence[int] | None = None,
) -> Transcript:
    """Draw until every row has ended, starting from `logits` [rows, vocab], at its limit (`params.max_tokens`) at last.

    `advance` takes the tokens just drawn (int64 [rows in the batch]) and returns the next logits. `keep` is told which
    rows (int64 positions) stay in the batch, whenever half of them have ended, before `advance` is next called.
    """
    sampler = Sampler(params, rows, logits.device)
    transcript = Transcript(limits or [params.max_tokens] * len(rows), stop_token_ids, logits.device)
    while True:
        tokens, logprobs = sampler.sample(logits)
        num_running = transcript.append(tokens, logprobs)
        if num_running == 0:
            return transcript
        # only when half have ended: every shrink copies the caches of the rest
        if 2 * num_running <= len(tokens):
            index = transcript.shrink()
            sampler.keep(index)
            keep(index)
            tokens = tokens[index]
        logits = advance(tokens)
