"""Gradients in buffers with many views of them, as Megatron's wrapper has them; its own are in tests/integration."""

from types import SimpleNamespace

import pytest
import torch
from colo.trainer.gradient_buffers import GradientBuffers
from colo.trainer.optimizer_state import StateOffloader
from colo.trainer.stand_ins import ParkedTensor
from torch import nn
from torch.optim import AdamW

from colo.errors import BudgetError
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.trainer import state_segment
from colo.trainer.megatron import MegatronOptimizers

CPU = torch.device("cpu")


class Wrapper:
    """Two parameters whose gradients are in a buffer of two buckets, and an optimizer of Megatron's kind over them."""

    def __init__(self, *, nccl_ub=False):
        self.net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
        self.buffer = SimpleNamespace(grad_data=torch.arange(96.0))
        parts = self.buffer.grad_data[:64], self.buffer.grad_data[64:]
        self.buffer.buckets = [SimpleNamespace(grad_data=part) for part in parts]
        for layer, bucket in zip(self.net, self.buffer.buckets, strict=True):
            layer.weight.main_grad = bucket.grad_data.view(layer.weight.shape)
        self.group = SimpleNamespace(cached_grad_buffer_shard_list=[None, None])
        self.ddp_config = SimpleNamespace(use_megatron_fsdp=False, nccl_ub=nccl_ub)
        self.buffers, self.expert_parallel_buffers = [self.buffer], []
        self.bucket_groups, self.expert_parallel_bucket_groups = [self.group], []
        self.optimizer = AdamW(self.parameters(), lr=1e-2)

    def parameters(self):
        return list(self.net.parameters())

    @property
    def views(self):
        return [
            self.buffer.grad_data,
            *(bucket.grad_data for bucket in self.buffer.buckets),
            *(parameter.main_grad for parameter in self.parameters()),
        ]


def segment_of(wrapper, **options):
    """The offloader and the gradients' segment of a wrapper."""
    part = SimpleNamespace(optimizer=wrapper.optimizer, model_chunks=[wrapper])
    offloader = StateOffloader(MegatronOptimizers(part), Mover(CPU), **options)
    assert isinstance(offloader.gradients, GradientBuffers)
    return offloader, offloader.gradients


def test_a_buffer_leaves_with_all_views_of_it_and_comes_back_as_it_was():
    wrapper = Wrapper()
    expected = [view.clone() for view in wrapper.views]
    offloader, segment = segment_of(wrapper)
    wrapper.group.cached_grad_buffer_shard_list[0] = list(wrapper.buffer.grad_data.chunk(2))  # made by a later step
    offloader.refresh()
    assert segment.size_bytes == 512 and offloader.kept.items == []
    segment.begin(Residency.OFFLOADED).wait()
    views = [*wrapper.views, *wrapper.group.cached_grad_buffer_shard_list[0]]
    assert all(isinstance(view, ParkedTensor) for view in views) and segment.device_bytes == 0
    segment.begin(Residency.RESIDENT).wait()
    assert all(map(torch.equal, wrapper.views, expected))
    wrapper.buffer.grad_data.mul_(2)
    assert all(torch.equal(view, 2 * before) for view, before in zip(wrapper.views, expected, strict=True))


def test_a_gradient_that_is_added_to_brings_its_buffer_back():
    wrapper, told = Wrapper(), []
    offloader, segment = segment_of(wrapper, on_touch=lambda name: (told.append(name), offloader.bring_back()))
    segment.begin(Residency.OFFLOADED).wait()
    wrapper.net[1].weight.main_grad.add_(1)
    assert told == ["trainer.gradients"] and torch.equal(wrapper.buffer.grad_data[64:], torch.arange(65.0, 97.0))


def test_a_buffer_that_something_else_refers_to_stays_until_it_does_not():
    wrapper = Wrapper()
    offloader, segment = segment_of(wrapper)
    held = wrapper.buffer.grad_data[:3]
    offloader.refresh()
    (kept,) = offloader.kept.items
    assert (kept.name, kept.size_bytes) == ("a buffer of gradients", 512)
    assert "more refer to its memory" in kept.reason and "optimizer.zero_grad() drops" in kept.reason
    assert segment.size_bytes == 0
    del held
    offloader.refresh()
    assert offloader.kept.items == [] and segment.size_bytes == 512


def test_buffers_that_nccl_knows_and_such_without_room_stay(monkeypatch):
    offloader, segment = segment_of(Wrapper(nccl_ub=True))
    (kept,) = offloader.kept.items
    assert segment.size_bytes == 0 and "more refer to its memory" in kept.reason

    def no_room(*args, **options):
        raise BudgetError("no room", needed_bytes=512, free_bytes=0)

    monkeypatch.setattr(state_segment, "allocate_region", no_room)
    offloader, segment = segment_of(Wrapper())
    (kept,) = offloader.kept.items
    assert segment.size_bytes == 0 and "there was no room to gather it" in kept.reason


@pytest.mark.parametrize("is_away", [False, True])
def test_closing_gives_a_buffer_ordinary_memory(is_away):
    wrapper = Wrapper()
    expected = [view.clone() for view in wrapper.views]
    offloader, segment = segment_of(wrapper)
    if is_away:
        segment.begin(Residency.OFFLOADED).wait()
    offloader.close()
    assert all(type(view) is torch.Tensor for view in wrapper.views)
    assert all(map(torch.equal, wrapper.views, expected))
    assert len({view.untyped_storage().data_ptr() for view in wrapper.views}) == 1
