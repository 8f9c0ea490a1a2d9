from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover, RegionSegment, Transfer
from colo.memory.region import ResizedRegion, allocate_region
from colo.phases.phase import Residency
from colo.phases.trace import Trace
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


def test_a_host_without_whole_pages_for_small_regions_lends_none(device):
    mover = Mover(device, host_limit_bytes=2 * MIB)
    segment = make(mover, *[1000] * 513)
    with pytest.raises(BudgetError):
        segment.begin(O)
    assert (segment.residency, segment.host_bytes, mover.arena.used_bytes) == (R, 0, 0)
    mover.close()


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


def test_regions_join_an_empty_segment_and_a_resident_one(mover):
    segment = RegionSegment("s", regions=[], away=O, mover=mover)
    assert (segment.residency, segment.size_bytes) == (D, 0)
    segment.add([])
    assert segment.residency is D
    first, second = (allocate_region(256 * n, mover.device, name="r") for n in (1, 2))
    segment.add([first])
    assert (segment.residency, segment.size_bytes) == (R, 256)
    segment.add([second])
    assert segment.regions == (first, second)
    segment.remove([first, second])
    assert segment.residency is D


def test_an_illegal_move_is_refused(mover):
    segment = make(mover, 1000)
    segment.begin(D)
    with pytest.raises(PhaseError, match="segment s is discarded and cannot become offloaded"):
        segment.begin(O)
    arrival = segment.begin(R)
    assert (arrival.moved_bytes, arrival.poll()) == (0, True), "there is nothing to copy"


def test_copies_are_in_the_trace_with_their_bytes(mover):
    segment = make(mover, 1024)
    segment.begin(O).wait()
    arrival = segment.begin(R)
    arrival.wait()
    arrival.wait()
    assert [(s.name, s.resource, s.num_bytes) for s in mover.trace.spans] == [
        ("out s", "d2h", 1024),
        ("back s", "h2d", 1024),
    ]


def test_a_span_lasts_as_long_as_its_copies_took(mover, monkeypatch):
    monkeypatch.setattr(Transfer, "seconds", 2.5)
    segment = make(mover, 1024, 512)
    segment.begin(O).wait()
    segment.begin(R).wait()
    assert [span.duration_s for span in mover.trace.spans] == pytest.approx([5.0, 2.5]), "one by one, and all at once"


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


# ---- on a GPU: streams and events, noted in order ------------------------------------------------------------------


class Log(TorchDispatchMode):
    """Notes copies and ticks among what streams and events are asked."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.notes.append(f"copy {args[0].numel()}" if args[2] else "a copy that blocks")
        if func is torch.ops.aten.add_.Tensor:
            self.notes.append("tick" if args[0].dtype == torch.int32 else "add")
        return func(*args, **(kwargs or {}))


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.notes.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        self.log.notes.append(f"{self.name} ends")


class Event:
    def __init__(self, log, enable_timing=False):
        self.log, self.timed, self.stream, self.is_done = log, enable_timing, None, False

    def record(self, stream):
        self.stream = stream
        self.log.notes.append("record")

    def query(self):
        return self.is_done

    def synchronize(self):
        self.log.notes.append("event ends")
        self.is_done = True

    def elapsed_time(self, other):
        assert self.timed and other.timed and self.stream is other.stream is not None
        return 2500.0


@pytest.fixture
def log(monkeypatch):
    log = Log()
    made, zeros = iter(("d2h", "h2d")), torch.zeros
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(log, f"{next(made)}, {priority}"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(log, enable_timing))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(name="kernels"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: log)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **options: zeros(*shape, **options))
    return log


def test_on_a_gpu_copies_are_queued_in_chunks_with_a_kernel_between_and_an_event_at_each_end(log):
    mover = Mover(torch.device("cuda", 0), chunk_bytes=100, host_limit_bytes=MIB)
    source = torch.arange(250, dtype=torch.uint8)
    target = torch.empty_like(source)
    transfer = mover.copy_out([(source, target)])
    begin, end = ["d2h, -1 waits for kernels", "record"], ["record"]
    assert log.notes == [*begin, "copy 100", "tick", "copy 100", "tick", "copy 50", *end]
    assert torch.equal(source, target)
    log.notes.clear()
    mover.copy_out([(source[:50], target[:50])])
    mover.copy_out([(source[:1], target[:1])])
    assert log.notes == [*begin, "copy 50", *end, *begin, "tick", "copy 1", *end]
    log.notes.clear()
    assert not transfer.done
    transfer.wait()
    assert transfer.done and log.notes == ["event ends"] and transfer.seconds == 2.5


def test_on_a_gpu_copies_back_wait_for_kernels_only_if_they_are_to(log):
    mover = Mover(torch.device("cuda", 0), chunk_bytes=100)
    pairs = [(torch.ones(60, dtype=torch.uint8), torch.empty(60, dtype=torch.uint8)) for _ in range(2)]
    mover.copy_in(pairs, after_queued=False)
    assert log.notes == ["record", "copy 60", "tick", "copy 60", "record"]
    log.notes.clear()
    mover.copy_in(pairs[:1])
    assert log.notes[0] == "h2d, -1 waits for kernels"
    log.notes.clear()
    mover.copy_in(pairs[:1], after_queued=False)
    assert log.notes == ["record", "tick", "copy 60", "record"]


@pytest.mark.parametrize("reuses_memory", [False, True])
def test_on_a_gpu_what_comes_into_memory_of_torchs_allocator_waits_for_kernels(log, reuses_memory, monkeypatch):
    monkeypatch.setattr(ResizedRegion, "reuses_memory", reuses_memory)
    mover = Mover(torch.device("cuda", 0), host_limit_bytes=4 * MIB)
    monkeypatch.setattr("colo.memory.arena._PinnedBlock._register", lambda block, device: None)
    monkeypatch.setattr("colo.memory.arena.local_cpus", lambda device: {0})
    region = ResizedRegion("r", 64, torch.device("cpu"))
    segment = RegionSegment("s", regions=[region], away=O, mover=mover)
    segment.begin(O).wait()
    log.notes.clear()
    segment.begin(R).wait()
    assert ("h2d, -1 waits for kernels" in log.notes) is reuses_memory


def test_closing_waits_for_the_streams_before_the_arena_goes(log, monkeypatch):
    mover = Mover(torch.device("cuda", 0))
    close = mover.arena.close
    monkeypatch.setattr(mover.arena, "close", lambda: (log.notes.append("arena"), close()))
    mover.close()
    assert log.notes == ["d2h, -1 ends", "h2d, -1 ends", "arena"]
    with pytest.raises(PhaseError, match="arena is closed"):
        mover.arena.allocate(1)


def test_on_a_cpu_a_copy_is_done_when_it_returns_and_knows_what_it_took(device):
    mover = Mover(device)
    assert mover.chunk_bytes == 64 * MIB
    transfer = mover.copy_in([(torch.ones(8), torch.zeros(8))])
    assert transfer.done and 0 <= transfer.seconds < 10
    assert (Transfer().done, Transfer().seconds, Transfer().wait()) == (True, 0.0, None)
