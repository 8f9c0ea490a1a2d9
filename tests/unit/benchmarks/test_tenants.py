"""Which copies a step waits for."""

import pytest

from benchmarks.tenants import exposed_s
from colo.phases.trace import Trace


def trace(*copies, others=()):
    made = Trace()
    for category, spans in (("copy", copies), ("step", others)):
        for start_s, end_s in spans:
            made.add("back trainer.optimizer", start_s, end_s=end_s, category=category)
    return made


@pytest.mark.parametrize(
    ("copies", "hidden", "seconds"),
    [
        ([], [(0, 9)], 0),
        ([(2, 4)], [], 2),
        ([(2, 4)], [(1, 5)], 0),
        ([(2, 4), (3, 6)], [], 4),  # side by side
        ([(2, 6)], [(0, 3), (5, 9)], 2),
        ([(-5, 1), (8, 20)], [], 3),  # what lies outside of the step
        ([(-5, 1), (8, 20)], [(-5, 0.5), (9, 20)], 1.5),
    ],
)
def test_what_neither_sampling_nor_gradients_hide(copies, hidden, seconds):
    assert exposed_s(trace(*copies, others=[(0, 10)]), (0, 10), hidden) == pytest.approx(seconds)
