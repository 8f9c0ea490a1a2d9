"""What goes wrong in a phase: no room, interrupts, an engine that is lost, threads, errors within errors."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.config import Offload, RuntimeConfig
from colo.engine import EngineState
from colo.engines.torch import TorchEngine
from colo.engines.vllm.processes import Caller
from colo.errors import EngineLost, PhaseError, TransferError
from colo.memory.offload import Mover
from colo.memory.region import ResizedRegion
from colo.phases.phase import Phase, Residency
from colo.runtime.turns import Turn
from colo.trainer.gradients import ParameterGradients
from colo.units import MIB
from tests.runtimes import qwen3

CONFIG = qwen3()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.fixture
def rt():
    """All of the trainer's state, gradients too, leaves for every rollout."""
    rt = colo.launch(CONFIG, optimizer=sgd, config=RuntimeConfig(kv_cache_bytes=MIB, offload="always"), device="cpu")
    yield rt
    rt.close()


@pytest.fixture
def twin(rt):
    """The same model and optimizer without colo."""
    model = AutoModelForCausalLM.from_config(CONFIG)
    model.load_state_dict(rt.model.state_dict())
    return model, sgd(model.parameters())


def generate(rt):
    return rt.generate([[1, 2, 3]], max_tokens=2)


def backward(model, number=0):
    ids = torch.tensor([[number, 2, 3, 4, 5]])
    model(input_ids=ids, labels=ids).loss.backward()


def plain_step(model, optimizer, number):
    """As loops without phases do: what is there is zeroed first."""
    optimizer.zero_grad()
    backward(model, number)
    optimizer.step()


def assert_same(rt, twin):
    assert all(torch.equal(a, b) for a, b in zip(rt.model.parameters(), twin[0].parameters(), strict=True))


@pytest.mark.usefixtures("interrupts_raise")
@pytest.mark.parametrize("name", ["engine.kv_cache", "trainer.optimizer"])
@pytest.mark.parametrize("change", ["_release", "_restore"])
def test_an_interrupt_as_memory_goes_or_comes_leaves_a_runtime_that_works(rt, twin, name, change, monkeypatch):
    original = getattr(ResizedRegion, change)
    armed = False

    def interrupted(region):
        nonlocal armed
        original(region)
        if armed and region.name == name:
            armed = False
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ResizedRegion, change, interrupted)
    for number in range(4):
        armed = number == 1
        try:
            with rt.rollout():
                generate(rt)
            with rt.train():
                pass
        except KeyboardInterrupt:
            assert number == 1
        for model, optimizer in ((rt.model, rt.optimizer), twin):
            try:
                plain_step(model, optimizer, number)
            except KeyboardInterrupt:
                assert number == 1
                optimizer.step()  # it was interrupted before anything had been added
    assert not armed
    assert len(generate(rt)) == 1
    assert_same(rt, twin)


@pytest.mark.parametrize("moment", ["pause", "resume"])
def test_gradients_are_back_when_the_engine_is_lost_at_an_end_of_a_rollout(rt, twin, moment, monkeypatch):
    """On the way out, and on the way in once gradients have left."""
    original, state = getattr(TorchEngine, moment), TorchEngine.state
    armed = lost = False

    def die(engine):
        nonlocal lost
        if armed and not lost:
            lost = True
            raise EngineLost("its process has ended")
        return original(engine)

    monkeypatch.setattr(TorchEngine, moment, die)
    monkeypatch.setattr(TorchEngine, "state", property(lambda e: EngineState.LOST if lost else state.fget(e)))
    for number in range(3):
        armed, lost = number == 1, False
        try:
            with rt.rollout():
                generate(rt)
        except EngineLost:
            assert (number, moment) == (1, "resume")
        assert rt.phase is Phase.IDLE
        assert lost is armed
        assert rt.scheduler.segments["trainer.gradients"].residency is not Residency.OFFLOADED
        for model, optimizer in ((rt.model, rt.optimizer), twin):
            plain_step(model, optimizer, number)
        lost = False
    assert_same(rt, twin)


class Mine(Exception):
    """A user's own."""


@pytest.mark.parametrize("error", [TransferError("requests hold blocks"), RuntimeError("something")])
def test_an_error_of_yours_is_raised_though_the_rollout_cannot_be_left_in_order(rt, error, monkeypatch):
    with rt.train():
        backward(rt.model)

    def fail(segment):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ParameterGradients, "_arrive", fail)
        with pytest.raises(Mine) as raised, rt.rollout():
            raise Mine
        assert str(error) in raised.value.__notes__[0]
        with pytest.raises(type(error)), rt.rollout():
            pass
    with rt.rollout():
        generate(rt)
    assert all(p.grad is not None for p in rt.model.parameters())


def test_a_train_block_waits_for_threads_that_still_generate(rt, monkeypatch):
    original = TorchEngine.generate
    running = []

    def slow(engine, *arguments, **options):
        running.append(None)
        assert rt.phase is Phase.ROLLOUT
        found = original(engine, *arguments, **options)
        assert rt.phase is Phase.ROLLOUT
        running.pop()
        return found

    monkeypatch.setattr(TorchEngine, "generate", slow)
    with ThreadPoolExecutor(4) as pool:
        with pytest.raises(Mine), rt.rollout():
            calls = [pool.submit(generate, rt) for _ in range(4)]
            raise Mine
        for number in range(3):
            with rt.train():
                assert not running
                plain_step(rt.model, rt.optimizer, number)
        found = [call.exception() or call.result() for call in calls]
    assert all(isinstance(one, (list, PhaseError)) for one in found)


@pytest.mark.usefixtures("interrupts_raise")
def test_an_interrupt_while_a_rollout_waits_for_threads_leaves_it_all_the_same(rt, monkeypatch):
    original, started, go_on = TorchEngine.generate, threading.Event(), threading.Event()

    def slow(engine, *arguments, **options):
        found = original(engine, *arguments, **options)
        started.set()
        go_on.wait(20)
        return found

    try:
        with ThreadPoolExecutor(1) as pool:
            with monkeypatch.context() as patch:
                patch.setattr(TorchEngine, "generate", slow)
                with pytest.raises(KeyboardInterrupt), rt.rollout():
                    call = pool.submit(generate, rt)
                    assert started.wait(20)
                    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            go_on.set()
            assert len(call.result()) == 1
    finally:
        go_on.set()
    with rt.train():
        backward(rt.model)
    assert len(generate(rt)) == 1


@pytest.fixture
def tight():
    """A runtime where weights and KV cache fit, but not beside the optimizer's state, which has to stay."""
    model_bytes = sum(p.nbytes for p in AutoModelForCausalLM.from_config(CONFIG).parameters())
    config = RuntimeConfig(
        kv_cache_bytes=3 * model_bytes, device_limit_bytes=int(4.5 * model_bytes), offload=Offload.NEVER
    )
    runtime = colo.launch(
        CONFIG,
        optimizer=lambda params: torch.optim.RMSprop(
            params, lr=1e-4, momentum=0.9
        ),  # whose state colo does not foresee
        config=config,
        device="cpu",
    )
    yield runtime
    runtime.close()


def test_a_rollout_that_does_not_fit_is_refused_before_weights_are_published(tight):
    with tight.train():
        ids = torch.tensor([[1, 2, 3, 4]])
        tight.model(input_ids=ids, labels=ids).loss.backward()
        tight.optimizer.step()
    before = tight.publications
    with pytest.raises(colo.BudgetError, match="phase rollout needs"):
        with tight.rollout():
            pytest.fail("entered")
    assert tight.publications == before
    assert tight.engine.weights_version == 0

    tight.scheduler.offload = Offload.AUTO
    with tight.rollout():
        assert [publication.version for publication in tight.publications] == [0, 1]


def losing(rt, monkeypatch):
    """Has the engine lost what it held; `recover` then gives it memory that says nothing."""
    recovered = []

    def recover():
        for memory in rt.engine.weights.parameters.values():
            memory.fill_(float("nan"))
        recovered.append(rt.engine)

    state = TorchEngine.state
    monkeypatch.setattr(rt.engine, "recover", recover, raising=False)  # its class would be remembered as `Recovers`
    monkeypatch.setattr(TorchEngine, "state", property(lambda e: state.fget(e) if recovered else EngineState.LOST))
    return recovered


def test_a_recovered_engine_has_the_weights_and_is_told_what_it_has_forgotten(monkeypatch):
    config = RuntimeConfig(kv_cache_bytes=MIB, weights="copy")
    with colo.launch(CONFIG, optimizer=sgd, config=config, device="cpu") as rt:
        expected = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)
        told = []
        monkeypatch.setattr(rt.transport, "reconnect", lambda: told.append(rt.transport))
        recovered = losing(rt, monkeypatch)
        rt.recover()
        assert recovered == [rt.engine] and told == [rt.transport]
        assert len(rt.publications) == 2
        found = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)
        assert [(c.token_ids, c.weights_version) for c in found] == [(c.token_ids, 0) for c in expected]


def test_an_engine_that_is_never_lost_is_not_started_again():
    with (
        colo.launch(CONFIG, optimizer=sgd, config=RuntimeConfig(kv_cache_bytes=MIB), device="cpu") as rt,
        pytest.raises(colo.PhaseError, match="the torch engine cannot be started again from here: nothing to recover"),
    ):
        rt.recover()


def test_an_engine_whose_cache_has_no_room_is_not_started_again(tight, monkeypatch):
    with tight.train():
        backward(tight.model)
        tight.optimizer.step()
    recovered = losing(tight, monkeypatch)
    with pytest.raises(colo.BudgetError, match="phase rollout needs"):
        tight.recover()
    assert recovered == []
    monkeypatch.undo()


def test_closing_goes_on_past_errors_and_raises_the_first(monkeypatch):
    rt = colo.launch(CONFIG, optimizer=sgd, config=RuntimeConfig(kv_cache_bytes=MIB), device="cpu")

    def fail(error):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(rt.transport, "close", lambda: fail(ValueError("first")))
        patch.setattr(rt.engine.mover, "close", lambda: fail(RuntimeError("second")))
        with pytest.raises(ValueError, match="first"):
            rt.close()
    assert rt.engine.state is EngineState.CLOSED
    rt.close()


def test_the_cache_goes_before_the_state_comes_home(monkeypatch):
    model = AutoModelForCausalLM.from_config(CONFIG)
    engine = TorchEngine(
        CONFIG, device="cpu", dtype=torch.float32, kv_cache_bytes=MIB, mover=Mover(torch.device("cpu"))
    )
    rt = colo.share(engine, model, sgd(model.parameters()), config=RuntimeConfig(offload=Offload.ALWAYS))
    with rt.train():
        backward(model)
        rt.optimizer.step()
        rt.optimizer.zero_grad()
    generate(rt)
    with rt.train():  # the state is in a region from here on
        rt.scheduler.require("trainer.optimizer")
    generate(rt)
    order = []
    for change in ("_release", "_restore"):
        original = getattr(ResizedRegion, change)

        def noted(region, change=change, original=original):
            order.append((change, region.name))
            original(region)

        monkeypatch.setattr(ResizedRegion, change, noted)
    rt.close()
    assert order.index(("_release", "engine.kv_cache")) < order.index(("_restore", "trainer.optimizer"))


CALLS = ("reset_prefix_cache", "resume", "pause", "commit", "close")


@pytest.mark.usefixtures("interrupts_raise")
class TestASilentEngine:
    """An engine in another process that neither answers nor ends, while Ctrl-C is pressed."""

    @pytest.fixture
    def silent(self, rt):
        """Makes calls of the engine wait for an answer that does not come, and answer again when none is named.

        Whoever waits for them presses Ctrl-C as it looks whether they go on, twice.
        """
        answer, are_silent, presses = threading.Event(), set(), []

        def press():
            if presses:
                signal.raise_signal(presses.pop())
            return ()

        caller = Caller(press)

        def call_of(name):
            original = getattr(rt.engine, name)

            def call(*given):
                return caller.call(answer.wait, deadline_s=300.0) if name in are_silent else original(*given)

            return call

        def silence(*names):
            are_silent.clear()
            are_silent.update(names)
            presses[:] = [signal.SIGINT] * 2 if names else []

        vars(rt.engine).update({name: call_of(name) for name in CALLS})
        yield silence
        answer.set()
        silence()
        caller.close()

    @pytest.mark.parametrize(("verb", "call"), [("rollout", "reset_prefix_cache"), ("rollout", "resume")])
    def test_the_second_interrupt_gets_through_as_a_rollout_is_entered(self, rt, twin, silent, verb, call):
        plain_step(*twin, 0)
        with rt.train():
            plain_step(rt.model, rt.optimizer, 0)
        silent(call, "pause")
        started_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt), getattr(rt, verb)():
            pytest.fail("the engine has not answered")
        assert time.monotonic() - started_s < 5
        assert rt.phase is Phase.IDLE and rt._turns.turn is Turn.IDLE
        silent()
        self.go_on(rt, twin)

    def test_it_gets_through_as_a_rollout_is_left(self, rt, twin, silent):
        started_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt), rt.rollout():
            silent("pause")
        assert time.monotonic() - started_s < 5
        assert rt._turns.turn is Turn.IDLE
        silent()
        self.go_on(rt, twin, number=None)

    def test_it_gets_through_as_training_begins_and_as_an_engine_closes(self, rt, twin, silent):
        rt.engine.resume()
        silent("pause")
        with pytest.raises(KeyboardInterrupt), rt.train():
            pytest.fail("the engine has not answered")
        assert rt._turns.turn is Turn.IDLE
        silent("close")
        with pytest.raises(KeyboardInterrupt):
            rt.close()

    def test_an_engine_that_is_interrupted_as_weights_are_published_holds_no_version(self, rt, silent):
        with rt.train():
            plain_step(rt.model, rt.optimizer, 0)
        silent("commit")
        with pytest.raises(KeyboardInterrupt), rt.rollout():
            pytest.fail("the engine has not answered")
        assert rt.engine.weights_version is None, "poisoned"
        silent()
        assert rt.generate([[1, 2]])[0].weights_version == 1

    def test_one_interrupt_waits_and_is_raised_when_the_phase_has_been_entered_and_left(self, rt, monkeypatch):
        original, caller = rt.engine.reset_prefix_cache, Caller()

        def slow():
            signal.raise_signal(signal.SIGINT)
            caller.call(lambda: time.sleep(0.8), deadline_s=300.0)
            original()

        monkeypatch.setattr(rt.engine, "reset_prefix_cache", slow)
        started_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt), rt.rollout():
            pytest.fail("the interrupt comes first")
        assert time.monotonic() - started_s >= 0.8
        assert rt.phase is Phase.IDLE and rt.engine.state is EngineState.PAUSED
        caller.close()

    def go_on(self, rt, twin, number=1):
        """The engine answers again, and training goes on with every byte as it was."""
        if number is not None:
            plain_step(*twin, number)
            with rt.train():
                plain_step(rt.model, rt.optimizer, number)
            assert_same(rt, twin)
        assert len(generate(rt)) == 1
