from hypothesis import given, settings
from hypothesis import strategies as st

from colo.report import svg
from colo.report.svg import Frame, Markup


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


def test_frame_maps_corners_to_corners():
    frame = Frame(width=100, height=50, x_min=2, x_max=4, y_max=10, left=10, right=5, top=4, bottom=6)
    assert (frame.x(2), frame.x(4), frame.y(0), frame.y(10)) == (10, 95, 44, 4)
    assert Frame(width=100, height=50, x_max=0, y_max=0).x(0) == 64


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
