import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.memory import checksum as module
from colo.memory.checksum import checksum

WORDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)


def data(words):
    return torch.tensor(words, dtype=torch.int32).view(torch.uint8)


@given(WORDS, st.data())
def test_one_changed_word_changes_it(words, draw):
    index = draw.draw(st.integers(0, len(words) - 1))
    value = draw.draw(st.integers(-(2**31), 2**31 - 1).filter(lambda v: v != words[index]))
    changed = [*words[:index], value, *words[index + 1 :]]
    assert checksum(data(words)) == checksum(data(words).clone())
    assert checksum(data(words)) != checksum(data(changed))


def test_the_order_of_words_counts_within_chunks_and_between_them(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_WORDS", 4)
    words = list(range(1, 13))
    sums = {checksum(data(order)) for order in (words, words[::-1], [*words[4:8], *words[:4], *words[8:]])}
    assert len(sums) == 3


def test_it_takes_memory_of_any_length_in_words_and_no_other():
    assert checksum(data([])) == 0
    with pytest.raises(ValueError, match="3 bytes"):
        checksum(torch.zeros(3, dtype=torch.uint8))
