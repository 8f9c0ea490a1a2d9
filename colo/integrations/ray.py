"""Engines on the nodes of a Ray cluster: servers on the bundles of a placement group, and elsewhere when they are lost.

    group = ray.util.placement_group([{"CPU": 1, "GPU": 1}] * 2, strategy="SPREAD")
    command = ["vllm", "serve", MODEL, "--host", "{address}", "--port", "{port}", *FLAGS]
    with Servers(command, group, through=colo.WeightsFolder("/shared/weights")) as servers:
        rt = colo.share(servers.engines, model, optimizer)
        ...
        servers.replace(rt.engine)  # between two steps: a lost server is started again, and gets the present weights

Ray moves a bundle of a node that is gone to another node, as soon as one has room for it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

import httpx

from colo.engine import Engine, EngineState
from colo.engines.connect import connect
from colo.engines.fleet import Fleet
from colo.errors import EngineLost, TransferError, named_extra

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

T = TypeVar("T")

START_S = 1200.0
"""Seconds that a server may take to start, and a bundle to find a node."""

_ENDS_S = 30.0


class Servers:
    """Servers of one command, one on each bundle, and the engines that `colo.connect` makes of them.

    Ownership: owns the servers until `close`. A runtime that shares `engines` closes those.
    """

    def __init__(
        self,
        command: Sequence[str],
        group: PlacementGroup,
        *,
        bundles: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        ready: str = "/health",
        deadline_s: float = START_S,
        **connecting: Any,
    ) -> None:
        """Start a server on each of `bundles`, by default all, and connect to them.

        In `command` `{port}` stands for a free port and `{address}` for the node's address. It gets `environment`
        beside its node's, and has started when it answers `ready`. `connecting` are options of `colo.connect`, such as
        `through`. Raises: `TransferError` for a server that ends, or has not started by the deadline, with the end of
        its output, and where the group finds no room; as `colo.connect` does.
        """
        self._command, self._group, self._ready = list(command), group, ready
        self._environment, self._deadline_s, self._connecting = dict(environment or {}), deadline_s, connecting
        self._places: list[_Place] = []
        try:
            numbers = range(group.bundle_count) if bundles is None else bundles
            self._places += map(_Place, numbers)
            self._start(self._places)
        except BaseException:
            self.close()
            raise

    @property
    def engines(self) -> list[Engine]:
        """An engine for each server."""
        return [place.engine for place in self._places if place.engine is not None]

    def replace(self, fleet: Fleet) -> list[Engine]:
        """Start servers whose engines are lost again, on their bundles, and take them into the fleet; return the new.

        Not within a rollout. Waits until Ray has found a node for each bundle. Raises: as at the start.
        """
        lost = [p for p in self._places if p.engine is not None and p.engine.state is EngineState.LOST]
        if not lost:
            return []
        ray, before = _ray(), [place.engine for place in lost]
        for place in lost:
            ray.kill(place.actor)  # with which a server ends that does not answer
        self._start(lost)
        for place, old in zip(lost, before, strict=True):
            fleet.add(place.engine)
            if old in fleet.engines:
                fleet.remove(old)
        return [place.engine for place in lost]

    def close(self) -> None:
        """End the servers. Idempotent."""
        for place in self._places:
            place.end()
        self._places.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, places: Sequence[_Place]) -> None:
        """Start a server for each place, all at once, and connect to them."""
        give_up_s = time.monotonic() + self._deadline_s
        _wait_for(self._group, self._deadline_s)
        starting = [(place, self._begin(place)) for place in places]
        for place, url in starting:
            while (found := self._wait(url, give_up_s)) is None:
                url = self._begin(place)
            place.engine = connect(found, **self._connecting)

    def _begin(self, place: _Place) -> Any:
        """Start a server; its URL when it answers."""
        place.actor = _on_bundle(_Server, self._group, place.bundle)
        return place.actor.start.remote(self._command, self._environment, self._ready, self._deadline_s)

    def _wait(self, url: Any, give_up_s: float) -> str | None:
        """The URL, or `None` where the node is gone: Ray notices that a while after, and places there until then."""
        ray = _ray()
        try:
            found: str = ray.get(url, timeout=max(0.0, give_up_s - time.monotonic()))
        except ray.exceptions.RayActorError as error:
            if time.monotonic() < give_up_s:
                return None
            raise EngineLost(f"the node of a server was lost while it started: {error}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise TransferError(f"no node has had room for a server within {self._deadline_s:g} s") from error
        except ray.exceptions.RayTaskError as error:
            raise TransferError(f"a server has not started: {error.cause}") from error
        return found


@dataclass(slots=True)
class _Place:
    bundle: int
    actor: Any = None
    engine: Any = None

    def end(self) -> None:
        if self.actor is None:
            return
        ray, actor, self.actor = _ray(), self.actor, None
        with suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(actor.stop.remote(), timeout=2 * _ENDS_S)
        ray.kill(actor)


def run_ranks(function: Callable[..., T], group: PlacementGroup, *arguments: Any, bundles: Sequence[int]) -> list[T]:
    """Call `function(*arguments)` on each bundle, as torchrun calls a script on ranks; return what each returns.

    `RANK`, `WORLD_SIZE`, `LOCAL_RANK` (0: a bundle sees its own GPUs alone), `MASTER_ADDR` and `MASTER_PORT` are set.
    Raises: what the first rank that fails raises; the others are ended then.
    """
    ray = _ray()
    _wait_for(group, START_S)
    actors = [_on_bundle(_Rank, group, bundle) for bundle in bundles]
    try:
        address, port = ray.get(actors[0].place.remote())
        world = {"WORLD_SIZE": len(actors), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        world |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        results = [
            actor.run.remote(
                function, arguments, {name: str(value) for name, value in (world | {"RANK": rank}).items()}
            )
            for rank, actor in enumerate(actors)
        ]
        left = list(results)
        while left:
            (first,), left = ray.wait(left)
            ray.get(first)
        found: list[T] = ray.get(results)
        return found
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    finally:
        for actor in actors:
            ray.kill(actor)


def _ray() -> Any:
    with named_extra("colo.integrations.ray"):
        import ray
        import ray.util.scheduling_strategies
    return ray


def _wait_for(group: PlacementGroup, deadline_s: float) -> None:
    ray = _ray()
    try:
        ray.get(group.ready(), timeout=deadline_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TransferError(
            f"no nodes have had room for {group.bundle_specs} within {deadline_s:g} s, and the cluster has "
            f"{ray.cluster_resources()}: ask for less, or add a node"
        ) from error


def _on_bundle(kind: type, group: PlacementGroup, bundle: int) -> Any:
    """An actor that has all of a bundle's resources."""
    ray, wanted = _ray(), dict(group.bundle_specs[bundle])
    options = {"num_cpus": wanted.pop("CPU", 0), "num_gpus": wanted.pop("GPU", 0), "resources": wanted}
    place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(kind).options(scheduling_strategy=place, **options).remote()


# ---- actors ----------------------------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


class _Rank:
    """A rank of a trainer."""

    def place(self) -> tuple[str, int]:
        """Its node's address, and a free port."""
        return _ray().util.get_node_ip_address(), _free_port()

    def run(self, function: Callable[..., T], arguments: Sequence[Any], environment: Mapping[str, str]) -> T:
        """Call the function in an environment."""
        os.environ.update(environment)
        return function(*arguments)


class _Server:
    """A server in a process of its own, which ends with the actor's."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], ready: str, deadline_s: float) -> str:
        """Start it; return its URL once it answers."""
        address, port = _ray().util.get_node_ip_address(), _free_port()
        words = [word.replace("{port}", str(port)).replace("{address}", address) for word in command]
        self._log = Path(tempfile.mkdtemp(prefix="colo-")) / "server.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                words,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._lifeline = end_with_this_process(self._process.pid)
        url, give_up_s = f"http://{address}:{port}", time.monotonic() + deadline_s
        while time.monotonic() < give_up_s and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}{ready}", trust_env=False, timeout=10).is_success:
                    return url
            time.sleep(0.5)
        code = self._process.poll()
        why = f"is not ready after {deadline_s:g} s" if code is None else f"has ended with code {code}"
        self.stop()
        raise RuntimeError(f"`{' '.join(words)}` {why}; its output ends so:\n{self._log.read_text()[-3000:]}")

    def stop(self) -> None:
        """End it and all that it has started. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_ENDS_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        if not self._lifeline.closed:
            self._lifeline.write(b"ended")
            self._lifeline.close()


_GUARD = """
import os, signal, sys, time
if not sys.stdin.buffer.read(1):
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(int(sys.argv[1]), number)
        time.sleep(float(sys.argv[2]))
"""
_APART = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"


def end_with_this_process(group: int) -> BinaryIO:
    """End a process group with this process, however that ends, unless the result is written to before.

    Ray kills the processes that a worker has started, and no others: a server, and not the engine that it has started.
    So a process that is nobody's child watches over the group.
    """
    reading, writing = os.pipe()
    guard = [sys.executable, "-c", _GUARD, str(group), str(_ENDS_S)]
    with os.fdopen(reading, "rb") as stdin:
        nothing = subprocess.DEVNULL
        subprocess.run([sys.executable, "-c", _APART, *guard], stdin=stdin, stdout=nothing, stderr=nothing, check=True)
    return os.fdopen(writing, "wb", buffering=0)
