import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from colo.weights.sources.module import ModuleSource
from colo.weights.watch import WriteWatch
from tests.models import tiny_qwen3


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_parameter("scale", None)
        self.register_buffer("bias", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("mine", torch.ones(2))
        self.register_buffer("none", None)


def write(tensor):
    with torch.no_grad():
        tensor.add_(1)


def test_a_write_is_noticed_once():
    net = torch.nn.Linear(2, 2)
    watch = WriteWatch(ModuleSource(net))
    assert watch.has_changed() is False
    net.load_state_dict({name: t + 1 for name, t in net.state_dict().items()})
    assert watch.has_changed() is True
    assert not watch.has_changed()


@pytest.mark.parametrize("name", ["linear.weight", "linear.bias", "bias"])
def test_a_write_to_any_weight_is_noticed(name):
    net = Router()
    watch = WriteWatch(ModuleSource(net))
    write(net.state_dict(keep_vars=True)[name])
    assert watch.has_changed()
    assert not watch.has_changed()


def test_what_a_step_wrote_can_be_accepted():
    net = torch.nn.Linear(2, 2)
    watch = WriteWatch(ModuleSource(net))
    write(net.weight)
    watch.accept()
    assert not watch.has_changed()


def test_buffers_that_are_no_weights_of_the_engine_are_not_watched():
    net = Router()
    source = ModuleSource(net)
    source.foreign.add("mine")
    watch = WriteWatch(source)
    write(net.table)
    write(net.mine)
    assert not watch.has_changed()


def test_a_foreign_buffer_is_known_by_its_name_in_whichever_module():
    net = nn.ModuleDict({"a": Router(), "b": Router()})
    source = ModuleSource(net)
    source.foreign |= {"a.mine"}
    watch = WriteWatch(source)
    write(net["b"].mine)
    assert not watch.has_changed()
    write(net["b"].bias)
    assert watch.has_changed()


def test_one_replaced_parameter_among_others_is_noticed():
    net = nn.Linear(2, 2)
    watch = WriteWatch(ModuleSource(net))
    net.weight = nn.Parameter(net.weight.detach().clone())
    assert net.weight._version == 0
    assert watch.has_changed()
    assert not watch.has_changed()


def test_weights_that_come_and_go_are_noticed():
    net = nn.Sequential(nn.Linear(2, 2))
    watch = WriteWatch(ModuleSource(net))
    net.append(nn.Linear(2, 2))
    assert watch.has_changed()
    net.pop(1)
    assert watch.has_changed()
    assert not watch.has_changed()


def test_another_scaling_of_the_adapter_is_noticed():
    model = AutoModelForCausalLM.from_config(tiny_qwen3())
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    watch = WriteWatch(ModuleSource(peft))
    assert not watch.has_changed()
    peft.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3)
    assert watch.has_changed()
    assert not watch.has_changed()


def test_weights_that_a_pass_has_gathered_are_not_taken_for_others(mesh):
    net = fully_shard(nn.Linear(2, 2), mesh=mesh)
    watch = WriteWatch(ModuleSource(net))
    with torch.no_grad():
        net(torch.ones(1, 2))
    assert not watch.has_changed()
    write(net.weight)
    assert watch.has_changed()
