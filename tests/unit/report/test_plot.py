import math
import re
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import Unsupported
from colo.phases.phase import Phase
from colo.phases.trace import MemorySample, Trace
from colo.report import svg
from colo.report.plot import PART_COLOURS, decimate, segment_colours, time_range, write_html, write_png
from colo.report.svg import Frame, Markup
from colo.report.table import EMPTY, PARTS
from colo.units import GIB, MIB

VOID = {"meta"}
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)


class Page(HTMLParser):
    """A strict reading of a page: its text, its elements with attributes, and that every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.elements)

    @property
    def text(self):
        return " ".join(self.words)


def sample(time_s, phase, segments, used=None):
    return MemorySample(time_s=time_s, phase=phase, segments=segments, device_used_bytes=used)


def run(num_steps: int = 4, samples_per_phase: int = 3) -> Trace:
    """Training steps of ten seconds on a device of 40 GiB."""
    trace = Trace(capacity_bytes=40 * GIB)
    for i in range(num_steps):
        t = 10.0 * i
        trace.add("offload trainer.optimizer", t, end_s=t + 1, category="step", phase=Phase.ROLLOUT, resource="d2h")
        trace.add("rollout", t + 1, end_s=t + 6, category="phase", phase=Phase.ROLLOUT, resource="engine")
        trace.add("generate", t + 1, end_s=t + 6, phase=Phase.ROLLOUT, resource="engine")
        trace.add("train", t + 7, end_s=t + 10, category="phase", phase=Phase.TRAIN, resource="device")
        for j in range(samples_per_phase):
            held = {"engine.weights": 8 * GIB, "engine.kv_cache": 16 * GIB, "trainer.optimizer": 0}
            trace.samples.append(sample(t + 1 + 5 * j / samples_per_phase, Phase.ROLLOUT, held, 25 * GIB))
        for j in range(samples_per_phase):
            held = {"engine.weights": 8 * GIB, "engine.kv_cache": 0, "trainer.optimizer": 20 * GIB + j}
            trace.samples.append(sample(t + 7 + 3 * j / samples_per_phase, Phase.TRAIN, held, 30 * GIB))
        trace.metric("reward", i / num_steps)
    return trace


def html(trace, tmp_path, **options):
    path = tmp_path / "run.html"
    write_html(trace, path, **options)
    return path.read_text(encoding="utf-8")


def test_page_shows_every_picture_and_table(tmp_path):
    text = html(run(), tmp_path, title="Eight", subtitle="a run", facts={"model": "Qwen3-8B"})
    page = Page(text)
    for words in (
        *("Eight", "a run", "model", "Qwen3-8B", "Device memory", "Step time", "Reward", "Training step 2 in detail"),
        *("Phases of 4 training steps", "Where the seconds", "Memory of 40.00 GiB", "capacity 40.00 GiB"),
        *("engine.kv_cache", "peak 16.00 GiB", "offload trainer.optimizer", "device to host"),
    ):
        assert words in page.text
    assert (page.count("svg"), page.count("table")) == (4, 4)


def test_segments_that_never_held_anything_are_left_out(tmp_path):
    trace = run()
    trace.samples.append(sample(9.5, Phase.TRAIN, {"trainer.master_weights": 0}))
    assert "trainer.master_weights" not in Page(html(trace, tmp_path)).text


def test_a_phase_keeps_its_resource_busy(tmp_path):
    words = Page(html(run(), tmp_path)).words
    assert {"engine", "device", "device to host"} <= set(words)
    assert "host" not in words


def test_page_needs_nothing_but_itself(tmp_path):
    page = Page(html(run(), tmp_path))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "use", "image", "foreignobject"}
    assert not any(name in attrs for _, attrs in page.elements for name in ("href", "src", "xlink:href", "onclick"))
    assert not re.search(r"https?:|@import|url\(", html(run(), tmp_path))


def test_page_has_dark_and_printed_looks(tmp_path):
    text = html(run(), tmp_path)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_numbers_in_drawings_are_numbers(tmp_path):
    for tag, attrs in Page(html(run(), tmp_path)).elements:
        for name in ("x", "y", "x1", "x2", "y1", "y2", "width", "height", "cx", "cy"):
            if tag != "meta" and name in attrs:
                assert math.isfinite(float(attrs[name]))
        if tag == "rect":
            assert float(attrs["width"]) > 0
            assert float(attrs["height"]) >= 0
        if tag == "path":
            assert re.fullmatch(r"M-?[\d.]+ -?[\d.]+(L-?[\d.]+ -?[\d.]+)*Z?", attrs["d"])


@settings(max_examples=25, deadline=None)
@given(WORDS, WORDS, WORDS)
def test_any_text_is_escaped(tmp_path_factory, name, title, fact):
    evil = '<script>alert("1")</script>&amp;\'' + name
    trace = run(2)
    trace.add(evil, 1.0, end_s=5.0, category="step", phase=Phase.TRAIN, resource=evil)
    trace.samples.append(sample(9.0, Phase.TRAIN, {evil: GIB}))
    trace.metric(evil, 1.0)
    page = Page(html(trace, tmp_path_factory.mktemp("page"), title=evil + title, facts={evil: fact}))
    assert page.count("script") == 0
    assert '<script>alert("1")</script>&amp;\'' in page.text
    assert not any(set(attrs) & {"onload", "onclick"} for _, attrs in page.elements)


def test_empty_trace_gives_a_page_that_says_so(tmp_path):
    page = Page(html(Trace(), tmp_path))
    assert EMPTY in page.text
    assert page.count("svg") == 0


def only_samples():
    trace = Trace()
    trace.samples.append(sample(1.0, Phase.IDLE, {"a": MIB}))
    return trace


def only_spans():
    trace = Trace()
    trace.add("load", 0.0, end_s=1.0, resource="host")
    return trace


def only_phases():
    trace = Trace()
    trace.add("rollout", 2.0, end_s=2.0, category="phase", phase=Phase.ROLLOUT)
    return trace


def only_rewards():
    trace = Trace()
    trace.metric("reward", 0.0)
    return trace


def only_unusable_rewards():
    trace = Trace()
    trace.metric("reward", math.nan)
    return trace


def nothing_held():
    trace = run(2)
    trace.samples = [sample(0.0, Phase.IDLE, {}), sample(1.0, Phase.IDLE, {"a": 0})]
    return trace


@pytest.mark.parametrize(
    "make", [Trace, only_samples, only_spans, only_phases, only_rewards, only_unusable_rewards, nothing_held, run]
)
def test_partial_traces_are_drawn(tmp_path, make):
    page = Page(html(make(), tmp_path))
    assert "nan" not in " ".join(str(value) for _, attrs in page.elements for value in attrs.values())
    write_png(make(), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def memory_top(page, frame_height=390 - 26 - 26):
    """The highest point of the memory areas, as a fraction of the axis."""
    areas = [attrs["d"] for tag, attrs in page.elements if tag == "path" and attrs.get("class") == "cut"]
    highest = min(float(y) for d in areas for y in re.findall(r"[ML]-?[\d.]+ (-?[\d.]+)", d))
    return (390 - 26 - highest) / frame_height


@pytest.mark.parametrize("samples_per_phase", [3, 2000])
def test_a_peak_of_one_sample_is_drawn(tmp_path, samples_per_phase):
    trace = run(4, samples_per_phase)
    trace.samples.insert(len(trace.samples) // 2, sample(18.123, Phase.TRAIN, {"engine.weights": 36 * GIB}))
    text = html(trace, tmp_path)
    assert memory_top(Page(text)) == pytest.approx(36 / (40 * 1.05), abs=0.001)
    assert len(text) < 1_500_000


def test_long_runs_are_drawn_around_their_peak_and_summed_up(tmp_path):
    trace = run(400)
    trace.samples.append(sample(2508.0, Phase.TRAIN, {"engine.weights": 39 * GIB}))
    text = html(trace, tmp_path)
    page = Page(text)
    assert "Shown are training steps 241 to 260 of 400" in page.text
    assert "Peak of each training step" in page.text
    assert "The slowest of every 3 training steps." in page.text
    assert memory_top(page) == pytest.approx(39 / (40 * 1.05), abs=0.001)
    assert len(text) < 400_000


def test_slowest_step_of_a_group_is_the_one_shown(tmp_path):
    trace = run(400)
    trace.add("train", 4000.0, end_s=4060.0, category="phase", phase=Phase.TRAIN)
    assert "step 400, train: 63.00 s of 70.00 s" in Page(html(trace, tmp_path)).text


def test_capacity_far_above_is_told_and_not_drawn(tmp_path):
    trace = run()
    trace.capacity_bytes = 4000 * GIB
    page = Page(html(trace, tmp_path))
    assert "The capacity, 3.91 TiB, lies far above this picture." in page.text
    assert not any(attrs.get("class") == "limit" for _, attrs in page.elements)


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


def test_png_of_a_long_run_is_drawn(tmp_path):
    write_png(run(400), tmp_path / "run.png", title="long", dpi=50)
    width = int.from_bytes((tmp_path / "run.png").read_bytes()[16:20], "big")
    assert width == 500


def test_png_leaves_pyplot_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    write_png(run(), tmp_path / "run.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"pip install 'colo\[plot\]'"):
        write_png(run(), tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []


def test_element_escapes_text_and_attributes_but_not_markup():
    inner = svg.element("b", "<x>")
    assert svg.element("p", "a<b", inner, class_='"q"', data_x=1.0) == (
        '<p class="&quot;q&quot;" data-x="1">a&lt;b<b>&lt;x&gt;</b></p>'
    )
    assert type(svg.markup("a", inner)) is Markup


def test_numbers_are_short():
    assert [svg.number(v) for v in (1.0, 0.5, 1 / 3, 100, 12.345)] == ["1", "0.5", "0.33", "100", "12.35"]


def test_staircase_holds_each_value_until_the_next():
    assert svg.staircase([(0, 5), (1, 5), (2, 7)], 9) == [(0, 5), (2, 5), (2, 7), (9, 7)]
    assert svg.staircase([], 9) == []


@settings(max_examples=300)
@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e12), st.integers(2, 10))
def test_ticks_are_round_inside_and_about_as_many_as_asked(low, length, count):
    values = svg.ticks(low, low + length, count)
    slack = 1e-6 * length
    assert all(low - slack <= value <= low + length + slack for value in values)
    assert values == sorted(values)
    assert len(values) <= 2.5 * count + 2


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 146, [0, 20, 40, 60, 80, 100, 120, 140]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1, 12, [2, 4, 6, 8, 10, 12])],
)
def test_ticks(low, high, expected):
    assert svg.ticks(low, high) == pytest.approx(expected)


def test_ticks_of_nothing():
    assert svg.ticks(3.0, 3.0) == [3.0]
    assert svg.count_ticks(1) == [(0.5, "1")]
    assert [label for _, label in svg.count_ticks(3)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("high", "units", "last"),
    [
        (80 * GIB, svg.BYTE_UNITS, (80 * GIB, "80 GiB")),
        (300 * MIB, svg.BYTE_UNITS, (300 * MIB, "300 MiB")),
        (100.0, svg.TIME_UNITS, (100.0, "100 s")),
        (0.05, svg.TIME_UNITS, (pytest.approx(0.05), "50 ms")),
        (1200.0, svg.TIME_UNITS, (1200.0, "20 min")),
        (36000.0, svg.TIME_UNITS, (36000.0, "10 h")),
        (2.0, svg.PLAIN_UNITS, (2.0, "2")),
        (0, svg.TIME_UNITS, (0, "0")),
    ],
)
def test_unit_ticks_choose_the_unit(high, units, last):
    assert svg.unit_ticks(0, high, units)[-1] == last


def test_frame_maps_corners_to_corners():
    frame = Frame(width=100, height=50, x_min=2, x_max=4, y_max=10, left=10, right=5, top=4, bottom=6)
    assert (frame.x(2), frame.x(4), frame.y(0), frame.y(10)) == (10, 95, 44, 4)
    assert Frame(width=100, height=50, x_max=0, y_max=0).x(0) == 64


def test_series_that_are_thinned_keep_their_extremes():
    values = [0.0] * 5000
    values[1234], values[4321], values[7] = 9.0, -9.0, math.nan
    shown = svg.extremes(values)
    assert {0, 1234, 4321, 4999} <= set(shown)
    assert 7 not in shown
    assert len(shown) < 1000


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(-50, 150), st.floats(0, 60)), max_size=300))
def test_short_bars_are_thinned_and_long_ones_all_drawn(spans):
    frame = Frame(width=172, height=50, x_max=100, y_max=1)  # one pixel a unit
    stretches = [(start, start + length) for start, length in spans]
    bars = list(svg.visible(frame, stretches, least=2))
    assert all(width >= 2 and frame.left <= left <= frame.end for _, left, width in bars)
    shown = {index for index, _, _ in bars}
    for index, (start, end) in enumerate(stretches):
        inside = min(end, 100) - max(start, 0)
        if start < 100 and end > 0 and inside > 2.001:
            assert index in shown
        if end <= 0 or start >= 100:
            assert index not in shown


def test_any_number_of_short_bars_is_drawn_as_few():
    frame = Frame(width=172, height=50, x_max=100, y_max=1)  # one pixel a unit
    stretches = [(i / 100, i / 100 + 0.001) for i in range(10_000)]
    bars = list(svg.visible(frame, stretches, least=2))
    assert len(bars) == 50
    assert bars[0] == (0, 64, 2)
