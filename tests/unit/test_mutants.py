"""Explanations of mutants name what exists, and tests run with every line marked."""

import os
import subprocess
import sys
from pathlib import Path

from tests.mutants import ROOT, find_outdated, read_explained

TURNS = "runtime/turns"


def test_an_explanation_of_what_is_not_there_is_named():
    there = [(TURNS, "@next_turn"), (TURNS, "next_turn: if turn is Turn.CLOSED: => if turn is not Turn.CLOSED:")]
    assert list(find_outdated(there, [TURNS])) == []
    gone = [("runtime/other", "@next_turn"), (TURNS, "@last_turn"), (TURNS, "next_turn: pass => break")]
    assert list(find_outdated([*there, *gone], [TURNS])) == [
        "runtime/other :: @next_turn: no such module",
        "runtime/turns :: @last_turn: no such scope with mutants",
        "runtime/turns :: next_turn: pass => break: no such mutation",
    ]


def test_every_explanation_is_of_a_mutant_that_there_is():
    modules = [str(path.relative_to(ROOT / "colo").with_suffix("")) for path in (ROOT / "colo").rglob("*.py")]
    assert list(find_outdated(read_explained(), modules)) == []


TIME = """
from tests.mutants import time_tests
timing = time_tests(["memory/region"])
lines = {line.split(":")[0] for lines in timing.lines.values() for line in lines}
print(any("test_region.py" in name for name in timing.seconds), lines)
"""


def test_tests_are_timed_where_a_module_calls_its_own_functions_as_it_is_imported():
    """`colo.memory.region` makes an object of a class of its own, before the first test runs."""
    root = Path(__file__).parents[2]
    env = {
        name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"
    }  # in one process, not in several
    done = subprocess.run([sys.executable, "-c", TIME], cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True {'memory/region'}\n", done.stderr[-2000:]
