"""The reference loop: GRPO through a runtime, short enough to read in one sitting.

    for problems in batches:
        rollout:  sample a group of completions for each problem
        reward:   score each completion; advantages are relative to its group
        train:    one optimizer step on the policy-gradient loss

It shows how the pieces go together; a trainer of your own, or TRL's, takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colo.engine import Completion, SamplingParams
from colo.rl.logprob import model_logprobs
from colo.rl.loss import Aggregation, GRPOLossConfig, group_advantages, grpo_loss

if TYPE_CHECKING:
    from colo.runtime import Runtime

Reward = Callable[[Completion, Any], float]
"""Scores a completion against the answer of its problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A prompt, and the answer that the reward compares with."""

    prompt: str | tuple[int, ...]
    answer: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """Settings of the loop."""

    group_size: int = 8
    """Completions for each problem."""

    max_tokens: int = 64
    temperature: float = 1.0
    micro_batch_size: int = 64
    """Completions for each forward and backward pass."""

    loss: GRPOLossConfig = field(default_factory=GRPOLossConfig)
    seed: int | None = None
    """Makes the rollouts repeatable."""

    def __post_init__(self) -> None:
        for name, least in (("group_size", 2), ("max_tokens", 1), ("micro_batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, but is {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Completions as tensors, padded on the right. B completions, T tokens of prompt and completion together."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    completion_mask_BT: Tensor
    """1 at generated tokens."""

    engine_logprobs_BT: Tensor
    """float32 (B, T - 1): what the engine says about the tokens from the second on; 0 where nothing was generated."""

    @classmethod
    def of(cls, completions: Sequence[Completion], device: torch.device) -> Batch:
        """Collate completions."""
        length = max(len(c.prompt_token_ids) + len(c.token_ids) for c in completions)
        ids = torch.zeros(len(completions), length, dtype=torch.long)
        attention, generated = torch.zeros_like(ids), torch.zeros_like(ids)
        logprobs = torch.zeros(len(completions), length - 1, dtype=torch.float32)
        for row, completion in enumerate(completions):
            start = len(completion.prompt_token_ids)
            end = start + len(completion.token_ids)
            ids[row, :end] = torch.tensor(completion.prompt_token_ids + completion.token_ids)
            attention[row, :end] = 1
            generated[row, start:end] = 1
            logprobs[row, start - 1 : end - 1] = torch.tensor(completion.logprobs, dtype=torch.float32)
        return cls(
            input_ids_BT=ids.to(device),
            attention_mask_BT=attention.to(device),
            completion_mask_BT=generated.to(device),
            engine_logprobs_BT=logprobs.to(device),
        )


def grpo(
    rt: Runtime, batches: Iterable[Sequence[Problem]], reward: Reward, config: GRPOConfig
) -> Iterator[dict[str, float]]:
    """Train on `batches`, one optimizer step each, and yield the metrics of every step as it ends.

    The metrics also go to `rt.log`: `reward` (mean), `loss`, `mismatch` (mean absolute difference between the engine's
    and the trainer's log-probabilities of the same tokens) and `completion_tokens` (mean).
    """
    for step, problems in enumerate(batches):
        with rt.rollout():
            completions = rt.generate([p.prompt for p in problems], _sampling(config, step))
        rewards = [reward(c, problems[c.prompt_index].answer) for c in completions]
        with rt.train():
            metrics = train_step(rt, completions, rewards, config)
        metrics["reward"] = sum(rewards) / len(rewards)
        metrics["completion_tokens"] = sum(len(c.token_ids) for c in completions) / len(completions)
        rt.log(**metrics)
        yield metrics


def train_step(
    rt: Runtime, completions: Sequence[Completion], rewards: Sequence[float], config: GRPOConfig
) -> dict[str, float]:
    """One optimizer step on `completions`, which come in groups of `config.group_size`, and on nothing else.

    Gradients that are there already, of a step that failed for one, are zeroed.
    """
    advantages_B = group_advantages(torch.tensor(rewards, dtype=torch.float32, device=rt.device), config.group_size)
    rt.optimizer.zero_grad()
    num_tokens, weight = _num_tokens(completions), _weight(completions, config.loss.aggregation)
    loss = mismatch = 0.0
    for start in range(0, len(completions), config.micro_batch_size):
        part = completions[start : start + config.micro_batch_size]
        share = _weight(part, config.loss.aggregation) / max(1, weight)
        output = _loss(rt, Batch.of(part, rt.device), advantages_B[start : start + len(part)], config)
        (output.loss * share).backward()
        loss += float(output.loss.detach()) * share
        mismatch += float(output.metrics["mismatch_mean"]) * _num_tokens(part) / max(1, num_tokens)
    rt.optimizer.step()
    rt.optimizer.zero_grad()  # no rollout has to keep what is dropped
    return {"loss": loss, "mismatch": mismatch}


def _num_tokens(completions: Sequence[Completion]) -> int:
    return sum(len(c.token_ids) for c in completions)


def _weight(completions: Sequence[Completion], aggregation: Aggregation) -> int:
    """Divisor of the loss of these completions, for adding it to that of other micro-batches."""
    if aggregation is Aggregation.TOKEN:
        return _num_tokens(completions)
    return sum(1 for c in completions if c.token_ids or aggregation is Aggregation.CONSTANT)


def _loss(rt: Runtime, batch: Batch, advantages_B: Tensor, config: GRPOConfig) -> Any:
    logprobs_BT = model_logprobs(
        rt.model,
        batch.input_ids_BT,
        batch.attention_mask_BT,
        completion_mask_BT=batch.completion_mask_BT,
        temperature=config.temperature,
    )
    return grpo_loss(
        logprobs_BT,
        None,
        advantages_B,
        batch.completion_mask_BT[:, 1:],
        config=config.loss,
        engine_logprobs_BT=batch.engine_logprobs_BT,
    )


def _sampling(config: GRPOConfig, step: int) -> SamplingParams:
    seed = None if config.seed is None else config.seed * 1_000_003 + step
    return SamplingParams(n=config.group_size, max_tokens=config.max_tokens, temperature=config.temperature, seed=seed)
