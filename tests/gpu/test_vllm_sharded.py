"""A trainer that FSDP2 has sharded over GPUs, and vLLM: on one GPU, divided between two, or one for each of two."""

import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # torchrun starts this file by itself

from tiny_vllm import MARKS, PROMPTS, config, difference, torchrun, train_step

pytestmark = MARKS

SLICES = {"own_process": False, "distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
STEPS = 3


def one_rank(checkpoint, way):
    """What a rank finds of three rollouts with a step in between; the engine of the last one ends, if it is apart."""
    import colo
    from colo.config import RuntimeConfig
    from colo.engines.vllm.client.engine import VLLMEngine
    from colo.memory.storage import local_shard
    from colo.units import GIB

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if way == "slices" else 0)
    torch.cuda.set_device(device)
    options = {"enforce_eager": True, "max_model_len": 256, "disable_log_stats": True, "kv_cache_bytes": GIB}
    if way != "slices" and not distributed.is_initialized():
        distributed.init_process_group("nccl", device_id=device)
    engine = VLLMEngine(checkpoint, device=device, **options, **(SLICES if way == "slices" else {}))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device)
    weights_bytes = sum(p.numel() for p in model.parameters()) * torch.bfloat16.itemsize
    mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
    computing = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=computing)
    fully_shard(model, mesh=mesh, mp_policy=computing)
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    first, stepped = next(iter(model.parameters())), {}

    def parts(state):
        return {name: local_shard(value).cpu() for name, value in state.items()}

    optimizer.register_step_post_hook(lambda *_: stepped.update(parts(optimizer.state[first])))
    settings = RuntimeConfig(offload="always", weights="staged" if way == "staged" else "auto")
    rt = colo.share(engine, model, optimizer, config=settings)
    found = {"transport": rt.transport.name, "mismatches": [], "tokens": [], "away": [], "weights_bytes": weights_bytes}
    found["same"] = []
    for step in range(STEPS):
        with rt.rollout():
            completions = rt.generate(PROMPTS, max_tokens=16, temperature=0)
            found["away"].append(rt.scheduler.segments["trainer.optimizer"].device_bytes)
            taken = optimizer.state_dict()
        found["mismatches"].append(difference(model, completions))
        found["tokens"].append([c.token_ids for c in completions])
        if step:
            optimizer.load_state_dict(taken)
            for state in (taken, optimizer.state_dict()):
                of_first = parts(state["state"][0])
                found["same"].append(all(torch.equal(of_first[name], value) for name, value in stepped.items()))
        train_step(rt, step)
    found["bytes_synced"] = rt.bytes_synced
    if way != "staged":
        found["received"] = [rt.transport.received_bytes, rt.transport.bytes_to_receive]
        found["reason"] = rt.transport.reason
    found["state_bytes"] = rt.scheduler.segments["trainer.optimizer"].size_bytes
    found["parts_bytes"] = sum(local_shard(p).nbytes for p in optimizer.param_groups[0]["params"])
    if way == "staged":
        if int(os.environ["RANK"]) == distributed.get_world_size() - 1:
            os.kill(engine.pids[0], 9)
        try:
            rt.generate(PROMPTS, max_tokens=16, temperature=0)
        except (colo.EngineLost, colo.TransferError) as error:
            found["failure"] = type(error).__name__
        rt.recover()
        found["mismatches"].append(difference(model, rt.generate(PROMPTS, max_tokens=16, temperature=0)))
    rt.close()
    if way != "slices":
        engine.close()
    return found


def run(folder, *ways, ranks):
    """What every rank has found, in order, one way after the other."""
    pytest.importorskip("vllm")
    torch.manual_seed(0)  # a fixture of the module comes before the one that does so
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(folder)
    found = torchrun(__file__, folder, folder, folder, *ways, ranks=ranks)
    for rank in itertools.chain(*found):
        assert max(rank["mismatches"]) < 0.02
        assert rank["tokens"][0] != rank["tokens"][2]
        assert rank["away"] == [0] * STEPS
        assert rank["same"] == [True] * 2 * (STEPS - 1)
        assert rank["state_bytes"] >= 2 * rank["parts_bytes"]
    return list(zip(*found, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank finds with an engine whose memory it maps, and then with one to which it sends buckets."""
    return run(tmp_path_factory.mktemp("alone"), "apart", "staged", ranks=1)


def test_one_rank_fills_an_engine_whose_memory_it_maps(alone):
    (rank,) = alone[0]
    assert (rank["transport"], rank["received"]) == ("slices", [0, 0])
    assert rank["bytes_synced"] == STEPS * rank["weights_bytes"]


def test_one_rank_gathers_into_buckets_and_its_engine_comes_back(alone):
    (rank,) = alone[1]
    assert (rank["transport"], rank["failure"], len(rank["mismatches"])) == ("ipc", "EngineLost", STEPS + 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_slices_of_two_ranks_go_into_those_of_both(tmp_path):
    (found,) = run(tmp_path, "slices", ranks=2)
    assert [rank["transport"] for rank in found] == ["slices"] * 2
    for rank in found:
        assert "written straight into every rank's engine" in rank["reason"]
    for received, planned in (rank["received"] for rank in found):
        assert received == STEPS * planned
        assert 0 < planned < 0.3 * found[0]["weights_bytes"]
    assert found[0]["tokens"] == found[1]["tokens"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_for_each_of_two_ranks_takes_what_both_gather_and_one_dies(tmp_path):
    (found,) = run(tmp_path, "staged", ranks=2)
    assert [rank["transport"] for rank in found] == ["ipc"] * 2
    assert [rank["failure"] for rank in found] == ["TransferError", "EngineLost"]
    assert found[0]["parts_bytes"] < 0.6 * 2 * found[0]["weights_bytes"]


if __name__ == "__main__":
    checkpoint, results, *ways = sys.argv[1:]
    if ways != ["slices"]:  # each rank and its engine see the same one
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(os.environ["LOCAL_RANK"])]
    all_found = [one_rank(checkpoint, way) for way in ways]
    Path(results, f"{os.environ['RANK']}.json").write_text(json.dumps(all_found))
