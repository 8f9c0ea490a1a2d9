"""One rank of `test_vllm_sharded.py`: a trainer that FSDP2 has sharded, and vLLM.

torchrun --nproc-per-node 2 sharded_vllm.py CHECKPOINT slices|mapped|staged RESULTS

slices: vLLM is divided between the ranks, in their processes. mapped, staged: each rank has one of its own, in another
process, whose memory it maps, or to which it sends buckets, and which ends in between.
"""

import copy
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from tensor_parallel import GREEDY, PROMPTS, mismatch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.processes import lives
from colo.units import MIB
from tests import warm

OPTIONS = {"kv_cache_bytes": 4 * MIB, "device": "cpu", "enforce_eager": True, "max_model_len": 256, "block_size": 32}
SLICES = {"own_process": False, "distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
APART = {"distributed_executor_backend": warm.IN_ONE_PROCESS, "deadline_s": 60.0}


def sharded(checkpoint):
    """A model that is spread over both ranks, and a whole copy of it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, twin


def train(rt, twin, optimizer):
    ids = torch.tensor(PROMPTS)
    with rt.train():
        for model in (rt.model, twin):
            model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
    optimizer.step()
    rt.optimizer.zero_grad()
    optimizer.zero_grad()


def kill(pid):
    """Kill a process, which dies only when it is scheduled: a publication that is quicker goes through."""
    process = psutil.Process(pid)  # before it dies: once its parent has waited for it, there is none of that number
    process.kill()
    while lives(process):
        time.sleep(0.01)


def failure(call):
    try:
        call()
    except colo.ColoError as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(checkpoint, way, results):
    if way != "slices":
        distributed.init_process_group("gloo")
    engine = VLLMEngine(checkpoint, **OPTIONS, **(SLICES if way == "slices" else APART))
    model, twin = sharded(checkpoint)
    config = RuntimeConfig(weights="staged" if way == "staged" else "auto")
    found = {"mismatches": []}
    if way == "staged":
        other = RuntimeConfig(weights="staged" if os.environ["RANK"] == "1" else "auto")
        found["refused"] = failure(lambda: colo.share(engine, model, SGD(model.parameters()), config=other))
    rt = colo.share(engine, model, SGD(model.parameters(), lr=0.1), config=config)
    optimizer = SGD(twin.parameters(), lr=0.1)
    found |= {"transport": rt.transport.name, "reason": rt.transport.reason}
    for _ in range(3):
        found["mismatches"].append(mismatch(twin, rt.generate(PROMPTS, **GREEDY)))
        train(rt, twin, optimizer)
    found["bytes_synced"] = rt.bytes_synced
    if way != "staged":
        found["received"] = [rt.transport.received_bytes, rt.transport.bytes_to_receive]
    if way != "slices":
        if os.environ["RANK"] == "1":
            kill(engine.pids[0])
        found["failure"] = failure(lambda: rt.generate(PROMPTS, **GREEDY))
        rt.recover()
        found["mismatches"].append(mismatch(twin, rt.generate(PROMPTS, **GREEDY)))
    found["same"] = all(
        torch.equal(p.full_tensor(), other) for p, other in zip(model.parameters(), twin.parameters(), strict=True)
    )
    rt.close()
    Path(results, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with warm.engines():
        main(*sys.argv[1:])
