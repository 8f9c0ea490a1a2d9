"""Offloading must not change a bit of training, for any optimizer, whatever happens in between."""

import gc
import os
import signal
from functools import partial

import pytest
import torch
from colo.trainer.expected import StateSizes
from colo.trainer.optimizer_state import StateOffloader
from colo.trainer.stand_ins import ParkedTensor
from transformers import Adafactor

from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.trainer import state_segment
from colo.trainer.master_weights import MasterWeights
from colo.units import MIB

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741


class Nested(torch.optim.Optimizer):
    """State as optimizers in the wild keep it: nested dicts, lists, Python numbers, views of one buffer."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    both = torch.zeros(2, *p.shape, device=p.device)
                    state["inner"] = {"moments": [both[0], both[1]], "count": 0, "name": "n", "scale": torch.ones(())}
                inner = state["inner"]
                inner["count"] += 1
                inner["moments"][0].add_(p.grad)
                inner["moments"][1].addcmul_(p.grad, p.grad)
                p.sub_(group["lr"] * inner["moments"][0] / (inner["moments"][1].sqrt() + inner["count"]))


class OneTable(torch.optim.Optimizer):
    """As 8-bit optimizers do, one tensor in the state of every parameter, beside a state of their own."""

    def __init__(self, params):
        super().__init__(params, {})
        self.table = None

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if self.table is None:
                self.table = torch.linspace(-1.0, 1.0, 256, device=p.device)
            state = self.state[p]
            if not state:
                state |= {"moment": torch.zeros_like(p), "table": self.table}
            state["moment"].mul_(0.9).add_(p.grad)
            nearest = torch.bucketize(state["moment"].clamp(-1, 1), state["table"]).clamp_(max=255)
            p.sub_(0.1 * state["table"][nearest])


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw-amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adafactor": partial(Adafactor, lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9),
    "nested": Nested,
    "one-table": OneTable,
}


def model(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(33, 64), torch.nn.Tanh(), torch.nn.Linear(64, 7)).to(dtype)


def backward(net, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 33, generator=generator).to(next(net.parameters()).dtype)
    net(x).float().square().mean().backward()


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for child in value for leaf in leaves(child)]
    return [value]


def assert_same(left, right):
    left, right = leaves(left), leaves(right)
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.cpu(), b.cpu()) if isinstance(a, torch.Tensor) else a == b


def park(offloader):
    for segment in offloader.segments:
        if segment.residency is R:
            segment.begin(O).wait()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("region_bytes", [256, 20_000, MIB])
def test_training_is_bit_equal_with_the_state_parked_between_steps(name, region_bytes, mover):
    plain, parked = model(), model()
    reference, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](parked.parameters())
    offloader = StateOffloader(optimizer, mover, region_bytes=region_bytes)
    for step in range(4):
        for net, opt in ((plain, reference), (parked, optimizer)):
            backward(net, step)
            opt.step()
            opt.zero_grad()
        park(offloader)
        assert offloader.state.residency is O
        assert offloader.state.device_bytes == 0
        assert_same(reference.state_dict(), optimizer.state_dict())
    assert_same(plain.state_dict(), parked.state_dict())
    offloader.close()
    backward(plain, 9), backward(parked, 9)
    reference.step(), optimizer.step()
    assert_same(plain.state_dict(), parked.state_dict())
    assert mover.arena.used_bytes == 0


def test_tensors_that_share_memory_still_do(mover):
    net = model()
    optimizer = Nested(net.parameters())
    offloader = StateOffloader(optimizer, mover)
    backward(net, 0)
    optimizer.step()
    first, second = optimizer.state[next(net.parameters())]["inner"]["moments"]
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert second.storage_offset() - first.storage_offset() == first.numel()
    offloader.close()


def test_a_snapshot_outlives_everything_that_happens_to_the_state(mover):
    net = model()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    offloader = StateOffloader(optimizer, mover)
    backward(net, 0)
    optimizer.step()
    resident = optimizer.state_dict()
    park(offloader)
    offloaded = optimizer.state_dict()
    assert_same(resident, offloaded)
    copies = [leaf.clone() for leaf in leaves(offloaded["state"])]
    backward(net, 1)
    optimizer.step()
    offloader.close()
    assert_same(copies, leaves(offloaded["state"]))
    assert_same(copies, leaves(resident["state"]))


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_loading_a_checkpoint_replaces_the_state_in_any_phase_and_keeps_the_checkpoint(parked, masters, mover):
    dtype = torch.bfloat16 if masters else torch.float32
    make = MasterWeights(OPTIMIZERS["adamw"], bucket_bytes=4096) if masters else OPTIMIZERS["adamw"]
    source, target = model(dtype), model(dtype)
    saved_optimizer, optimizer = make(source.parameters()), make(target.parameters())
    for step in range(3):
        backward(source, step)
        saved_optimizer.step()
        saved_optimizer.zero_grad()
    checkpoint = saved_optimizer.state_dict()
    kept = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(checkpoint["state"])]
    offloader = StateOffloader(optimizer, mover, region_bytes=20_000)
    backward(target, 7)
    optimizer.step()
    optimizer.zero_grad()
    if parked:
        park(offloader)
    optimizer.load_state_dict(checkpoint)
    target.load_state_dict(source.state_dict())
    offloader.state.settle()
    assert (offloader.state.residency is O) is parked
    assert_same(optimizer.state_dict()["state"], checkpoint["state"])
    backward(target, 11)
    optimizer.step()
    assert_same(kept, leaves(checkpoint["state"]))
    backward(source, 11)
    saved_optimizer.step()
    assert_same(source.state_dict(), target.state_dict())
    assert len(offloader.state.regions) * 20_000 >= offloader.state.size_bytes, "old regions are gone"
    offloader.close()


def test_a_new_parameter_group_joins(mover):
    net, extra = model(), torch.nn.Parameter(torch.ones(1000))
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    offloader = StateOffloader(optimizer, mover)
    backward(net, 0)
    optimizer.step()
    before = offloader.state.size_bytes
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(1000)
    park(offloader)
    optimizer.step()
    assert offloader.state.size_bytes >= before + 2 * 4000
    park(offloader)
    assert offloader.state.device_bytes == 0
    offloader.close()


def test_gathering_never_holds_more_than_one_region_twice(mover):
    net = model()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    offloader = StateOffloader(optimizer, mover, region_bytes=10_000)
    backward(net, 0)
    optimizer.step()
    largest = max(p.numel() * 4 for p in net.parameters())
    assert len(offloader.state.regions) > 1
    assert all(region.size_bytes <= max(10_000, largest + 256) for region in offloader.state.regions)
    gc.collect()
    offloader.close()


def test_only_state_that_is_known_beforehand_is_expected():
    trained, frozen = torch.nn.Parameter(torch.zeros(65)), torch.nn.Parameter(torch.zeros(65), requires_grad=False)
    for kind, copies in (
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (torch.optim.Adam, 2),
        (partial(torch.optim.Adam, amsgrad=True), 3),
        (torch.optim.Adagrad, 0),
        (Nested, 0),
    ):
        assert StateSizes(kind([trained, frozen])).total == copies * 512
    groups = [{"params": [trained]}, {"params": [torch.nn.Parameter(torch.zeros(64))], "amsgrad": True}]
    assert StateSizes(torch.optim.AdamW(groups)).total == 2 * 512 + 3 * 256
    halves = [torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))]
    assert StateSizes(MasterWeights(torch.optim.AdamW)(halves)).total == 2 * 256


def test_gradients_that_are_held_are_among_what_stays_and_refuse_to_move(mover):
    net = model()
    offloader = StateOffloader(OPTIMIZERS["adamw"](net.parameters()), mover)
    backward(net, 0)
    held = net[0].weight.grad
    assert offloader.kept.items == [] and not offloader.kept.holds_state
    offloader.refresh()
    (kept,) = offloader.kept.items
    assert (kept.name, kept.size_bytes) == ("gradients", held.nbytes) and not offloader.kept.holds_state
    assert offloader.kept.size_bytes == offloader.kept.device_bytes == held.nbytes
    assert offloader.kept.begin(R).poll()
    with pytest.raises(PhaseError, match="trainer.kept is shared and cannot become offloaded"):
        offloader.kept.begin(O)
    offloader.close()


def test_a_region_holds_what_fits_it_and_no_more(mover):
    for elements, expected in (((64, 64, 64, 64, 64), [512, 512, 256]), ((64, 128, 64, 200), [256, 512, 256, 1024])):
        parameters = [torch.nn.Parameter(torch.zeros(count)) for count in elements]
        optimizer = OPTIMIZERS["sgd-momentum"](parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        offloader = StateOffloader(optimizer, mover, region_bytes=512)
        optimizer.step()
        assert [region.size_bytes for region in offloader.state.regions] == expected and not offloader.kept.items
        offloader.close()


def test_gradients_that_are_all_held_stay_when_they_are_asked_to_leave(mover):
    net = model()
    offloader = StateOffloader(OPTIMIZERS["adamw"](net.parameters()), mover)
    backward(net, 0)
    held = [p.grad for p in net.parameters()]
    offloader.gradients.begin(O).wait()
    assert all(p.grad is g for p, g in zip(net.parameters(), held, strict=True))
    assert (offloader.gradients.residency, mover.arena.used_bytes) == (R, 0)
    offloader.close()


def test_the_first_step_is_expected_before_it_happens(mover):
    net = model()
    for name in ("adamw", "adamw-amsgrad", "sgd-momentum"):
        optimizer = OPTIMIZERS[name](net.parameters())
        offloader = StateOffloader(optimizer, mover)
        expected = offloader.state.size_bytes
        assert (offloader.state.residency, offloader.state.device_bytes) == (D, 0)
        assert offloader.masters.size_bytes == 0
        backward(net, 0)
        optimizer.step()
        assert offloader.state.size_bytes == expected == StateSizes(optimizer).total
        offloader.close()


def test_gradients_of_an_unfinished_accumulation_are_parked_and_come_back(mover):
    plain, parked = model(), model()
    optimizer = OPTIMIZERS["adamw"](parked.parameters())
    offloader = StateOffloader(optimizer, mover)
    for net in (plain, parked):
        backward(net, 0)
    expected = [p.grad.clone() for p in plain.parameters()]
    park(offloader)
    assert all(isinstance(p.grad, ParkedTensor) for p in parked.parameters())
    assert (offloader.gradients.residency, offloader.gradients.device_bytes) == (O, 0)
    offloader.gradients.begin(R).wait()
    assert_same(expected, [p.grad for p in parked.parameters()])
    park(offloader)
    for net in (plain, parked):
        backward(net, 1)
    offloader.gradients.begin(R).wait()
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in parked.parameters()])
    assert mover.arena.used_bytes == 0
    offloader.close()


@pytest.mark.usefixtures("interrupts_raise")
@pytest.mark.parametrize("on_the_way", ["out", "in"])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_gradients_are_whole_when_their_copies_are_interrupted_or_fail(mover, on_the_way, raised, monkeypatch):
    net = model()
    offloader = StateOffloader(OPTIMIZERS["adamw"](net.parameters()), mover)
    backward(net, 0)
    expected = [p.grad.clone() for p in net.parameters()]
    if on_the_way == "in":
        park(offloader)
    name = {"out": "copy_out", "in": "copy_in"}[on_the_way]
    copy, calls = getattr(mover, name), []

    def disturbed(source, target):
        calls.append(source)
        if len(calls) == 2:
            if raised is RuntimeError:
                raise RuntimeError("CUDA error")
            os.kill(os.getpid(), signal.SIGINT)
        return copy(source, target)

    monkeypatch.setattr(mover, name, disturbed)
    with pytest.raises(raised):
        offloader.gradients.begin(O if on_the_way == "out" else R).wait()
    monkeypatch.undo()
    assert offloader.gradients.residency is (R if on_the_way == "out" else O)
    park(offloader)
    offloader.gradients.begin(R).wait()
    assert_same(expected, [p.grad for p in net.parameters()])
    assert mover.arena.used_bytes == 0
    offloader.close()


def test_a_step_whose_state_finds_no_room_in_a_region_is_a_step_and_is_gathered_after_the_next(mover, monkeypatch):
    net, counted = model(), []
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    offloader = StateOffloader(optimizer, mover, after_step=lambda: counted.append(1))

    def full(*args, **kwargs):
        raise BudgetError("1 GiB needed, 0 free", needed_bytes=2**30, free_bytes=0)

    backward(net, 0)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="until after the next step: 1 GiB needed"):
        patch.setattr(state_segment, "allocate_region", full)
        optimizer.step()
    assert counted == [1] and not offloader.state.regions
    assert {kept.reason for kept in offloader.kept.items} == {"there was no room to gather it"}
    assert offloader.kept.device_bytes == sum(2 * p.nbytes for p in net.parameters())
    assert offloader.kept.holds_state and offloader.state.size_bytes == 0
    backward(net, 1)
    optimizer.step()
    assert counted == [1, 1] and offloader.state.regions and not offloader.kept.items
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="CUDA error"):
        patch.setattr(offloader, "gather", lambda: (_ for _ in ()).throw(RuntimeError("CUDA error")))
        optimizer.step()
    assert counted == [1, 1, 1]  # and told as one
    offloader.close()


@pytest.mark.parametrize("name", ["adamw", "adamw-amsgrad", "nested", "one-table", "masters"])
@pytest.mark.parametrize("parked", [True, False])
def test_closing_on_the_host_hands_the_arenas_memory_over(name, parked, device):
    make = MasterWeights(OPTIMIZERS["adamw"]) if name == "masters" else OPTIMIZERS[name]
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    plain, net = model(dtype), model(dtype)
    reference, optimizer = make(plain.parameters()), make(net.parameters())
    mover = Mover(device, host_limit_bytes=256 * MIB)
    offloader = StateOffloader(optimizer, mover, region_bytes=1024)
    for step in range(2):
        park(offloader)  # in the second round: extents there, state resident
        for side, opt in ((plain, reference), (net, optimizer)):
            backward(side, step)
            opt.step()
    if parked:
        park(offloader)
    slabs = [(slab.data.data_ptr(), slab.data.data_ptr() + slab.size_bytes) for slab in mover.arena._blocks]
    held = mover.arena.pinned_bytes
    offloader.close(torch.device("cpu"))
    assert mover.arena.pinned_bytes == held
    tensors = [t for t in leaves([*optimizer.state.values()]) if isinstance(t, torch.Tensor) and t.dim()]
    assert all(any(a <= t.data_ptr() < b for a, b in slabs) for t in tensors)
    mover.close()
    gc.collect()
    assert_same(reference.state_dict(), optimizer.state_dict())
    backward(plain, 9), backward(net.cpu(), 9)
    reference.step(), optimizer.step()
    assert_same(plain.state_dict(), net.state_dict())


@pytest.mark.parametrize("num_regions", [0, 1])
def test_without_room_to_gather_the_optimizer_stays_as_it_was(num_regions, device, monkeypatch):
    mover, net = Mover(device), model()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    backward(net, 0)
    optimizer.step()
    before = [t.clone() for kept in optimizer.state.values() for t in kept.values()]
    allocate, made = state_segment.allocate_region, []

    def allocate_some(*args, **kwargs):
        if len(made) == num_regions:
            raise BudgetError("no room", needed_bytes=1, free_bytes=0)
        made.append(allocate(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(state_segment, "allocate_region", allocate_some)
    called = []
    with pytest.raises(BudgetError, match="no room"):
        StateOffloader(optimizer, mover, region_bytes=10_000, before_step=lambda: called.append(1))
    assert len(made) == num_regions
    after = [t for kept in optimizer.state.values() for t in kept.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    mover.close()
    backward(net, 1)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not called


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("fits_host", [True, False])
def test_loading_a_state_never_has_the_old_one_beside_it_on_the_device(masters, fits_host):
    net = model(torch.bfloat16 if masters else torch.float32)
    make = partial(torch.optim.AdamW, lr=1e-2)
    optimizer = (MasterWeights(make) if masters else make)(net.parameters())
    mover = Mover(torch.device("cpu"), host_limit_bytes=None if fits_host else 64)
    offloader = StateOffloader(optimizer, mover)
    net(torch.ones(2, 33, dtype=next(net.parameters()).dtype)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.step()

    held = []
    optimizer.register_load_state_dict_pre_hook(
        lambda *_: held.append(sum(segment.device_bytes for segment in offloader.segments[:2]))
    )
    optimizer.load_state_dict(saved)
    assert (held == [0]) is fits_host
    assert {segment.residency for segment in offloader.segments[:2]} <= {R, D}, "training goes on at once"
    again = optimizer.state_dict()
    assert all(
        torch.equal(value, again["state"][index][name])
        for index, state in saved["state"].items()
        for name, value in state.items()
    )
    with pytest.raises(ValueError):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.step()
    offloader.close()
    mover.close()
