"""Gradients as a segment: the loop's own, and those in buffers of many views, as Megatron's wrapper has them."""

import gc
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.optim import AdamW

from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.trainer.gradients import GradientBuffers, ParameterGradients
from colo.trainer.optimizers import MegatronOptimizers
from colo.trainer.state import TrainerState
from colo.units import MIB
from tests.zoo.trained import is_at_host

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741
SIZES = (100, 7, 64)
BYTES = 4 * sum(SIZES)


@pytest.fixture
def parameters():
    return [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]


@pytest.fixture
def mover(device):
    mover = Mover(device, host_limit_bytes=64 * MIB)
    yield mover
    assert mover.arena.used_bytes == 0
    mover.close()


@pytest.fixture
def segment(parameters, mover):
    made = ParameterGradients(torch.optim.SGD(parameters, lr=0.1), mover, lambda: ())
    yield made
    made.begin(R).wait()


def fill(parameters):
    for number, parameter in enumerate(parameters, 1):
        parameter.grad = torch.full_like(parameter, float(number))


def counted(segment):
    kept_bytes = sum(kept.size_bytes for kept in segment.kept)
    return segment.residency, segment.size_bytes, segment.device_bytes, segment.host_bytes, kept_bytes


def test_what_is_counted_of_them_wherever_they_are(segment, parameters):
    padded_bytes = 512 + 256 + 256
    assert counted(segment) == (D, BYTES, 0, 0, 0)  # what a backward pass will make
    fill(parameters)
    assert counted(segment) == (R, BYTES, BYTES, 0, 0)
    assert (segment.begin(O).moved_bytes, segment.host_bytes) == (padded_bytes, 4096)  # a page
    assert counted(segment) == (O, padded_bytes, 0, 4096, 0)
    move = segment.begin(R)
    move.wait()
    assert move.moved_bytes == padded_bytes
    assert counted(segment) == (R, BYTES, BYTES, 0, 0)
    assert [p.grad.unique().tolist() for p in parameters] == [[1.0], [2.0], [3.0]]


def test_gradients_that_are_on_another_device_are_left_alone(mover):
    elsewhere = torch.nn.Parameter(torch.zeros(5, device="meta"))  # as with FSDP2's CPU offload policy
    own = torch.nn.Parameter(torch.zeros(3, device=mover.device))
    segment = ParameterGradients(torch.optim.SGD([elsewhere, own], lr=0.1), mover, lambda: ())
    assert segment.size_bytes == own.nbytes
    elsewhere.grad, own.grad = torch.zeros_like(elsewhere), torch.ones_like(own)
    assert segment.device_bytes == own.nbytes
    segment.begin(O).wait()
    assert elsewhere.grad.device.type == "meta" and is_at_host(mover, own.grad)
    segment.begin(R).wait()
    assert torch.equal(own.grad, torch.ones_like(own))


def test_only_what_is_trained_is_expected(segment, parameters):
    parameters[0].requires_grad_(False)
    assert counted(segment) == (D, BYTES - 400, 0, 0, 0)
    parameters[1].grad = torch.ones(7)
    assert counted(segment) == (R, 28, 28, 0, 0)


def test_a_sparse_gradient_stays_and_counts_its_values_and_indices(segment, parameters):
    parameters[0].grad = torch.ones(100).to_sparse()
    segment.refresh()
    assert counted(segment) == (D, 0, 0, 0, 100 * (4 + 8))


def test_gradients_that_were_replaced_while_away_leave_nothing_in_the_arena(segment, parameters, mover):
    fill(parameters)
    segment.begin(O).wait()
    fill(parameters)
    segment.refresh()
    assert counted(segment) == (R, BYTES, BYTES, 0, 0)
    segment.begin(O).wait()
    assert mover.arena.used_bytes == segment.host_bytes
    parameters[1].grad = None
    segment.begin(R).wait()
    assert parameters[1].grad is None and segment.host_bytes == 0
    assert counted(segment) == (R, BYTES - 28, BYTES - 28, 0, 0)


@pytest.mark.parametrize("hold", [lambda g: g, lambda g: [g]])
def test_a_gradient_that_the_loop_holds_leaves_with_the_others(hold, segment, parameters, mover):
    fill(parameters)
    held = hold(parameters[0].grad)
    segment.begin(O).wait()
    assert counted(segment)[:3] == (O, 1024, 0) and segment.kept == []
    assert is_at_host(mover, parameters[0].grad) and torch.equal(parameters[0].grad, torch.ones(100))
    segment.begin(R).wait()
    assert (held[0] if isinstance(held, list) else held) is parameters[0].grad


def test_a_gradient_of_which_somebody_has_a_view_stays_and_is_counted_and_the_rest_leaves(segment, parameters, mover):
    fill(parameters)
    view = parameters[0].grad[:3]
    segment.refresh()
    assert counted(segment) == (R, BYTES - 400, BYTES - 400, 0, 400)
    segment.begin(O).wait()
    assert [is_at_host(mover, p.grad) for p in parameters] == [False, True, True]
    assert counted(segment) == (O, 512, 0, segment.host_bytes, 400)
    view.fill_(9)
    segment.begin(R).wait()
    assert parameters[0].grad[:4].tolist() == [9, 9, 9, 1]
    del view
    segment.begin(O).wait()
    assert all(is_at_host(mover, p.grad) for p in parameters)


def test_data_assigned_to_a_parked_gradient_is_kept(segment, parameters):
    fill(parameters)
    segment.begin(O).wait()
    gradient = parameters[0].grad
    gradient.data = torch.full((100,), 7.0)
    segment.begin(R).wait()
    assert parameters[0].grad is gradient and gradient.eq(7).all()
    segment.begin(O).wait()
    assert gradient.eq(7).all() and segment.device_bytes == 0


def test_parked_gradients_are_read_zeroed_and_dropped_where_they_are(segment, parameters, mover):
    fill(parameters)
    segment.begin(O).wait()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    assert float(torch.nn.utils.get_total_norm([p.grad for p in parameters])) > 0
    parameters[2].grad.mul_(2)
    optimizer.zero_grad(set_to_none=False)
    assert segment.residency is O and all(p.grad.eq(0).all() and is_at_host(mover, p.grad) for p in parameters)
    optimizer.zero_grad()
    segment.refresh()
    assert counted(segment) == (D, BYTES, 0, 0, 0)


def test_gradients_that_came_back_go_with_the_loops_last_reference(segment, parameters):
    """`zero_grad` in a training phase has to free them, and not the next look at them."""
    for turn in range(3):
        fill(parameters)
        if turn == 1:
            segment.refresh()
        else:
            segment.begin(O).wait()
            segment.begin(R).wait()
        before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        for parameter in parameters:
            parameter.grad = None
        assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) == before - len(parameters)


def test_moves_to_where_they_are_do_nothing_and_what_is_not_there_does_not_leave(segment, parameters):
    assert segment.begin(D).moved_bytes == segment.begin(R).moved_bytes == segment.begin(O).moved_bytes == 0
    fill(parameters)
    assert segment.begin(R).moved_bytes == 0
    segment.begin(O).wait()
    gradients = [p.grad for p in parameters]
    assert segment.begin(O).moved_bytes == 0
    assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_and_of_no_elements_are_as_they_were(mover):
    empty, parameter = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.ones(5))
    segment = ParameterGradients(torch.optim.SGD([empty, parameter], lr=0.1), mover, lambda: ())
    (empty.sum() + parameter.pow(3).sum()).backward(create_graph=True)
    expected = parameter.grad.detach().clone()
    segment.begin(O).wait()
    assert torch.equal(parameter.grad, expected) and empty.grad.shape == (0, 3)
    segment.begin(R).wait()
    assert torch.equal(parameter.grad, expected) and parameter.grad.grad_fn is not None
    (second,) = torch.autograd.grad(parameter.grad.sum(), parameter)
    assert second.eq(6).all()
    empty.grad = parameter.grad = None
    segment.refresh()


@pytest.mark.usefixtures("interrupts_raise")
@pytest.mark.parametrize("on_the_way", ["out", "in"])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_gradients_are_whole_when_their_copies_are_interrupted_or_fail(
    mover, segment, parameters, on_the_way, raised, monkeypatch
):
    fill(parameters)
    expected = [p.grad.clone() for p in parameters]
    if on_the_way == "in":
        segment.begin(O).wait()
    copy = mover._copy

    def disturbed(*arguments, **options):
        if raised is RuntimeError:
            raise RuntimeError("CUDA error")
        os.kill(os.getpid(), signal.SIGINT)
        return copy(*arguments, **options)

    monkeypatch.setattr(mover, "_copy", disturbed)
    with pytest.raises(raised):
        segment.begin(O if on_the_way == "out" else R).wait()
    monkeypatch.undo()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, expected, strict=True))
    for target in (R, O, R):
        segment.begin(target).wait()
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, expected, strict=True))


@pytest.fixture
def mesh(tmp_path):
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_sharded_gradient_that_the_loop_holds_leaves_the_device_and_is_counted(mesh, mover):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    parameter = nn.Parameter(distribute_tensor(torch.ones(8, 16), mesh, [Shard(0)]))
    segment = ParameterGradients(torch.optim.SGD([parameter], lr=0.1), mover, lambda: ())
    # not by `distribute_tensor`, which scatters: a thread of gloo's holds what it has received for a moment longer
    parameter.grad = DTensor.from_local(torch.full((8, 16), 3.0), mesh, [Shard(0)])
    held = parameter.grad
    segment.refresh()
    assert counted(segment) == (R, 512, 512, 0, 0)
    segment.begin(O).wait()
    assert is_at_host(mover, held._local_tensor) and counted(segment)[:3] == (O, 512, 0)
    assert parameter.grad is held and held._local_tensor.eq(3).all()
    segment.begin(R).wait()
    assert not is_at_host(mover, held._local_tensor) and held.to_local().eq(3).all()
    view = held._local_tensor[:2]
    segment.refresh()
    assert counted(segment)[4] == 512, "held as a view it stays, and is counted"
    del view


# ---- in buffers ------------------------------------------------------------------------------------------------------


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
    """The state and the gradients' segment of a wrapper."""
    part = SimpleNamespace(optimizer=wrapper.optimizer, model_chunks=[wrapper])
    state = TrainerState(MegatronOptimizers(part), Mover(torch.device("cpu")), **options)
    assert isinstance(state.gradients, GradientBuffers)
    return state, state.gradients


def test_a_buffer_leaves_with_all_views_of_it_and_comes_back_as_it_was():
    wrapper = Wrapper()
    expected = [view.clone() for view in wrapper.views]
    state, segment = segment_of(wrapper)
    wrapper.group.cached_grad_buffer_shard_list[0] = list(wrapper.buffer.grad_data.chunk(2))  # made by a later step
    state.refresh()
    assert segment.size_bytes == 512 and state.kept.items == []
    segment.begin(Residency.OFFLOADED).wait()
    views = [*wrapper.views, *wrapper.group.cached_grad_buffer_shard_list[0]]
    assert all(is_at_host(state._mover, view) for view in views) and segment.device_bytes == 0
    assert len({view.untyped_storage()._cdata for view in views}) == 1
    segment.begin(Residency.RESIDENT).wait()
    assert all(map(torch.equal, wrapper.views, expected))
    wrapper.buffer.grad_data.mul_(2)
    assert all(torch.equal(view, 2 * before) for view, before in zip(wrapper.views, expected, strict=True))


def test_a_buffer_that_something_else_refers_to_stays_until_it_does_not():
    wrapper = Wrapper()
    state, segment = segment_of(wrapper)
    held = wrapper.buffer.grad_data[:3]
    state.refresh()
    (kept,) = state.kept.items
    assert "a buffer of gradients; after a step, optimizer.zero_grad() drops" in kept.name and kept.size_bytes == 384
    assert "more refer to its memory" in kept.reason
    assert segment.size_bytes == 0
    del held
    state.refresh()
    assert state.kept.items == [] and segment.size_bytes == 512


def test_buffers_that_nccl_knows_stay():
    _, segment = segment_of(Wrapper(nccl_ub=True))
    (kept,) = segment.kept
    assert segment.size_bytes == 0 and "more refer to its memory" in kept.reason


@pytest.mark.parametrize("is_away", [False, True])
def test_closing_gives_a_buffer_ordinary_memory(is_away):
    wrapper = Wrapper()
    expected = [view.clone() for view in wrapper.views]
    state, segment = segment_of(wrapper)
    if is_away:
        segment.begin(Residency.OFFLOADED).wait()
    state.close()
    assert all(type(view) is torch.Tensor for view in wrapper.views)
    assert all(map(torch.equal, wrapper.views, expected))
    assert len({view.untyped_storage().data_ptr() for view in wrapper.views}) == 1
