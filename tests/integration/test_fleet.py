"""SGLang's own server, which reads weights from files, and a vLLM beside the trainer as a fleet, on a CPU.

A rollout that both continue, and one of them killed.
"""

import os
import signal
from dataclasses import replace

import pytest
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.engines.vllm.client.engine import VLLMEngine
from colo.errors import EngineLost, PhaseError
from colo.runtime import carried
from colo.units import MIB
from tests.integration.conftest import LLM_OPTIONS
from tests.integration.sglang_server import Server, needs_sglang

pytestmark = [
    needs_sglang,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),
]

CLOSE = 1e-4
ALL = {"max_tokens": 8, "ignore_eos": True}
PROMPTS = [[(7 * i + j * j) % 100 for j in range(20)] for i in range(8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, randomize, tiny):
    folder = tmp_path_factory.mktemp("fleet")
    config = tiny(architectures=["Qwen3ForCausalLM"])
    model = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed=9)
    model.save_pretrained(folder / "checkpoint")
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    started = Server(checkpoint, tmp_path_factory.mktemp("sglang"))
    yield started
    started.end()


@pytest.fixture(scope="module")
def sglang(server, tmp_path_factory):
    folder = colo.WeightsFolder(tmp_path_factory.mktemp("weights"))
    return colo.connect(server.url, device="cpu", deadline_s=120, through=folder)


@pytest.fixture(scope="module")
def vllm(checkpoint):
    engine = VLLMEngine(
        str(checkpoint),
        device="cpu",
        kv_cache_bytes=4 * MIB,
        own_process=True,
        load_format="colo",
        deadline_s=60,
        **LLM_OPTIONS,
    )
    yield engine
    engine.close()


def test_both_sample_from_every_version_and_one_that_is_killed_is_replaced(
    server, sglang, vllm, checkpoint, randomize, mismatch, monkeypatch
):
    model = randomize(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    rt = colo.share([sglang, vllm], model, AdamW(model.parameters(), lr=1e-2), config=RuntimeConfig())
    asked = dict.fromkeys((sglang, vllm), 0)
    for engine in asked:

        def counting(*given, engine=engine, generate=engine.generate, **named):
            asked[engine] += len(given[0])
            return generate(*given, **named)

        monkeypatch.setattr(engine, "generate", counting)

    def step():
        ids = torch.tensor([[1, 2, 3, 4]])
        with rt.train():
            rt.model(input_ids=ids, labels=ids).loss.backward()
            rt.optimizer.step()
            rt.optimizer.zero_grad()

    for version in range(3):
        with rt.rollout():
            found = rt.generate(PROMPTS, **ALL)
        assert {c.weights_version for c in found} == {version} and mismatch(rt.model, found) < CLOSE
        step()
    assert min(asked.values()) >= 3 and sum(asked.values()) == 24
    kv_cache = next(s for s in rt.engine.segments if s.name == "engine.kv_cache")
    assert kv_cache.size_bytes == 4 * MIB, "vLLM's alone is on the trainer's device"

    # killed between two rounds: what it was asked is sampled by the other, on the same weights
    monkeypatch.setattr(carried, "ROUND_TOKENS", 4)
    os.kill(vllm.pids[0], signal.SIGKILL)
    with rt.rollout():
        found = rt.generate(PROMPTS, until=1.0, **ALL)
    assert set(rt.engine.out) == {vllm} and len(found) == 8
    assert {c.spans for c in found} == {((3, 8),)} and mismatch(rt.model, found) < CLOSE

    step()
    rt.engine.recover()
    before = dict(asked)
    with rt.rollout():
        found = rt.generate(PROMPTS, **ALL)
    assert rt.engine.out == {} and all(asked[engine] > before[engine] for engine in asked)
    assert {c.weights_version for c in found} == {4}
    assert mismatch(rt.model, [replace(c, prompt_token_ids=tuple(c.prompt_token_ids)) for c in found]) < CLOSE

    with pytest.raises(PhaseError, match="no engine of the fleet is lost: nothing to recover"):
        rt.engine.recover()
    server.end()
    with pytest.raises(EngineLost, match="no server answers at"):
        rt.engine.recover()
    assert set(rt.engine.out) == {sglang}
    rt.close()
