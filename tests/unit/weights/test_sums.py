import pytest
import torch

from colo.weights.sums import ContentSums


def tensors():
    torch.manual_seed(0)
    odd = torch.randn(7, dtype=torch.float32).to(torch.bfloat16)
    return [torch.randn(33, 5), odd, torch.arange(5, dtype=torch.int8), torch.randn(4, 6).t(), torch.zeros(())]


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("counted", [True, False])
def test_every_write_is_noticed_and_taken_back(index, counted):
    held = tensors()
    then = ContentSums.of(held)
    assert ContentSums.of(held, earlier=then).is_equal(then)
    element = (
        (held[index] if counted else held[index].data).view(-1)[-1:]
        if held[index].is_contiguous()
        else held[index][-1:]
    )
    before = element.clone()
    element.add_(1)
    assert not ContentSums.of(held, earlier=then).is_equal(then)
    assert not ContentSums.of(held).is_equal(then)
    element.copy_(before)
    assert ContentSums.of(held, earlier=then).is_equal(then)


def test_rows_that_change_places_are_noticed():
    held = [torch.randn(8, 4)]
    then = ContentSums.of(held)
    held[0].copy_(held[0].flip(0).clone())
    assert not ContentSums.of(held, earlier=then).is_equal(then)


def test_other_memory_and_other_facts_are_not_the_same():
    held = tensors()
    then = ContentSums.of(held, facts=[("scale", 1.0)])
    assert not ContentSums.of([t.clone() for t in held], facts=[("scale", 1.0)], earlier=then).is_equal(then)
    assert not ContentSums.of(held, facts=[("scale", 2.0)], earlier=then).is_equal(then)
    assert ContentSums.of(held, facts=[("scale", 1.0)], earlier=then).is_equal(then)


def test_contents_that_change_places_are_noticed_in_whichever_layout():
    torch.manual_seed(0)
    for held in ([torch.randn(4, 6) for _ in range(4)], [torch.randn(6, 4).t() for _ in range(4)]):
        then = ContentSums.of(held)
        for one in range(4):
            for other in range(one):
                first, second = held[one].clone(), held[other].clone()
                held[one].copy_(second), held[other].copy_(first)
                assert not ContentSums.of(held, earlier=then).is_equal(then)
                held[one].copy_(first), held[other].copy_(second)
        assert ContentSums.of(held, earlier=then).is_equal(then)
