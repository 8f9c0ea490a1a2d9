"""Whose turn it is, and what a runtime may be asked for in which state, as a table.

IDLE  --rollout-->  ROLLOUT  --leave-->  IDLE
IDLE  --train--->   TRAIN    --leave-->  IDLE
IDLE  --step---->   STEP     ----------> IDLE     a step outside `train()` is a turn of its own
any   --close--->   CLOSED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from colo.errors import PhaseError


class Turn(StrEnum):
    """Who works: the engine, the trainer, nobody, or nobody ever again."""

    IDLE = "idle"
    ROLLOUT = "rollout"
    TRAIN = "train"
    STEP = "step"
    """The trainer, in an optimizer step outside `train()`; after one that has failed, nobody."""

    CLOSED = "closed"


class Verb(StrEnum):
    """Requests to a runtime, by the loop or by torch's hooks."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    LEAVE = "leave"
    GENERATE = "generate"
    BACKWARD = "backward"
    STEP = "step"
    RECOVER = "recover"
    CLOSE = "close"


_HERE = (Turn.IDLE, Turn.STEP)
EDGES: Mapping[tuple[Verb, Turn], Turn] = MappingProxyType(
    {
        **{(Verb.ROLLOUT, turn): Turn.ROLLOUT for turn in _HERE},
        **{(Verb.TRAIN, turn): Turn.TRAIN for turn in _HERE},
        **{(Verb.LEAVE, turn): Turn.IDLE for turn in (Turn.ROLLOUT, Turn.TRAIN)},
        **{(Verb.GENERATE, turn): Turn.ROLLOUT for turn in (*_HERE, Turn.ROLLOUT)},
        **{(Verb.BACKWARD, turn): turn for turn in (*_HERE, Turn.TRAIN)},
        **{(Verb.STEP, turn): Turn.STEP for turn in _HERE},
        (Verb.STEP, Turn.TRAIN): Turn.TRAIN,
        **{(Verb.RECOVER, turn): Turn.IDLE for turn in _HERE},
        **{(Verb.CLOSE, turn): Turn.CLOSED for turn in Turn},
    }
)
"""Next turn by verb and present turn; a pair that is missing is refused with `PhaseError`."""

_CALLS = {Verb.STEP: "optimizer.step()"}
_INSTEAD = {Verb.GENERATE: "`with rt.rollout():`", Verb.STEP: "`with rt.train():`", Verb.BACKWARD: "`with rt.train():`"}


def next_turn(verb: Verb, turn: Turn) -> Turn:
    """Whose turn it is after `verb`. Raises: `PhaseError`, with what to do, where the verb is not allowed."""
    if (verb, turn) in EDGES:
        return EDGES[verb, turn]
    call = _CALLS.get(verb, f"{verb}()")
    if turn is Turn.CLOSED:
        raise PhaseError("the runtime is closed: build a new one with colo.launch or colo.share")
    if verb in _INSTEAD:
        raise PhaseError(f"{call} inside {turn}(): leave the block first, then use {_INSTEAD[verb]}")
    raise PhaseError(
        f"{call} inside {turn}(): phases do not nest, leave the block first, or the phase with enter(None)"
    )
