"""vLLM on CUDA: one copy of the weights in one process and in two, an engine of your own, a killed one."""

import os
import signal

import pytest
import torch
from tiny_vllm import CUDA, KV_CACHE_BYTES, MARKS, OPTIONS, PROMPTS, config, difference, train_step
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.engines.base import EngineState
from colo.errors import EngineLost, PhaseError
from colo.memory.probe import free_device_bytes
from colo.units import MIB

pytestmark = MARKS


def launch(**options):
    pytest.importorskip("vllm")
    return colo.launch(
        config(),
        engine="vllm",
        engine_options=OPTIONS | options,
        optimizer=lambda params: AdamW(params, lr=1e-3, fused=True),
        device=CUDA,
        config=RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES, offload="always"),
    )


@pytest.fixture(scope="class", params=["its own process, CUDA graphs and torch.compile", "this process"])
def rt(request):
    own = request.param != "this process"
    rt = launch(own_process=own, enforce_eager=not own)
    yield rt
    rt.close()


class TestOneCopy:
    def test_training_is_what_vllm_samples_from_next_and_nothing_is_sent(self, rt):
        with rt.rollout():
            before = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(rt.model, before) < 0.02
        for step in range(3):
            train_step(rt, step)
        with rt.rollout():
            after = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(rt.model, after) < 0.02
        assert [c.token_ids for c in before] != [c.token_ids for c in after]
        assert after[0].weights_version == before[0].weights_version + 3
        assert rt.bytes_synced == 0 and rt.transport.name == "shared"
        assert "mismatch" in rt.report().facts

    def test_the_kv_cache_is_with_the_driver_while_training(self, rt):
        with rt.rollout():
            during = free_device_bytes(CUDA)
        with rt.train():
            assert free_device_bytes(CUDA) - during > 0.9 * KV_CACHE_BYTES
            with pytest.raises(PhaseError, match="inside train"):
                rt.generate(PROMPTS)


def test_a_killed_engine_comes_back_on_the_same_weights():
    rt = launch(enforce_eager=True)
    train_step(rt, 0)
    with rt.rollout():
        gap = difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0))
    weights = [p.detach().clone() for p in rt.model.parameters()]
    (pid,) = rt.engine.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="recover"):
        rt.generate(PROMPTS)
    assert rt.engine.state is EngineState.LOST
    assert all(torch.equal(a, b) for a, b in zip(weights, rt.model.parameters(), strict=True))
    train_step(rt, 1)
    rt.recover()
    assert rt.engine.pids != (pid,)
    with rt.rollout():
        again = rt.generate(PROMPTS, max_tokens=16, temperature=0)
    assert difference(rt.model, again) < 2 * gap + 0.01
    rt.close()


def test_an_engine_of_your_own_with_vllms_own_loader_is_shared_across_processes(tmp_path, monkeypatch):
    import vllm

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM itself does once CUDA is in use
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    llm = vllm.LLM(
        str(tmp_path),
        worker_extension_cls="colo.engines.vllm.worker.ColoWorker",
        gpu_memory_utilization=0.2,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
    )
    model = model.to(CUDA)
    rt = colo.share(llm, model, AdamW(model.parameters(), lr=1e-3, fused=True))
    assert rt.transport.name == "shared" and os.getpid() not in rt.engine.pids
    for step in range(3):
        with rt.rollout():
            sampled = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(model, sampled) < 0.02
        train_step(rt, step)
    assert rt.bytes_synced == 0
    weights = [p.detach().clone() for p in rt.model.parameters()]
    os.kill(rt.engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLost):
        rt.generate(PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(weights, rt.model.parameters(), strict=True))
    rt.close()
    llm.llm_engine.engine_core.shutdown()


def test_close_gives_the_memory_back():
    torch.cuda.empty_cache()
    before = free_device_bytes(CUDA)
    rt = launch(own_process=False, enforce_eager=True)
    train_step(rt, 0)
    rt.close()
    del rt
    assert before - free_device_bytes(CUDA) < 600 * MIB  # workspaces of vLLM's libraries stay
