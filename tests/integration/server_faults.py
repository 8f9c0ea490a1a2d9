"""Faults that every server can meet; a subclass says with which requests its own publishes, and when it has healed."""

import signal
from contextlib import contextmanager

import pytest
import torch
from torch.optim import AdamW

import colo
from colo.engine import EngineState
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError
from tests.integration.servers import fails, kill, stop, train_step, truncated

PROMPTS = [[(7 * i + j * j) % 100 for j in range(20)] for i in range(4)]


@contextmanager
def connected(served, model, **how):
    """A runtime over the address of `served`, whose server is started if it has ended."""
    if not served.is_alive:
        served.start()
    served.proxy.faults.clear()
    engine = colo.connect(served.proxy.url, device="cpu", **how)
    rt = colo.share(engine, model, AdamW(model.parameters(), lr=1e-2))
    yield rt
    served.proxy.faults.clear()
    rt.close()
    engine.close()


class ServerFaults:
    """For a module with the fixtures `served` and `rt`. A subclass has `sampling`, options that its server takes."""

    deadline_s = 60.0
    steps = stalls = kills = ()
    """Paths: requests of a publication, those at which the server stands still, and at which it is killed."""

    def pytest_generate_tests(self, metafunc):
        for name, paths in (("step", self.steps), ("stall", self.stalls), ("kill_at", self.kills)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, paths)

    def assert_heals(self, rt, served, mismatch):
        raise NotImplementedError

    def version_after(self, step):
        """The engine's version after an error at a step."""
        return

    def worker(self, server):
        """The process of a server that stands still when it is stopped."""
        raise NotImplementedError

    def assert_poisoned(self, rt):
        assert rt.engine.weights_version is None
        with pytest.raises((StaleWeights, EngineLost)):
            rt.engine.generate(PROMPTS, colo.SamplingParams(**self.sampling))

    def test_an_error_500_at_a_step_poisons_and_names_it_and_the_next_publication_heals(
        self, rt, served, mismatch, step
    ):
        train_step(rt)
        served.proxy.once(step, fails)
        with pytest.raises(TransferError, match=f"refuses {step}: out of luck"):
            rt.generate(PROMPTS, **self.sampling)
        assert rt.engine.weights_version == self.version_after(step) and rt.engine.state is not EngineState.LOST
        self.assert_heals(rt, served, mismatch)

    def test_an_answer_that_breaks_off_loses_the_engine_until_it_recovers(self, rt, served, mismatch, step):
        train_step(rt)
        served.proxy.once(step, truncated)
        with pytest.raises(EngineLost, match=f"did not answer {step}"):
            rt.generate(PROMPTS, **self.sampling)
        self.assert_poisoned(rt)
        rt.recover()
        self.assert_heals(rt, served, mismatch)

    def test_an_error_500_to_a_generation_is_no_version(self, rt, served, mismatch):
        self.assert_heals(rt, served, mismatch)
        served.proxy.once("/generate", fails)
        with pytest.raises(TransferError, match="the server does not generate: out of luck"):
            rt.generate(PROMPTS, **self.sampling)
        served.proxy.once("/generate", truncated)
        with pytest.raises(EngineLost, match="did not answer /generate"):
            rt.generate(PROMPTS, **self.sampling)
        rt.recover()
        self.assert_heals(rt, served, mismatch)

    def test_a_server_that_stands_still_past_the_deadline_is_lost_and_recovers_when_it_goes_on(
        self, rt, served, mismatch, monkeypatch, stall
    ):
        monkeypatch.setattr(rt.engine._server, "_deadline_s", 5.0)
        train_step(rt)
        worker = self.worker(served.server)
        served.proxy.once(stall, stop(worker))
        try:
            with pytest.raises(EngineLost, match="did not answer .* within 5 s"):
                rt.generate(PROMPTS, **self.sampling)
            self.assert_poisoned(rt)
            with pytest.raises(EngineLost):
                rt.recover()
        finally:
            worker.send_signal(signal.SIGCONT)
        monkeypatch.setattr(rt.engine._server, "_deadline_s", self.deadline_s)
        rt.recover()
        self.assert_heals(rt, served, mismatch)

    def test_a_server_killed_at_a_step_and_started_on_another_checkpoint_gets_the_weights_again(
        self, rt, served, mismatch, kill_at
    ):
        self.assert_heals(rt, served, mismatch)
        train_step(rt)
        served.proxy.once(kill_at, kill(served.server))
        with pytest.raises(EngineLost, match=f"did not answer {kill_at}"):
            rt.generate(PROMPTS, **self.sampling)
        self.assert_poisoned(rt)
        with pytest.raises(EngineLost, match="no server answers at"):
            rt.recover()
        served.start()
        rt.recover()
        self.assert_heals(rt, served, mismatch)

    def test_a_server_that_was_seen_to_end_recovers_although_nothing_has_asked_it_since(self, rt, served, mismatch):
        self.assert_heals(rt, served, mismatch)
        with pytest.raises(PhaseError, match="the engine is not lost: nothing to recover"):
            rt.recover()
        served.server.end()
        with pytest.raises(EngineLost, match="no server answers at"):
            rt.recover()
        for _ in range(2):  # and one that has been started again already
            served.start()
            rt.recover()
            self.assert_heals(rt, served, mismatch)

    def test_a_weight_that_makes_logits_that_are_not_numbers_is_named(self, rt, served, mismatch):
        weight = rt.model.model.layers[1].mlp.down_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[0].fill_(float("nan"))
        with pytest.raises(
            FloatingPointError, match=r"layers\.1\.mlp\.down_proj\.weight .* has 128 values that are NaN"
        ):
            rt.generate([[1, 2, 3]], max_tokens=4)
        with torch.no_grad():
            weight.copy_(kept)
        self.assert_heals(rt, served, mismatch)
