import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

from colo.memory import copy_plan
from colo.memory.digest import Digest

WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Chunks of eight words, so that a few words are several of them, and a rest."""
    with pytest.MonkeyPatch.context() as patch:
        copy_plan._weights.cache_clear()
        patch.setattr(copy_plan, "_CHUNK", 8)
        yield
    copy_plan._weights.cache_clear()


def checksum(data):
    """The sum of words, which is that of two parts wherever they lie."""
    words = data.view(torch.int32)
    half = len(words) // 3
    whole = int(copy_plan.sum_of(words)) % 2**64
    assert whole == int(copy_plan.sum_of(words[half:], half) + copy_plan.sum_of(words[:half])) % 2**64
    return whole


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
        copy_plan._weights.cache_clear()
        patch.setattr(copy_plan, "_CHUNK", 1 << 18)
        yield
    copy_plan._weights.cache_clear()


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


def test_nothing_sums_to_nothing():
    assert checksum(data([])) == 0


# ---- digests ---------------------------------------------------------------------------------------------------------


def tensors():
    torch.manual_seed(0)
    odd = torch.randn(7, dtype=torch.float32).to(torch.bfloat16)
    held = [torch.randn(33, 5), odd, torch.arange(5, dtype=torch.int8), torch.randn(4, 6).t(), torch.zeros(())]
    return named([*held, torch.empty(0)])


def named(held):
    return {f"t{number}": tensor for number, tensor in enumerate(held)}


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("counted", [True, False])
def test_every_write_is_noticed_and_taken_back(index, counted):
    held, name = tensors(), f"t{index}"
    then = Digest.of(held)
    assert Digest.of(held, then).differs(then) == []
    written = held[name] if counted else held[name].data
    element = written.view(-1)[-1:] if written.is_contiguous() else written[-1:]
    before = element.clone()
    element.add_(1)
    assert Digest.of(held, then).differs(then) == Digest.of(held).differs(then) == [name]
    element.copy_(before)
    assert Digest.of(held, then).differs(then) == []


def test_rows_that_change_places_are_noticed():
    held = named([torch.randn(8, 4)])
    then = Digest.of(held)
    held["t0"].copy_(held["t0"].flip(0).clone())
    assert Digest.of(held, then).differs(then) == ["t0"]


def test_tensors_in_other_memory_new_ones_and_those_that_are_gone_differ():
    held = tensors()
    then = Digest.of(held)
    other = held | {"t1": held["t1"].clone()}
    assert Digest.of(other, then).differs(then) == ["t1"]
    assert Digest.of(held | {"new": torch.ones(1)}, then).differs(then) == ["new"]
    del other["t0"], other["t1"]
    assert then.differs(Digest.of(other)) == ["t0", "t1"]


def test_the_same_bytes_have_the_same_sums_wherever_they_lie():
    torch.manual_seed(1)
    held = tensors()
    assert Digest.of(held).sums == Digest.of({name: tensor.clone() for name, tensor in held.items()}).sums
    assert list(Digest.of(held).sums) == list(held)


def test_a_dtensor_is_its_shard(mesh):
    whole = torch.randn(4, 4)
    held = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "v": torch.ones(3)}
    then = Digest.of(held)
    assert then.sums == Digest.of({"w": whole, "v": torch.ones(3)}).sums
    held["w"]._local_tensor[1, 1] += 1
    assert Digest.of(held, then).differs(then) == ["w"]


def test_contents_that_change_places_are_noticed_in_whichever_layout():
    torch.manual_seed(0)
    for held in ([torch.randn(4, 6) for _ in range(4)], [torch.randn(6, 4).t() for _ in range(4)]):
        held = named(held)
        then = Digest.of(held)
        for one in range(4):
            for other in range(one):
                a, b = held[f"t{one}"], held[f"t{other}"]
                first, second = a.clone(), b.clone()
                a.copy_(second), b.copy_(first)
                assert Digest.of(held, then).differs(then) == [f"t{other}", f"t{one}"]
                a.copy_(first), b.copy_(second)
        assert Digest.of(held, then).differs(then) == []
