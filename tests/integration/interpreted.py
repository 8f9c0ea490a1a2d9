"""The kernels in Triton's interpreter, on a CPU, beside torch; run by `test_kernels.py` with TRITON_INTERPRET=1."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from colo.memory import copy_plan, kernels
from colo.memory.copy_plan import CASTS, CopyPlan
from colo.trainer import remainders
from colo.trainer.master_weights import MasterWeights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def by_kernels():
    """Small tiles and blocks, so that a few words are several of them, and the kernels in use, or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_plan, "WORDS", 16)
        patch.setattr(kernels, "_WORDS_AT_ONCE", 8)
        patch.setattr(copy_plan, "_PEELED_BYTES", 40)

        def using(module):
            patch.setattr(copy_plan, "kernels", lambda device: module)

        yield [lambda: using(kernels), lambda: using(None)]


@pytest.mark.parametrize("doing", ["copy", "digest", "copy and digest", "compare"])
@pytest.mark.parametrize("broken", ["nothing", "everything"])
def test_a_kernel_that_walks_wrongly_is_not_used(monkeypatch, doing, broken):
    assert copy_plan.try_out(CPU, at_once=1) is None  # the interpreter runs one kernel at a time
    walk = kernels.walk

    def walk_wrongly(table, found, what):
        if what != doing:
            walk(table, found, what)
        elif broken == "everything":
            found.fill_(1)

    monkeypatch.setattr(kernels, "walk", walk_wrongly)
    with pytest.raises(RuntimeError, match="Triton's kernels are wrong"):
        copy_plan.try_out(CPU, at_once=1)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
def test_every_kind_of_copy_is_tried_whatever_the_default_dtype(monkeypatch, default):
    walk, kinds = kernels.walk, set()

    def noted(table, found, what):
        kinds.update(table[:, 6].tolist())
        walk(table, found, what)

    monkeypatch.setattr(kernels, "walk", noted)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)  # as vLLM does where it loads a model
        copy_plan.try_out(CPU, at_once=1)
    finally:
        torch.set_default_dtype(before)
    assert kinds >= {1, 2, 4, 8, 16, 32, 33, *(32 + 2 * number for number in range(1, len(CASTS)))}, kinds


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("split_masters", lambda masters: (masters.to(torch.int16), masters.to(torch.int16))),
        ("open_masters", lambda weights, remainders, digests, numbers, masters: masters.zero_()),
        ("round_stochastically", lambda values, rounded, seed: rounded.copy_(values >> 16)),
        ("close_masters", lambda masters, weights, remainders, digests, numbers, changed: changed.add_(1)),
    ],
)
def test_a_kernel_of_masters_that_is_wrong_is_not_used(monkeypatch, name, broken):
    monkeypatch.setattr(kernels, name, broken)
    with pytest.raises(RuntimeError, match="Triton's kernels are wrong"):
        copy_plan.try_out(CPU, at_once=1)


@st.composite
def pairs_of_views(draw):
    """A source and a target of one shape, each with strides of its own, of one dtype or of two that cast."""
    same = [(d, d) for d in (torch.bfloat16, torch.float32, torch.uint8, torch.int64)]
    dtypes = draw(st.sampled_from([*same, *CASTS, (torch.float32, torch.bfloat16), (torch.float64, torch.bfloat16)]))
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(1, 40))
    made = []
    for dtype in dtypes:
        size = (rows + 1) * (columns + 8) + 8
        bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
        numbers = torch.randn(size).to(dtype) if dtypes[0] != dtypes[1] else bits.view(dtype)
        offset, step = draw(st.integers(0, 8)), columns + draw(st.integers(0, 8))
        is_transposed = draw(st.booleans())
        strides = (1, rows) if is_transposed and rows else (step, 1)
        made.append(numbers.as_strided((rows, columns), strides, offset))
    return tuple(made)


@settings(max_examples=12)  # the interpreter takes a second for each
@given(pairs=st.lists(pairs_of_views(), min_size=1, max_size=4))
def test_the_kernel_copies_digests_and_compares_as_torch_does(by_kernels, pairs):
    found = []
    for use in by_kernels:
        use()
        for _, target in pairs:
            copy_plan.bits_of(target).zero_()
        plan = CopyPlan(pairs[:2], pairs[2:], device=CPU)
        before = plan.flags().tolist()
        sums, again = plan.replay_digested(), plan.digests()
        assert torch.equal(sums, again) and not plan.flags().any()
        found.append((before, sums.tolist(), [copy_plan.bits_of(target).tolist() for _, target in pairs]))
        assert CopyPlan([(target, target) for _, target in pairs]).digests().tolist() == sums.tolist()
        untouched = CopyPlan(pairs[:1], read=[target for _, target in pairs[1:]], device=CPU)
        untouched.replay()
        assert untouched.replay_digested().tolist() == sums.tolist()
        number = next((n for n, (_, target) in enumerate(pairs) if target.numel()), None)
        if number is not None:
            copy_plan.bits_of(pairs[number][1])[-1, -1] ^= 1
            assert [n for n, is_other in enumerate(plan.flags().tolist()) if is_other] == [number]
            plan.replay()
            assert not plan.flags().any()
    assert found[0] == found[1]


def test_a_cast_rounds_as_torch_does_around_the_middle_of_two_bf16(by_kernels):
    upper = torch.arange(0, 1 << 16, 37).to(torch.int32)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    every = (upper | lower).view(torch.float32).flatten()
    for dtype, numbers in ((torch.bfloat16, every), (torch.float16, every[every.abs() < 65_000])):
        found = torch.zeros(len(numbers), dtype=dtype)
        by_kernels[0]()
        CopyPlan([(numbers, found)]).replay()
        expected = numbers.to(dtype)
        is_nan = expected.isnan()
        assert torch.equal(found.isnan(), is_nan)
        assert torch.equal(found[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


@settings(max_examples=10)
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), repeats=st.sampled_from([1, 700]))
def test_the_kernel_splits_masters_as_torch_does(bits, repeats):
    masters = torch.tensor(bits * repeats, dtype=torch.int32).view(torch.float32)
    weight, remainder = remainders.split(masters)
    by_kernel = kernels.split_masters(masters.view(torch.int32))
    assert torch.equal(by_kernel[0], weight.view(torch.int16)) and torch.equal(by_kernel[1], remainder)


@settings(max_examples=10)
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), repeats=st.sampled_from([1, 700]))
def test_the_kernel_rounds_to_neighbours_and_keeps_what_bf16_has(bits, repeats):
    values = torch.tensor(bits * repeats, dtype=torch.int32)
    is_nan, rounded = values.view(torch.float32).isnan(), torch.zeros(len(values), dtype=torch.int16)
    kernels.round_stochastically(values, rounded, seed=2**50 + 3)
    assert torch.equal(rounded.view(torch.bfloat16).isnan(), is_nan)
    steps = (rounded.to(torch.int32) - (values >> 16))[~is_nan]
    assert torch.all((steps == 0) | ((steps == 1) & ((values & 0xFFFF) > 0)[~is_nan]))


def test_the_kernel_keeps_finite_numbers_finite():
    values = torch.tensor([0x7F7F0001, 0x7F7FFFFF, -0x0080FFFF, -0x00800001, 0x7F800000, -0x00800000] * 700).int()
    rounded = torch.zeros(len(values), dtype=torch.int16)
    kernels.round_stochastically(values, rounded, seed=1)
    assert rounded.tolist() == [0x7F7F, 0x7F7F, -0x81, -0x81, 0x7F80, -0x80] * 700


def trained():
    """Weights and the whole state of an optimizer with masters, after steps between which somebody has written."""
    torch.manual_seed(0)
    shapes = (3, 700), (1024,), (2, 2049), (), (0,)
    parameters = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    parameters += [nn.Parameter(torch.randn(6, 300).bfloat16().t())]  # not contiguous
    optimizer = MasterWeights(lambda params: torch.optim.AdamW(params, lr=1e-4))(parameters)
    found = []
    for step in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).bfloat16()
        if step == 2:
            parameters[0].data[0, 5], parameters[-1].data[3, 2] = 3.0, 7.0
        before = [parameter._version for parameter in parameters]
        optimizer.step()
        assert all(parameter._version > count for parameter, count in zip(parameters, before, strict=True))
        found.append(optimizer.changed_fraction)
    state = [optimizer.state[parameter][key] for parameter in parameters for key in sorted(optimizer.state[parameter])]
    return found, [p.detach() for p in parameters] + [optimizer.master_of(p) for p in parameters] + state


def test_an_optimizer_steps_its_masters_by_kernels_as_by_torch(monkeypatch):
    fractions, of_torch = trained()
    monkeypatch.setattr(remainders, "kernels", lambda _: kernels)
    by_kernel = trained()
    assert by_kernel[0] == fractions
    for one, other in zip(by_kernel[1], of_torch, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@settings(max_examples=10)
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9), repeats=st.sampled_from([1, 700]))
def test_the_kernels_open_and_close_masters_as_torch_does(bits, repeats):
    masters = torch.tensor(bits * repeats, dtype=torch.int32).view(torch.float32)
    count, blocks = len(masters), -(-len(masters) // remainders.DIGEST_ELEMENTS)
    sides = []
    for compiled in (None, kernels):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remainders, "kernels", lambda _, compiled=compiled: compiled)
            weight, rest = torch.ones(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int16)
            digests, changed = torch.zeros(blocks, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            remainders.close_masters(masters.clone(), weight, rest, digests, changed)
            opened, written = torch.empty(count), torch.empty(count)
            remainders.open_masters(weight, rest, digests, opened)
            weight[0] = 3.0  # of a block that somebody writes to, all are their own masters
            remainders.open_masters(weight, rest, digests, written)
            sides.append([weight, rest, digests, changed, opened, written])
    for one, other in zip(*sides, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
