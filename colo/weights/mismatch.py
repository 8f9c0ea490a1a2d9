"""The gap between the engine's log-probabilities and the trainer's, on the same weights and the same tokens.

Two implementations of one model never agree to the last bit; a gap that grows tells of a numerical setting, or of
weights, that differ. Where they are no numbers at all, the tensor to blame is looked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from operator import not_
from statistics import fmean
from typing import Any

import torch
from torch import nn

from colo import unsloth
from colo.engine import Completion
from colo.memory.storage import is_dtensor, local_shard
from colo.weights.routing import is_routed, replaying
from colo.weights.sources.base import WeightSource

MAX_TOKENS = 64  # tokens of a completion that are compared; bounds the logits


_CHUNK_ELEMENTS = 1 << 24  # elements that are looked at in one go for values that are no numbers

PASS_TOKENS = 4096
"""The most tokens of one pass over several completions: a small model's pass waits for its host, not for the GPU."""


@torch.no_grad()
def logprob_difference(
    model: nn.Module,
    completions: Sequence[Completion],
    *,
    temperature: float,
    device: torch.device,
    together: bool = False,
    replay: bool = True,
) -> float | None:
    """Mean |log p(engine) - log p(trainer)| over the first tokens of `completions`; `None` without any.

    They were sampled from `softmax(logits / temperature)`, unfiltered. The model runs in evaluation mode meanwhile:
    once for each or, `together`, for those in a row that are equally long. With `replay` a mixture takes the experts
    that the engine took, where it has told them.
    """
    if not replay:
        completions = [dataclasses.replace(c, routed_experts=None) for c in completions]
    differences = _of_all(model, completions, temperature, device, together=together)
    return float(differences.mean()) if len(differences) else None


@torch.no_grad()
def differences_by_age(
    model: nn.Module, completions: Sequence[Completion], *, version: int, temperature: float, device: torch.device
) -> dict[int, float]:
    """The same of tokens by their age in versions, for those sampled from weights before `version`."""
    differences = _of_all(model, completions, temperature, device, together=True).tolist()
    ages = [version - sampled for c in completions for sampled in c.token_versions[:MAX_TOKENS]]
    found: dict[int, list[float]] = {}
    for age, difference in zip(ages, differences, strict=True):
        found.setdefault(age, []).append(difference)
    return {age: fmean(found[age]) for age in sorted(found) if age}


def _of_all(
    model: nn.Module, completions: Sequence[Completion], temperature: float, device: torch.device, *, together: bool
) -> torch.Tensor:
    """|log p(engine) - log p(trainer)| of the first tokens of all completions, in one dimension."""
    with evaluating(model):  # dropout would make the trainer differ from itself
        passes = _passes(completions, PASS_TOKENS if together else 0)
        found = [_differences(model, same, temperature, device).abs() for same in passes]
        return torch.cat(found or [torch.zeros(0, device=device)])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, for logits; every module is left in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with unsloth.returning_logits():
            yield
    finally:
        for module, training in modes:
            # by attribute, since `train()` would switch the children too
            module.training = training


def _passes(completions: Sequence[Completion], most_tokens: int) -> list[list[_Compared]]:
    """Group what is compared: equal lengths, and at most `most_tokens` tokens or one sequence a group."""
    passes: list[list[_Compared]] = []
    for completion in completions:
        num_tokens = min(len(completion.token_ids), len(completion.logprobs), MAX_TOKENS)
        if not num_tokens:
            continue
        ids = [*completion.prompt_token_ids, *completion.token_ids[:num_tokens]]
        routed = None if completion.routed_experts is None else completion.routed_experts[: len(ids)]
        compared = dataclasses.replace(completion, token_ids=completion.token_ids[:num_tokens], routed_experts=routed)
        new = _Compared(ids, completion.logprobs[:num_tokens], compared)
        last = passes[-1] if passes else []
        fits = (len(last) + 1) * len(new.token_ids) <= most_tokens
        if fits and last and last[0].lengths == new.lengths:
            last.append(new)
        else:
            passes.append([new])
    return passes


@dataclass(frozen=True, slots=True)
class _Compared:
    """The part of a completion that is compared."""

    token_ids: list[int]  # the prompt's, then the first of what was sampled
    logprobs: tuple[float, ...]  # the engine's log-probabilities of the sampled tokens
    completion: Completion  # as if no more had been sampled

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of tokens, and number of sampled ones among them."""
        return len(self.token_ids), len(self.logprobs)


def _differences(model: Any, same: Sequence[_Compared], temperature: float, device: torch.device) -> torch.Tensor:
    """log p(trainer) - log p(engine) of every token of equally long sequences, in one dimension."""
    num_tokens = len(same[0].logprobs)
    ids = torch.tensor([one.token_ids for one in same], device=device)  # (sequences, tokens)
    # Hooks of the root module are the user's, and this pass is not; FSDP2 gathers weights in a hook of its own.
    # `{type: parameter}` asks one parameter of each type
    run = model if any(map(is_dtensor, {type(p): p for p in model.parameters()}.values())) else model.forward
    # logits at a position are of the next token: one more at the front is needed, and the last are of none
    given = [one.completion for one in same]
    with replaying(model, given):
        logits = run(input_ids=ids, logits_to_keep=num_tokens + 1, use_cache=False).logits[:, -num_tokens - 1 : -1]
    tokens = ids[:, -num_tokens:, None]
    logprobs: torch.Tensor = (logits.float() / temperature).log_softmax(-1).gather(-1, tokens)[:, :, 0]
    engine = torch.tensor([one.logprobs for one in same], dtype=torch.float32, device=device)
    return (logprobs - engine).flatten()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The gap of one comparison."""

    mean: float  # mean |log p(engine) - log p(trainer)| of a token
    temperature: float  # the temperature at which the tokens were sampled
    own_routing: float | None = None
    """The same where the trainer's routers choose, of a mixture whose engine has told its experts."""


class MismatchCheck:
    """Compares a rollout's first completions with what the trainer computes of the same tokens, on the same weights."""

    def __init__(self, *, num_sequences: int, max_mismatch: float | None) -> None:
        """See `RuntimeConfig.mismatch_sequences` and `max_mismatch`."""
        self._num_sequences = num_sequences
        self._max_mismatch = max_mismatch
        self._noted: tuple[float, Sequence[Completion]] | None = None
        self._continued: Sequence[Completion] = ()  # of several versions each

    @property
    def has_noted(self) -> bool:
        """True if there is something to compare."""
        return self._noted is not None and bool(self._noted[1] or self._continued)

    def note(self, temperature: float, completions: Sequence[Completion]) -> None:
        """Keep the first of `completions`, which were sampled from `softmax(logits / temperature)`."""
        newest = max((c.weights_version for c in completions), default=0)
        # of several versions, or of an earlier one, having waited for the rest of their group
        older = [len(c.spans) > 1 or c.weights_version != newest for c in completions]
        self._noted = (temperature, list(compress(completions, map(not_, older)))[: self._num_sequences])
        self._continued = list(compress(completions, older))[: self._num_sequences]

    def measure_by_age(
        self, source: WeightSource, model: nn.Module, *, version: int, device: torch.device
    ) -> dict[int, float]:
        """The gap for tokens of earlier weights in completions that were continued, by age in versions.

        Nothing is measured of a sharded model. Ordering: before `measure`.
        """
        continued, self._continued = self._continued, ()
        if self._noted is None or not continued or not source.ranks.is_alone:
            return {}
        return differences_by_age(model, continued, version=version, temperature=self._noted[0], device=device)

    def measure(self, source: WeightSource, model: nn.Module, *, version: int, device: torch.device) -> Mismatch | None:
        """The difference for completions of this `version`, which are then forgotten; `None` without any.

        Ranks of a sharded model compute each pass together, one for each completion, as many as the rank with the
        fewest has.
        """
        temperature, completions = self._noted or (1.0, ())
        self._noted = None
        comparable = [c for c in completions if c.weights_version == version and c.token_ids]
        # a pass of a sharded model is a collective: every rank makes as many
        count = source.ranks.min(len(comparable), "comparing log-probabilities")
        if not count:
            return None
        difference = logprob_difference(
            model, comparable[:count], temperature=temperature, device=device, together=source.ranks.is_alone
        )
        # FSDP2 leaves weights whole after a forward pass that no backward one follows
        source.reshard()
        if difference is None:
            return None
        own_routing = None
        if is_routed(comparable[:count]) and source.ranks.is_alone:
            own_routing = logprob_difference(
                model, comparable[:count], temperature=temperature, device=device, together=True, replay=False
            )
        return Mismatch(difference, temperature, own_routing)

    def why_too_large(self, mismatch: Mismatch) -> str | None:
        """The reason not to train on this engine's samples, and the remedy; `None` if the gap is allowed."""
        most = self._max_mismatch
        difference, temperature = mismatch.mean, mismatch.temperature
        if most is None or difference * min(1.0, temperature) <= most:  # which divides logits, and so differences
            return None
        return (
            f"log-probabilities of the engine differ from the trainer's by {difference:.3g} on average at temperature "
            f"{temperature:g}, and max_mismatch allows {most:g}: the engine samples from another model. Compare "
            "dtypes, quantization, rope settings and chat templates of the two, or raise RuntimeConfig.max_mismatch"
        )


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The first tensor, or this rank's part of it, with NaN or infinite values and how many; `None` without any."""
    for name, tensor in tensors:
        values = local_shard(tensor.detach())
        if not values.is_floating_point() or not values.numel():
            continue
        chunks = values.reshape(-1).split(_CHUNK_ELEMENTS)
        count = sum(int((~chunk.float().isfinite()).sum()) for chunk in chunks)
        if count:
            return f"{name} {tuple(tensor.shape)} has {count} values that are NaN or infinite"
    return None


def not_numbers(culprit: str | None) -> str:
    """The message for log-probabilities that are not numbers, with what `first_not_finite` has found."""
    return "the log-probabilities of what was sampled are not numbers: " + (
        f"{culprit}. Load weights that are finite, and look for the step that made them so (a norm of the gradients "
        "that is not finite, a learning rate too high)"
        if culprit
        else "every weight is finite, so that an activation has overflowed (use another dtype, bfloat16 or float32), "
        "or vLLM's KV cache still holds what earlier weights, not finite, have left in it (start vLLM anew)"
    )
