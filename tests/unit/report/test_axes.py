import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.report import axes
from colo.units import GIB, MIB


@settings(max_examples=300)
@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e12), st.integers(2, 10))
def test_ticks_are_round_inside_and_about_as_many_as_asked(low, length, count):
    values = axes.ticks(low, low + length, count)
    slack = 1e-6 * length + 4 * math.ulp(abs(low) + length)  # a thousandth beside a milliard is near what doubles hold
    assert all(low - slack <= value <= low + length + slack for value in values)
    assert values == sorted(values)
    assert len(values) <= 2.5 * count + 2


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 146, [0, 20, 40, 60, 80, 100, 120, 140]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1, 12, [2, 4, 6, 8, 10, 12])],
)
def test_ticks(low, high, expected):
    assert axes.ticks(low, high) == pytest.approx(expected)


def test_ticks_of_nothing():
    assert axes.ticks(3.0, 3.0) == [3.0]
    assert axes.count_ticks(1) == [(0.5, "1")]
    assert [label for _, label in axes.count_ticks(3)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("high", "units", "last"),
    [
        (80 * GIB, axes.BYTE_UNITS, (80 * GIB, "80 GiB")),
        (300 * MIB, axes.BYTE_UNITS, (300 * MIB, "300 MiB")),
        (100.0, axes.TIME_UNITS, (100.0, "100 s")),
        (0.05, axes.TIME_UNITS, (pytest.approx(0.05), "50 ms")),
        (1200.0, axes.TIME_UNITS, (1200.0, "20 min")),
        (36000.0, axes.TIME_UNITS, (36000.0, "10 h")),
        (2.0, axes.PLAIN_UNITS, (2.0, "2")),
        (0, axes.TIME_UNITS, (0, "0")),
    ],
)
def test_unit_ticks_choose_the_unit(high, units, last):
    assert axes.unit_ticks(0, high, units)[-1] == last


def test_series_that_are_thinned_keep_their_extremes():
    values = [0.0] * 5000
    values[1234], values[4321], values[7] = 9.0, -9.0, math.nan
    shown = axes.extremes(values)
    assert {0, 1234, 4321, 4999} <= set(shown)
    assert 7 not in shown
    assert len(shown) < 1000
