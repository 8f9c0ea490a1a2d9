"""Turns, through the public API: what an engine does outside a rollout, and how what was parked comes back."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import colo
from colo.config import RuntimeConfig
from colo.engine import EngineState
from colo.errors import BudgetError, StaleWeights
from colo.phases.phase import TRAINER_GRADIENTS, TRAINER_OPTIMIZER, Phase, Residency
from colo.runtime.turns import Turns
from colo.trainer.gradients import ParameterGradients
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


def worse(monkeypatch, engine):
    """Have an engine compute other log-probabilities than the trainer."""
    original = type(engine).generate

    def another(engine, *arguments, **options):
        return [replace(c, logprobs=tuple(p - 1 for p in c.logprobs)) for c in original(engine, *arguments, **options)]

    monkeypatch.setattr(type(engine), "generate", another)


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


def test_parked_state_is_read_where_it_is_outside_a_phase(full):
    with full.train():
        train_step(full)
    with full.rollout():
        full.generate(PROMPTS, max_tokens=2)
    assert residency(full, TRAINER_OPTIMIZER) is Residency.OFFLOADED
    state = next(iter(full.optimizer.state.values()))
    assert torch.isfinite(state["exp_avg"] + 0).all()
    assert residency(full, TRAINER_OPTIMIZER) is Residency.OFFLOADED
    assert residency(full, "engine.kv_cache") is Residency.RESIDENT
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


def test_a_step_outside_train_compares_what_was_sampled_as_a_training_phase_does(monkeypatch):
    with launch(max_mismatch=1e-3) as rt:
        rt.generate(PROMPTS, max_tokens=2)
        rt.model(input_ids=IDS, labels=IDS).loss.backward()
        rt.optimizer.step()
        (mismatch,) = rt.trace.metrics["mismatch_sampled"]
        assert mismatch < 1e-5
        assert "switch to train" in [span.name for span in rt.trace.spans]
        worse(monkeypatch, rt.engine)
        rt.generate(PROMPTS, max_tokens=2)
        before = [p.detach().clone() for p in rt.model.parameters()]
        rt.model(input_ids=IDS, labels=IDS).loss.backward()
        with pytest.raises(StaleWeights, match="max_mismatch allows 0.001"):
            rt.optimizer.step()
        assert rt.weights_version == 1 and rt.phase is Phase.IDLE
        assert all(torch.equal(p, b) for p, b in zip(rt.model.parameters(), before, strict=True))


def test_state_that_dcp_would_begin_inside_rollout_is_named_and_can_be_begun_after_it(rt):
    with rt.rollout():
        with pytest.raises(
            colo.PhaseError, match="get_state_dict of torch.distributed.checkpoint.*set the learning rate"
        ):
            get_state_dict(rt.model, rt.optimizer)
    assert rt.optimizer.param_groups[0]["lr"] == 0  # torch's own doing
    rt.optimizer.param_groups[0]["lr"] = 1e-3
    rt.optimizer.zero_grad()
    get_state_dict(rt.model, rt.optimizer)
    assert rt.optimizer.state and rt.optimizer.param_groups[0]["lr"] == 1e-3


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
    assert [span.phase for span in rt.trace.spans if span.category == "phase"][1:] == ["rollout", "train", "rollout"]
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


@pytest.mark.parametrize("next_phase", ["rollout", "train"])
def test_a_block_that_an_interrupt_kept_from_leaving_is_left_by_the_next_one(rt, monkeypatch, next_phase):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch, rt.rollout():
        patch.setattr(Turns, "end", interrupt)
    assert rt.phase is Phase.ROLLOUT
    with getattr(rt, next_phase)():
        assert rt.phase == next_phase
    assert rt.phase is Phase.IDLE and rt.engine.state is EngineState.PAUSED


@pytest.mark.parametrize("how", ["generate", "until"])
def test_a_training_that_an_interrupt_kept_from_leaving_is_left_by_a_generation(rt, monkeypatch, how):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch, rt.train():
        train_step(rt)
        patch.setattr(Turns, "end", interrupt)
    assert rt.phase is Phase.TRAIN
    (completion,) = rt.generate([[1]], **({"until": 1} if how == "until" else {}))
    assert completion.weights_version == rt.weights_version == 1
    assert rt.phase is Phase.IDLE and rt.engine.state is EngineState.PAUSED
    with rt.train(), pytest.raises(colo.PhaseError, match=r"generate\(\) inside train\(\)"):
        rt.generate([[1]])


@pytest.fixture
def moving():
    """A runtime whose trainer state leaves for every rollout."""
    rt = launch(offload="always")
    yield rt
    rt.close()


def add_state(rt, number=0):
    """Give the optimizer a tensor of state that it did not make; its bytes."""
    parameter = list(rt.model.parameters())[number]
    rt.optimizer.state[parameter]["mine"] = torch.ones(4096)
    return 4 * 4096


def state_bytes(rt):
    return rt.scheduler.segments[TRAINER_OPTIMIZER].size_bytes


def test_state_that_appears_outside_a_phase_leaves_for_the_next_rollout(moving):
    with moving.train():
        train_step(moving)
    before = state_bytes(moving)
    added = add_state(moving)
    with moving.rollout():
        assert residency(moving, TRAINER_OPTIMIZER) is Residency.OFFLOADED
        assert state_bytes(moving) == before + added


def test_state_that_appears_after_a_step_leaves_as_the_phase_ends(moving):
    with moving.train():
        train_step(moving)
        before = state_bytes(moving)
        added = add_state(moving)
    assert residency(moving, TRAINER_OPTIMIZER) is Residency.OFFLOADED
    assert state_bytes(moving) == before + added


def test_state_that_appears_after_a_rollout_is_counted_as_training_begins(moving):
    with moving.train():
        train_step(moving)
    with moving.rollout():
        before = state_bytes(moving)
    added = add_state(moving)
    with moving.train():
        assert state_bytes(moving) == before + added


def test_a_step_outside_train_may_follow_one_that_has_failed():
    with launch() as rt:
        rt.model(input_ids=IDS, labels=IDS).loss.backward()

        def stumble():
            raise RuntimeError("no loss today")

        for _ in range(2):
            with pytest.raises(RuntimeError, match="no loss today"):
                rt.optimizer.step(stumble)
        rt.optimizer.step()
        assert rt.weights_version == 1 and rt.phase is Phase.IDLE


def test_phases_are_recorded_with_what_they_worked_on_and_the_changes_between_them():
    with launch() as rt:
        for enter in (rt.rollout, rt.train):
            with enter():
                began_s = rt.trace.now_s()
            spans = {s.category: s for s in rt.trace.spans if s.category in ("phase", "switch")}
            assert spans["phase"].start_s <= began_s <= spans["phase"].end_s
        phases = [(s.phase, s.resource) for s in rt.trace.spans if s.category == "phase"]
        assert phases[-2:] == [(Phase.ROLLOUT, "engine"), (Phase.TRAIN, "device")]
        switches = [s.name for s in rt.trace.spans if s.category == "switch"]
        assert switches == ["switch to rollout", "switch to train", "switch from train"]


def test_a_phase_that_is_refused_for_what_an_engine_computes_is_left(monkeypatch):
    rt = launch(max_mismatch=1e-3)
    worse(monkeypatch, rt.engine)
    rt.generate(PROMPTS, max_tokens=2)
    with pytest.raises(StaleWeights, match="max_mismatch allows 0.001"), rt.train():
        pytest.fail("entered")
    assert rt.phase is Phase.IDLE
    assert rt.engine.weights_version is None
    with rt.train():
        train_step(rt)
    rt.close()


def test_weights_that_were_written_since_they_were_sampled_from_are_not_compared():
    with launch(max_mismatch=1e-3) as rt:
        rt.generate(PROMPTS, max_tokens=2)
        for parameter in rt.model.parameters():
            parameter.data.mul_(2)
        with rt.train():
            assert "mismatch_sampled" not in rt.trace.metrics


def test_parked_gradients_that_have_no_room_are_asked_for_again(full, monkeypatch):
    with full.train():
        train_step(full)
        full.model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [p.grad.clone() for p in full.model.parameters()]

    def roomless(segment):
        raise BudgetError("no room", needed_bytes=1, free_bytes=0)

    with monkeypatch.context() as patch:
        patch.setattr(ParameterGradients, "_arrive", roomless)
        with full.rollout():
            full.generate(PROMPTS, max_tokens=2)
        assert residency(full, TRAINER_GRADIENTS) is Residency.OFFLOADED
        with pytest.raises(BudgetError, match="no room"), full.train():
            pytest.fail("entered")
        assert full.phase is Phase.IDLE
    with full.train():
        assert all(torch.equal(p.grad, g) for p, g in zip(full.model.parameters(), gradients, strict=True))


def test_state_leaves_only_after_the_last_of_several_steps_on_one_rollout(full):
    def cycle(steps):
        with full.rollout():
            full.generate(PROMPTS, max_tokens=2)
        away = []
        for _ in range(steps):
            with full.train():
                train_step(full)
            full.scheduler.settle()
            away.append(residency(full, TRAINER_OPTIMIZER) is Residency.OFFLOADED)
        return away

    assert cycle(3) == [True, False, False], "one was expected"
    assert cycle(3) == [False, False, True], "as many as the last time"
    assert cycle(1) == [False]
    assert cycle(1) == [True]


def test_a_hook_that_enters_the_phase_which_is_being_entered_changes_nothing():
    with launch(mismatch_sequences=1) as rt:
        entered = []

        def to_train(*_):
            entered.append(rt.phase)
            rt.enter(Phase.TRAIN)

        rt.model.model.register_forward_pre_hook(to_train)  # of a module within, which the mismatch check calls too
        rt.enter(Phase.ROLLOUT)
        rt.generate(PROMPTS, max_tokens=2)
        rt.enter(Phase.TRAIN)
        assert entered and rt.phase is Phase.TRAIN
        rt.enter(None)


def test_hooks_of_the_model_do_not_see_the_mismatch_check():
    with launch(mismatch_sequences=1) as rt:
        calls = []
        rt.model.register_forward_hook(lambda *_: calls.append(1))
        rt.generate(PROMPTS, max_tokens=2)
        with rt.train():
            assert rt.trace.metrics["mismatch_sampled"] and not calls


def test_accumulation_steps_may_change():
    with launch() as rt:
        assert rt.accumulation_steps == 1
        rt.accumulation_steps = 4
        assert rt.accumulation_steps == 4
        with pytest.raises(ValueError, match="accumulation_steps must be at least 1"):
            rt.accumulation_steps = 0
