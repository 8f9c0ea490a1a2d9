import gc
import os
import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import BudgetError, ColoError, PhaseError
from colo.memory import arena as arenas
from colo.memory.arena import ALIGNMENT_BYTES, BLOCK_ALIGNMENT_BYTES, PinnedArena
from colo.units import MIB


@pytest.fixture
def arena(device):
    arena = PinnedArena(device, limit_bytes=16 * MIB)
    yield arena
    arena.close()


def test_a_block_is_made_once_and_reused(arena):
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


def test_preparing_too_much_is_logged_for_who_does_not_wait(arena, caplog):
    with pytest.raises(BudgetError):
        arena.prepare(arena.limit_bytes + 2 * MIB).result()
    arena.close()  # which waits for the thread
    assert "host memory is not pinned ahead" in caplog.text and "the host arena holds" in caplog.text


@pytest.fixture
def pinning(monkeypatch):
    """Begins to pin memory in the background, which ends only once the event that is returned is set."""

    def begin(arena, num_bytes):
        begun, may_end = threading.Event(), threading.Event()
        touch = arenas._touch

        def slow(*arguments):
            begun.set()
            assert may_end.wait(60)
            touch(*arguments)

        monkeypatch.setattr(arenas, "_touch", slow)
        prepared = arena.prepare(num_bytes)
        assert begun.wait(60) and not prepared.done()
        return prepared, may_end

    return begin


def test_extents_come_and_go_while_memory_is_pinned(arena, pinning):
    kept = arena.allocate(MIB)
    prepared, may_end = pinning(arena, 4 * MIB)
    arena.release(kept)
    assert arena.allocate(MIB // 2).block == 0 and arena.used_bytes == MIB // 2
    may_end.set()
    prepared.result(60)
    assert arena.pinned_bytes >= 4 * MIB


def test_who_needs_more_than_there_is_takes_what_is_being_prepared(arena, pinning):
    prepared, may_end = pinning(arena, 4 * MIB)
    threading.Timer(0.2, may_end.set).start()
    assert arena.allocate(2 * MIB).block == 0
    prepared.result(60)
    assert arena.pinned_bytes == 4 * MIB, "nothing was pinned twice"


def test_a_closed_arena_lends_nothing(arena):
    arena.allocate(1)
    arena.close()
    arena.close()
    assert arena.pinned_bytes == 0
    with pytest.raises(PhaseError, match="arena is closed"):
        arena.allocate(1)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.booleans()), max_size=20))
def test_extents_never_overlap_and_all_bytes_come_back(actions):
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
    assert arena.pinned_bytes % BLOCK_ALIGNMENT_BYTES == 0
    arena.close()


def test_what_is_free_already_is_not_reserved_again(arena):
    arena.reserve(3 * MIB)
    arena.reserve(4 * MIB)
    assert arena.pinned_bytes == 4 * MIB
    arena.reserve(4 * MIB + 1)
    assert arena.pinned_bytes == 6 * MIB
    arena.allocate(5000)
    arena.reserve(6 * MIB - 8192)
    assert arena.pinned_bytes == 6 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (1, 3, 0, 2)])
def test_freed_ranges_join_so_that_one_as_large_as_all_of_them_fits(arena, order):
    arena.reserve(4 * MIB)
    extents = [arena.allocate(MIB) for _ in range(4)]
    for number in order:
        arena.release(extents[number])
    arena.allocate(4 * MIB)
    assert arena.pinned_bytes == 4 * MIB


def test_a_limit_below_what_is_held_keeps_that_and_gives_nothing_more(arena):
    extent = arena.allocate(10 * MIB)
    arena.limit_bytes = 4 * MIB
    with pytest.raises(BudgetError, match="but only 0 B are allowed") as caught:
        arena.reserve(MIB)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (2 * MIB, 0)
    arena.release(extent)
    arena.allocate(10 * MIB)
    assert arena.pinned_bytes == 10 * MIB


def test_a_closed_arena_says_so_whatever_it_is_asked(arena):
    extent = arena.allocate(1)
    arena.close()
    for ask in (lambda: arena.prepare(1), lambda: arena.reserve(1), lambda: arena.release(extent)):
        with pytest.raises(PhaseError, match="the host arena is closed"):
            ask()
    assert arena.pinned_bytes == 0


def test_closing_waits_for_what_is_being_prepared(arena, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def slow(num_bytes):
        begun.set()
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(arena, "reserve", slow)
    arena.prepare(1)
    assert begun.wait(60)
    arena.close()
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("colo-arena")]


def test_pages_are_there_before_they_are_lent_made_on_the_cpus_of_the_device_and_gone_after(device, monkeypatch):
    cpus, calls = {0}, []
    monkeypatch.setattr(arenas, "local_cpus", lambda device: cpus)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: calls.append((thread, cpus)), raising=False)
    process = psutil.Process()
    arena = PinnedArena(device, limit_bytes=128 * MIB)
    gc.collect()
    before = process.memory_info().rss
    arena.reserve(64 * MIB)
    assert process.memory_info().rss - before > 60 * MIB
    assert calls and all(call == (0, cpus) for call in calls)
    assert arena.view(arena.allocate(64 * MIB)).eq(0).all()
    arena.close()
    assert process.memory_info().rss - before < 20 * MIB


@pytest.fixture
def driver(monkeypatch):
    """cudart's registration of host memory."""
    driver = SimpleNamespace(registered={}, code=0)

    def register(address, size_bytes, flags):
        assert flags == 0
        driver.registered[address] = size_bytes
        return SimpleNamespace(value=driver.code)

    def unregister(address):
        del driver.registered[address]
        return driver.code

    driver.cudaHostRegister, driver.cudaHostUnregister = register, unregister
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(arenas, "local_cpus", lambda device: {0})
    return driver


def test_for_a_gpu_blocks_are_registered_once_and_unregistered_as_the_arena_closes(driver):
    arena = PinnedArena(torch.device("cuda", 0), limit_bytes=16 * MIB)
    extent = arena.allocate(3 * MIB)
    assert driver.registered == {arena.view(extent).data_ptr(): 4 * MIB}
    arena.allocate(MIB)
    assert len(driver.registered) == 1
    arena.close()
    assert driver.registered == {}
    arena.close()


def flags_of(address):
    """What the kernel says of the mapping at an address, in the two letters of /proc/self/smaps."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells of mappings")
def test_a_fork_copies_no_pinned_memory(driver):
    """A child gets pinned pages as copies, at once: a worker of a DataLoader would take as much as the arena."""
    arena = PinnedArena(torch.device("cuda", 0), limit_bytes=16 * MIB)
    data = arena.view(arena.allocate(MIB))
    assert "dc" in flags_of(data.data_ptr()), "do not copy on fork"
    plain = PinnedArena(torch.device("cpu"), limit_bytes=16 * MIB)
    assert "dc" not in flags_of(plain.view(plain.allocate(MIB)).data_ptr())
    arena.close()
    assert "dc" not in flags_of(data.data_ptr()), "what outlives the arena is plain memory of the loop's"


def test_an_arena_that_nobody_closed_is_unregistered_as_it_is_collected_but_not_at_exit(driver):
    arena = PinnedArena(torch.device("cuda", 0), limit_bytes=16 * MIB)
    arena.allocate(1)
    assert arena._blocks[0]._unregister.atexit is False
    del arena
    gc.collect()
    assert driver.registered == {}


@pytest.mark.parametrize("code", [1, 2])
def test_memory_that_the_driver_does_not_register_is_an_error_with_its_code(driver, code, monkeypatch):
    driver.code = code
    arena = PinnedArena(torch.device("cuda", 0), limit_bytes=16 * MIB)
    made = []
    refused = rf"2.00 MiB of host memory are not pinned \(cudaHostRegister, error {code}\): .*ulimit"
    with monkeypatch.context() as patch, pytest.raises(BudgetError, match=refused):
        patch.setattr(torch, "zeros", lambda *size, device: made.append(device))
        arena.allocate(1)
    assert made == [torch.device("cuda", 0)], "the runtime's error is taken, or the next kernel would raise it"
    assert arena.pinned_bytes == 0
    driver.code = 0
    arena.allocate(1)
    driver.code = code
    with pytest.raises(ColoError, match="cudaHostUnregister failed"):
        arena.close()


def test_the_host_has_the_last_word_whatever_the_limit(device, monkeypatch):
    monkeypatch.setattr(arenas, "available_host_bytes", lambda: 5 * MIB)
    assert PinnedArena(device).limit_bytes == 5 * MIB
    arena = PinnedArena(device, limit_bytes=64 * MIB)
    with pytest.raises(BudgetError, match="its limit is 64.00 MiB, and the host has 5.00 MiB available") as caught:
        arena.allocate(6 * MIB)
    assert (caught.value.free_bytes, arena.pinned_bytes) == (5 * MIB, 0)
    arena.allocate(4 * MIB)
    monkeypatch.setattr(arenas, "available_host_bytes", lambda: 0)
    with pytest.raises(BudgetError, match="but only 0 B are allowed"):
        arena.allocate(1)
    arena.close()


def test_an_extent_goes_back_when_nothing_refers_to_tensors_over_it_any_more(device):
    arena = PinnedArena(device, limit_bytes=64 * MIB)
    extent = arena.allocate(8192)
    parts = [arena.tensor(extent, start, 4096) for start in (0, 4096)]
    arena.release_after(extent, parts)
    view = parts[0][7:].numpy()
    parts.clear()
    assert arena.used_bytes == 8192
    del view
    assert arena.used_bytes == 0
    last = arena.tensor(arena.allocate(4096), 0, 4096)
    arena.close()
    last.fill_(1)
