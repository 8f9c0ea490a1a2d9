"""Publication over an engine and a transport that record what they are asked, and fail where they are told to."""

import pytest
import torch

from colo.engine import AdapterWeights, EngineState
from colo.errors import StaleWeights, TransferError
from colo.phases.phase import Phase
from colo.phases.trace import Trace
from colo.weights import publish
from colo.weights.publish import Publisher
from colo.weights.sources.module import ModuleSource

STEPS = ["pause", "reset_prefix_cache", "transfer", "verify", "commit"]
ADAPTER_STEPS = ["pause", "reset_prefix_cache", "transfer", "verify", "gather", "load_adapter", "commit"]
REPLACE_STEPS = [step.replace("load", "replace") for step in ADAPTER_STEPS]


class Recorder:
    """Names of calls in order; `failing` is the one that raises."""

    def __init__(self):
        self.calls = []
        self.failing = None

    def note(self, name):
        self.calls.append(name)
        if name == self.failing:
            raise TransferError(f"{name} broke")


class RecordingEngine:
    """The part of an `Engine` that publication drives."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.state = EngineState.AWAKE
        self.weights_version = None
        self.cause = None
        self.adapters = []

    def gather(self, value):
        return [value]

    def pause(self):
        self.recorder.note("pause")
        self.state = EngineState.PAUSED

    def reset_prefix_cache(self):
        self.recorder.note("reset_prefix_cache")

    def load_adapter(self, name, adapter):
        self.recorder.note("load_adapter")
        self.adapters.append(name)

    def replace_adapter(self, old, new, adapter):
        self.adapters.remove(old)
        self.recorder.note("replace_adapter")
        self.adapters.append(new)

    def remove_adapter(self, name):
        if name not in self.adapters:
            raise ValueError(f"there is no adapter {name}")
        self.adapters.remove(name)

    def commit(self, version):
        self.recorder.note("commit")
        self.weights_version, self.cause = version, None

    def poison(self, cause):
        self.weights_version, self.cause = None, cause


class RecordingTransport:
    """Copies 40 bytes, or none when it shares."""

    reason = "the test says so"

    def __init__(self, recorder, name="local"):
        self.source = ModuleSource(torch.nn.Linear(2, 2))
        self.recorder = recorder
        self.name = name
        self.error = None
        self.current = True

    @property
    def shares(self):
        return self.name == "shared"

    def check(self):
        if self.shares:
            self.verify()
        else:
            self.source.check_names()

    def transfer(self, version=0):
        self.recorder.note("transfer")
        return 0 if self.name == "shared" else 40

    def is_current(self):
        return self.current

    def verify(self):
        self.recorder.note("verify")
        if self.error is not None:
            raise self.error


class World:
    """A publisher and what it drives."""

    def __init__(self, *, transport="local", adapter=False, verify=True, fingerprint=lambda: None):
        self.recorder = Recorder()
        self.engine = RecordingEngine(self.recorder)
        self.transport = RecordingTransport(self.recorder, transport)
        self.trace = Trace()
        self.adapter = AdapterWeights(a={}, b={}, scalings={})
        self.publisher = Publisher(
            self.engine,
            self.transport,
            self.trace,
            adapter=self.gather if adapter else None,
            fingerprint=fingerprint,
            verify=verify,
        )

    @property
    def calls(self):
        return self.recorder.calls

    def gather(self):
        self.recorder.note("gather")
        return self.adapter

    def publish(self, version=0):
        self.calls.clear()
        self.publisher.version = version
        return self.publisher.publish()


# ---- order ---------------------------------------------------------------------------------------------------------


def test_the_order_is_pause_reset_transfer_verify_commit():
    world = World()
    world.publish()
    assert world.calls == STEPS


def test_an_adapter_is_loaded_after_the_base_and_before_the_commit():
    world = World(adapter=True)
    world.publish()
    assert world.calls == ADAPTER_STEPS


@pytest.mark.parametrize("state", [EngineState.PAUSED, EngineState.ASLEEP])
def test_an_engine_that_is_not_awake_is_not_paused(state):
    world = World()
    world.engine.state = state
    world.publish()
    assert world.calls == STEPS[1:]
    assert world.engine.state is state


def test_verification_can_be_left_out():
    world = World(verify=False)
    world.publish()
    assert "verify" not in world.calls


# ---- what is kept of it --------------------------------------------------------------------------------------------


def test_a_publication_makes_the_version_the_engines_and_is_recorded():
    world = World()
    assert world.publisher.version == 0 and not world.publisher.is_current
    done = world.publish(version=7)
    assert done.adapter_bytes == 0
    assert world.publisher.is_current
    assert world.engine.weights_version == 7
    assert (done.version, done.transport, done.num_bytes) == (7, "local", 40)
    assert list(world.publisher.published) == [done]
    (span,) = world.trace.spans
    assert (span.name, span.category, span.phase, span.num_bytes) == ("publish (local)", "step", Phase.SYNC, 40)
    assert span.duration_s == pytest.approx(done.seconds)


def test_a_later_version_of_the_trainer_is_not_the_engines():
    world = World()
    world.publish(version=1)
    world.publisher.version += 1
    assert not world.publisher.is_current


@pytest.mark.parametrize(("transport", "num_bytes"), [("local", 80), ("shared", 0)])
def test_copied_bytes_add_up(transport, num_bytes):
    world = World(transport=transport)
    world.publish(0)
    world.publish(1)
    assert world.publisher.bytes_synced == num_bytes


def test_bytes_that_a_transport_copies_without_saying_so_are_seen():
    world = World(transport="shared")
    kept, transfer = [], world.transport.transfer

    def copy(version=0):
        kept.extend(tensor.clone() for tensor in world.transport.source.tensors().values())
        return transfer(version)

    assert world.publish(0).num_bytes == 0
    world.transport.transfer = copy
    assert world.publish(1).num_bytes == 4 * (2 * 2 + 2)


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "referred to"])
def test_bytes_of_an_adapter_count_where_the_engine_copies_them(copies):
    world = World(transport="shared", adapter=True, fingerprint=lambda: 7)
    world.adapter = AdapterWeights(a={"q": torch.ones(2, 8)}, b={"q": torch.ones(4, 2)}, scalings={"q": 1.0})
    kept = []

    def keep(*arguments):
        adapter = arguments[-1]
        kept.extend(t.clone() if copies else t for part in (adapter.a, adapter.b) for t in part.values())

    world.engine.load_adapter = world.engine.replace_adapter = keep
    num_bytes = 4 * (16 + 8) if copies else 0
    for version in range(2):
        done = world.publish(version)
        assert (done.num_bytes, done.adapter_bytes) == (num_bytes, num_bytes)
    assert world.publisher.bytes_synced == 2 * num_bytes == sum(s.num_bytes for s in world.trace.spans)


def test_every_version_of_an_adapter_has_its_own_name_and_replaces_the_one_before():
    world = World(adapter=True)
    assert world.publisher.adapter_name is None
    for version in (0, 1, 5):
        world.publish(version)
        assert world.engine.adapters == [f"policy@{version}"] == [world.publisher.adapter_name]
    assert world.calls == REPLACE_STEPS[1:]


def test_the_base_under_an_adapter_is_sent_again_only_when_it_has_changed_or_may_not_have_arrived():
    world = World(adapter=True, fingerprint=lambda: 7)
    world.publish(0)
    assert world.publish(1).num_bytes == 0
    world.transport.current = False
    assert world.publish(2).num_bytes == 40
    world.recorder.failing = "transfer"
    with pytest.raises(TransferError, match="transfer broke"):
        world.publish(3)
    world.recorder.failing, world.transport.current = None, True  # whatever a transport believes after it has failed
    assert world.publish(3).num_bytes == 40
    assert world.publish(4).num_bytes == 0


def test_an_engine_that_was_given_other_weights_gets_the_base_again():
    world = World(adapter=True, fingerprint=lambda: 7)
    world.publish(0)
    world.engine.poison("weights have been loaded into it")
    assert world.publish(0).num_bytes == 40
    world.engine.commit(9)  # by somebody else, after loading what they liked
    assert world.publish(1).num_bytes == 40
    assert world.publish(2).num_bytes == 0


@pytest.mark.parametrize("write", ["in place", "new memory"])
def test_an_adapter_that_was_written_to_without_a_trace_is_noticed(write):
    a, b = torch.ones(2, 4), torch.ones(4, 2)
    world = World(adapter=True)
    world.adapter = AdapterWeights(a={"q": a}, b={"q": b}, scalings={"q": 1.0})
    assert world.publisher.has_adapter(), "none has been published"
    for version in range(3):
        world.publish(version)
        assert world.publisher.has_adapter()
        if write == "in place":
            b.data.mul_(1.5)
        else:
            b.data = b.data * 1.5
        assert not world.publisher.has_adapter()


def test_an_adapter_that_cannot_be_read_is_left_to_the_check():
    world = World(adapter=True)
    world.adapter = AdapterWeights(a={"q": torch.ones(2, 4)}, b={"q": torch.ones(4, 2)}, scalings={"q": 1.0})
    world.publish(0)

    def merged():
        raise StaleWeights("adapter default is merged")

    world.publisher._adapter = merged
    assert world.publisher.has_adapter() is True
    with pytest.raises(StaleWeights, match="merged"):
        world.publisher.check()


def test_another_scaling_is_another_adapter():
    world = World(adapter=True)
    tensors = {"a": {"q": torch.ones(2, 4)}, "b": {"q": torch.ones(4, 2)}}
    world.adapter = AdapterWeights(**tensors, scalings={"q": 1.0})
    world.publish(0)
    assert world.publisher.has_adapter()
    world.adapter = AdapterWeights(**tensors, scalings={"q": 2.0})
    assert not world.publisher.has_adapter()


def test_an_adapter_of_half_words_is_not_compared():
    world = World(adapter=True)
    world.adapter = AdapterWeights(
        a={"q": torch.ones(1, 3).half()}, b={"q": torch.ones(3, 1).half()}, scalings={"q": 1}
    )
    world.publish(0)
    assert world.publisher.has_adapter()


# ---- failure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", REPLACE_STEPS)
def test_a_failure_anywhere_poisons_with_its_cause_until_a_publication_succeeds(failing):
    world = World(adapter=True)
    world.publish(version=0)
    world.engine.state = EngineState.AWAKE
    world.recorder.failing = failing
    with pytest.raises(TransferError, match=f"{failing} broke"):
        world.publish(version=1)
    assert world.calls[-1] == failing
    assert world.engine.cause == f"publishing version 1 failed: {failing} broke"
    assert not world.publisher.is_current
    assert [publication.version for publication in world.publisher.published] == [0]
    world.recorder.failing = None
    world.publish(version=1)
    assert world.publisher.is_current
    assert world.engine.cause is None
    assert world.engine.adapters == ["policy@1"]


def test_the_old_version_is_not_current_again_after_a_failure():
    world = World()
    world.publish(version=3)
    world.recorder.failing = "transfer"
    with pytest.raises(TransferError):
        world.publish(version=3)
    assert not world.publisher.is_current


# ---- the check before a rollout ------------------------------------------------------------------------------------


def test_the_check_compares_what_is_shared_and_asks_no_one_else():
    world = World(transport="shared")
    world.publisher.check()
    assert world.calls == ["verify"]
    copied = World(transport="local")
    copied.publisher.check()
    assert copied.calls == []


def test_weights_that_are_no_longer_shared_poison_the_engine():
    world = World(transport="shared")
    world.publish(version=2)
    world.transport.error = StaleWeights("norm.weight is no longer the engine's memory")
    with pytest.raises(StaleWeights, match=r"norm\.weight"):
        world.publisher.check()
    assert world.engine.cause == "norm.weight is no longer the engine's memory"
    assert not world.publisher.is_current


def test_a_merged_adapter_is_noticed_by_the_check():
    world = World(adapter=True)
    world.publish()

    def merged():
        raise StaleWeights("adapter default is merged")

    publisher = Publisher(world.engine, world.transport, world.trace, adapter=merged)
    with pytest.raises(StaleWeights, match="merged"):
        publisher.check()
    assert world.engine.cause == "adapter default is merged"


def test_without_verification_nothing_is_checked():
    world = World(transport="shared", adapter=True, verify=False)
    world.publisher.check()
    assert world.calls == []


def test_publications_are_counted_for_ever_and_the_last_ones_remembered(monkeypatch):
    monkeypatch.setattr(publish, "MOST_PUBLICATIONS", 3)
    world = World()
    for version in range(5):
        world.publish(version)
    publisher = world.publisher
    assert [publication.version for publication in publisher.published] == [2, 3, 4]
    assert (publisher.num_published, publisher.bytes_synced) == (5, 200)


# ---- writes that torch does not count ------------------------------------------------------------------------------


class Sharded(ModuleSource):
    """A source whose parts lie in this rank, one of one."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 2))
        self.is_sharded = True


def test_contents_are_compared_from_when_they_were_noted_and_for_that_version_alone():
    world = World()
    weight = world.transport.source.model.weight
    assert not world.publisher.has_other_contents(), "none have been noted"
    world.publish(0)
    world.publisher.note_contents()
    assert world.publisher.has_other_contents() is False
    weight.data.add_(1)
    assert world.publisher.has_other_contents() is True
    assert world.publisher.has_other_contents() is False, "what was found is noted"
    weight.data.add_(1)
    world.publisher.version = 1
    assert world.publisher.has_other_contents() is False, "another version is published anyway"
    world.publisher.note_contents()
    world.publisher.start_over()
    weight.data.add_(1)
    assert world.publisher.has_other_contents() is False


def test_contents_include_the_adapter():
    world = World(adapter=True)
    b = torch.ones(4, 2)
    world.adapter = AdapterWeights(a={"q": torch.ones(2, 4)}, b={"q": b}, scalings={"q": 1.0})
    world.publish(0)
    world.publisher.note_contents()
    assert world.publisher.has_other_contents() is False
    b.mul_(2)
    assert world.publisher.has_other_contents() is True


@pytest.mark.parametrize("why", ["not verified", "sharded"])
def test_contents_are_not_compared_where_nobody_checks_or_parts_are(why):
    world = World(verify=why != "not verified")
    if why == "sharded":
        world.transport.source = Sharded()
    world.publisher.note_contents()
    world.transport.source.model.weight.data.add_(1)
    assert world.publisher.has_other_contents() is False


def test_a_part_that_was_written_to_is_stale_until_it_is_published():
    world = World()
    source = world.transport.source = Sharded()
    assert not world.publisher.has_changed_shard(), "nothing has been published"
    for version in range(2):
        world.publish(version)
        assert world.publisher.has_changed_shard() is False
        world.publisher.check()
        source.model.bias.data.add_(1)
        assert world.publisher.has_changed_shard() is True
        with pytest.raises(StaleWeights, match="what lies in this rank of the weights is not what was published"):
            world.publisher.check()
        assert "not what was published" in world.engine.cause
    world.publisher.version = 2
    assert world.publisher.has_changed_shard() is False
    world.engine.weights_version = None
    world.publisher.version = 1
    world.publisher.check()


def test_without_parts_none_has_changed():
    world = World()
    world.publish(0)
    assert world.publisher.has_changed_shard() is False


@pytest.mark.parametrize("transport", ["local", "shared"])
def test_other_names_are_stale_for_the_transports_that_do_not_look_themselves(transport, monkeypatch):
    world = World(transport=transport)

    def other():
        raise StaleWeights("the model has 1 weights that it did not have")

    monkeypatch.setattr(world.transport.source, "check_names", other)
    if transport == "shared":
        world.publish(0)
        world.publisher.check()
        return
    with pytest.raises(StaleWeights, match="1 weights that it did not have"):
        world.publish(0)
    assert "transfer" not in world.calls and world.engine.cause.startswith("publishing version 0 failed: the model has")
    world.engine.cause = None
    with pytest.raises(StaleWeights, match="1 weights that it did not have"):
        world.publisher.check()
    assert world.engine.cause.startswith("the model has")


# ---- an engine that has lost what it was given, or may hold more ---------------------------------------------------


def test_an_engine_that_starts_over_is_given_base_and_adapter_anew():
    world = World(adapter=True, fingerprint=lambda: 7)
    world.publish(0)
    assert world.publish(1).num_bytes == 0
    world.engine.adapters.clear()
    world.publisher.start_over()
    assert world.publisher.adapter_name is None and world.publisher.has_adapter()
    assert world.publish(1).num_bytes == 40
    assert world.calls == ADAPTER_STEPS[1:]


def test_a_transfer_that_failed_once_is_not_taken_for_sent():
    world = World(adapter=True, fingerprint=lambda: 7)
    world.publish(0)
    world.transport.current = False
    world.recorder.failing = "transfer"
    with pytest.raises(TransferError):
        world.publish(1)
    world.recorder.failing, world.transport.current = None, True
    world.engine.weights_version = 0  # as a poisoned engine that is told its old version would say
    assert world.publish(1).num_bytes == 40


@pytest.mark.parametrize("is_there", [True, False])
def test_an_adapter_that_an_interrupt_may_have_left_is_removed_before_the_next(is_there):
    world = World(adapter=True)
    removed = []

    def remove(name):
        removed.append(name)
        if not is_there:
            raise ValueError(f"there is no adapter {name}")

    world.engine.remove_adapter = remove
    world.recorder.failing = "load_adapter"
    with pytest.raises(TransferError):
        world.publish(0)
    world.recorder.failing = None
    world.publish(0)
    assert removed == ["policy@0"]
    world.recorder.failing = "replace_adapter"
    with pytest.raises(TransferError):
        world.publish(1)
    world.recorder.failing = None
    world.publish(1)
    assert sorted(removed[1:]) == ["policy@0", "policy@1"]
    world.publish(2)
    assert len(removed) == 3
    world.publisher._uncertain.add("policy@9")
    world.publisher.start_over()
    world.publish(3)
    assert len(removed) == 3


def test_a_transport_that_is_never_current_is_refused_by_name_at_its_first_transfer():
    world = World()
    world.transport.current = False
    with pytest.raises(TransferError, match=r"transport local says right after its first transfer .* is_current\(\)"):
        world.publisher.publish()
    assert world.engine.weights_version is None and "is_current" in world.engine.cause
    world.transport.current = True
    world.publisher.publish()
    world.transport.current = False  # asked once: it may read all weights
    world.publisher.publish()
    assert world.engine.weights_version == 0
