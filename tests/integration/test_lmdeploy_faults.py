"""Faults, each caused against LMDeploy's own server: nothing stale is sampled, and the next publication heals."""

import signal

import pytest
from torch.optim import AdamW

import colo
from colo.engine import EngineState
from colo.errors import EngineLost, StaleWeights, TransferError, Unsupported
from tests.integration.lmdeploy_server import Server, as_held, digests, make_model, needs_lmdeploy, save, train_step
from tests.integration.servers import Restarting, fails, kill, stop, truncated

pytestmark = [needs_lmdeploy, pytest.mark.slow]

CLOSE = 1e-4
DEADLINE_S = 60.0
ALL = {"max_tokens": 4}
PROMPTS = [[(7 * i + j * j) % 100 for j in range(20)] for i in range(2)]
STEPS = ("/sleep", "/wakeup", "/update_weights")
"""Requests of a publication that change the server."""


@pytest.fixture(scope="module")
def served(tmp_path_factory, randomize):
    """A server behind an address that stays, and checkpoints: two of one shape, the last one of another."""
    changes = ({}, {}, {"vocab_size": 128})
    folders = [
        save(make_model(randomize, seed + 10, **changed), tmp_path_factory.mktemp("checkpoint"))
        for seed, changed in enumerate(changes)
    ]
    made = Restarting(Server, folders, tmp_path_factory.mktemp("logs"))
    yield made
    made.server.end()
    made.proxy.end()


@pytest.fixture
def rt(served, randomize):
    if not served.is_alive:
        served.start()
    served.proxy.faults.clear()
    model = make_model(randomize)
    engine = colo.connect(served.proxy.url, model_name=str(served.folders[0]), device="cpu", deadline_s=DEADLINE_S)
    made = colo.share(engine, model, AdamW(model.parameters(), lr=1e-2))
    yield made
    served.proxy.faults.clear()
    made.close()
    engine.close()


def assert_poisoned(rt):
    assert rt.engine.weights_version is None
    with pytest.raises((StaleWeights, EngineLost)):
        rt.engine.generate(PROMPTS, colo.SamplingParams(**ALL))


def assert_heals(rt, served, mismatch):
    assert mismatch(as_held(rt.model), rt.generate(PROMPTS, **ALL)) < CLOSE
    assert served.server.held == digests(rt.model) and served.server.asleep == set()


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STEPS)
def test_an_error_500_at_a_step_poisons_and_names_it_and_the_next_publication_heals(rt, served, mismatch, path):
    train_step(rt)
    served.proxy.once(path, fails)
    with pytest.raises(TransferError, match=f"refuses {path}: out of luck"):
        rt.generate(PROMPTS, **ALL)
    assert rt.engine.weights_version is None and rt.engine.state is not EngineState.LOST
    assert_heals(rt, served, mismatch)


@pytest.mark.parametrize("path", STEPS)
def test_an_answer_that_breaks_off_loses_the_engine_until_it_recovers(rt, served, mismatch, path):
    train_step(rt)
    served.proxy.once(path, truncated)
    with pytest.raises(EngineLost, match=f"did not answer {path}"):
        rt.generate(PROMPTS, **ALL)
    assert_poisoned(rt)
    rt.recover()
    assert_heals(rt, served, mismatch)


def test_a_tag_that_the_server_says_nothing_of_and_has_not_woken_is_noticed(rt, served, mismatch):
    def swallow(handler):
        handler.answer(200, b"")
        return True

    train_step(rt)
    served.proxy.once("/wakeup", swallow)
    with pytest.raises(TransferError, match="the server has been told to wake weights, and sleeps"):
        rt.generate(PROMPTS, **ALL)
    assert_heals(rt, served, mismatch)


def test_an_error_500_to_a_generation_is_no_version(rt, served, mismatch):
    assert_heals(rt, served, mismatch)
    served.proxy.once("/generate", fails)
    with pytest.raises(TransferError, match="the server does not generate: out of luck"):
        rt.generate(PROMPTS, **ALL)
    served.proxy.once("/generate", truncated)
    with pytest.raises(EngineLost, match="did not answer /generate"):
        rt.generate(PROMPTS, **ALL)
    rt.recover()
    assert_heals(rt, served, mismatch)


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/update_weights", "/generate"])
def test_a_server_that_stands_still_past_the_deadline_is_lost_and_recovers_when_it_goes_on(
    rt, served, mismatch, monkeypatch, path
):
    monkeypatch.setattr(rt.engine._server, "_deadline_s", 5.0)
    train_step(rt)
    served.proxy.once(path, stop(served.server.main))
    try:
        with pytest.raises(EngineLost, match="did not answer .* within 5 s"):
            rt.generate(PROMPTS, **ALL)
        assert_poisoned(rt)
        with pytest.raises(EngineLost):
            rt.recover()
    finally:
        served.server.main.send_signal(signal.SIGCONT)
    monkeypatch.setattr(rt.engine._server, "_deadline_s", DEADLINE_S)
    rt.recover()
    assert_heals(rt, served, mismatch)


@pytest.mark.parametrize("path", ["/update_weights", "/generate"])
def test_a_server_killed_at_a_step_and_started_on_another_checkpoint_gets_the_weights_again(rt, served, mismatch, path):
    assert_heals(rt, served, mismatch)
    train_step(rt)
    served.proxy.once(path, kill(served.server))
    with pytest.raises(EngineLost, match=f"did not answer {path}"):
        rt.generate(PROMPTS, **ALL)
    assert_poisoned(rt)
    with pytest.raises(EngineLost, match="no server answers at"):
        rt.recover()
    served.start()
    rt.recover()
    assert_heals(rt, served, mismatch)


def test_another_server_in_the_place_of_the_one_that_was_published_to_is_noticed(rt, served, mismatch):
    assert_heals(rt, served, mismatch)
    served.start()
    with pytest.raises(StaleWeights, match="has been started again since weights were published to it"):
        rt.generate(PROMPTS, **ALL)
    assert rt.engine.weights_version is None
    assert_heals(rt, served, mismatch)
    train_step(rt)
    with rt.rollout():
        served.proxy.once("/generate", lambda _: served.start() and False)
        with pytest.raises(StaleWeights, match="has been started again"):
            rt.generate(PROMPTS[:1], **ALL)
    rt.engine._checkpoint = str(served.folders[2])
    before = served.server.held
    with pytest.raises(TransferError, match="has another model than when it was connected to"):
        rt.generate(PROMPTS, **ALL)
    assert served.server.held == before, "no byte was sent"
    served.server.end()


# ---- how it was started ----------------------------------------------------------------------------------------------


def test_a_server_with_a_key_is_told_apart_and_log_probabilities_that_it_lacks_are_named(served, randomize):
    served.start("--api-key", "one", "--logprobs-mode", "none", "--model-name", "served")
    url, path = served.proxy.url, str(served.folders[0])
    with pytest.raises(Unsupported, match="wants a key: pass api_key"):
        colo.connect(url, device="cpu")
    with pytest.raises(
        Unsupported, match="(?s)the config of served, which .* pass model_name= with the checkpoint's path"
    ):
        colo.connect(url, device="cpu", api_key="one")
    engine = colo.connect(url, model_name=path, device="cpu", api_key="one")
    assert engine.lacking_flags == {
        "--logprobs-mode raw_logprobs": "it gives no log-probabilities, and does not sample"
    }
    model = make_model(randomize)
    with (
        colo.share(engine, model, AdamW(model.parameters())) as rt,
        pytest.raises(Unsupported, match="gives no log-probabilities: start it with --logprobs-mode raw_logprobs"),
    ):
        rt.generate(PROMPTS, seed=1, **ALL)
    served.start("--logprobs-mode", "raw_logits")
    engine = colo.connect(url, model_name=path, device="cpu")
    with (
        colo.share(engine, model, AdamW(model.parameters())) as rt,
        pytest.raises(Unsupported, match="gives logits in place of log-probabilities"),
    ):
        rt.generate(PROMPTS, temperature=0, **ALL)
    served.server.end()
