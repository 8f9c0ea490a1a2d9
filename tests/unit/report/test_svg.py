from colo.report import svg
from colo.report.axes import Axis
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
    frame = Frame(x=Axis(low=2, high=4), y=Axis(high=10), width=100, height=50, left=10, right=5, top=4, bottom=6)
    assert (frame.column(2), frame.column(4), frame.row(0), frame.row(10)) == (10, 95, 44, 4)
    assert Frame(x=Axis(high=0), y=Axis(high=0), width=100, height=50).column(0) == 64
