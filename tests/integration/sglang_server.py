"""SGLang's own server for tests, and a proxy before it that makes faults."""

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest

PYTHON = os.environ.get("COLO_SGLANG")
"""The Python of an environment with SGLang 0.5.21."""

START_S = 1200.0
NO_PROXY = httpx.Limits(max_keepalive_connections=0)

needs_sglang = pytest.mark.skipif(
    not PYTHON, reason="COLO_SGLANG is not set: the Python of an environment with SGLang (docs/sglang.md#tests)"
)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """SGLang's server of a folder, in a process group of its own that `end` ends in every case."""

    def __init__(self, folder, log, *flags):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log) / f"sglang-{self.port}.log"
        starter = Path(__file__).parent / "sglang_cpu.py"
        command = [PYTHON, starter, "--model-path", folder, "--port", self.port, *flags]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        began_s = time.monotonic()
        with self.log.open("w") as log_file:
            self.process = subprocess.Popen(
                list(map(str, command)),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.end()
            raise
        self.start_s = time.monotonic() - began_s

    def _wait(self):
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/model_info", trust_env=False, timeout=10).status_code in (200, 401):
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not come up: {self.log.read_text()[-5000:]}")

    def scheduler(self):
        """The process that has the weights: the one whose title SGLang sets so."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [child for child in children if "scheduler" in " ".join(child.cmdline())]
        return found

    def end(self):
        """End every process of the group: a scheduler that has lost its server would go on at full speed."""
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid:
                    process.kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        self.process.wait(timeout=60)

    def ask(self, path, **body):
        answer = httpx.post(f"{self.url}{path}", json=body, trust_env=False, timeout=60)
        return answer.status_code, answer.json() if answer.content and "json" in answer.headers["content-type"] else {}

    @property
    def adapters(self):
        models = httpx.get(f"{self.url}/v1/models", trust_env=False, timeout=60).json()["data"]
        return [model["id"] for model in models[1:]]

    @property
    def label(self):
        return httpx.get(f"{self.url}/model_info", trust_env=False, timeout=60).json()["weight_version"]


class Proxy:
    """Hands requests on to a server, which may be another one later, unless a fault is set for their path."""

    def __init__(self, target):
        self.target = target
        self.asked = []
        self.faults = {}
        """By path: called with the handler before the request goes on; what it returns is true if it has answered."""

        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.hand_on()

            def do_POST(self):
                self.hand_on()

            def hand_on(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                proxy.asked.append(path)
                fault = proxy.faults.get(path)
                if fault is not None and fault(self):
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                try:
                    with httpx.Client(trust_env=False, timeout=None, limits=NO_PROXY) as client:
                        found = client.request(self.command, proxy.target + self.path, content=body, headers=headers)
                except httpx.TransportError:
                    self.hang_up()
                    return
                self.answer(found.status_code, found.content, found.headers.get("content-type", "text/plain"))

            def answer(self, status, content, kind="application/json", *, length=None):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content) if length is None else length))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(content)

            def hang_up(self):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def log_message(self, *_):
                pass

            def handle(self):
                with suppress(OSError):  # the client has gone
                    super().handle()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def once(self, path, fault):
        """Set a fault for the next request to `path`."""

        def first(handler):
            del self.faults[path]
            return fault(handler)

        self.faults[path] = first

    def end(self):
        self.http.shutdown()
        self.http.server_close()


def kill(server):
    """A fault: the whole server is killed."""

    def fault(handler):
        server.end()
        handler.hang_up()
        return True

    return fault


def fails(handler):
    """A fault: the server answers 500, and has done nothing."""
    handler.answer(500, b'{"message": "out of luck"}')
    return True


def truncated(handler):
    """A fault: the answer breaks off."""
    handler.answer(200, b'{"success": ', length=100)
    handler.hang_up()
    return True


def stop(process):
    """A fault: a process of the server is stopped, and goes on when it is told to."""

    def fault(_):
        process.send_signal(signal.SIGSTOP)
        return False

    return fault
