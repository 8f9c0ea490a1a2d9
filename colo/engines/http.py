"""An engine's server over HTTP: questions whose wait can end, with a deadline, an interrupt, or the server.

Knows nothing of what is asked; `GET /health` is what vLLM's, SGLang's and LMDeploy's servers have in common.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from colo.errors import TransferError

if TYPE_CHECKING:
    from colo.engines.base import EngineStatus

T = TypeVar("T")

Body = dict[str, Any]

DEADLINE_S = 300.0
"""Silence after which a server counts as lost: no answer, nor a healthy one while it generates."""


def base_url(url: str) -> str:
    """The address of a server, as clients of its `/v1` and people write it: with a scheme, and without that path.

    Raises: `TypeError`, `ValueError` for what is no address.
    """
    if not isinstance(url, str):
        raise TypeError(f"the address of a server is a text such as 'http://localhost:8000', not {url!r}")
    url = url if "://" in url else f"http://{url}"
    try:
        read, wrong = httpx.URL(url), ""
        if read.port is not None and not 0 < read.port < 2**16:
            wrong = "a port is 1 to 65535"
        elif read.scheme not in ("http", "https") or not read.host:
            wrong = "which begins with http or https and has a host"
    except httpx.InvalidURL as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"{url!r} is no address of a server ({wrong}): write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


_MAX_CONNECTIONS = 256
"""Questions asked at once: each takes a file of the 1024 that a process commonly may have."""


class Silent(Exception):  # noqa: N818 - a state, which the engine turns into `EngineLost`
    """The server does not answer, or its engine has ended."""


class Refused(Exception):  # noqa: N818 - an answer, which the engine turns into an error of its own
    """The server answered with an error."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status

    @property
    def is_servers(self) -> bool:
        """True if the fault is the server's, and not the question's."""
        return self.status >= httpx.codes.INTERNAL_SERVER_ERROR


@contextmanager
def asking(status: EngineStatus, path: str) -> Iterator[None]:
    """Turn what a question within comes to into the engine's errors: `EngineLost`, or `TransferError` for a refusal."""
    status.require_present()
    try:
        yield
    except Silent as error:
        raise status.lose(str(error)) from error
    except Refused as error:
        raise TransferError(f"the server refuses {path}: {error}") from error


class HttpClient:
    """Asks a server from an event loop in a thread of its own, until `close`. Any thread may call."""

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float,
        api_key: str | None = None,
        keys: Mapping[str, str | None] | None = None,
        health: str = "/health",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`keys` are those of single paths, in place of `api_key`; `health` is the path whose answer says that the
        engine behind the server lives.
        """
        self._deadline_s = deadline_s
        self._health = health
        self._api_key, self._keys = api_key, keys or {}
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=deadline_s,
            # A connection for each question: the server closes those on which it has answered with an error.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # it is on this machine, whatever proxies there are
            transport=transport,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="colo-server", daemon=True)
        self._thread.start()

    def ask(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        query: Mapping[str, str] | None = None,
        *,
        patient: bool = False,
        as_text: bool = False,
    ) -> Any:
        """Ask, and return the answer as JSON or `as_text`; `patient` waits while the server is healthy.

        An empty answer is `None` as text, and an object without keys otherwise; see `_Object`. Raises: `Silent` without
        an answer within the deadline; `Refused` for an error.
        """
        request = self._request(method, path, body, query, timed=not patient)
        question = self._ask(request, as_text=as_text, object_hook=partial(_Object, path))
        # health is asked for at every deadline, so that a long answer is no silence
        return self._wait(self._while_healthy([question]))[0] if patient else self._wait(question)

    def ask_all(self, path: str, bodies: Sequence[Body]) -> list[Any]:
        """Ask many questions at once, and wait while the server is healthy. Raises: as `ask`, the first failure."""
        free = asyncio.Semaphore(_MAX_CONNECTIONS)

        async def ask(body: Body) -> Any:
            async with free:
                return await self._ask(self._request("POST", path, body, timed=False))

        return self._wait(self._while_healthy([ask(body) for body in bodies]))

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._wait(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, question: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C: the question must not go on in its thread
            future.cancel()
            raise

    async def _while_healthy(self, questions: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        tasks = [asyncio.create_task(question) for question in questions]
        pending = set(tasks)
        try:
            while pending:
                # the first failure ends the wait: the others are cancelled below
                done, pending = await asyncio.wait(
                    pending, timeout=self._deadline_s, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if pending:
                    await self._check_health()
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            # awaited, so that cancelled questions have closed their connections
            await asyncio.gather(*tasks, return_exceptions=True)

    def _request(
        self, method: str, path: str, body: Body | None = None, query: Mapping[str, str] | None = None, *, timed: bool
    ) -> httpx.Request:
        # connecting stays timed: a server that is gone is noticed at once
        limits = httpx.Timeout(self._deadline_s, read=self._deadline_s if timed else None)
        key = self._keys.get(path, self._api_key)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self._client.build_request(method, path, json=body, params=query, headers=headers, timeout=limits)

    async def _ask(
        self, request: httpx.Request, *, as_text: bool = False, object_hook: Callable[[Body], Body] | None = None
    ) -> Any:
        answer = await self._send(request)
        if answer.is_server_error:
            # 500 may come from a dying engine: then it is lost, and not merely refused
            await self._check_health()
        if answer.is_error:
            raise Refused(answer.status_code, _words(answer))
        if as_text:
            return answer.text or None
        path = request.url.path
        try:
            found = answer.json(object_hook=object_hook) if answer.content else None
        except ValueError as error:
            raise Refused(answer.status_code, f"the answer to {path} is not JSON") from error
        return _Object(path, {}) if found is None else found

    async def _check_health(self) -> None:
        answer = await self._send(self._request("GET", self._health, timed=True))
        if answer.is_error:
            raise Silent(f"its engine has ended (status {answer.status_code})")

    async def _send(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        try:
            return await self._client.send(request)
        except httpx.TimeoutException as error:
            raise Silent(f"it did not answer {path} within {self._deadline_s:g} s") from error
        except httpx.TransportError as error:
            raise Silent(f"it did not answer {path} ({type(error).__name__}: {error})") from error


class _Object(Body):
    """An object of an answer. A key that it lacks is a `TransferError` with the question's name."""

    def __init__(self, path: str, found: Body) -> None:
        super().__init__(found)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise TransferError(
            f"the server's answer to {self._path} has no {key!r}, but {', '.join(map(repr, self)) or 'nothing'}: it is "
            "of a version that colo does not know, or something else answers in its place"
        )


def _words(answer: httpx.Response) -> str:
    """The message of an error, in any of the forms that engines and FastAPI give it."""
    try:
        found = answer.json()
    except ValueError:
        return answer.text or f"status {answer.status_code}"
    # FastAPI says `detail`, vLLM and OpenAI say `error`, SGLang `error_message` of adapters and `message`
    found = (
        found.get("error") or found.get("detail") or found.get("error_message") or found
        if isinstance(found, dict)
        else found
    )
    return str(found["message"] if isinstance(found, dict) and "message" in found else found)
