import pytest

from colo.phases.phase import Phase
from colo.phases.trace import MAX_LATE, MemorySample, Span, Trace
from colo.report.table import sheets


def sample(time_s, phase, **segments):
    return MemorySample(time_s=time_s, phase=phase, segments={k.replace("__", "."): v for k, v in segments.items()})


def filled() -> Trace:
    trace = Trace()
    trace.add("rollout", 0.0, end_s=2.0, category="phase", phase=Phase.ROLLOUT, resource="engine")
    trace.add(
        "offload trainer.optimizer", 2.0, end_s=2.5, category="step", phase=Phase.TRAIN, resource="d2h", num_bytes=9
    )
    trace.add("offload trainer.optimizer", 4.0, end_s=4.25, category="step", phase=Phase.TRAIN)
    trace.samples += [sample(0.0, Phase.ROLLOUT, engine__weights=3, engine__kv_cache=4), sample(2.5, Phase.TRAIN, a=5)]
    trace.metric("reward", 1)
    trace.metric("reward", 2.5)
    return trace


def test_clock_starts_near_zero_and_runs():
    trace = Trace()
    first = trace.now_s()
    assert 0 <= first < 60
    assert trace.now_s() >= first


def test_span_measures_its_body():
    trace = Trace()
    before_s = trace.now_s()
    with trace.span("train", category="phase", phase=Phase.TRAIN, resource="device", num_bytes=7):
        inside_s = trace.now_s()
    (span,) = trace.spans
    assert before_s <= span.start_s <= inside_s <= span.end_s <= trace.now_s()
    assert (span.name, span.category, span.phase, span.resource, span.num_bytes) == (
        "train",
        "phase",
        Phase.TRAIN,
        "device",
        7,
    )


def test_span_is_recorded_when_its_body_raises():
    trace = Trace()
    with pytest.raises(KeyError), trace.span("fails"):
        raise KeyError
    assert [span.name for span in trace.spans] == ["fails"]


def test_nested_spans_are_recorded_as_they_end():
    trace = Trace()
    with trace.span("outer"), trace.span("inner"):
        pass
    inner, outer = trace.spans
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.start_s <= inner.start_s
    assert inner.end_s <= outer.end_s


def test_add_ends_now_unless_told_and_never_before_it_began():
    trace = Trace()
    trace.add("until now", trace.now_s() - 0.5)
    trace.add("backwards", 3.0, end_s=2.0)
    assert 0.5 <= trace.spans[0].duration_s < 60
    assert (trace.spans[1].duration_s, trace.spans[1].end_s) == (0.0, 3.0)


def test_defaults_of_a_span_are_idle_host_work():
    trace = Trace()
    trace.add("x", 0.0, end_s=1.0)
    assert trace.spans == [Span(name="x", category="work", start_s=0.0, duration_s=1.0, phase=Phase.IDLE)]


def test_peak_is_the_highest_total_of_one_moment():
    trace = Trace()
    trace.samples += [
        sample(0, Phase.ROLLOUT, a=10, b=1),
        sample(1, Phase.ROLLOUT, a=1, b=11),
        sample(2, Phase.TRAIN, a=3),
    ]
    assert trace.peak_bytes() == 12
    assert trace.peak_bytes(Phase.ROLLOUT) == 12
    assert trace.peak_bytes(Phase.TRAIN) == 3
    assert trace.peak_bytes(Phase.SYNC) == 0


def test_seconds_are_summed_by_name_within_a_category():
    assert filled().seconds("step") == {"offload trainer.optimizer": 0.75}
    assert filled().seconds("phase") == {"rollout": 2.0}
    assert filled().seconds("copy") == {}


def test_metrics_keep_their_order_as_floats():
    values = filled().metrics["reward"]
    assert values == [1.0, 2.5]
    assert all(type(value) is float for value in values)


def test_a_value_that_has_to_be_waited_for_is_read_when_somebody_asks_and_keeps_its_place():
    trace, read = Trace(), []

    def late(value):
        return lambda: read.append(value) or value

    for value in (1.0, 2.0):
        trace.metric("late", late(value))
    trace.metric("late", 3.0)
    assert read == []
    assert trace.metrics["late"] == [1.0, 2.0, 3.0] and trace.metrics["late"] == [1.0, 2.0, 3.0]
    assert sorted(read) == [1.0, 2.0]
    for value in range(MAX_LATE + 1):
        trace.metric("many", late(float(value)))
    assert len(read) > MAX_LATE, "what nobody reads does not grow"
    assert trace.metrics["many"] == list(map(float, range(MAX_LATE + 1)))


def test_a_long_run_keeps_its_peaks_and_not_every_sample(monkeypatch):
    monkeypatch.setattr("colo.phases.trace.MAX_SAMPLES", 100)
    trace = Trace()
    for number in range(1000):
        phase = Phase.TRAIN if number % 2 else Phase.ROLLOUT
        size = {101: 5000, 200: 4000}.get(number, number)
        trace.record(MemorySample(time_s=number, phase=phase, segments={"a": size}))
    assert len(trace.samples) <= 100
    assert (trace.peak_bytes(Phase.TRAIN), trace.peak_bytes(Phase.ROLLOUT)) == (5000, 4000)
    assert [s.time_s for s in trace.samples] == sorted(s.time_s for s in trace.samples)
    assert trace.samples[-1].time_s == 999


def long_run(num_steps):
    trace = Trace()
    for second in range(num_steps):
        trace.record(sample(second, Phase.ROLLOUT, engine__kv_cache=4))
        trace.add("rollout", second, end_s=second + 0.5, category="phase", phase=Phase.ROLLOUT)
        trace.add("out trainer.optimizer", second + 0.5, end_s=second + 0.6, category="step", phase=Phase.TRAIN)
        trace.record(sample(second + 0.6, Phase.TRAIN, engine__kv_cache=0))
        trace.add("train", second + 0.6, end_s=second + 0.75, category="phase", phase=Phase.TRAIN)
    return trace


def test_a_long_run_keeps_the_spans_of_its_last_steps_and_says_since_when(monkeypatch):
    monkeypatch.setattr("colo.phases.trace.MAX_SPANS", 100)
    assert long_run(33).since_s == 0
    trace = long_run(1000)
    assert 50 <= len(trace.spans) <= 100 and trace.spans[-1].end_s == 999.75
    first = trace.spans[0]
    assert (first.name, first.start_s) == ("rollout", 1000 - len(trace.spans) / 3), "whole steps, none of them missing"
    assert trace.since_s == first.start_s - 0.25
    title = f"Phases of {len(trace.spans) // 3} training steps since {trace.since_s:.2f} s"
    assert sheets(trace)[0].title.startswith(title)


def test_without_a_training_phase_spans_are_bounded_too(monkeypatch):
    monkeypatch.setattr("colo.phases.trace.MAX_SPANS", 10)
    trace = Trace()
    for second in range(100):
        trace.add("rollout", second, end_s=second + 1, category="phase", phase=Phase.ROLLOUT)
    assert len(trace.spans) <= 10 and trace.since_s == trace.spans[0].start_s


def test_moments_at_which_segments_hold_the_same_share_their_figures():
    trace = long_run(50)
    assert len({id(s.segments) for s in trace.samples}) == 2
    assert [s.total_bytes for s in trace.samples[:2]] == [4, 0]
