"""Gradients as a segment of their own: what is counted of them, what leaves, and what a stand-in does by itself."""

import pytest
import torch
from colo.trainer.stand_ins import ParkedTensor

from colo.errors import PhaseError
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.trainer.gradients import GradientSegment, num_holders
from colo.units import MIB

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
    made = GradientSegment(torch.optim.SGD(parameters, lr=0.1), mover=mover)
    yield made
    made.begin(R).wait()


def fill(parameters):
    for number, parameter in enumerate(parameters, 1):
        parameter.grad = torch.full_like(parameter, float(number))


def counted(segment):
    return segment.residency, segment.size_bytes, segment.device_bytes, segment.host_bytes, segment.staying_bytes


def test_what_is_counted_of_them_wherever_they_are(segment, parameters):
    assert counted(segment) == (D, BYTES, 0, 0, 0)  # what a backward pass will make
    fill(parameters)
    assert counted(segment) == (R, BYTES, BYTES, 0, 0)
    assert (segment.begin(O).moved_bytes, segment.host_bytes) == (512 + 256 + 256, 4096)  # a page
    assert counted(segment) == (O, BYTES, 0, 4096, 0)
    assert segment.begin(R).moved_bytes == BYTES
    assert counted(segment) == (R, BYTES, BYTES, 0, 0)
    assert [p.grad.unique().tolist() for p in parameters] == [[1.0], [2.0], [3.0]]


def test_gradients_that_are_on_another_device_are_left_alone(mover):
    elsewhere = torch.nn.Parameter(torch.zeros(5, device="meta"))  # as with FSDP2's CPU offload policy
    own = torch.nn.Parameter(torch.zeros(3, device=mover.device))
    segment = GradientSegment(torch.optim.SGD([elsewhere, own], lr=0.1), mover=mover)
    assert segment.size_bytes == own.nbytes
    elsewhere.grad, own.grad = torch.zeros_like(elsewhere), torch.ones_like(own)
    assert segment.device_bytes == own.nbytes
    segment.begin(O).wait()
    assert not isinstance(elsewhere.grad, ParkedTensor) and isinstance(own.grad, ParkedTensor)
    segment.begin(R).wait()
    assert torch.equal(own.grad, torch.ones_like(own))


def test_only_what_is_trained_is_expected(segment, parameters):
    parameters[0].requires_grad_(False)
    assert counted(segment) == (D, BYTES - 400, 0, 0, 0)
    parameters[1].grad = torch.ones(7)
    assert counted(segment) == (R, 28, 28, 0, 0)


@pytest.mark.parametrize("hold", [lambda g: g, lambda g: g[:3], lambda g: [g]])
def test_what_is_held_is_counted_where_it_stays_and_the_rest_leaves(hold, segment, parameters):
    fill(parameters)
    held = hold(parameters[0].grad)
    assert num_holders(parameters[0]) == 1 and num_holders(parameters[1]) == 0
    segment.refresh()
    assert counted(segment) == (R, BYTES - 400, BYTES - 400, 0, 400)
    segment.begin(O).wait()
    assert [isinstance(p.grad, ParkedTensor) for p in parameters] == [False, True, True]
    assert counted(segment) == (O, BYTES - 400, 0, segment.host_bytes, 400)
    parameters[1].grad = parameters[2].grad = None
    assert counted(segment) == (D, BYTES - 400, 0, segment.host_bytes, 400)
    parameters[0].grad = None
    assert segment.staying_bytes == 0
    del held
    fill(parameters)
    segment.refresh()
    segment.begin(O).wait()
    assert counted(segment) == (O, BYTES, 0, segment.host_bytes, 0)


def test_a_sparse_gradient_stays_and_counts_its_values_and_indices(segment, parameters):
    parameters[0].grad = torch.ones(100).to_sparse()
    segment.refresh()
    assert counted(segment) == (D, 0, 0, 0, 100 * (4 + 8))


def test_moves_to_where_they_are_do_nothing_and_illegal_ones_are_refused(segment, parameters):
    assert segment.begin(D).moved_bytes == segment.begin(R).moved_bytes == 0  # a backward pass makes them
    with pytest.raises(PhaseError, match="trainer.gradients is discarded and cannot become offloaded"):
        segment.begin(O)
    fill(parameters)
    assert segment.begin(R).moved_bytes == 0
    segment.begin(O).wait()
    stand_ins = [p.grad for p in parameters]
    assert segment.begin(O).moved_bytes == 0
    assert all(p.grad is s for p, s in zip(parameters, stand_ins, strict=True))


def test_gradients_that_were_replaced_while_away_leave_nothing_in_the_arena(segment, parameters, mover):
    fill(parameters)
    segment.begin(O).wait()
    fill(parameters)
    segment.begin(O).wait()
    assert mover.arena.used_bytes == segment.host_bytes
    parameters[1].grad = None
    assert segment.begin(R).moved_bytes == BYTES - 28
    assert parameters[1].grad is None and segment.host_bytes == 0


def test_what_zeroing_calls_returns_what_it_is_called_on_and_brings_nothing_back(segment, parameters):
    fill(parameters)
    segment.begin(O).wait()
    stand_in, other = parameters[0].grad, torch.ones(3)
    for same in (stand_in.requires_grad_(False), stand_in.detach_(), stand_in.zero_()):
        assert same is stand_in
    torch._foreach_zero_([other, parameters[1].grad])
    assert other.sum() == 0 and segment.residency is O
    segment.begin(R).wait()
    assert [float(p.grad.sum()) for p in parameters] == [0, 0, 3 * 64]


def test_a_stand_in_that_is_held_stands_for_the_gradient_after_its_return(segment, parameters):
    fill(parameters)
    segment.begin(O).wait()
    first, second = parameters[0].grad, parameters[1].grad
    segment.begin(R).wait()
    first.zero_()
    assert float(parameters[0].grad.sum()) == 0 and float(second.sum()) == 14
    assert float(torch.add(torch.ones(7), other=second).sum()) == 21
    parameters[1].grad = None
    with pytest.raises(PhaseError, match=r"and is gone: read `parameter.grad`"):
        second.sum()


def test_a_backward_pass_adds_to_gradients_that_are_away_and_nothing_else_in_cpp_reads_them(segment, parameters):
    fill(parameters)
    segment.begin(O).wait()
    stand_in = parameters[2].grad
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(PhaseError, match="mul.*touch it within"):
        stand_in * 2
    assert segment.residency is O
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.add(stand_in, torch.ones(64), alpha=2).unique().tolist() == [5.0]
    segment.begin(O).wait()
    sum(p.sum() for p in parameters).backward()
    assert [p.grad.unique().tolist() for p in parameters] == [[2.0], [3.0], [4.0]]
    assert (segment.residency, segment.host_bytes) == (R, 0)
