import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import BudgetError, PhaseError
from colo.memory.arena import ALIGNMENT_BYTES, SLAB_ALIGNMENT_BYTES, PinnedArena
from colo.units import MIB


@pytest.fixture
def arena(device):
    arena = PinnedArena(device, limit_bytes=16 * MIB)
    yield arena
    arena.close()


def test_a_slab_is_made_once_and_reused(arena):
    arena.reserve(3 * MIB)
    assert arena.pinned_bytes == 4 * MIB
    for _ in range(5):
        extents = [arena.allocate(MIB) for _ in range(4)]
        for extent in extents:
            arena.release(extent)
    assert (arena.pinned_bytes, arena.used_bytes) == (4 * MIB, 0)


def test_growing_past_the_limit_is_refused_and_changes_nothing(arena):
    arena.allocate(10 * MIB)
    with pytest.raises(BudgetError, match=r"would have to grow by 8.00 MiB, but only 6.00 MiB are allowed") as caught:
        arena.allocate(8 * MIB)
    assert caught.value.missing_bytes == 2 * MIB
    assert (arena.pinned_bytes, arena.used_bytes) == (10 * MIB, 10 * MIB)
    arena.allocate(6 * MIB)


def test_an_extent_is_returned_once(arena):
    extent = arena.allocate(100)
    arena.release(extent)
    with pytest.raises(PhaseError, match="was returned already"):
        arena.release(extent)


def test_preparing_in_the_background_makes_room(arena):
    arena.prepare(5 * MIB).result(timeout=30)
    assert arena.pinned_bytes == 6 * MIB
    assert threading.active_count() >= 1


def test_preparing_too_much_reports_through_the_future(arena):
    with pytest.raises(BudgetError):
        arena.prepare(17 * MIB).result(timeout=30)
    assert arena.pinned_bytes == 0


def test_a_closed_arena_lends_nothing(arena):
    arena.allocate(1)
    arena.close()
    arena.close()
    assert arena.pinned_bytes == 0
    with pytest.raises(PhaseError, match="arena is closed"):
        arena.allocate(1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.booleans()), max_size=20))
def test_extents_never_overlap_and_all_bytes_come_back(actions):
    import torch

    arena = PinnedArena(torch.device("cpu"), limit_bytes=32 * MIB)
    lent = []
    for size_bytes, gives_back in actions:
        if gives_back and lent:
            arena.release(lent.pop(0))
        try:
            lent.append(arena.allocate(size_bytes))
        except BudgetError:
            continue
        assert lent[-1].size_bytes >= size_bytes
        assert lent[-1].offset_bytes % ALIGNMENT_BYTES == 0
    for index, extent in enumerate(lent):
        arena.view(extent).fill_(index)
    for index, extent in enumerate(lent):
        assert bool((arena.view(extent) == index).all()), "two extents share a byte"
    for extent in lent:
        arena.release(extent)
    assert arena.used_bytes == 0
    assert arena.pinned_bytes % SLAB_ALIGNMENT_BYTES == 0
    arena.close()
