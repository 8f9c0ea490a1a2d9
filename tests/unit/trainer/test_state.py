"""Offloading must not change a bit of training, for any optimizer, whatever happens in between."""

import copy
import dataclasses
import gc
from functools import partial
from types import MappingProxyType

import pytest
import torch
from transformers import Adafactor, AutoModelForCausalLM

import colo
from colo.config import Offload, RuntimeConfig
from colo.errors import PhaseError, Unsupported
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.trainer.master_weights import MasterWeights
from colo.trainer.state import TrainerState, expected_sizes
from colo.units import MIB
from tests.models import tiny_qwen3
from tests.runtimes import make_engine
from tests.zoo.trained import is_at_host, park

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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("region_bytes", [256, 20_000, MIB])
def test_training_is_bit_equal_with_the_state_parked_between_steps(name, region_bytes, mover):
    plain, parked = model(), model()
    reference, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](parked.parameters())
    state = TrainerState(optimizer, mover, region_bytes=region_bytes)
    for step in range(4):
        for net, opt in ((plain, reference), (parked, optimizer)):
            backward(net, step)
            opt.step()
            opt.zero_grad()
        park(state)
        assert state.parkings[0].residency is O
        assert state.parkings[0].device_bytes == 0
        assert_same(reference.state_dict(), optimizer.state_dict())
    assert_same(plain.state_dict(), parked.state_dict())
    state.close()
    backward(plain, 9), backward(parked, 9)
    reference.step(), optimizer.step()
    assert_same(plain.state_dict(), parked.state_dict())
    assert mover.arena.used_bytes == 0


def test_tensors_that_share_memory_still_do(mover):
    net = model()
    optimizer = Nested(net.parameters())
    state = TrainerState(optimizer, mover)
    backward(net, 0)
    optimizer.step()
    first, second = optimizer.state[next(net.parameters())]["inner"]["moments"]
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert second.storage_offset() - first.storage_offset() == first.numel()
    state.close()


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_loading_a_checkpoint_replaces_the_state_in_any_phase(parked, masters, mover):
    dtype = torch.bfloat16 if masters else torch.float32
    make = MasterWeights(OPTIMIZERS["adamw"], bucket_bytes=4096) if masters else OPTIMIZERS["adamw"]
    source, target = model(dtype), model(dtype)
    saved_optimizer, optimizer = make(source.parameters()), make(target.parameters())
    for step in range(3):
        backward(source, step)
        saved_optimizer.step()
        saved_optimizer.zero_grad()
    checkpoint = saved_optimizer.state_dict()
    state = TrainerState(optimizer, mover, region_bytes=20_000)
    backward(target, 7)
    optimizer.step()
    optimizer.zero_grad()
    if parked:
        park(state)
    optimizer.load_state_dict(copy.deepcopy(checkpoint))
    target.load_state_dict(source.state_dict())
    state.parkings[0].settle()
    assert (state.parkings[0].residency is O) is parked
    assert_same(optimizer.state_dict()["state"], checkpoint["state"])
    backward(target, 11)
    optimizer.step()
    backward(source, 11)
    saved_optimizer.step()
    assert_same(source.state_dict(), target.state_dict())
    state.close()


def test_a_load_that_was_refused_says_nothing_of_where_the_next_one_leaves_the_state(mover):
    net = model()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    state = TrainerState(optimizer, mover)
    backward(net, 0)
    optimizer.step()
    state.refresh()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict({**checkpoint, "param_groups": []})
    state.bring_back()
    park(state)
    optimizer.load_state_dict(checkpoint)
    assert (state.parkings[0].residency, state.parkings[0].device_bytes) == (O, 0)
    state.close()


def test_a_new_parameter_group_joins(mover):
    net, extra = model(), torch.nn.Parameter(torch.ones(1000))
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    state = TrainerState(optimizer, mover)
    backward(net, 0)
    optimizer.step()
    before = state.parkings[0].size_bytes
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(1000)
    park(state)
    optimizer.step()
    assert state.parkings[0].size_bytes >= before + 2 * 4000
    park(state)
    assert state.parkings[0].device_bytes == 0
    state.close()


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
        assert expected_sizes(kind([trained, frozen]))[0] == copies * 512
    groups = [{"params": [trained]}, {"params": [torch.nn.Parameter(torch.zeros(64))], "amsgrad": True}]
    assert expected_sizes(torch.optim.AdamW(groups))[0] == 2 * 512 + 3 * 256
    halves = [torch.nn.Parameter(torch.zeros(128, dtype=torch.bfloat16))]
    for remainders in (True, False):  # moments are of fp32 masters
        assert expected_sizes(MasterWeights(torch.optim.AdamW, remainders=remainders)(halves))[0] == 2 * 512


def test_gradients_that_are_held_are_among_what_stays_and_refuse_to_move(mover):
    net = model()
    state = TrainerState(OPTIMIZERS["adamw"](net.parameters()), mover)
    backward(net, 0)
    held = net[0].weight.grad.view(-1)
    assert state.kept.items == [] and not state.kept.holds_state
    state.refresh()
    (kept,) = state.kept.items
    assert (kept.name, kept.size_bytes) == ("gradients", held.nbytes) and not state.kept.holds_state
    assert state.kept.size_bytes == state.kept.device_bytes == held.nbytes
    assert state.kept.begin(R).poll()
    with pytest.raises(PhaseError, match="trainer.kept is resident and cannot become offloaded: it never moves"):
        state.kept.begin(O)
    state.close()


def test_what_joins_before_the_first_step_is_expected_too(mover):
    net = model()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    state = TrainerState(optimizer, mover)
    before = state.parkings[0].size_bytes
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(64))]})
    state.refresh()
    assert state.parkings[0].size_bytes == before + 2 * 256
    state.close()


def test_the_first_step_is_expected_before_it_happens(mover):
    net = model()
    for name in ("adamw", "adamw-amsgrad", "sgd-momentum"):
        optimizer = OPTIMIZERS[name](net.parameters())
        state = TrainerState(optimizer, mover)
        expected = state.parkings[0].size_bytes
        assert (state.parkings[0].residency, state.parkings[0].device_bytes) == (D, 0)
        assert state.parkings[1].size_bytes == 0
        backward(net, 0)
        optimizer.step()
        assert state.parkings[0].size_bytes == expected == expected_sizes(optimizer)[0]
        state.close()


@pytest.mark.parametrize("name", ["adamw", "adamw-amsgrad", "nested", "one-table", "masters"])
@pytest.mark.parametrize("parked", [True, False])
def test_closing_on_the_host_hands_the_arenas_memory_over(name, parked, device):
    make = MasterWeights(OPTIMIZERS["adamw"]) if name == "masters" else OPTIMIZERS[name]
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    plain, net = model(dtype), model(dtype)
    reference, optimizer = make(plain.parameters()), make(net.parameters())
    mover = Mover(device, host_limit_bytes=256 * MIB)
    state = TrainerState(optimizer, mover, region_bytes=1024)
    for step in range(2):
        park(state)  # in the second round: extents there, state resident
        for side, opt in ((plain, reference), (net, optimizer)):
            backward(side, step)
            opt.step()
    if parked:
        park(state)
    slabs = [(slab.data.data_ptr(), slab.data.data_ptr() + slab.size_bytes) for slab in mover.arena._blocks]
    held = mover.arena.pinned_bytes
    state.close(torch.device("cpu"))
    assert mover.arena.pinned_bytes == held
    tensors = [t for t in leaves([*optimizer.state.values()]) if isinstance(t, torch.Tensor) and t.dim()]
    assert all(any(a <= t.data_ptr() < b for a, b in slabs) for t in tensors)
    mover.close()
    gc.collect()
    assert_same(reference.state_dict(), optimizer.state_dict())
    backward(plain, 9), backward(net.cpu(), 9)
    reference.step(), optimizer.step()
    assert_same(plain.state_dict(), net.state_dict())


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("fits_host", [True, False])
def test_loading_a_state_never_has_the_old_one_beside_it_on_the_device(masters, fits_host):
    net = model(torch.bfloat16 if masters else torch.float32)
    make = partial(torch.optim.AdamW, lr=1e-2)
    optimizer = (MasterWeights(make) if masters else make)(net.parameters())
    mover = Mover(torch.device("cpu"), host_limit_bytes=None if fits_host else 64)
    state = TrainerState(optimizer, mover)
    net(torch.ones(2, 33, dtype=next(net.parameters()).dtype)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()

    held = []
    optimizer.register_load_state_dict_pre_hook(
        lambda *_: held.append(sum(segment.device_bytes for segment in state.segments[:2]))
    )
    optimizer.load_state_dict(saved)
    assert (held == [0]) is fits_host
    assert {segment.residency for segment in state.segments[:2]} <= {R, D}, "training goes on at once"
    again = optimizer.state_dict()
    assert all(
        torch.equal(value, again["state"][index][name])
        for index, state in saved["state"].items()
        for name, value in state.items()
    )
    with pytest.raises(ValueError):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.step()
    state.close()
    mover.close()


# ---- what is found, and what stays -----------------------------------------------------------------------------------


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


def net_of(size=8):
    torch.manual_seed(1)
    return torch.nn.Linear(size, size, bias=False)


def make_step(net, optimizer, *, zero=True):
    net(torch.ones(3, net.in_features)).square().mean().backward()
    optimizer.step()
    if zero:
        optimizer.zero_grad()


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
    state = TrainerState(optimizer, mover)
    make_step(net, optimizer)
    park(state)
    kept = state.kept.items
    assert {item.name for item in kept} == {"state[0]['kept']"} and all(reason in item.reason for item in kept)
    assert state.kept.size_bytes == state.kept.device_bytes == size_bytes
    assert is_at_host(mover, optimizer.state[net.weight]["momentum_buffer"])
    assert state.parkings[0].residency is O and state.parkings[0].host_bytes > 0
    optimizer.state_dict()
    make_step(net, optimizer)
    state.close()
    OUTSIDE.clear()


@pytest.mark.parametrize("what", ["the parameter", "its data", "its gradient"])
def test_memory_that_is_counted_elsewhere_stays_and_costs_nothing_here(what, mover):
    taken = {"the parameter": lambda p: p, "its data": lambda p: p.data, "its gradient": lambda p: p.grad}
    net = net_of()
    optimizer = Keeping(net.parameters(), taken[what])
    state = TrainerState(optimizer, mover)
    make_step(net, optimizer, zero=False)
    park(state)
    assert sum(kept.size_bytes for kept in state.kept.items if kept.name != "gradients") == 0
    assert state.parkings[0].residency is O
    is_away = is_at_host(mover, optimizer.state[net.weight]["kept"])
    assert is_away is (what == "its gradient"), "which leaves as a gradient"
    assert torch.equal(optimizer.state[net.weight]["kept"], taken[what](net.weight))
    state.close()


def test_a_gradient_that_only_the_state_refers_to_any_more_is_state(mover):
    net = net_of()
    optimizer = Keeping(net.parameters(), lambda p: p.grad)
    state = TrainerState(optimizer, mover)
    make_step(net, optimizer)
    expected = optimizer.state[net.weight]["kept"].clone()
    park(state)
    assert not state.kept.items and is_at_host(mover, optimizer.state[net.weight]["kept"])
    assert torch.equal(optimizer.state[net.weight]["kept"], expected)
    state.close()


@pytest.mark.parametrize("hold", [lambda t: t.view(-1), lambda t: t[0], lambda t: t.detach(), lambda t: t.numpy()])
def test_a_region_that_somebody_has_views_of_stays_until_they_are_gone(hold, mover):
    net = net_of()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = TrainerState(optimizer, mover, region_bytes=256)
    make_step(net, optimizer)
    held = hold(optimizer.state[net.weight]["exp_avg"])
    expected = copy.deepcopy(held)
    state.refresh()
    assert [item.name for item in state.kept.items] == ["state[0]['exp_avg']"]  # before it is asked to leave
    park(state)
    assert is_at_host(mover, optimizer.state[net.weight]["exp_avg_sq"])
    assert [item.name for item in state.kept.items] == ["state[0]['exp_avg']"]
    assert (state.kept.size_bytes, state.parkings[0].size_bytes) == (256, 256)
    assert (torch.as_tensor(held) == torch.as_tensor(expected)).all()
    make_step(net, optimizer)
    seen = torch.as_tensor(held).flatten()
    assert torch.equal(seen, optimizer.state[net.weight]["exp_avg"].flatten()[: seen.numel()])
    del seen
    is_numpys = not isinstance(held, torch.Tensor)
    del held
    park(state)
    assert is_at_host(mover, optimizer.state[net.weight]["exp_avg"]) is not is_numpys  # torch keeps NumPy's mark
    assert (state.kept.size_bytes, state.parkings[0].size_bytes) == ((256, 256) if is_numpys else (0, 512))
    state.close()


def test_a_view_outlives_the_end_of_colo(mover):
    net = net_of()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = TrainerState(optimizer, mover)
    make_step(net, optimizer)
    view = optimizer.state[net.weight]["exp_avg"].view(-1)
    regions = state.parkings[0].regions
    state.close()
    assert all(region.closed for region in regions) and not state.kept.items
    make_step(net, optimizer)
    assert torch.equal(view, optimizer.state[net.weight]["exp_avg"].view(-1))


def test_views_of_a_buffer_that_only_the_state_refers_to_move_together(mover):
    net = net_of()
    optimizer = Keeping(net.parameters(), lambda p: list(torch.ones(2, *p.shape).unbind()))
    state = TrainerState(optimizer, mover)
    make_step(net, optimizer)
    park(state)
    assert not state.kept.items
    first, second = optimizer.state[net.weight]["kept"]
    assert is_at_host(mover, first) and is_at_host(mover, second)
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    state.close()


def test_what_several_parameters_share_has_the_name_that_comes_first(mover):
    net, buffer = torch.nn.Linear(8, 8), torch.ones(16, 8)
    part = buffer[:8]
    optimizer = Keeping(net.parameters(), lambda p: part)
    state = TrainerState(optimizer, mover)
    make_step(net, optimizer)
    assert [(item.name, item.size_bytes) for item in state.kept.items] == [("state[0]['kept']", 512)]
    state.close()


def test_a_buffer_of_the_state_in_which_a_number_lies_stays(mover):
    def make(p):
        buffer = torch.ones(8)
        return [buffer[0], buffer]

    net = net_of()
    optimizer = Keeping(net.parameters(), make)
    state = TrainerState(optimizer, mover)
    make_step(net, optimizer)
    park(state)
    number, buffer = optimizer.state[net.weight]["kept"]
    (kept,) = state.kept.items  # optimizers read numbers, which may lie anywhere
    assert (kept.name, kept.size_bytes) == ("state[0]['kept'][1]", 32) and not is_at_host(mover, buffer)
    buffer[0] = 5
    assert float(number) == 5
    state.close()


def test_an_optimizer_without_hooks_is_refused_by_name(mover):
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    around = Around(torch.optim.SGD(net_of().parameters(), lr=0.1))
    with pytest.raises(Unsupported, match=r"Around does not call torch.optim.Optimizer.__init__"):
        TrainerState(around, mover)


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
