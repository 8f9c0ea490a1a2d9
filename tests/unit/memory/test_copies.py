import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.memory import copies
from colo.memory.copies import Comparison, copy_all


def differ(source, target):
    return Comparison([source], [target]).flags().tolist() == [True]


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]


def tensors(dtype, rows, columns, offset, transposed):
    """Two of the same bits at `offset` elements in memories of their own."""
    count = rows * columns
    memory = torch.randint(0, 256, ((offset + count) * dtype.itemsize,), dtype=torch.uint8)
    views = [m.view(dtype)[offset:].view(rows, columns) for m in (memory, memory.clone())]
    return [view.T if transposed else view for view in views]


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    offset=st.integers(0, 9),
    transposed=st.booleans(),
    data=st.data(),
)
def test_every_bit_that_differs_is_noticed(dtype, rows, columns, offset, transposed, data):
    left, right = tensors(dtype, rows, columns, offset, transposed)
    assert not differ(left, right)
    place, bit = data.draw(st.integers(0, rows * columns - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    row, column = divmod(place, right.shape[1])
    changed = right[row, column].clone().view(1).view(torch.uint8)
    changed[bit // 8] ^= 1 << (bit % 8)
    right[row, column] = changed.view(dtype)[0]
    with pytest.MonkeyPatch.context() as patch:
        for at_once in (1, 7, 1 << 24):
            patch.setattr(copies, "_COMPARED_AT_ONCE", at_once)
            assert differ(left, right)


def test_it_compares_what_converting_leaves():
    source = torch.tensor([1.0, 1.0 + 2**-20, float("nan"), -0.0])
    target = source.bfloat16()
    assert not differ(source, target)
    target[3] = 0.0
    assert differ(source, target)
    assert not differ(torch.tensor(3.5), torch.tensor(3.5))
    wide = torch.randn(4, 6, dtype=torch.complex128)
    assert not differ(wide[:, ::2], wide[:, ::2].clone()) and differ(wide[:, ::2], -wide[:, ::2])
    assert not differ(torch.empty(0, 4), torch.empty(0, 4))


@given(st.lists(st.integers(0, 40), max_size=6))
def test_large_and_small_are_copied(sizes):
    sources = [torch.randn(size) for size in sizes]
    targets = [torch.zeros(size, dtype=torch.float64 if size % 3 == 0 else torch.float32) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_LARGE_BYTES", 80)
        copy_all(targets, sources)
    assert all(torch.equal(t.float(), s) for t, s in zip(targets, sources, strict=True))


def test_nothing_to_compare_is_no_flag():
    flags = Comparison([], []).flags()
    assert (flags.dtype, flags.tolist()) == (torch.bool, [])


def test_where_there_are_kernels_they_compare_words_and_torch_the_rest(monkeypatch):
    """Kernels that read addresses as those of a GPU do, and what they are told of each pair."""
    seen = []

    def table(starts, lengths, left, right, numbers, *, device):
        assert (left[1], right[1], numbers[1]) == (4, 4, 0) and device == torch.device("cpu")
        return list(zip(starts, lengths, left[0], right[0], numbers[0], strict=True))

    def compare(rows, flags):
        assert flags.dtype == torch.int32
        for start, length, left, right, number in rows:
            seen.append(number)
            assert start == 0
            flags[number] = ctypes.string_at(left, 4 * length) != ctypes.string_at(right, 4 * length)

    monkeypatch.setattr(copies.tiles, "table", table)
    monkeypatch.setattr(copies.triton_kernels, "kernels", lambda device: SimpleNamespace(compare=compare))
    sources = [torch.randn(6), torch.randn(3).bfloat16(), torch.randn(4), torch.randn(8), torch.randn(5).bfloat16()]
    targets = [source.clone() for source in sources]
    targets[2] = targets[2].bfloat16()
    comparison = Comparison(sources, targets)
    flags = comparison.flags()
    assert (flags.dtype, flags.tolist()) == (torch.bool, [False] * 5)
    for number in range(5):
        targets[number][-1] += 1
        assert comparison.flags().tolist() == [other == number for other in range(5)]
        targets[number][-1] = sources[number][-1]
    assert set(seen) == {0, 3}, "whole words of one dtype"
