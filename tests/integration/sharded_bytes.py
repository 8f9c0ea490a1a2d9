"""One rank of `test_vllm_sharded_bytes.py`: one vLLM, divided between the ranks, and every kind of sharded trainer.

torchrun --nproc-per-node N sharded_bytes.py CHECKPOINT divided|apart RESULTS

What vLLM itself has read of the checkpoint is what each trainer, sharded or of Megatron's, has to bring it again.
divided: vLLM is cut into as many parts as there are ranks. apart: each rank has one of its own, in another process.
"""

import json
import os
import sys
from pathlib import Path

import megatron_tiny as tiny
import torch
from megatron_ranks import source_of
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from vllm import LLM

import colo
from colo.config import RuntimeConfig
from colo.engines.vllm.client.engine import VLLMEngine
from colo.units import MIB
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.spread import SpreadSource
from colo.weights.transports.choice import transport_for
from tests import warm

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "kv_channels": 32, "ffn_hidden_size": 96}
LAYOUTS = {2: ("tp2", "pp2", "pp2vp2"), 4: ("tp4", "tp2pp2", "tp2pp2vp2")}
TWIN = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
OPTIONS = {"enforce_eager": True, "max_model_len": 128, "block_size": 32, "dtype": "float32"}


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])


def whole_layers(model, count):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh_of(count))
    fully_shard(model, mesh=mesh_of(count))


def replicas(model, count):
    fully_shard(model, mesh=mesh_of(2, count // 2))


def partly(model, count):
    for layer in model.model.layers[1:]:
        fully_shard(layer.self_attn, mesh=mesh_of(count))


def with_tensor_parallelism(model, count):
    mesh = mesh_of(count // 2, 2)
    for layer in model.model.layers:
        plan = {"self_attn.q_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
        parallelize_module(layer, mesh["inner"], plan)
        fully_shard(layer, mesh=mesh["outer"])


def offloaded(model, count):
    fully_shard(model, mesh=mesh_of(count), offload_policy=CPUOffloadPolicy(pin_memory=False))


MESHES = (whole_layers, replicas, partly, with_tensor_parallelism, offloaded)


def of_fsdp(checkpoint, shard):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    shard(model, distributed.get_world_size())
    return ModuleSource(model)


@torch.no_grad()
def of_megatron(name, weights, layout):
    """A model of Megatron's in a layout, with the checkpoint's weights."""
    placed = source_of(name, tiny.build(name, tiny.use_layout(layout), dtype=torch.float32, **SIZES))
    for part in placed.parts():
        region = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
        part.tensor.copy_(weights[part.name][region])
    return SpreadSource(placed, device=CPU)


def sent(source, engine, memory):
    """Whether all memory of this rank's engine has become what it was, and the bytes that came and were to come."""
    transport = transport_for(source, engine, RuntimeConfig())
    before = [tensor.clone() for tensor in memory]
    for tensor in memory:
        tensor.fill_(float("nan"))
    transport.transfer()
    transport.verify()
    same = all(map(torch.equal, memory, before))
    for tensor, value in zip(memory, before, strict=True):
        tensor.copy_(value)
    return [transport.name, same, transport.received_bytes, transport.bytes_to_receive]


def trained(llm, layout):
    """How far log-probabilities of a `vllm.LLM` are from those of transformers, before Megatron's step and after it."""
    import megatron_share as share  # with stand-ins for functions of torch's that vLLM has no use for any more

    ours = share.steps.make(tiny.use_layout(layout), "qwen3", "distributed", torch.float32, **SIZES)
    found = []
    with colo.share(llm, *ours, config=RuntimeConfig(offload="always")) as rt:
        for number in range(2):
            with rt.rollout():
                completions = rt.generate([[1, 2, 3], [4, 5, 6, 7]], **share.GREEDY)
                away = [rt.scheduler.segments[segment].device_bytes for segment in share.PARKED]
            found.append([share.gap("qwen3", ours[0], completions, **TWIN), away, completions[0].weights_version])
            with rt.train():
                share.train(*ours, number)
    return found


def main(checkpoint, way, results):
    torch.set_num_threads(1)
    count, found = int(os.environ["WORLD_SIZE"]), {}
    if way == "divided":
        divided = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": count}
        cache = {"kv_cache_memory_bytes": 4 * MIB, "gpu_memory_utilization": 0.01, "skip_tokenizer_init": True}
        llm = LLM(checkpoint, load_format="colo", **OPTIONS, **divided, **cache)
        engine = VLLMEngine.around(llm)
    else:
        distributed.init_process_group("gloo")
        engine = VLLMEngine(checkpoint, kv_cache_bytes=4 * MIB, device="cpu", **OPTIONS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights = ModuleSource(model).tensors()
    memory = [copy.target for copy in engine.record_plan(weights).copies]
    found["taken"] = [sum(t.nbytes for t in memory), sum(t.nbytes for t in weights.values())]
    for shard in MESHES:
        found[shard.__name__] = sent(of_fsdp(checkpoint, shard), engine, memory)
    for layout in LAYOUTS[count]:
        found[layout] = sent(of_megatron("qwen3", weights, layout), engine, memory)
    engine.close()
    if way == "divided" and count == 2:
        found["trained"] = [trained(llm, layout) for layout in ("tp2", "pp2vp2")]
    Path(results, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with warm.engines():
        main(*sys.argv[1:])
