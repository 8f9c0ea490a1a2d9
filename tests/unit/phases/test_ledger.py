import pytest

from colo.errors import PhaseError
from colo.phases.ledger import Holding, Ledger
from colo.phases.phase import Residency


def holding(name="a", size_bytes=10, residency=Residency.RESIDENT, away=Residency.OFFLOADED):
    return Holding(name=name, size_bytes=size_bytes, residency=residency, away=away)


def ledger(*holdings, capacity_bytes=100, host_capacity_bytes=100):
    return Ledger.of(holdings, capacity_bytes=capacity_bytes, host_capacity_bytes=host_capacity_bytes)


def test_only_resident_segments_hold_device_bytes():
    book = ledger(*(holding(r.value, 10, r) for r in Residency))
    assert (book.device_bytes, book.host_bytes, book.free_bytes) == (10, 10, 90)


def test_moving_a_segment_leaves_the_old_ledger_alone():
    before = ledger(holding())
    after = before.moved("a", Residency.OFFLOADED)
    assert (before.device_bytes, after.device_bytes, after.host_bytes) == (10, 0, 10)


def test_moving_refuses_an_illegal_move_and_says_which():
    with pytest.raises(PhaseError, match=r"a is shared and cannot become offloaded"):
        ledger(holding(residency=Residency.SHARED)).moved("a", Residency.OFFLOADED)


def test_names_are_unique():
    with pytest.raises(ValueError, match="two segments are called a"):
        ledger(holding(), holding())


def test_holdings_cannot_be_changed_behind_the_ledgers_back():
    with pytest.raises(TypeError):
        ledger(holding()).holdings["b"] = holding("b")


def test_a_refusal_carries_its_numbers_and_shows_who_holds_what():
    error = ledger(holding("big", 80)).refuse("phase train", needed_bytes=50, advice="Free something.")
    assert (error.needed_bytes, error.free_bytes, error.missing_bytes) == (50, 20, 30)
    for part in ("phase train needs 50 B", "20 B could be made free", "30 B are missing", "Free something.", "big"):
        assert part in str(error)


def test_only_an_offload_costs_bus_bytes():
    assert holding(away=Residency.OFFLOADED).eviction_cost_bytes == 10
    assert holding(away=Residency.DISCARDED).eviction_cost_bytes == 0


def test_the_ledger_as_text_lists_the_largest_first_in_columns_and_what_is_free():
    book = ledger(holding("small", 10), holding("a.long.name", 50, Residency.OFFLOADED), capacity_bytes=90)
    assert book.render().splitlines() == [
        "ledger of the device:",
        "  a.long.name         50 B  offloaded",
        "  small               10 B  resident",
        "  free                80 B",
        "  capacity            90 B",
        "  host arena: 50 B of 100 B",
    ]
