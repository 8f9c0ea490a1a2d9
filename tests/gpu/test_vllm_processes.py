"""vLLM on CUDA in a process of its own: one that is killed, one of your own with vLLM's own loader."""

import os
import signal

import pytest
import torch
from tiny_vllm import CUDA, MARKS, PROMPTS, config, difference, launch, train_step
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.engines.base import EngineState
from colo.errors import EngineLost

pytestmark = MARKS


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


def test_a_rollout_waits_for_the_trainers_kernels():
    rt = launch(enforce_eager=True, offload="auto")
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=16, temperature=0)
    for step in range(3):
        ids = torch.randint(1, 1000, (4, 64), generator=torch.Generator().manual_seed(step)).to(CUDA)
        with rt.train():
            rt.model(input_ids=ids, labels=ids).loss.backward()
            torch.cuda._sleep(2_000_000_000)  # about a second, before the weights change
            rt.optimizer.step()
            rt.optimizer.zero_grad()
        with rt.rollout():
            sampled = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(rt.model, sampled) < 0.02
    rt.close()


def test_an_engine_of_your_own_with_vllms_own_loader_is_shared_across_processes(tmp_path, monkeypatch):
    vllm = pytest.importorskip("vllm")

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
