"""Servers in processes of their own for tests, and a proxy before them that makes faults."""

import atexit
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from datasets import Dataset
from torch.optim import AdamW

import colo
from colo.config import RuntimeConfig
from colo.testing import tiny_tokenizer

START_S = 1200.0
NO_PROXY = httpx.Limits(max_keepalive_connections=0)


def free_port():
    """A port that no connection of this machine takes by itself while a server starts: those begin at 32768."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.SystemRandom().randrange(15000, 32000)))
            return free.getsockname()[1]


HOSTS = {}
"""Processes that servers are forked from, by their command."""


@atexit.register
def end_hosts():
    for host in HOSTS.values():
        with host:
            host.stdin.close()  # at which it ends


def host_of(python, starter, environment):
    """The process that a kind of server is forked from."""
    command = (str(python), str(Path(__file__).parent / starter), "--hosted")
    if command not in HOSTS:
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        HOSTS[command] = subprocess.Popen(
            command,
            env=inherited | dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    return HOSTS[command]


class Server:
    """A server of a folder, in a process group of its own that `end` ends in every case."""

    python = None
    starter = ready = ""
    """File beside this one that is run, and a path that is answered when it has started."""

    environment = ()

    def __init__(self, folder, log, *flags):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log) / f"server-{self.port}.log"
        arguments = ["--model-path", folder, "--port", self.port, *flags]
        began_s = time.monotonic()
        host = host_of(self.python, self.starter, self.environment)
        print(json.dumps({"arguments": list(map(str, arguments)), "log": str(self.log)}), file=host.stdin, flush=True)
        line = next((line for line in host.stdout if line.strip().isdigit()), None)
        assert line, f"{self.starter} has ended, with {host.wait()}: run it by hand"
        self.process = psutil.Process(int(line))
        try:
            self._wait()
        except BaseException:
            self.end()
            raise
        self.start_s = time.monotonic() - began_s

    def _wait(self):
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and self.process.is_running():
            try:
                if httpx.get(f"{self.url}{self.ready}", trust_env=False, timeout=10).status_code in (200, 401):
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not come up: {self.log.read_text()[-5000:]}")

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


class Restarting:
    """A server that is started again, on another checkpoint, behind an address that stays."""

    def __init__(self, kind, folders, logs, *flags):
        self.kind, self.folders, self.logs, self.num_started = kind, folders, logs, 0
        self.server = None
        self.proxy = Proxy("http://127.0.0.1:9")
        self.start(*flags)

    def start(self, *flags, folder=None):
        if self.server is not None:
            self.server.end()
        folder = folder or self.folders[self.num_started % 2]
        self.num_started += 1
        self.server = self.kind(folder, self.logs, *flags)
        self.proxy.target = self.server.url

    @property
    def is_alive(self):
        return self.server.process.is_running()


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


# ---- runtimes over one -----------------------------------------------------------------------------------------------


def train_step(rt):
    ids = torch.tensor([[1, 2, 3, 4]])
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def train_attached(url, model, folder, is_rewarded, peft_config=None):
    """Train a model by TRL's trainer for three steps on completions of a server; returns the runtime and the steps."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'colo-rl[trl]'")
    args = trl.GRPOConfig(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(map(is_rewarded, ids))) for ids in completion_ids],
        args,
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)]}),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )
    rt = colo.attach(trainer, engine=colo.connect(url, device="cpu", deadline_s=120))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 3 and rt.weights_version == 3
    assert all(entry["grad_norm"] > 0 for entry in steps)
    assert all(entry["colo/sent_bytes"] > 0 for entry in steps[1:])  # before the first, as it was attached
    return rt, steps


@contextmanager
def sharing(server, *, deadline_s):
    """Makes runtimes over a server, and closes them."""
    made = []

    def make(model, url=None, lr=1e-2, through=None, **options):
        engine = colo.connect(url or server.url, device="cpu", deadline_s=deadline_s, through=through)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        try:
            made.append(colo.share(engine, model, optimizer, config=RuntimeConfig(**options)))
        except BaseException:
            engine.close()
            raise
        return made[-1]

    yield make
    for rt in reversed(made):
        rt.close()
        rt.engine.close()
