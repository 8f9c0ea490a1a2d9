"""SGLang's own server for tests."""

import os
import subprocess

import httpx
import psutil
import pytest

from tests.integration import servers

PYTHON = os.environ.get("COLO_SGLANG")
"""The Python of an environment with SGLang, 0.5.21 or later."""

needs_sglang = pytest.mark.skipif(
    not PYTHON, reason="COLO_SGLANG is not set: the Python of an environment with SGLang (docs/sglang.md#tests)"
)


class Server(servers.Server):
    """SGLang's server."""

    python, starter, ready = PYTHON, "sglang_cpu.py", "/model_info"

    environment = (("SGLANG_CPU_OMP_THREADS_BIND", "0|0"),)  # which several ranks ask for

    def schedulers(self):
        """Processes that have the weights, by rank: SGLang sets their titles so."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        titles = {" ".join(child.cmdline()): child for child in children}
        return [titles[title] for title in sorted(titles) if "scheduler" in title]

    def scheduler(self):
        (found,) = self.schedulers()
        return found

    @property
    def adapters(self):
        models = httpx.get(f"{self.url}/v1/models", trust_env=False, timeout=60).json()["data"]
        return [model["id"] for model in models[1:]]

    @property
    def version(self):
        """That of the environment: the server tells it with a key alone, where it has keys."""
        asked = "from importlib.metadata import version; print(version('sglang'))"
        return subprocess.check_output([PYTHON, "-c", asked], text=True).strip()

    @property
    def label(self):
        return httpx.get(f"{self.url}/model_info", trust_env=False, timeout=60).json()["weight_version"]
