"""Optimizer state that a rollout has parked: when it comes back, and what sees it."""

import torch

import colo
from colo.config import Offload, RuntimeConfig
from colo.memory import region as regions
from colo.phases.phase import Residency
from colo.units import MIB
from tests.runtimes import PROMPTS, assert_same_weights, launch, segment, train_step


def test_a_pass_through_what_was_unfrozen_before_a_step_brings_parked_state_back():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    norm, embedding = rt.model.model.norm, rt.model.model.embed_tokens
    rt.model.requires_grad_(False)
    norm.requires_grad_(True)
    with rt.train():
        train_step(rt)
    rt.generate([[1]], max_tokens=1)
    norm.requires_grad_(False)
    embedding.requires_grad_(True)
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        assert segment(rt, "trainer.optimizer").residency is Residency.OFFLOADED
        rt.model(input_ids=ids, labels=ids).loss.backward()
        assert segment(rt, "trainer.optimizer").residency is Residency.RESIDENT
    rt.close()


def test_state_that_came_back_stays_where_no_step_was_taken():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    with rt.train():
        train_step(rt)
    assert segment(rt, "trainer.optimizer").residency is Residency.OFFLOADED, "a rollout is what follows a step"
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
    assert segment(rt, "trainer.optimizer").residency is Residency.RESIDENT
    rt.close()


def test_parked_state_comes_back_beside_the_last_backward_pass():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS, accumulation_steps=2))
    with rt.train():
        train_step(rt)
    with rt.rollout():
        rt.generate([[1]], max_tokens=1)
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        optimizer = segment(rt, "trainer.optimizer")
        rt.model(input_ids=ids, labels=ids).loss.backward()
        assert optimizer.residency is Residency.OFFLOADED, "one more backward pass is to come"
        rt.model(input_ids=ids, labels=ids).loss.backward()
        assert optimizer.residency is Residency.RESIDENT
        rt.optimizer.step()
    rt.close()


def test_a_step_without_a_backward_pass_has_the_state_that_a_rollout_parked():
    rt, twin = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload="always")), launch()
    twin.model.load_state_dict(rt.model.state_dict())
    for made in (rt, twin):
        for step in range(3):
            with made.rollout():
                made.generate(PROMPTS, max_tokens=1)
            with made.train():
                assert made is twin or step == 0 or segment(made, "trainer.optimizer").residency is Residency.OFFLOADED
                for number, parameter in enumerate(made.model.parameters()):
                    parameter.grad = torch.full_like(parameter, number + step)
                made.optimizer.step()
                made.optimizer.zero_grad()
    assert_same_weights(rt.model, twin.model)
    rt.close()
    twin.close()


def test_accumulation_may_go_on_over_several_train_blocks_and_still_prefetches():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS, accumulation_steps=2))
    with rt.train():
        train_step(rt)
    ids = torch.tensor([[1, 2, 3]])
    for is_last in (False, True):
        with rt.rollout():
            rt.generate([[1]], max_tokens=1)
        with rt.train():
            rt.model(input_ids=ids, labels=ids).loss.backward()
            assert (segment(rt, "trainer.optimizer").residency is Residency.RESIDENT) is is_last
    rt.close()


def test_checkpoints_can_be_taken_in_every_phase():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    with rt.train():
        train_step(rt)
        in_train = rt.optimizer.state_dict()
    idle = rt.optimizer.state_dict()
    with rt.rollout():
        in_rollout = rt.optimizer.state_dict()
        weights = {name: t.clone() for name, t in rt.model.state_dict().items()}
    for index in in_train["state"]:
        for other in (idle, in_rollout):
            assert torch.equal(in_train["state"][index]["exp_avg"], other["state"][index]["exp_avg"])
    assert all(torch.equal(weights[name], t) for name, t in rt.model.state_dict().items())
    rt.close()


def test_state_of_a_launched_model_goes_home_to_the_host_though_the_device_is_full(monkeypatch):
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    with rt.train():
        train_step(rt)
    rt.generate([[1]], max_tokens=1)
    assert segment(rt, "trainer.optimizer").residency is Residency.OFFLOADED

    def full(region):
        raise colo.BudgetError("no room", needed_bytes=1, free_bytes=0)

    monkeypatch.setattr(regions.ResizedRegion, "_restore", full)
    rt.close()
    assert all(state["exp_avg"].any() for state in rt.optimizer.state.values())
