"""Writes to weights by others than the optimizer, and bytes that are read out of them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from colo.weights.sources.module import ModuleSource
from colo.weights.watch import CopyMeter, WriteWatch, count_read, uncounted
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


@pytest.fixture
def mine():
    return torch.arange(12.0)


OTHERS = {
    "copy_": (lambda mine, other: other.copy_(mine), 48),
    "clone": (lambda mine, other: mine.clone(), 48),
    "to": (lambda mine, other: mine.to(torch.bfloat16), 48),
    "a part": (lambda mine, other: other[:3].copy_(mine[4:7]), 12),
    "many at once": (lambda mine, other: torch._foreach_copy_([other[:4], other[4:6]], [mine[:4], other[6:8]]), 16),
    "cat": (lambda mine, other: torch.cat([mine, other]), 48),
    "cat, out": (lambda mine, other: torch.cat([mine[:6], mine[6:]], out=other), 48),
    "computed, then copied": (lambda mine, other: other.copy_(mine * 2), 48),
    "views": (lambda mine, other: mine[2:].view(2, 5).t().detach(), 0),
    "within itself": (lambda mine, other: mine[:6].copy_(mine[6:]), 0),
    "in place": (lambda mine, other: mine.mul_(2), 0),
    "written to": (lambda mine, other: mine.copy_(other), 0),
    "others alone": (lambda mine, other: other.clone(), 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_to_be_written_elsewhere_counts(mine, name):
    work, num_bytes = OTHERS[name]
    other = torch.zeros(12)
    with CopyMeter(lambda: [mine[:5], mine[5:]]) as meter:
        work(mine, other)
    assert meter.num_bytes == num_bytes


def test_nothing_is_counted_before_and_after(mine):
    meter, modes = CopyMeter(lambda: [mine]), torch._C._len_torch_dispatch_stack()
    mine.clone()
    with meter:
        mine.clone()
    mine.clone()
    assert torch._C._len_torch_dispatch_stack() == modes, "it has left torch alone"
    assert meter.num_bytes == 48


def test_what_watches_changes_no_result(mine):
    with CopyMeter(lambda: [mine]):
        found = mine.view(3, 4).sum(0).sqrt()
    assert torch.equal(found, mine.view(3, 4).sum(0).sqrt())


def test_what_lies_behind_and_between_watched_tensors_is_not_watched(mine):
    with CopyMeter(lambda: [mine[8:10], mine[:2], mine[4:6]]) as meter:
        for part in (mine[10:], mine[2:4], mine[6:8]):
            part.clone()
        assert meter.num_bytes == 0
        for part in (mine[4:6], mine[:2], mine[9:10]):
            part.clone()
    assert meter.num_bytes == 8 + 8 + 4


def test_one_target_elsewhere_is_enough(mine):
    with CopyMeter(lambda: [mine]) as meter:
        torch._foreach_copy_([mine[:2], torch.zeros(2)], [mine[2:4], mine[4:6]])
    assert meter.num_bytes == 16


def test_what_another_process_has_read_counts_for_every_meter_of_this_thread(mine):
    count_read(7)
    with CopyMeter(lambda: [mine]) as outer:
        count_read(1)
        with CopyMeter(lambda: [mine]) as inner:
            count_read(2)
        count_read(4)
        with ThreadPoolExecutor(1) as another:
            another.submit(count_read, 8).result()
    assert (outer.num_bytes, inner.num_bytes) == (7, 2)


def test_what_stays_with_the_trainer_is_left_out(mine):
    with CopyMeter(lambda: [mine]) as meter:
        with pytest.raises(KeyError), uncounted():
            mine.clone()
            count_read(1)
            raise KeyError
        mine.clone()
    assert meter.num_bytes == 48
