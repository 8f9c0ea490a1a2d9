"""Segments that never move, and moves that are complete when they are returned."""

import pytest

from colo.errors import PhaseError
from colo.phases.phase import Done, FixedSegment, Residency, Segment


@pytest.mark.parametrize(("residency", "device_bytes"), [(Residency.RESIDENT, 7), (Residency.SHARED, 0)])
def test_a_fixed_segment_holds_what_is_its_own_and_refuses_every_move(residency, device_bytes):
    segment = FixedSegment("s", 7, residency)
    assert isinstance(segment, Segment)
    assert (segment.device_bytes, segment.host_bytes, segment.size_bytes, segment.away) == (device_bytes, 0, 7, None)
    assert segment.begin(residency).poll()
    why = "it may become" if residency is Residency.SHARED else "it never moves"
    for target in {Residency.OFFLOADED, Residency.DISCARDED}:
        with pytest.raises(PhaseError, match=f"segment s is {residency} and cannot become {target}.*{why}"):
            segment.begin(target)


def test_a_move_that_is_done_says_how_much_it_moved():
    assert (Done().moved_bytes, Done(5).moved_bytes, Done().poll()) == (0, 5, True)
    assert Done().wait() is None
