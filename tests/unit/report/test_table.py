import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from colo.phases.phase import Phase
from colo.phases.trace import EVALUATION, MemorySample, Trace
from colo.report.table import (
    PARTS,
    cycles,
    moves_once,
    peak_samples,
    phase_figures,
    report_tables,
    segment_peaks,
    sheets,
    sparkline,
    step_figures,
    summary,
    switching_s,
)
from colo.units import GIB

NAMES = ("mismatch_sampled", "completion_tokens")


def printed(trace, width=100):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(*report_tables(trace))
    return capture.get()


def add(trace, name, start_s, end_s, category="phase", phase=None, resource="host", num_bytes=0):
    phase = Phase(name) if phase is None else phase
    trace.add(name, start_s, end_s=end_s, category=category, phase=phase, resource=resource, num_bytes=num_bytes)


def run(num_steps: int = 3) -> Trace:
    """Training steps of ten seconds: 1 switching, 1 sync, 4 rollout, 1 idle, 1 switching, 2 train."""
    trace = Trace(capacity_bytes=80 * GIB)
    for i in range(num_steps):
        t = 10.0 * i
        add(trace, "switch to rollout", t, t + 2, "switch", Phase.ROLLOUT)
        add(trace, "offload trainer.optimizer", t, t + 0.5, "step", Phase.SYNC, "d2h", 8 * GIB)
        add(trace, "out trainer.optimizer", t + 0.25, t + 1, "copy", Phase.IDLE, "d2h", 8 * GIB)
        add(trace, "sync", t + 1, t + 2)
        add(trace, "publish", t + 1, t + 2, "step", Phase.SYNC, "device", 2 * GIB)
        add(trace, "rollout", t + 2, t + 6)
        add(trace, "switch to train", t + 7, t + 8, "switch", Phase.TRAIN)
        add(trace, "train", t + 8, t + 10)
        trace.samples.append(
            sample(t + 2, Phase.ROLLOUT, {"trainer.gradients": 0, "engine.weights": 16 * GIB}, 8 * GIB)
        )
        trace.samples.append(
            sample(t + 8, Phase.TRAIN, {"trainer.gradients": (i + 1) * GIB, "engine.weights": 16 * GIB})
        )
        trace.metric("reward", 0.1 * i)
    return trace


def sample(time_s, phase, segments, host_bytes=0, used=None):
    return MemorySample(time_s=time_s, phase=phase, segments=segments, host_bytes=host_bytes, device_used_bytes=used)


def test_what_a_phase_does_within_a_switch_is_no_time_of_the_switch():
    assert switching_s(run(3).spans) == pytest.approx(3 * (1 + 1))
    assert switching_s([]) == 0


def test_a_training_step_is_divided_without_remainder():
    steps = cycles(run(3))
    assert [(step.start_s, step.end_s) for step in steps] == [(0, 10), (10, 20), (20, 30)]
    for step in steps:
        assert step.parts_s == pytest.approx({"rollout": 4, "sync": 1, "train": 2, "switch": 2, "idle": 1})


def test_a_rollout_that_no_training_has_followed_is_no_step():
    """The last evaluation of a run, or all that there is of a model that is not trained."""
    trace = run(1)
    add(trace, "rollout", 12.0, 15.0)
    assert [step.duration_s for step in cycles(trace)] == [10.0]
    figures = summary(trace)
    assert (figures["num_steps"], figures["median_step_s"], figures["parts_s"]["rollout"]) == (1, 10.0, 4)
    rows = {row.phase: row for row in phase_figures(trace)}
    assert (rows["rollout"].count, rows["rollout"].total_s, rows["idle"].total_s) == (2, 7, 3)
    untrained = Trace()
    add(untrained, "rollout", 1.0, 4.0)
    assert (summary(untrained)["num_steps"], summary(untrained)["median_step_s"]) == (0, None)
    assert "rollout" in printed(untrained) and "step" not in printed(untrained)


def test_several_rollouts_and_trainings_in_a_row_are_one_step():
    trace = Trace()
    for i, name in enumerate(["rollout", "rollout", "train", "train", "rollout", "train"]):
        add(trace, name, i, i + 1.0)
    assert [(step.start_s, step.end_s) for step in cycles(trace)] == [(0, 4), (4, 6)]


def test_every_step_of_the_optimizer_in_a_training_phase_is_a_step():
    """As with several steps for a rollout: the first has the rollout in it, the last ends where the phase does."""
    trace = Trace()
    add(trace, "rollout", 1, 4)
    add(trace, "switch", 4, 5, "switch", Phase.TRAIN)
    add(trace, "train", 5, 12)
    add(trace, "rollout", 12, 13)
    add(trace, "train", 14, 15)
    trace.steps += [7, 8, 11, 15]
    steps = cycles(trace)
    assert [(step.start_s, step.end_s) for step in steps] == [(1, 7), (7, 8), (8, 12), (12, 15)]
    assert [step.parts_s["train"] for step in steps] == [2, 1, 4, 1]
    assert [step.parts_s["rollout"] for step in steps] == [3, 0, 0, 1]
    assert [step.parts_s["switch"] for step in steps] == [1, 0, 0, 0]
    assert {row.phase: row.count for row in phase_figures(trace)}["train"] == 2
    assert "4 training steps" in printed(trace)


def test_an_evaluation_is_no_training_step_and_has_a_row_of_its_own():
    trace = run(2)
    for t in (20.0, 24.0):
        add(trace, "rollout", t + 1, t + 3)
        add(trace, EVALUATION, t + 3, t + 4, phase=Phase.TRAIN)
    add(trace, EVALUATION, 28.0, 29.0, phase=Phase.TRAIN)  # of what was sampled elsewhere
    add(trace, "rollout", 30.0, 33.0)
    add(trace, "train", 33.0, 34.0)
    assert [(step.start_s, step.end_s) for step in cycles(trace)] == [(0, 10), (10, 20), (29, 34)]
    rows = {row.phase: row for row in phase_figures(trace)}
    assert (rows["train"].count, rows["rollout"].count) == (3, 3)
    assert (rows["train"].total_s, rows["rollout"].total_s) == (5, 11)
    assert (rows[EVALUATION].count, rows[EVALUATION].total_s) == (2, 9)
    assert rows[EVALUATION].peak_bytes is None
    trace.samples += [sample(t, Phase.TRAIN, {"engine.weights": t * GIB}) for t in (19, 25, 32)]
    assert {row.phase: row for row in phase_figures(trace)}[EVALUATION].peak_bytes == 25 * GIB
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert summary(trace)["num_steps"] == 3 and "3 training steps" in printed(trace)


def test_no_phases_no_steps():
    trace = Trace()
    add(trace, "load", 0.0, 1.0, "step", Phase.IDLE)
    add(trace, "idle", 0.0, 1.0)
    assert cycles(trace) == []


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["rollout", "sync", "train"]), st.floats(0, 9), st.floats(0, 9), st.booleans())),
    st.lists(st.floats(0, 100)),
)
def test_steps_follow_each_other_and_their_parts_add_up(turns, stepped):
    trace, now_s = Trace(steps=sorted(stepped)), 0.0
    for name, gap_s, length_s, switches in turns:
        if switches:
            add(trace, "switch", now_s, now_s + gap_s, "switch", Phase(name))
        now_s += gap_s
        add(trace, name, now_s, now_s + length_s)
        now_s += length_s
    steps = cycles(trace)
    assert all(a.end_s == b.start_s for a, b in pairwise(steps))
    for step in steps:
        assert set(step.parts_s) == set(PARTS)
        assert min(step.parts_s.values()) >= 0
        assert sum(step.parts_s.values()) == pytest.approx(step.duration_s, abs=1e-9)


def test_moved_bytes_are_counted_once():
    moved = [(s.name, s.category, s.phase, s.num_bytes) for s in moves_once(run(1))]
    assert moved == [
        ("offload trainer.optimizer", "step", Phase.SYNC, 0),
        ("out trainer.optimizer", "copy", Phase.SYNC, 8 * GIB),
        ("publish", "step", Phase.SYNC, 2 * GIB),
    ]


def test_a_step_without_a_copy_of_its_own_keeps_its_bytes():
    trace = Trace()
    add(trace, "offload a", 0.0, 1.0, "step", Phase.TRAIN, "d2h", 100)
    add(trace, "other size", 0.5, 1.0, "copy", Phase.TRAIN, "d2h", 99)
    add(trace, "other way", 0.5, 1.0, "copy", Phase.TRAIN, "h2d", 100)
    add(trace, "later", 1.5, 2.0, "copy", Phase.TRAIN, "d2h", 100)
    assert moves_once(trace)[0].num_bytes == 100


def test_a_copy_without_a_phase_belongs_to_the_one_it_runs_in_or_prepares():
    trace = Trace()
    add(trace, "rollout", 1.0, 2.0)
    add(trace, "train", 3.0, 4.0)
    for start_s in (0.0, 1.5, 2.5, 3.5, 4.5):
        add(trace, "copy", start_s, start_s + 0.1, "copy", Phase.IDLE)
    phases = [span.phase for span in moves_once(trace)]
    assert phases == [Phase.ROLLOUT, Phase.ROLLOUT, Phase.TRAIN, Phase.TRAIN, Phase.IDLE]


def test_phase_figures():
    rows = {row.phase: row for row in phase_figures(run(3))}
    assert list(rows) == list(PARTS)
    assert (rows["rollout"].count, rows["rollout"].total_s, rows["rollout"].mean_s) == (3, 12.0, 4.0)
    assert rows["rollout"].share == pytest.approx(0.4)
    assert rows["switch"].share == pytest.approx(0.2)
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert (rows["rollout"].peak_bytes, rows["train"].peak_bytes, rows["switch"].peak_bytes) == (
        16 * GIB,
        19 * GIB,
        19 * GIB,
    )
    assert rows["sync"].peak_bytes is rows["idle"].peak_bytes is None  # of which there is no sample
    assert rows["sync"].moved_bytes == 3 * 10 * GIB
    assert (rows["train"].moved_bytes, rows["train"].gb_per_s) == (0, None)


def test_rate_of_a_phase_counts_overlapping_copies_once():
    trace = Trace()
    add(trace, "train", 0.0, 10.0)
    add(trace, "a", 1.0, 3.0, "copy", Phase.TRAIN, "h2d", 10**9)
    add(trace, "b", 2.0, 5.0, "copy", Phase.TRAIN, "d2h", 10**9)
    assert phase_figures(trace)[0].gb_per_s == pytest.approx(2 / 4)


def test_transition_figures_come_slowest_first():
    rows = step_figures(run(3))
    assert [(row.name, row.category, row.count) for row in rows] == [
        ("publish", "step", 3),
        ("out trainer.optimizer", "copy", 3),
        ("offload trainer.optimizer", "step", 3),
    ]
    assert rows[1].median_s == pytest.approx(0.75)
    assert rows[1].gb_per_s == pytest.approx(8 * GIB / 0.75 / 1e9)
    assert rows[2].gb_per_s is None


def test_segments_are_listed_engine_first_with_their_own_peaks():
    assert segment_peaks(run(2)) == {"engine.weights": 16 * GIB, "trainer.gradients": 2 * GIB}
    assert list(segment_peaks(run(2))) == ["engine.weights", "trainer.gradients"]


def test_peak_samples_are_the_first_highest_moments():
    trace = run(2)
    trace.samples.append(trace.samples[-1])
    peaks = peak_samples(trace)
    assert list(peaks) == [Phase.ROLLOUT, Phase.TRAIN]
    assert peaks[Phase.TRAIN] is trace.samples[3]


def test_summary_is_json_and_agrees_with_the_figures():
    trace = run(3)
    trace.metric("loss", math.nan)
    trace.metric("loss", 2.0)
    figures = json.loads(json.dumps(summary(trace), allow_nan=False))
    assert figures["num_steps"] == 3
    assert figures["median_step_s"] == 10.0
    assert figures["parts_s"]["switch"] == pytest.approx(6.0)
    assert figures["peak_bytes"] == trace.peak_bytes()
    assert figures["peak_host_bytes"] == 8 * GIB
    assert figures["peak_device_used_bytes"] is None
    assert figures["phases"]["sync"]["moved_bytes"] == 30 * GIB
    assert figures["steps"][0]["name"] == "publish"
    assert figures["segments_at_peak"]["train"] == {"trainer.gradients": 3 * GIB, "engine.weights": 16 * GIB}
    assert figures["metrics"]["loss"] == {"count": 2, "first": None, "last": 2.0, "lowest": 2.0, "highest": 2.0}


def test_summary_of_nothing_is_json():
    figures = json.loads(json.dumps(summary(Trace()), allow_nan=False))
    assert (figures["num_steps"], figures["median_step_s"], figures["phases"]) == (0, None, {})


def test_sheets_say_the_figures():
    phases, transitions, memory, metrics = sheets(run(3))
    assert phases.title == "Phases of 3 training steps, 10.00 s at the median"
    assert phases.rows[0] == ("rollout", "3", "12.00 s", "4.00 s", "40.0%", "16.00 GiB", "-", "-")
    assert phases.rows[1][-2:] == ("30.00 GiB", "6.1")
    assert transitions.rows[1] == ("out trainer.optimizer", "copy", "3", "750.0 ms", "2.25 s", "24.00 GiB", "11.5")
    assert memory.columns == ("segment", "rollout", "train")
    assert ("trainer.gradients", "-", "3.00 GiB") in memory.rows
    assert ("all segments", "16.00 GiB", "19.00 GiB") in memory.rows
    assert ("host arena", "8.00 GiB", "-") in memory.rows
    assert "80.00 GiB" in memory.title
    assert metrics.rows[0][:6] == ("reward", "3", "0", "0.2", "0", "0.2")


def test_driver_view_is_a_row_where_there_is_one():
    trace = run(1)
    trace.samples.append(sample(9.0, Phase.TRAIN, {"engine.weights": 70 * GIB}, used=71 * GIB))
    trace.samples.append(sample(9.5, Phase.TRAIN, {"engine.weights": 60 * GIB}, used=75 * GIB))
    rows = {row[0]: row for row in sheets(trace)[2].rows}
    assert rows["device (driver's view)"] == ("device (driver's view)", "-", "75.00 GiB")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_text_fits_the_width(width):
    text = printed(run(12), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("rollout", "switch", "out trainer.optimizer", "engine.weights", "reward", "10.00 s at the median"):
        assert word in text


@pytest.mark.parametrize("width", [70, 80, 100, 200])
def test_a_curve_gets_narrower_and_no_word_or_curve_is_cut(width):
    trace = run(1)
    for value in range(300):
        trace.metric("mismatch_sampled", 1e-9 * (1 + value))
        trace.metric("completion_tokens", -value)
    text = printed(trace, width)
    assert "\u2026" not in text and max(map(len, text.splitlines())) <= width
    rising, falling = (next(row for row in text.splitlines() if name in row).split()[-1] for name in NAMES)
    assert list(rising) == sorted(rising) and list(falling) == sorted(falling, reverse=True)
    assert (
        rising[0] == falling[-1] == "\u2581"
        and rising[-1] == falling[0] == "\u2588"
        and len(rising) >= min(24, width - 68)
    )


def test_every_row_has_a_cell_for_every_column():
    for sheet in sheets(run(2)):
        assert {len(row) for row in sheet.rows} == {len(sheet.columns)}


def test_nothing_recorded_is_said():
    assert printed(Trace()).startswith("Nothing was recorded")
    assert len(report_tables(Trace())) == 1


def test_names_are_not_taken_for_markup():
    trace = Trace()
    add(trace, "[bold]x[/nonsense]", 0.0, 1.0, "step", Phase.TRAIN)
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(*report_tables(trace))
    assert "[bold]x[/nonsense]" in capture.get()


def test_sparkline_rises_from_the_lowest_to_the_highest_block():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "".join(map(chr, range(0x2581, 0x2589)))
    assert sparkline([]) == ""
    assert sparkline([5.0, 5.0]) == "\u2581\u2581"
    assert sparkline([math.nan, 1.0, math.inf, 2.0]) == "\u2581\u2588"


@given(st.lists(st.floats(), max_size=200), st.integers(1, 50))
def test_sparkline_keeps_to_its_width(values, width):
    finite = [value for value in values if math.isfinite(value)]
    assert len(sparkline(values, width)) == min(width, len(finite))
