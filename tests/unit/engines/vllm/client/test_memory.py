"""Segments that several workers move together: all of them, or none."""

from types import SimpleNamespace

import pytest
import torch

from colo.engines.vllm.client.memory import WorkerMemory
from colo.engines.vllm.wire import WorkerError
from colo.errors import BudgetError
from colo.phases.phase import ENGINE_KV_CACHE, Residency

NO_ROOM = WorkerError(kind="BudgetError", message="64 B needed, 16 B free", needed_bytes=64, free_bytes=16)


class Link:
    """Workers that move a segment when they are asked to, but for those that have no room to bring it back."""

    device = torch.device("cpu")
    through = None
    infos = (SimpleNamespace(weights_can_leave=False, weights_bytes=100, kv_cache_bytes=64, kv_cache_can_leave=True),)

    def __init__(self, *, refusing):
        self.refusing = refusing
        self.asked = []
        self.at = [Residency.RESIDENT] * len(refusing)

    def ask(self, request):
        target = Residency(request.target)
        self.asked.append((request.operation(), request.segment, target))
        return [self._move(worker, target) for worker in range(len(self.at))]

    def _move(self, worker, target):
        if target is Residency.RESIDENT and self.refusing[worker]:
            return NO_ROOM
        self.at[worker] = target
        return None

    def call(self, request):
        assert request.operation() == "wait"
        return [64 if at is Residency.RESIDENT else 0 for at in self.at]


def asleep(refusing):
    """The KV cache of an engine whose workers have all dropped it, and the link to them."""
    link = Link(refusing=refusing)
    memory = WorkerMemory(lambda name, target: None)
    memory.hold(link, SimpleNamespace(outlive_the_engine=False, why_they_stay="nailed"))
    memory.kv_cache.begin(Residency.DISCARDED).wait()
    link.asked.clear()
    return memory.kv_cache, link


@pytest.mark.parametrize("refusing", [(True, False, False), (False, True, False), (True, False, True)])
def test_where_some_workers_refuse_a_move_those_that_had_begun_go_back(refusing):
    kv_cache, link = asleep(refusing)
    with pytest.raises(BudgetError, match="16 B free") as caught:
        kv_cache.begin(Residency.RESIDENT)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (64, 16)
    assert link.at == [Residency.DISCARDED] * 3
    assert link.asked[-1] == ("begin", ENGINE_KV_CACHE, Residency.DISCARDED)
    assert (kv_cache.residency, kv_cache.device_bytes) == (Residency.DISCARDED, 0)

    link.refusing = (False, False, False)
    kv_cache.begin(Residency.RESIDENT).wait()
    assert link.at == [Residency.RESIDENT] * 3
    assert kv_cache.device_bytes == 64


def test_where_all_workers_refuse_none_is_asked_to_go_back():
    kv_cache, link = asleep((True, True))
    with pytest.raises(BudgetError):
        kv_cache.begin(Residency.RESIDENT)
    assert link.asked == [("begin", ENGINE_KV_CACHE, Residency.RESIDENT)]
