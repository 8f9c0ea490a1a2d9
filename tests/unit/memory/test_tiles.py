"""Tables of tiles, and the kernels that read them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.memory import tiles, triton_kernels

CPU = torch.device("cpu")


@given(
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=6),
    width=st.integers(1, 17),
)
def test_tiles_are_the_ranges_cut_at_the_multiples_of_the_width(ranges, width):
    starts, lengths = [start for start, _ in ranges], [length for _, length in ranges]
    cuts = list(zip(*(column.tolist() for column in tiles.cut(starts, lengths, width)), strict=True))
    covered = [(index, offset + i) for index, offset, length in cuts for i in range(length)]
    assert covered == [(index, i) for index, length in enumerate(lengths) for i in range(length)]
    for index, offset, length in cuts:
        assert length > 0 or lengths[index] == length == 0
        start = starts[index] + offset
        assert start // width == (start + max(length, 1) - 1) // width


def test_a_column_grows_by_its_step(monkeypatch):
    monkeypatch.setattr(tiles, "WORDS", 4)
    table = tiles.table([0, 2], [5, 3], ([100, 200], 4), ([7, 8], 0), device=CPU)
    assert table.tolist() == [[100, 7, 4], [116, 7, 1], [200, 8, 2], [208, 8, 1]]


def test_words_are_whole_and_in_a_row():
    base = torch.arange(12, dtype=torch.bfloat16)
    assert torch.equal(tiles.in_words(base).view(torch.bfloat16), base)
    assert tiles.in_words(base[2:8]).data_ptr() == base[2:].data_ptr()
    for other in (base[:3], base[1:5], base[::2], base.view(3, 4).T):
        assert tiles.in_words(other) is None


def test_a_cpu_has_no_kernels(recwarn):
    assert triton_kernels.kernels.__wrapped__(CPU) is None
    assert not recwarn.list


def test_kernels_that_do_not_work_are_warned_of_and_memory_that_is_missing_now_is_not_taken_for_that(monkeypatch):
    pytest.importorskip("triton", reason="Triton is missing, which torch for CUDA brings along")
    from colo.memory import kernels

    def fail(error):
        def try_out(device):
            raise error

        monkeypatch.setattr(kernels, "try_out", try_out)

    gpu = torch.device("cuda", 0)
    fail(RuntimeError("no compiler"))
    with pytest.warns(RuntimeWarning, match="without Triton, which is slower: no compiler"):
        assert triton_kernels.kernels.__wrapped__(gpu) is None
    fail(torch.OutOfMemoryError("not now"))
    with pytest.raises(torch.OutOfMemoryError):
        triton_kernels.kernels.__wrapped__(gpu)
    monkeypatch.setattr(kernels, "try_out", lambda device: None)
    assert triton_kernels.kernels.__wrapped__(gpu) is kernels
