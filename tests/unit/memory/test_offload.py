import pytest
import torch

from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import ResizedRegion, allocate_region
from colo.phases.phase import Residency
from colo.report.trace import Trace
from colo.units import MIB

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741


@pytest.fixture
def mover(device):
    mover = Mover(device, host_limit_bytes=64 * MIB, chunk_bytes=4096, trace=Trace())
    yield mover
    mover.close()


def make(mover, *sizes, away=O):
    regions = [allocate_region(size, mover.device, name=f"r{i}") for i, size in enumerate(sizes)]
    for region in regions:
        region.bytes.random_()
    return RegionSegment("s", regions=regions, away=away, mover=mover)


def test_any_number_of_cycles_keeps_every_bit_and_allocates_once(mover):
    segment = make(mover, 10_000, 3 * MIB)
    before = [region.bytes.clone() for region in segment.regions]
    for _ in range(5):
        segment.begin(O).wait()
        assert (segment.residency, segment.device_bytes) == (O, 0)
        segment.begin(R).wait()
        assert segment.device_bytes == segment.size_bytes
    assert all(torch.equal(old, region.bytes) for old, region in zip(before, segment.regions, strict=True))
    assert mover.arena.pinned_bytes == 4 * MIB


def test_moving_where_it_is_already_does_nothing(mover):
    segment = make(mover, 1000)
    segment.begin(R).wait()
    segment.begin(O).wait()
    segment.begin(O).wait()
    assert segment.residency is O


def test_discarded_bytes_are_gone_and_the_memory_can_come_back(mover):
    segment = make(mover, 1000, away=D)
    segment.begin(D).wait()
    assert (segment.device_bytes, segment.host_bytes) == (0, 0)
    segment.begin(R).wait()
    assert segment.device_bytes == 1024


def test_an_offloaded_segment_may_be_discarded_and_returns_its_extents(mover):
    segment = make(mover, 1000)
    segment.begin(O).wait()
    segment.begin(D).wait()
    assert (segment.host_bytes, mover.arena.used_bytes) == (0, 0)


def test_a_full_host_refuses_and_leaves_everything_where_it_was(device):
    mover = Mover(device, host_limit_bytes=2 * MIB)
    segment = make(mover, 3 * MIB)
    before = segment.regions[0].bytes.clone()
    with pytest.raises(BudgetError):
        segment.begin(O)
    assert (segment.residency, segment.device_bytes) == (R, 3 * MIB)
    assert torch.equal(before, segment.regions[0].bytes)
    mover.close()


def test_regions_join_only_while_resident(mover):
    segment = make(mover, 1000)
    segment.begin(O).wait()
    with pytest.raises(PhaseError, match="regions join it while it is resident"):
        segment.add([allocate_region(1, mover.device, name="late")])


def test_the_host_copy_is_there_only_while_offloaded(mover):
    segment = make(mover, 1000)
    region = segment.regions[0]
    before = region.bytes.clone()
    with pytest.raises(PhaseError, match="only an offloaded one has a host copy"):
        segment.host_copy(region)
    segment.begin(O).wait()
    assert torch.equal(segment.host_copy(region), before)


def test_a_region_that_cannot_be_restored_leaves_the_segment_offloaded(mover):
    segment = make(mover, 1000, 2000)
    before = [region.bytes.clone() for region in segment.regions]
    segment.begin(O).wait()
    second = segment.regions[1]
    restore, second._restore = (
        second._restore,
        lambda: (_ for _ in ()).throw(BudgetError("no room", needed_bytes=2, free_bytes=1)),
    )
    with pytest.raises(BudgetError, match="no room"):
        segment.begin(R)
    assert (segment.residency, segment.device_bytes) == (O, 0)
    second._restore = restore
    segment.begin(R).wait()
    assert all(torch.equal(old, region.bytes) for old, region in zip(before, segment.regions, strict=True))


def test_copies_are_in_the_trace_with_their_bytes(mover):
    segment = make(mover, 1024)
    segment.begin(O).wait()
    segment.begin(R).wait()
    assert [(s.name, s.resource, s.num_bytes) for s in mover.trace.spans] == [
        ("out s", "d2h", 1024),
        ("back s", "h2d", 1024),
    ]


def test_a_return_that_finds_no_room_while_leaving_is_under_way_leaves_it_offloaded_and_holds_nothing(monkeypatch):
    mover = Mover(torch.device("cpu"))
    segment = make(mover, MIB, MIB)
    before = [region.bytes.clone() for region in segment.regions]
    departure = segment.begin(O)
    segment.regions[0].release()  # as `poll` does once the first copy has finished, and the second has not
    departure._pending.pop(0)

    def full(region):
        raise BudgetError("full", needed_bytes=MIB, free_bytes=0)

    with monkeypatch.context() as patch, pytest.raises(BudgetError):
        patch.setattr(ResizedRegion, "_restore", full)
        segment.begin(R)
    assert (segment.residency, segment.device_bytes) == (O, 0)
    segment.begin(R).wait()
    assert all(torch.equal(old, region.bytes) for old, region in zip(before, segment.regions, strict=True))
    mover.close()
