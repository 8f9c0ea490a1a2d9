import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import PARTIAL, run, sample

from colo.phases.phase import Phase
from colo.phases.trace import Span, Trace
from colo.report import html as page_of
from colo.report.charts import Axis
from colo.report.html import Frame, Markup, visible, write_html
from colo.report.table import EMPTY
from colo.units import GIB

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


def html(trace, tmp_path, **options):
    path = tmp_path / "run.html"
    write_html(trace, path, **options)
    return path.read_text(encoding="utf-8")


def test_page_shows_every_picture_and_table(tmp_path):
    text = html(run(), tmp_path, title="Eight", facts={"model": "Qwen3-8B"})
    page = Page(text)
    for words in (
        *("Eight", "model", "Qwen3-8B", "Device memory", "Step time", "Reward", "Training step 2 in detail"),
        *(
            "Phases of 4 training steps",
            "Where the seconds",
            "Memory of 40.00 GiB: peak 28.00 GiB, without taking turns 44.00 GiB",
            "capacity 40.00 GiB",
        ),
        *("engine.kv_cache", "peak 16.00 GiB", "offload trainer.optimizer", "device to host"),
    ):
        assert words in page.text
    assert (page.count("svg"), page.count("table")) == (6, 4)
    kinds = [attrs.get("class") for tag, attrs in page.elements if tag == "svg"]
    assert kinds == ["broad", "narrow", None, None, "broad", "narrow"]  # each is shown where it fits


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


@settings(max_examples=25)
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


@pytest.mark.parametrize("make", PARTIAL)
def test_partial_traces_are_drawn(tmp_path, make):
    page = Page(html(make(), tmp_path))
    assert "nan" not in " ".join(str(value) for _, attrs in page.elements for value in attrs.values())


def memory_top(page, frame_height=390 - 26 - 26):
    """The highest point of the memory areas, as a fraction of the axis."""
    areas = [attrs["d"] for tag, attrs in page.elements if tag == "path" and attrs.get("class") == "cut"]
    broad = areas[: len(areas) // 2]  # those of telephones come second
    highest = min(float(y) for d in broad for y in re.findall(r"[ML]-?[\d.]+ (-?[\d.]+)", d))
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
    trace.samples.pop()
    flat = Page(html(trace, tmp_path)).text
    assert "Peak of each training step" not in flat
    assert "Every one of 400 training steps peaks at 28.00 GiB." in flat
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


PIXEL_A_UNIT = Frame(x=Axis(high=100), y=Axis(high=1), width=178, height=50)


def spans_of(stretches):
    return [Span(name="", category="", phase=Phase.IDLE, start_s=s, duration_s=length) for s, length in stretches]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(-50, 150), st.floats(0, 60)), max_size=300))
def test_short_bars_are_thinned_and_long_ones_all_drawn(stretches):
    spans = spans_of(stretches)
    bars = list(visible(spans, PIXEL_A_UNIT, least=2))
    assert all(width >= 2 and PIXEL_A_UNIT.left <= left <= PIXEL_A_UNIT.end for _, left, width in bars)
    shown = {id(span) for span, _, _ in bars}
    for span in spans:
        inside = min(span.end_s, 100) - max(span.start_s, 0)
        if span.start_s < 100 and span.end_s > 0 and inside > 2.001:
            assert id(span) in shown
        if span.end_s <= 0 or span.start_s >= 100:
            assert id(span) not in shown


def test_any_number_of_short_bars_is_drawn_as_few():
    spans = spans_of([(i / 100, 0.001) for i in range(10_000)])
    bars = list(visible(spans, PIXEL_A_UNIT, least=2))
    assert len(bars) == 50
    assert bars[0] == (spans[0], 64, 2)


# ---- markup ----------------------------------------------------------------------------------------------------------


def test_element_escapes_text_and_attributes_but_not_markup():
    inner = page_of.element("b", "<x>")
    assert page_of.element("p", "a<b", inner, class_='"q"', data_x=1.0) == (
        '<p class="&quot;q&quot;" data-x="1">a&lt;b<b>&lt;x&gt;</b></p>'
    )
    assert type(page_of.markup("a", inner)) is Markup


def test_numbers_are_short():
    assert [page_of.number(v) for v in (1.0, 0.5, 1 / 3, 100, 12.345)] == ["1", "0.5", "0.33", "100", "12.35"]


def test_staircase_holds_each_value_until_the_next():
    assert page_of.staircase([(0, 5), (1, 5), (2, 7)], 9) == [(0, 5), (2, 5), (2, 7), (9, 7)]
    assert page_of.staircase([], 9) == []


def test_frame_maps_corners_to_corners():
    frame = Frame(x=Axis(low=2, high=4), y=Axis(high=10), width=100, height=50, left=10, right=5, top=4, bottom=6)
    assert (frame.column(2), frame.column(4), frame.row(0), frame.row(10)) == (10, 95, 44, 4)
    assert Frame(x=Axis(high=0), y=Axis(high=0), width=100, height=50).column(0) == 64


def test_labels_of_an_axis_are_as_many_as_there_is_room_for():
    ticks = [(float(i), f"{i} ms") for i in range(0, 500, 50)]
    for width, most in ((1000, 10), (400, 7), (150, 2)):
        frame = Frame(x=Axis(high=500, ticks=ticks), y=Axis(high=1), width=width, height=50)
        shown = Page(frame.axes()).words
        assert 1 <= len(shown) <= most
        assert sum(7 * len(word) for word in shown) < frame.end - frame.left
