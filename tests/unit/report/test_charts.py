import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import run, sample

from colo.phases.phase import Phase
from colo.phases.trace import Trace
from colo.report import charts
from colo.report.charts import (
    PART_COLOURS,
    decimate,
    memory_chart,
    reward_chart,
    segment_colours,
    steps_chart,
    time_range,
)
from colo.report.table import PARTS
from colo.units import GIB, MIB


def test_both_pictures_draw_the_same_bars_and_areas():
    """What is drawn is decided here: the page and the PNG only place it."""
    trace = run(4)
    memory, steps = memory_chart(trace), steps_chart(trace)
    assert [series.label for series in memory.stack] == ["engine.weights", "engine.kv_cache", "trainer.optimizer"]
    assert (memory.limit, memory.y.high) == (40 * GIB, 40 * GIB * 1.05)
    assert [(first, last) for first, last, _ in steps.bars] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [series.label for series in steps.bars[1][2]] == [f"step 2, {part}" for part in PARTS]


def test_rewards_that_are_not_finite_are_left_out():
    trace = Trace()
    for reward in (math.nan, 1.0, math.inf, 3.0):
        trace.metric("reward", reward)
    assert reward_chart(trace).places == [1, 3]
    assert reward_chart(trace).heading.caption.startswith("4 values: ")  # of no training step that was recorded


EXTREMES = (1.7976931348623157e308, -1.7976931348623157e308, 1e308, 1.1e300, 1e300, 1.0, 1e-300, -5e-324, 0.0)


@given(st.lists(st.sampled_from(EXTREMES) | st.floats(), min_size=1, max_size=5))
def test_the_largest_and_the_smallest_rewards_have_a_chart(rewards):
    trace = Trace()
    for reward in rewards:
        trace.metric("reward", reward)
    chart = reward_chart(trace)
    assert (chart is None) == (not any(map(math.isfinite, rewards)))
    if chart is not None:
        assert math.isfinite(chart.y.high - chart.y.low) and chart.y.high - chart.y.low > 1e-280
        assert all(chart.y.low <= chart.series.values[i] <= chart.y.high for i in chart.places)
        labels = [label for _, label in chart.y.ticks]
        assert 2 <= len(set(labels)) == len(labels)


def test_labels_of_the_largest_rewards_are_theirs():
    trace = Trace()
    for reward in (1.7e308, -1.7e308):
        trace.metric("reward", reward)
    assert [label for _, label in reward_chart(trace).y.ticks] == ["-1e+308", "0", "1e+308"]
    assert reward_chart(trace).heading.caption == "2 values: 1.7e+308 at first, -1.7e+308 at last."


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=300))
def test_decimation_keeps_order_ends_and_every_peak(rows):
    samples = [sample(float(t), Phase.TRAIN, {"a": a, "b": b}, used=a) for t, a, b in rows]
    kept = decimate(samples, num_bins=10)
    ordered = sorted(samples, key=lambda s: s.time_s)
    assert [s.time_s for s in kept] == sorted(s.time_s for s in kept)
    assert all(any(s is original for original in samples) for s in kept)
    assert (kept[0], kept[-1]) == (ordered[0], ordered[-1])
    assert len(kept) <= max(20, 10 * 7)
    for value in (lambda s: s.total_bytes, lambda s: s.segments["a"], lambda s: s.segments["b"]):
        assert max(map(value, kept)) == max(map(value, samples))
    assert min(s.total_bytes for s in kept) == min(s.total_bytes for s in samples)


def test_colours_are_fixed_for_known_segments_and_differ_for_others():
    of_engine, of_trainer = ("weights", "kv_cache"), ("parameters", "gradients", "optimizer", "master_weights")
    known = [*(f"engine.{name}" for name in of_engine), *(f"trainer.{name}" for name in of_trainer)]
    first = segment_colours(["engine.weights", "trainer.optimizer", "x", "y", "z"])
    second = segment_colours(["x", "trainer.optimizer"])
    assert first["trainer.optimizer"] == second["trainer.optimizer"]
    assert len(set(first.values())) == 5
    assert set(PART_COLOURS) == set(PARTS)
    assert len(set(PART_COLOURS.values())) == len(PARTS)
    everywhere = segment_colours([*known, "x", "y", "z", "u"])
    assert len(set(everywhere.values())) == len(everywhere)
    assert set(everywhere.values()).isdisjoint(PART_COLOURS.values()), "a colour means one thing"


def test_time_range_covers_spans_and_samples():
    trace = Trace()
    assert time_range(trace) == (0.0, 0.0)
    trace.add("x", 2.0, end_s=7.0)
    trace.samples.append(sample(1.0, Phase.IDLE, {}))
    assert time_range(trace) == (1.0, 7.0)


# ---- axes ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e12), st.integers(2, 10))
def test_ticks_are_round_inside_and_about_as_many_as_asked(low, length, count):
    values = charts.ticks(low, low + length, count)
    slack = 1e-6 * length + 4 * math.ulp(abs(low) + length)  # a thousandth beside a milliard is near what doubles hold
    assert all(low - slack <= value <= low + length + slack for value in values)
    assert values == sorted(values)
    assert len(values) <= 2.5 * count + 2


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 146, [0, 20, 40, 60, 80, 100, 120, 140]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1, 12, [2, 4, 6, 8, 10, 12])],
)
def test_ticks(low, high, expected):
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_ticks_of_nothing():
    assert charts.ticks(3.0, 3.0) == [3.0]
    assert charts.count_ticks(1) == [(0.5, "1")]
    assert [label for _, label in charts.count_ticks(3)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("high", "units", "last"),
    [
        (80 * GIB, charts.BYTE_UNITS, (80 * GIB, "80 GiB")),
        (300 * MIB, charts.BYTE_UNITS, (300 * MIB, "300 MiB")),
        (100.0, charts.TIME_UNITS, (100.0, "100 s")),
        (0.05, charts.TIME_UNITS, (pytest.approx(0.05), "50 ms")),
        (1200.0, charts.TIME_UNITS, (1200.0, "20 min")),
        (36000.0, charts.TIME_UNITS, (36000.0, "10 h")),
        (2.0, charts.PLAIN_UNITS, (2.0, "2")),
        (0, charts.TIME_UNITS, (0, "0")),
    ],
)
def test_unit_ticks_choose_the_unit(high, units, last):
    assert charts.unit_ticks(0, high, units)[-1] == last


def test_series_that_are_thinned_keep_their_extremes():
    values = [0.0] * 5000
    values[1234], values[4321], values[7] = 9.0, -9.0, math.nan
    shown = charts.extremes(values)
    assert {0, 1234, 4321, 4999} <= set(shown)
    assert 7 not in shown
    assert len(shown) < 1000
