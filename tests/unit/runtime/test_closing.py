"""The steps of an end, in which order, and what a second call does; what users see of it is in test_end."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.engine import EngineState
from colo.engines.torch import TorchEngine
from colo.errors import BudgetError, EngineLost, PhaseError
from colo.memory.offload import Transfer
from colo.phases.phase import Phase, Residency
from tests.runtimes import ALWAYS, PROMPTS, adamw, launch, make_engine, qwen3, segment, train_step


@pytest.mark.parametrize("verb", ["rollout", "train"])
def test_a_phase_that_is_closed_is_left_in_order(verb):
    rt = launch()
    with getattr(rt, verb)():
        rt.close()
    phases = [span.phase for span in rt.trace.spans if span.category == "phase"]
    assert phases[-1] is Phase(verb)


def test_a_step_that_has_failed_is_over_when_a_runtime_closes():
    rt = launch()
    rt.model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()

    def stumble():
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        rt.optimizer.step(stumble)
    assert rt.phase is Phase.TRAIN
    rt.close()
    assert rt.phase is Phase.IDLE


def test_the_cache_goes_when_nothing_is_on_its_way_any_more(monkeypatch):
    """The driver frees nothing beside copies."""
    original, seen = TorchEngine.sleep, []

    def sleep(engine, level):
        seen.append(segment(rt, "trainer.optimizer").device_bytes)
        original(engine, level)

    monkeypatch.setattr(Transfer, "done", property(lambda transfer: hasattr(transfer, "waited")))
    monkeypatch.setattr(Transfer, "wait", lambda transfer: setattr(transfer, "waited", True))
    rt = launch(config=ALWAYS)
    with rt.train():
        train_step(rt)
    state = segment(rt, "trainer.optimizer")
    assert state.residency is Residency.OFFLOADED and state.device_bytes > 0, "it is leaving"
    monkeypatch.setattr(TorchEngine, "sleep", sleep)
    rt.close()
    assert seen == [0]


def test_an_engine_that_could_not_close_is_closed_again_by_a_second_call(monkeypatch):
    """As a `vllm.LLM` of yours that finds no room to wake."""
    rt = launch()
    original, calls = TorchEngine.close, []

    def close(engine):
        calls.append(engine)
        if len(calls) == 1:
            raise BudgetError("no room to wake", needed_bytes=1, free_bytes=0)
        original(engine)

    monkeypatch.setattr(TorchEngine, "close", close)
    with pytest.raises(BudgetError, match="no room to wake"):
        rt.close()
    assert rt.engine.state is not EngineState.CLOSED
    rt.close()
    assert calls == [rt.engine] * 2
    assert rt.engine.state is EngineState.CLOSED


def test_every_step_is_made_once_though_all_fail(monkeypatch):
    rt, tried = launch(), []

    def fail(name):
        def step(*_, **__):
            tried.append(name)
            raise ValueError(name)

        return step

    names = {"publisher": "start_over", "transport": "move_out", "transport ": "close", "mover": "close"}
    owners = {
        "publisher": rt.versions.publisher,
        "transport": rt.transport,
        "transport ": rt.transport,
        "mover": rt.engine.mover,
    }
    with monkeypatch.context() as patch:
        for owner, method in names.items():
            patch.setattr(owners[owner], method, fail(f"{owner.strip()}.{method}"))
        with pytest.raises(ValueError, match="publisher.start_over"):
            rt.close()
        rt.close()
    assert tried == ["publisher.start_over", "transport.move_out", "transport.close", "mover.close"]
    assert rt.engine.before_generate is None
    with pytest.raises(PhaseError, match="the runtime is closed"):
        rt.generate(PROMPTS)


def test_an_engine_that_is_lost_has_no_cache_to_drop(monkeypatch):
    rt = launch()

    def sleep(engine, level):
        raise EngineLost("its process has ended")

    monkeypatch.setattr(TorchEngine, "sleep", sleep)
    rt.close()
    assert rt.engine.state is EngineState.CLOSED


@pytest.mark.parametrize("owned", [True, False])
def test_state_goes_home_and_the_optimizer_works_on_without_hooks(owned):
    if owned:
        rt = launch(config=ALWAYS)
    else:
        model = AutoModelForCausalLM.from_config(qwen3())
        rt = colo.share(make_engine(), model, adamw(model.parameters()), config=ALWAYS)
    with rt.train():
        train_step(rt)
    rt.generate(PROMPTS, max_tokens=1)
    rt.close()
    version = rt.weights_version
    train_step(rt)
    assert rt.weights_version == version == 1
    assert all(torch.isfinite(state["exp_avg"]).all() for state in rt.optimizer.state.values())
    assert rt.scheduler.segments["trainer.optimizer"].host_bytes == 0


@pytest.mark.parametrize("wakes", [True, False])
def test_the_room_that_an_engine_wakes_in_is_kept_until_it_closes(monkeypatch, wakes):
    """On a full card the trainer's state and weights would take what the KV cache gave up."""
    rt = launch()
    rt.engine.wakes_to_close = wakes
    with rt.train():
        pass
    kept, closing = [], rt._closing

    def noting(name, when):
        step = getattr(closing, name)

        def noted():
            kept.append((when, closing._room is not None and closing._room.nbytes))
            return step()

        monkeypatch.setattr(closing, name, noted)

    noting("return_state", "state")
    noting("_take_weights_home", "weights")
    noting("_bring_the_rest", "the rest")
    size = wakes and segment(rt, "engine.kv_cache").size_bytes
    rt.close()
    assert kept == [("state", size), ("weights", size), ("the rest", False)] and (size or not wakes)
