import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.memory import checksum as module
from colo.memory.checksum import checksum

WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Rows of four words, chunks of two rows: a few words are several of each, and a rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROW_WORDS", 4)
        patch.setattr(module, "_CHUNK_ROWS", 2)
        yield


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


def test_the_order_of_words_counts_within_rows_and_chunks_and_between_them():
    words = list(range(1, 20))
    orders = (words, words[::-1], [*words[4:8], *words[:4], *words[8:]], [*words[8:16], *words[:8], *words[16:]])
    assert len({checksum(data(order)) for order in orders}) == 4


@given(WORDS)
def test_it_is_the_sum_of_words_times_odd_numbers(words):
    expected = 0
    whole = len(words) // 4 * 4
    chunks = [words[start : min(start + 8, whole)] for start in range(0, whole, 8)] + [words[whole:]]
    for chunk in filter(None, chunks):
        total = sum(word * (2 * place + 1) for place, word in enumerate(chunk))
        expected = (expected * 1_000_003 + (total + 2**63) % 2**64 - 2**63) % 2**64
    assert checksum(data(words)) == expected


def test_it_takes_memory_of_any_length_in_words_and_no_other():
    assert checksum(data([])) == 0
    with pytest.raises(ValueError, match="3 bytes"):
        checksum(torch.zeros(3, dtype=torch.uint8))
