"""Optimizers built as Megatron's are, around torch's; tests/integration/test_megatron_steps.py has Megatron's own."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from transformers import Adafactor

from colo.errors import Unsupported
from colo.memory.offload import Mover
from colo.optim import MasterWeights, register_separable
from colo.phases.phase import Residency
from colo.trainer.optimizers import MegatronOptimizers, as_torch, why_not_separable
from colo.trainer.state import TrainerState

CPU = torch.device("cpu")


class Mixed:
    """Steps over fp32 copies of some parameters, as Megatron's optimizer of 16-bit ones does."""

    def __init__(self, parameters):
        self.float16_groups = [list(parameters)]
        self.fp32_from_fp32_groups = [[]]
        self.mains = [p.detach().clone().float() for p in self.float16_groups[0]]
        self.optimizer = AdamW(self.mains, lr=1e-2)

    def step(self):
        for parameter, main in zip(self.float16_groups[0], self.mains, strict=True):
            main.grad = parameter.grad.float()
        self.optimizer.step()
        for parameter, main in zip(self.float16_groups[0], self.mains, strict=True):
            parameter.data.copy_(main)

    def zero_grad(self):
        for tensor in (*self.float16_groups[0], *self.mains):
            if tensor.grad is not None:
                tensor.grad = None


def chain_of(net):
    """A chain over the first layer, nothing, and the second."""
    parts = [Mixed(net[0].parameters()), SimpleNamespace(is_stub_optimizer=True, optimizer=None)]
    parts.append(SimpleNamespace(chained_optimizers=[Mixed(net[1].parameters())]))
    return SimpleNamespace(chained_optimizers=parts)


def parts_of(chain):
    first, _, second = chain.chained_optimizers
    return [first, *second.chained_optimizers]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(torch.bfloat16)


@pytest.fixture
def park():
    made = []

    def parked(optimizer, **options):
        state = TrainerState(optimizer, Mover(CPU), **options)
        made.append(state)
        for segment in (*state.parkings,):
            segment.begin(Residency.OFFLOADED).wait()
        return state

    yield parked
    for state in made:
        state.close()


def step(net, chain):
    net(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    for part in parts_of(chain):
        part.step()


def test_another_optimizer_is_what_it_was(net):
    optimizer = AdamW(net.parameters())
    assert as_torch(optimizer) is optimizer


def test_main_parameters_are_parked_and_steps_are_bit_equal(net, park):
    twin = copy.deepcopy(net)
    chain, reference = chain_of(net), chain_of(twin)
    state = park(MegatronOptimizers(chain), region_bytes=256)
    mains = [main for part in parts_of(chain) for main in part.mains]
    num_bytes = sum(main.numel() * 4 for main in mains)
    for _ in range(3):
        assert state.parkings[1].device_bytes == 0 and state.parkings[1].host_bytes >= num_bytes
        step(net, chain), step(twin, reference)
        for ours, others in zip(parts_of(chain), parts_of(reference), strict=True):
            assert all(map(torch.equal, ours.mains, others.mains))
            ours.zero_grad(), others.zero_grad()
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
        for segment in (*state.parkings,):
            segment.begin(Residency.OFFLOADED).wait()


def test_a_gradient_leaves_and_comes_with_its_main_parameter_and_is_dropped_while_it_is_away(net, park):
    chain = chain_of(net)
    state = park(MegatronOptimizers(chain))
    step(net, chain)
    first, second = parts_of(chain)[0].mains
    gradients = [first.grad.clone(), second.grad.clone()]
    state.parkings[1].begin(Residency.OFFLOADED).wait()
    assert torch.equal(first.grad, gradients[0])
    first.grad = None
    assert first.grad is None and state.parkings[1].residency is Residency.OFFLOADED
    assert "gradients of main parameters" in [item.name for item in state.kept.items]
    state.bring_back()
    assert first.grad is None and torch.equal(second.grad, gradients[1])
    first.grad = gradients[0]
    for part in parts_of(chain):
        part.zero_grad()
    assert state.kept.items == []


def test_hooks_of_a_step_run_once_around_all_optimizers(net, park):
    chain, told = chain_of(net), []
    park(MegatronOptimizers(chain), before_step=lambda: told.append("before"), after_step=lambda: told.append("after"))
    for part in parts_of(chain):
        part.optimizer.register_step_pre_hook(lambda *_: told.append("step"))
        part.mains[0].sum()  # brings state back, which the listener does not
    step(net, chain)
    assert told == ["before", "step", "step", "after"]


def test_a_parameter_that_is_stepped_itself_is_no_state(net, park):
    part = SimpleNamespace(optimizer=AdamW(net.parameters(), lr=1e-2))
    state = park(MegatronOptimizers(part))
    assert state.parkings[1].size_bytes == 0
    assert list(map(id, state.optimizer.param_groups[0]["params"])) == list(map(id, net.parameters()))


def test_moments_of_main_parameters_are_expected_before_the_first_step(net, park):
    chain = chain_of(net)
    state = park(MegatronOptimizers(chain))
    expected = state.parkings[0].size_bytes
    step(net, chain)
    assert expected == state.parkings[0].size_bytes > 8 * sum(p.numel() for p in net.parameters())


def test_a_buffer_of_gradients_of_which_a_part_is_not_known_stays_and_no_others_are_expected(net, park):
    buffer = torch.zeros(200)
    for parameter in net.parameters():
        parameter.main_grad = buffer[: parameter.numel()].view(parameter.shape)
    state = park(MegatronOptimizers(chain_of(net)))
    (kept,) = state.kept.items
    assert kept.name.startswith("a buffer of gradients") and kept.size_bytes == 800
    assert state.gradients.size_bytes == 0


def test_state_dicts_of_all_are_read_on_the_host_and_can_be_loaded(net, park):
    chain = chain_of(net)
    state = park(MegatronOptimizers(chain))
    step(net, chain)
    state.parkings[0].begin(Residency.OFFLOADED).wait()
    taken = [copy.deepcopy(part.optimizer.state_dict()) for part in parts_of(chain)]
    assert state.parkings[0].residency is Residency.OFFLOADED
    expected = copy.deepcopy(taken)
    step(net, chain)
    for part, state in zip(parts_of(chain), taken, strict=True):
        part.optimizer.load_state_dict(state)
    for part, state in zip(parts_of(chain), expected, strict=True):
        now = part.optimizer.state_dict()["state"]
        assert all(torch.equal(now[i][kind], state["state"][i][kind]) for i in now for kind in ("exp_avg", "step"))


def test_what_trains_nothing_and_megatron_fsdp_are_refused():
    with pytest.raises(Unsupported, match="trains nothing on this rank"):
        MegatronOptimizers(SimpleNamespace(chained_optimizers=[]))
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    with pytest.raises(Unsupported, match="Megatron-FSDP is not supported"):
        MegatronOptimizers(SimpleNamespace(optimizer=object(), model_chunks=[chunk]))


def test_what_megatron_gathers_late_is_gathered_once_after_each_step(net, park):
    calls = []
    chunk = nn.Module()
    chunk.net = net
    chunk.ddp_config = SimpleNamespace(use_megatron_fsdp=False, overlap_param_gather=True, nccl_ub=False)
    chunk.start_param_sync = lambda **options: calls.append(options)
    part = SimpleNamespace(optimizer=AdamW(net.parameters(), lr=1e-2), model_chunks=[chunk])
    optimizer = MegatronOptimizers(part)
    park(optimizer)
    for num_calls in range(1, 3):
        optimizer.finish_step()  # at first for a step that nobody has seen
        optimizer.finish_step()
        assert calls == [{"force_sync": True}] * num_calls
        net(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
        part.optimizer.step()
    chunk.ddp_config.overlap_param_gather = False
    optimizer.finish_step()
    assert len(calls) == 2


PARAMETERS = [torch.nn.Parameter(torch.ones(4, 4))]


class Inherits(torch.optim.AdamW):
    """Steps as AdamW does."""


class Overrides(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_optimizers_of_torch_and_those_that_step_as_they_do_are_known():
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon, Inherits):
        for _ in range(2):  # torch puts hooks around the step of a class when the first is made
            assert why_not_separable(kind(PARAMETERS, lr=0.1)) is None
    assert why_not_separable(Adafactor(PARAMETERS, lr=0.1, relative_step=False)) is None
    assert why_not_separable(MasterWeights(torch.optim.AdamW)(PARAMETERS)) is None


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, Overrides])
def test_others_are_named_with_what_to_declare(kind):
    for optimizer in (kind(PARAMETERS), MasterWeights(kind)(PARAMETERS)):
        assert f"declare it: colo.optim.register_separable({kind.__name__})" in why_not_separable(optimizer)


def test_one_that_passes_through_the_model_itself_is_not_to_be_declared():
    assert why_not_separable(torch.optim.LBFGS(PARAMETERS)) == (
        "LBFGS.step asks for a closure, and looks at all parameters at once"
    )


def test_masters_of_one_step_of_all_parameters_are_not_stepped_in_parts():
    optimizer = MasterWeights(torch.optim.AdamW, bucket_bytes=None)(PARAMETERS)
    assert "bucket_bytes=None" in why_not_separable(optimizer)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")  # torch's own
def test_a_parameter_that_torch_steps_twice_is_not_stepped_in_parts():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    reason = why_not_separable(torch.optim.SGD([weight, weight], lr=0.1))
    assert reason == "the parameter of shape (2, 3) is twice in a group, and torch steps it twice: list it once"


def test_what_is_declared_is_known_with_what_inherits_its_step():
    @register_separable
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Heir(Own):
        pass

    assert why_not_separable(Own(PARAMETERS, lr=0.1)) is None
    assert why_not_separable(Heir(PARAMETERS, lr=0.1)) is None
    for wrong in (Own(PARAMETERS, lr=0.1), int, "AdamW"):
        with pytest.raises(TypeError, match="register_separable takes a class of optimizers"):
            register_separable(wrong)
