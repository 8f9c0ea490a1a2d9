"""Faults, each caused against SGLang's own server: nothing stale is sampled, and the next publication heals."""

import pytest
import torch
from click.testing import CliRunner
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.cli import app
from colo.errors import PhaseError, StaleWeights, TransferError, Unsupported
from tests.integration.server_faults import PROMPTS, ServerFaults, connected
from tests.integration.servers import Restarting, train_step
from tests.integration.sglang_server import Server, needs_sglang
from tests.models import small_qwen3

pytestmark = [needs_sglang, pytest.mark.slow]

CLOSE = 1e-4
ALL = {"max_tokens": 6, "ignore_eos": True}


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
    with connected(served, make_model(randomize), deadline_s=TestFaults.deadline_s) as rt:
        yield rt


class TestFaults(ServerFaults):
    sampling = ALL
    deadline_s = 30.0
    steps = (
        "/begin_weight_update",
        "/update_weight_version",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/flush_cache",
        "/weights_checker",
    )
    stalls = ("/update_weights_from_tensor", "/generate")
    kills = ("/update_weights_from_tensor", "/weights_checker", "/generate")

    def version_after(self, step):
        """The cache is flushed as the rollout begins, too, when nothing has been written yet."""
        return 0 if step == "/flush_cache" else None

    def assert_heals(self, rt, served, mismatch):
        assert mismatch(rt.model, rt.generate(PROMPTS, **ALL)) < CLOSE

    def worker(self, server):
        return server.scheduler()


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
    for words in (
        f"SGLang {served.server.version}",
        "--enable-memory-saver",
        "--enable-lora",
        "--enable-deterministic-inference",
    ):
        assert words in told.output
