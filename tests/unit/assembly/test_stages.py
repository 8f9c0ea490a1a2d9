"""What `share` makes of a list of stages, of weights placed over ranks, and of modules of torch's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colo.assembly.share import _placed_or_none as placed_or_none
from colo.assembly.share import _refuse_stages as refuse_stages
from colo.assembly.share import as_module, source_of
from colo.errors import Unsupported
from colo.memory.specs import TensorSpec
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.spread import SpreadSource


class Placed:
    """Weights of one rank."""

    left_out = ()

    def __init__(self, group):
        self.stages, self.group = [nn.Linear(2, 3)], group
        self.specs, self.groups = [TensorSpec("w", "float32", (3, 2))], [["w"]]

    def parts(self):
        return []

    def fingerprint(self):
        return ()


def test_a_module_is_its_own_source():
    model = nn.Linear(2, 2)
    assert as_module(model) is model and placed_or_none(model) is None
    assert isinstance(source_of(model, None, SimpleNamespace()), ModuleSource)
    refuse_stages(model, None, "torch")


@pytest.mark.parametrize("stages", [[], [nn.Linear(2, 2)]])
def test_a_list_that_megatron_has_not_made_is_refused(stages):
    with pytest.raises(Unsupported, match="no stage"):
        as_module(stages)


def test_other_things_are_left_to_whoever_checks_arguments():
    assert as_module("a model") == "a model" and placed_or_none("a model") is None


def test_placed_weights_are_a_source_and_their_stages_the_model(mesh):
    placed = Placed(mesh.get_group())
    model = as_module(placed)
    assert list(model) == placed.stages and placed_or_none(placed) is placed
    source = source_of(model, placed, SimpleNamespace())
    assert isinstance(source, SpreadSource) and source.memory() == list(placed.stages[0].parameters())
    assert source.ranks.min(1) == 1 and next(iter(source))[1].device == torch.device("meta")
    with pytest.raises(Unsupported, match=r"colo.start\(folder, engine='vllm'\)"):
        refuse_stages(model, placed, "vllm")
