"""The table of turns: what may be asked for when, and that everything else is refused in words."""

import pytest

from colo.errors import PhaseError
from colo.runtime.turns import EDGES, Turn, Verb, next_turn

IDLE, ROLLOUT, TRAIN, STEP, CLOSED = Turn

ALLOWED = {
    Verb.ROLLOUT: {IDLE: ROLLOUT, STEP: ROLLOUT},
    Verb.TRAIN: {IDLE: TRAIN, STEP: TRAIN},
    Verb.LEAVE: {ROLLOUT: IDLE, TRAIN: IDLE},
    Verb.GENERATE: {IDLE: ROLLOUT, STEP: ROLLOUT, ROLLOUT: ROLLOUT},
    Verb.BACKWARD: {IDLE: IDLE, STEP: STEP, TRAIN: TRAIN},
    Verb.STEP: {IDLE: STEP, STEP: STEP, TRAIN: TRAIN},
    Verb.PARK: {IDLE: IDLE, STEP: STEP, TRAIN: TRAIN},
    Verb.RECOVER: {IDLE: IDLE, STEP: IDLE},
    Verb.CLOSE: dict.fromkeys(Turn, CLOSED),
}


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("turn", Turn)
def test_a_verb_leads_where_the_table_says_or_is_refused(verb, turn):
    if turn in ALLOWED[verb]:
        assert next_turn(verb, turn) is ALLOWED[verb][turn]
        return
    with pytest.raises(PhaseError) as refused:
        next_turn(verb, turn)
    words = str(refused.value)
    if turn is CLOSED:
        assert words == "the runtime is closed: build a new one with colo.launch or colo.share"
    else:
        assert f"inside {turn}()" in words
        assert "leave the block first" in words


def test_every_turn_can_be_left():
    """From each turn some way leads back to nobody's, and to the end."""
    for turn in Turn:
        assert next_turn(Verb.CLOSE, turn) is CLOSED
    assert {turn for (verb, turn), to in EDGES.items() if to is IDLE and verb is not Verb.CLOSE} >= {
        ROLLOUT,
        TRAIN,
        STEP,
    }


@pytest.mark.parametrize(
    ("verb", "turn", "words"),
    [
        (Verb.GENERATE, TRAIN, "generate() inside train(): leave the block first, then use `with rt.rollout():`"),
        (Verb.STEP, ROLLOUT, "optimizer.step() inside rollout(): leave the block first, then use `with rt.train():`"),
        (Verb.BACKWARD, ROLLOUT, "backward() inside rollout(): leave the block first, then use `with rt.train():`"),
        (Verb.TRAIN, ROLLOUT, "train() inside rollout(): phases do not nest, leave the block first, or the phase with"),
        (Verb.RECOVER, TRAIN, "recover() inside train(): phases do not nest"),
    ],
)
def test_a_refusal_says_what_to_do_instead(verb, turn, words):
    with pytest.raises(PhaseError) as refused:
        next_turn(verb, turn)
    assert words in str(refused.value)
