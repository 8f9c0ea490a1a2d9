"""Recorded copies: what the tables say, whatever the strides, and what torch does without a kernel that works."""

import ctypes
import queue
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.memory import copy_plan
from colo.memory.copy_plan import CopyPlan, CopyRows, Strided, copy_all, cut, digest_of, in_words, runs, sum_of

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]


def differ(source, target):
    return CopyPlan([(source, target)]).flags().tolist() == [True]


@st.composite
def views(draw, dtypes=tuple(DTYPES)):
    """A box of random bits in some memory and one of the same shape in another, with strides of their own."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    pair = []
    for _ in range(2):
        larger = [size + draw(st.integers(0, 3)) for size in shape]
        order = draw(st.permutations(range(len(shape))))
        offset = draw(st.integers(0, 9))
        count = offset + torch.Size(larger).numel()
        memory = torch.randint(0, 256, (max(1, count) * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        whole = memory[offset:count].view([larger[dim] for dim in order])
        whole = whole.permute([order.index(dim) for dim in range(len(shape))])
        pair.append(whole[tuple(slice(size) for size in shape)])
    return tuple(pair)


def interpreted(table):
    """Do what the kernel does with tiles that are not cast, byte by byte; returns digests by number."""
    sums = {}
    for tile in table.tolist():
        source, target, source_step, target_step, row_words, words, kind, place, place_step, number, _ = tile
        assert (source | target) % kind == 0 and words % row_words == 0 and 0 < words <= max(copy_plan.WORDS, row_words)
        for word in range(words):
            row, column = divmod(word, row_words)
            data = ctypes.string_at(source + (row * source_step + column) * kind, kind)
            ctypes.memmove(target + (row * target_step + column) * kind, data, kind)
            at = place + row * place_step + column * kind
            assert kind < 4 or at % 4 == 0
            padded = (b"\0" * (at % 4) + data).ljust(-(-(at % 4 + kind) // 4) * 4, b"\0")
            value = int(sum_of(torch.frombuffer(bytearray(padded), dtype=torch.int32), at // 4))
            sums[number] = (sums.get(number, 0) + value) % 2**64
    return sums


@given(st.lists(views(), min_size=1, max_size=3), st.sampled_from([8, 16, 2048]))
def test_tiles_are_the_copy_whatever_the_strides_and_sum_up_to_the_digest(pairs, words):
    of = [run for n, pair in enumerate(pairs) for run in runs(*map(Strided.of, pair), n)]
    sums = interpreted(cut(of, words))
    for number, (source, target) in enumerate(pairs):
        assert torch.equal(copy_plan.bits_of(source), copy_plan.bits_of(target))
        assert sums.get(number, 0) == int(digest_of(source)) % 2**64 == int(digest_of(target)) % 2**64


def test_what_is_contiguous_on_both_sides_is_one_run_and_long_misaligned_rows_are_peeled():
    memory = torch.zeros(1 << 12, dtype=torch.bfloat16)
    base = memory.data_ptr()
    source, target = memory[:1024].view(16, 64), memory[2048:3072].view(16, 64)
    (whole,) = runs(Strided.of(source), Strided.of(target))
    assert whole == CopyRows(base, base + 4096, 1, 2048, number=0) and whole.kind == 16
    (rows,) = runs(Strided.of(source[:, :32]), Strided.of(target[:, 32:]))
    assert (rows.rows, rows.row_bytes, rows.source_step, rows.position_step) == (16, 64, 128, 64)
    head, body, tail = runs(Strided.of(memory[1:1001]), Strided.of(memory[2049:3049]))
    assert [part.row_bytes for part in (head, body, tail)] == [14, 1984, 2]
    assert (body.source, body.position) == (base + 16, 14)


@pytest.mark.parametrize("lengths", [[1], [2047, 2048, 2049], [100_000], [3, 70_000, 1]])
def test_tiles_of_long_rows_are_alike_in_length(lengths):
    rows = [CopyRows(16 * start, 16 * start, 1, 16 * length) for start, length in zip(range(99), lengths, strict=False)]
    table = cut(rows)
    assert int(table[:, 5].sum()) == sum(lengths)
    assert int(table[:, 5].max()) <= 2048


def test_a_cast_goes_by_elements_four_at_a_time_where_they_are_aligned():
    numbers, halves = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    (wide,) = runs(Strided.of(numbers), Strided.of(halves))
    (narrow,) = runs(Strided.of(numbers[1:]), Strided.of(halves[1:]))
    (back,) = runs(Strided.of(halves), Strided.of(numbers))
    assert (wide.kind, narrow.kind, back.kind) == (33, 32, 34)
    assert cut([wide, narrow, back])[:, 5].tolist() == [16, 63, 64]


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    offset=st.integers(0, 9),
    transposed=st.booleans(),
    data=st.data(),
)
def test_every_bit_that_differs_is_noticed(dtype, rows, columns, offset, transposed, data):
    memory = torch.randint(0, 256, ((offset + rows * columns) * dtype.itemsize,), dtype=torch.uint8)
    left, right = (m.view(dtype)[offset:].view(rows, columns) for m in (memory, memory.clone()))
    left, right = (left.T, right.T) if transposed else (left, right)
    assert not differ(left, right)
    place, bit = data.draw(st.integers(0, rows * columns - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    row, column = divmod(place, right.shape[1])
    changed = right[row, column].clone().view(1).view(torch.uint8)
    changed[bit // 8] ^= 1 << (bit % 8)
    right[row, column] = changed.view(dtype)[0]
    with pytest.MonkeyPatch.context() as patch:
        for at_once in (1, 7, 1 << 24):
            patch.setattr(copy_plan, "_COMPARED_AT_ONCE", at_once)
            assert differ(left, right)
    assert int(digest_of(left)) != int(digest_of(right))


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
        patch.setattr(copy_plan, "_LARGE_BYTES", 80)
        copy_all(targets, sources)
    assert all(torch.equal(t.float(), s) for t, s in zip(targets, sources, strict=True))


def test_a_plan_without_kernels_copies_digests_and_compares_by_torch_and_keeps_payloads_of_nan():
    bits = torch.tensor([0x7F81, -0x7F, 0x7FC0, 1, 0x3F80], dtype=torch.int16)
    sources = [bits.view(torch.bfloat16), torch.randn(4, 3), torch.tensor(2.5)]
    targets = [torch.zeros_like(sources[0]), torch.zeros(3, 4, dtype=torch.bfloat16).T, torch.tensor(0.0)]
    plan = CopyPlan(list(zip(sources, targets, strict=True))[:1], list(zip(sources, targets, strict=True))[1:])
    assert plan.flags().tolist() == [True] * 3 and plan.num_bytes == 10 + 24 + 4 and plan.holds_tensors
    sums = plan.replay_digested()
    assert torch.equal(targets[0].view(torch.int16), bits)
    assert torch.equal(targets[1], sources[1].bfloat16()) and targets[2] == 2.5
    assert not plan.flags().any()
    assert sums.tolist() == plan.digests().tolist() == CopyPlan([(t, t) for t in targets]).digests().tolist()


def test_tensors_that_are_only_read_are_digested_after_the_copies():
    source, target, other = torch.arange(6.0), torch.zeros(6), torch.arange(5, dtype=torch.bfloat16)
    plan = CopyPlan([(source, target)], read=[other])
    sums = plan.replay_digested()
    assert torch.equal(source, target) and plan.num_bytes == 24
    assert sums.tolist() == [int(digest_of(source)), int(digest_of(other))]
    assert [rows.is_written for rows in runs(Strided.of(other), Strided.of(other), is_written=False)] == [0]
    assert cut([*runs(Strided.of(source), Strided.of(target))])[:, 10].tolist() == [1]


def test_a_plan_of_nothing_has_nothing_to_tell():
    plan = CopyPlan([])
    plan.replay()
    assert (plan.flags().dtype, plan.flags().tolist(), plan.digests().tolist()) == (torch.bool, [], [])


def test_pairs_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"cannot copy \(2,\) to \(3,\)"):
        CopyPlan([(torch.zeros(2), torch.zeros(3))])


def test_words_are_whole_and_in_a_row():
    base = torch.arange(12, dtype=torch.bfloat16)
    assert torch.equal(in_words(base).view(torch.bfloat16), base)
    assert in_words(base[2:8]).data_ptr() == base[2:].data_ptr()
    for other in (base[:3], base[1:5], base[::2], base.view(3, 4).T):
        assert in_words(other) is None


def test_a_cpu_has_no_kernels(recwarn):
    assert copy_plan.kernels.__wrapped__(torch.device("cpu")) is None
    assert not recwarn.list


@pytest.fixture
def trial(monkeypatch):
    """Stands in for `try_out` on a GPU that is not here: gives out, or raises, what is put in; keeps the devices."""
    pytest.importorskip("triton", reason="Triton is missing, which torch for CUDA brings along")
    results, devices = queue.SimpleQueue(), []

    def try_out(device):
        devices.append(device)
        if isinstance(result := results.get(timeout=60), Exception):
            raise result

    monkeypatch.setattr(copy_plan, "try_out", try_out)
    copy_plan._tried.cache_clear()
    yield SimpleNamespace(put=results.put, devices=devices)
    copy_plan._tried.cache_clear()


GPU = torch.device("cuda", 0)


def test_kernels_that_do_not_work_are_warned_of(trial):
    trial.put(RuntimeError("no compiler"))
    with pytest.warns(RuntimeWarning, match="without Triton, which is slower: no compiler"):
        assert copy_plan.kernels.__wrapped__(GPU) is None
    assert copy_plan._tried(GPU).result().__traceback__ is None, "whose frames would stay for as long as the error"


def test_memory_that_is_missing_now_is_not_taken_for_kernels_that_do_not_work(trial):
    from colo.memory import kernels

    for _ in "12":  # in a thread, and at once again by who needs them
        trial.put(torch.OutOfMemoryError("not now"))
    with pytest.raises(torch.OutOfMemoryError):
        copy_plan.kernels.__wrapped__(GPU)
    trial.put(None)
    assert copy_plan.kernels.__wrapped__(GPU) is kernels


def test_kernels_compile_once_beside_what_their_caller_does_and_are_waited_for(trial):
    from colo.memory import kernels

    copy_plan.compile_ahead(GPU)  # returns while nothing has been compiled
    copy_plan.compile_ahead(GPU)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(copy_plan.kernels.__wrapped__, GPU)
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.1)
        trial.put(None)
        assert asked.result(timeout=60) is kernels
    assert trial.devices == [GPU]


def test_memory_that_was_missing_as_kernels_compiled_ahead_may_be_there_when_they_are_needed(trial):
    from colo.memory import kernels

    trial.put(torch.OutOfMemoryError("while another tenant was here"))
    copy_plan.compile_ahead(GPU)
    trial.put(None)
    assert copy_plan.kernels.__wrapped__(GPU) is kernels
    assert trial.devices == [GPU, GPU]


def test_nothing_is_compiled_ahead_for_a_cpu(trial):
    copy_plan.compile_ahead(torch.device("cpu"))
    assert not trial.devices
