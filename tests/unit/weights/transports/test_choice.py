"""The choice of a transport, and the one that sends nothing."""

import gc
import os
import re
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from colo.config import RuntimeConfig
from colo.errors import StaleWeights, TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.weights.packed import PackedWeight
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.choice import SharedTransport, is_same_memory, transport_for
from colo.weights.transports.receiver import Receiver

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.ones(2))
        self.q = nn.Parameter(torch.randn(3, 2))
        self.k = nn.Parameter(torch.randn(3, 2))


class Engine:
    """Takes `q` and `k` one below the other. `pids` are those of its workers, for one in another process."""

    device = CPU
    ipc_refusal = None
    segments = ()

    def __init__(
        self, dtype=torch.float32, *, factor=1, transposed=False, pids=None, same_process=False, outlives=False
    ):
        self.outlives = outlives
        self.memory = {"qk": torch.zeros(*((2, 6) if transposed else (6, 2)), dtype=dtype)}
        self.is_shared = False
        self._factor = factor
        self._transposed = transposed
        if pids is not None:
            self.pids, self.same_process = pids, same_process
            self.receiver = Receiver(CPU, self.record_plan)
            self.receive, self.receive_all = self._receive, self._receive_all

    def load_weights(self, weights):
        qk = self.memory["qk"].t() if self._transposed else self.memory["qk"]
        for name, tensor in weights:
            if name in ("q", "k"):
                rows = slice(0, 3) if name == "q" else slice(3, 6)
                qk[rows].copy_(tensor * self._factor if self._factor != 1 else tensor)
            elif name != "bias":
                raise KeyError(name)

    def record_plan(self, source):
        return LoadPlan.record(self.load_weights, source, self.memory)

    def share_weights(self):
        self.is_shared = True
        return self.outlives

    def gather(self, value):
        return [value]

    def packed_weights(self):
        return {}

    def _receive(self, step, **arguments):
        return [getattr(self.receiver, step)(**arguments)]

    def _receive_all(self, operations):
        return [self._receive(name, **arguments) for name, arguments in operations][-1]


ELSEWHERE = (os.getpid() + 1,)


def choose(engine, model, **settings):
    return transport_for(ModuleSource(model), engine, RuntimeConfig(**settings))


def test_weights_that_can_be_the_engines_memory_are_with_the_values_that_they_have():
    model, engine = Net(), Engine()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    bias = model.bias.data_ptr()
    transport = choose(engine, model)
    assert transport.name == "shared" and engine.is_shared
    assert torch.equal(engine.memory["qk"], torch.cat([before["q"][1], before["k"][1]]))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    engine.memory["qk"].fill_(7)
    assert model.q.eq(7).all() and model.k.eq(7).all()
    assert model.bias.data_ptr() == bias
    model.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(StaleWeights, match="extra"):
        transport.verify()


def test_weights_that_are_the_engines_memory_already_stay_there():
    model, engine = Net(), Engine()
    model.q.data, model.k.data = engine.memory["qk"][:3], engine.memory["qk"][3:]
    engine.memory["qk"].fill_(5)
    transport = choose(engine, model)
    assert transport.name == "shared"
    assert [model.q.data_ptr(), model.k.data_ptr()] == [half.data_ptr() for half in engine.memory["qk"].split(3)]
    assert model.q.eq(5).all()
    transport.move_out(CPU)
    assert engine.memory["qk"].data_ptr() not in (model.q.data_ptr(), model.k.data_ptr()), "which ends with the engine"


def test_those_that_were_another_owners_memory_before_stay_there_to_the_end():
    model, engine = Net(), Engine(outlives=True)
    model.q.data = engine.memory["qk"][:3]
    transport = choose(engine, model)
    moved_in = model.k.data_ptr()
    transport.move_out(CPU)
    transport.close()
    assert model.q.data_ptr() == engine.memory["qk"].data_ptr() and model.k.data_ptr() != moved_in


@pytest.mark.parametrize(
    ("engine", "settings", "reason"),
    [
        ({}, {"weights": "copy"}, r"a copy each was asked for \(weights='copy'\); 2 recorded copies are replayed"),
        (
            {"dtype": torch.bfloat16},
            {},
            "q cannot be shared: it is torch.float32 here and torch.bfloat16 in the engine; 2 recorded copies",
        ),
        ({"transposed": True}, {}, "q cannot be shared: the engine lays it out differently; 2 recorded copies"),
        ({"factor": 2}, {}, "q cannot be shared: .*computes with it.*; the engine's own loader is used, because of q"),
        ({"pids": ELSEWHERE, "transposed": True}, {}, "q cannot be shared: the engine lays it out differently; 2 rec"),
        (
            {"pids": ELSEWHERE, "same_process": True},
            {"weights": "copy"},
            r"a copy each was asked for .*; 2 recorded copies",
        ),
        (
            {"pids": ELSEWHERE, "factor": 2},
            {},
            "q cannot be shared: .*; recorded copies will not do .*; the engine's own loader is used",
        ),
    ],
)
def test_where_they_cannot_be_they_are_copied_and_the_reason_is_told(engine, settings, reason):
    model, engine = Net(), Engine(**engine)
    values = [p.detach().clone() for p in model.parameters()]
    transport = choose(engine, model, **settings)
    assert transport.name == "local" and not engine.is_shared
    assert not engine.memory["qk"].any()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert re.match(reason, transport.reason), transport.reason


@pytest.mark.parametrize("weights", ["copy", "staged"])
@pytest.mark.parametrize("verify", [True, False])
def test_an_engine_in_another_process_copies_out_of_the_trainers_memory_or_is_sent_buckets(weights, verify):
    model, engine = Net(), Engine(pids=ELSEWHERE)
    transport = choose(engine, model, weights=weights, verify=verify)
    assert transport.name == "ipc"
    how = (
        "copied by the engine out of"
        if weights == "copy"
        else "staged through a buffer in two halves, as was asked for"
    )
    assert how in transport.reason and transport.reason.startswith("a copy each was asked for")
    transport.transfer()
    assert torch.equal(engine.memory["qk"], torch.cat([model.q, model.k]))
    if weights == "staged":
        model.q.data.add_(1)
        assert transport.is_current() is not verify  # which is read only for that
    transport.close()


@pytest.mark.parametrize("verify", [True, False])
def test_copies_within_the_process_are_verified_where_that_is_asked_for(verify):
    model, engine = Net(), Engine(factor=2)
    transport = choose(engine, model, verify=verify)
    transport.transfer()
    model.q.data.add_(1)
    assert transport.is_current() is not verify


def test_a_weight_that_the_engine_does_not_take_is_named():
    model, engine = Net(), Engine()
    engine.load_weights = lambda weights: Engine.load_weights(engine, ((n, t) for n, t in weights if n != "extra"))
    model.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(TransferError, match="takes 0 of the 2 elements of extra"):
        choose(engine, model)


def test_sharded_weights_are_copied(mesh):
    model = Net()
    model.q = nn.Parameter(distribute_tensor(model.q.detach(), mesh, [Shard(0)]))
    engine = Engine()
    transport = choose(engine, model)
    assert transport.name == "slices"
    assert transport.reason.startswith("q cannot be shared: it is sharded over the trainer's ranks")
    assert transport.reason.endswith(
        "of 2 recorded copies 48 bytes are this rank's own and 0 come from other ranks, as slices (rank 0 receives "
        "0 B), copied within each rank"
    )
    assert transport.transfer() == 48
    assert torch.equal(engine.memory["qk"], torch.cat([model.q.full_tensor(), model.k]))


def test_sharded_weights_with_which_the_loader_computes_are_gathered(mesh):
    model, engine = Net(), Engine(factor=2)
    model.q = nn.Parameter(distribute_tensor(model.q.detach(), mesh, [Shard(0)]))
    transport = choose(engine, model)
    assert transport.name == "local"
    assert "the engine's own loader is used, because of q: the loader computes with it" in transport.reason
    transport.transfer()
    assert torch.equal(engine.memory["qk"], 2 * torch.cat([model.q.full_tensor(), model.k]))


def test_sharded_weights_with_gaps_are_gathered(mesh):
    model = Net()
    q = distribute_tensor(torch.randn(3, 2), mesh, [Shard(0)])
    model.q = nn.Parameter(DTensor.from_local(q.to_local(), mesh, [Shard(0)], shape=(3, 2), stride=(4, 2)))
    engine = Engine()
    transport = choose(engine, model)
    assert transport.name == "local"
    assert "gathered whole, because a tensor of shape (3, 2) has strides (4, 2), with gaps" in transport.reason


def test_ranks_whose_weights_would_take_different_ways_are_refused(both):
    def body(rank):
        model = Net()
        model.q = nn.Parameter(distribute_tensor(model.q.detach(), mesh_of_two(), [Shard(0)]))
        engine = Engine(pids=ELSEWHERE if rank else None)
        choose(engine, model, weights="copy")

    one, other = both(body)
    assert "different ways, this one as 'slices' (a copy each was asked for" in one
    assert "different ways, this one as 'ipc' (a copy each was asked for" in other


def mesh_of_two():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


class Params4bit(nn.Parameter):
    """Called like bitsandbytes' own."""


def packed(memory):
    model = Net()
    model.q = Params4bit(memory, requires_grad=False)
    return model


def test_packed_weights_have_to_be_the_engines_memory_already():
    engine = Engine()
    for engines in (None, {}, {"q": PackedWeight(data=torch.zeros(3, 2), quant_state=None)}):
        if engines is not None:
            engine.packed_weights = lambda engines=engines: engines
        with pytest.raises(Unsupported, match="1 weights are quantized by bitsandbytes, q for one"):
            choose(engine, packed(torch.zeros(3, 2)))
    held = engine.memory["qk"][:3]
    engine.packed_weights = lambda: {"q": PackedWeight(data=held, quant_state=None)}
    assert choose(engine, packed(held)).name == "shared"


def test_a_worker_of_another_namespace_whose_process_has_the_same_number_is_in_another_process():
    engine = Engine(pids=(os.getpid(),))
    transport = choose(engine, Net(), weights="copy")
    assert transport.name == "ipc"
    transport.close()


class Source(ModuleSource):
    """Counts how often it looks for every weight by name, which takes long for a large model."""

    listed = 0

    def _found(self):
        self.listed += 1
        return super()._found()


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))


@pytest.fixture
def shared(model):
    source = Source(model)
    source.foreign.add("0.bias")  # not the engine's
    source.settle_names()
    return SharedTransport(source, {name: tensor.detach() for name, tensor in source})


def test_nothing_is_sent(shared):
    assert shared.reason == "all 6 weights are the engine's own memory"
    assert shared.transfer() == shared.working_bytes == 0
    assert shared.is_current()


def test_weights_that_stay_where_they_are_are_found_once(model, shared):
    for _ in range(3):
        shared.verify()
    assert shared.source.listed == 1
    model[1].weight.data.add_(1)
    shared.verify()
    assert shared.source.listed == 1
    model[1].weight = model[1].bias
    with pytest.raises(StaleWeights):
        shared.verify()
    assert shared.source.listed == 2


def assign(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


def give_other_memory(model):
    model[2].weight.data = model[2].weight.data.clone()


def transpose(model):
    model[2].weight.data = model[2].weight.data.t()


def replace_a_buffer(model):
    model[1].running_var = torch.ones(3)


def make_a_module_anew(model):
    model[2] = nn.Linear(3, 3, bias=False)


def make_the_first_module_anew(model):
    model[0] = nn.Linear(3, 3)


def view_as_other_numbers(model):
    model[2].weight.data = model[2].weight.data.view(torch.int32).view(torch.bfloat16)[:, :3]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (assign, "0.weight"),
        (give_other_memory, "2.weight"),
        (transpose, "2.weight"),
        (view_as_other_numbers, "2.weight"),
        (replace_a_buffer, "1.running_var"),
        (make_a_module_anew, "2.weight"),
        (make_the_first_module_anew, "0.weight"),
    ],
)
@pytest.mark.parametrize("was_verified", [True, False])
def test_a_weight_that_is_elsewhere_is_named(model, shared, change, name, was_verified):
    if was_verified:
        shared.verify()
    change(model)
    for _ in range(2):
        with pytest.raises(StaleWeights, match=rf"^{name} is no longer the engine's memory \(.*shared was \(3"):
            shared.verify()


def test_what_it_is_and_what_it_was_are_told(model, shared):
    model.half()
    with pytest.raises(StaleWeights, match=r"\(\(3, 3\) float16 on cpu, shared was \(3, 3\) float32 on cpu\)"):
        shared.verify()


def test_weights_that_come_or_go_are_named(model, shared):
    shared.verify()
    model.append(nn.Linear(3, 1, bias=False))
    with pytest.raises(StaleWeights, match=r"did not have when the runtime was built, 3\.weight"):
        shared.verify()
    del model[3]
    shared.verify()
    model[2].bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(StaleWeights, match=r"did not have when the runtime was built, 2\.bias"):
        shared.verify()
    model[2].bias = None
    shared.verify()
    del model[2].weight
    with pytest.raises(StaleWeights, match=r"the model has no parameter 2\.weight any more, .*: put it back, or close"):
        shared.verify()


def test_a_weight_that_comes_back_is_fine(model, shared):
    weight = model[2].weight
    model[2].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(StaleWeights):
        shared.verify()
    model[2].weight = weight
    shared.verify()


def test_moving_out_gives_shared_parameters_memory_of_their_own(model, shared):
    before = list(model.parameters())
    values = [p.detach().clone() for p in before]
    alone = model[0].bias.data_ptr()
    aliases = dict(shared.source)
    memory = {name: alias.data_ptr() for name, alias in aliases.items()}
    extra = nn.Parameter(torch.ones(1))
    model[0].extra = extra  # no alias, and not the last
    place = extra.data_ptr()
    shared.move_out(CPU)
    for name, tensor in shared.source:
        assert (tensor.data_ptr() != memory.get(name)) and (tensor is aliases.get(name, tensor))
    assert extra.data_ptr() == place and model[0].bias.data_ptr() == alone
    assert all(torch.equal(p, v) for p, v in zip(before, values, strict=True))


def test_closing_lets_go_of_the_engines_memory_and_of_parameters_that_have_gone(model):
    engine = torch.zeros(3, 3)
    model[2].weight.data = engine.view(3, 3)
    source = ModuleSource(model)
    transport = SharedTransport(source, {"2.weight": engine})
    transport.verify()
    old, memory = weakref.ref(model[2].weight), weakref.ref(engine)
    model[2].weight = nn.Parameter(torch.zeros(3, 3))
    del engine
    gc.collect()
    assert old() is not None and memory() is not None
    transport.close()
    transport.close()
    gc.collect()
    assert old() is None and memory() is None


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda t: t.view(4, 4), True),
        (lambda t: t[1:], False),
        (lambda t: t.clone(), False),
        (lambda t: t[:3], False),
        (lambda t: t.t(), False),
        (lambda t: t.view(torch.int32), False),
    ],
)
def test_the_same_memory_is_that_of_the_same_elements_at_the_same_addresses(other, same):
    tensor = torch.zeros(4, 4)
    assert is_same_memory(tensor, other(tensor)) is same
