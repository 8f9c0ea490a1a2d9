import math

from hypothesis import given, settings
from hypothesis import strategies as st
from traces import run, sample

from colo.phases.phase import Phase
from colo.phases.trace import Trace
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
from colo.units import GIB


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


@settings(max_examples=40, deadline=None)
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
    first = segment_colours(["engine.weights", "trainer.optimizer", "x", "y", "z"])
    second = segment_colours(["x", "trainer.optimizer"])
    assert first["trainer.optimizer"] == second["trainer.optimizer"]
    assert len(set(first.values())) == 5
    assert set(PART_COLOURS) == set(PARTS)
    assert len(set(PART_COLOURS.values())) == len(PARTS)


def test_time_range_covers_spans_and_samples():
    trace = Trace()
    assert time_range(trace) == (0.0, 0.0)
    trace.add("x", 2.0, end_s=7.0)
    trace.samples.append(sample(1.0, Phase.IDLE, {}))
    assert time_range(trace) == (1.0, 7.0)
