"""vLLM on CUDA in a process of its own: what it waits for, what it holds, and one of yours with vLLM's own loader."""

import os
import signal
import time
from multiprocessing import active_children

import pytest
import torch
from tiny_vllm import CUDA, MARKS, OPTIONS, PROMPTS, config, difference, launch, train_step
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.errors import EngineLost, PhaseError
from colo.memory.probe import used_device_bytes
from colo.units import MIB

pytestmark = MARKS


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


def settled_bytes():
    """Bytes in use on the device once two looks agree and no engine of an earlier test lives, or after 30 s."""
    give_up_s = time.monotonic() + 30
    before, now = None, used_device_bytes(CUDA)
    while (now != before or active_children()) and time.monotonic() < give_up_s:
        time.sleep(0.5)
        before, now = now, used_device_bytes(CUDA)
    return now


def test_a_worker_holds_the_weights_once_and_all_that_stays_while_it_sleeps_is_named(tmp_path):
    pytest.importorskip("vllm")
    from colo.engines.vllm.client.engine import VLLMEngine

    large = config(hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=16)
    with CUDA:
        model = AutoModelForCausalLM.from_config(large, dtype=torch.bfloat16)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    assert weights_bytes > 600 * MIB
    model.save_pretrained(tmp_path)
    before = settled_bytes()
    engine = VLLMEngine(
        tmp_path,
        kv_cache_bytes=64 * MIB,
        device=CUDA,
        enforce_eager=True,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        worker_extension_cls="probe_worker.ProbeWorker",
        **OPTIONS,
    )
    (peak_bytes,) = engine.llm.collective_rpc("peak_bytes")
    assert 0 < peak_bytes < weights_bytes // 2  # of torch's own, while it was loaded
    engine.commit(0)
    engine.generate(PROMPTS, engine.sampling_params(max_tokens=16, temperature=0))
    engine.sleep("keep-weights")
    stays = used_device_bytes(CUDA) - before
    named = weights_bytes + sum(engine.residual_bytes.values())
    assert abs(stays - named) < weights_bytes // 4
    assert engine.residual_bytes["workspaces and buffers"] < 256 * MIB  # 198 on an H100
    engine.close()
    give_up_s = time.monotonic() + 20
    while used_device_bytes(CUDA) - before > weights_bytes // 2:  # its process takes a moment to end
        assert time.monotonic() < give_up_s
        time.sleep(0.1)


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
    with pytest.warns(UserWarning, match="KV cache stays on the device .* start vLLM with enable_sleep_mode=True"):
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
    with pytest.raises(EngineLost, match="the vllm.LLM is your own: close the runtime, start another and share it"):
        rt.generate(PROMPTS)
    with pytest.raises(PhaseError, match="close the runtime, start another and share it"):
        rt.recover()
    assert all(torch.equal(a, b) for a, b in zip(weights, rt.model.parameters(), strict=True))
    rt.close()
    llm.llm_engine.engine_core.shutdown()
