"""Faults, each caused against SGLang's own server: nothing stale is sampled, and the next publication heals."""

import signal

import pytest
import torch
from click.testing import CliRunner
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.cli import app
from colo.engine import EngineState
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from tests.integration.servers import Restarting, fails, kill, stop, truncated
from tests.integration.sglang_server import Server, needs_sglang
from tests.models import small_qwen3

pytestmark = [needs_sglang, pytest.mark.slow]

CLOSE = 1e-4
DEADLINE_S = 30.0
ALL = {"max_tokens": 6, "ignore_eos": True}
PROMPTS = [[(7 * i + j * j) % 100 for j in range(20)] for i in range(4)]
STEPS = (
    "/begin_weight_update",
    "/update_weight_version",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/flush_cache",
    "/weights_checker",
)
"""Requests of a publication that change the server or attest what it holds."""


def make_model(randomize, seed=0, **changes):
    config = small_qwen3(architectures=["Qwen3ForCausalLM"], dtype="float32", **changes)
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed=seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, randomize):
    """Checkpoints of one shape with other weights, and one of another shape."""
    made = [tmp_path_factory.mktemp("checkpoint") for _ in range(3)]
    for seed, folder in enumerate(made):
        make_model(randomize, seed + 10, **({"vocab_size": 128} if seed == 2 else {})).save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def served(folders, tmp_path_factory):
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
    engine = colo.connect(served.proxy.url, device="cpu", deadline_s=DEADLINE_S)
    made = colo.share(engine, model, AdamW(model.parameters(), lr=1e-2))
    yield made
    served.proxy.faults.clear()
    made.close()
    engine.close()


def train_step(rt):
    ids = torch.tensor([[1, 2, 3, 4]])
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def assert_poisoned(rt):
    assert rt.engine.weights_version is None
    with pytest.raises((StaleWeights, EngineLost)):
        rt.engine.generate(PROMPTS, colo.SamplingParams(**ALL))


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STEPS)
def test_an_error_500_at_a_step_poisons_and_names_it_and_the_next_publication_heals(rt, served, mismatch, path):
    train_step(rt)
    served.proxy.once(path, fails)
    with pytest.raises(TransferError, match=f"refuses {path}: out of luck"):
        rt.generate(PROMPTS, **ALL)
    # the cache is flushed as the rollout begins, too, when nothing has been written yet
    assert rt.engine.weights_version is (0 if path == "/flush_cache" else None)
    assert rt.engine.state is not EngineState.LOST
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE


@pytest.mark.parametrize("path", STEPS)
def test_an_answer_that_breaks_off_loses_the_engine_until_it_recovers(rt, served, mismatch, path):
    train_step(rt)
    served.proxy.once(path, truncated)
    with pytest.raises(EngineLost, match=f"did not answer {path}"):
        rt.generate(PROMPTS, **ALL)
    assert_poisoned(rt)
    rt.recover()
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE


def test_a_bucket_that_the_server_says_it_took_and_did_not_is_noticed(rt, served, mismatch):
    def swallow(handler):
        handler.answer(200, b'{"success": true}')
        return True

    train_step(rt)
    served.proxy.once("/update_weights_from_tensor", swallow)
    with pytest.raises(TransferError, match="parameters of the server are not what was sent, model.embed_tokens"):
        rt.generate(PROMPTS, **ALL)
    assert rt.engine.weights_version is None
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE


def test_an_error_500_to_a_generation_is_no_version(rt, served, mismatch):
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE
    served.proxy.once("/generate", fails)
    with pytest.raises(TransferError, match="the server does not generate: out of luck"):
        rt.generate(PROMPTS, **ALL)
    served.proxy.once("/generate", truncated)
    with pytest.raises(EngineLost, match="did not answer /generate"):
        rt.generate(PROMPTS, **ALL)
    rt.recover()
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/generate"])
def test_a_scheduler_that_stands_still_past_the_deadline_is_lost_and_recovers_when_it_goes_on(
    rt, served, mismatch, monkeypatch, path
):
    monkeypatch.setattr(rt.engine._server, "_deadline_s", 5.0)
    train_step(rt)
    scheduler = served.server.scheduler()
    served.proxy.once(path, stop(scheduler))
    try:
        with pytest.raises(EngineLost, match="did not answer .* within 5 s"):
            rt.generate(PROMPTS, **ALL)
        assert_poisoned(rt)
        with pytest.raises(EngineLost):
            rt.recover()
    finally:
        scheduler.send_signal(signal.SIGCONT)
    monkeypatch.setattr(rt.engine._server, "_deadline_s", DEADLINE_S)
    rt.recover()
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/weights_checker", "/generate"])
def test_a_server_killed_at_a_step_and_started_on_another_checkpoint_gets_the_weights_again(rt, served, mismatch, path):
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE
    train_step(rt)
    served.proxy.once(path, kill(served.server))
    with pytest.raises(EngineLost, match=f"did not answer {path}"):
        rt.generate(PROMPTS, **ALL)
    assert_poisoned(rt)
    with pytest.raises(EngineLost, match="no server answers at"):
        rt.recover()
    served.start()
    rt.recover()
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE


def test_another_server_in_the_place_of_the_one_that_was_published_to_is_noticed(rt, served, mismatch):
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE
    served.start()
    with pytest.raises(StaleWeights, match="holds weights of 'default' and not of 'colo-"):
        rt.generate(PROMPTS, **ALL)
    assert rt.engine.weights_version is None
    assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE
    served.start(folder=served.folders[2])
    with pytest.raises(StaleWeights, match="holds weights of 'default'"):
        rt.generate(PROMPTS, **ALL)
    with pytest.raises(TransferError, match="has another model than when it was connected to"):
        rt.generate(PROMPTS, **ALL)
    assert served.server.label == "default", "no byte was sent"
    served.server.end()


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_a_server_with_keys_is_told_apart_and_says_what_it_lacks(served, randomize, mismatch):
    served.start("--api-key", "one", "--admin-api-key", "two", "--dtype", "bfloat16")
    url = served.proxy.url
    with pytest.raises(Unsupported, match="wants a key: pass api_key"):
        colo.connect(url, device="cpu")
    keys = {"api_key": "one", "admin_key": "two"}
    model = make_model(randomize)
    engine = colo.connect(url, device="cpu", **keys)
    with colo.share(engine, model, AdamW(model.parameters())) as rt:
        assert mismatch(model, rt.generate(PROMPTS, **ALL)) < 0.5, "it samples in 16 bits, from weights that were cast"
        with pytest.raises(Unsupported, match="ignores seeds: start it with --enable-deterministic-inference"):
            rt.generate(PROMPTS, seed=1, **ALL)
        with pytest.raises(PhaseError, match="memory that stays .start the server with --enable-memory-saver"):
            rt.engine.sleep(2)
    told = CliRunner().invoke(app, ["connect", url, "--api-key", "one", "--admin-key", "two", "--device", "cpu"])
    assert told.exit_code == 0, told.output
    for words in ("SGLang 0.5.21", "--enable-memory-saver", "--enable-lora", "--enable-deterministic-inference"):
        assert words in told.output
