import copy
import gc
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import BudgetError, PhaseError, Unsupported
from colo.memory import region as regions
from colo.memory.region import ALIGNMENT_BYTES, allocate_region, carve, carved_bytes
from colo.units import MIB

DTYPES = [torch.bool, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int64]


def test_released_bytes_go_back_and_views_see_the_restored_ones(device):
    region = allocate_region(1000, device, name="r")
    view = region.bytes[256:512].view(torch.float32)
    assert region.size_bytes == region.device_bytes == 1024
    assert region.device == region.bytes.device == device
    region.release()
    assert region.device_bytes == region.bytes.untyped_storage().nbytes() == 0
    region.restore()
    region.bytes.zero_()
    view.fill_(1.0)
    assert region.bytes[256:512].view(torch.float32).eq(1).all()
    assert region.bytes[:256].eq(0).all()
    assert region.device_bytes == 1024


def test_every_illegal_move_is_refused(device):
    region = allocate_region(1, device, name="r")
    with pytest.raises(PhaseError, match="region r is resident"):
        region.restore()
    region.release()
    with pytest.raises(PhaseError, match="region r is released already"):
        region.release()
    region.close()
    region.close()
    with pytest.raises(PhaseError, match="region r is closed"):
        region.restore()


@settings(max_examples=100)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=8))
def test_carved_tensors_are_aligned_disjoint_and_as_specified(specs):
    data = torch.zeros(carved_bytes(specs), dtype=torch.uint8)
    views = carve(data, specs)
    for view, (shape, dtype) in zip(views, specs, strict=True):
        assert (tuple(view.shape), view.dtype) == (shape, dtype)
        assert view.storage_offset() * view.element_size() % ALIGNMENT_BYTES == 0
        view.view(-1).view(torch.uint8).add_(1)
    used = sum(view.numel() * view.element_size() for view in views)
    assert int(data.sum()) == used
    assert not data.gt(1).any(), "no byte belongs to two tensors"


def test_carving_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match="1 tensors need 512 bytes, but the region has 256"):
        carve(torch.zeros(256, dtype=torch.uint8), [((65,), torch.float32)])


def test_the_library_that_takes_and_gives_pages_keeps_its_own_mode_and_references():
    library = pytest.importorskip("torch_memory_saver")
    theirs = library.torch_memory_saver
    before = copy.copy(vars(theirs)["_impl_ctor_kwargs"]), sys.getrefcount(theirs)
    regions.memory_saver.cache_clear()
    ours = regions.memory_saver()
    assert isinstance(ours, library.TorchMemorySaver) and ours is not theirs and regions.memory_saver() is ours
    assert (vars(theirs)["_impl_ctor_kwargs"], sys.getrefcount(theirs)) == before
    assert vars(ours)["_impl_ctor_kwargs"] == {"hook_mode": "torch"}
    held = {"once": library.TorchMemorySaver()}
    other = held["once"]
    assert sys.getrefcount(ours) == sys.getrefcount(other) + 1, "or the interpreter's exit would destroy its pools"


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    regions.memory_saver.cache_clear()
    with pytest.raises(Unsupported, match="pip install 'torch-memory-saver"):
        regions.memory_saver()


class FakeSaver:
    """torch-memory-saver as far as regions use it, on a CPU: notes what it is asked, in order."""

    def __init__(self):
        self.calls = []

    @contextmanager
    def region(self, **options):
        self.calls.append(("region", options))
        yield

    def pause(self, tag):
        self.calls.append(("pause", tag))

    def resume(self, tag):
        self.calls.append(("resume", tag))


class FakePages(regions._Pages):
    """Every tag has a range of its own, which is not given out while somebody is said to hold it."""

    def __init__(self):
        super().__init__()
        self.ranges, self.held = {}, set()

    def _allocate(self, tag, size_bytes, device):
        if tag in self.held:
            return torch.empty(size_bytes, dtype=torch.uint8)
        return self.ranges.setdefault(tag, torch.empty(size_bytes, dtype=torch.uint8))


@pytest.fixture
def saver(monkeypatch):
    saver = FakeSaver()
    monkeypatch.setattr(regions, "memory_saver", lambda: saver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    stream = SimpleNamespace(synchronize=lambda: saver.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(regions, "free_device_bytes", lambda device: 32 * MIB)
    return saver


def test_pages_go_when_work_on_them_has_ended_and_come_back_when_there_is_room(saver, device, monkeypatch):
    region = regions.PausableRegion("r", 1024, device)
    ((_, options),) = saver.calls
    assert options == {"tag": region._tag, "enable_cpu_backup": False}
    assert (region.size_bytes, region.name, region.bytes.dtype) == (1024, "r", torch.uint8)
    saver.calls.clear()
    region.release()
    assert saver.calls == ["synchronize", ("pause", region._tag)]
    with monkeypatch.context() as patch, pytest.raises(BudgetError, match="region r needs 2.00 MiB"):
        patch.setattr(regions, "free_device_bytes", lambda device: 2 * MIB - 1)
        region.restore()
    assert not region.resident
    region.restore()
    assert saver.calls[2:] == [("resume", region._tag)]
    with monkeypatch.context() as patch, pytest.raises(BudgetError, match="region other needs 2.00 MiB"):
        patch.setattr(regions, "free_device_bytes", lambda device: 2 * MIB - 1)
        regions.PausableRegion("other", 1024, device)


@pytest.mark.parametrize(
    ("size_bytes", "mapped_bytes"),
    [(256, 2 * MIB), (MIB, 2 * MIB), (MIB + 256, 20 * MIB), (10 * MIB - 256, 20 * MIB), (11 * MIB, 12 * MIB)],
)
def test_room_is_asked_for_as_torchs_allocator_asks(size_bytes, mapped_bytes, saver, device, monkeypatch):
    """Pages for a small region are torch's least piece: without room for it torch-memory-saver ends the process."""
    monkeypatch.setattr(regions, "free_device_bytes", lambda device: mapped_bytes - 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(BudgetError, match=f"needs {mapped_bytes >> 20}.00 MiB"):
        regions.PausableRegion("r", size_bytes, device)
    monkeypatch.setattr(regions, "free_device_bytes", lambda device: mapped_bytes)
    assert regions.PausableRegion("r", size_bytes, device).size_bytes == size_bytes


def test_ranges_of_closed_regions_are_taken_again_where_nobody_holds_them(saver, device):
    pages = FakePages()
    first, data = pages.take(512, device)
    second, _ = pages.take(512, device)
    assert first != second and saver.calls == []
    pages.give_back(first, data.data_ptr(), 512, device)
    other, _ = pages.take(1024, device)
    assert other not in (first, second)
    again, same = pages.take(512, device)
    assert (again, same.data_ptr()) == (first, data.data_ptr())
    assert saver.calls == [("resume", first)]
    saver.calls.clear()
    pages.give_back(first, data.data_ptr(), 512, device)
    pages.held.add(first)
    fresh, _ = pages.take(512, device)
    assert fresh not in (first, second, other)
    assert pages.taken_bytes[device] == 512 + 512 + 1024
    assert saver.calls == [("resume", first), ("pause", first)], "it goes back to sleep"


def test_a_closed_region_gives_its_range_back(saver, device, monkeypatch):
    pages = FakePages()
    monkeypatch.setattr(regions, "_pages", pages)
    region = regions.PausableRegion("r", 512, device)
    tag, address = region._tag, region.bytes.data_ptr()
    region.release()
    assert regions.pausable_bytes(device) == 512, "torch counts it as allocated while it is away"
    region.restore()
    region.close()
    assert regions.pausable_bytes(device) == 0
    assert ("pause", tag) in saver.calls
    assert pages._retired == {(device, 512): [(tag, address)]}


@pytest.mark.parametrize(("before", "after", "emptied"), [(10, 10, 0), (9, 10, 1)])
def test_what_is_cached_is_given_back_before_room_is_refused(before, after, emptied, device, monkeypatch):
    free, calls = [before], []
    monkeypatch.setattr(regions, "free_device_bytes", lambda device: free[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(free.__setitem__(0, after)))
    regions.require_free("r", 10, device)
    assert len(calls) == emptied


def test_what_does_not_fit_with_nothing_cached_either_is_refused(device, monkeypatch):
    monkeypatch.setattr(regions, "free_device_bytes", lambda device: 9)
    with pytest.raises(BudgetError, match="region r needs 10 B of cpu, which has 9 B free") as caught:
        regions.require_free("r", 10, device)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (10, 9)


def test_every_closer_is_called_and_the_first_error_raised():
    called = []

    def fail(number):
        called.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="^1$"):
        regions.close_all([lambda: called.append(0), lambda: fail(1), lambda: fail(2), lambda: called.append(3)])
    assert called == [0, 1, 2, 3]
    regions.close_all([lambda: called.append(4)])
    assert called[-1] == 4


def test_a_closed_region_leaves_its_bytes_to_tensors_over_them_and_holds_none(device):
    region = allocate_region(1024, device, name="r")
    view = region.bytes[:4].fill_(7)
    region.close()
    assert (region.device_bytes, region.bytes.numel(), region.closed) == (0, 0, True)
    assert view.tolist() == [7] * 4
    alone = allocate_region(1024, device, name="alone")
    data = alone.bytes.untyped_storage()
    del data
    alone.close()
    assert (alone.device_bytes, alone.bytes.numel()) == (0, 0)


def test_pages_that_tensors_refer_to_are_taken_back_when_the_last_of_them_has_died(saver, device, monkeypatch):
    pages = regions._Pages()
    monkeypatch.setattr(regions, "_pages", pages)
    region = regions.PausableRegion("r", 512, device)
    tag, view, address = region._tag, region.bytes[256:], region.bytes.data_ptr()
    region.close()
    assert (region.device_bytes, region.bytes.numel()) == (0, 0)
    assert ("pause", tag) not in saver.calls and pages._retired == {}
    assert regions.pausable_bytes(device) == 512
    del view
    gc.collect()
    assert saver.calls[-2:] == ["synchronize", ("pause", tag)]
    assert pages._retired == {(device, 512): [(tag, address)]}
