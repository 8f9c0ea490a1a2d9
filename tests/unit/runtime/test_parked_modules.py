"""`rt.park`: a critic and its optimizer leave for rollouts, and train as they would without colo."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from colo.config import RuntimeConfig
from colo.errors import BudgetError, PhaseError, Unsupported
from colo.phases.phase import Residency
from colo.units import MIB
from tests.runtimes import ALWAYS, PROMPTS, launch, segment, train_step

INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def make_critic():
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 1))
    return critic, torch.optim.AdamW(critic.parameters(), lr=1e-2)


def step(critic, optimizer):
    critic(INPUTS).square().mean().backward()
    optimizer.step()


def assert_same(critic, twin):
    for mine, other in zip(critic.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def test_a_critic_is_away_in_rollouts_and_trains_to_the_same_bits():
    twin, (critic, optimizer) = make_critic(), make_critic()
    rt = launch(config=ALWAYS)
    rt.park(critic, optimizer, name="critic")
    for _ in range(4):
        with rt.rollout():
            assert segment(rt, "critic").residency is Residency.OFFLOADED
            assert segment(rt, "critic").device_bytes == 0 < segment(rt, "critic").host_bytes
            rt.generate(PROMPTS, max_tokens=2)
            for mine, other in zip(critic.parameters(), twin[0].parameters(), strict=True):
                assert torch.equal(mine, other), "read where it is"
        with rt.train():
            train_step(rt)
            step(critic, optimizer)
            optimizer.zero_grad()
        step(*twin)
        twin[1].zero_grad()
    assert "critic" in str(rt.report())
    rt.close()
    assert_same(critic, twin[0])
    step(critic, optimizer)  # an ordinary module again
    step(*twin)
    assert_same(critic, twin[0])
    assert torch.equal(critic[0].weight.grad, twin[0][0].weight.grad)


def test_gradients_that_the_loop_keeps_are_added_to_after_a_rollout():
    twin, (critic, optimizer) = make_critic(), make_critic()
    rt = launch(config=ALWAYS)
    rt.park(critic, optimizer)
    for module in (critic, twin[0]):
        module.eval()
    for _ in range(2):
        with rt.train():
            critic(INPUTS).sum().backward()
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=1)
        twin[0](INPUTS).sum().backward()
    assert torch.equal(critic[0].weight.grad, twin[0][0].weight.grad)
    rt.close()


def test_a_module_that_is_away_says_whose_turn_it_is():
    critic, optimizer = make_critic()
    rt = launch(config=ALWAYS)
    rt.park(critic, optimizer)
    with rt.rollout():
        for use in (lambda: critic(INPUTS), optimizer.step):
            with pytest.raises(PhaseError, match="Sequential is in host memory: use it within `with rt.train\\(\\)"):
                use()
        with pytest.raises(PhaseError, match="inside rollout"):
            rt.park(nn.Linear(2, 2))
    with rt.train():
        assert critic(INPUTS).shape == (8, 1)
    rt.close()
    assert critic(INPUTS).shape == (8, 1)


def test_a_copy_of_a_module_that_is_away_and_one_that_is_saved_are_the_users_own():
    critic, _ = make_critic()
    rt = launch(config=ALWAYS)
    rt.park(critic)
    with rt.train():
        train_step(rt)
    with rt.rollout():
        for twin in (copy.deepcopy(critic), pickle.loads(pickle.dumps(critic))):
            assert twin(INPUTS).shape == (8, 1)
        with pytest.raises(PhaseError, match="in host memory"):
            critic(INPUTS)
    rt.close()


def test_what_cannot_be_parked_is_refused_and_left_as_it_was():
    rt = launch(config=ALWAYS)
    own = rt.model.lm_head
    with pytest.raises(Unsupported, match="weight is the runtime's already"):
        rt.park(own)
    judge = nn.Linear(2, 2)
    rt.park(judge, torch.optim.AdamW(judge.parameters()), name="judge")
    with pytest.raises(Unsupported, match="second: 0.weight is the runtime's already"):
        rt.park(nn.Sequential(judge), name="second")
    with pytest.raises(Unsupported, match="Linear: the optimizer steps weights that the runtime moves already"):
        rt.park(nn.Linear(2, 2), rt.optimizer)
    for given in (("judge",), (judge, judge), (None,)):
        with pytest.raises(TypeError, match="park\\(\\) takes a module, and its optimizer or None"):
            rt.park(*given)
    with pytest.raises(TypeError, match="name must be a text, not 5"):
        rt.park(nn.Linear(2, 2), name=5)
    with pytest.raises(ValueError, match="segment 'judge' already: give park\\(\\) another name"):
        rt.park(other := nn.Linear(2, 2), name="judge")
    with rt.rollout():
        assert other(torch.ones(1, 2)).shape == (1, 2), "no hook stays on it"
    with pytest.raises(Unsupported, match="meta"):
        rt.park(nn.Linear(2, 2, device="meta"))
    rt.close()
    with pytest.raises(PhaseError, match="the runtime is closed"):
        rt.park(nn.Linear(2, 2))


def test_a_module_that_would_not_fit_beside_the_others_is_refused_with_its_bytes():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, device_limit_bytes=4 * MIB))
    large = nn.Linear(1024, 2048, bias=False)
    with pytest.raises(BudgetError):
        rt.park(large)
    assert "Linear" not in rt.scheduler.segments and large(torch.ones(1, 1024)).shape == (1, 2048)
    train_step(rt)
    rt.close()


def test_a_module_that_finds_no_room_as_a_runtime_closes_stays_on_the_host(monkeypatch):
    twin, (critic, optimizer) = make_critic(), make_critic()
    rt = launch(config=ALWAYS)
    rt.park(critic, optimizer, name="critic")
    with rt.rollout():
        pass

    def no_room(target):
        raise BudgetError("no room", needed_bytes=1, free_bytes=0)

    monkeypatch.setattr(segment(rt, "critic"), "begin", no_room)
    with pytest.warns(UserWarning, match="critic stays in host memory"):
        rt.close()
    step(critic, optimizer)
    step(*twin)
    assert_same(critic, twin[0])


def test_a_runtime_that_is_dropped_leaves_the_module_to_its_owner():
    critic, _ = make_critic()
    expected = copy.deepcopy(critic.state_dict())
    rt = launch(config=ALWAYS)
    rt.park(critic)
    with rt.rollout():
        pass
    gone = weakref.ref(rt)
    del rt
    gc.collect()
    assert gone() is None
    assert critic.eval()(INPUTS).shape == (8, 1)
    assert all(torch.equal(a, b) for a, b in zip(critic.state_dict().values(), expected.values(), strict=True))
