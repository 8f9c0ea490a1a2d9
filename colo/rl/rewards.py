"""Rewards of a step, checked before anything is trained on them: functions of all prompts and completions at once.

    def brevity(prompts, completions, **columns) -> list[float]: ...

They are called with keywords, as TRL calls its own. Knows nothing of runtimes, models or datasets.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeAlias

RewardFunction: TypeAlias = Callable[..., Any]
"""Called as `f(prompts=[...], completions=[...], **columns)`; returns one number for each completion.

Of the columns a function without `**` gets those that it names. Completions are texts, or, to a conversation, a list of
one message each; `completion_ids` are their tokens.
"""

GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments of every function, beside columns."""


def named_rewards(
    functions: RewardFunction | Iterable[RewardFunction] | Mapping[str, RewardFunction],
) -> dict[str, Any]:
    """Reward functions by name, by default their own. Raises: `TypeError`, `ValueError` for none or two of a name."""
    if callable(functions):
        functions = [functions]
    if not isinstance(functions, Mapping):
        pairs = [(getattr(function, "__name__", type(function).__name__), function) for function in functions]
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"several rewards are called {', '.join(twice)}: name them, as in {{'short': f, 'right': g}}"
            )
        functions = dict(pairs)
    if not functions:
        raise ValueError("there is no reward: give at least one function")
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"reward {name!r} is not a function, but {function!r:.200}")
    return dict(functions)


def check_weights(names: Iterable[str], weights: Mapping[str, Any] | None) -> dict[str, float]:
    """The weight of each reward, 1 where none is given. Raises: `ValueError` for another name, or no finite number."""
    found = dict.fromkeys(names, 1.0)
    for name, weight in (weights or {}).items():
        if name not in found:
            raise ValueError(f"there is a weight for reward {name!r}, but rewards are {', '.join(found)}")
        if not isinstance(weight, Real) or not _is_finite(weight):
            raise ValueError(f"the weight of reward {name!r} must be a finite number, not {weight!r}")
        found[name] = float(weight)
    return found


def check_columns(name: str, function: RewardFunction, columns: Iterable[str]) -> None:
    """Raise `ValueError` where a reward needs something that is neither a prompt, a completion nor a column."""
    there = [*columns]
    needed = [p.name for p in _parameters(function) if p.default is p.empty and p.kind in _BY_NAME]
    if missing := [wanted for wanted in needed if wanted not in (*GIVEN, *there)]:
        has = f"has {', '.join(there)}" if there else "has none"
        raise ValueError(
            f"reward {name!r} takes {', '.join(missing)}, and of columns the dataset {has}: rename the column or the "
            "parameter, or give it a default; rewards are called as f(prompts=..., completions=..., **columns)"
        )


def bound(function: RewardFunction, given: Mapping[str, Any]) -> Callable[[], Any]:
    """`function` with what it takes of `given`: prompts, completions and columns, by name."""
    parameters = _parameters(function)
    if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = {p.name: given[p.name] for p in parameters if p.name in given}
    return partial(function, **given)


def call_reward(
    name: str, call: Callable[[], Any], expected: int, *, step: int | None = None, allow_none: bool = False
) -> list[float]:
    """The rewards that `call` returns. Raises: `ValueError` as `check_rewards`, and where it raises: at which line."""
    with _named(name, step):
        values = call()
    return check_rewards(name, values, expected, step=step, allow_none=allow_none)


async def await_reward(
    name: str, call: Callable[[], Any], expected: int, *, step: int | None = None, allow_none: bool = False
) -> list[float]:
    """`call_reward` of a function that is awaited."""
    with _named(name, step):
        values = await call()
    return check_rewards(name, values, expected, step=step, allow_none=allow_none)


@contextmanager
def _named(name: str, step: int | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # the innermost frame: the line that failed, not the one that called it, which is here for what is not Python
        last = extract_tb(error.__traceback__)[-1]
        place = "" if last.filename == __file__ else f" ({Path(last.filename).name}, line {last.lineno})"
        raise ValueError(
            f"reward {name!r} raised {type(error).__name__}{_at(step)}: {error}{place}. Mend it, or have it return a "
            "number for what it cannot score"
        ) from error


def check_rewards(
    name: str | None, values: Any, expected: int | None, *, step: int | None = None, allow_none: bool = False
) -> list[float]:
    """The values of a reward function, or rewards without a name, as numbers; `step` is named in errors.

    With `allow_none` a `None`, by which TRL means that a reward does not apply, becomes NaN.
    Raises: `ValueError` for anything but a list, tensor or array of `expected` finite numbers (`None`: of any number).
    """
    said, do = ("rewards hold", "give") if name is None else (f"reward {name!r} returned", "return")
    or_none = ", or None where it has no opinion" if allow_none else ""
    count = "" if expected is None else f"{expected} "
    wanted = f"{do} a list of {count}numbers, one for each completion{or_none}"
    if hasattr(values, "tolist"):
        values = values.tolist()
    # a string is iterable, and no list of numbers
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{said} {values!r:.100}{_at(step)}: {wanted}")
    found = list(values)
    if expected not in (None, len(found)):
        raise ValueError(f"{said} {len(found)} values for {expected} completions{_at(step)}: {wanted}")
    for index, value in enumerate(found):
        if hasattr(value, "item") and not getattr(value, "ndim", 0):
            value = value.item()
        if value is None and allow_none:
            found[index] = math.nan
        # `Real` and finite: a NaN would make every advantage of its group NaN
        elif not isinstance(value, Real) or not _is_finite(value):
            raise ValueError(
                f"{said} {value!r:.100} for completion {index} of {len(found)}{_at(step)}: {do} a finite number, such "
                f"as 0.0 for what cannot be scored{or_none}"
            )
        else:
            found[index] = float(value)
    return found


def _is_finite(value: Real) -> bool:
    """True for a number that a float holds, which of Python's integers not all are."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY)


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    """Parameters of a function; none where that cannot be found out."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
