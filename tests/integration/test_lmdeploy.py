"""LMDeploy's own server over an engine of a CPU: it holds the trainer's weights, and samples from them."""

import copy
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW

import colo
from colo.cli import app
from colo.engine import Engine, EngineState
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.rl.loop import GRPOConfig, Problem, grpo
from colo.testing import check_engine
from tests.integration.lmdeploy_server import Server, as_held, digests, make_model, needs_lmdeploy, save
from tests.integration.servers import sharing, train_attached, train_step
from tests.warm import run_python

pytestmark = [needs_lmdeploy, pytest.mark.slow]

CLOSE = 1e-4
DEADLINE_S = 120.0
PROMPTS = [[(7 * i + j * j) % 100 for j in range(20)] for i in range(4)]
LOW = 25  # a token below it earns a reward, of 100


@pytest.fixture(scope="module")
def server(tmp_path_factory, randomize):
    folder = tmp_path_factory.mktemp("lmdeploy")
    started = Server(save(make_model(randomize, seed=9), folder / "checkpoint"), folder)
    yield started
    started.end()


@pytest.fixture
def model(randomize):
    return make_model(randomize)


@pytest.fixture
def share(server):
    with sharing(server, deadline_s=DEADLINE_S) as make:
        yield make


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1 << 26, 3000])
def test_what_the_server_holds_is_the_trainers_byte_for_byte(share, server, model, mismatch, monkeypatch, bucket_bytes):
    monkeypatch.setattr("colo.engines.buckets.BUCKET_BYTES", bucket_bytes)
    rt = share(model)
    assert isinstance(rt.engine, Engine) and rt.transport.name == "local"
    held = []
    for step in range(3):
        completions = rt.generate(PROMPTS, max_tokens=8)
        assert server.held == digests(model) and server.asleep == set()
        assert mismatch(as_held(model), completions) < CLOSE
        assert {c.weights_version for c in completions} == {step}
        assert {(len(c.token_ids), c.finish_reason, c.text) for c in completions} == {(8, "length", None)}
        assert [c.prompt_token_ids for c in completions] == [tuple(prompt) for prompt in PROMPTS]
        held.append(server.held["model.norm.weight"])
        train_step(rt)
    assert len(set(held)) == 3
    with pytest.raises(Unsupported, match="weights cannot be shared: they are copied"):
        rt.engine.share_weights()


def test_a_server_with_checkpoint_engine_gets_weights_by_it(server, model, mismatch, tmp_path):
    """As every LMDeploy on one GPU without Ray does: it has no other way."""
    other = Server(server.folder, tmp_path, "--checkpoint-engine")
    try:
        with sharing(other, deadline_s=DEADLINE_S) as share:
            rt = share(model)
            assert rt.engine.way_of_weights.startswith("copied, by checkpoint-engine 0.4.2")
            for step in range(2):
                completions = rt.generate(PROMPTS, max_tokens=8)
                assert other.held == digests(model) and other.asleep == set()
                assert mismatch(as_held(model), completions) < CLOSE and completions[0].weights_version == step
                train_step(rt)
            other.end()
            with pytest.raises(EngineLost):
                rt.generate(PROMPTS, max_tokens=8)
    finally:
        other.end()


def test_samples_seeds_and_stops(share, model, mismatch):
    rt = share(model)
    drawn = rt.generate([PROMPTS[0]] * 3, n=2, max_tokens=8)
    assert [(c.prompt_index, c.sample_index) for c in drawn] == [(p, s) for p in range(3) for s in range(2)]
    assert len({c.token_ids for c in drawn}) == 6 and mismatch(as_held(model), drawn) < CLOSE
    sampled = rt.generate([PROMPTS[0]] * 3, n=2, seed=3, max_tokens=8)
    again = rt.generate([PROMPTS[0]] * 3, n=2, seed=3, max_tokens=8)
    assert [c.token_ids for c in again] == [c.token_ids for c in sampled] and mismatch(as_held(model), sampled) < CLOSE
    assert len({c.token_ids for c in sampled}) == 6 and {c.finish_reason for c in sampled} == {"length"}
    assert not {c.token_ids for c in sampled} & {c.token_ids for c in rt.generate([PROMPTS[0]], seed=4, max_tokens=8)}
    (greedy,) = rt.generate([PROMPTS[1]], temperature=0, max_tokens=8)
    assert mismatch(as_held(model), [greedy]) < CLOSE
    stop = greedy.token_ids[0]
    (ended,) = rt.generate([PROMPTS[1]], max_tokens=4, temperature=0, stop_token_ids=(stop,))
    assert (ended.token_ids, ended.finish_reason, ended.logprobs) == ((stop,), "stop", greedy.logprobs[:1])
    (full,) = rt.generate([[1] * 120], max_tokens=100)
    assert len(full.token_ids) == 8 and full.finish_reason == "length", "where the positions end"


def test_what_the_server_would_not_heed_is_refused_first(share, model):
    rt = share(model)
    for prompts, words in (([[100]], "token id 100, outside the vocabulary of 100"), ([[]], "prompt 0 is empty")):
        with pytest.raises(ValueError, match=words):
            rt.generate(prompts)
    with pytest.raises(ValueError, match="prompt 0 has 128 tokens, the model knows 128 positions.*--session-len"):
        rt.generate([[1] * 128])
    for options, words in (
        ({"top_p": 0.5}, "log-probabilities leave top_p out"),
        ({"temperature": 0.7}, "log-probabilities leave temperature out"),
        ({"ignore_eos": True}, "LMDeploy never samples what ends a sequence"),
        ({"seed": 1, "stop_token_ids": (1,)}, "seeds and stop_token_ids by different requests"),
    ):
        with pytest.raises(Unsupported, match=words):
            rt.generate([[1]], **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 128}, r"the server's model has \(100, 64\): model.embed_tokens.weight \(128, 64\)"),
        ({"tie_word_embeddings": True}, "the model has no lm_head.weight"),
        ({"num_hidden_layers": 1}, r"the model has no model.layers.1.* one of 11 weights"),
        ({"attention_bias": True}, r"does not have it: model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_another_model_is_refused_before_a_byte_is_sent(share, server, randomize, changes, words):
    before = server.held
    with pytest.raises(TransferError, match=words):
        share(make_model(randomize, **changes))
    assert server.held == before and server.asleep == set()


def test_what_is_not_sent_leaves_the_server_asleep(server, model):
    engine = colo.connect(server.url, device="cpu", deadline_s=DEADLINE_S)
    with pytest.raises(TransferError, match=r"nothing was sent for model.layers.0.*, 24 in all"):
        engine.load_weights([("model.embed_tokens.weight", model.model.embed_tokens.weight)])
    assert server.asleep == {"kv_cache"}, "it refuses everybody's requests"
    engine.close()
    assert server.asleep == {"kv_cache"}


def test_adapters_are_refused_and_folded_where_that_is_asked_for(share, server, model, mismatch):
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(Unsupported):
        share(peft)
    rt = share(peft, fold_adapter=True)
    merged = copy.deepcopy(peft).merge_and_unload()
    assert mismatch(as_held(merged), rt.generate(PROMPTS, max_tokens=8)) < CLOSE
    assert server.held == digests(merged)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_leaves_for_training_and_comes_back(share, server, model, mismatch):
    rt = share(model)
    sizes = {segment.name: segment.size_bytes for segment in rt.engine.segments}
    assert sizes["engine.weights"] == sum(p.nbytes for p in model.parameters()) // 2
    assert sizes["engine.kv_cache"] == 128 * 64 * 2 * 2 * 2 * 16 * 2
    assert mismatch(as_held(model), rt.generate(PROMPTS, max_tokens=8)) < CLOSE
    for level in ("keep-weights", 1, 2):
        rt.engine.sleep(level)
        assert rt.engine.state is EngineState.ASLEEP and server.asleep == {"weights", "kv_cache"}
        with pytest.raises(PhaseError, match="the engine is asleep and cannot generate"):
            rt.engine.generate([[1]], colo.SamplingParams())
        rt.engine.sleep(level)
        assert (rt.engine.weights_version is None) is (level == 2)
        assert mismatch(as_held(model), rt.generate(PROMPTS, max_tokens=8)) < CLOSE, "weights that it has kept, or anew"
        rt.engine.sleep(level)
        train_step(rt)
        assert mismatch(as_held(model), rt.generate(PROMPTS, max_tokens=8)) < CLOSE
        assert server.asleep == set()
    assert len(rt.publications) == 5


def test_it_does_what_an_engine_says(server, model):
    engine = colo.connect(server.url, device="cpu", deadline_s=DEADLINE_S)
    engine.load_weights(model.named_parameters())
    check_engine(engine, PROMPTS[0])


def test_what_another_client_does_with_its_memory_is_noticed(share, server, model, mismatch):
    server.tell("/sleep", level=2)
    rt = share(model)
    assert mismatch(as_held(model), rt.generate(PROMPTS, max_tokens=8)) < CLOSE
    with rt.rollout():
        server.tell("/sleep", level=1)
        with pytest.raises(StaleWeights, match="another client has put the server to sleep"):
            rt.generate(PROMPTS, max_tokens=8)
    assert mismatch(as_held(model), rt.generate(PROMPTS, max_tokens=8)) < CLOSE, "the next publication wakes it"
    rt.engine.sleep(1)
    server.tell("/wakeup")
    rt.engine.wake()
    assert rt.engine.weights_version is None
    assert mismatch(as_held(model), rt.generate(PROMPTS, max_tokens=8)) < CLOSE


def test_a_server_that_waits_for_its_trainer_gets_weights_and_is_woken(tmp_path, server, share, model, mismatch):
    late = Server(server.folder, tmp_path, "--empty-init")
    try:
        assert late.asleep == {"weights", "kv_cache"}
        engine = colo.connect(late.url, device="cpu", deadline_s=DEADLINE_S)
        assert engine.state is EngineState.ASLEEP
        with colo.share(engine, model, AdamW(model.parameters())) as rt:
            assert mismatch(as_held(model), rt.generate(PROMPTS, max_tokens=8)) < CLOSE
        assert late.held == digests(model) and late.asleep == set()
    finally:
        late.end()


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_the_server_is_recognized_and_says_what_cannot_be_attested(share, server, model):
    told = CliRunner().invoke(app, ["connect", server.url, "--device", "cpu"])
    assert told.exit_code == 0, told.output
    assert f"an LMDeploy server at {server.url}, weights in memory of its own; it attests neither" in told.output
    assert "weights: copied, within requests, while it sleeps; it has no checksums to compare" in told.output
    assert "without --" not in told.output
    assert "it attests neither their bytes nor their version" in str(share(model).report())


# ---- learning --------------------------------------------------------------------------------------------------------


def test_grpo_learns_on_the_server(share, randomize):
    model = make_model(lambda model, **_: randomize(model, std=0.1))
    rt = share(model, lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    batches = [
        [Problem(prompt=tuple(torch.randint(0, 100, (6,), generator=generator).tolist())) for _ in range(4)]
        for _ in range(12)
    ]
    settings = GRPOConfig(group_size=8, max_tokens=12)
    history = list(grpo(rt, batches, lambda c, _: sum(t < LOW for t in c.token_ids) / len(c.token_ids), settings))
    first, last = ([step["reward"] for step in part] for part in (history[:3], history[-3:]))
    assert sum(last) / 3 > sum(first) / 3 + 0.25
    assert max(step["mismatch"] for step in history) < 1e-2, "16 bits there, 32 here"


def test_a_trainer_of_trls_is_attached_to_the_server(server, model, tmp_path):
    rt, steps = train_attached(server.url, model, tmp_path, lambda token: token < LOW)
    assert all(entry["sampling/sampling_logp_difference/max"] < 5e-2 for entry in steps), "16 bits there, 32 here"
    rt.close()


def test_the_example_runs(server, tmp_path):
    command = [Path(__file__).parents[2] / "examples" / "server_grpo.py", "--device", "cpu"]
    command += ["--url", server.url, "--model", server.folder, "--learning-rate", "5e-3", "--steps", "2"]
    done = run_python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^step +\d+  reward (\d\.\d\d)  apart (\S+)$", done.stdout, re.MULTILINE)
    assert len(told) == 2 and max(float(apart) for _, apart in told) < 5e-2
    assert f"an LMDeploy server at {server.url}" in done.stdout
