"""An interrupt may come before or after what it meets was done in the workers: either way the next call is right."""

import pytest

from colo.engines.base import EngineStatus
from colo.engines.vllm.client.llm_link import OwnProcessLink
from colo.engines.vllm.client.memory import WorkerSegment
from colo.phases.phase import Residency

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741


class Workers:
    """Where a segment is in the workers, who move it, or do not, when they are interrupted."""

    def __init__(self):
        self.residency, self.error, self.does_move = R, None, True

    def why_it_stays(self, name):
        return "nailed"

    def before_move(self, segment, target):
        pass

    def begin_move(self, segment, target):
        error, self.error = self.error, None
        if error is None or self.does_move:
            self.residency = target
        if error is not None:
            raise error

    def wait_for(self, name):
        return 8 if self.residency is R else 0


@pytest.mark.parametrize("does_move", [True, False])
@pytest.mark.parametrize("away", [O, D])
def test_a_move_that_was_interrupted_can_be_repeated_and_undone(away, does_move):
    workers = Workers()
    segment = WorkerSegment(workers, "engine.kv_cache")
    segment.reset(8, away)
    workers.does_move = does_move
    for target in (away, R):
        workers.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            segment.begin(target)
        assert segment.residency is away, "what may be away counts as away"
        segment.begin(R).wait()
        assert (segment.residency, workers.residency, segment.device_bytes) == (R, R, 8)
        segment.begin(away).wait()
        assert (segment.residency, workers.residency, segment.device_bytes) == (away, away, 0)


def test_a_move_that_was_refused_has_not_happened():
    workers = Workers()
    segment = WorkerSegment(workers, "engine.kv_cache")
    segment.reset(8, D)
    workers.error, workers.does_move = ValueError("no"), False
    with pytest.raises(ValueError, match="no"):
        segment.begin(D)
    assert segment.residency is R


class VLLM:
    """A vLLM that is paused or not."""

    paused = False

    def sleep(self, level, mode):
        self.paused = True

    def wake_up(self, tags):
        self.paused = False


class Link(OwnProcessLink):
    """A link whose calls are interrupted once they have been made."""

    def __init__(self):
        self.status, self.llm, self.error = EngineStatus(lambda: ()), VLLM(), None

    def run(self, operation, function, *, deadline=True):
        function()
        error, self.error = self.error, None
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("refused")])
def test_a_pause_that_was_interrupted_is_undone_by_resume_and_one_that_was_refused_is_none(error):
    link = Link()
    link.error = error
    with pytest.raises(type(error)):
        link.pause()
    assert link.status.paused is isinstance(error, KeyboardInterrupt)
    link.pause()
    link.resume()
    assert (link.status.paused, link.llm.paused) == (False, False)


def test_a_resume_that_was_interrupted_can_be_repeated():
    link = Link()
    link.pause()
    link.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        link.resume()
    assert link.status.paused
    link.resume()
    assert not link.status.paused
