"""`check`: does an engine compute what the trainer does, and sample as it is told?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from colo.engine import Completion
from colo.engines.text import encode_prompts
from colo.errors import StaleWeights, Unsupported
from colo.runtime import Runtime
from colo.weights.mismatch import logprob_difference

_TOKENS = 8
"""Tokens of a completion, which is enough to see another model."""
_DRAWS = 4
"""Completions by one seed, of which two at least are the same where it is honoured."""


@dataclass(frozen=True, slots=True)
class Check:
    """Findings of `check`."""

    mismatch: float  # mean |log p(engine) - log p(trainer)| of a token, at temperature 1
    num_tokens: int  # that were compared
    options: tuple[str, ...]  # seen to be honoured; those that the engine refuses by name are not among them
    adapter_tensors: int  # of the adapter that the engine serves; 0 without one

    def __str__(self) -> str:
        adapter = f", {self.adapter_tensors} tensors of the adapter are served" if self.adapter_tensors else ""
        return (
            f"engine and trainer differ by {self.mismatch:.2g} on average over {self.num_tokens} tokens; honoured: "
            f"{', '.join(self.options)}{adapter}"
        )


def check(
    rt: Runtime,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    max_mismatch: float | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Check:
    """Compare an engine with its trainer: log-probabilities, adapter and sampling options. Takes a second.

    `prompts` are token ids, by default a few of the vocabulary's. `max_mismatch` is the largest mean difference, by
    default that of the runtime's config. `sampling` are options that the engine has to take. Draws from a seed; the
    weights are as they were.
    Raises: `StaleWeights` when the two compute different models; `Unsupported`, by name, for an option that the engine
    does not honour, or part of an adapter that it does not serve; `PhaseError` within a phase.
    """
    if not isinstance(rt, Runtime):
        raise TypeError(f"check takes a runtime, as colo.launch and colo.share return, not a {type(rt).__name__}")
    if not hasattr(rt.model, "get_input_embeddings"):
        raise Unsupported(
            f"colo does not know how a {type(rt.model).__name__} computes log-probabilities: compare your own with "
            "those of rt.generate(...), and rt.log(mismatch=...) for the report"
        )
    most = rt.config.max_mismatch
    if max_mismatch is not None:
        most = replace(rt.config, max_mismatch=max_mismatch).max_mismatch  # checked by the config's own rules
    given = [] if prompts is None else encode_prompts(prompts, rt.tokenizer)
    prompts = given or _prompts(rt)
    if not isinstance(sampling, Mapping | None):
        raise TypeError(f"sampling has options by name, such as {{'top_p': 0.9}}, and is a {type(sampling).__name__}")
    if sampling:
        rt.engine.sampling_params(None, **sampling)
    with rt.rollout():
        past_the_end: dict[str, Any] = {} if _is_refused(rt, prompts[0], ignore_eos=True) else {"ignore_eos": True}
        sampled = rt.generate(prompts, max_tokens=_TOKENS, temperature=1.0, seed=7, **past_the_end)
        honoured, filtered = _sample(rt, prompts[0], past_the_end)
    difference = logprob_difference(rt.model, sampled, temperature=1.0, device=rt.device)
    honoured |= {name: _are_best(rt, *pair, noise=difference or 0.0) for name, pair in filtered.items()}
    # the passes have left a sharded model whole: accelerate looks for shards in its optimizer
    rt.transport.source.reshard()
    found = difference if difference is not None else float("nan")
    # `not <=`: NaN is a mismatch too
    if most is not None and not found <= most:
        raise StaleWeights(
            f"log-probabilities of the engine differ from the trainer's by {found:.3g} on average, and {most:g} is "
            "allowed: the two compute different models. Compare dtypes, quantization and rope settings"
        )
    if ignored := [name for name, holds in honoured.items() if not holds]:
        raise Unsupported(f"the engine does not honour {', '.join(ignored)}: what it samples is not what it is told")
    return Check(found, sum(len(each.token_ids) for each in sampled), tuple(honoured), _served(rt, sampled))


def _prompts(rt: Runtime) -> list[list[int]]:
    """Four prompts of tokens from the whole vocabulary."""
    size = rt.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    return cast("list[list[int]]", torch.randint(0, int(size), (4, 6), generator=generator, device="cpu").tolist())


def _is_refused(rt: Runtime, prompt: Sequence[int], **sampling: Any) -> bool:
    try:
        rt.generate([prompt], max_tokens=1, **sampling)
    except (Unsupported, ValueError):  # the second is what `EngineBase` raises
        return True
    return False


def _sample(
    rt: Runtime, prompt: Sequence[int], past_the_end: dict[str, Any]
) -> tuple[dict[str, bool], dict[str, tuple[Completion, Completion]]]:
    """Options by name, true where they were honoured, and for filters that leave the best tokens: drawn and greedy."""

    def sampled(**sampling: Any) -> Completion:
        return rt.generate([prompt], **({"max_tokens": _TOKENS} | past_the_end | sampling))[0]

    def stops() -> bool:
        """No token but the last is the stop token, whichever tokens come by a batch's rounding."""
        # up to where the stop token comes first: a tiny model repeats itself
        stop = ids[min(2, len(ids) - 1)]
        given = {"temperature": 0.0, "stop_token_ids": [stop]}
        if past_the_end and not _is_refused(rt, prompt, **past_the_end, **given):
            found = sampled(**given).token_ids
            return stop not in found[:-1] and (stop in found[-1:] or len(found) == _TOKENS)
        # the model's own end may come before then
        return stop not in sampled(**dict.fromkeys(past_the_end, False), **given).token_ids[:-1]

    greedy = sampled(temperature=0.0)
    ids = greedy.token_ids
    # what else is in a server's batch changes the last bits of logits, and seldom a draw; as many on each rank
    seeded = [sampled(temperature=1.0, seed=11).token_ids for _ in range(_DRAWS)]
    honoured = {
        "max_tokens": len(ids) == _TOKENS or (greedy.finish_reason == "stop" and not past_the_end),
        "seed": len(set(seeded)) < _DRAWS,
        "stop_token_ids": stops(),
        "n": len(rt.generate([prompt], n=3, max_tokens=1)) == 3,
    }
    # each filter at a setting that leaves one token: the result must be the greedy one
    filters: dict[str, dict[str, Any]] = {"top_k": {"top_k": 1}, "top_p": {"top_p": 1e-6}, "min_p": {"min_p": 1.0}}
    filtered = {"temperature": (sampled(temperature=0.0), greedy)}
    for name, given in filters.items():
        # vLLM's are refused where it returns log-probabilities from before they act
        if not _is_refused(rt, prompt, **given):
            filtered[name] = (sampled(**given, seed=1), greedy)
    return honoured, filtered


def _are_best(rt: Runtime, drawn: Completion, greedy: Completion, *, noise: float) -> bool:
    """Tell whether tokens are the greedy ones, up to the first that is as likely as the greedy one.

    Logits in bf16 have equals among 150,000 tokens, of which a filter that leaves the best may draw any. To the trainer
    they differ by its rounding and the engine's, which adds up over layers: `noise` is the mean of it. Every rank of a
    sharded trainer makes two passes, whatever it has drawn.
    """
    pairs = zip(drawn.token_ids, greedy.token_ids, strict=False)  # one may end where the engine lets none go on
    at = next((number for number, (token, best) in enumerate(pairs) if token != best), 0)
    prompt = (*greedy.prompt_token_ids, *greedy.token_ids[:at])
    cost, least = (
        logprob_difference(  # of a completion that claims to be certain: -log p
            rt.model,
            [replace(greedy, prompt_token_ids=prompt, token_ids=(token,), logprobs=(0.0,))],
            temperature=1.0,
            device=rt.device,
        )
        for token in (drawn.token_ids[at], greedy.token_ids[at])
    )
    assert cost is not None and least is not None, "one token each"
    # rounding of the coarsest dtype that one of the two computes in
    dtypes = {parameter.dtype for parameter in rt.model.parameters()} | {torch.float32}
    if rt.device.type == "cuda":  # where vLLM computes in it whatever the trainer does
        dtypes.add(torch.bfloat16)
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return abs(cost - least) <= max(1e-3, 16 * rounding, 8 * noise)


def _served(rt: Runtime, sampled: Sequence[Completion]) -> int:
    """Tensors of the trained adapter; the engine has loaded all of them under its name."""
    adapter = rt.transport.source.adapter()
    if adapter is None:
        return 0
    unserved = [completion for completion in sampled if completion.adapter is None]
    if unserved:
        raise Unsupported("the engine sampled without the adapter that is trained")
    return sum(1 for _ in adapter.named_tensors())
