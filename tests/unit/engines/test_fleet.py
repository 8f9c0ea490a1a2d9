"""Several engines as one, with embedded engines: who gets what, who is out, and what a loss leaves."""

import gc
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.engine import EngineState
from colo.engines.fleet import _MOST_WAITING, PREFIX_TOKENS, Fleet
from colo.phases.phase import Residency
from colo.testing import check_engine
from colo.weights.transports.remote import RemoteSlices, SliceTarget
from tests.runtimes import adamw, make_engine, qwen3, train_step
from tests.unit.weights.transports.test_remote import Threads, travelled

PROMPTS = [[i, i + 1, i + 2] for i in range(1, 13)]
GREEDY = {"max_tokens": 4, "temperature": 0}


def same_weights(engine, model):
    mine = dict(model.named_parameters())
    held = engine.weights.hf_views()
    return all(torch.equal(held[name], mine[name]) for name in held if name in mine)


class Counted:
    """Notes the prompts of each call of an engine; `fail` is raised by the next call of `verb`."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.calls, self.threads, self.fail = engine, [], [], {}
        for verb in ("generate", "load_weights", "recover"):
            monkeypatch.setattr(engine, verb, self.wrapped(verb, getattr(engine, verb, lambda: None)), raising=False)

    def wrapped(self, verb, function):
        def call(*given, **named):
            if verb in self.fail:
                raise self.fail.pop(verb)
            if verb == "generate":
                self.calls.append([tuple(prompt) for prompt in given[0]])
                self.threads.append(threading.get_ident())
            return function(*given, **named)

        return call


class Tepid(type(make_engine())):
    """Samples at no temperature below 0.5, as vLLM at none below 0.01."""

    @classmethod
    def made(cls):
        engine = make_engine()
        engine.__class__ = cls
        return engine

    def sampling_temperature(self, params):
        found = super().sampling_temperature(params)
        return None if found is None else max(found, 0.5)

    def generate(self, prompts, params, **how):
        return super().generate(prompts, replace(params, temperature=self.sampling_temperature(params)), **how)


@pytest.fixture
def engines(monkeypatch):
    return [Counted(make_engine(), monkeypatch) for _ in range(3)]


@pytest.fixture
def rt(engines):
    model = AutoModelForCausalLM.from_config(qwen3())
    rt = colo.share([counted.engine for counted in engines], model, adamw(model.parameters()))
    yield rt
    rt.close()


def trained(rt):
    with rt.train():
        train_step(rt)


def test_a_fleet_is_an_engine():
    fleet = Fleet([make_engine(), make_engine()])
    assert isinstance(fleet, colo.engine.Engine)
    model = AutoModelForCausalLM.from_config(qwen3())
    fleet.load_weights(model.named_parameters())
    check_engine(fleet)


def test_what_is_no_engine_is_in_no_fleet(engines):
    model = AutoModelForCausalLM.from_config(qwen3())
    for given, words in ((["torch"], "'torch' is none"), ([engines[0].engine, model], "Qwen3ForCausalLM is none")):
        with pytest.raises(TypeError, match=f"a fleet is of engines, such as colo.connect.url. returns, and {words}"):
            colo.share(given, model, adamw(model.parameters()))
    with pytest.raises(TypeError, match="NoneType is none"):
        Fleet([engines[0].engine]).add(None)


def test_a_publication_reaches_all_and_prompts_are_spread_and_answered_as_by_one(rt, engines):
    for step in range(3):
        with rt.rollout():
            found = rt.generate(PROMPTS, n=2, **GREEDY)
            shares = [len(counted.calls[-1]) for counted in engines]
            alone = engines[0].engine.generate(PROMPTS, rt.engine.sampling_params(n=2, **GREEDY))
        assert all(same_weights(counted.engine, rt.model) for counted in engines)
        assert [(c.prompt_index, c.sample_index) for c in found] == [(i, j) for i in range(12) for j in range(2)]
        assert {c.weights_version for c in found} == {step} == {counted.engine.weights_version for counted in engines}
        assert shares == [4, 4, 4]
        assert [c.token_ids for c in found] == [c.token_ids for c in alone]
        trained(rt)
    assert len({thread for counted in engines for thread in counted.threads}) > 1
    assert "3 engines: transformers in this process" in str(rt.report())


@pytest.mark.parametrize("alike", [True, False])
def test_log_probabilities_are_compared_at_the_temperature_that_the_engines_sample_at(alike):
    model = AutoModelForCausalLM.from_config(qwen3())
    rt = colo.share([Tepid.made(), Tepid.made() if alike else make_engine()], model, adamw(model.parameters()))
    rt.generate(PROMPTS, max_tokens=4, temperature=0.1)
    with rt.train():
        found = rt.trace.metrics.get("mismatch_sampled")
        assert found[-1] < 1e-5 if alike else found is None
    rt.generate(PROMPTS, max_tokens=4)
    with rt.train():
        assert rt.trace.metrics["mismatch_sampled"][-1] < 1e-5
    rt.close()


def test_seeds_draw_the_same_whoever_draws_them(rt, engines):
    with rt.rollout():
        first = rt.generate(PROMPTS, n=2, max_tokens=4, seed=5)
    rt.engine.remove(engines[2].engine)
    with rt.rollout():
        second = rt.generate(PROMPTS, n=2, max_tokens=4, seed=5)
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert len({c.token_ids for c in first}) > 12
    engines[2].engine.close()


def test_prompts_of_one_prefix_go_together_while_nobody_waits_for_it(rt, engines):
    heads = [[head] * PREFIX_TOKENS for head in (1, 2, 3)]
    with rt.rollout():
        rt.generate([[*head, i] for i in range(1, 5) for head in heads], **GREEDY)
    assert sorted({prompt[0] for prompt in counted.calls[-1]} for counted in engines) == [{1}, {2}, {3}]
    with rt.rollout():
        rt.generate([[*heads[0], i] for i in range(1, 13)], **GREEDY)
    assert [len(counted.calls[-1]) for counted in engines] == [4, 4, 4]


def test_one_that_is_lost_leaves_and_the_others_sample_what_it_was_asked(rt, engines):
    engines[1].fail["generate"] = colo.EngineLost("its process has ended")
    with rt.rollout():
        found = rt.generate(PROMPTS, **GREEDY)
    assert [c.prompt_index for c in found] == list(range(12))
    assert rt.engine.out == {engines[1].engine: "its process has ended"}
    assert rt.engine.state is EngineState.PAUSED and "(out: its process has ended)" in rt.engine.placement
    trained(rt)
    with rt.rollout():
        assert {c.weights_version for c in rt.generate(PROMPTS, **GREEDY)} == {1}
    assert not same_weights(engines[1].engine, rt.model) and same_weights(engines[2].engine, rt.model)
    rt.engine.recover()
    with rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    assert rt.engine.out == {} and same_weights(engines[1].engine, rt.model)
    assert len(engines[1].calls[-1]) == 4


def test_one_that_has_ended_is_recovered_before_anything_is_asked_of_it(rt, engines, monkeypatch):
    with rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    with pytest.raises(colo.PhaseError, match="no engine of the fleet is lost: nothing to recover"):
        rt.engine.recover()
    ended = engines[1].engine
    ended._status.lose("killed")
    monkeypatch.setattr(ended, "recover", ended._status.revive)
    rt.engine.recover()
    with rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    assert rt.engine.out == {} and len(engines[1].calls[-1]) == 4


def test_one_that_did_not_take_a_version_samples_nothing_until_it_has_taken_a_later_one(rt, engines):
    with rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    engines[0].fail["load_weights"] = colo.TransferError("half of them")
    trained(rt)
    asked = len(engines[0].calls)
    with rt.rollout():
        found = rt.generate(PROMPTS, **GREEDY)
    assert len(found) == 12 and len(engines[0].calls) == asked
    assert rt.engine.out == {engines[0].engine: "it did not take the weights: half of them"}
    assert engines[0].engine.weights_version is None
    trained(rt)
    with rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    assert rt.engine.out == {} and len(engines[0].calls) == asked + 1


def test_where_none_takes_the_weights_or_all_are_lost_nothing_is_sampled_until_that_is_mended(rt, engines):
    for counted in engines:
        counted.fail["load_weights"] = colo.TransferError("not that one")
    trained(rt)
    with pytest.raises(colo.TransferError, match="not that one"), rt.rollout():
        pass
    with rt.rollout():
        assert len(rt.generate(PROMPTS, **GREEDY)) == 12
    for counted in engines:
        counted.fail["generate"] = colo.EngineLost("gone")
    with pytest.raises(colo.EngineLost, match="none of its engines is left"), rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    assert rt.engine.state is EngineState.LOST
    rt.recover()
    with rt.rollout():
        assert len(rt.generate(PROMPTS, **GREEDY)) == 12


def test_where_all_are_lost_another_takes_their_place(rt, engines):
    trained(rt)
    for counted in engines:
        counted.fail["generate"] = colo.EngineLost("gone")
    with pytest.raises(colo.EngineLost, match="none of its engines is left"), rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    rt.engine.add(make_engine())
    for counted in engines:
        rt.engine.remove(counted.engine)
        counted.engine.close()
    with rt.rollout():
        assert len(rt.generate(PROMPTS, **GREEDY)) == 12
    assert same_weights(*rt.engine.engines, rt.model)


@pytest.mark.parametrize("when", ["leaving", "coming back"])
def test_one_that_is_lost_while_its_memory_moves_leaves_and_comes_back_to_where_the_others_are(
    rt, engines, monkeypatch, when
):
    cache = engines[0].engine.segments[1]
    begin = cache.begin

    def lost(target):
        if (target is Residency.RESIDENT) is (when == "coming back"):
            raise colo.EngineLost("killed")
        return begin(target)

    monkeypatch.setattr(cache, "begin", lost)
    rt.engine.sleep("keep-weights")
    if when == "coming back":
        rt.engine.wake()
    assert rt.engine.out == {engines[0].engine: "killed"} and rt.engine.state is not EngineState.LOST
    monkeypatch.setattr(cache, "begin", begin)
    rt.engine.wake()
    with rt.rollout():
        assert len(rt.generate(PROMPTS, **GREEDY)) == 12
    rt.engine.sleep("keep-weights")
    rt.engine.recover()
    assert cache.residency is Residency.DISCARDED is rt.engine.segments[1].residency
    trained(rt)
    with rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    assert rt.engine.out == {} and [len(counted.calls[-1]) for counted in engines] == [4, 4, 4]


def test_one_that_refuses_for_a_reason_of_its_own_stops_no_other(rt, engines):
    trained(rt)
    engines[0].fail["load_weights"] = colo.Unsupported("it was started with other flags")
    with rt.rollout():
        assert len(rt.generate(PROMPTS, **GREEDY)) == 12
    assert rt.engine.out == {engines[0].engine: "it did not take the weights: it was started with other flags"}


def test_a_seed_of_numpys_draws_what_the_same_number_draws(rt):
    with rt.rollout():
        first, second = (rt.generate([[1, 2, 3]] * 4, max_tokens=4, seed=seed) for seed in (5, np.int64(5)))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert len({c.token_ids for c in first}) == 4


def test_one_that_joins_gets_the_present_weights_before_it_samples(rt, monkeypatch):
    trained(rt)
    with rt.rollout():
        rt.generate(PROMPTS, **GREEDY)
    late = Counted(make_engine(), monkeypatch)
    with rt.train():
        rt.engine.add(late.engine)
        assert late.engine.segments[1].residency is rt.engine.segments[1].residency
        assert late.engine.state is rt.engine.state
    with rt.rollout():
        found = rt.generate(PROMPTS, **GREEDY)
    assert same_weights(late.engine, rt.model) and len(late.calls[-1]) == 3
    assert {c.weights_version for c in found} == {1}


def test_memory_is_that_of_all_and_moves_together_or_not_at_all(rt, engines, monkeypatch):
    weights, cache = rt.engine.segments
    assert cache.size_bytes == sum(counted.engine.segments[1].size_bytes for counted in engines)
    rt.engine.sleep(1)
    assert {s.residency for counted in engines for s in counted.engine.segments} == {
        Residency.OFFLOADED,
        Residency.DISCARDED,
    }
    assert (weights.device_bytes, cache.device_bytes) == (0, 0) and weights.host_bytes >= weights.size_bytes
    last = engines[2].engine.segments[1]
    monkeypatch.setattr(
        last, "begin", lambda target: (_ for _ in ()).throw(colo.BudgetError("no room", needed_bytes=2, free_bytes=1))
    )
    with pytest.raises(colo.BudgetError, match="no room"):
        rt.engine.wake()
    assert cache.device_bytes == weights.device_bytes == 0
    monkeypatch.undo()
    rt.engine.wake()
    rt.engine.resume()
    assert rt.engine.state is EngineState.AWAKE


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        (lambda one: [], "needs an engine at least"),
        (lambda one: [one, one], "in the fleet already"),
        (lambda one: [one, make_engine(config=qwen3(vocab_size=96))], "not one model"),
    ],
)
def test_what_is_no_fleet_is_refused(engines, words):
    with pytest.raises(ValueError, match=words):
        Fleet(engines(make_engine()))


def test_an_engine_has_one_runtime_also_within_a_fleet(rt, engines):
    model = AutoModelForCausalLM.from_config(qwen3())
    for taken in (engines[1].engine, [engines[1].engine], (make_engine(), engines[1].engine)):
        with pytest.raises(colo.PhaseError, match="this engine has a runtime already"):
            colo.share(taken, model, adamw(model.parameters()))
    assert colo.Runtime.of(engines[1].engine) is rt


def test_misuse_is_refused_by_name(rt, engines):
    with pytest.raises(ValueError, match="in the fleet already"):
        rt.engine.add(engines[0].engine)
    with pytest.raises(ValueError, match="not in the fleet"):
        rt.engine.remove(make_engine())
    with pytest.raises(colo.PhaseError, match="nothing to recover"):
        rt.engine.recover()
    with pytest.raises(ValueError, match="outside the vocabulary"), rt.rollout():
        rt.generate([[1000]], **GREEDY)
    with rt.rollout():
        assert len(rt.generate(PROMPTS, **GREEDY)) == 12


def weights_of(rt, given, *, fail_after=None):
    """The model's weights, each noted as it is asked for."""
    for name, parameter in rt.model.named_parameters():
        if fail_after is not None and len(given) == fail_after:
            raise RuntimeError("a rank has gone")
        given.append(name)
        yield name, parameter


def test_weights_are_asked_for_as_the_slowest_engine_takes_them(rt, engines):
    """A trainer that makes whole weights of parts has few of them at a time."""
    given, most, slow = [], [], engines[1].engine
    load = slow.load_weights

    def take(weights):
        def slowly():
            for number, one in enumerate(weights):
                time.sleep(0.02)
                most.append(len(given) - number)
                yield one

        return load(slowly())

    slow.load_weights = take
    rt.engine.pause()
    rt.engine.load_weights(weights_of(rt, given))
    assert len(given) == len(most) > 10 and max(most) <= _MOST_WAITING + 2
    assert rt.engine.out == {}


def test_weights_that_end_early_leave_every_engine_out(rt, engines):
    rt.generate(PROMPTS, **GREEDY)
    rt.engine.pause()
    with pytest.raises(RuntimeError, match="a rank has gone"):
        rt.engine.load_weights(weights_of(rt, [], fail_after=5))
    assert rt.engine.weights_version is None and set(rt.engine.out) == {counted.engine for counted in engines}
    rt.generate(PROMPTS, **GREEDY)
    assert all(same_weights(counted.engine, rt.model) for counted in engines)


@pytest.mark.parametrize("at", [0, 3, None])
def test_an_interrupt_while_weights_are_loaded_keeps_no_thread(rt, engines, at):
    """In the middle, or as the last engine is waited for."""
    load, before = engines[1].engine.load_weights, set(threading.enumerate())

    def slowly(weights):
        load(weights)
        if at is None:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)

    def interrupting():
        for number, weight in enumerate(rt.model.named_parameters()):
            if number == at:
                raise KeyboardInterrupt
            yield weight

    engines[1].engine.load_weights = slowly
    rt.engine.pause()
    with pytest.raises(KeyboardInterrupt):
        rt.engine.load_weights(interrupting())
    assert rt.engine.weights_version is None and len(rt.engine.out) >= 1
    engines[1].engine.load_weights = load
    rt.generate(PROMPTS, **GREEDY)
    assert all(same_weights(counted.engine, rt.model) for counted in engines)
    deadline_s = time.monotonic() + 30
    while set(threading.enumerate()) - before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


# ---- slices, to engines that take them -------------------------------------------------------------------------------


class Taker(Threads):
    """A `SliceTaker` of an embedded engine."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.members = engine, id(engine)

    def taken(self, weights):
        for target in self.targets:
            target.let_go("asked anew")
        self.targets = [SliceTarget(self.engine.record_plan(weights), torch.device("cpu"))]
        return [[travelled(target.taken) for target in self.targets]]

    def begin(self):
        super().begin()
        self.engine.poison_for_load()


@pytest.fixture
def taking(monkeypatch):
    """Makes an engine one that is elsewhere, where it takes slices."""
    takers = []

    def make(engine):
        takers.append(Taker(engine))
        monkeypatch.setattr(engine, "slice_taker", takers[-1], raising=False)
        return engine

    yield make
    for target in (target for taker in takers for target in taker.targets):
        target.let_go("the test is over")
    takers.clear()
    gc.collect()  # a process that is forked from this one must not collect groups, whose threads it has not


@pytest.fixture
def far(engines, taking):
    for counted in engines:
        taking(counted.engine)
    model = AutoModelForCausalLM.from_config(qwen3())
    rt = colo.share([counted.engine for counted in engines], model, adamw(model.parameters()))
    yield rt
    rt.close()


def test_slices_reach_all_engines_that_take_them(far, engines):
    rt, whole = far, sum(p.nbytes for p in far.model.parameters())
    assert isinstance(rt.transport, RemoteSlices)
    for step in range(3):
        found = rt.generate(PROMPTS, **GREEDY)
        assert {c.weights_version for c in found} == {step} == {counted.engine.weights_version for counted in engines}
        assert all(same_weights(counted.engine, rt.model) for counted in engines)
        assert rt.publications[-1].num_bytes == 3 * whole
        trained(rt)


@pytest.mark.parametrize("verb", ["taken", "plan", "meet", "begin", "take", "sums"])
def test_one_that_is_lost_at_any_step_of_slices_leaves_and_the_others_get_them(far, engines, taking, monkeypatch, verb):
    rt, lost = far, engines[1].engine
    rt.generate(PROMPTS, **GREEDY)
    trained(rt)
    rt.transport.reconnect()  # so that every step is taken

    def die(*arguments):
        raise lost._status.lose("its process has ended")

    monkeypatch.setattr(lost.slice_taker, verb, die)
    assert {c.weights_version for c in rt.generate(PROMPTS, **GREEDY)} == {1}
    assert all(same_weights(counted.engine, rt.model) for counted in (engines[0], engines[2]))
    assert list(rt.engine.out) == [lost]
    other = taking(make_engine())
    rt.engine.add(other)
    trained(rt)
    assert {c.weights_version for c in rt.generate(PROMPTS, **GREEDY)} == {2} == {other.weights_version}
    assert same_weights(other, rt.model)


def test_where_all_that_take_slices_are_lost_nothing_is_sampled_until_another_has_come(
    far, engines, taking, monkeypatch
):
    rt = far
    rt.generate(PROMPTS, **GREEDY)
    trained(rt)
    for counted in engines:
        die = counted.engine._status.lose
        monkeypatch.setattr(counted.engine.slice_taker, "take", lambda die=die: (_ for _ in ()).throw(die("gone")))
    with pytest.raises(colo.EngineLost, match="all of its engines are"):
        rt.generate(PROMPTS, **GREEDY)
    rt.engine.add(taking(make_engine()))
    assert {c.weights_version for c in rt.generate(PROMPTS, **GREEDY)} == {1}


def test_one_that_takes_whole_weights_does_not_join_those_that_take_slices(far):
    rt, other = far, make_engine()
    rt.generate(PROMPTS, **GREEDY)
    rt.engine.add(other)
    with pytest.raises(colo.Unsupported, match="takes whole weights only, and the others of the fleet are sent slices"):
        rt.generate(PROMPTS, **GREEDY)
    rt.engine.remove(other)
    assert {c.weights_version for c in rt.generate(PROMPTS, **GREEDY)} == {0}
    other.close()
