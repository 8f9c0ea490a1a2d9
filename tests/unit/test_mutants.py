"""That explanations of mutants name what is there, as far as the tool checks it."""

from tests.mutants import find_outdated

STATES = "runtime/states"


def test_an_explanation_of_what_is_not_there_is_named():
    there = [(STATES, "@next_turn"), (STATES, "next_turn: if turn is Turn.CLOSED: => if turn is not Turn.CLOSED:")]
    assert list(find_outdated(there, [STATES])) == []
    gone = [("runtime/other", "@next_turn"), (STATES, "@last_turn"), (STATES, "next_turn: pass => break")]
    assert list(find_outdated([*there, *gone], [STATES])) == [
        "runtime/other :: @next_turn: no such module",
        "runtime/states :: @last_turn: no such scope with mutants",
        "runtime/states :: next_turn: pass => break: no such mutation",
    ]
