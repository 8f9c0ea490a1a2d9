"""SGLang's own server on a CPU as the engine: what is sampled is the trainer's, whole and with an adapter."""

import copy
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import colo
from colo.engine import AdapterWeights, Engine, EngineState
from colo.errors import BudgetError, PhaseError, StaleWeights, TransferError, Unsupported
from colo.rl.loop import GRPOConfig, Problem, grpo
from colo.testing import check_engine
from tests.integration.servers import Proxy, sharing, train_attached, train_step
from tests.integration.sglang_server import Server, needs_sglang
from tests.models import small_qwen3
from tests.warm import run_python

pytestmark = [needs_sglang, pytest.mark.slow]

CLOSE = 1e-4
DEADLINE_S = 120.0
ALL = {"max_tokens": 8, "ignore_eos": True}
PROMPTS = [[(7 * i + j * j) % 100 for j in range(20)] for i in range(4)]
FLAGS = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all")
FLAGS += ("--enable-deterministic-inference", "--enable-memory-saver", "--enable-weights-cpu-backup")
LOW = 25  # a token below it earns a reward, of 100


def config(**changes):
    common = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "dtype": "float32"}
    return small_qwen3(**(common | changes))


@pytest.fixture(scope="module")
def server(tmp_path_factory, randomize):
    folder = tmp_path_factory.mktemp("sglang")
    model = randomize(AutoModelForCausalLM.from_config(config(), dtype=torch.float32), seed=9)
    model.save_pretrained(folder / "checkpoint")
    started = Server(folder / "checkpoint", folder, *FLAGS)
    yield started
    started.end()


@pytest.fixture
def model(randomize):
    return randomize(AutoModelForCausalLM.from_config(config(), dtype=torch.float32))


@pytest.fixture
def share(server):
    with sharing(server, deadline_s=DEADLINE_S) as make:
        yield make


@torch.no_grad()
def draw_adapter(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.3, generator=generator)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_completions_follow_the_trainer(share, server, model, mismatch, monkeypatch):
    monkeypatch.setattr("colo.engines.buckets.BUCKET_BYTES", 40_000)  # several requests, as of a large model
    rt = share(model)
    assert isinstance(rt.engine, Engine) and rt.transport.name == "local"
    assert rt.engine.placement == f"an SGLang {server.version} server at {server.url}, weights in memory of its own"
    labels = []
    for step in range(3):
        completions = rt.generate(PROMPTS, **ALL)
        assert mismatch(model, completions) < CLOSE
        assert {c.weights_version for c in completions} == {step}
        assert {(len(c.token_ids), c.finish_reason, c.text) for c in completions} == {(8, "length", None)}
        assert [c.prompt_token_ids for c in completions] == [tuple(prompt) for prompt in PROMPTS]
        labels.append(server.label)
        train_step(rt)
    assert len(set(labels)) == 3
    assert all(p.num_bytes == sum(t.nbytes for t in model.parameters()) > 2 * 40_000 for p in rt.publications)
    with pytest.raises(Unsupported, match="weights cannot be shared: they are copied"):
        rt.engine.share_weights()
    rt.close()
    status, answers = server.ask("/generate", input_ids=[[1, 2]], sampling_params={"max_new_tokens": 2})
    assert status == 200 and len(answers[0]["output_ids"]) == 2, "the server goes on, for its other clients"


def way_elsewhere(name, folder):
    return colo.WeightsFolder(folder, shard_bytes=40_000) if name == "folder" else colo.Broadcast("127.0.0.1")


@pytest.mark.parametrize("way", ["folder", "broadcast"])
def test_a_server_elsewhere_follows_the_trainer(share, server, model, mismatch, way, tmp_path):
    through = way_elsewhere(way, tmp_path / "weights")
    rt = share(model, through=through)
    for step in range(3):
        with rt.rollout():
            completions = rt.generate(PROMPTS, **ALL)
        assert mismatch(model, completions) < CLOSE
        assert {c.weights_version for c in completions} == {step}
        train_step(rt)
    assert "on a device of its own" in rt.engine.placement
    assert {s.size_bytes for s in rt.engine.segments} == {0} and rt.engine.cache_bytes > 0
    if way == "folder":
        assert len(through.versions()) == 2 and len(list(through.versions()[-1].glob("*.safetensors"))) > 1
        late = AutoModelForCausalLM.from_pretrained(through.versions()[-1])
        with rt.rollout():  # publishes the last step, so that the version before is what `late` has
            through.check(through.versions()[-1])
        newest = AutoModelForCausalLM.from_pretrained(through.versions()[-1])
        mine, theirs = dict(model.named_parameters()), dict(newest.named_parameters())
        assert all(torch.equal(theirs[name], mine[name]) for name in mine)
        assert not torch.equal(next(late.parameters()), next(newest.parameters()))


def test_a_broadcast_that_nobody_took_is_not_taken_for_the_next(share, server, model, mismatch):
    proxy = Proxy(server.url)
    rt = share(model, url=proxy.url, through=colo.Broadcast("127.0.0.1"))
    rt.generate(PROMPTS, **ALL)
    train_step(rt)
    proxy.once("/update_weights_from_distributed", lambda handler: handler.answer(400, b'{"message": "no"}') or True)
    with pytest.raises(TransferError, match="the server refuses /update_weights_from_distributed: no"):
        rt.generate(PROMPTS, **ALL)
    first = rt.engine._way._broadcaster.name
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE and rt.engine._way._broadcaster.name != first
    rt.close()
    rt.engine.close()
    proxy.end()


def test_a_disk_that_fills_up_leaves_the_server_as_it_was(share, server, model, mismatch, monkeypatch, tmp_path):
    rt = share(model, through=colo.WeightsFolder(tmp_path))
    rt.generate(PROMPTS, **ALL)
    label = server.label
    train_step(rt)
    with monkeypatch.context() as full:
        full.setattr("colo.engines.elsewhere.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(BudgetError, match="keep fewer versions"):
            rt.generate(PROMPTS, **ALL)
    assert server.label == label and len(list(tmp_path.iterdir())) == 1
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE


def test_samples_seeds_temperatures_and_stops(share, model, mismatch):
    rt = share(model)
    sampled = rt.generate([PROMPTS[0]] * 3, n=2, seed=3, **ALL)
    assert [(c.prompt_index, c.sample_index) for c in sampled] == [(p, s) for p in range(3) for s in range(2)]
    assert len({c.token_ids for c in sampled}) == 6 and mismatch(model, sampled) < CLOSE
    again = rt.generate([PROMPTS[0]] * 3, n=2, seed=3, **ALL)
    assert [c.token_ids for c in again] == [c.token_ids for c in sampled]
    assert not {c.token_ids for c in sampled} & {c.token_ids for c in rt.generate([PROMPTS[0]], n=2, seed=4, **ALL)}
    many = rt.generate([[i % 100, 5] for i in range(40)], n=2, max_tokens=2, ignore_eos=True)
    assert [c.prompt_token_ids for c in many] == [(i % 100, 5) for i in range(40) for _ in range(2)]
    (warm,) = rt.generate([PROMPTS[1]], temperature=0.7, seed=1, **ALL)
    ids = torch.tensor([warm.prompt_token_ids + warm.token_ids])
    with torch.no_grad():
        expected = (model(ids).logits[0, 19:-1] / 0.7).log_softmax(-1).gather(-1, ids[0, 20:, None])[:, 0]
    assert torch.tensor(warm.logprobs) == pytest.approx(expected, abs=CLOSE)
    (greedy,) = rt.generate([PROMPTS[1]], temperature=0, **ALL)
    assert mismatch(model, [greedy]) < CLOSE
    stop = greedy.token_ids[0]
    (ended,) = rt.generate([PROMPTS[1]], max_tokens=4, temperature=0, stop_token_ids=(stop,))
    with pytest.raises(Unsupported, match="SGLang ignores stop_token_ids where it ignores the model's own end"):
        rt.generate([PROMPTS[1]], stop_token_ids=(stop,), ignore_eos=True)
    assert (ended.token_ids, ended.finish_reason) == ((stop,), "stop")
    (full,) = rt.generate([[1] * 120], max_tokens=100, ignore_eos=True)
    assert 1 <= len(full.token_ids) <= 8 and full.finish_reason == "length", "where the positions end"


def test_what_the_server_would_not_survive_or_heed_is_refused_first(share, model):
    rt = share(model)
    for prompts, words in (([[100]], "token id 100, outside the vocabulary of 100"), ([[]], "prompt 0 is empty")):
        with pytest.raises(ValueError, match=words):
            rt.generate(prompts)
    with pytest.raises(ValueError, match="prompt 0 has 123 tokens, the model knows 123 positions"):
        rt.generate([[1] * 123])
    with pytest.raises(Unsupported, match="log-probabilities leave top_p out"):
        rt.generate([[1]], top_p=0.5)
    with pytest.raises(ValueError, match="no adapter 'x'"):
        rt.engine.resume() or rt.engine.generate([[1]], colo.SamplingParams(), adapter="x")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 128}, r"the server's model has \(100, 64\): model.embed_tokens.weight \(128, 64\)"),
        ({"intermediate_size": 64}, r"the server's model has \(128, 64\): .*gate_proj.weight \(64, 64\)"),
        ({"tie_word_embeddings": False}, "its output layer is its embedding, and the model's is not"),
        ({"num_hidden_layers": 3}, r"the server's model does not have it: model.layers.2"),
        ({"num_hidden_layers": 1}, r"the model has no model.layers.1.* one of 11 weights"),
        ({"attention_bias": True}, r"does not have it: model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_another_model_is_refused_before_a_byte_is_sent(share, server, changes, words):
    other = AutoModelForCausalLM.from_config(config(**changes), dtype=torch.float32)
    before = server.label, server.ask("/weights_checker", action="checksum")[1]["ranks"]
    with pytest.raises(TransferError, match=words):
        share(other)
    assert (server.label, server.ask("/weights_checker", action="checksum")[1]["ranks"]) == before


# ---- other clients ---------------------------------------------------------------------------------------------------


def test_a_session_that_another_client_has_left_open_is_closed_first(share, server, model, mismatch):
    rt = share(model)
    assert server.ask("/begin_weight_update") == (200, {"success": True, "message": "Success"})
    train_step(rt)
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE


def test_of_two_trainers_each_samples_from_its_own_weights_or_not_at_all(share, server, model, mismatch):
    rt, other = share(model), copy.deepcopy(model)
    train_step(rt)
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE
    second = share(other)
    assert mismatch(other, second.generate(PROMPTS, **ALL)) < CLOSE
    with pytest.raises(StaleWeights, match="another trainer has published to it"):
        rt.generate(PROMPTS, **ALL)
    assert rt.engine.weights_version is None
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE, "the next publication heals"
    with pytest.raises(StaleWeights, match="started again, or another trainer"):
        second.generate(PROMPTS, **ALL)
    assert mismatch(other, second.generate(PROMPTS, **ALL)) < CLOSE


def test_completions_that_began_before_another_trainer_wrote_are_not_returned(share, server, model):
    rt = share(model)
    proxy = Proxy(server.url)
    taken = share(copy.deepcopy(model), proxy.url)
    train_step(taken)

    def publish(_):
        train_step(rt)
        with rt.rollout():
            pass
        rt.engine.resume()  # or the request would wait for this trainer
        return False

    with taken.rollout():
        proxy.once("/generate", publish)
        with pytest.raises(StaleWeights, match="another trainer has published to it"):
            taken.generate(PROMPTS, **ALL)
    proxy.end()


def test_a_request_in_flight_goes_on_after_a_publication_and_says_which_weights_made_what(share, server, model):
    rt = share(model)
    rt.engine.resume()
    body = {"input_ids": PROMPTS[:1], "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, "/generate", **body)
        time.sleep(0.2)
        train_step(rt)
        with rt.rollout():
            pass
        rt.engine.resume()
        _, (answer,) = asked.result()
    spans = answer["meta_info"]["weight_versions"]
    assert len(answer["output_ids"]) == 100 and spans[-1]["end"] == 100
    assert 1 <= len(spans) <= 2


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_kv_cache_leaves_for_training_and_a_publication_comes_while_it_is_away(share, server, model, mismatch):
    rt = share(model)
    sizes = {segment.name: segment.size_bytes for segment in rt.engine.segments}
    assert sizes == {
        "engine.weights": sum(p.nbytes for p in model.parameters()),
        "engine.kv_cache": 8192 * 2 * 2 * 2 * 16 * 4,
    }
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE
    for level in ("keep-weights", 1, 2):
        train_step(rt)
        rt.engine.sleep(level)
        assert rt.engine.state is EngineState.ASLEEP and " asleep:kv_cache" in server.label
        with pytest.raises(PhaseError, match="the engine is asleep and cannot generate"):
            rt.engine.generate([[1]], colo.SamplingParams())
        rt.engine.sleep(level)
        assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE
        assert "asleep" not in server.label


def test_it_does_what_an_engine_says(server, model):
    engine = colo.connect(server.url, device="cpu", deadline_s=DEADLINE_S)
    engine.load_weights(model.named_parameters())
    check_engine(engine, PROMPTS[0])


def test_what_a_client_that_died_has_put_to_sleep_is_there_for_the_next(share, server, model, mismatch):
    died = colo.connect(server.url, device="cpu", deadline_s=DEADLINE_S)
    died.sleep(2)
    assert server.label.endswith(" asleep:kv_cache,weights")
    rt = share(model)
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE
    died.close()
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapted(model, **changes):
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": modules} | changes))


PART = {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]}  # of what the server fuses


@pytest.mark.parametrize("changes", [{}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}}, PART])
def test_versions_of_an_adapter_reach_the_server_and_the_base_once(share, model, mismatch, changes):
    peft = adapted(model, **changes)
    rt = share(peft)
    for version in range(3):
        draw_adapter(peft, version)
        completions = rt.generate(PROMPTS, **ALL)
        assert mismatch(peft, completions) < CLOSE
        with peft.disable_adapter():
            assert mismatch(peft, completions) > 0.1
        assert {c.adapter for c in completions} == {f"policy@{rt.weights_version}"}
        train_step(rt)
    base_bytes = [publication.num_bytes - publication.adapter_bytes for publication in rt.publications]
    assert base_bytes[0] > 0 and not any(base_bytes[1:])


def test_an_adapter_that_the_server_has_forgotten_is_given_again(share, server, model, mismatch):
    peft = adapted(model)
    draw_adapter(peft, 0)
    rt = share(peft)
    assert mismatch(peft, rt.generate(PROMPTS, **ALL)) < CLOSE
    for name in server.adapters:
        assert server.ask("/unload_lora_adapter", lora_name=name)[0] == 200
    with pytest.raises(StaleWeights, match="the server has forgotten the adapter 'policy@0'"):
        rt.generate(PROMPTS, **ALL)
    assert mismatch(peft, rt.generate(PROMPTS, **ALL)) < CLOSE
    assert len(server.adapters) == 1


def test_an_adapter_that_the_server_cannot_apply_is_refused(share, server, model):
    with pytest.raises(Unsupported, match="rank 16: start the server with --max-lora-rank 16"):
        share(adapted(copy.deepcopy(model), r=16))
    rt = share(model)
    a, b = {"model.norm": torch.zeros(1, 64)}, {"model.norm": torch.zeros(64, 1)}
    norm = AdapterWeights(a=a, b=b, scalings={"model.norm": 1.0})
    with pytest.raises(Unsupported, match="cannot adapt model.norm"):
        rt.engine.load_adapter("one", norm)
    with pytest.raises(ValueError, match="no adapter 'one'"):
        rt.engine.remove_adapter("one")


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_grpo_learns_on_the_server(share, randomize, lora):
    model = randomize(AutoModelForCausalLM.from_config(config(), dtype=torch.float32), std=0.1)
    rt = share(adapted(model, r=8) if lora else model, lr=2e-2 if lora else 5e-3)
    generator = torch.Generator().manual_seed(0)
    batches = [
        [Problem(prompt=tuple(torch.randint(0, 100, (6,), generator=generator).tolist())) for _ in range(4)]
        for _ in range(30)
    ]
    settings = GRPOConfig(group_size=8, max_tokens=12)
    history = list(grpo(rt, batches, lambda c, _: sum(t < LOW for t in c.token_ids) / len(c.token_ids), settings))
    first, last = ([step["reward"] for step in part] for part in (history[:3], history[-3:]))
    assert sum(last) / 3 > sum(first) / 3 + 0.25
    assert max(step["mismatch"] for step in history) < CLOSE


@pytest.mark.parametrize("lora", [None, LoraConfig(r=8, target_modules="all-linear")], ids=["full", "lora"])
def test_a_trainer_of_trls_is_attached_to_the_server(server, model, tmp_path, lora):
    rt, steps = train_attached(server.url, model, tmp_path, lambda token: token < LOW, lora)
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in steps)
    rt.close()


def test_the_example_learns(server, tmp_path):
    command = [Path(__file__).parents[2] / "examples" / "server_grpo.py", "--device", "cpu"]
    command += ["--url", server.url, "--model", server.folder, "--learning-rate", "5e-3"]
    done = run_python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^step +\d+  reward (\d\.\d\d)  apart (\S+)$", done.stdout, re.MULTILINE)
    assert float(told[-1][0]) > float(told[0][0]) + 0.1
    assert max(float(apart) for _, apart in told) < CLOSE
    assert f"an SGLang {server.version} server at {server.url}" in done.stdout
