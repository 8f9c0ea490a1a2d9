"""The end of a runtime: what it lets go of, what goes home, and what is refused after it."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.config import Offload, RuntimeConfig
from colo.memory import region as regions
from colo.phases.phase import Phase, Residency
from tests.runtimes import PROMPTS, adamw, launch, make_engine, qwen3, train_step


def test_what_is_closed_lets_go_of_the_engines_memory_though_it_is_still_a_variable():
    rt = launch()
    memory = weakref.ref(next(iter(rt.transport._aliases.values())).untyped_storage())
    rt.close()
    gc.collect()
    assert memory() is None


def test_a_runtime_says_what_it_is_and_where_it_stands():
    rt = launch()
    assert repr(rt) == "<colo.Runtime of Qwen3ForCausalLM and torch on cpu, weights shared: phase idle, version 0>"
    with rt.train():
        train_step(rt)
        assert "phase train, version 1>" in repr(rt)
    rt.close()
    assert repr(rt).endswith("weights shared: closed>")


def test_nothing_works_after_close_and_closing_twice_is_fine():
    rt = launch()
    with rt.train():
        train_step(rt)
    rt.close()
    rt.close()
    assert rt.engine.before_generate is None
    uses = [
        rt.__enter__,
        lambda: setattr(rt, "accumulation_steps", 2),
        lambda: rt.generate([[1]]),
        lambda: rt.rollout().__enter__(),
        lambda: rt.train().__enter__(),
        lambda: rt.enter(Phase.TRAIN),
        rt.recover,
        lambda: rt.park(torch.nn.Linear(2, 2)),
    ]
    for use in uses:
        with pytest.raises(colo.PhaseError, match="the runtime is closed"):
            use()
    assert rt.report().facts and rt.accumulation_steps == 1
    ids = torch.tensor([[1, 2, 3]])
    rt.model(input_ids=ids, labels=ids).loss.backward()
    rt.optimizer.step()


def test_closing_without_room_for_the_state_loses_nothing_and_can_be_repeated(monkeypatch):
    model = AutoModelForCausalLM.from_config(qwen3())
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    rt = colo.share(make_engine(), model, optimizer, config=RuntimeConfig(offload=Offload.ALWAYS))
    ids = torch.tensor([[1, 2, 3]])

    def step(net, opt):
        net(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()

    step(twin, other)
    for _ in range(2):  # the state is in a region from the second step on
        with rt.train():
            step(model, optimizer)
        rt.generate(PROMPTS)
    step(twin, other)
    assert rt.scheduler.segments["trainer.optimizer"].residency is Residency.OFFLOADED

    def full(region):
        raise colo.BudgetError("no room", needed_bytes=1, free_bytes=0)

    with monkeypatch.context() as patch, pytest.raises(colo.BudgetError, match="no room"):
        patch.setattr(regions.ResizedRegion, "_restore", full)
        rt.close()
    assert rt.generate(PROMPTS)[0].weights_version == 2, "it is open as before"
    rt.close()
    step(twin, other)
    step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("verb", ["rollout", "train"])
def test_closing_leaves_the_phase_first_and_its_block_has_nothing_left_to_do(rt, verb):
    with getattr(rt, verb)():
        rt.close()
        assert rt.phase is Phase.IDLE
    with pytest.raises(colo.PhaseError, match="closed"):
        getattr(rt, verb)().__enter__()
