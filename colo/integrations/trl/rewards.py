"""Checks of what a user's reward functions return, before a step is made from it."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_GIVEN_BY_TRL = frozenset(
    ("prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra", "log_metric")
)
"""What a reward function is given beside the columns of the dataset."""


def checked(reward: Any, name: str, trainer: Any) -> Any:
    """`reward`, whose values are checked: one finite number or `None` for each completion.

    TRL takes NaN for `None` and trains on nothing, or fails in torch. A reward model is returned as it is.
    """
    if isinstance(reward, torch.nn.Module):
        return reward

    def check(rewards: Any, columns: Mapping[str, Any]) -> Any:
        _check(rewards, len(columns["completions"]), f"reward {name!r} at step {trainer.state.global_step}")
        return rewards

    if _is_awaited(reward):

        @functools.wraps(reward)
        async def call_and_await(*arguments: Any, **columns: Any) -> Any:
            return check(await reward(*arguments, **columns), columns)

        return call_and_await

    @functools.wraps(reward)
    def call(*arguments: Any, **columns: Any) -> Any:
        return check(reward(*arguments, **columns), columns)

    return call


def check_columns(rewards: Sequence[Any], train: Any, evaluation: Any = None) -> None:
    """Raise `ValueError` for columns that TRL or a reward function asks for and a dataset does not have.

    A dataset that does not know its columns, such as a stream, is not checked. `evaluation` may be several, by name.
    """
    others = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
    for dataset, name in ((train, "the dataset"), *((o, f"eval_dataset {n}".rstrip()) for n, o in others.items())):
        columns = getattr(dataset, "column_names", None)
        if isinstance(columns, (list, tuple)):
            _check_columns(rewards, columns, f"{name} has {', '.join(columns) or 'no columns'}")


def _check_columns(rewards: Sequence[Any], columns: Sequence[str], has: str) -> None:
    if "prompt" not in columns:
        raise ValueError(f"{has}, and no 'prompt': rename the column with dataset.rename_column(..., 'prompt')")
    for reward in rewards:
        if isinstance(reward, torch.nn.Module) or not callable(reward):
            continue
        try:
            parameters = inspect.signature(reward).parameters.values()
        except (TypeError, ValueError):  # of a builtin, which has none
            continue
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if lacking := [name for name in needed if name not in columns and name not in _GIVEN_BY_TRL]:
            name = getattr(reward, "__name__", type(reward).__name__)
            raise ValueError(
                f"reward {name!r} takes {', '.join(lacking)}, and {has}: add the column, or give it a default"
            )


def _is_awaited(reward: Any) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


def _check(rewards: Any, count: int, subject: str) -> None:
    """Raise `TypeError` or `ValueError`, in one line, for what is not a number or `None` for each of `count`."""
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards  # torch's and numpy's
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{subject} returned {_shown(values)}: return a list with a number for each completion")
    if len(values) != count:
        raise ValueError(
            f"{subject} returned {len(values)} values for {count} completions: return one for each, and None where it "
            "has no opinion"
        )
    for index, value in enumerate(values):
        where = f"{subject} returned {_shown(value)} for completion {index}"
        if value is None:
            continue
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{where}: return a number, such as float(...) of it, or None where it has no opinion")
        if not math.isfinite(value):
            raise ValueError(f"{where}: return a finite number, or None where it has no opinion")


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (str, float, int)) else f"a {type(value).__name__}"
