"""State that cannot be moved safely is recognized, stays on the device, is counted, and is named with the reason."""

import copy
import dataclasses
from types import MappingProxyType

import pytest
import torch
from colo.trainer.optimizer_state import StateOffloader
from colo.trainer.stand_ins import ParkedTensor
from transformers import AutoModelForCausalLM

import colo
from colo.config import Offload, RuntimeConfig
from colo.errors import Unsupported
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.units import MIB
from tests.models import tiny_qwen3
from tests.runtimes import make_engine

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741


class Flat(torch.optim.Optimizer):
    """All momentum in one buffer, decayed as one, of which the state holds views."""

    def __init__(self, params):
        super().__init__(params, {})
        of = self.param_groups[0]["params"]
        self.flat = torch.zeros(sum(p.numel() for p in of))
        for p, part in zip(of, self.flat.split([p.numel() for p in of]), strict=True):
            self.state[p]["m"] = part.view(p.shape)

    @torch.no_grad()
    def step(self, closure=None):
        self.flat.mul_(0.9)
        for p, state in self.state.items():
            state["m"].add_(p.grad)
            p.sub_(0.1 * state["m"])


@dataclasses.dataclass(slots=True)
class Moments:
    m: torch.Tensor
    v: torch.Tensor


class Pair:
    """An object that nothing is known of."""

    def __init__(self, one, other):
        self.one, self.others = one, [other]


class Named(torch.Tensor):
    """A tensor subclass of somebody's own."""


class Keeping(torch.optim.SGD):
    """Keeps in its state what a test asks for."""

    def __init__(self, params, make):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.make = make

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            if "kept" not in self.state[p]:
                self.state[p]["kept"] = self.make(p)


@pytest.fixture
def mover(device):
    mover = Mover(device, host_limit_bytes=64 * MIB)
    yield mover
    mover.close()


def net_of(size=8):
    torch.manual_seed(1)
    return torch.nn.Linear(size, size, bias=False)


def step(net, optimizer, *, zero=True):
    net(torch.ones(3, net.in_features)).square().mean().backward()
    optimizer.step()
    if zero:
        optimizer.zero_grad()


def park(offloader):
    offloader.refresh()
    for segment in offloader.segments:
        if segment.residency is R:
            segment.begin(O).wait()


def sparse(p):
    return torch.ones_like(p).to_sparse()


OUTSIDE = []  # what the rest of a program holds

STAYING = {
    "an object": (lambda p: Moments(torch.ones_like(p), torch.ones_like(p)), 2 * 256, "objects of type Moments"),
    "the parameter": (lambda p: {p}, 0, "objects of type set"),
    "beside a number": (lambda p: Moments(torch.ones(()), torch.ones_like(p)), 256, "objects of type Moments"),
    "an object of any kind": (lambda p: Pair(torch.ones_like(p), torch.ones_like(p)), 2 * 256, "objects of type Pair"),
    "a mapping": (lambda p: MappingProxyType({1: torch.ones_like(p)}), 256, "objects of type mappingproxy"),
    "a set": (lambda p: {torch.ones_like(p)}, 256, "objects of type set"),
    "a subclass": (lambda p: torch.ones_like(p).as_subclass(Named), 256, "tensors of type Named"),
    "a sparse tensor": (sparse, 64 * (2 * 8 + 4), "its layout is torch.sparse_coo"),
    "part of a buffer": (lambda p: OUTSIDE.append(torch.ones(16, 8)) or OUTSIDE[-1][:8], 512, "1 more refers to its"),
    "a base of views": (lambda p: OUTSIDE.append((t := torch.ones(8, 8))[0]) or t, 256, "2 more refer to its memory"),
    "numpy's": (lambda p: OUTSIDE.append((t := torch.ones(8, 8)).numpy()) or t, 256, "1 more refers to its memory"),
    "exported": (lambda p: OUTSIDE.append(torch.from_dlpack(t := torch.ones(8, 8))) or t, 256, "refers to its memory"),
    "history": (lambda p: p * 2, 256, "part of an autograd graph"),
    "conjugated": (lambda p: torch.ones(8, 8, dtype=torch.complex64).conj(), 512, "conjugated"),
}


@pytest.mark.parametrize("what", STAYING)
def test_what_cannot_be_moved_stays_and_is_named_and_counted_and_the_rest_leaves(what, mover):
    make, size_bytes, reason = STAYING[what]
    net = net_of()
    optimizer = Keeping(net.parameters(), make)
    offloader = StateOffloader(optimizer, mover)
    step(net, optimizer)
    park(offloader)
    kept = offloader.kept.items
    assert {item.name for item in kept} == {"state[0]['kept']"} and all(reason in item.reason for item in kept)
    assert offloader.kept.size_bytes == offloader.kept.device_bytes == size_bytes
    assert isinstance(optimizer.state[net.weight]["momentum_buffer"], ParkedTensor)
    assert offloader.state.residency is O and offloader.state.host_bytes > 0
    assert not isinstance(optimizer.state[net.weight]["kept"], ParkedTensor)
    optimizer.state_dict()
    step(net, optimizer)
    offloader.close()
    OUTSIDE.clear()


@pytest.mark.parametrize("what", ["the parameter", "its data", "its gradient"])
def test_memory_that_is_counted_elsewhere_stays_and_costs_nothing_here(what, mover):
    taken = {"the parameter": lambda p: p, "its data": lambda p: p.data, "its gradient": lambda p: p.grad}
    net = net_of()
    optimizer = Keeping(net.parameters(), taken[what])
    offloader = StateOffloader(optimizer, mover)
    step(net, optimizer, zero=False)
    park(offloader)
    assert sum(kept.size_bytes for kept in offloader.kept.items if kept.name != "gradients") == 0
    assert offloader.state.residency is O and not isinstance(optimizer.state[net.weight]["kept"], ParkedTensor)
    assert torch.equal(optimizer.state[net.weight]["kept"], taken[what](net.weight))
    offloader.close()


def test_a_gradient_that_only_the_state_refers_to_any_more_is_state(mover):
    net = net_of()
    optimizer = Keeping(net.parameters(), lambda p: p.grad)
    offloader = StateOffloader(optimizer, mover)
    step(net, optimizer)
    expected = optimizer.state[net.weight]["kept"].clone()
    park(offloader)
    assert not offloader.kept.items and isinstance(optimizer.state[net.weight]["kept"], ParkedTensor)
    assert torch.equal(optimizer.state[net.weight]["kept"], expected)
    offloader.close()


@pytest.mark.parametrize("hold", [lambda t: t.view(-1), lambda t: t[0], lambda t: t.detach(), lambda t: t.numpy()])
def test_a_region_that_somebody_has_views_of_stays_until_they_are_gone(hold, mover):
    net = net_of()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    offloader = StateOffloader(optimizer, mover, region_bytes=256)
    step(net, optimizer)
    held = hold(optimizer.state[net.weight]["exp_avg"])
    expected = copy.deepcopy(held)
    offloader.refresh()
    assert [item.name for item in offloader.kept.items] == ["state[0]['exp_avg']"]  # before it is asked to leave
    park(offloader)
    assert isinstance(optimizer.state[net.weight]["exp_avg_sq"], ParkedTensor)
    assert [item.name for item in offloader.kept.items] == ["state[0]['exp_avg']"]
    assert (offloader.kept.size_bytes, offloader.state.size_bytes) == (256, 256)
    assert (torch.as_tensor(held) == torch.as_tensor(expected)).all()
    step(net, optimizer)
    seen = torch.as_tensor(held).flatten()
    assert torch.equal(seen, optimizer.state[net.weight]["exp_avg"].flatten()[: seen.numel()])
    del seen
    is_numpys = not isinstance(held, torch.Tensor)
    del held
    park(offloader)
    assert isinstance(optimizer.state[net.weight]["exp_avg"], ParkedTensor) is not is_numpys  # torch keeps NumPy's mark
    assert (offloader.kept.size_bytes, offloader.state.size_bytes) == ((256, 256) if is_numpys else (0, 512))
    offloader.close()


def test_a_view_outlives_the_end_of_colo(mover):
    net = net_of()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    offloader = StateOffloader(optimizer, mover)
    step(net, optimizer)
    view = optimizer.state[net.weight]["exp_avg"].view(-1)
    regions = offloader.state.regions
    offloader.close()
    assert all(region.closed for region in regions) and not offloader.kept.items
    step(net, optimizer)
    assert torch.equal(view, optimizer.state[net.weight]["exp_avg"].view(-1))


def test_views_of_a_buffer_that_only_the_state_refers_to_move_together(mover):
    net = net_of()
    optimizer = Keeping(net.parameters(), lambda p: list(torch.ones(2, *p.shape).unbind()))
    offloader = StateOffloader(optimizer, mover)
    step(net, optimizer)
    park(offloader)
    assert not offloader.kept.items
    first, second = optimizer.state[net.weight]["kept"]
    assert isinstance(first, ParkedTensor) and isinstance(second, ParkedTensor)
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    offloader.close()


def test_what_several_parameters_share_has_the_name_that_comes_first(mover):
    net, buffer = torch.nn.Linear(8, 8), torch.ones(16, 8)
    part = buffer[:8]
    optimizer = Keeping(net.parameters(), lambda p: part)
    offloader = StateOffloader(optimizer, mover)
    step(net, optimizer)
    assert [(item.name, item.size_bytes) for item in offloader.kept.items] == [("state[0]['kept']", 512)]
    offloader.close()


def test_a_number_that_lies_in_a_buffer_of_the_state_moves_with_it(mover):
    def make(p):
        buffer = torch.ones(8)
        return [buffer[0], buffer]

    net = net_of()
    optimizer = Keeping(net.parameters(), make)
    offloader = StateOffloader(optimizer, mover)
    step(net, optimizer)
    park(offloader)
    number, buffer = optimizer.state[net.weight]["kept"]
    assert isinstance(buffer, ParkedTensor) and isinstance(number, ParkedTensor) and not offloader.kept.items
    buffer[0] = 5
    assert float(number) == 5
    offloader.close()


def test_an_optimizer_without_hooks_is_refused_by_name(mover):
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    around = Around(torch.optim.SGD(net_of().parameters(), lr=0.1))
    with pytest.raises(Unsupported, match=r"Around does not call torch.optim.Optimizer.__init__"):
        StateOffloader(around, mover)


# ---- in a runtime ----------------------------------------------------------------------------------------------------


def train(model, optimizer, number):
    ids = torch.tensor([[number, 2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_flat_buffer_trains_as_without_colo_and_the_report_says_that_it_stays():
    config = RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS)
    with colo.launch(tiny_qwen3(), optimizer=Flat, device="cpu", config=config) as rt:
        twin = copy.deepcopy(rt.model)
        reference = Flat(twin.parameters())
        for number in range(3):
            with rt.train():
                train(rt.model, rt.optimizer, number)
            train(twin, reference, number)
            rt.generate([[1]], max_tokens=1)
        assert all(torch.equal(a, b) for a, b in zip(rt.model.parameters(), twin.parameters(), strict=True))
        flat_bytes = rt.optimizer.flat.nbytes
        assert rt.scheduler.segments["trainer.kept"].size_bytes == flat_bytes
        assert rt.trace.samples[-1].segments["trainer.kept"] == flat_bytes
        assert "'m'] and 13 more: 1 more refers to its memory" in rt.report().facts["kept"]
        assert "kept" in rt.report().to_json()["facts"]


def test_a_run_without_such_state_does_not_mention_it():
    with colo.launch(tiny_qwen3(), device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB)) as rt:
        with rt.train():
            train(rt.model, rt.optimizer, 1)
        assert "kept" not in rt.report().facts and not rt.kept_state


def test_a_sparse_embedding_trains_as_without_colo():
    def make():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_qwen3()).requires_grad_(False)
        model.model.embed_tokens.sparse = True
        model.model.embed_tokens.weight.requires_grad_(True)
        return model, torch.optim.SparseAdam([model.model.embed_tokens.weight], lr=1e-2)

    engine = make_engine(config=tiny_qwen3())
    (model, optimizer), (twin, reference) = make(), make()
    with colo.share(engine, model, optimizer, config=RuntimeConfig(offload=Offload.ALWAYS)) as rt:
        for number in range(3):
            with rt.train():
                train(model, optimizer, number)
            train(twin, reference, number)
            rt.generate([[1]], max_tokens=1)
            assert rt.scheduler.segments["trainer.optimizer"].residency is O
        with rt.train():
            model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
            assert model.model.embed_tokens.weight.grad.is_sparse
            assert rt.scheduler.segments["trainer.gradients"].device_bytes == 2 * 8 + 2 * 32 * 4
            optimizer.zero_grad()
        assert torch.equal(model.model.embed_tokens.weight, twin.model.embed_tokens.weight)
