"""LMDeploy's own server for tests, over an engine that runs on a CPU."""

import copy
import hashlib
import os
import sys

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from colo.testing import tiny_tokenizer
from tests.integration import servers
from tests.models import small_qwen3

FOLDER = os.environ.get("COLO_LMDEPLOY")
"""A folder with LMDeploy 0.18.0 and what it imports that is not here."""

needs_lmdeploy = pytest.mark.skipif(
    not FOLDER, reason="COLO_LMDEPLOY is not set: a folder with LMDeploy (docs/lmdeploy.md#tests)"
)


class Server(servers.Server):
    """LMDeploy's server."""

    python, starter, ready = sys.executable, "lmdeploy_cpu.py", "/health"
    environment = (("PYTHONPATH", FOLDER or ""),)

    @property
    def held(self):
        """SHA-256 of each weight that the engine holds."""
        return httpx.get(f"{self.url}/held", trust_env=False, timeout=60).json()

    @property
    def asleep(self):
        return set(
            httpx.get(f"{self.url}/update_weights_from_ipc", trust_env=False, timeout=60).json()["sleeping_tags"]
        )

    @property
    def main(self):
        """The process that has the weights."""
        return psutil.Process(self.process.pid)

    def tell(self, path, **query):
        answer = httpx.post(f"{self.url}{path}", json={}, params=query, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text


def make_model(randomize, seed=0, **changes):
    config = small_qwen3(**({"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"} | changes))
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed=seed)


def save(model, folder):
    """A checkpoint whose tokenizer ends sequences with a token that the model does not have."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def as_held(model):
    """The model with weights as the server has them, of 16 bits, and computes with."""
    held = copy.deepcopy(model)
    for parameter in held.parameters():
        parameter.data = parameter.data.half().float()
    return held


def digests(model):
    """SHA-256 of each weight as a server has to hold it."""
    return {
        name: hashlib.sha256(t.detach().half().contiguous().view(torch.uint8).numpy().data).hexdigest()
        for name, t in model.named_parameters()
    }
