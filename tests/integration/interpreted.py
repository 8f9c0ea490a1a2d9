"""The kernels in Triton's interpreter, on a CPU, beside torch; run by `test_kernels.py` with TRITON_INTERPRET=1."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.memory import checksum, copies, kernels, tiles, triton_kernels
from colo.trainer import remainders

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def by_kernels():
    """Small numbers, so that a few words are several columns, rows, chunks and tiles, and the kernels in use."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_COLUMNS": 4, "_ROWS": 4, "_CHUNKS": 3}.items():
            patch.setattr(checksum, name, value)
        patch.setattr(tiles, "WORDS", 8)

        def using(module):
            patch.setattr(triton_kernels, "kernels", lambda device: module)

        yield [lambda: using(kernels), lambda: using(None)]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("compare", lambda table, flags: None),
        ("compare", lambda table, flags: flags.fill_(1)),
        ("weigh", lambda table, weights, sums: None),
        ("join_masters", lambda weights, remainders: weights.to(torch.int32)),
        ("split_masters", lambda masters: (masters.to(torch.int16), masters.to(torch.int16))),
    ],
)
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch, name, broken):
    assert kernels.try_out(CPU) is None
    monkeypatch.setattr(kernels, name, broken)
    with pytest.raises(RuntimeError, match="Triton's kernels are wrong"):
        kernels.try_out(CPU)


@settings(max_examples=25, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_the_kernel_sums_what_torch_sums(by_kernels, parts, seed):
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32) for *_, n in parts]
    placed = [(number, position, w) for (number, position, _), w in zip(parts, words, strict=True)]
    found = []
    for use in by_kernels:
        use()
        found.append(checksum.values([checksum.Checksums(placed, 3, CPU).compute()]))
    assert found[0] == found[1]
    assert any(found[0]) == any((w != 0).any() for w in words)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0, 40)), max_size=4),
    data=st.data(),
)
def test_the_kernel_finds_the_differences_that_torch_finds(by_kernels, shapes, data):
    sources = [torch.randn(count).to(dtype) for dtype, count in shapes]
    targets = [source.clone() for source in sources]
    changed = data.draw(st.sets(st.sampled_from(range(len(sources))))) if sources else set()
    changed = {index for index in changed if len(sources[index])}
    for index in changed:
        place = data.draw(st.integers(0, len(sources[index]) - 1))
        targets[index][place] = -sources[index][place]
    for use in by_kernels:
        use()
        flags = copies.Comparison(sources, targets).flags()
        assert (flags.dtype, flags.tolist()) == (torch.bool, [index in changed for index in range(len(sources))])


@settings(max_examples=25, deadline=None)
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), repeats=st.sampled_from([1, 700]))
def test_the_kernels_split_and_join_masters_as_torch_does(bits, repeats):
    masters = torch.tensor(bits * repeats, dtype=torch.int32).view(torch.float32)
    weight, remainder = remainders.split(masters)
    by_kernel = kernels.split_masters(masters.view(torch.int32))
    assert torch.equal(by_kernel[0], weight.view(torch.int16)) and torch.equal(by_kernel[1], remainder)
    joined = kernels.join_masters(*by_kernel)
    assert torch.equal(joined, remainders.join(weight, remainder).view(torch.int32))
