"""Rewards by themselves: names, weights, columns, and what functions return."""

import asyncio
import math
import os
from functools import partial

import numpy as np
import pytest
import torch

from colo.rl.rewards import await_reward, bound, call_reward, check_columns, check_rewards, check_weights, named_rewards


def short(prompts, completions, **columns):
    return [0.0] * len(completions)


class Judge:
    def __call__(self, prompts, completions, **columns):
        return [1.0] * len(completions)


# ---- names and weights -----------------------------------------------------------------------------------------------


def test_functions_are_named_after_themselves():
    assert named_rewards(short) == named_rewards([short]) == {"short": short}
    judge = Judge()
    assert named_rewards([short, judge]) == {"short": short, "Judge": judge}
    assert named_rewards({"a": short, "b": short}) == {"a": short, "b": short}


@pytest.mark.parametrize(
    ("functions", "error", "words"),
    [
        ([short, short], ValueError, "several rewards are called short: name them, as in"),
        ([], ValueError, "there is no reward: give at least one function"),
        ({}, ValueError, "there is no reward"),
        ({"a": 1.0}, TypeError, "reward 'a' is not a function, but 1.0"),
    ],
)
def test_what_is_no_set_of_rewards_is_refused(functions, error, words):
    with pytest.raises(error, match=words):
        named_rewards(functions)


def test_weights_are_one_unless_given():
    assert check_weights(["a", "b"], None) == {"a": 1, "b": 1}
    assert check_weights(["a", "b"], {"b": -2}) == {"a": 1, "b": -2}
    with pytest.raises(ValueError, match="there is a weight for reward 'c', but rewards are a, b"):
        check_weights(["a", "b"], {"c": 1})
    for bad in (math.nan, "1", None):
        with pytest.raises(ValueError, match="the weight of reward 'a' must be a finite number, not "):
            check_weights(["a"], {"a": bad})


# ---- columns ---------------------------------------------------------------------------------------------------------


def test_a_function_needs_what_it_names_without_a_default():
    def solved(completions, solution, level=1, *, unit):
        return []

    check_columns("solved", solved, ["solution", "unit", "other"])
    check_columns("short", short, [])
    check_columns("one", partial(solved, solution=1, unit=2), [])
    with pytest.raises(
        ValueError, match="reward 'solved' takes solution, unit, and of columns the dataset has answer: rename"
    ):
        check_columns("solved", solved, ["answer"])
    with pytest.raises(ValueError, match=r"takes p, c, and .* has none: .*called as f\(prompts=..., completions=..., "):
        check_columns("positional", lambda p, c: [], [])


def test_a_function_gets_what_it_names_and_one_with_two_stars_everything():
    seen = {}

    def narrow(completions, solution, level=5):
        seen.update(completions=completions, solution=solution, level=level)
        return [1] * len(completions)

    def wide(**everything):
        seen.update(everything)
        return [1] * 2

    columns = {"solution": [3, 4], "other": [5, 6]}
    given = {"prompts": ["p", "q"], "completions": ["a", "b"], **columns}
    assert call_reward("narrow", bound(narrow, given), 2) == [1.0, 1.0]
    assert seen == {"completions": ["a", "b"], "solution": [3, 4], "level": 5}
    seen.clear()
    call_reward("wide", bound(wide, given), 2)
    assert seen == given


def test_what_fails_is_named_with_its_line_or_without_one_that_is_not_its_own():
    def fails(completions):
        raise KeyError("x")

    async def fails_later(completions):
        await asyncio.sleep(0)
        raise KeyError("x")

    given = {"prompts": ["p"], "completions": ["a"], "level": [1]}
    words = r"reward 'f' raised KeyError at step 1: 'x' \(test_rewards.py, line \d+\)\. Mend it"
    with pytest.raises(ValueError, match=words):
        call_reward("f", bound(fails, given), 1, step=1)
    with pytest.raises(ValueError, match=words):
        asyncio.run(await_reward("f", bound(fails_later, given), 1, step=1))
    with pytest.raises(
        ValueError, match=r"reward 'f' raised TypeError at step 1: .* takes no keyword arguments\. Mend"
    ):
        call_reward("f", bound(os.getcwd, given), 1, step=1)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5, True],
        (1.0, 0.5, 1),
        iter([1, 0.5, 1]),
        torch.tensor([1, 0.5, 1]),
        torch.tensor([1, 0.5, 1], dtype=torch.bfloat16),
        np.array([1, 0.5, 1]),
        [torch.tensor(1.0), np.float32(0.5), np.int64(1)],
    ],
    ids=["list", "tuple", "iterator", "tensor", "bf16", "array", "mixed"],
)
def test_numbers_of_any_kind_become_floats(values):
    found = check_rewards("r", values, 3)
    assert found == [1.0, 0.5, 1.0]
    assert all(type(value) is float for value in found)


async def later():
    return [1.0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "returned None at step 7: return a list of 2 numbers, one for each completion"),
        (1.0, "returned 1.0 at step 7: return a list of 2"),
        ("10", "returned '10' at step 7: return a list of 2"),
        ({"a": 1, "b": 2}, "returned {'a': 1, 'b': 2} at step 7: return a list"),
        (torch.tensor(1.0), "returned 1.0 at step 7: return a list"),
        ([1.0], "returned 1 values for 2 completions at step 7: return a list of 2"),
        ([1.0] * 3, "returned 3 values for 2 completions"),
        ([], "returned 0 values for 2 completions"),
        ([1.0, "1"], "returned '1' for completion 1 of 2 at step 7: return a finite number"),
        ([None, 1.0], "returned None for completion 0 of 2"),
        ([1.0, math.nan], "returned nan for completion 1 of 2"),
        ([-math.inf, 1.0], "returned -inf for completion 0 of 2"),
        (torch.tensor([1.0, math.nan]), "returned nan for completion 1"),
        (torch.ones(2, 2), r"returned \[1.0, 1.0\] for completion 0 of 2"),
        ([torch.ones(2), 1.0], r"returned tensor\(.* for completion 0"),
        ([1.0, 1j], "returned 1j for completion 1"),
        ([1.0, -(10**400)], "returned -10000"),
    ],
    ids=str,
)
def test_anything_else_is_refused_with_what_to_do(values, words):
    with pytest.raises(ValueError, match=f"reward 'r' {words}"):
        check_rewards("r", values, 2, step=7)


def test_a_coroutine_is_refused():
    coroutine = later()
    with pytest.raises(ValueError, match="reward 'r' returned <coroutine object later"):
        check_rewards("r", coroutine, 1)
    coroutine.close()


def test_none_may_stand_for_a_reward_that_does_not_apply():
    first, second = check_rewards("r", [None, 1], 2, allow_none=True)
    assert math.isnan(first) and second == 1.0
    with pytest.raises(ValueError, match="returned nan"):
        check_rewards("r", [math.nan], 1, allow_none=True)


def test_the_module_needs_nothing_but_python_and_torch():
    import ast
    from pathlib import Path

    from colo.rl import rewards

    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(Path(rewards.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any(name.startswith(("colo", "transformers")) for name in imported)
