"""`vllm serve` for tests."""

import json
import os
import signal
import sys
import time
from contextlib import suppress

import httpx
import psutil
import torch

from tests import warm
from tests.integration.servers import START_S, free_port

FLAGS = ("--load-format", "colo", "--model-loader-extra-config", '{"colo_load_format": "dummy"}')
FLAGS += ("--worker-extension-cls", "colo.engines.vllm.worker.ColoWorker", "--logprobs-mode", "processed_logprobs")


def started(arguments, log, environment):
    """The process of a server that starts, of a session of its own: on a CPU from a process that has imported vLLM."""
    if not torch.cuda.is_available():
        return psutil.Process(warm.serve(arguments, log, environment).pid)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    with log.open("w") as file:
        return psutil.Popen(command, env=os.environ | environment, stdout=file, stderr=file, start_new_session=True)


class Server:
    """`vllm serve` of a folder, on a free port."""

    def __init__(self, folder, *flags, **environment):
        port = free_port()
        arguments = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        arguments += ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "256", "--block-size", "32"]
        arguments += ["--kv-cache-memory-bytes", "8000000", *flags]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"log-{port}"
        self.process = started(arguments, self.log, environment)
        one_request = httpx.Limits(max_keepalive_connections=0)  # the server closes a connection after an error
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False, limits=one_request)

    def wait(self):
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and self.process.is_running():
            try:
                if self.http.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not come up: {self.log.read_text()[-3000:]}")

    def close(self):
        self.http.close()
        with suppress(psutil.NoSuchProcess):
            self.process.terminate()
        with suppress(psutil.TimeoutExpired):
            self.process.wait(timeout=60)
        with suppress(ProcessLookupError):  # a server that was killed leaves its engine behind
            os.killpg(self.process.pid, signal.SIGKILL)

    def post(self, path, body=None):
        """What the server answers; what it complains about fails the test."""
        status, text = self.ask(path, body)
        assert status == 200, text
        return json.loads(text)

    def ask(self, path, body=None):
        answer = self.http.post(path, json=body)
        return answer.status_code, answer.text

    def fails(self, step, **arguments):
        """The words of a step of an update that fails."""
        status, text = self.ask("/update_weights", {"update_info": {"step": step, "arguments": arguments}})
        assert status == 500
        return json.loads(text)["error"]["message"]
