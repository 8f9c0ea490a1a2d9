"""GRPO and its common variants: group-relative advantages, and a clipped policy loss over log-probabilities.

Shape suffixes: B batch (completions, those of one prompt next to each other), T time (positions of a completion).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real

import torch
from torch import Tensor

from colo.engine import check_number
from colo.rl.logprob import check_tensors
from colo.rl.rewards import check_rewards


class AdvantageScale(StrEnum):
    """Divisor of the centred rewards of a group."""

    GROUP = "group"
    """The standard deviation of the group's rewards (GRPO, arXiv:2402.03300)."""

    NONE = "none"
    """No division: questions with nearly equal rewards weigh no more than others (Dr. GRPO, arXiv:2503.20783)."""


class Aggregation(StrEnum):
    """Reduction of the losses of all tokens to one number. l is the loss of a token, B the number of completions."""

    TOKEN = "token"
    """Sum of l over all tokens / number of tokens: every token weighs the same (DAPO, arXiv:2503.14476)."""

    SEQUENCE = "sequence"
    """Mean of l within each completion, then over completions that have a token (GRPO, arXiv:2402.03300)."""

    CONSTANT = "constant"
    """Sum of l over all tokens / (B * max_length): no dependence on lengths (Dr. GRPO, arXiv:2503.20783)."""


class ImportanceLevel(StrEnum):
    """Level of the weight that corrects for the engine's own probabilities."""

    NONE = "none"
    """No correction; the mismatch is still measured where the engine's log-probabilities are given."""

    TOKEN = "token"
    """Each token is weighed by its own ratio."""

    SEQUENCE = "sequence"
    """Every token of a completion is weighed by the product of its ratios."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOLossConfig:
    """Settings of `grpo_loss`. The defaults are GRPO with DAPO's aggregation and without a KL term."""

    epsilon_low: float = 0.2
    """The ratio is clipped from below at `1 - epsilon_low`; in [0, 1)."""

    epsilon_high: float = 0.2
    """The ratio is clipped from above at `1 + epsilon_high`; DAPO's clip-higher takes 0.28."""

    kl_coefficient: float = 0.0
    """Weight of the KL divergence from the reference, added to the loss of every token; beta in arXiv:2402.03300."""

    importance_level: ImportanceLevel = ImportanceLevel.TOKEN
    """Correction for the difference between the engine's probabilities and the trainer's."""

    importance_clip_max: float = 2.0
    """Importance weights are truncated here; C in truncated importance sampling."""

    aggregation: Aggregation = Aggregation.TOKEN
    """Reduction of token losses to one number."""

    max_length: int | None = None
    """The constant of `Aggregation.CONSTANT`: the most tokens that a completion may have."""

    def __post_init__(self) -> None:
        for name in ("epsilon_low", "epsilon_high", "kl_coefficient", "importance_clip_max"):
            check_number(name, getattr(self, name), Real, "a number")
        if self.max_length is not None:
            check_number("max_length", self.max_length, Integral, "a whole number")
        object.__setattr__(self, "importance_level", ImportanceLevel(self.importance_level))
        object.__setattr__(self, "aggregation", Aggregation(self.aggregation))
        checks = {
            "epsilon_low must be in [0, 1)": 0 <= self.epsilon_low < 1,
            "epsilon_high must be at least 0 and finite": 0 <= self.epsilon_high < math.inf,
            "kl_coefficient must be at least 0 and finite": 0 <= self.kl_coefficient < math.inf,
            "importance_clip_max must be positive and finite": 0 < self.importance_clip_max < math.inf,
            "max_length must be at least 1": self.max_length is None or self.max_length >= 1,
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"{message}, but is {getattr(self, message.split()[0])}")
        if (self.max_length is None) == (self.aggregation is Aggregation.CONSTANT):
            raise ValueError(
                f"max_length goes with aggregation 'constant' and with no other, but is {self.max_length} with "
                f"'{self.aggregation}'"
            )


@dataclass(frozen=True, slots=True)
class GRPOLossOutput:
    """A loss to call `backward()` on, and metrics of its computation."""

    loss: Tensor
    """0-dimensional, differentiable in `logprobs_BT`."""

    metrics: Mapping[str, Tensor]
    """Detached 0-dimensional tensors on the loss's device, so that reading them is the caller's choice of moment."""


def group_advantages(
    rewards_B: Tensor | Iterable[float],
    group_size: int,
    *,
    scale: AdvantageScale | str = AdvantageScale.GROUP,
    epsilon: float = 1e-4,
) -> Tensor:
    """Advantage of each completion over the others of its group.

    `A_i = (r_i - mean(r)) / (std(r) + epsilon)` over the group (arXiv:2402.03300, section 4.1.2), std with Bessel's
    correction; `scale="none"` leaves out the division (arXiv:2503.20783). `rewards_B` (B,), a tensor, an array or a
    list, holds `group_size` consecutive completions of each prompt. Returns (B,) on a tensor's device and in its dtype,
    otherwise on the CPU; float32 for integers, arrays and lists. A group of equal rewards gets zeros. Not
    differentiable.

    Raises: `ValueError` for a group of fewer than 2, which has nothing to compare, a batch of incomplete groups or of
    none, a reward that is no finite number, or one whose advantage is none in that dtype.
    """
    scale = AdvantageScale(scale)
    check_number("group_size", group_size, Integral, "a whole number")
    check_number("epsilon", epsilon, Real, "a number")
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, since advantages compare within a group, but is {group_size}")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, for groups of equal rewards, but is {epsilon}")
    shape = tuple(getattr(rewards_B, "shape", ()))
    values = [] if len(shape) > 1 else check_rewards(None, rewards_B, None)
    if not values or len(values) % group_size:
        shape = shape or (len(values),)
        raise ValueError(f"rewards {shape} must be one row of whole groups of {group_size}, and of one at least")
    # in float64, and from the first of each group: equal rewards are then exactly as far from their mean, 0
    rewards_GS = torch.tensor(values, dtype=torch.float64, device="cpu").view(-1, int(group_size))
    # squares of the largest numbers overflow: groups of those are measured in units of 2**600
    is_large_G1 = rewards_GS.abs().amax(1, keepdim=True) > 2.0**500
    unit_G1 = torch.ones_like(rewards_GS[:, :1]).masked_fill(is_large_G1, 2.0**600)
    rewards_GS = rewards_GS / unit_G1 - rewards_GS[:, :1] / unit_G1
    centred_GS = rewards_GS - rewards_GS.mean(1, keepdim=True)
    if scale is AdvantageScale.GROUP:
        centred_GS = centred_GS / (rewards_GS.std(1, keepdim=True) + epsilon / unit_G1)
    else:
        centred_GS = centred_GS * unit_G1
    like = rewards_B if isinstance(rewards_B, Tensor) else centred_GS.float()
    dtype = like.dtype if like.is_floating_point() else torch.float32
    advantages_B = centred_GS.flatten().to(dtype)
    for index in (~advantages_B.isfinite()).nonzero().flatten().tolist():
        raise ValueError(
            f"rewards hold {values[index]:g} for completion {index} of {len(values)}, whose advantage is beyond "
            f"{dtype}: give smaller numbers, or scale='group'"
        )
    return advantages_B.to(like.device)


def grpo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor | None,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    config: GRPOLossConfig | None = None,
    engine_logprobs_BT: Tensor | None = None,
    reference_logprobs_BT: Tensor | None = None,
) -> GRPOLossOutput:
    """The clipped policy loss of GRPO, with the truncated correction for the engine's own probabilities.

    For each token that `mask_BT` selects, with p the policy of `logprobs_BT`, p_old the trainer's policy that the
    completion was sampled with, p_engine the same as the engine computed it, and p_ref a reference:

        r = p / p_old
        w = min(p_old / p_engine, importance_clip_max), detached; 1 without `engine_logprobs_BT`
        k = p_ref / p - log(p_ref / p) - 1; without `reference_logprobs_BT` left out
        l = -w * min(r * A, clip(r, 1 - epsilon_low, 1 + epsilon_high) * A) + kl_coefficient * k

    The clipped term and the unbiased KL estimate k are those of GRPO (arXiv:2402.03300, equations 3 and 4), separate
    epsilons those of DAPO (arXiv:2503.14476). The weight w is truncated importance sampling (Ionides 2008, Journal of
    Computational and Graphical Statistics 17(2)) as Yao et al. 2025 apply it between engine and trainer
    (https://fengyao.notion.site/off-policy-rl); at sequence level p_old / p_engine is the product over the completion.
    `Aggregation` says how all l become one number.

    `logprobs_BT`, `old_logprobs_BT`, `engine_logprobs_BT` and `reference_logprobs_BT` are (B, T) floating point, in
    nats, at the same temperature; only the first is differentiated. `old_logprobs_BT` may be `None` when nothing was
    updated since sampling: p_old is then p, detached. `advantages_B` is (B,), on any device, `mask_BT` (B, T), nonzero
    at the tokens of completions; what else the other tensors hold there, NaN included, has no effect. An empty mask
    gives 0.

    Metrics, means over tokens: `num_tokens`, `ratio_mean` (r) and `clip_fraction` (tokens whose gradient was clipped);
    with a reference `kl` (k); with the engine's log-probabilities `mismatch_mean` and `mismatch_max` (of the absolute
    difference between log p_old and log p_engine) and `importance_weight_mean` (w). To weigh micro-batches as one batch
    under `Aggregation.TOKEN`, multiply each loss by its `num_tokens` and divide by their sum.

    Raises: `TypeError` for what is no tensor; `ValueError` for shapes or devices that do not fit, or a KL coefficient
    without a reference.
    """
    config = GRPOLossConfig() if config is None else config
    if config.kl_coefficient and reference_logprobs_BT is None:
        raise ValueError(
            f"kl_coefficient {config.kl_coefficient} needs reference_logprobs_BT: give them, or set it to 0"
        )
    others = {"old": old_logprobs_BT, "engine": engine_logprobs_BT, "reference": reference_logprobs_BT}
    _check_inputs(logprobs_BT, advantages_B, mask_BT, others)
    advantages_B = advantages_B.to(logprobs_BT.device)  # those of a list of rewards are on the CPU
    mask_BT = mask_BT.bool()
    # nothing was updated since sampling: p_old is p, and the ratio is 1 with a gradient
    old_BT = (logprobs_BT if old_logprobs_BT is None else old_logprobs_BT).detach()
    loss_BT, metrics = _policy_loss(_masked_difference(logprobs_BT, old_BT, mask_BT), advantages_B, mask_BT, config)
    if engine_logprobs_BT is not None:
        difference_BT = _masked_difference(old_BT, engine_logprobs_BT.detach(), mask_BT)
        weight_BT = _importance_weight(difference_BT, config)
        # the weight is a factor of the policy term alone, not of the KL term
        loss_BT = loss_BT * weight_BT
        metrics |= _mismatch_metrics(difference_BT, weight_BT, mask_BT)
    if reference_logprobs_BT is not None:
        log_ratio_BT = _masked_difference(reference_logprobs_BT.detach(), logprobs_BT, mask_BT)
        kl_BT = log_ratio_BT.exp() - log_ratio_BT - 1
        metrics["kl"] = _masked_mean(kl_BT.detach(), mask_BT)
        if config.kl_coefficient:
            loss_BT = loss_BT + config.kl_coefficient * kl_BT
    return GRPOLossOutput(_aggregate(loss_BT, mask_BT, config), metrics)


def _check_inputs(
    logprobs_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, others: Mapping[str, Tensor | None]
) -> None:
    matrices = {f"{name} log-probabilities": t for name, t in others.items() if t is not None} | {"mask": mask_BT}
    check_tensors({"log-probabilities": logprobs_BT, **matrices})
    check_tensors({"advantages": advantages_B})
    if not logprobs_BT.is_floating_point():
        raise TypeError(f"log-probabilities must be floating point, but are {logprobs_BT.dtype}")
    if logprobs_BT.dim() != 2:
        raise ValueError(f"log-probabilities must be (batch, time), but are {tuple(logprobs_BT.shape)}")
    if advantages_B.shape != logprobs_BT.shape[:1]:
        raise ValueError(f"advantages must be ({len(logprobs_BT)},), but are {tuple(advantages_B.shape)}")
    for name, tensor in matrices.items():
        if tensor.shape != logprobs_BT.shape:
            raise ValueError(f"{name} must be {tuple(logprobs_BT.shape)}, but is {tuple(tensor.shape)}")


def _masked_difference(left_BT: Tensor, right_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`left - right` where the mask is set, else 0, also for NaN and infinity."""
    return (left_BT - right_BT).masked_fill(~mask_BT, 0.0)


def _masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (values_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1)


def _policy_loss(
    log_ratio_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, config: GRPOLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    ratio_BT, advantages_B1 = log_ratio_BT.exp(), advantages_B.detach()[:, None]
    low, high = 1 - config.epsilon_low, 1 + config.epsilon_high
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(low, high) * advantages_B1)
    # where clipping wins: only there is the gradient zero
    clipped_BT = ((ratio_BT < low) & (advantages_B1 < 0)) | ((ratio_BT > high) & (advantages_B1 > 0))
    metrics = {
        "num_tokens": mask_BT.sum(),
        "ratio_mean": _masked_mean(ratio_BT.detach(), mask_BT),
        "clip_fraction": _masked_mean(clipped_BT.to(ratio_BT.dtype), mask_BT),
    }
    return loss_BT, metrics


def _importance_weight(difference_BT: Tensor, config: GRPOLossConfig) -> Tensor:
    """Weight of each token (B, T), or of each completion (B, 1)."""
    if config.importance_level is ImportanceLevel.NONE:
        return torch.ones_like(difference_BT)
    if config.importance_level is ImportanceLevel.SEQUENCE:
        difference_BT = difference_BT.sum(1, keepdim=True)
    # cut from above only: small ratios are not biased upwards
    return difference_BT.exp().clamp(max=config.importance_clip_max)


def _mismatch_metrics(difference_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    absolute_BT = difference_BT.abs()
    largest = absolute_BT.max() if absolute_BT.numel() else absolute_BT.sum()
    return {
        "mismatch_mean": _masked_mean(absolute_BT, mask_BT),
        "mismatch_max": largest,
        "importance_weight_mean": _masked_mean(weight_BT, mask_BT),
    }


def _aggregate(loss_BT: Tensor, mask_BT: Tensor, config: GRPOLossConfig) -> Tensor:
    # filled, since a completion that the mask drops may have an advantage of NaN, which times 0 is NaN
    loss_B, num_tokens_B = loss_BT.masked_fill(~mask_BT, 0.0).sum(1), mask_BT.sum(1)
    if config.aggregation is Aggregation.TOKEN:
        return loss_B.sum() / num_tokens_B.sum().clamp(min=1)
    if config.aggregation is Aggregation.SEQUENCE:
        return (loss_B / num_tokens_B.clamp(min=1)).sum() / (num_tokens_B > 0).sum().clamp(min=1)
    assert config.max_length is not None
    return loss_B.sum() / max(1, len(loss_B) * config.max_length)
