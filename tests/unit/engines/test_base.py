"""The states of an engine and what each allows: every verb in every state."""

from types import SimpleNamespace

import pytest
import torch

from colo.engine import EngineState
from colo.engines.base import EngineBase, EngineStatus
from colo.errors import EngineLost, PhaseError, StaleWeights
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency

OPEN = {EngineState.AWAKE, EngineState.PAUSED, EngineState.ASLEEP}


@pytest.fixture
def segments():
    return [SimpleNamespace(name=name, residency=Residency.RESIDENT) for name in (ENGINE_WEIGHTS, ENGINE_KV_CACHE)]


@pytest.fixture
def status(segments):
    return EngineStatus(lambda: segments)


def put(status, segments, state):
    status.paused = state is EngineState.PAUSED
    if state is EngineState.ASLEEP:
        segments[1].residency = Residency.DISCARDED
    if state is EngineState.LOST:
        status.lose("it ended")
    if state is EngineState.CLOSED:
        status.close()


@pytest.mark.parametrize("state", EngineState)
def test_every_state_is_told_and_allows_what_it_allows(status, segments, state):
    put(status, segments, state)
    assert status.state is state
    for allowed in EngineState:
        if state is EngineState.LOST:
            with pytest.raises(EngineLost, match=r"the engine is lost: it ended\. Call recover\(\) to start it again"):
                status.require("act", allowed)
        elif allowed is state:
            status.require("act", allowed)
        else:
            with pytest.raises(PhaseError, match=f"the engine is {state} and cannot act: ."):
                status.require("act", allowed)
    if state in OPEN:
        status.require_open("act")
        status.require_weights("act")


def test_weights_that_are_away_are_told_from_a_kv_cache_that_is(status, segments):
    segments[0].residency = Residency.OFFLOADED
    with pytest.raises(PhaseError, match="the engine's weights are offloaded and it cannot act: wake them first"):
        status.require_weights("act")


def test_a_version_is_what_was_committed_last_until_it_is_withdrawn(status):
    with pytest.raises(StaleWeights, match="no weights have been committed yet"):
        status.require_version()
    status.commit(3)
    assert status.require_version() == 3
    status.poison("half an update")
    with pytest.raises(StaleWeights, match="the engine does not generate: half an update"):
        status.require_version()


def test_a_loss_is_told_withdraws_the_version_and_ends_when_it_is_revived(segments):
    told = []
    status = EngineStatus(lambda: segments, on_loss=lambda: told.append(1), when_lost="start it")
    status.commit(1)
    status.paused = True
    error = status.lose("killed")
    assert str(error) == "the engine is lost: killed. The trainer's weights are intact; start it"
    assert (told, status.version, status.state) == ([1], None, EngineState.LOST)
    status.revive()
    assert status.state is EngineState.AWAKE
    with pytest.raises(StaleWeights, match="it is lost: killed"):
        status.require_version()


def test_whether_it_is_alive_is_looked_at_first(segments):
    status = EngineStatus(lambda: segments, check_alive=lambda: status.lose("gone"))
    with pytest.raises(EngineLost, match="gone"):
        status.require("act", EngineState.AWAKE)


@pytest.mark.parametrize("looks", range(4))
@pytest.mark.parametrize("act", ["require_open", "require_weights", "require_version"])
def test_an_engine_that_ends_at_any_time_is_lost_to_what_is_asked_of_it(segments, act, looks):
    def look():
        nonlocal looks
        looks -= 1
        if looks < 0 and status.lost is None:
            raise status.lose("gone")

    status = EngineStatus(lambda: segments, check_alive=look)
    status.commit(1)
    with pytest.raises(EngineLost, match="the engine is lost: gone"):
        for _ in range(looks + 1):
            getattr(status, act)(*["act"] * (act != "require_version"))


@pytest.mark.parametrize("raises", [True, False])
def test_the_state_of_an_engine_that_has_ended_is_lost_before_anything_is_asked_of_it(segments, raises):
    def look():
        error = status.lose("gone")
        if raises:
            raise error

    status = EngineStatus(lambda: segments, check_alive=look)
    assert (status.state, status.lost) == (EngineState.LOST, "gone")


def test_a_segment_that_lacks_members_is_told_which(segments):
    with pytest.raises(TypeError, match="segment SimpleNamespace lacks away, begin, .*, size_bytes$"):
        EngineBase(torch.device("cpu"), segments)
