"""Problems to train on, and rewards of what was sampled for them: by one function of a completion, or by several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from colo.engine import Completion
from colo.engines.text import Message
from colo.rl.rewards import RewardFunction, call_reward, check_columns, check_weights, checked_call, named_rewards

Reward: TypeAlias = Callable[[Completion, Any], float]
"""Scores one completion against the answer of its problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A prompt, and what rewards compare its completions with."""

    prompt: str | tuple[int, ...] | Sequence[Message]
    """A text, token ids, or a conversation."""

    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What reward functions get beside `answer`, by the names of their parameters."""


class Scorer:
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
        """Weighted sums, and what to log of them."""
        values = self._values(problems, completions, step)
        weighted = [[self._weights[name] * value for value in column] for name, column in values.items()]
        sums = [sum(row) for row in zip(*weighted, strict=True)]
        metrics = {} if self._single else {f"rewards/{name}": _mean(column) for name, column in values.items()}
        return sums, metrics | {"reward": _mean(sums)}

    def _values(
        self, problems: Sequence[Problem], completions: Sequence[Completion], step: int
    ) -> dict[str, list[float]]:
        of = [problems[completion.prompt_index] for completion in completions]
        if self._single is not None:
            (name,) = self._functions
            score = partial(_one_by_one, self._single, completions, of)
            return {name: checked_call(name, score, len(completions), step=step)}
        columns: dict[str, list[Any]] = {"completion_ids": [list(completion.token_ids) for completion in completions]}
        for column in dict.fromkeys(name for problem in problems for name in _columns(problem)):
            columns[column] = [_value(problem, column) for problem in of]
        prompts = [problem.prompt for problem in of]
        replies = [_reply(problem, completion) for problem, completion in zip(of, completions, strict=True)]
        return {
            name: call_reward(name, function, prompts=prompts, completions=replies, columns=columns, step=step)
            for name, function in self._functions.items()
        }


def _one_by_one(reward: Reward, completions: Sequence[Completion], of: Sequence[Problem]) -> list[float]:
    return [reward(completion, problem.answer) for completion, problem in zip(completions, of, strict=True)]


def _columns(problem: Problem) -> tuple[str, ...]:
    return tuple(problem.columns) if problem.answer is None else ("answer", *problem.columns)


def _value(problem: Problem, column: str) -> Any:
    return problem.columns.get(column, problem.answer if column == "answer" else None)


def _reply(problem: Problem, completion: Completion) -> Any:
    """A completion as reward functions get it: a text, or a message to a conversation; tokens without a tokenizer."""
    text = list(completion.token_ids) if completion.text is None else completion.text
    is_conversation = not isinstance(problem.prompt, str) and any(isinstance(p, Mapping) for p in problem.prompt)
    return [{"role": "assistant", "content": text}] if is_conversation else text


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
