"""Rollouts beside training: which version each token is of, what goes on beside what, and what a failure leaves."""

import copy
import itertools
import os
import signal
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.engine import EngineState, replace
from colo.engines.base import EngineBase
from colo.errors import EngineLost, PhaseError, StaleWeights, Unsupported
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, FixedSegment, Phase, Residency
from colo.runtime import carried
from colo.runtime.turns import NOT_BESIDE, Turn, Verb
from tests.runtimes import PROMPTS, adamw, launch, make_engine, qwen3, train_step
from tests.unit.runtime.test_carried import recomputed, sampled_at

MANY = {"n": 2, "max_tokens": 40}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(carried, "ROUND_TOKENS", 4)


class Remote(EngineBase):
    """An embedded engine that says that it has nothing of the trainer's device."""

    name, placement = "remote", "elsewhere"

    def __init__(self):
        segments = [FixedSegment(name, 0, Residency.RESIDENT) for name in (ENGINE_WEIGHTS, ENGINE_KV_CACHE)]
        super().__init__(torch.device("cpu"), segments)
        self.inner = make_engine()
        self.model_type, self.vocab_size = self.inner.model_type, self.inner.vocab_size
        self.fail, self.calls, self.delay_s = None, [], 0.0
        self.beside, self.is_held_back = lambda: None, lambda: False

    def load_weights(self, weights):
        self.poison_for_load()
        self.calls.append("load")
        self.inner.load_weights(weights)

    def commit(self, version):
        super().commit(version)
        self.inner.commit(version)

    def generate(self, prompts, params, *, adapter=None):
        version = self.ready()
        failure, self.fail = self.fail, None
        if failure is not None:
            raise failure
        self.calls.append("generate")
        self.beside()
        wait_until(lambda: not self.is_held_back())
        time.sleep(self.delay_s)
        self.inner.resume()
        found = [replace(c, weights_version=version) for c in self.inner.generate(prompts, params)]
        assert self.weights_version in (version, None)  # nothing was published meanwhile
        return found


def after(count, act):
    """Make `act` what the next call but `count` does, and only that."""
    calls = itertools.count()
    return lambda: act() if next(calls) == count else None


def wait_until(condition):
    deadline_s = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert condition()


@pytest.fixture
def rt():
    model = AutoModelForCausalLM.from_config(qwen3())
    with colo.share(Remote(), model, adamw(model.parameters())) as rt:
        yield rt


def test_every_token_is_of_one_version_and_has_its_log_probability(rt):
    twins, done = {0: copy.deepcopy(rt.model).eval()}, []
    rt.engine.delay_s = 0.01
    with rt.async_rollout() as rollout:
        rt.engine.is_held_back = lambda: (  # the first prompts have not ended when weights change
            rt.engine.calls.count("generate") > 3 and rt.engine.weights_version == 0 and not rollout._is_held
        )
        rollout.put(PROMPTS, keys=["a", "b", "c"], **MANY)
        for step in range(1, 5):
            with rt.train():
                train_step(rt)
            wait_until(lambda: rt.engine.calls.count("generate") > 3)
            twins[step] = copy.deepcopy(rt.model).eval()
            done += rollout.take(1)
            rollout.put([[step, 5]], keys=[step], **MANY)
        done += rollout.take(rollout.num_under_way)
    assert [(c.key, c.sample_index) for c in done] == [(k, i) for k in ("a", "b", "c", 1, 2, 3, 4) for i in (0, 1)]
    assert {len(c.spans) > 1 for c in done} == {True, False}  # some went on while weights changed
    for completion in done:
        assert sum(count for _, count in completion.spans) == len(completion.token_ids) == 40
        for version, _ in completion.spans:
            found = recomputed(twins[version], completion, version)
            assert found == pytest.approx(sampled_at(completion, version), abs=1e-4)
    assert rt.report().facts["carried"] and rt.engine.state is EngineState.PAUSED


def test_the_engine_samples_while_the_trainer_works_and_not_while_weights_change(rt):
    rt.engine.delay_s = 0.02
    may_go_on = threading.Event()
    rt.engine.is_held_back = lambda: not may_go_on.is_set()
    with rt.async_rollout() as rollout:
        rollout.put(PROMPTS, **MANY)
        with rt.train():
            before = len(rt.engine.calls)
            may_go_on.set()
            wait_until(lambda: len(rt.engine.calls) >= before + 3)
            train_step(rt)
        assert rt.engine.weights_version == 0 and rt.weights_version == 1
        rollout.take(3)
        assert rt.engine.weights_version == 1
    assert rt.engine.calls.count("load") == 2


def test_no_token_is_older_than_allowed(rt):
    rt.engine.delay_s = 0.01
    ages = []
    with rt.async_rollout(max_age=1) as rollout:
        rollout.put(PROMPTS, **MANY)
        for step in range(6):
            with rt.train():
                train_step(rt)
            done = rollout.take(1) if step % 2 else []
            ages += [rt.engine.weights_version - version for c in done for version in c.token_versions]
            rollout.put([[step + 1, 2]] * (len(done) // 2), **MANY)
    assert set(ages) <= {0, 1} and ages


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), FloatingPointError("NaN"), EngineLost("gone")])
def test_what_sampling_raises_is_told_once_and_sampling_goes_on(rt, error):
    with rt.async_rollout() as rollout:
        rt.engine.fail = error
        rollout.put(PROMPTS, **MANY)
        with pytest.raises(type(error), match=str(error)):
            rollout.take(3)
        assert rollout.num_under_way == 3
        assert len(rollout.take(3)) == 6


def test_an_engine_that_is_found_stale_is_published_to_again(rt):
    """Such as a fleet that has taken another engine in."""
    with rt.async_rollout() as rollout:
        rollout.put(PROMPTS, **MANY)
        rt.engine.delay_s = 0.01
        for when in ("before", "beside"):
            if when == "before":
                rt.engine.poison("another engine has joined")
            else:
                rt.engine.beside = after(3, lambda: rt.engine.poison("another engine has joined"))
            assert len(rollout.take(1)) == 2
            rollout.put(PROMPTS, **MANY)
        rollout.take(rollout.num_under_way)
        rt.engine.generate = lambda *given, **named: (_ for _ in ()).throw(StaleWeights("always stale"))
        rollout.put(PROMPTS, **MANY)
        with pytest.raises(StaleWeights, match="always stale"):
            rollout.take(1)
        del rt.engine.generate
        assert len(rollout.take(1)) == 2


def test_an_interrupt_ends_the_wait_and_keeps_what_is_under_way(rt):
    rt.engine.delay_s = 0.02
    with pytest.raises(KeyboardInterrupt), rt.async_rollout() as rollout:
        rt.engine.beside = after(3, lambda: os.kill(os.getpid(), signal.SIGINT))
        rollout.put(PROMPTS, max_tokens=100)
        rollout.take(3)
    assert rt.engine.state is EngineState.PAUSED and any(c.token_ids for c in rt.carried)
    assert len(rt.generate([], until=1.0)) == 3


def test_a_publication_that_fails_is_told_and_the_next_one_goes_on(rt):
    rt.engine.delay_s = 0.01
    load = rt.engine.load_weights
    with rt.async_rollout() as rollout:
        rollout.put(PROMPTS, **MANY)
        with rt.train():
            train_step(rt)

        def fail(weights):
            rt.engine.load_weights = load
            rt.engine.poison_for_load()
            raise RuntimeError("the wire is cut")

        rt.engine.load_weights = fail
        with pytest.raises(RuntimeError, match="the wire is cut"):
            rollout.take(1)
        done = rollout.take(3)
    assert len(done) == 6 and {c.weights_version for c in done} <= {0, 1} and rt.engine.weights_version == 1


def test_what_is_under_way_goes_on_after_the_block(rt):
    with rt.async_rollout() as rollout:
        rollout.put(PROMPTS, max_tokens=100)
        while not any(c.token_ids for c in rt.carried):
            time.sleep(0.001)
    threads = [thread.name for thread in threading.enumerate()]
    assert "colo-rollout" not in threads and rt.engine.state is EngineState.PAUSED
    begun = {c.prompt_index: c.token_ids for c in rt.carried}
    done = rt.generate([], until=1.0)
    assert [c.token_ids[: len(begun[c.prompt_index])] for c in done] == list(begun.values())
    assert [len(c.token_ids) for c in done] == [100] * 3 and rt.carried == []
    with rt.async_rollout() as rollout:
        rollout.put(PROMPTS[:1], max_tokens=4)
        assert len(rollout.take()) == 1


def test_other_rollouts_wait_until_the_block_has_ended(rt):
    rollout = rt.async_rollout()
    for verb in (lambda: rollout.put(PROMPTS, **MANY), rollout.take):
        with pytest.raises(PhaseError, match="used within its block"):
            verb()
    with rollout:
        for refused in (rt.rollout().__enter__, lambda: rt.generate(PROMPTS), rt.recover, rt.async_rollout().__enter__):
            with pytest.raises(PhaseError, match="while an async_rollout\\(\\) samples: take\\(\\) from that"):
                refused()
        with rt.train(), pytest.raises(PhaseError, match=r"put\(\) or take\(\) inside train\(\)"):
            rollout.put(PROMPTS, **MANY)
        with pytest.raises(ValueError, match=r"take\(1\) with 0 prompts under way would wait for ever"):
            rollout.take()
        with pytest.raises(ValueError, match="keys has 1 for 3 prompts"):
            rollout.put(PROMPTS, keys=iter([1]), **MANY)
        with pytest.raises(ValueError, match="the remote engine does not take presence_penalty"):
            rollout.put(PROMPTS, presence_penalty=0.5, **MANY)
        assert rollout.num_under_way == 0
    with rt.rollout(), pytest.raises(PhaseError, match=r"rollout\(\) inside rollout\(\)"):
        rt.async_rollout().__enter__()
    with rt.rollout():
        assert len(rt.generate(PROMPTS, max_tokens=2)) == 3


@pytest.mark.parametrize("count", [0.5, 1.0, True, None, "1", timedelta(seconds=1), np.float64(1), 0, -1])
def test_what_is_no_number_of_prompts_is_refused_before_anything_is_published(rt, count):
    with rt.async_rollout(max_age=np.int64(4)) as rollout:
        rollout.put(PROMPTS, **MANY)
        with rt.train():
            train_step(rt)
        published = rt.engine.calls.count("load")
        too_few = count in (0, -1)
        words = "at least 1, but is" if too_few else "a whole number of prompts, not"
        with pytest.raises(ValueError if too_few else TypeError, match=f"count must be {words}"):
            rollout.take(count)
        assert rt.engine.calls.count("load") == published
        assert len(rollout.take(np.int64(3))) == 6


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("turn", [Turn.IDLE, Turn.TRAIN])
def test_a_verb_is_allowed_or_refused_beside_it(rt, verb, turn):
    calls = {
        Verb.ROLLOUT: lambda: rt.rollout().__enter__(),
        Verb.TRAIN: lambda: rt.train().__enter__(),
        Verb.LEAVE: lambda: rt.enter(None),
        Verb.GENERATE: lambda: rt.generate(PROMPTS, max_tokens=2),
        Verb.BACKWARD: lambda: rt.model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward(),
        Verb.STEP: lambda: train_step(rt),
        Verb.PARK: lambda: rt.park(torch.nn.Linear(2, 2)),
        Verb.RECOVER: rt.recover,
        Verb.CLOSE: rt.close,
    }
    with rt.async_rollout() as rollout:
        rollout.put(PROMPTS, **MANY)
        rt.enter(Phase.TRAIN if turn is Turn.TRAIN else None)
        is_refused = verb in NOT_BESIDE or (verb is Verb.TRAIN and turn is Turn.TRAIN)
        with pytest.raises(PhaseError) if is_refused else nullcontext():
            calls[verb]()
        if verb is not Verb.CLOSE:
            rt.enter(None)
            assert len(rollout.take(3)) == 6


def test_a_runtime_that_closes_ends_it(rt):
    rt.engine.delay_s = 0.01
    with rt.async_rollout() as rollout:
        rollout.put(PROMPTS, **MANY)
        rt.close()
        with pytest.raises(PhaseError, match="used within its block"):
            rollout.take()
    assert rt.engine.state is EngineState.CLOSED


def test_an_engine_on_the_trainers_device_takes_turns():
    with launch() as rt, pytest.raises(Unsupported, match=r"has \S+ \S+ of the trainer's device \(engine.weights"):
        rt.async_rollout()
    with pytest.raises(ValueError, match="max_age must be a whole number"), launch() as rt:
        rt.async_rollout(max_age=-1)


def interrupt_in(monkeypatch, owner, name):
    """Make one call of a function end in Ctrl-C."""
    function = getattr(owner, name)

    def interrupted(*given, **named):
        monkeypatch.setattr(owner, name, function)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("where", ["resume", "start", "join"])
def test_an_interrupt_on_the_way_in_or_out_leaves_a_runtime_that_goes_on(rt, monkeypatch, where):
    with rt.train():
        train_step(rt)
    owner = rt.engine if where == "resume" else threading.Thread
    rollout = rt.async_rollout()
    with pytest.raises(KeyboardInterrupt):
        if where != "join":
            interrupt_in(monkeypatch, owner, where)
        with rollout:
            rollout.put(PROMPTS, **MANY)
            interrupt_in(monkeypatch, owner, where)
    assert len(rt.generate(PROMPTS, max_tokens=4)) == 3
    assert rt.engine.state is EngineState.PAUSED
    with pytest.raises(PhaseError, match="has begun before: call rt.async_rollout"):
        rollout.__enter__()
    with rt.async_rollout() as again:
        with pytest.raises(PhaseError, match="has begun before: call rt.async_rollout"):
            again.__enter__()
        again.put(PROMPTS, **MANY)
        assert len(again.take(3)) == 6


def test_an_engine_that_was_left_paused_goes_on_with_the_next_call(rt, monkeypatch):
    with rt.async_rollout() as rollout:
        rollout.put(PROMPTS, **MANY)
        with rt.train():
            train_step(rt)
        resume = rt.engine.resume

        def fail():
            rt.engine.resume = resume
            raise RuntimeError("no answer")

        rt.engine.resume = fail
        with pytest.raises(RuntimeError, match="no answer"):
            rollout.take(1)
        assert len(rollout.take(3)) == 6


def test_what_fails_and_nobody_takes_is_in_the_log(rt, caplog):
    with rt.async_rollout() as rollout:
        rt.engine.fail = RuntimeError("out of luck")
        rollout.put(PROMPTS, **MANY)
        while rollout._error is None:
            time.sleep(0.001)
    assert "has failed: RuntimeError: out of luck" in caplog.text
