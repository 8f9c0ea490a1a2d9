"""A child that was forked from a runtime's process: every call ends at once, and leaving a block does nothing."""

import gc
import os
import signal
import threading
import time

import pytest
import torch

import colo
from colo.errors import PhaseError
from colo.phases.phase import Phase
from tests import forked
from tests.runtimes import ALWAYS, launch, train_step

MESSAGE = "PhaseError: the runtime belongs to process"


@pytest.fixture
def rt():
    """A runtime whose trainer state leaves for every rollout."""
    rt = launch(config=ALWAYS)
    with rt.train():
        train_step(rt)
    yield rt
    rt.close()


def backward(rt):
    ids = torch.tensor([[1, 2, 3]])
    rt.model(input_ids=ids, labels=ids).loss.backward()


CALLS = {
    "rollout": lambda rt: rt.rollout().__enter__(),
    "train": lambda rt: rt.train().__enter__(),
    "a block made before": lambda rt: rt.made_before.__enter__(),
    "with": lambda rt: rt.__enter__(),
    "enter": lambda rt: rt.enter(Phase.ROLLOUT),
    "enter none": lambda rt: rt.enter(None),
    "generate": lambda rt: rt.generate([[1, 2]]),
    "the engine's generate": lambda rt: rt.engine.generate([[1, 2]], rt.engine.sampling_params(max_tokens=1)),
    "recover": lambda rt: rt.recover(),
    "log": lambda rt: rt.log(reward=1.0),
    "report": lambda rt: rt.report(),
    "plot": lambda rt: rt.plot("run.html"),
    "close": lambda rt: rt.close(),
    "at_close": lambda rt: rt.at_close(print),
    "backward": backward,
    "step": lambda rt: rt.optimizer.step(),
}


OF_THE_ENGINE = {
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "sleep": lambda engine: engine.sleep(1),
    "wake": lambda engine: engine.wake(),
    "commit": lambda engine: engine.commit(7),
    "load_weights": lambda engine: engine.load_weights([]),
    "record_plan": lambda engine: engine.record_plan({}),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize("call", OF_THE_ENGINE.values(), ids=OF_THE_ENGINE)
def test_every_call_of_the_engine_is_refused_too(rt, call):
    told = forked.start(lambda: call(rt.engine))()
    assert str(told).startswith("PhaseError: the engine belongs to process"), told
    assert len(rt.generate([[1, 2]], n=2, max_tokens=2)) == 2


SETS_UP_ANOTHER = {
    "check": lambda rt: colo.check(rt),
    "share": lambda rt: colo.share(rt.engine, rt.model, rt.optimizer),
    "accumulation_steps": lambda rt: setattr(rt, "accumulation_steps", 2),
}


@pytest.mark.parametrize("call", SETS_UP_ANOTHER.values(), ids=SETS_UP_ANOTHER)
def test_what_takes_the_runtimes_parts_is_refused_in_a_child(rt, call):
    assert str(forked.start(lambda: call(rt))()).startswith("PhaseError: ")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("within", ["nothing", "rollout", "train"])
def test_every_call_in_a_child_is_refused_at_once(rt, call, within):
    rt.made_before = rt.train()
    if within != "nothing":
        rt.enter(Phase(within))
    started_s = time.monotonic()
    told = forked.start(lambda: call(rt))()
    assert time.monotonic() - started_s < 10
    assert str(told).startswith(MESSAGE), told
    rt.enter(None)
    assert len(rt.generate([[1, 2]], n=2, max_tokens=2)) == 2


@pytest.mark.parametrize("verb", ["rollout", "train"])
def test_a_child_that_leaves_a_block_by_an_exit_ends_and_leaves_the_parents_alone(rt, verb):
    with getattr(rt, verb)():
        child = os.fork()
        if not child:
            try:
                try:
                    with rt, getattr(rt, verb)():
                        os._exit(3)  # not reached: entering is refused
                except PhaseError:
                    raise SystemExit(0) from None
            finally:
                rt._turns.end(rt._turns._block, None)
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert rt.phase == verb
    assert len(rt.generate([[1, 2]], max_tokens=2)) == 1


def test_a_child_of_a_block_that_its_fork_was_made_within_leaves_it_for_nothing(rt):
    block = rt.rollout()
    with block:
        told = forked.start(lambda: (block.__exit__(None, None, None), rt._turns.phase)[1])()
        assert told is Phase.ROLLOUT, "it was not left there either"
    assert rt.phase is Phase.IDLE


def test_a_lock_that_another_thread_held_as_the_child_was_forked_holds_up_nothing(rt):
    held, go_on = threading.Event(), threading.Event()

    def hold():
        with rt._turns.lock:
            held.set()
            go_on.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    try:
        for call in (CALLS["generate"], CALLS["rollout"], CALLS["close"]):
            assert forked.start(lambda call=call: call(rt))().startswith(MESSAGE)
    finally:
        go_on.set()
        thread.join()


def test_a_child_in_which_the_runtime_is_collected_ends_no_engine():
    rt = launch()
    closed = []
    rt.engine.close = lambda: closed.append(os.getpid())
    held = [rt]

    def drop():
        nonlocal rt
        del rt
        held.clear()
        gc.collect()
        return closed

    assert forked.start(drop)() == []
    del rt.engine.close
    rt.close()


@pytest.mark.usefixtures("interrupts_raise")
def test_an_interrupt_in_a_child_is_its_own(rt):
    def interrupted():
        try:
            with rt.rollout():
                pass
        except PhaseError:
            os.kill(os.getpid(), signal.SIGINT)

    def run():
        try:
            interrupted()
        except KeyboardInterrupt:
            return "interrupted"

    assert forked.start(run)() == "interrupted"
