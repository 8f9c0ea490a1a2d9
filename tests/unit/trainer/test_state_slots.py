"""State whose bytes are away is the same objects: to touch one brings the bytes back, or says what to do."""

import collections
import copy
import gc
import os
import pickle
import signal
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import colo
from colo.config import Offload, RuntimeConfig
from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover
from colo.memory.region import Region
from colo.phases.phase import Phase, Residency
from colo.trainer.master_weights import MasterWeights
from colo.trainer.optimizer_state import StateOffloader
from colo.trainer.stand_ins import ParkedTensor
from colo.trainer.state_slots import StateSlot
from colo.units import MIB
from tests.models import tiny_qwen3

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def net_of(size=8):
    torch.manual_seed(1)
    return torch.nn.Linear(size, size)


def step(net, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    net(torch.randn(3, net.in_features, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def park(offloader):
    for segment in offloader.segments:
        if segment.residency is R:
            segment.begin(O).wait()


class Parked:
    """A small network whose optimizer has stepped and is parked, and a twin without colo."""

    def __init__(self, mover, make=adamw, **options):
        self.net, self.twin = net_of(), net_of()
        self.optimizer, self.reference = make(self.net.parameters()), make(self.twin.parameters())
        self.offloader = StateOffloader(self.optimizer, mover, **options)
        self.step()
        self.tensor = self.optimizer.state[self.net.weight].get("exp_avg")
        self.expected = self.reference.state[self.twin.weight].get("exp_avg")
        park(self.offloader)

    def step(self, seed=0):
        step(self.net, self.optimizer, seed)
        step(self.twin, self.reference, seed)

    @property
    def is_away(self):
        return self.offloader.state.residency is O and isinstance(self.tensor, ParkedTensor)

    def assert_weights_are_the_twins(self):
        for ours, others in zip(self.net.parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(ours, others)


@pytest.fixture
def mover(device):
    mover = Mover(device, host_limit_bytes=64 * MIB)
    yield mover
    mover.close()


@pytest.fixture
def parked(mover):
    made = Parked(mover)
    assert made.is_away and made.offloader.state.device_bytes == 0
    yield made
    made.offloader.close()


USES = {
    "a method": lambda t: t.norm(),
    "an operator": lambda t: t + 1,
    "a function": lambda t: torch.cat([t, t]),
    "a list": lambda t: torch._foreach_mul([t, t], 2)[1],
    "a name": lambda t: torch.add(torch.ones(8, 8), other=t),
    "an index": lambda t: t[2:4],
    "numbers": lambda t: torch.tensor(t.tolist()),
    "one number": lambda t: torch.tensor(t[0, 0].item()),
    "text": lambda t: torch.tensor(len(repr(t))),
    "numpy": lambda t: torch.from_numpy(t.numpy().copy()),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(-1),
    "to": lambda t: t.to(torch.float64),
    "storage": lambda t: torch.tensor(t.untyped_storage().nbytes() >= 256),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "in place": lambda t: t.mul_(2),
    "an attribute of torch's": lambda t: setattr(t, "grad", torch.ones(8, 8)) or t.grad.clone(),
    "assignment": lambda t: t.__setitem__(0, 1.0) or t,
    "autograd": lambda t: (t * torch.ones(8, 8, requires_grad=True)).detach(),
    "an operation of C++": lambda t: torch.ops.aten.add.Tensor(t, 1),
}


@pytest.mark.parametrize("use", USES)
def test_whatever_uses_a_parked_tensor_finds_its_bytes(use, parked):
    used, expected = USES[use](parked.tensor), USES[use](parked.expected)
    assert torch.equal(used, expected) and not isinstance(used, ParkedTensor)
    assert parked.offloader.state.residency is R and type(parked.tensor) is torch.Tensor


def test_what_needs_no_bytes_leaves_them_where_they_are(parked):
    tensor, expected = parked.tensor, parked.expected
    for ask in (
        lambda t: (t.shape, t.dtype, t.device, t.stride(), t.storage_offset(), t.dim(), t.numel(), t.element_size()),
        lambda t: (len(t), t.is_contiguous(), t.requires_grad, t.is_leaf, t.grad, t.layout, t.type(), t.nbytes),
        lambda t: (torch.is_tensor(t), torch.is_floating_point(t), t.is_cuda, isinstance(t, torch.Tensor)),
    ):
        assert ask(tensor) == ask(expected)
    assert parked.is_away


def test_a_parked_tensor_is_the_same_object_to_whoever_holds_it(mover):
    net = net_of()
    optimizer = adamw(net.parameters())
    offloader = StateOffloader(optimizer, mover)
    step(net, optimizer)
    held = optimizer.state[net.weight]["exp_avg"]
    held.note = "mine"
    weak, expected = weakref.ref(held), held.clone()
    for _ in range(2):
        park(offloader)
        assert isinstance(held, ParkedTensor) and held.note == "mine"
        held.other = 1
        assert weak() is held is optimizer.state[net.weight]["exp_avg"]
        assert torch.equal(held, expected) and (held.note, held.other) == ("mine", 1)
        assert not hasattr(held, "keeper")
    offloader.close()
    assert torch.equal(held, expected)


def test_what_holds_one_object_in_several_places_goes_on_doing_so(mover):
    class Shared(torch.optim.SGD):
        def step(self, closure=None):
            if not hasattr(self, "table"):
                self.table = torch.ones(8)
                for p in self.param_groups[0]["params"]:
                    self.state[p]["table"] = self.table
            self.table.mul_(0.5)
            super().step()

    parked = Parked(mover, lambda params: Shared(params, lr=0.1))
    assert parked.offloader.state.residency is O and not parked.offloader.kept.items
    assert isinstance(parked.optimizer.table, ParkedTensor)
    saved = parked.optimizer.state_dict()["state"]
    assert saved[0]["table"] is saved[1]["table"]
    parked.step(1)
    assert torch.equal(parked.optimizer.table, parked.reference.table)
    assert parked.optimizer.table is parked.optimizer.state[parked.net.bias]["table"]
    parked.offloader.close()


def test_copies_and_pickles_of_a_parked_optimizer_are_whole(parked):
    for copied in (copy.deepcopy(parked.optimizer), pickle.loads(pickle.dumps(parked.optimizer))):
        park(parked.offloader)
        tensors = [tensor for state in copied.state.values() for tensor in state.values()]
        expected = [tensor for state in parked.reference.state.values() for tensor in state.values()]
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("away", [True, False])
def test_a_tensor_held_over_loading_keeps_its_values_for_as_long_as_it_is_held(away, parked):
    held, expected = parked.tensor, parked.expected.clone()
    del parked.tensor
    if not away:
        held.norm()
    checkpoint = parked.optimizer.state_dict()
    for entry in checkpoint["state"].values():
        entry["exp_avg"] = entry["exp_avg"] * 2
    parked.optimizer.load_state_dict(checkpoint)
    assert held is not parked.optimizer.state[parked.net.weight]["exp_avg"]
    both_bytes = parked.offloader.state.size_bytes
    park(parked.offloader)
    assert parked.offloader.state.residency is O and isinstance(held, ParkedTensor)
    assert torch.equal(held, expected)
    assert torch.equal(parked.optimizer.state[parked.net.weight]["exp_avg"], expected * 2)
    del held
    parked.offloader.gather()
    assert parked.offloader.state.size_bytes <= both_bytes / 2


def test_memory_that_is_given_to_a_parked_tensor_replaces_its_bytes_without_them(parked):
    parked.tensor.data = torch.full((8, 8), 3.0)
    assert parked.offloader.state.residency is O
    assert torch.equal(parked.tensor, torch.full((8, 8), 3.0))
    parked.offloader.gather()
    park(parked.offloader)
    assert parked.is_away
    assert torch.equal(parked.optimizer.state_dict()["state"][0]["exp_avg"], torch.full((8, 8), 3.0))


Moments = collections.namedtuple("Moments", "m v")
CONTAINERS = {
    "namedtuple": lambda m, v: Moments(m, v),
    "ordered": lambda m, v: collections.OrderedDict(m=m, v=v),
    "default": lambda m, v: collections.defaultdict(list, m=[m], v=[v]),
    "deque": lambda m, v: collections.deque([m, v]),
    "nested": lambda m, v: {"a": [(m, {"b": (v,)})]},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_state_dict_brings_what_containers_hold_and_nothing_back(kind, mover):
    class Contained(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    self.made = torch.zeros_like(p), torch.ones_like(p)
                    state["held"] = CONTAINERS[kind](*self.made)
                self.made[0].add_(p.grad if p.grad.shape == self.made[0].shape else 0)

    parked = Parked(mover, lambda params: Contained(params, lr=0.1))
    saved, expected = parked.optimizer.state_dict()["state"], parked.reference.state_dict()["state"]
    assert parked.offloader.state.residency is O and not parked.offloader.kept.items
    assert type(saved[0]["held"]) is type(expected[0]["held"])
    leaves, others = (torch.utils._pytree.tree_leaves(one) for one in (saved, expected))
    assert len(leaves) == 4 and all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))
    assert parked.offloader.state.residency is O
    parked.offloader.close()


def test_parts_of_sharded_state_come_back_for_whoever_computes_with_them(tmp_path, mover):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.arange(64.0).view(8, 8)
        parameter = torch.nn.Parameter(DTensor.from_local(whole.clone(), mesh, [Shard(0)]))
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        offloader = StateOffloader(optimizer, mover)
        optimizer.step()
        buffer = optimizer.state[parameter]["momentum_buffer"]
        park(offloader)
        assert offloader.state.residency is O
        saved = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert isinstance(saved, DTensor) and torch.equal(saved.to_local(), torch.ones(8, 8))
        assert offloader.state.residency is O
        assert float((buffer * 2).sum().full_tensor()) == 128
        assert offloader.state.residency is R
        park(offloader)
        assert isinstance(parameter.grad, ParkedTensor)
        offloader.close()
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == (Shard(0),)
        assert torch.equal(parameter.grad.to_local(), torch.ones(8, 8))
    finally:
        torch.distributed.destroy_process_group()


class Scaled(torch.Tensor):
    """Half a tensor and a factor: a subclass around others, as quantized optimizers keep them."""

    @staticmethod
    def __new__(cls, half, factor):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32, device=half.device)

    def __init__(self, half, factor):
        self.half, self.factor = half, factor

    def __tensor_flatten__(self):
        return ["half", "factor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["half"], inner["factor"])

    def dequantize(self):
        return self.half.float() * self.factor

    def total(self):
        return self.dequantize().sum()

    def maximum(self, other):
        return torch.full((8, 8), 7.0)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].half.detach(), args[0].factor.detach())
        return func(*[arg.dequantize() if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))


class Halving(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            if not self.state[p].get("scaled"):
                self.state[p]["scaled"] = [Scaled(torch.ones(8, 8, dtype=torch.float16), torch.full((1,), 3.0))]


WRAPPED = {
    "a method of its own": lambda t: t.total(),
    "a method that it overrides": lambda t: t.dequantize(),
    "a method that means something else": lambda t: t.maximum(torch.zeros(8, 8)),
    "a method of another tensor": lambda t: torch.zeros(8, 8).maximum(t),
    "a part of it": lambda t: t.half * 2,
    "an operator": lambda t: t + 1,
    "its class": lambda t: torch.tensor((t.norm() > 0) and isinstance(t, Scaled)),
}


@pytest.mark.parametrize("use", WRAPPED)
def test_a_subclass_around_tensors_leaves_and_comes_back_whole(use, mover):
    parked = Parked(mover, lambda params: Halving(params, lr=0.1))
    (ours,) = parked.optimizer.state[parked.net.weight]["scaled"]
    (theirs,) = parked.reference.state[parked.twin.weight]["scaled"]
    assert isinstance(ours, ParkedTensor) and isinstance(ours.half, ParkedTensor) and not parked.offloader.kept.items
    (saved,) = parked.optimizer.state_dict()["state"][0]["scaled"]
    assert isinstance(saved, Scaled) and torch.equal(saved.dequantize(), theirs.dequantize())
    assert not hasattr(ours, "nothing") and parked.offloader.state.residency is O
    assert torch.equal(WRAPPED[use](ours), WRAPPED[use](theirs))
    assert type(ours) is Scaled and parked.offloader.state.residency is R
    part = ours.half.view(-1)
    park(parked.offloader)
    assert [item.name for item in parked.offloader.kept.items] != [] and torch.equal(part, theirs.half.view(-1))
    del part
    parked.offloader.close(torch.device("cpu"))
    assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_a_subclass_that_is_away_when_colo_is_closed_is_there_again(mover):
    parked = Parked(mover, lambda params: Halving(params, lr=0.1))
    (ours,) = parked.optimizer.state[parked.net.weight]["scaled"]
    parked.offloader.close(torch.device("cpu"))
    assert type(ours) is Scaled and torch.equal(ours.dequantize(), torch.full((8, 8), 3.0))


def test_a_subclass_that_the_state_has_let_go_of_moves_with_the_rest_for_as_long_as_it_is_held(mover):
    parked = Parked(mover, lambda params: Halving(params, lr=0.1))
    (held,) = parked.optimizer.state[parked.net.weight].pop("scaled")
    expected = torch.full((8, 8), 3.0)
    for _ in range(2):
        parked.offloader.gather()
        park(parked.offloader)
        assert isinstance(held, ParkedTensor)
    assert torch.equal(held.dequantize(), expected)
    parked.offloader.close()


@pytest.mark.parametrize("make", [adamw, lambda params: Halving(params, lr=0.1)])
@pytest.mark.parametrize("ended", ["gathered", "closed"])
def test_what_the_state_has_let_go_of_is_freed_at_once(make, ended, mover):
    parked = Parked(mover, make)
    tensors = torch.utils._pytree.tree_leaves(list(parked.optimizer.state.values()))
    gone = [weakref.ref(t) for t in tensors if isinstance(t, ParkedTensor)]
    assert gone
    del tensors, parked.tensor
    gc.collect()
    gc.disable()
    try:
        if ended == "closed":
            parked.offloader.close()
        parked.optimizer.state.clear()
        if ended == "gathered":
            parked.offloader.gather()
        assert [ref() for ref in gone if ref() is not None] == []
    finally:
        gc.enable()
    assert parked.offloader.state.host_bytes == 0
    parked.offloader.close()


def test_a_tensor_that_joins_memory_that_has_moved_moves_with_it(parked):
    state = parked.optimizer.state[parked.net.weight]
    state["flat"] = parked.tensor.view(-1)
    parked.offloader.gather()
    park(parked.offloader)
    assert parked.is_away and isinstance(state["flat"], ParkedTensor) and not parked.offloader.kept.items
    assert torch.equal(state["flat"], parked.expected.view(-1))
    assert state["flat"].data_ptr() == parked.tensor.data_ptr()


def test_state_that_appears_while_the_rest_is_away_joins_it_there(parked):
    state = parked.optimizer.state[parked.net.weight]
    state["late"] = torch.arange(100.0)
    parked.offloader.gather()
    assert parked.is_away and isinstance(state["late"], ParkedTensor)
    assert torch.equal(state["late"], torch.arange(100.0)) and torch.equal(parked.tensor, parked.expected)


def test_state_that_is_on_its_way_back_is_waited_for_and_not_asked_for(mover):
    asked = []
    parked = Parked(mover, on_touch=asked.append)
    parked.offloader.state.begin(R)
    parked.offloader.gather()
    assert type(parked.tensor) is torch.Tensor and torch.equal(parked.tensor, parked.expected)
    park(parked.offloader)
    parked.offloader.state.begin(R)
    parked.offloader.state.begin(O).wait()
    assert parked.is_away and not parked.offloader.kept.items and not asked
    parked.offloader.state.begin(R)
    assert torch.equal(parked.optimizer.state_dict()["state"][0]["exp_avg"], parked.expected)
    park(parked.offloader)
    parked.step(1)
    parked.assert_weights_are_the_twins()
    park(parked.offloader)
    parked.offloader.state.begin(R)
    parked.offloader.close()
    assert torch.equal(parked.tensor, parked.expected) and not asked


def test_only_the_segment_that_is_touched_comes_back(mover):
    net = net_of().to(torch.bfloat16)
    optimizer = MasterWeights(adamw, remainders=False)(net.parameters())
    offloader = StateOffloader(optimizer, mover)
    net(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer.state[net.weight]
    expected = {key: state[key].detach().clone() for key in ("master_weight", "exp_avg")}
    park(offloader)
    assert torch.equal(state["master_weight"], expected["master_weight"]) and state["master_weight"].requires_grad
    assert (offloader.masters.residency, offloader.state.residency) == (R, O)
    park(offloader)
    both = torch._foreach_mul([state["master_weight"], state["exp_avg"]], 1)
    assert all(torch.equal(a, b) for a, b in zip(both, expected.values(), strict=True))
    assert (offloader.masters.residency, offloader.state.residency) == (R, R)
    offloader.close()


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_tensor_that_nobody_brings_back_is_refused_by_name(mover):
    parked = Parked(mover, on_touch=lambda name: None)
    with pytest.raises(PhaseError, match=r"^state\[0\]\['exp_avg'\] is in host memory and did not come back"):
        parked.tensor.norm()
    assert parked.is_away
    parked.offloader.close()


def test_a_stand_in_where_none_is_looked_for_says_so(parked):
    with pytest.raises(PhaseError, match="was used: touch it within"):
        ParkedTensor.__torch_function__(torch.add, (ParkedTensor,), ({1: {parked.tensor}},))
    assert parked.is_away


def test_a_stand_in_that_has_been_forgotten_has_no_attributes():
    forgotten = ParkedTensor(torch.zeros(2), None)
    del forgotten.keeper
    with pytest.raises(AttributeError, match="anything"):
        forgotten.anything  # noqa: B018


def test_state_that_fails_to_leave_is_there_as_before(parked, monkeypatch):
    parked.tensor.norm()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="CUDA error"):
        patch.setattr(parked.offloader._mover, "copy_out", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error")))
        park(parked.offloader)
    assert parked.offloader.state.residency is R and type(parked.tensor) is torch.Tensor
    assert torch.equal(parked.tensor, parked.expected)
    park(parked.offloader)
    assert parked.is_away


def test_state_that_fails_to_come_back_stays_away_and_comes_back_the_next_time(parked, monkeypatch):
    def full(self):
        raise BudgetError("1 GiB needed, 0 free", needed_bytes=2**30, free_bytes=0)

    with monkeypatch.context() as patch:
        patch.setattr(Region, "restore", full)
        with pytest.raises(PhaseError, match=r"no room for .* now: read it within `with rt.train\(\):`"):
            parked.tensor.norm()
        assert parked.is_away
        assert torch.equal(parked.optimizer.state_dict()["state"][0]["exp_avg"], parked.expected)
    assert torch.equal(parked.tensor, parked.expected)
    parked.step(1)
    parked.assert_weights_are_the_twins()


@pytest.mark.usefixtures("interrupts_raise")
@pytest.mark.parametrize("target", [O, R])
@pytest.mark.parametrize("at", ["hide", "show"])
def test_an_interrupt_amid_the_tensors_leaves_them_all_here_or_all_away(target, at, parked, monkeypatch):
    if target is O:
        parked.tensor.norm()
    change, calls = getattr(StateSlot, at), []

    def interrupted(place):
        change(place)
        calls.append(place)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(StateSlot, at, interrupted)
    try:
        parked.offloader.state.begin(target).wait()
    except KeyboardInterrupt:
        assert (at, len(calls) >= 2) == ("hide" if target is O else "show", True)
    monkeypatch.undo()
    tensors = [t for state in parked.optimizer.state.values() for t in state.values() if t.dim()]
    assert len({isinstance(t, ParkedTensor) for t in tensors}) == 1
    assert isinstance(tensors[0], ParkedTensor) is (parked.offloader.state.residency is O)
    parked.step(1)
    parked.assert_weights_are_the_twins()


@pytest.mark.parametrize(("at", "target"), [("hide", O), ("show", R)])
def test_an_error_amid_the_tensors_leaves_each_with_its_bytes_or_away(at, target, parked, monkeypatch):
    if target is O:
        parked.tensor.norm()
    change, calls = getattr(StateSlot, at), []

    def failing(place):
        calls.append(place)
        if len(calls) == 2:
            raise RuntimeError("not this one")
        change(place)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not this one"):
        patch.setattr(StateSlot, at, failing)
        parked.offloader.state.begin(target).wait()
    assert torch.equal(parked.optimizer.state_dict()["state"][0]["exp_avg"], parked.expected)
    assert torch.equal(parked.tensor, parked.expected)
    assert parked.offloader.state.residency is R
    park(parked.offloader)
    assert parked.is_away
    parked.step(1)
    parked.assert_weights_are_the_twins()


def test_closing_while_away_serves_whoever_holds_a_tensor(parked):
    parked.offloader.close(torch.device("cpu"))
    gc.collect()
    assert (parked.offloader.state.host_bytes, parked.offloader.state.device_bytes) == (0, 0)
    assert torch.equal(parked.tensor, parked.expected)
    step(parked.net, parked.optimizer, 1), step(parked.twin, parked.reference, 1)
    assert torch.equal(parked.tensor, parked.expected)
    parked.assert_weights_are_the_twins()


# ---- in a runtime ----------------------------------------------------------------------------------------------------


def launch(optimizer=adamw, **options):
    options = {"kv_cache_bytes": MIB, "offload": Offload.ALWAYS} | options
    return colo.launch(tiny_qwen3(), optimizer=optimizer, device="cpu", config=RuntimeConfig(**options))


def train(rt, number=0):
    ids = torch.tensor([[number, 2, 3, 4]])
    rt.model(input_ids=ids, labels=ids).loss.backward()
    rt.optimizer.step()
    rt.optimizer.zero_grad()


def moment_of(rt):
    return rt.optimizer.state[rt.model.lm_head.weight]["exp_avg"]


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.ROLLOUT, Phase.IDLE])
def test_state_is_read_in_every_phase_that_has_room_for_it(phase):
    with launch() as rt:
        with rt.train():
            train(rt)
            expected = moment_of(rt).clone()
        rt.generate([[1]], max_tokens=1)
        segment = rt.scheduler.segments["trainer.optimizer"]
        assert segment.residency is O
        if phase is Phase.IDLE:
            assert torch.equal(moment_of(rt), expected)
        else:
            with rt.train() if phase is Phase.TRAIN else rt.rollout():
                assert torch.equal(moment_of(rt), expected)
                assert rt.trace.samples[-1].total_bytes <= rt.scheduler.promised_bytes
        assert segment.residency is R
        rt.generate([[1]], max_tokens=1)
        assert segment.residency is O


def test_state_without_room_in_a_rollout_says_so_and_is_whole_after_it():
    model_bytes = sum(p.numel() * 4 for p in launch().model.parameters())
    rt = launch(kv_cache_bytes=2 * model_bytes, device_limit_bytes=int(4.2 * model_bytes), offload=Offload.AUTO)
    with rt.train():
        train(rt)
        expected = moment_of(rt).clone()
    with rt.rollout():
        with pytest.raises(PhaseError, match=r"trainer.optimizer is in host memory.*optimizer.state_dict\(\) works"):
            moment_of(rt).norm()
        saved = rt.optimizer.state_dict()["state"]
        assert any(torch.equal(entry["exp_avg"], expected) for entry in saved.values())
        assert rt.generate([[1]], max_tokens=1)
    with rt.train():
        assert torch.equal(moment_of(rt), expected)
        train(rt, 1)
    rt.close()


def test_schedule_free_optimizers_change_modes_around_a_rollout():
    schedulefree = pytest.importorskip("schedulefree")
    rt = launch(lambda params: schedulefree.AdamWScheduleFree(params, lr=1e-2))
    twin = copy.deepcopy(rt.model)
    reference = schedulefree.AdamWScheduleFree(twin.parameters(), lr=1e-2)
    for number in range(3):
        ids = torch.tensor([[number, 2, 3, 4]])
        reference.train()
        twin(input_ids=ids, labels=ids).loss.backward()
        reference.step(), reference.zero_grad(), reference.eval()
        with rt.train():
            rt.optimizer.train()
            train(rt, number)
            rt.optimizer.eval()
        rt.generate([[1]], max_tokens=1)
        assert rt.scheduler.segments["trainer.optimizer"].residency is O
    assert all(torch.equal(a, b) for a, b in zip(rt.model.parameters(), twin.parameters(), strict=True))
    rt.close()
