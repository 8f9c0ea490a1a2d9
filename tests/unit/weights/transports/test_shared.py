"""Parameters that are an engine's memory: whatever takes them out of it is named, and closing gives them their own."""

import gc
import weakref

import pytest
import torch
from torch import nn

from colo.errors import StaleWeights
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.shared import SharedTransport, is_same_memory

CPU = torch.device("cpu")


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
    with pytest.raises(StaleWeights, match=r"the model has no parameter 2\.weight any more"):
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
