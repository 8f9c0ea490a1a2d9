"""Bytes that leave memory that is watched: read to be written elsewhere, each read counted once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from colo.weights.meter import CopyMeter, count_read, uncounted


@pytest.fixture
def mine():
    return torch.arange(12.0)


OTHERS = {
    "copy_": (lambda mine, other: other.copy_(mine), 48),
    "clone": (lambda mine, other: mine.clone(), 48),
    "to": (lambda mine, other: mine.to(torch.bfloat16), 48),
    "a part": (lambda mine, other: other[:3].copy_(mine[4:7]), 12),
    "many at once": (lambda mine, other: torch._foreach_copy_([other[:4], other[4:6]], [mine[:4], other[6:8]]), 16),
    "cat": (lambda mine, other: torch.cat([mine, other]), 48),
    "cat, out": (lambda mine, other: torch.cat([mine[:6], mine[6:]], out=other), 48),
    "computed, then copied": (lambda mine, other: other.copy_(mine * 2), 48),
    "views": (lambda mine, other: mine[2:].view(2, 5).t().detach(), 0),
    "within itself": (lambda mine, other: mine[:6].copy_(mine[6:]), 0),
    "in place": (lambda mine, other: mine.mul_(2), 0),
    "written to": (lambda mine, other: mine.copy_(other), 0),
    "others alone": (lambda mine, other: other.clone(), 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_to_be_written_elsewhere_counts(mine, name):
    work, num_bytes = OTHERS[name]
    other = torch.zeros(12)
    with CopyMeter(lambda: [mine[:5], mine[5:]]) as meter:
        work(mine, other)
    assert meter.num_bytes == num_bytes


def test_nothing_is_counted_before_and_after(mine):
    meter, modes = CopyMeter(lambda: [mine]), torch._C._len_torch_dispatch_stack()
    mine.clone()
    with meter:
        mine.clone()
    mine.clone()
    assert torch._C._len_torch_dispatch_stack() == modes, "it has left torch alone"
    assert meter.num_bytes == 48


def test_what_watches_changes_no_result(mine):
    with CopyMeter(lambda: [mine]):
        found = mine.view(3, 4).sum(0).sqrt()
    assert torch.equal(found, mine.view(3, 4).sum(0).sqrt())


def test_what_lies_behind_and_between_watched_tensors_is_not_watched(mine):
    with CopyMeter(lambda: [mine[8:10], mine[:2], mine[4:6]]) as meter:
        for part in (mine[10:], mine[2:4], mine[6:8]):
            part.clone()
        assert meter.num_bytes == 0
        for part in (mine[4:6], mine[:2], mine[9:10]):
            part.clone()
    assert meter.num_bytes == 8 + 8 + 4


def test_one_target_elsewhere_is_enough(mine):
    with CopyMeter(lambda: [mine]) as meter:
        torch._foreach_copy_([mine[:2], torch.zeros(2)], [mine[2:4], mine[4:6]])
    assert meter.num_bytes == 16


def test_what_another_process_has_read_counts_for_every_meter_of_this_thread(mine):
    count_read(7)
    with CopyMeter(lambda: [mine]) as outer:
        count_read(1)
        with CopyMeter(lambda: [mine]) as inner:
            count_read(2)
        count_read(4)
        with ThreadPoolExecutor(1) as another:
            another.submit(count_read, 8).result()
    assert (outer.num_bytes, inner.num_bytes) == (7, 2)


def test_what_stays_with_the_trainer_is_left_out(mine):
    with CopyMeter(lambda: [mine]) as meter:
        with pytest.raises(KeyError), uncounted():
            mine.clone()
            count_read(1)
            raise KeyError
        mine.clone()
    assert meter.num_bytes == 48
