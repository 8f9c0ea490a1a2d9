"""Modules that are built over slabs, as vLLM's are, without vLLM."""

import pytest
import torch
from torch import nn

from colo.memory.region import ALIGNMENT_BYTES
from colo.units import MIB, align_up

parameters_in = pytest.importorskip("colo.engines.vllm.worker.loader").parameters_in

CPU = torch.device("cpu")


class Memory:
    """One slab, given out from the start."""

    def __init__(self, bytes_=None):
        self.bytes = torch.zeros(64 * MIB, dtype=torch.uint8) if bytes_ is None else bytes_
        self.used = 0

    def place(self, parameter):
        part = self.bytes[self.used : self.used + parameter.nbytes]
        self.used += align_up(parameter.nbytes, ALIGNMENT_BYTES)
        return part.view(parameter.dtype).view(parameter.shape)

    def locate(self, tensor):
        offset = tensor.data_ptr() - self.bytes.data_ptr()
        return (0, offset) if 0 <= offset < len(self.bytes) else None


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(700, 700))
        self.scale = nn.Parameter(torch.tensor(-1.0))
        with torch.no_grad():
            torch.zeros(700, 700, out=self.weight)


MODULES = {
    "LayerNorm": lambda: nn.LayerNorm(512),
    "Linear": lambda: nn.Linear(600, 600),
    "Embedding": lambda: nn.Embedding(1000, 512, padding_idx=0),
    "Conv2d": lambda: nn.Conv2d(3, 128, 14),
    "MultiheadAttention": lambda: nn.MultiheadAttention(512, 4),
    "one that writes to its own": Scaled,
}


def build(make, memory, *, fill):
    torch.manual_seed(0)
    with parameters_in(memory, CPU, built_on=CPU, fill=fill), CPU:  # as vLLM's loaders do
        return make()


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_a_module_has_its_initial_values_in_the_slabs(make):
    torch.manual_seed(0)
    expected = make()
    memory = Memory()
    module = build(make, memory, fill=True)
    for name, parameter in module.named_parameters():
        assert memory.locate(parameter) is not None
        assert torch.equal(parameter, expected.get_parameter(name))


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_one_that_is_built_again_finds_the_weights_and_writes_to_none(make):
    first = Memory()
    build(make, first, fill=True)
    trained = torch.randint(0, 255, first.bytes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    again = Memory(trained.clone())
    module = build(make, again, fill=False)
    assert torch.equal(again.bytes, trained)
    assert again.used == first.used
    assert all(again.locate(parameter) is not None for parameter in module.parameters())


def test_a_large_parameter_is_made_there_and_other_memory_is_not():
    memory = Memory()
    with parameters_in(memory, CPU, built_on=CPU, fill=True), CPU:
        large, small = torch.empty(MIB), torch.empty(1000)
        workspace = torch.empty(MIB, device="cpu")
        elsewhere = torch.empty(MIB, device="meta")
        pair = torch.empty((512, 1024), dtype=torch.int64)
    assert memory.locate(large) == (0, 0) and memory.locate(pair) is not None
    assert (pair.dtype, pair.shape) == (torch.int64, (512, 1024))
    assert memory.locate(small) is memory.locate(workspace) is None
    assert elsewhere.is_meta


def test_what_is_registered_or_written_afterwards_is_left_alone():
    memory = Memory()
    module = build(lambda: nn.Linear(600, 600), memory, fill=False)
    module.scale = nn.Parameter(torch.ones(4))
    assert memory.locate(module.scale) is None
    with torch.no_grad():
        module.weight.fill_(3)
    assert memory.bytes.view(torch.float32)[: 600 * 600].eq(3).all()


def test_a_parameter_without_a_shape_yet_waits_for_its_loader():
    memory = Memory()
    module = build(lambda: nn.LazyLinear(4), memory, fill=True)
    assert memory.used == 0 and nn.parameter.is_lazy(module.weight)
