"""A vLLM server as an engine, without a server: one with a worker that answers by the book."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

import colo
from colo.engine import Engine, EngineState, SamplingParams
from colo.engines.connect import connect as colo_connect
from colo.engines.http import base_url
from colo.errors import BudgetError, EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.share import open_shared_memory
from colo.phases.phase import Residency
from colo.weights.transports.ipc import Peer
from tests.workers import worker_info

URL = "http://server"
DEADLINE_S = 2.0
GREEDY = {"temperature": 0, "max_tokens": 2}


class FakeServer:
    """A server with one worker, which does everything by the book."""

    def __init__(self, **told):
        self.told = worker_info().to_wire() | told
        self.held = {"engine.weights": self.told["weights_bytes"], "engine.kv_cache": self.told["kv_cache_bytes"]}
        self.sizes = dict(self.held)
        self.asked = []
        self.refuse = {}
        self.fails = {}
        self.num_workers = 1
        self.silent = False
        self.paused = False

    def __call__(self, request):
        path = request.url.path
        body = json.loads(request.content) if request.content else None
        if path == "/collective_rpc":
            self.asked.append(body["args"][0]["operation"])
        else:
            self.asked.append(path + (f"?{request.url.query.decode()}" if request.url.query else ""))
        if self.silent:
            raise httpx.ConnectError("All connection attempts failed")
        if path in self.refuse:
            return self.refuse[path]
        found = {
            "/version": lambda: {"version": "0.30.0"},
            "/is_paused": lambda: {"is_paused": self.paused},
            "/get_world_size": lambda: {"world_size": self.num_workers},
            "/v1/models": lambda: {"data": [{"id": "served"}]},
            "/reset_prefix_cache": lambda: {"success": "true" in str(request.url)},
            "/v1/completions": lambda: completions(body, self.told["max_length"]),
            "/collective_rpc": lambda: {"results": [self.answer(body["method"], *body["args"])]},
        }
        return httpx.Response(200, json=found.get(path, dict)())

    def answer(self, method, envelope):
        assert method == "colo"
        operation = envelope["operation"]
        if operation in self.fails:
            return {"error": self.fails[operation]}
        answer = getattr(self, operation, lambda client, **_: None)
        return {"value": answer(envelope["client"], **envelope["arguments"])}

    def describe(self, client, same_process, client_pid, probe, home):
        assert (same_process, client_pid) == (False, None)
        name = open_shared_memory(home, torch.device("cpu")).numpy().tobytes()
        assert name == client.encode(), "the worker can see that it is on the same machine"
        return self.told

    def begin(self, client, segment, target):
        self.held[segment] = self.sizes[segment] if target == "resident" else 0

    def wait(self, client, segment):
        return self.held[segment]

    def receive(self, client, steps):
        return {"num_tensors": 1}


def completions(body, max_length):
    assert body["model"] == "served" and body["logprobs"] == 0
    assert max(map(len, body["prompt"])) + body["max_tokens"] <= max_length, "vLLM answers 400"
    choices = [
        {"token_ids": [p[0], n], "logprobs": {"token_logprobs": [-0.5, -1.0]}, "finish_reason": "length", "text": ""}
        for p in body["prompt"]
        for n in range(body["n"])
    ]
    return {"choices": choices}


@pytest.fixture
def connect():
    """Makes engines over fake servers, and closes them."""
    made = []

    def make(server, **options):
        made.append(colo_connect(URL, device="cpu", deadline_s=DEADLINE_S, http=httpx.MockTransport(server), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        engine.close()
        assert engine.state is EngineState.CLOSED


def test_it_is_an_engine_and_a_peer_with_the_bytes_that_the_workers_tell(connect):
    engine = connect(FakeServer())
    assert isinstance(engine, Engine) and isinstance(engine, Peer)
    assert {s.name: s.size_bytes for s in engine.segments} == {"engine.weights": 1000, "engine.kv_cache": 600}
    assert engine.residual_bytes == {"CUDA graphs": 7}
    assert engine.model_type == "qwen3" and engine.pids == (os.getpid(),)
    assert engine.placement == "a vLLM 0.30.0 server at http://server, weights in memory of its own"


def test_it_starts_poisoned_and_a_commit_lets_it_generate(connect):
    engine = connect(FakeServer())
    with pytest.raises(StaleWeights, match="no weights have been committed yet"):
        engine.generate([[1]], SamplingParams())
    engine.commit(3)
    found = engine.generate([[number] for number in range(70)], SamplingParams(n=2, max_tokens=2))
    assert [(c.prompt_index, c.sample_index, c.token_ids) for c in found] == [
        (p, s, (p, s)) for p in range(70) for s in range(2)
    ]
    assert {c.weights_version for c in found} == {3}
    assert engine.generate([], SamplingParams()) == []


@pytest.mark.parametrize("seed", [None, 5])
def test_completions_end_with_the_positions_that_each_prompt_leaves(connect, seed):
    server, bodies = FakeServer(), []

    def noting(request):
        bodies.extend([json.loads(request.content)] if request.url.path == "/v1/completions" else [])
        return server(request)

    engine = connect(noting)
    engine.commit(3)
    lengths = [*[1] * 40, 43, 43, 49, 1, 44, 42]
    prompts = [[index] * length for index, length in enumerate(lengths)]
    found = engine.generate(prompts, SamplingParams(n=2, max_tokens=7, seed=seed))
    assert [(c.prompt_index, c.token_ids) for c in found] == [(p, (p, s)) for p in range(46) for s in range(2)]
    asked = {prompt[0]: body["max_tokens"] for body in bodies for prompt in body["prompt"]}
    assert [asked[index] for index in range(46)] == [*[7] * 40, 7, 7, 1, 7, 6, 7]
    with pytest.raises(ValueError, match="50 tokens, the model knows 50 positions: shorten it"):
        engine.generate([[1] * 50], SamplingParams())


def test_another_server_in_the_place_of_one_that_ended_is_not_taken_for_it(connect):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as worker:
        engine = connect(FakeServer(pid=worker.pid))
        engine.commit(7)
        assert engine.generate([[1]], SamplingParams())[0].weights_version == 7
        worker.kill()
    with pytest.raises(EngineLost, match="a process of its workers has ended"):
        engine.generate([[1]], SamplingParams())
    assert engine.state is EngineState.LOST


def test_a_paused_server_is_paused_here_and_pausing_is_asked_once(connect):
    server = FakeServer()
    server.paused = True
    engine = connect(server)
    engine.commit(0)
    with pytest.raises(PhaseError, match="paused and cannot generate: call resume"):
        engine.generate([[1]], SamplingParams())
    engine.resume()
    engine.resume()
    engine.pause("keep")
    engine.pause()
    assert [path for path in server.asked if path.startswith(("/pause", "/resume"))] == ["/resume", "/pause?mode=keep"]


def test_the_kv_cache_leaves_by_sleep_and_comes_back_paused(connect):
    server = FakeServer()
    engine = connect(server)
    server.asked.clear()
    engine.sleep("keep-weights")
    assert engine.state is EngineState.ASLEEP
    (kv_cache,) = [segment for segment in engine.segments if segment.residency is Residency.DISCARDED]
    assert (kv_cache.name, kv_cache.device_bytes) == ("engine.kv_cache", 0)
    engine.sleep("keep-weights")
    with pytest.raises(PhaseError, match="asleep and cannot resume: call wake"):
        engine.resume()
    engine.wake()
    assert engine.state is EngineState.PAUSED and kv_cache.device_bytes == 600
    engine.resume()
    reset = [f"/reset_prefix_cache?reset_running_requests={running}" for running in ("false", "true")]
    assert server.asked == ["/pause?mode=abort", *reset, "begin", "wait", "begin", "wait", "/resume"]
    with pytest.raises(PhaseError, match="level 2 would move engine.weights, which is in memory that stays .start the"):
        engine.sleep(2)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_in_vllms_pool_leave_too(connect, level):
    server = FakeServer(weights_in="pool", weights_can_leave=True)
    engine = connect(server)
    engine.commit(1)
    engine.sleep(level)
    assert server.held == {"engine.weights": 0, "engine.kv_cache": 0}
    engine.wake()
    assert server.held == server.sizes
    assert engine.weights_version == (1 if level == 1 else None)


def test_a_server_whose_device_has_no_room_stays_asleep(connect):
    server = FakeServer()
    engine = connect(server)
    engine.sleep("keep-weights")
    words = "engine.kv_cache needs 600 B and 599 B are free"
    server.fails["begin"] = {"kind": "BudgetError", "message": words, "needed_bytes": 600, "free_bytes": 599}
    with pytest.raises(BudgetError, match=words) as caught:
        engine.wake()
    assert caught.value.missing_bytes == 1
    assert engine.state is EngineState.ASLEEP

    server.fails.clear()
    engine.wake()
    assert engine.state is EngineState.PAUSED


@pytest.mark.parametrize(
    ("told", "level", "why"),
    [
        (
            {"kv_cache_can_leave": False},
            "keep-weights",
            "kv_cache, which is not in vLLM's sleep pool .on a GPU, start the server with --enable-sleep-mode",
        ),
        (
            {"weights_in": "memory"},
            1,
            "weights, which is not in vLLM's sleep pool .on a GPU, start the server with --enable-sleep-mode",
        ),
        ({}, 1, "weights, which is in memory that stays .start the server with .* without --load-format colo"),
    ],
)
def test_what_cannot_leave_says_why(connect, told, level, why):
    with pytest.raises(PhaseError, match=why):
        connect(FakeServer(**told)).sleep(level)


def test_closing_leaves_the_server_awake(connect):
    server = FakeServer()
    engine = connect(server)
    engine.sleep("keep-weights")
    engine.close()
    assert server.asked[-4:] == ["begin", "wait", "/resume", "release"]


def test_closing_leaves_alone_what_another_client_has_taken_over(connect):
    server = FakeServer()
    engine = connect(server)
    engine.sleep("keep-weights")
    for operation in ("begin", "receive"):
        server.fails[operation] = {"kind": "EngineLost", "message": "another client has connected since"}
    server.asked.clear()
    with pytest.raises(EngineLost, match="another client has connected since.*close this runtime, .* connect again"):
        engine.receive("differences")
    assert engine.state is EngineState.LOST
    engine.close()
    assert server.asked == ["receive"]


def test_log_probabilities_from_before_the_filters_are_refused_where_they_differ(connect):
    engine = connect(FakeServer(logprobs_mode="raw_logprobs"))
    engine.commit(0)
    for plain in ({}, {"temperature": 0, "top_p": 0.5}):
        assert engine.generate([[1]], engine.sampling_params(**plain))
    for changed in ({"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}):
        with pytest.raises(Unsupported, match="--logprobs-mode processed_logprobs"):
            engine.generate([[1]], engine.sampling_params(**changed))


def test_sampling_is_given_by_name_or_as_colos_parameters(connect):
    engine = connect(FakeServer())
    assert engine.sampling_params(**GREEDY) == SamplingParams(**GREEDY)
    assert engine.sampling_temperature(SamplingParams(temperature=0.5)) == 0.5
    assert engine.sampling_temperature(SamplingParams(temperature=0.5, top_p=0.5)) is None
    assert engine.sampling_temperature(SamplingParams(temperature=0)) == 1.0
    with pytest.raises(TypeError, match="takes colo.SamplingParams"):
        engine.sampling_params({"n": 2})
    with pytest.raises(TypeError, match="within the sampling parameters"):
        engine.sampling_params(SamplingParams(), n=2)


def test_numbers_of_numpy_are_sent(connect):
    engine = connect(FakeServer())
    engine.commit(1)
    given = {"n": np.int64(2), "max_tokens": np.int32(2), "temperature": np.float32(0), "seed": np.arange(2)}
    own = {"n": 2, "max_tokens": 2, "temperature": 0.0, "seed": [0, 1]}
    for params in (engine.sampling_params(**given), SamplingParams(**given)):
        assert params == SamplingParams(**own)
        assert [c.token_ids for c in engine.generate([[5], [6]], params)] == [(5, 0), (5, 1), (6, 0), (6, 1)]


def test_what_the_server_complains_about_is_a_value_error(connect):
    server = FakeServer()
    engine = connect(server)
    engine.commit(0)
    server.refuse["/v1/completions"] = httpx.Response(400, json={"error": {"message": "n must be 1"}})
    with pytest.raises(ValueError, match="the server does not generate: n must be 1"):
        engine.generate([[1]], SamplingParams())
    assert engine.state is EngineState.AWAKE


def test_the_prefix_cache_goes_with_requests_that_hold_blocks_of_it(connect):
    server = FakeServer()
    engine = connect(server)
    server.asked.clear()
    engine.reset_prefix_cache()
    assert [path.split("=")[1] for path in server.asked] == ["false", "true"]
    server.refuse["/reset_prefix_cache"] = httpx.Response(200, json={"success": False})
    with pytest.raises(TransferError, match="requests still hold blocks"):
        engine.reset_prefix_cache()


def test_steps_of_an_update_go_together_and_poison(connect):
    server = FakeServer()
    engine = connect(server)
    engine.commit(0)
    server.asked.clear()
    steps = [("begin", {"version": 1, "digest": ""}), ("finish", {"checksums": None})]
    assert engine.receive_all(steps) == [{"num_tensors": 1}]
    assert engine.weights_version is None
    engine.receive("release")
    assert server.asked == ["receive", "receive"]


def test_what_a_worker_raises_arrives_with_its_kind_and_traceback(connect):
    server = FakeServer()
    engine = connect(server)
    server.fails["receive"] = {"kind": "TransferError", "message": "other tensors", "traceback": "line 3"}
    with pytest.raises(TransferError, match="^other tensors\nin the worker") as caught:
        engine.receive("differences")
    assert caught.value.__notes__ == ["in the worker:\nline 3"]


def test_memory_of_a_server_is_not_shared(connect):
    engine = connect(FakeServer())
    plan = engine.record_plan({"a": torch.zeros(2)})
    assert plan.fallbacks == {"a": "the engine is a server of its own"}
    with pytest.raises(Unsupported, match="a server's weights cannot be shared: they are copied"):
        engine.share_weights()


def test_a_server_that_ends_is_lost_for_good(connect):
    server = FakeServer()
    engine = connect(server)
    engine.commit(0)
    server.silent = True
    with pytest.raises(
        EngineLost, match="did not answer /v1/completions .ConnectError: All connection attempts failed."
    ):
        engine.generate([[1]], SamplingParams())
    assert engine.state is EngineState.LOST and engine.weights_version is None
    assert sum(segment.device_bytes for segment in engine.segments) == 0
    asked = len(server.asked)
    for call in (engine.pause, engine.reset_prefix_cache, lambda: engine.receive("release")):
        with pytest.raises(EngineLost, match="connect again"):
            call()
    assert len(server.asked) == asked
    with pytest.raises(PhaseError, match="your own and is lost"):
        engine.recover()


class Elsewhere(FakeServer):
    """A server on another machine, of whose workers nothing can be seen from here."""

    def describe(self, client, same_process, client_pid, probe, home):
        return self.told

    def adapter_numbers(self, client):
        return []


OTHERS = {"kind": "EngineLost", "message": "another client has connected since"}


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"silent": True}, r"it did not answer /collective_rpc"),
        ({"refuse": {"/collective_rpc": httpx.Response(404, text="no such path")}}, "refuses /collective_rpc"),
        ({"refuse": {p: httpx.Response(500) for p in ("/collective_rpc", "/health")}}, "its engine has ended"),
        ({"fails": {"adapter_numbers": OTHERS}}, "another client has connected since"),
    ],
    ids=["gone", "another server", "its engine has ended", "started again"],
)
@pytest.mark.parametrize("place", ["elsewhere", "in a container"])
def test_a_recovery_looks_whether_a_server_lives_that_nothing_has_asked_since(connect, tmp_path, place, change, lost):
    told = {"pid_namespace": 1} if place == "in a container" else {}
    server = Elsewhere(**told)
    engine = connect(server, **({} if told else {"through": colo.WeightsFolder(tmp_path)}))
    with pytest.raises(PhaseError, match="the engine is not lost: nothing to recover"):
        engine.recover()
    vars(server).update(change)
    with pytest.raises(PhaseError, match=f"the server is your own and is lost .*{lost}.*: start it again, connect"):
        engine.recover()
    assert engine.state is EngineState.LOST


def test_a_server_in_a_container_that_is_started_again_is_not_sampled_from_as_the_one_before(connect):
    server = Elsewhere(pid_namespace=1)
    engine = connect(server)
    engine.commit(3)
    assert len(engine.generate([[1]], SamplingParams(max_tokens=2))) == 1
    server.fails["adapter_numbers"] = OTHERS
    with pytest.raises(EngineLost, match="another client has connected since"):
        engine.generate([[1]], SamplingParams(max_tokens=2))
    assert engine.weights_version is None


# ---- refused at connect ---------------------------------------------------------------------------------------------

NO_EXTENSION = "Call to collective_rpc method failed: 'Worker' object has no attribute 'colo'"


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/is_paused", httpx.Response(404, json={"detail": "Not Found"}), "not in vLLM's development mode"),
        (
            "/collective_rpc",
            httpx.Response(500, json={"error": {"message": NO_EXTENSION}}),
            "takes no weights from here .*has no attribute 'colo'",
        ),
        (
            "/collective_rpc",
            httpx.Response(200, json={"results": [{"error": {"kind": "TransferError", "message": "elsewhere"}}]}),
            "takes no weights from here .elsewhere",
        ),
    ],
)
def test_a_server_that_cannot_take_weights_is_refused_with_the_flags(connect, path, answer, words):
    server = FakeServer()
    server.refuse[path] = answer
    with pytest.raises(Unsupported, match=words) as caught:
        connect(server)
    extension = "--worker-extension-cls colo.engines.vllm.worker.ColoWorker"
    for flag in ("VLLM_SERVER_DEV_MODE=1", "--load-format colo", extension, "--logprobs-mode"):
        assert flag in str(caught.value)


def test_a_server_of_which_not_all_workers_answer_is_refused(connect):
    server = FakeServer()
    server.num_workers = 2
    with pytest.raises(Unsupported, match="1 of the 2 workers .* answer: start it without data parallelism"):
        connect(server)


def test_a_server_elsewhere_or_asleep_or_absent_is_refused(connect):
    with pytest.raises(Unsupported, match="runs on GPU-1 and the trainer on cpu"):
        connect(FakeServer(device="GPU-1"))
    with pytest.raises(PhaseError, match="is asleep: POST /wake_up"):
        connect(FakeServer(is_asleep=True))
    absent = FakeServer()
    absent.silent = True
    with pytest.raises(EngineLost, match="no server answers at http://server"):
        connect(absent)


def test_the_model_may_be_named(connect):
    server = FakeServer()
    connect(server, model_name="served")
    assert "/v1/models" not in server.asked


@pytest.mark.parametrize(
    "url",
    ["http://host:8000", "http://host:8000/", "host:8000", "http://host:8000/v1", "http://host:8000/v1/"],
)
def test_a_servers_address_is_understood_as_people_write_it(url):
    assert base_url(url) == "http://host:8000"
    assert base_url("https://host/prefix") == "https://host/prefix"


ROOT = Path(colo.__file__).parents[1]
TEXTS = [
    path
    for pattern in ("colo/**/*.py", "docs/**/*.md", "examples/**/*", "notebooks/*", "*.md")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix in (".py", ".md", ".ipynb")
]


def test_whoever_is_told_to_start_a_server_for_us_is_told_to_keep_it_to_this_machine():
    """Its development mode lets everybody who reaches it change weights and run what its workers can."""
    advice = [
        (path.name, line)
        for path in TEXTS
        for line in re.sub(r"\\?\n\s*", " ", path.read_text()).split("vllm serve MODEL")[1:]
    ]
    assert len(advice) >= 5
    assert [(name, line[:80]) for name, line in advice if not line.startswith(" --host 127.0.0.1 ")] == []
