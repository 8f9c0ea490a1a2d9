"""One rank of `test_vllm_torchrun.py`: half of an engine and all of a model, in one process.

torchrun --nproc-per-node 2 tensor_parallel.py CHECKPOINT RESULTS
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.optim import SGD
from transformers import AutoModelForCausalLM

import colo
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.worker.weights import Reload
from colo.units import MIB

PROMPTS = [[(7 * i + j * j) % 150 for j in range(70)] for i in range(4)]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@torch.no_grad()
def mismatch(model, completions):
    """The largest |log p(engine) - log p(model)|."""
    ids = torch.tensor([c.prompt_token_ids + c.token_ids for c in completions])
    logits = model(input_ids=ids).logits[:, 69:-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, 70:, None])[..., 0]
    return float((expected - torch.tensor([c.logprobs for c in completions])).abs().max())


def main(checkpoint, results):
    torch.manual_seed(100 + int(os.environ["RANK"]))  # as a trainer may: its ranks have other data
    before = torch.get_rng_state()
    engine = VLLMEngine(
        checkpoint,
        own_process=False,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=2,
        kv_cache_bytes=4 * MIB,
        device="cpu",
        enforce_eager=True,
        max_model_len=256,
        block_size=32,
    )
    has_own_numbers = torch.equal(torch.get_rng_state(), before)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    plan = engine.record_plan(parameters)
    found = {
        "has_own_numbers": has_own_numbers,
        "fallbacks": plan.fallbacks,
        "aliases": sorted(plan.aliases),
        "differences": plan.differences(parameters),
        "replayed_bytes": sum(copy.num_bytes for copy in plan.copies),
    }
    rt = colo.share(engine, model, SGD(model.parameters(), lr=0.1))
    found["sampled"] = [c.token_ids for _ in range(2) for c in rt.generate(PROMPTS, max_tokens=8, ignore_eos=True)]
    found |= {"transport": rt.transport.name, "mismatches": [], "tokens": []}
    ids = torch.tensor(PROMPTS)
    for _ in range(3):
        completions = rt.generate(PROMPTS, **GREEDY)
        found["mismatches"].append(mismatch(model, completions))
        found["tokens"].append([c.token_ids for c in completions])
        with rt.train():
            model(input_ids=ids, labels=ids).loss.backward()
            rt.optimizer.step()
    found["bytes_synced"] = rt.bytes_synced
    transfer = rt.transport.transfer

    def broken(version):
        raise ValueError("rank 1 cannot copy")

    if os.environ["RANK"] == "1":
        rt.transport.transfer = broken
    found["failures"] = []
    for _ in range(2):
        try:
            rt.generate(PROMPTS, **GREEDY)
        except (ValueError, colo.TransferError) as error:
            found["failures"].append(f"{type(error).__name__}: {error}")
    rt.transport.transfer = transfer
    finish = Reload.finish

    def stumble(reload):
        finish(reload)
        raise RuntimeError("rank 1 stumbles")

    if os.environ["RANK"] == "1":
        Reload.finish = stumble
    try:
        engine.load_weights(model.named_parameters())
    except colo.TransferError as error:
        found["failures"].append(f"TransferError: {error}")
    Reload.finish = finish
    engine.load_weights(model.named_parameters())
    found["after"] = mismatch(model, rt.generate(PROMPTS, **GREEDY))
    rt.close()
    Path(results, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
