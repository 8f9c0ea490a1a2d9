"""The reference loop: GRPO through a runtime, short enough to read in one sitting.

    for problems in batches:
        rollout:  sample a group of completions for each problem
        reward:   score each completion; advantages are relative to its group
        train:    one optimizer step on the policy-gradient loss, held back by a KL term if wanted

It shows how the pieces go together; a trainer of your own, or TRL's, takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from statistics import fmean, mean
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from colo.engine import Completion, SamplingParams, check_number
from colo.engines.text import Message, check_prompts, encode_prompts, positions_of
from colo.errors import BudgetError, Unsupported
from colo.memory.probe import available_host_bytes, free_device_bytes
from colo.memory.storage import is_dtensor
from colo.memory.uninterrupted import uninterrupted
from colo.rl.logprob import model_logprobs
from colo.rl.loss import Aggregation, GRPOLossConfig, group_advantages, grpo_loss
from colo.rl.rewards import (
    GIVEN,
    RewardFunction,
    bound,
    call_reward,
    check_columns,
    check_rewards,
    check_weights,
    named_rewards,
)
from colo.units import format_bytes
from colo.weights.mismatch import evaluating
from colo.weights.routing import replaying
from colo.weights.sources.folded import changes_nothing
from colo.weights.sources.heads import is_peft_model

if TYPE_CHECKING:
    from colo.runtime import Runtime

T = TypeVar("T")

Log: TypeAlias = Callable[[dict[str, float]], None]
"""Takes the metrics of a step."""


Reward: TypeAlias = Callable[[Completion, Any], float]
"""Scores one completion against the answer of its problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A prompt, and what rewards compare its completions with."""

    prompt: str | tuple[int, ...] | Sequence[Message]
    """A text, token ids, or a conversation."""

    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of reward functions beside `answer`, by the names of their parameters."""

    def __post_init__(self) -> None:
        taken = [*GIVEN, *(["answer"] if self.answer is not None else [])]
        if twice := [name for name in taken if name in self.columns]:
            raise ValueError(
                f"columns hold {', '.join(twice)}, which rewards are called with already: give the column another name"
            )


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
            check_number(name, getattr(self, name), Integral, "a whole number")
            if getattr(self, name) < least:
                why = ": advantages compare the completions of one problem" if name == "group_size" else ""
                raise ValueError(f"{name} must be at least {least}, but is {getattr(self, name)}{why}")
        check_number("temperature", self.temperature, Real, "a number")
        if not 1e-30 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be positive and finite, for completions that differ, but is {self.temperature}: "
                "logits are divided by it in fp32, which takes 1e-30 and more"
            )
        if self.seed is not None:
            check_number("seed", self.seed, Integral, "a whole number")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Completions as tensors, padded on the right. B completions, T tokens of prompt and completion together."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    completion_mask_BT: Tensor  # 1 at generated tokens
    engine_logprobs_BT: Tensor  # float32 (B, T - 1): of the tokens from the second on; 0 where nothing was generated

    @classmethod
    def of(cls, completions: Iterable[Completion], device: torch.device) -> Batch:
        """Collate completions.

        Raises: `ValueError` without any, such as where a filter has left none, and for one whose log-probabilities are
        not as many as its tokens.
        """
        completions = list(completions)
        if not completions:
            raise ValueError("there are no completions to collate: sample more, or skip the step")

        def padded(rows: Iterable[Sequence[float]], dtype: torch.dtype = torch.long) -> Tensor:
            return pad_sequence([torch.tensor(row, dtype=dtype, device="cpu") for row in rows], batch_first=True).to(
                device
            )

        for index, c in enumerate(completions):
            if len(c.logprobs) != len(c.token_ids):
                raise ValueError(
                    f"completion {index} has {len(c.token_ids)} tokens and {len(c.logprobs)} log-probabilities: have "
                    "its engine return one for each token"
                )
        sizes = [(len(c.prompt_token_ids), len(c.token_ids)) for c in completions]
        logprobs = ([0.0] * (len(c.prompt_token_ids) - 1) + list(c.logprobs) for c in completions)
        return cls(
            input_ids_BT=padded(c.prompt_token_ids + c.token_ids for c in completions),
            attention_mask_BT=padded([1] * (prompt + generated) for prompt, generated in sizes),
            completion_mask_BT=padded([0] * prompt + [1] * generated for prompt, generated in sizes),
            engine_logprobs_BT=padded(logprobs, torch.float32),
        )


def grpo(
    rt: Runtime,
    batches: Iterable[Sequence[Problem]],
    rewards: Reward | Mapping[str, RewardFunction] | Sequence[RewardFunction],
    config: GRPOConfig,
    *,
    reward_weights: Mapping[str, float] | None = None,
    log: Log | None = None,
) -> Iterator[dict[str, float]]:
    """Train on `batches`, one optimizer step each, and yield the metrics of every step as it ends.

    `rewards` is one function of a completion and its problem's answer, or several functions by name, or with names of
    their own, of all prompts and completions at once (`RewardFunction`); their values are added, times
    `reward_weights`, which are 1 otherwise.

    The metrics also go to `rt.log`, and to `log`: `reward` (mean), `rewards/NAME` (mean of each of several), `loss`,
    `mismatch` (mean absolute difference between the engine's and the trainer's log-probabilities of the same tokens),
    `completion_tokens` (mean) and, with a KL term (`config.loss.kl_coefficient`), `kl`. What that compares with is the
    model as it is now; see `Reference` for the memory that takes.

    Raises: at once, and for batches that are not a list when each of them comes, before its rollout: `ValueError` for
    an empty batch or prompt, one longer than the model's context, or a reward that needs a column which there is not.
    Of the returned iterator: `ValueError` for a reward that raises or returns anything but a finite number for each
    completion; nothing is trained on those.
    """
    score = _Scorer(rewards, reward_weights)
    # at once: a batch that cannot be sampled for is told before the first rollout, if the batches are there
    if isinstance(batches, Sequence):
        batches = [_listed(problems) for problems in batches]
        for number, problems in enumerate(batches):
            _check_batch(rt, problems, number, score)
    _check_logprobs(rt)
    reference = Reference(rt.model) if config.loss.kl_coefficient else None
    return _steps(rt, batches, score, config, reference, log)


@torch.no_grad()
def _check_logprobs(rt: Runtime) -> None:
    """Compute two tokens, to warn of logits that cannot be chunked before anything is sampled."""
    ids_BT = torch.zeros(1, 2, dtype=torch.long, device=rt.device)
    with evaluating(rt.model):
        model_logprobs(rt.model, ids_BT, torch.ones_like(ids_BT))


def _steps(
    rt: Runtime,
    batches: Iterable[Sequence[Problem]],
    score: _Scorer,
    config: GRPOConfig,
    reference: Reference | None,
    log: Log | None,
) -> Iterator[dict[str, float]]:
    for step, given in enumerate(batches):
        problems = _listed(given)
        prompts = _check_batch(rt, problems, step, score)
        with rt.rollout():
            completions = rt.generate(prompts, _sampling(config, step))
        rewards, metrics = score(problems, completions, step=step + 1)
        with rt.train():
            metrics |= train_step(rt, completions, rewards, config, reference)
        metrics["completion_tokens"] = fmean(len(c.token_ids) for c in completions)
        rt.log(**metrics)
        if log is not None:
            log(metrics)
        yield metrics


def _listed(problems: Any) -> Any:
    """Problems that can be read once as a list; what is none stays, for the check of its batch."""
    return list(problems) if isinstance(problems, Iterator) else problems


def _check_batch(rt: Runtime, problems: Sequence[Problem], number: int, score: _Scorer) -> list[list[int]]:
    """Token ids of the prompts. Raises: `TypeError`, `ValueError` for what cannot be sampled for or rewarded."""
    config: Any = rt.model.config
    try:
        if isinstance(problems, Problem):
            raise TypeError("it is a problem: give a list of them")
        for problem in problems:
            if not isinstance(problem, Problem):
                raise TypeError(f"it holds a {type(problem).__name__}: give Problem(prompt=..., answer=...)")
        if not problems:
            raise ValueError("it is empty: give each batch a problem at least")
        prompts = encode_prompts([problem.prompt for problem in problems], rt.tokenizer)
        check_prompts(prompts, config.get_text_config().vocab_size, positions_of(config).count)
        score.check(problems)
    except (TypeError, ValueError) as error:
        raise type(error)(f"batch {number}: {error}") from error
    return prompts


def train_step(
    rt: Runtime,
    completions: Sequence[Completion],
    rewards: Sequence[float],
    config: GRPOConfig,
    reference: Reference | None = None,
) -> dict[str, float]:
    """One optimizer step on `completions`, which come in groups of `config.group_size`, and on nothing else.

    Gradients that are there already, of a step that failed for one, are zeroed. A KL term needs the `reference`.
    """
    if config.loss.kl_coefficient and reference is None:
        raise ValueError(
            f"kl_coefficient {config.loss.kl_coefficient} needs a reference: make Reference(rt.model) before the first "
            "step and pass it, or set the coefficient to 0"
        )
    advantages_B = group_advantages(check_rewards(None, rewards, len(completions)), config.group_size)
    rt.optimizer.zero_grad()  # of a step that failed
    starts = range(0, len(completions), config.micro_batch_size)
    parts = [completions[start : start + config.micro_batch_size] for start in starts]
    references_BT = _reference_logprobs(rt, parts, config, reference)  # before gradients take their memory
    num_tokens, weight = _num_tokens(completions), _weight(completions, config.loss.aggregation)
    totals: dict[str, float] = {"loss": 0.0, "mismatch": 0.0} | ({} if reference is None else {"kl": 0.0})
    for start, part, reference_BT in zip(starts, parts, references_BT, strict=True):
        # micro-batches are weighted so that their sum is the loss of the whole batch
        share = _weight(part, config.loss.aggregation) / max(1, weight)
        batch = Batch.of(part, rt.device)
        # a mixture of experts takes those that the engine took, where it has told them
        with replaying(rt.model, part):
            output = _loss(rt, batch, advantages_B[start : start + len(part)], config, reference_BT)
            # backward at once: activations of one micro-batch only
            (output.loss * share).backward()
        # detached: a sum of losses would keep every graph
        totals["loss"] += float(output.loss.detach()) * share
        for name, metric in (("mismatch", "mismatch_mean"), ("kl", "kl")):
            if name in totals:
                # metrics are means over tokens, and the loss has its own weight
                totals[name] += float(output.metrics[metric]) * _num_tokens(part) / max(1, num_tokens)
    with uninterrupted():  # so that what is saved after Ctrl-C is not half a step
        rt.optimizer.step()
    rt.optimizer.zero_grad()  # no rollout has to keep what is dropped
    return totals


def _reference_logprobs(
    rt: Runtime, parts: Sequence[Sequence[Completion]], config: GRPOConfig, reference: Reference | None
) -> Sequence[Tensor | None]:
    """Log-probabilities of the reference (B, T - 1) for each part, all of them before the first backward pass."""
    if reference is None:
        return [None] * len(parts)

    def compute(model: nn.Module) -> list[Tensor]:
        found = []
        for part in parts:
            with replaying(model, part):  # as the model's own passes are
                found.append(_logprobs(model, Batch.of(part, rt.device), config))
        return found

    return reference.run(compute)


def _num_tokens(completions: Sequence[Completion]) -> int:
    return sum(len(c.token_ids) for c in completions)


def _weight(completions: Sequence[Completion], aggregation: Aggregation) -> int:
    """Divisor of the loss of these completions, for adding it to that of other micro-batches."""
    if aggregation is Aggregation.TOKEN:
        return _num_tokens(completions)
    return sum(1 for c in completions if c.token_ids or aggregation is Aggregation.CONSTANT)


def _loss(rt: Runtime, batch: Batch, advantages_B: Tensor, config: GRPOConfig, reference_BT: Tensor | None) -> Any:
    return grpo_loss(
        _logprobs(rt.model, batch, config),
        None,
        advantages_B,
        batch.completion_mask_BT[:, 1:],
        config=config.loss,
        engine_logprobs_BT=batch.engine_logprobs_BT,
        reference_logprobs_BT=reference_BT,
    )


def _logprobs(model: Any, batch: Batch, config: GRPOConfig) -> Tensor:
    return model_logprobs(
        model,
        batch.input_ids_BT,
        batch.attention_mask_BT,
        completion_mask_BT=batch.completion_mask_BT,
        temperature=config.temperature,
    )


def _sampling(config: GRPOConfig, step: int) -> SamplingParams:
    seed = None if config.seed is None else config.seed * 1_000_003 + step
    return SamplingParams(n=config.group_size, max_tokens=config.max_tokens, temperature=config.temperature, seed=seed)


class _Scorer:
    """Rewards of completions, by one function or by several."""

    def __init__(
        self,
        rewards: Reward | Mapping[str, RewardFunction] | Sequence[RewardFunction],
        weights: Mapping[str, float] | None,
    ) -> None:
        self._single = rewards if callable(rewards) else None
        self._functions = named_rewards(rewards)
        self._weights = check_weights(self._functions, weights)

    def check(self, problems: Sequence[Problem]) -> None:
        """Raise `ValueError` where a function needs what one of the problems does not have."""
        for columns in {_columns(problem) for problem in problems} if self._single is None else ():
            for name, function in self._functions.items():
                check_columns(name, function, columns)

    def __call__(
        self, problems: Sequence[Problem], completions: Sequence[Completion], *, step: int
    ) -> tuple[list[float], dict[str, float]]:
        """Return the weighted sums and the metrics to log."""
        values = self._values(problems, completions, step)
        weighted = [[self._weights[name] * value for value in column] for name, column in values.items()]
        sums = [sum(row) for row in zip(*weighted, strict=True)]
        for index, total in enumerate(sums):
            if not math.isfinite(total):
                parts = ", ".join(f"{name} {column[index]:g}" for name, column in values.items())
                raise ValueError(
                    f"rewards times their weights add up to {total} for completion {index} of {len(sums)} at step "
                    f"{step} ({parts}): return smaller numbers, or lower reward_weights"
                )
        metrics = {} if self._single else {f"rewards/{name}": mean(column) for name, column in values.items()}
        return sums, metrics | {"reward": mean(sums)}  # `fmean` would overflow

    def _values(
        self, problems: Sequence[Problem], completions: Sequence[Completion], step: int
    ) -> dict[str, list[float]]:
        of = [problems[completion.prompt_index] for completion in completions]
        if self._single is not None:
            (name,) = self._functions
            score = partial(_one_by_one, self._single, completions, of)
            return {name: call_reward(name, score, len(completions), step=step)}
        given: dict[str, list[Any]] = {"completion_ids": [list(completion.token_ids) for completion in completions]}
        for column in dict.fromkeys(name for problem in problems for name in _columns(problem)):
            given[column] = [p.columns.get(column, p.answer if column == "answer" else None) for p in of]
        prompts = [problem.prompt for problem in of]
        replies = [_reply(problem, completion) for problem, completion in zip(of, completions, strict=True)]
        given = {"prompts": prompts, "completions": replies} | given
        return {
            name: call_reward(name, bound(function, given), len(replies), step=step)
            for name, function in self._functions.items()
        }


def _one_by_one(reward: Reward, completions: Sequence[Completion], of: Sequence[Problem]) -> list[float]:
    return [reward(completion, problem.answer) for completion, problem in zip(completions, of, strict=True)]


def _columns(problem: Problem) -> tuple[str, ...]:
    return tuple(problem.columns) if problem.answer is None else ("answer", *problem.columns)


def _reply(problem: Problem, completion: Completion) -> Any:
    """A completion as reward functions get it: a text, or a message to a conversation; tokens without a tokenizer."""
    text = list(completion.token_ids) if completion.text is None else completion.text
    is_conversation = not isinstance(problem.prompt, str) and any(isinstance(p, Mapping) for p in problem.prompt)
    return [{"role": "assistant", "content": text}] if is_conversation else text


# ---- the policy that a KL term compares with -----------------------------------------------------------------------


class Reference:
    """A frozen policy of a model that is being trained.

    A model whose adapter adds nothing yet, as new ones do, is its own reference with the adapter switched off: that
    takes no memory. Of any other adapter (PiSSA and others, which rewrite the base and start from the rest of it; one
    that was trained before) the tensors are copied, and of a model that is trained as a whole the weights, to the host:
    `size_bytes` of them (pinned on a machine with a GPU). They are on the device a second time during `run`: before a
    backward pass, where there are no gradients yet, which take as much.
    """

    def __init__(self, model: nn.Module) -> None:
        """Freeze the present weights.

        Raises: `BudgetError` where the host has no room for them; `Unsupported` for weights that are sharded over
        ranks.
        """
        self._model = model
        self._kept: dict[str, Tensor] = {}
        if not is_peft_model(model):
            # `state_dict` names: buffers that are not saved are computed, and need no copy
            held = model.state_dict().keys()
            buffers = {name: buffer for name, buffer in model.named_buffers() if name in held}
            self._kept = _copied(dict(model.named_parameters()) | buffers)
        elif not changes_nothing(model):
            self._kept = _copied({name: p for name, p in model.named_parameters() if p.requires_grad})

    @property
    def size_bytes(self) -> int:
        """Host memory that the frozen weights take."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    @torch.no_grad()
    def run(self, compute: Callable[[Any], T]) -> T:
        """Call `compute` with the frozen model, in evaluation mode and without gradients.

        Raises: `BudgetError` where the device has no room for its weights.
        """
        with evaluating(self._model):
            if not self._kept:
                with _without_adapter(self._model):
                    return compute(self._model)
            return self._run_frozen(compute)

    def _run_frozen(self, compute: Callable[[Any], T]) -> T:
        device = next(self._model.parameters()).device
        free_bytes = free_device_bytes(device)
        if device.type == "cuda":  # what torch's allocator keeps and reuses, such as the last step's gradients
            # memory that torch's allocator keeps is free to it
            free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if device.type != "cpu" and self.size_bytes > free_bytes:
            raise BudgetError(
                f"the reference of the KL term needs {format_bytes(self.size_bytes)} of the device beside the model, "
                f"and {format_bytes(free_bytes)} are free: train a new adapter (lora=...), whose reference is the "
                "model without it, set kl_coefficient to 0, or lower RuntimeConfig.kv_cache_bytes",
                needed_bytes=self.size_bytes,
                free_bytes=free_bytes,
            )
        frozen = {f"model.{name}": t.to(device, non_blocking=True) for name, t in self._kept.items()}
        # `functional_call` puts the frozen tensors in for the call: the model's own stay where they are
        result: T = torch.func.functional_call(_Call(self._model, compute), frozen, ())
        return result


class _Call(nn.Module):
    """A function of a model as a module around that, for `functional_call` to put other weights in."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self) -> Any:
        return self.function(self.model)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host."""
    if any(is_dtensor(tensor) for tensor in tensors.values()):
        raise Unsupported(
            "a KL term over weights that are sharded over ranks is not there yet: train a new adapter, one that starts "
            "at zero, or set kl_coefficient to 0"
        )
    needed_bytes, free_bytes = sum(t.nbytes for t in tensors.values()), available_host_bytes()
    if needed_bytes > free_bytes:
        raise BudgetError(
            f"the reference of the KL term is a copy of the weights, {format_bytes(needed_bytes)} of host memory, and "
            f"{format_bytes(free_bytes)} are available: free some, train a new adapter (lora=...), whose reference is "
            "the model without it, or set kl_coefficient to 0",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )
    copies = {}
    for name, tensor in tensors.items():
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
        copies[name] = kept.copy_(tensor.detach())
    return copies


@contextmanager
def _without_adapter(model: Any) -> Iterator[None]:
    if hasattr(model, "disable_adapter"):  # PEFT's own model
        with model.disable_adapter():
            yield
        return
    model.disable_adapters()  # one that transformers has added
    try:
        yield
    finally:
        model.enable_adapters()
