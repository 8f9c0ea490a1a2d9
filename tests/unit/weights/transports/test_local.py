"""Copies within one process, recorded ones and those of the engine's own loader, and what is known of them after."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from colo.errors import TransferError
from colo.memory.load_plan import LoadPlan
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.local import GATHERED_BYTES, LocalTransport


class Loader:
    """An engine of which only the loader is there."""

    def __init__(self, error=None):
        self.given = {}
        self.error = error

    def load_weights(self, weights):
        for name, tensor in weights:
            self.given[name] = tensor.detach().clone()
        if self.error is not None:
            raise self.error


class Odd(nn.Module):
    """Tensors that are not whole words, or not in a row."""

    def __init__(self):
        super().__init__()
        self.short = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.matrix = nn.Parameter(torch.randn(6, 4).t())
        self.plain = nn.Parameter(torch.randn(8))


def transport(model, engine, *, verify=True):
    source = ModuleSource(model)
    plan = LoadPlan(copies=(), sources={}, strides={}, fallbacks={"plain": "tested"}, unused=frozenset())
    return LocalTransport(source, engine, plan, why_not_shared="tested", verify=verify)


@pytest.mark.parametrize("name", ["short", "matrix", "plain"])
def test_a_change_of_any_tensor_is_seen_until_it_is_sent(name):
    model, engine = Odd(), Loader()
    local = transport(model, engine)
    assert not local.is_current()
    assert local.transfer() == 5 * 2 + 24 * 4 + 8 * 4
    assert local.is_current()
    getattr(model, name).data.view(-1)[-1:].add_(1) if name != "matrix" else model.matrix.data[3, 5:].add_(1)
    assert not local.is_current()
    local.transfer()
    assert local.is_current()
    assert torch.equal(engine.given[name], getattr(model, name))


def test_what_did_not_arrive_is_not_current():
    model, engine = Odd(), Loader()
    local = transport(model, engine)
    local.transfer()
    engine.error = RuntimeError("tested")
    with pytest.raises(RuntimeError, match="tested"):
        local.transfer()
    assert not local.is_current()


def test_without_verification_nothing_is_read():
    model = Odd()
    local = transport(model, Loader(), verify=False)
    local.transfer()
    model.plain.data.add_(1)
    assert local.is_current()


# ---- recorded copies -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two weights of a quarter of what is whole at a time, one larger than that, and two small ones."""

    def __init__(self, num_rows):
        super().__init__()
        sizes = {"a": num_rows // 4, "b": num_rows // 4, "large": num_rows + 1, "small": 3, "last": 5}
        for name, rows in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.full((rows, 64), float(len(name)))))


class Engine:
    """Memory of a tensor for each weight."""

    def __init__(self, model):
        self.memory = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}

    def load_weights(self, weights):
        for name, tensor in weights:
            self.memory[name].copy_(tensor)


def recorded(model, **options):
    engine, source = Engine(model), ModuleSource(model)
    plan = LoadPlan.record(engine.load_weights, source.tensors(), engine.memory)
    return engine, LocalTransport(source, engine, plan, why_not_shared="tested", **options)


def test_recorded_copies_are_replayed_and_compared():
    model = Net(8)
    engine, local = recorded(model)
    assert local.reason == "tested; 5 recorded copies are replayed"
    assert local.working_bytes == 0
    assert local.is_current() is False
    assert local.transfer() == sum(p.nbytes for p in model.parameters())
    assert local.is_current() is True
    local.verify()
    engine.memory["large"][8, 63] += 1
    engine.memory["last"][0, 0] += 1
    assert not local.is_current()
    with pytest.raises(TransferError, match="2 tensors differ after the transfer, (large|last) for one"):
        local.verify()
    local.transfer()
    assert torch.equal(engine.memory["large"], model.large)


def test_the_loader_that_is_used_is_told_with_its_reason_and_nothing_is_compared():
    local = transport(Odd(), Loader())
    assert local.reason == "tested; the engine's own loader is used, because of plain: tested"
    local.verify()


def test_sharded_weights_are_gathered_in_parts_of_bounded_size(mesh):
    model = Net(GATHERED_BYTES // 256)
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    engine, local = recorded(model)
    sizes = {name: tensor.nbytes for name, tensor in engine.memory.items()}
    assert local.working_bytes == sizes["large"] * 2  # whole, and as it is put together
    assert not local.is_current()
    assert local.transfer() == sum(sizes.values())
    assert all(engine.memory[name].eq(len(name)).all() for name in sizes)
    assert local.is_current()
    local.verify()
    with torch.no_grad():
        model.last.add_(1)
    assert not local.is_current()


def test_a_first_weight_without_elements_is_in_a_part_too(mesh):
    model = nn.ParameterDict({"none": torch.zeros(0, 4), "some": torch.ones(3, 4)})
    for name, parameter in list(model.items()):
        model[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
    engine, local = recorded(model)
    assert local.transfer() == 3 * 4 * 4
    assert engine.memory["some"].eq(1).all()


def test_parts_are_as_large_as_may_be_whole_at_a_time(mesh):
    rows = GATHERED_BYTES // 256
    model = nn.ParameterDict({"first": torch.zeros(rows // 2, 64), "rest": torch.zeros(rows // 2, 64)})
    model["more"] = nn.Parameter(torch.zeros(1, 64))
    for name, parameter in list(model.items()):
        model[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
    _, local = recorded(model)
    assert local.working_bytes == GATHERED_BYTES + GATHERED_BYTES // 2


def test_sharded_weights_of_another_shape_are_refused_before_anything_is_written(mesh):
    model = Net(8)
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    engine, local = recorded(model)
    assert local.working_bytes == sum(p.nbytes for p in model.parameters()) + model.large.nbytes
    model.last = nn.Parameter(distribute_tensor(torch.ones(6, 64), mesh, [Shard(0)]))
    with pytest.raises(TransferError, match="last has shape"):
        local.transfer()
    assert not any(tensor.any() for tensor in engine.memory.values())
