import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import PhaseError
from colo.memory import region as regions
from colo.memory.region import ALIGNMENT_BYTES, allocate_region, carve, carved_bytes

DTYPES = [torch.bool, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int64]


def test_released_bytes_go_back_and_views_see_the_restored_ones(device):
    region = allocate_region(1000, device, name="r")
    view = region.bytes[256:512].view(torch.float32)
    assert region.size_bytes == region.device_bytes == 1024
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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=8))
def test_carved_tensors_are_aligned_disjoint_and_as_specified(specs):
    data = torch.zeros(carved_bytes(specs), dtype=torch.uint8)
    views = carve(data, specs)
    for view, (shape, dtype) in zip(views, specs, strict=True):
        assert (tuple(view.shape), view.dtype) == (shape, dtype)
        assert view.storage_offset() * view.element_size() % ALIGNMENT_BYTES == 0
        view.view(-1).view(torch.uint8).add_(1)
    used = sum(view.numel() * view.element_size() for view in views)
    assert int(data.sum()) == used, "no byte belongs to two tensors"


def test_carving_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match="1 tensors need 512 bytes, but the region has 256"):
        carve(torch.zeros(256, dtype=torch.uint8), [((65,), torch.float32)])


def test_the_library_that_takes_and_gives_pages_keeps_its_own_mode_and_references():
    library = pytest.importorskip("torch_memory_saver")
    theirs = library.torch_memory_saver
    before = copy.copy(vars(theirs)["_impl_ctor_kwargs"]), sys.getrefcount(theirs)
    regions._saver.cache_clear()
    ours = regions._saver()
    assert isinstance(ours, library.TorchMemorySaver) and ours is not theirs and regions._saver() is ours
    assert (vars(theirs)["_impl_ctor_kwargs"], sys.getrefcount(theirs)) == before
    assert vars(ours)["_impl_ctor_kwargs"] == {"hook_mode": "torch"}
