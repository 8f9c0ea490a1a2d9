"""A vLLM server of your own on CUDA, driven from a trainer on the same GPU."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch
from tiny_vllm import CUDA, MARKS, PROMPTS, config, difference, train_step
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.memory.probe import free_device_bytes
from colo.units import GIB

pytestmark = MARKS

FLAGS = (
    "--load-format colo --worker-extension-cls colo.engines.vllm.worker.ColoWorker --logprobs-mode processed_logprobs"
)
SIZES = f"--max-model-len 256 --kv-cache-memory-bytes {4 * GIB} --gpu-memory-utilization 0.1 --enable-sleep-mode"


@pytest.fixture
def server(tmp_path):
    """Its URL, and the folder of its model."""
    pytest.importorskip("vllm")
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path)]
    command += f"--host 127.0.0.1 --port {port} --skip-tokenizer-init --enforce-eager {FLAGS} {SIZES}".split()
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, tmp_path / "log")
        yield f"http://127.0.0.1:{port}", tmp_path
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(url, process, log):
    give_up_s = time.monotonic() + 240  # 128 were measured on a host that had read nothing of vLLM yet
    while process.poll() is None and time.monotonic() < give_up_s:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not come up: {log.read_text()[-3000:]}")


def test_weights_reach_the_server_out_of_the_trainers_memory_and_in_buckets(server):
    url, folder = server
    for weights, way in (("auto", "out of the trainer's memory"), ("staged", "staged through a buffer in two halves")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(CUDA)
        optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
        engine = colo.connect(url)
        rt = colo.share(engine, model, optimizer, config=RuntimeConfig(weights=weights, offload="always"))
        assert way in rt.transport.reason
        for step in range(3):
            train_step(rt, step)
            with rt.rollout():
                during = free_device_bytes(CUDA)
                assert difference(model, rt.generate(PROMPTS, max_tokens=16, temperature=0)) < 0.02
        with rt.train():
            assert free_device_bytes(CUDA) - during > 3 * GIB  # the KV cache
        rt.close()
