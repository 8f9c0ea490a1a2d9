"""Ordering, over copies that run late and memory that forgets: nothing is released or read before its copy ends."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.config import Offload
from colo.errors import BudgetError, PhaseError
from colo.memory.offload import RegionSegment
from colo.phases.phase import FixedSegment, Need, Phase, Residency
from colo.phases.scheduler import Budget, Scheduler
from colo.phases.trace import Trace
from colo.testing import FakeDevice, ForgetfulRegion, IllegalAccess, LateMover
from colo.trainer.gradients import ParameterGradients
from colo.units import KIB, MIB

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741
AMPLE = 64 * MIB
SIZES = (300, 5000, 256)


@pytest.fixture
def mover():
    mover = LateMover(chunk_bytes=1000, trace=Trace())
    yield mover
    mover.close()


def filled(name, size_bytes, device):
    region = ForgetfulRegion(name, size_bytes, device)
    region.bytes.random_()
    return region


def make(mover, *sizes, name="s", away=O, device=None):
    device = device or FakeDevice(AMPLE)
    regions = [filled(f"{name}{i}", size, device) for i, size in enumerate(sizes or SIZES)]
    return RegionSegment(name, regions=regions, away=away, mover=mover)


def contents(segment):
    return [region.bytes.clone() for region in segment.regions]


def holds(segment, expected):
    return all(torch.equal(region.bytes, old) for region, old in zip(segment.regions, expected, strict=True))


# ---- the fakes themselves ------------------------------------------------------------------------------------------


def test_a_copy_runs_when_it_is_waited_for_and_those_before_it_in_its_direction(mover):
    source, first, second, third = (torch.full((2500,), float(n)).view(torch.uint8) for n in range(4))
    one, two = mover.copy_out([(source, first)]), mover.copy_out([(source, second)])
    back = mover.copy_in([(source, third)])
    assert not (one.done or two.done or back.done)
    assert not torch.equal(first, source)
    two.wait()
    assert one.done and two.done and not back.done
    assert torch.equal(first, source) and torch.equal(second, source) and not torch.equal(third, source)


def test_a_copy_out_waits_for_kernels_that_were_queued_before_and_not_for_later_ones(mover):
    source, target = torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    mover.queue(lambda: source.fill_(1))
    transfer = mover.copy_out([(source, target)])
    mover.queue(lambda: source.fill_(2))
    transfer.wait()
    assert target.eq(1).all()
    mover.synchronize()
    assert source.eq(2).all()


def test_a_copy_in_waits_for_kernels_unless_it_need_not(mover):
    source, target, ran = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), []
    mover.queue(lambda: ran.append("kernel"))
    mover.copy_in([(source, target)], after_queued=False).wait()
    assert target.eq(1).all() and not ran
    mover.copy_in([(source, target)]).wait()
    assert ran == ["kernel"]


def test_a_copy_that_meets_memory_given_back_says_so(mover):
    region = filled("r", 1000, FakeDevice(AMPLE))
    transfer = mover.copy_out([(region.bytes, torch.zeros(1024, dtype=torch.uint8))])
    region.release()
    with pytest.raises(IllegalAccess, match="memory that has been given back"):
        transfer.wait()


def test_memory_that_comes_back_holds_nothing_of_what_it_held():
    device = FakeDevice(1024)
    region = filled("r", 1024, device)
    region.release()
    assert device.used_bytes == 0
    region.restore()
    assert region.bytes.eq(ForgetfulRegion.GARBAGE).all() and device.used_bytes == 1024
    region.release()
    device.take(1)
    with pytest.raises(BudgetError):
        region.restore()
    assert not region.resident


# ---- departures ----------------------------------------------------------------------------------------------------


def test_no_byte_leaves_before_its_copy_has_ended(mover):
    segment = make(mover)
    departure = segment.begin(O)
    assert not departure.poll()
    assert (segment.residency, segment.device_bytes) == (O, segment.size_bytes)
    departure.wait()
    assert segment.device_bytes == 0 and departure.poll()


def test_regions_go_one_by_one_as_their_copies_end():
    mover = LateMover(chunk_bytes=1024, progress=lambda: 1, trace=Trace())
    segment = make(mover, 2048, 2048, 1024)
    before, held = contents(segment), [5120]
    departure = segment.begin(O)
    while not departure.poll():
        held.append(segment.device_bytes)
    assert [span.name for span in mover.trace.spans] == ["out s"]
    assert list(dict.fromkeys(held)) == [5120, 3072, 1024]
    assert segment.device_bytes == 0
    segment.begin(R).wait()
    assert holds(segment, before)


def test_what_kernels_still_write_leaves_with_the_rest(mover):
    segment = make(mover)
    mover.queue(lambda: segment.regions[1].bytes.fill_(7))
    segment.begin(O).wait()
    segment.begin(R).wait()
    assert segment.regions[1].bytes.eq(7).all()


def test_a_return_before_anything_left_keeps_all_and_copies_nothing(mover):
    segment = make(mover)
    before = contents(segment)
    segment.begin(O)
    segment.begin(R).wait()
    assert segment.residency is R and holds(segment, before)
    assert segment.device_bytes == segment.size_bytes
    assert [span.name for span in mover.trace.spans] == ["out s"]
    for region in segment.regions:
        region.bytes.fill_(1)
    mover.close()
    assert all(region.bytes.eq(1).all() for region in segment.regions)


def test_a_return_while_some_have_left_brings_just_those_back():
    steps = iter([3])
    mover = LateMover(chunk_bytes=1024, progress=lambda: next(steps, 0), trace=Trace())
    segment = make(mover, 1024, 1024, 1024)
    before = contents(segment)
    departure = segment.begin(O)
    departure.poll()
    assert segment.device_bytes == 2048
    arrival = segment.begin(R)
    assert arrival.moved_bytes == 1024
    arrival.wait()
    assert holds(segment, before)
    assert [(span.name, span.num_bytes) for span in mover.trace.spans] == [("out s", 3072), ("back s", 1024)]


def test_a_departure_that_was_called_off_releases_nothing_later(mover):
    segment = make(mover)
    before = contents(segment)
    departure = segment.begin(O)
    segment.begin(R)
    departure.wait()
    assert departure.poll() and holds(segment, before)


@pytest.mark.parametrize("wait", ["wait", "settle", "host_copy", "poll"])
def test_whoever_needs_the_host_copy_waits_for_it(mover, wait):
    segment = make(mover)
    before = contents(segment)
    departure = segment.begin(O)
    if wait == "wait":
        departure.wait()
    elif wait == "settle":
        segment.settle()
    elif wait == "poll":
        mover._progress = lambda: 1
        while not departure.poll():
            pass
    copies = [segment.host_copy(region) for region in segment.regions]
    assert all(torch.equal(copy, old) for copy, old in zip(copies, before, strict=True))
    assert segment.device_bytes == 0


def test_discarding_waits_for_copies_under_way(mover):
    segment = make(mover)
    segment.begin(O)
    segment.begin(D).wait()
    assert (segment.residency, segment.device_bytes, segment.host_bytes) == (D, 0, 0)
    other = make(mover, name="other")
    before = contents(other)
    other.begin(O).wait()
    other.begin(R).wait()
    assert holds(other, before)


def test_regions_removed_while_they_leave_take_no_copy_along(mover):
    segment = make(mover)
    before = contents(segment)
    segment.begin(O)
    segment.remove([segment.regions[0]])
    assert (segment.residency, segment.host_bytes) == (O, 8192 + 4096)
    segment.begin(R).wait()
    assert holds(segment, before[1:])
    segment.begin(O)
    segment.close()
    assert (segment.residency, mover.arena.used_bytes) == (D, 0)


# ---- arrivals ------------------------------------------------------------------------------------------------------


def test_bytes_are_there_when_an_arrival_has_been_waited_for_and_not_before(mover):
    segment = make(mover)
    before = contents(segment)
    segment.begin(O).wait()
    arrival = segment.begin(R)
    assert not arrival.poll() and not holds(segment, before)
    assert segment.residency is R and segment.begin(R) is arrival
    arrival.wait()
    assert arrival.poll() and holds(segment, before)


def test_leaving_again_waits_for_an_arrival_under_way(mover):
    segment = make(mover)
    before = contents(segment)
    segment.begin(O).wait()
    segment.begin(R)
    segment.begin(O).wait()
    segment.begin(R).wait()
    assert holds(segment, before)


def test_an_old_arrival_has_nothing_left_to_wait_for(mover):
    segment = make(mover)
    segment.begin(O).wait()
    arrival = segment.begin(R)
    segment.begin(O).wait()
    later = segment.begin(R)
    arrival.wait()
    assert not later.poll()
    later.wait()
    assert [span.name for span in mover.trace.spans] == ["out s", "back s"] * 2


def test_an_arrival_overtakes_kernels_that_cannot_touch_it(mover):
    segment = make(mover)
    before = contents(segment)
    segment.begin(O).wait()
    ran = []
    mover.queue(lambda: ran.append("kernel"))
    segment.begin(R).wait()
    assert holds(segment, before) and not ran


def test_an_arrival_without_room_gives_back_what_it_took(mover):
    device = FakeDevice(3 * KIB)
    segment = make(mover, KIB, KIB, KIB, device=device)
    before = contents(segment)
    segment.begin(O).wait()
    device.take(1)
    with pytest.raises(BudgetError):
        segment.begin(R)
    assert (segment.residency, device.used_bytes) == (O, 1)
    device.free(1)
    segment.begin(R).wait()
    assert holds(segment, before)


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    actions=st.lists(st.sampled_from(["out", "back", "poll", "wait", "write", "copy", "full"]), max_size=25),
    seed=st.integers(0, 1 << 16),
    speed=st.integers(0, 4),
)
def test_any_order_of_moves_and_waits_keeps_every_byte(sizes, actions, seed, speed):
    generator = random.Random(seed)
    device = FakeDevice(AMPLE)
    mover = LateMover(chunk_bytes=700, progress=lambda: generator.randint(0, speed))
    segment = make(mover, *sizes, device=device)
    expected, moves = contents(segment), []
    for action in actions:
        if action in ("out", "back"):
            moves.append(segment.begin(O if action == "out" else R))
        elif action == "full":
            device.capacity_bytes = device.used_bytes
            try:
                moves.append(segment.begin(R))
            except BudgetError:
                assert segment.residency is O
            device.capacity_bytes = AMPLE
        elif moves and action in ("poll", "wait"):
            getattr(generator.choice(moves), action)()
        elif action == "write" and segment.residency is R:
            segment.begin(R).wait()
            for region in segment.regions:
                region.bytes.add_(1)
            expected = contents(segment)
        elif action == "copy" and segment.residency is O:
            copies = [segment.host_copy(region) for region in segment.regions]
            assert all(torch.equal(copy, old) for copy, old in zip(copies, expected, strict=True))
        assert device.used_bytes == segment.device_bytes
    segment.begin(R).wait()
    assert holds(segment, expected)
    segment.close()
    assert (mover.arena.used_bytes, device.used_bytes) == (0, 0)
    mover.close()


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_gradients_are_parked_and_back_when_the_moves_return(mover):
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((700,), (3, 5), (1,))]
    segment = ParameterGradients(torch.optim.SGD(parameters, lr=0.1), mover, lambda: ())
    expected = [torch.randn(p.shape) for p in parameters]
    for parameter, gradient in zip(parameters, expected, strict=True):
        parameter.grad = torch.zeros_like(parameter)
        mover.queue(lambda p=parameter, g=gradient: p.grad.copy_(g))
    for _ in range(2):
        segment.begin(O).wait()
        assert (segment.residency, segment.device_bytes) == (O, 0)
        blocker = mover.arena.allocate(64 * KIB)
        mover.arena.view(blocker).fill_(3)
        segment.begin(R).wait()
        mover.arena.release(blocker)
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, expected, strict=True))
    assert mover.arena.used_bytes == 0


# ---- the scheduler -------------------------------------------------------------------------------------------------

NEEDS = {
    Phase.IDLE: {},
    Phase.SYNC: {"weights": Need.RESIDENT},
    Phase.ROLLOUT: {"weights": Need.RESIDENT, "kv": Need.RESIDENT},
    Phase.TRAIN: {"weights": Need.RESIDENT, "optimizer": Need.LATE, "masters": Need.LATE},
}


class World:
    """A scheduler over segments with bytes, on a device that copies late."""

    def __init__(self, capacity_bytes, *, offload=Offload.AUTO, progress=lambda: 0, working_bytes=0, host_bytes=AMPLE):
        self.device = FakeDevice(capacity_bytes)
        self.mover = LateMover(chunk_bytes=KIB, progress=progress, host_limit_bytes=host_bytes)
        self.device.take(2 * KIB)
        kv = RegionSegment("kv", regions=[filled("kv", 5 * KIB, self.device)], away=D, mover=self.mover)
        kv.begin(D).wait()
        segments = [
            FixedSegment("weights", 2 * KIB, R),
            make(self.mover, 2 * KIB, 2 * KIB, name="optimizer", device=self.device),
            make(self.mover, 2 * KIB, name="masters", device=self.device),
            kv,
        ]
        budget = Budget(capacity_bytes=capacity_bytes, host_capacity_bytes=host_bytes, offload=offload)
        self.scheduler = Scheduler(segments, budget, needs=NEEDS)
        self.scheduler.working_bytes[Phase.TRAIN] = working_bytes
        self.expected = {name: contents(self.segment(name)) for name in ("optimizer", "masters")}

    def segment(self, name):
        return self.scheduler.segments[name]

    def step(self):
        """What an optimizer does: its state is there, and is written."""
        for name in self.expected:
            self.scheduler.require(name)
            assert holds(self.segment(name), self.expected[name]), f"{name} is not what the last step left"
            for region in self.segment(name).regions:
                region.bytes.add_(1)
            self.expected[name] = contents(self.segment(name))

    def generate(self):
        for region in self.segment("kv").regions:
            region.bytes.fill_(9)


def test_phases_take_turns_on_a_device_that_holds_one_at_a_time():
    world = World(9 * KIB)
    for _ in range(3):
        world.scheduler.enter(Phase.ROLLOUT)
        world.generate()
        assert world.segment("optimizer").device_bytes == 0
        world.scheduler.enter(Phase.IDLE)
        world.scheduler.enter(Phase.TRAIN)
        world.step()
        world.scheduler.enter(Phase.IDLE)
    assert world.device.peak_bytes <= 9 * KIB


@pytest.mark.parametrize("size_bytes", [1, 5000])
def test_what_a_phase_needs_has_arrived_when_it_begins(size_bytes):
    device, mover = FakeDevice(AMPLE), LateMover()
    weights = make(mover, size_bytes, name="weights", device=device)
    weights.regions[0].bytes.fill_(3)
    weights.begin(O).wait()
    scheduler = Scheduler([weights], Budget(capacity_bytes=AMPLE, host_capacity_bytes=AMPLE), needs=NEEDS)
    scheduler.enter(Phase.SYNC)
    assert weights.regions[0].bytes.eq(3).all()
    mover.close()


def test_looking_takes_back_what_departures_have_freed():
    world = World(20 * KIB, offload=Offload.ALWAYS)
    world.scheduler.enter(Phase.ROLLOUT)
    world.mover._progress = lambda: 1000
    world.scheduler.sample()
    assert world.device.used_bytes == 7 * KIB == sum(world.scheduler.trace.samples[-1].segments.values())
    world.mover._progress = lambda: 0
    world.scheduler.enter(Phase.IDLE)
    assert world.device.used_bytes == 7 * KIB


def test_departures_beside_a_rollout_are_done_by_the_time_their_bytes_are_needed():
    world = World(20 * KIB, offload=Offload.ALWAYS)
    world.scheduler.enter(Phase.ROLLOUT)
    world.generate()
    assert world.device.used_bytes == 13 * KIB, "there is room, and no copy has been waited for"
    world.scheduler.enter(Phase.IDLE)
    world.scheduler.enter(Phase.TRAIN)
    world.step()
    world.scheduler.settle()
    assert world.device.used_bytes == 8 * KIB


@settings(max_examples=150)
@given(
    requests=st.lists(
        st.sampled_from(["rollout", "train", "sync", "idle", "step", "fetch", "anticipate", "settle", "sample"]),
        min_size=1,
        max_size=20,
    ),
    capacity=st.integers(9, 14),
    working=st.integers(0, 3),
    offload=st.sampled_from(Offload),
    seed=st.integers(0, 1 << 16),
    speed=st.integers(0, 3),
)
def test_whatever_the_order_phases_find_their_bytes_and_the_device_is_never_over_full(
    requests, capacity, working, offload, seed, speed
):
    generator = random.Random(seed)
    world = World(
        capacity * KIB, offload=offload, progress=lambda: generator.randint(0, speed), working_bytes=working * KIB
    )
    scheduler = world.scheduler
    for request in requests:
        before, phase = {n: s.residency for n, s in scheduler.segments.items()}, scheduler.phase
        try:
            if request == "step" and scheduler.phase is Phase.TRAIN:
                world.step()
            elif request == "fetch" and scheduler.phase is Phase.TRAIN:
                scheduler.fetch("masters")
            elif request == "anticipate":
                scheduler.anticipate(Phase.ROLLOUT if generator.random() < 0.5 else Phase.TRAIN)
            elif request in ("settle", "sample"):
                getattr(scheduler, request)()
            elif request in list(Phase):
                scheduler.enter(Phase(request))
                if request == "rollout":
                    world.generate()
                if request == "train":
                    assert world.device.used_bytes + working * KIB <= capacity * KIB
        except PhaseError:
            assert scheduler.phase is phase
        except BudgetError:
            assert scheduler.phase is phase
            if request != "step":
                assert {n: s.residency for n, s in scheduler.segments.items()} == before
        assert world.device.used_bytes == sum(s.device_bytes for s in scheduler.segments.values())
    if scheduler.phase is not Phase.IDLE:
        scheduler.enter(Phase.IDLE)
    scheduler.working_bytes.clear()
    scheduler.enter(Phase.TRAIN)
    world.step()
    world.mover.close()
