"""What a runtime is made of."""

from types import SimpleNamespace

import pytest
import torch

from colo.config import Offload, RuntimeConfig
from colo.errors import BudgetError
from colo.memory.storage import local_bytes
from colo.phases.phase import Phase, Residency
from colo.phases.scheduler import Budget, Scheduler
from colo.runtime.construction import check_phases, prepare_arena
from colo.testing import FakeDevice, FakeSegment
from colo.units import MIB
from tests.runtimes import launch, launch_lora, segment


def total_bytes(parameters):
    return sum(map(local_bytes, parameters))


@pytest.mark.parametrize(("weights", "residency"), [("auto", Residency.SHARED), ("copy", Residency.RESIDENT)])
def test_weights_are_a_segment_that_costs_nothing_where_they_are_the_engines(weights, residency):
    with launch(config=RuntimeConfig(kv_cache_bytes=MIB, weights=weights)) as rt:
        parameters = segment(rt, "trainer.parameters")
        assert parameters.residency is residency
        assert parameters.size_bytes == total_bytes(rt.model.parameters())
        assert "trainer.adapter" not in rt.scheduler.segments


def test_an_adapter_is_a_segment_of_its_own_beside_the_frozen_weights():
    with launch_lora() as rt:
        adapter = [p for name, p in rt.model.named_parameters() if "lora_" in name]
        assert segment(rt, "trainer.adapter").size_bytes == total_bytes(adapter)
        assert segment(rt, "trainer.adapter").residency is Residency.RESIDENT
        assert segment(rt, "trainer.parameters").size_bytes == total_bytes(rt.model.parameters()) - total_bytes(adapter)
        assert rt.versions.publisher.adapter_name == "policy@0"


def test_phases_keep_free_what_they_take_beside_the_segments():
    config = RuntimeConfig(kv_cache_bytes=MIB, train_working_bytes=3 * MIB, offload=Offload.NEVER)
    with launch(config=config) as rt:
        assert rt.scheduler.working_bytes[Phase.TRAIN] == 3 * MIB
        assert rt.scheduler.working_bytes[Phase.SYNC] == rt.transport.working_bytes
        assert rt.scheduler.offload is Offload.NEVER
        assert rt.scheduler.trace is rt.trace


class Arena:
    """Notes what it is told to prepare."""

    def __init__(self, limit_bytes, used_bytes=0):
        self.limit_bytes, self.used_bytes = limit_bytes, used_bytes
        self.prepared = []

    def prepare(self, num_bytes):
        self.prepared.append(num_bytes)


CUDA = torch.device("cuda")


def prepared(*, state_bytes=500, residency=Residency.DISCARDED, limit_bytes=1000, device=CUDA, capacity_bytes=800):
    """What is prepared for an optimizer's state that has not been made, beside a KV cache that is there."""
    memory, arena = FakeDevice(2000), Arena(limit_bytes)
    segments = [
        FakeSegment("engine.weights", 100, memory, away=None),
        FakeSegment("engine.kv_cache", 300, memory, away=Residency.DISCARDED),
        FakeSegment("trainer.optimizer", state_bytes, memory, residency=residency),
        FakeSegment("trainer.master_weights", 0, memory, residency=Residency.DISCARDED),
    ]
    scheduler = Scheduler(segments, Budget(capacity_bytes=capacity_bytes, host_capacity_bytes=limit_bytes))
    prepare_arena(check_phases(scheduler), SimpleNamespace(device=device, arena=arena))
    return arena.prepared


def test_host_memory_is_pinned_for_state_that_will_have_to_leave():
    assert prepared() == [500]
    assert prepared(residency=Residency.RESIDENT) == [500]
    assert prepared(limit_bytes=500) == [500]
    assert prepared(state_bytes=401) == [401]
    assert prepared(state_bytes=1, capacity_bytes=400) == [1]


def test_none_is_pinned_where_nothing_leaves_or_none_is_allowed_or_without_a_gpu():
    assert prepared(state_bytes=400) == [], "everything fits"
    assert prepared(device=torch.device("cpu")) == []


def test_state_that_is_streamed_is_pinned_whole_and_once():
    memory = FakeDevice(2000)
    window = FakeSegment("trainer.optimizer", 100, memory)
    window.home_bytes = 700
    segments = [
        FakeSegment("engine.weights", 100, memory, away=None),
        FakeSegment("engine.kv_cache", 300, memory, away=Residency.DISCARDED),
        window,
        FakeSegment("trainer.master_weights", 0, memory, residency=Residency.DISCARDED),
    ]
    for capacity_bytes in (450, 2000):  # the window leaves for a rollout, and stays
        scheduler = Scheduler(segments, Budget(capacity_bytes=capacity_bytes, host_capacity_bytes=700))
        for used_bytes, expected in ((0, [700]), (600, [100]), (700, [])):
            arena = Arena(1000, used_bytes)
            prepare_arena(check_phases(scheduler), SimpleNamespace(device=CUDA, arena=arena))
            assert arena.prepared == expected
        with pytest.raises(BudgetError, match="host arena in phase"):
            check_phases(Scheduler(segments, Budget(capacity_bytes=capacity_bytes, host_capacity_bytes=699)))


def test_a_rollout_that_will_not_fit_once_there_is_state_is_refused():
    with pytest.raises(BudgetError, match="host arena in phase rollout needs"):
        prepared(limit_bytes=499)


def test_state_that_never_leaves_takes_the_place_of_other_state():
    memory, arena = FakeDevice(2000), Arena(1000)
    segments = [
        FakeSegment("engine.kv_cache", 300, memory, away=None),
        FakeSegment("trainer.optimizer", 200, memory, away=None, residency=Residency.DISCARDED),
        FakeSegment("trainer.master_weights", 300, memory),
    ]
    scheduler = Scheduler(segments, Budget(capacity_bytes=800, host_capacity_bytes=1000))
    scheduler.working_bytes[Phase.ROLLOUT] = 100
    prepare_arena(check_phases(scheduler), SimpleNamespace(device=CUDA, arena=arena))
    assert arena.prepared == [300]
