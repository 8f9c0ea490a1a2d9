"""Faults, each caused against LMDeploy's own server: nothing stale is sampled, and the next publication heals."""

import pytest
from torch.optim import AdamW

import colo
from colo.errors import StaleWeights, TransferError, Unsupported
from tests.integration.lmdeploy_server import Server, as_held, digests, make_model, needs_lmdeploy, save
from tests.integration.server_faults import PROMPTS, ServerFaults, connected
from tests.integration.servers import START_S, Restarting, train_step

pytestmark = [needs_lmdeploy, pytest.mark.slow]

CLOSE = 1e-4
ALL = {"max_tokens": 4}


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
    how = {"model_name": str(served.folders[0]), "deadline_s": TestFaults.deadline_s}
    with connected(served, make_model(randomize), **how) as rt:
        yield rt


def assert_heals(rt, served, mismatch):
    assert mismatch(as_held(rt.model), rt.generate(PROMPTS, **ALL)) < CLOSE
    assert served.server.held == digests(rt.model) and served.server.asleep == set()


class TestFaults(ServerFaults):
    sampling = ALL
    steps = ("/sleep", "/wakeup", "/update_weights")
    stalls = kills = ("/update_weights", "/generate")

    def assert_heals(self, rt, served, mismatch):
        assert_heals(rt, served, mismatch)

    def worker(self, server):
        return server.main


def test_a_tag_that_the_server_says_nothing_of_and_has_not_woken_is_noticed(rt, served, mismatch):
    def swallow(handler):
        handler.answer(200, b"")
        return True

    train_step(rt)
    served.proxy.once("/wakeup", swallow)
    with pytest.raises(TransferError, match="the server has been told to wake weights, and sleeps"):
        rt.generate(PROMPTS, **ALL)
    assert_heals(rt, served, mismatch)


def test_another_server_in_the_place_of_the_one_that_was_published_to_is_noticed(rt, served, mismatch, monkeypatch):
    assert_heals(rt, served, mismatch)
    served.start()
    with pytest.raises(StaleWeights, match="has been started again since weights were published to it"):
        rt.generate(PROMPTS, **ALL)
    assert rt.engine.weights_version is None
    assert_heals(rt, served, mismatch)
    train_step(rt)
    with rt.rollout(), monkeypatch.context() as patient:
        patient.setattr(rt.engine._server, "_deadline_s", START_S)  # the server is started within the request
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
