"""HTTP that is slow, fails or ends, without a server."""

import asyncio
import json
import time

import httpx
import pytest

from colo.engines.http import HttpClient, Refused, Silent
from colo.errors import TransferError

URL = "http://server"
DEADLINE_S = 2.0


@pytest.fixture
def serve():
    """Makes clients of a server that is a function of the request."""
    made = []

    def make(handler, *, deadline_s=DEADLINE_S):
        made.append(HttpClient(URL, deadline_s=deadline_s, transport=httpx.MockTransport(handler)))
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


def test_an_answer_that_is_text_is_given_where_text_is_asked_for(serve):
    server = serve(lambda request: httpx.Response(200, text="" if request.url.path == "/empty" else "Success: loaded"))
    assert server.ask("POST", "/load", as_text=True) == "Success: loaded"
    assert server.ask("POST", "/empty") == {} and server.ask("POST", "/empty", as_text=True) is None
    with pytest.raises(Refused, match="the answer to /load is not JSON"):
        server.ask("POST", "/load")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "the server's answer to /info has no 'version', but nothing: it is of a version that colo does not know"),
        ("null", "the server's answer to /info has no 'version', but nothing"),
        ('{"error": 1, "at": 2}', "has no 'version', but 'error', 'at': "),
        ('{"version": {"of": 1}}', "the server's answer to /info has no 'number', but 'of'"),
        ('{"version": {"number": [{}]}}', "the server's answer to /info has no 'first', but nothing"),
    ],
)
def test_what_an_answer_lacks_is_named_with_the_question(serve, body, words):
    found = serve(lambda request: httpx.Response(200, text=body)).ask("GET", "/info")
    with pytest.raises(TransferError, match=words):
        found["version"]["number"][0]["first"]


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
        if request.url.path == "/health":  # of a machine that is slower than the deadline
            return httpx.Response(200)
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
            while asked.count("/health") < 2:
                await asyncio.sleep(0.01)
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
