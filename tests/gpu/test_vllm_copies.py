"""vLLM on CUDA with weights of its own, in its own process: copies out of the trainer's memory, a buffer, adapters."""

import pytest
import torch
from peft import LoraConfig
from tiny_vllm import CUDA, MARKS, PROMPTS, config, difference, train_step
from torch import nn
from torch.optim import AdamW

import colo
from colo.config import RuntimeConfig
from colo.errors import Unsupported
from colo.memory.probe import free_device_bytes
from colo.memory.region import allocate_region
from colo.memory.share import Exported
from colo.units import GIB, MIB
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.ipc import IpcTransport

pytestmark = MARKS
OPTIONS = {"max_model_len": 256, "disable_log_stats": True, "enforce_eager": True, "share_memory": False}


@pytest.fixture(scope="module")
def rt():
    pytest.importorskip("vllm")
    made = colo.launch(
        config(),
        engine="vllm",
        engine_options=OPTIONS,
        optimizer=lambda params: AdamW(params, lr=1e-3, fused=True),
        device=CUDA,
        lora=None,
        config=RuntimeConfig(kv_cache_bytes=GIB, offload="always", weights="copy"),
    )
    yield made
    made.close()


def test_the_engine_copies_out_of_the_trainers_memory_and_follows_it(rt):
    assert rt.transport.name == "ipc" and "out of the trainer's memory" in rt.transport.reason
    for step in range(2):
        train_step(rt, step)
        with rt.rollout():
            completions = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(rt.model, completions) < 0.02
        assert rt.transport.is_current()
    moves = [span.name for span in rt.trace.spans if span.category == "step" and span.name.endswith("engine.weights")]
    assert "allocate engine.weights" in moves and "onload engine.weights" not in moves, "all of them were replaced"
    assert rt.bytes_synced == 3 * sum(p.nbytes for p in rt.model.parameters())


@pytest.mark.parametrize("bucket_bytes", [256 * MIB, MIB // 4])
def test_a_buffer_brings_the_same_bytes(rt, bucket_bytes):
    rt.transport.close()
    transport = IpcTransport(
        ModuleSource(rt.model), rt.engine, why_not_shared="tested", staged=True, bucket_bytes=bucket_bytes
    )
    with torch.no_grad():
        for parameter in rt.model.parameters():
            parameter.mul_(1.01)
    rt.engine.pause()
    for _ in range(3):
        transport.transfer()
    rt.model.to("cpu")  # as who offloads parameters beside a rollout
    with torch.no_grad():
        rt.model.model.norm.weight.mul_(1.5)
    transport.transfer()
    assert transport.is_current()
    rt.model.to(CUDA)
    transport.close()
    rt.transport.reconnect()
    assert rt.transport.is_current()
    rt.versions.publisher.version += 1
    with rt.rollout():
        assert difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0)) < 0.02


@pytest.mark.parametrize("staged", [False, True])
def test_many_publications_leave_nothing_on_the_device(rt, staged, request):
    if staged:
        rt.transport.close()
        direct = rt.versions.publisher._transport
        staging = IpcTransport(ModuleSource(rt.model), rt.engine, why_not_shared="tested", staged=True)
        rt.versions.publisher._transport = staging

        def give_back():
            staging.close()
            rt.versions.publisher._transport = direct
            direct.reconnect()

        request.addfinalizer(give_back)

    def publish(times):
        for _ in range(times):
            rt.versions.publisher.version += 1
            rt.versions.publish()

    publish(10)
    torch.cuda.empty_cache()
    before = free_device_bytes(CUDA)
    publish(200)
    torch.cuda.empty_cache()
    assert before - free_device_bytes(CUDA) < 4 * MIB


def test_weights_copied_after_a_level_1_and_a_level_2_sleep(rt):
    for level in (1, 2):
        rt.engine.sleep(level)
        rt.engine.wake()
        rt.versions.publisher.version += 1
        with rt.rollout():
            assert difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0)) < 0.02


def test_memory_that_cuda_ipc_does_not_export_is_refused_by_name():
    region = allocate_region(4 * MIB, CUDA, name="tested")
    with pytest.raises(Unsupported, match="torch-memory-saver"):
        Exported({"w": region.bytes.view(torch.float32)})
    region.close()


def test_parameters_that_cannot_be_exported_are_staged(rt):
    class One(nn.Module):
        def __init__(self, like):
            super().__init__()
            self.region = allocate_region(sum(p.nbytes + 512 for p in like.parameters()), CUDA, name="tested")
            start = 0
            for name, parameter in like.named_parameters():
                part = self.region.bytes[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
                part.copy_(parameter.detach())
                self.register_parameter(name.replace(".", "/"), nn.Parameter(part))
                start += -(-parameter.nbytes // 512) * 512

        def named_parameters(self, *args, **kwargs):
            return ((name.replace("/", "."), p) for name, p in super().named_parameters(*args, **kwargs))

    model = One(rt.model)
    rt.transport.close()
    transport = IpcTransport(ModuleSource(model), rt.engine, why_not_shared="tested")
    assert "staged through a buffer in two halves: CUDA IPC does not export" in transport.reason
    rt.engine.pause()
    transport.transfer()
    transport.close()
    rt.transport.reconnect()
    assert rt.transport.is_current()


def test_where_cuda_ipc_maps_nothing_host_memory_is_in_between():
    pytest.importorskip("vllm")
    rt = colo.launch(
        config(),
        engine="vllm",
        engine_options=OPTIONS | {"worker_extension_cls": "no_ipc_worker.NoIpcWorker"},
        lora=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        optimizer=lambda params: AdamW(params, lr=1e-2, fused=True),
        device=CUDA,
        config=RuntimeConfig(kv_cache_bytes=GIB),
    )
    assert "in host memory, since a worker says: CUDA IPC does not map" in rt.transport.reason
    for step in range(3):
        train_step(rt, step)
        with rt.rollout():
            assert difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0)) < 0.02
    assert rt.engine.adapter_refusal is None
    base = ModuleSource(rt.model)
    sent_bytes = sum(publication.num_bytes - publication.adapter_bytes for publication in rt.publications)
    assert sent_bytes == sum(tensor.nbytes for _, tensor in base)
    with torch.no_grad():
        for _, tensor in base:
            tensor.mul_(1.01)
    with rt.rollout():
        assert difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0)) < 0.02
    engine, params = rt.engine, rt.engine.sampling_params(max_tokens=16, temperature=0)
    engine.pause()
    engine.load_weights(base)
    engine.commit(rt.weights_version)
    engine.resume()
    assert difference(rt.model, engine.generate(PROMPTS, params, adapter=engine.adapters[-1])) < 0.02
    rt.close()


@pytest.mark.parametrize(("own_process", "enforce_eager"), [(True, True), (False, True), (True, False)])
def test_later_versions_of_an_adapter_are_written_in_place(own_process, enforce_eager):
    pytest.importorskip("vllm")
    options = {"own_process": own_process, "enforce_eager": enforce_eager}
    few = {"max_num_seqs": len(PROMPTS)}  # CUDA graphs for a thousand, twice with adapters, take minutes
    rt = colo.launch(
        config(),
        engine="vllm",
        engine_options=OPTIONS | {"share_memory": True} | options | few,
        lora=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        optimizer=lambda params: AdamW(params, lr=1e-2, fused=True),
        device=CUDA,
        config=RuntimeConfig(kv_cache_bytes=GIB),
    )
    base = {n: p.detach().clone() for n, p in rt.model.named_parameters() if "lora_" not in n}
    for step in range(3):
        train_step(rt, step)
        with rt.rollout():
            sampled = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(rt.model, sampled) < 0.02
        with rt.model.disable_adapter():
            assert difference(rt.model, sampled) > 0.02
    assert rt.engine.adapter_refusal is None
    adapter_bytes = sum(p.nbytes for n, p in rt.model.named_parameters() if "lora_" in n)
    assert {(p.num_bytes, p.adapter_bytes) for p in rt.publications} == {(adapter_bytes, adapter_bytes)}
    assert all(torch.equal(base[n], p) for n, p in rt.model.named_parameters() if n in base)
    rt.close()
