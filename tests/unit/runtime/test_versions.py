"""When the weights are a new version, and what brings it to an engine: with ranks that are told what to say.

What transports and publishers do is theirs to test, and that of the whole in test_staleness and test_publishing.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colo.config import RuntimeConfig
from colo.engine import EngineState
from colo.errors import BudgetError, StaleWeights, TransferError
from colo.phases.phase import Phase, Residency
from colo.phases.scheduler import Budget, Scheduler
from colo.runtime.versions import WeightVersions
from colo.testing import FakeDevice, FakeSegment


class Ranks:
    """This rank and, unless it is alone, others: whether one of them says yes is `elsewhere`."""

    def __init__(self, *, is_alone):
        self.is_alone = is_alone
        self.elsewhere = False
        self.fails_at = ""  # an operation that another rank refuses

    def any(self, flag, at=""):
        return flag or self.elsewhere

    @contextmanager
    def fail_together(self, operation):
        yield
        if operation == self.fails_at:
            raise TransferError(f"{operation} failed on rank 1")


class Publisher:
    """Notes what it is asked for, in which phase."""

    def __init__(self, parts):
        self._parts = parts
        self.version = 0
        self.adapter_name = None
        self.other_contents = self.changed_shard = False
        self.adapter_is_there = True
        self.replaces_everything = False
        self.error = None

    @property
    def is_current(self):
        return self._parts.engine.weights_version == self.version

    def has_other_contents(self):
        return self.other_contents

    def has_changed_shard(self):
        return self.changed_shard

    def has_adapter(self):
        return self.adapter_is_there

    def check(self):
        self._parts.told.append("check")

    def start_over(self):
        self._parts.told.append("start over")

    def note_contents(self):
        self._parts.told.append("note")

    def publish(self):
        assert not torch.is_inference_mode_enabled()
        if self.error is not None:
            raise self.error
        self._parts.told.append(("publish", self.version, self._parts.scheduler.phase))
        self._parts.engine.weights_version = self.version


class Parts:
    """Weight versions, and what they are made of: an optimizer that has to leave before the KV cache comes."""

    def __init__(self, *, is_alone=True, verify=True, capacity_bytes=800, working_bytes=0):
        self.told = []
        self.memory = FakeDevice(capacity_bytes + 500)
        self.model = nn.Linear(2, 2)
        self.ranks = Ranks(is_alone=is_alone)
        segments = [
            FakeSegment("engine.weights", 100, self.memory),
            FakeSegment("engine.kv_cache", 300, self.memory, away=Residency.DISCARDED, residency=Residency.DISCARDED),
            FakeSegment("trainer.optimizer", 500, self.memory),
        ]
        self.scheduler = Scheduler(segments, Budget(capacity_bytes=capacity_bytes, host_capacity_bytes=1000))
        source = SimpleNamespace(
            modules=[self.model],
            foreign=frozenset(),
            settings=lambda: None,
            reshard=lambda: None,
            ranks=self.ranks,
        )
        self.is_equal = True
        self.transport = SimpleNamespace(
            source=source,
            working_bytes=working_bytes,
            is_current=self.compare,
            reconnect=lambda: self.told.append("reconnect"),
        )
        self.engine = SimpleNamespace(
            state=EngineState.PAUSED,
            weights_version=0,
            device=torch.device("cpu"),
            recover=lambda: self.told.append(("recover", self.memory.used_bytes)),
            resume=lambda: self.told.append("resume"),
        )
        self.publisher = Publisher(self)
        self.versions = WeightVersions(
            self.engine, self.transport, self.publisher, self.scheduler, RuntimeConfig(verify=verify)
        )

    def compare(self):
        self.told.append(("compare", self.scheduler.phase))
        return self.is_equal

    def write(self):
        with torch.no_grad():
            self.model.weight.add_(1)


def test_a_step_is_one_version_whatever_it_has_written():
    parts = Parts()
    assert parts.versions.current == 0
    parts.write()
    parts.versions.note_step()
    parts.versions.notice_writes()
    assert parts.versions.current == 1


def test_a_write_is_noticed_once():
    parts = Parts()
    parts.versions.notice_writes()
    assert parts.versions.current == 0
    parts.write()
    for _ in range(2):
        parts.versions.notice_writes()
        assert parts.versions.current == 1
    parts.publisher.other_contents = True  # as of a write through `.data`
    parts.versions.notice_writes()
    assert parts.versions.current == 2


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("change", ["write", "contents", "shard", "elsewhere"])
def test_what_has_changed_on_any_rank_is_a_version_without_a_comparison(change, is_alone):
    parts = Parts(is_alone=is_alone)
    if change == "write":
        parts.write()
    parts.publisher.other_contents = change == "contents"
    parts.publisher.changed_shard = change == "shard"
    parts.ranks.elsewhere = change == "elsewhere"
    parts.versions.notice_and_compare()
    assert parts.versions.current == 1 and parts.told == []


@pytest.mark.parametrize(("is_alone", "verify"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("differs", [None, "weights", "adapter"])
def test_what_only_a_comparison_shows_is_a_version(is_alone, verify, differs):
    parts = Parts(is_alone=is_alone, verify=verify)
    parts.is_equal, parts.publisher.adapter_is_there = differs != "weights", differs != "adapter"
    parts.versions.notice_and_compare()
    assert parts.versions.current == (differs is not None)
    assert parts.told == [("compare", Phase.IDLE)]


@pytest.mark.parametrize(("verify", "held"), [(True, None), (False, 0)])
def test_nothing_is_compared_with_an_engine_of_another_version_or_without_verification(verify, held):
    parts = Parts(verify=verify)
    parts.is_equal, parts.engine.weights_version = False, held
    parts.versions.notice_and_compare()
    assert parts.versions.current == 0 and parts.told == []


@pytest.mark.parametrize("residency", [Residency.OFFLOADED, Residency.DISCARDED])
def test_weights_that_are_away_come_back_to_be_compared(residency):
    parts = Parts()
    weights = parts.scheduler.segments["engine.weights"]
    weights.begin(residency).wait()
    parts.versions.notice_and_compare()
    assert parts.told == [("compare", Phase.SYNC)]
    assert parts.scheduler.phase is Phase.IDLE and weights.residency is Residency.RESIDENT


@pytest.mark.parametrize("working_bytes", [1, 50])
def test_room_is_made_for_what_a_comparison_takes(working_bytes):
    parts = Parts(working_bytes=working_bytes)
    parts.versions.notice_and_compare()
    assert parts.told == [("compare", Phase.SYNC)]
    assert parts.scheduler.phase is Phase.IDLE


def test_an_engine_is_current_where_those_of_all_ranks_are():
    parts = Parts(is_alone=False)
    assert parts.versions.is_engine_current() is True
    parts.ranks.elsewhere = True
    assert parts.versions.is_engine_current() is False
    parts.ranks.elsewhere, parts.publisher.version = False, 1
    assert parts.versions.is_engine_current() is False


def test_publishing_is_a_phase_of_its_own_that_ends_also_when_it_fails():
    parts = Parts()
    parts.publisher.version = 3
    parts.versions.publish()
    assert parts.told == [("publish", 3, Phase.SYNC)]
    assert parts.scheduler.phase is Phase.IDLE
    assert [span.phase for span in parts.scheduler.trace.spans if span.category == "phase"] == [Phase.SYNC]
    parts.publisher.error = StaleWeights("tested")
    with pytest.raises(StaleWeights, match="tested"):
        parts.versions.publish()
    assert parts.scheduler.phase is Phase.IDLE


def test_a_phase_that_another_rank_refuses_is_left_again():
    parts = Parts(is_alone=False, working_bytes=1)
    calls = {"publish": parts.versions.publish, "compare weights": parts.versions.notice_and_compare}
    for what, call in calls.items():
        parts.ranks.fails_at = f"making room to {what}"
        with pytest.raises(TransferError, match=what):
            call()
        assert parts.scheduler.phase is Phase.IDLE and parts.told == []


@pytest.mark.parametrize("replaces_everything", [False, True])
def test_weights_come_back_from_the_host_unless_all_of_them_are_written_anew(replaces_everything):
    parts = Parts()
    parts.publisher.replaces_everything = replaces_everything
    weights = parts.scheduler.segments["engine.weights"]
    weights.begin(Residency.OFFLOADED).wait()
    moves = []
    weights.before_begin = lambda segment, target: moves.append((segment.residency, target))
    parts.versions.publish()
    from_host = Residency.DISCARDED if replaces_everything else Residency.OFFLOADED
    assert moves[-1] == (from_host, Residency.RESIDENT) and len(moves) == 1 + replaces_everything


def test_weights_stay_in_the_host_where_publishing_has_no_room():
    parts = Parts()
    parts.publisher.replaces_everything = True
    weights = parts.scheduler.segments["engine.weights"]
    weights.begin(Residency.OFFLOADED).wait()
    parts.scheduler.working_bytes[Phase.SYNC] = 10_000
    with pytest.raises(BudgetError, match="phase sync needs"):
        parts.versions.publish()
    assert (weights.residency, weights.host_bytes) == (Residency.OFFLOADED, 100)


def test_a_lost_engine_starts_once_there_is_room_and_is_given_everything_anew():
    parts = Parts()
    parts.engine.state = EngineState.LOST
    parts.versions.recover()
    room = ("recover", 100)  # its cache takes the place of the optimizer's state, which has left
    assert parts.told == [room, "start over", "reconnect", ("publish", 0, Phase.SYNC)]


def test_an_engine_that_has_no_room_is_not_started():
    parts = Parts(capacity_bytes=350)
    parts.engine.state = EngineState.LOST
    with pytest.raises(BudgetError, match="phase rollout needs"):
        parts.versions.recover()
    assert parts.told == []


def test_where_another_ranks_engine_is_lost_this_one_is_published_to():
    parts = Parts(is_alone=False)
    parts.ranks.elsewhere = True
    parts.versions.recover()
    assert parts.told == [("publish", 0, Phase.SYNC)]
    parts.told.clear()
    parts.engine.state = EngineState.LOST
    parts.versions.recover()
    assert parts.told[0] == ("recover", 100)


def test_an_engine_that_no_rank_has_lost_is_asked_and_refuses():
    parts = Parts()
    parts.versions.recover()
    assert parts.told[0][0] == "recover"


def test_within_a_rollout_only_what_has_changed_is_published():
    parts = Parts()
    with torch.inference_mode():  # a caller's
        parts.versions.refresh()
    assert parts.told == ["check"]
    parts.told.clear()
    parts.write()
    with torch.inference_mode():
        parts.versions.refresh()
    assert parts.told == ["check", ("publish", 1, Phase.IDLE), "resume", "note"]


@pytest.mark.parametrize(
    ("is_alone", "held", "publishes"),
    [(True, None, True), (True, 0, True), (False, None, False), (False, 0, True)],
)
def test_a_poisoned_engine_of_one_rank_alone_waits_for_no_other(is_alone, held, publishes):
    parts = Parts(is_alone=is_alone)
    parts.engine.weights_version = held
    parts.write()
    parts.versions.refresh()
    assert (("publish", 1, Phase.IDLE) in parts.told) is publishes
    assert ("resume" in parts.told) is publishes
