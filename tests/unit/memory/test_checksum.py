import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.memory import tiles
from colo.memory.checksum import checksum, checksums_of

WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Chunks of eight words, so that a few words are several of them, and a rest."""
    with pytest.MonkeyPatch.context() as patch:
        tiles._weights.cache_clear()
        patch.setattr(tiles, "_CHUNK", 8)
        yield
    tiles._weights.cache_clear()


def data(words):
    return torch.tensor(words, dtype=torch.int64).view(torch.uint8)


@given(WORDS, st.data())
def test_one_changed_word_changes_it(words, draw):
    index = draw.draw(st.integers(0, len(words) - 1))
    bits = draw.draw(st.integers(1, 2**64 - 1))
    value = ((words[index] ^ bits) + 2**63) % 2**64 - 2**63
    changed = [*words[:index], value, *words[index + 1 :]]
    assert checksum(data(words)) == checksum(data(words).clone())
    assert checksum(data(words)) != checksum(data(changed))


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_counts(bit):
    words = list(range(1, 12))
    flipped = [(w ^ (1 << bit) * (i == 5)) for i, w in enumerate(words)]
    flipped = [w - 2**64 if w >= 2**63 else w for w in flipped]
    assert checksum(data(words)) != checksum(data(flipped))


def test_the_order_of_words_counts_within_chunks_and_between_them():
    words = list(range(1, 20))
    orders = (words, words[::-1], [*words[4:8], *words[:4], *words[8:]], [*words[8:16], *words[:8], *words[16:]])
    assert len({checksum(data(order)) for order in orders}) == 4


@pytest.fixture
def large():
    with pytest.MonkeyPatch.context() as patch:
        tiles._weights.cache_clear()
        patch.setattr(tiles, "_CHUNK", 1 << 18)
        yield
    tiles._weights.cache_clear()


CHANGES = {
    "a column negated": lambda w: w[:, 3].neg_(),
    "two columns negated": lambda w: w[:, 2:4].neg_(),
    "a column doubled": lambda w: w[:, 7].mul_(2),
    "a row negated": lambda w: w[5].neg_(),
    "all of it negated": lambda w: w.neg_(),
    "all of it doubled": lambda w: w.mul_(2),
    "all of it halved": lambda w: w.mul_(0.5),
    "two signs": lambda w: w[2:4, 3].neg_(),
    "two signs of a row": lambda w: w[2, 3:8:4].neg_(),
    "two rows exchanged": lambda w: w.__setitem__([1, 2], w[[2, 1]]),
    "columns rotated": lambda w: w.copy_(w.roll(1, 1)),
    "rows rotated": lambda w: w.copy_(w.roll(1, 0)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", CHANGES)
def test_what_one_does_to_whole_weights_changes_it(large, dtype, change):
    weights = torch.randn(1024, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = checksum(weights.view(-1).view(torch.uint8))
    CHANGES[change](weights)
    assert checksum(weights.view(-1).view(torch.uint8)) != before


def test_signs_in_a_rectangle_do_not_cancel(large):
    # A product of a column's and a row's number would not see these: both sums have many factors of two.
    weights = torch.rand(1024, 1024, generator=torch.Generator().manual_seed(0)) + 1
    before = checksum(weights.view(-1).view(torch.uint8))
    for row in (714, 31):
        weights[row, [764, 118]] *= -1
    assert checksum(weights.view(-1).view(torch.uint8)) != before


def test_it_is_the_same_in_every_process():
    assert checksum(data(range(1, 20))) == 37389431522


def test_it_is_the_same_in_every_process_over_several_chunks(large):
    assert checksum(torch.arange(1 << 20).view(torch.uint8)) == 167271823055410350


def test_a_tensor_has_that_of_its_bytes_filled_up_to_whole_words():
    assert checksums_of([torch.arange(12.0)]) == [checksum(torch.arange(12.0).view(torch.uint8))]
    filled = torch.tensor([1, 2, 3, 4, 5, 0, 0, 0], dtype=torch.uint8)
    assert checksums_of([filled[:5].clone()]) == [checksum(filled)]


def test_it_takes_memory_of_any_length_in_words_and_no_other():
    assert checksum(data([])) == 0
    with pytest.raises(ValueError, match="3 bytes"):
        checksum(torch.zeros(3, dtype=torch.uint8))


def test_every_tensor_has_its_own_however_it_lies():
    def make():
        return [torch.arange(12.0), torch.zeros(0), torch.arange(5, dtype=torch.int8), torch.arange(12.0).view(3, 4).T]

    expected = checksums_of(make())
    assert len(expected) == 4
    for changed in (0, 2, 3):
        tensors = make()
        tensors[changed][1] += 1
        assert sum(one != other for one, other in zip(expected, checksums_of(tensors), strict=True)) == 1
