import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colo.units import GIB, KIB, MIB, align_up, format_bytes, format_seconds, parse_bytes

SIZES = st.integers(0, 1 << 50)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * GIB),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        (" .5kib ", 512),
        ("512 b", 512),
        ("24G", 24 * GIB),
        ("24gi", 24 * GIB),
        ("1.5M", 3 * MIB // 2),
        ("1073741824", GIB),
        ("2TiB", 2048 * GIB),
        ("3tb", 3 * 10**12),
        (12345, 12345),
    ],
)
def test_sizes_are_read_as_people_write_them(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1GiB", "1e9", "1.2.3GB", "80 Gi B", "eighty"])
def test_what_is_not_a_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))) as caught:
        parse_bytes(text)
    assert "80GiB" in str(caught.value)


def test_an_integer_that_python_cannot_write_is_refused_by_its_digits():
    with pytest.raises(
        ValueError, match="^the size is a whole number of about 5000 digits: give one of 64 bits at most$"
    ):
        parse_bytes(10**5000)


@pytest.mark.parametrize("text", ["24", 24])
def test_a_number_that_lacks_its_unit_is_refused_where_a_size_has_a_least_value(text):
    with pytest.raises(ValueError, match="'24' is 24 B, less than 1.00 MiB: write 24GiB, or another unit"):
        parse_bytes(text, least_bytes=MIB)
    with pytest.raises(ValueError, match="^'24B' is 24 B, less than 1.00 MiB$"):
        parse_bytes("24B", least_bytes=MIB)
    assert parse_bytes(MIB, least_bytes=MIB) == MIB


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (-512, "-512 B"),
        (-3 * MIB, "-3.00 MiB"),
        (1.53 * GIB, "1.53 GiB"),
        (2048 * GIB, "2.00 TiB"),
        (10**400, "9.09e+387 TiB"),
    ],
)
def test_sizes_are_written_in_the_unit_that_keeps_them_readable(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(SIZES)
def test_a_written_size_reads_back_to_three_digits(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (2.5e-4, "250 us"), (0.0031, "3.1 ms"), (-0.5, "-500.0 ms"), (1, "1.00 s"), (75.25, "75.25 s")],
)
def test_durations(seconds, text):
    assert format_seconds(seconds) == text


@given(SIZES, st.integers(1, 1 << 30))
def test_alignment_is_the_smallest_multiple_that_holds_the_bytes(num_bytes, alignment):
    aligned = align_up(num_bytes, alignment)
    assert aligned % alignment == 0
    assert num_bytes <= aligned < num_bytes + alignment
