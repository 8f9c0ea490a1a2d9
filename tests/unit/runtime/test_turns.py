"""Turns, through the public API: what an engine does outside a rollout, and how what was parked comes back."""

import pytest
import torch

import colo
from colo.config import RuntimeConfig
from colo.engine import EngineState
from colo.phases.phase import TRAINER_GRADIENTS, TRAINER_OPTIMIZER, Phase, Residency
from colo.units import MIB
from tests import runtimes
from tests.runtimes import train_step

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
IDS = torch.tensor([[1, 2, 3, 4]])


def launch(**settings):
    return runtimes.launch(config=RuntimeConfig(**{"kv_cache_bytes": MIB} | settings))


@pytest.fixture
def full():
    """A runtime on a device where the KV cache has room only while gradients and state are away."""
    with launch() as rt:
        model_bytes = sum(p.nbytes for p in rt.model.parameters())
    rt = launch(kv_cache_bytes=3 * model_bytes, device_limit_bytes=int(4.2 * model_bytes))
    yield rt
    rt.close()


def residency(rt, name):
    return rt.scheduler.segments[name].residency


def transitions(rt):
    return [span.name for span in rt.trace.spans if span.category == "transition"]


def test_outside_a_rollout_the_engine_is_paused():
    with launch() as rt:
        assert rt.engine.state is EngineState.PAUSED
        for leave in (lambda: None, lambda: rt.enter(None)):
            with rt.rollout():
                assert rt.engine.state is EngineState.AWAKE
                leave()
            assert rt.engine.state is EngineState.PAUSED
        rt.generate(PROMPTS, max_tokens=2)
        assert rt.engine.state is EngineState.PAUSED


def test_gradients_come_back_from_a_rollout_without_a_training_phase(full):
    with full.train():
        train_step(full)
        full.model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [p.grad.clone() for p in full.model.parameters()]
    seen = len(transitions(full))
    with full.rollout():
        assert residency(full, TRAINER_GRADIENTS) is Residency.OFFLOADED
        full.generate(PROMPTS, max_tokens=2)
    assert residency(full, TRAINER_GRADIENTS) is Residency.RESIDENT
    assert all(torch.equal(p.grad, g) for p, g in zip(full.model.parameters(), gradients, strict=True))
    assert not [name for name in transitions(full)[seen:] if str(Phase.TRAIN) in name]
    assert full.phase is Phase.IDLE


def test_state_that_is_touched_outside_a_phase_takes_the_place_of_the_kv_cache(full):
    with full.train():
        train_step(full)
    with full.rollout():
        full.generate(PROMPTS, max_tokens=2)
    assert residency(full, TRAINER_OPTIMIZER) is Residency.OFFLOADED
    state = next(iter(full.optimizer.state.values()))
    assert torch.isfinite(state["exp_avg"] + 0).all()
    assert residency(full, TRAINER_OPTIMIZER) is Residency.RESIDENT
    assert residency(full, "engine.kv_cache") is Residency.DISCARDED
    with full.rollout():
        assert len(full.generate(PROMPTS, max_tokens=2)) == 2


def test_a_step_outside_train_that_fails_is_nobodys_turn_afterwards():
    with launch() as rt:
        rt.model(input_ids=IDS, labels=IDS).loss.backward()

        def stumble():
            raise RuntimeError("no loss today")

        with pytest.raises(RuntimeError, match="no loss today"):
            rt.optimizer.step(stumble)
        assert rt.weights_version == 0
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=2)
        rt.optimizer.step()
        assert rt.weights_version == 1
        assert rt.phase is Phase.IDLE


def test_training_inside_rollout_says_what_to_do(rt):
    ids = torch.tensor([[1, 2, 3]])
    with rt.rollout():
        with pytest.raises(colo.PhaseError, match=r"backward\(\) inside rollout\(\).*with rt.train\(\)"):
            rt.model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(colo.PhaseError, match=r"optimizer.step\(\) inside rollout\(\)"):
            rt.optimizer.step()
    assert rt.weights_version == 0


def test_generating_inside_train_says_what_to_do(rt):
    with rt.train(), pytest.raises(colo.PhaseError, match=r"generate\(\) inside train\(\).*with rt.rollout\(\)"):
        rt.generate([[1]])


@pytest.mark.parametrize("outer", ["rollout", "train"])
@pytest.mark.parametrize("inner", ["rollout", "train"])
def test_phases_do_not_nest(rt, outer, inner):
    with getattr(rt, outer)():
        with pytest.raises(colo.PhaseError, match=rf"{inner}\(\) inside {outer}\(\): phases do not nest"):
            with getattr(rt, inner)():
                pytest.fail("entered")
        assert rt.phase == outer
    assert rt.phase is Phase.IDLE


def test_phases_are_entered_and_left_without_a_block(rt):
    for phase in (Phase.ROLLOUT, Phase.ROLLOUT, Phase.TRAIN, Phase.TRAIN, Phase.ROLLOUT, None, None):
        rt.enter(phase)
        assert rt.phase is (phase or Phase.IDLE)
        if phase is Phase.ROLLOUT:
            assert len(rt.generate([[1]], max_tokens=1)) == 1
    assert [span.name for span in rt.trace.spans if span.category == "phase"][1:] == ["rollout", "train", "rollout"]
    rt.enter("rollout")
    assert len(rt.generate([[1]], max_tokens=1)) == 1
    rt.enter("train")
    assert rt.phase is Phase.TRAIN
    for phase in (Phase.SYNC, Phase.IDLE, "generate"):
        with pytest.raises(ValueError, match=r"enter\(\) takes Phase.ROLLOUT, Phase.TRAIN or None"):
            rt.enter(phase)


def test_an_engine_is_not_recovered_inside_a_phase(rt):
    with (
        rt.rollout(),
        pytest.raises(colo.PhaseError, match=r"recover\(\) inside rollout\(\): .* leave the block"),
    ):
        rt.recover()


def test_an_exception_inside_a_phase_leaves_it_and_the_next_one_works(rt):
    for verb in (rt.rollout, rt.train):
        with pytest.raises(KeyError):
            with verb():
                raise KeyError("user")
        assert rt.phase is Phase.IDLE
    with rt.train():
        train_step(rt)
    assert rt.generate([[1]])[0].weights_version == 1
