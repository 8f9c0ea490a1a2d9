"""vLLM across two GPUs: ranks of torchrun, each with a trainer of its own, or workers beside one trainer."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # torchrun starts this file by itself

from tiny_vllm import MARKS, PROMPTS, config, difference, launch, torchrun, train_step

pytestmark = [*MARKS, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def one_rank(checkpoint, results):
    """What one of two ranks finds of three rollouts with a step in between."""
    import colo
    from colo.config import RuntimeConfig
    from colo.engines.vllm.client.engine import VLLMEngine
    from colo.units import GIB

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    engine = VLLMEngine(
        checkpoint,
        own_process=False,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=2,
        kv_cache_bytes=GIB,
        device=device,
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=True,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
    plan = engine.record_plan(dict(model.named_parameters()))
    found = {
        "fallbacks": plan.fallbacks,
        "differences": plan.differences(dict(model.named_parameters())),
        "replayed_bytes": sum(copy.num_bytes for copy in plan.copies),
        "mismatches": [],
        "tokens": [],
    }
    rt = colo.share(
        engine, model, AdamW(model.parameters(), lr=1e-3, fused=True), config=RuntimeConfig(offload="always")
    )
    for step in range(3):
        with rt.rollout():
            completions = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        found["mismatches"].append(difference(model, completions))
        found["tokens"].append([c.token_ids for c in completions])
        train_step(rt, step)
    found |= {"transport": rt.transport.name, "bytes_synced": rt.bytes_synced}
    rt.close()
    Path(results, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def test_both_ranks_sample_what_transformers_does_after_every_step(tmp_path):
    pytest.importorskip("vllm")
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    ranks = torchrun(__file__, tmp_path, tmp_path, tmp_path)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    replicated_bytes = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    assert sum(found["replayed_bytes"] for found in ranks) == weights_bytes + replicated_bytes
    for found in ranks:
        assert (found["fallbacks"], found["differences"], found["transport"]) == ({}, [], "local")
        assert len(found["mismatches"]) == 3 and max(found["mismatches"]) < 0.02
        assert found["bytes_synced"] == 3 * found["replayed_bytes"]
    assert ranks[0]["tokens"] == ranks[1]["tokens"]
    assert ranks[0]["tokens"][0] != ranks[0]["tokens"][2]


def test_workers_in_a_process_of_their_own_map_slices_of_what_one_trainer_owns():
    rt = launch(enforce_eager=True, tensor_parallel_size=2)
    assert "the engine lays it out differently" in rt.transport.reason and len(rt.engine.pids) == 2
    sampled = []
    for step in range(3):
        with rt.rollout():
            sampled.append(rt.generate(PROMPTS, max_tokens=16, temperature=0))
        assert difference(rt.model, sampled[-1]) < 0.02
        train_step(rt, step)
    assert [c.token_ids for c in sampled[0]] != [c.token_ids for c in sampled[2]]
    rt.close()


if __name__ == "__main__":
    one_rank(*sys.argv[1:])
