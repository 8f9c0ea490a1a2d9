"""One rank of `test_trl_ranks.py`: torchrun --nproc-per-node 2 trl_ranks.py CHECKPOINT vllm|lora RESULTS"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from peft import LoraConfig
from torch import distributed

import colo.trl
from colo.config import RuntimeConfig
from colo.units import MIB
from tests.trainers import SMALL_CACHE, digits, frozen, logged, trained, trainer_of


def main(checkpoint, mode, results):
    torch.set_num_threads(1)
    made_with = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if mode == "lora" else {}
    trainer = trainer_of(checkpoint, results, reward=digits, made_with=made_with, ddp_backend="gloo", max_steps=3)
    before, base = trained(trainer.model), frozen(trainer.model)
    engine = {"engine": "torch", "config": SMALL_CACHE}
    if mode == "vllm":
        options = {"enforce_eager": True, "max_model_len": 64, "block_size": 32}
        engine = {"engine_options": options, "config": RuntimeConfig(kv_cache_bytes=4 * MIB)}
    rt = colo.trl.attach(trainer, seeded=True, **engine)
    drawn, generate = [], trainer.vllm_generation.generate

    def noted(*arguments, **options):
        found = generate(*arguments, **options)
        drawn.append(found[1])
        return found

    trainer.vllm_generation.generate = noted
    trainer.train()
    after = trained(trainer.model)
    total = torch.stack([p.double().sum() for p in after.values()])
    first = total.clone()
    distributed.broadcast(first, 0)
    found = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "same": bool((total == first).all()),
        "changed": all(not torch.equal(before[name], p) for name, p in after.items()),
        "base": all(torch.equal(base[name], p) for name, p in frozen(trainer.model).items()),
        "rewards": logged(trainer),
        "gap": max(logged(trainer, "colo/mismatch")) if logged(trainer) else 0.0,
        "version": rt.weights_version,
        "sent": rt.bytes_synced,
        "shares": rt.transport.shares,
        "drawn": drawn,
    }
    rt.close()
    found["closed"] = not hasattr(trainer, "colo")
    Path(results, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
