"""Checks of what a user's reward functions return, before a step is made from it."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

Reward = Callable[..., Any]


def checked(reward: Any, name: str, trainer: Any) -> Any:
    """`reward`, whose values are checked: one finite number or `None` for each completion.

    TRL takes NaN for `None` and trains on nothing, or fails in torch. A reward model, and a function that is awaited,
    are returned as they are.
    """
    if isinstance(reward, torch.nn.Module) or _is_awaited(reward):
        return reward

    @functools.wraps(reward)
    def call(*arguments: Any, **columns: Any) -> Any:
        rewards = reward(*arguments, **columns)
        _check(rewards, len(columns["completions"]), f"reward {name!r} at step {trainer.state.global_step}")
        return rewards

    return call


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
