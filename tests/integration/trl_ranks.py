"""One rank of `test_trl_ranks.py`: torchrun --nproc-per-node 2 trl_ranks.py CHECKPOINT vllm|lora RESULTS"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from peft import LoraConfig
from torch import distributed

import colo.trl
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from tests import warm
from tests.trainers import SMALL_CACHE, digits, frozen, logged, trained, trainer_of


def made(checkpoint, mode, results):
    """A trainer with colo: by the flag on vLLM, or of an adapter that `attach` puts on the embedded engine."""
    options = {"reward": digits, "ddp_backend": "gloo", "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    if mode == "vllm":
        llm = {"enforce_eager": True, "max_model_len": 64, "block_size": 32}
        llm["distributed_executor_backend"] = warm.IN_ONE_PROCESS
        flag = {
            "fast_inference": True,
            "colo_engine": "vllm",
            "colo_engine_options": llm,
            "colo_kv_cache_bytes": "4MiB",
            "colo_seeded": True,
        }
        return trainer_of(checkpoint, results, kind=ColoGRPOTrainer, config=ColoGRPOConfig, **options, **flag)
    lora = LoraConfig(r=4, target_modules="all-linear")
    trainer = trainer_of(checkpoint, results, made_with={"peft_config": lora}, **options)
    # rounded at random, and on both ranks alike, whose generators TRL seeds apart
    config = replace(SMALL_CACHE, moment_dtype="bfloat16")
    colo.trl.attach(trainer, engine="torch", config=config, seeded=True)
    return trainer


def main(checkpoint, mode, results):
    torch.set_num_threads(1)
    trainer = made(checkpoint, mode, results)
    rt = trainer.colo
    before, base = trained(trainer.model), frozen(trainer.model)
    drawn, generate = [], trainer.vllm_generation.generate

    def noted(*arguments, **options):
        found = generate(*arguments, **options)
        drawn.append(found[1])
        return found

    trainer.vllm_generation.generate = noted
    if mode == "lora":
        trainer.evaluate()
        drawn.clear()
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
        "evaluations": len(logged(trainer, "eval_reward")),
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
