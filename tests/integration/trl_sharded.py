"""One rank of `test_trl_sharded.py`: torchrun --nproc-per-node 2 trl_sharded.py CHECKPOINT RESULTS"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import distributed
from transformers import AutoModelForCausalLM

import colo.trl
from tests.trainers import SMALL_CACHE, digits, logged, trainer_of, use_fsdp2


def whole(model):
    """Copies of all weights, gathered."""
    return {name: getattr(p.detach(), "full_tensor", p.detach().clone)() for name, p in model.named_parameters()}


def attached(checkpoint, mode, folder, **changes):
    """A trainer of weights in bf16, which have fp32 masters, or of an adapter."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="bfloat16" if mode == "masters" else "float32")
    made_with = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if mode == "lora" else {}
    trainer = trainer_of(model, folder, reward=digits, made_with=made_with, ddp_backend="gloo", max_steps=3, **changes)
    use_fsdp2(trainer)
    colo.trl.attach(trainer, engine="torch", config=SMALL_CACHE, seeded=True)
    return trainer


def save(trainer, folder, weights):
    """Save a trainer's model; whether the files have `weights`, or those of them that are an adapter."""
    trainer.save_model(str(folder))
    distributed.barrier()
    files = [folder / name for name in ("adapter_model.safetensors", "model.safetensors")]
    saved = load_file(next(file for file in files if file.is_file()))
    adapter = {name.replace(".default", ""): tensor for name, tensor in weights.items() if "lora_" in name}
    return all(torch.equal(saved[name], tensor) for name, tensor in (adapter or weights).items())


def found(checkpoint, mode, folder):
    """What a run of three steps shows, and one that is resumed from its second."""
    trainer = attached(checkpoint, mode, folder, save_strategy="steps", save_steps=2)
    rt = trainer.colo
    before = whole(trainer.model)
    trainer.evaluate()  # which ends with whole weights in the model
    trainer.train()
    after = whole(trainer.model)
    shown = {
        "transport": rt.transport.name,
        "trained": sum(p.requires_grad for p in trainer.model.parameters()),
        "changed": sum(not torch.equal(before[name], p) for name, p in after.items()),
        "sum": sum(p.double().sum().item() for p in after.values()),
        "gap": colo.check(rt).mismatch,
        "rewards": logged(trainer),
        "gaps": logged(trainer, "colo/mismatch"),
        "version": rt.weights_version,
        "away": rt.scheduler.segments["trainer.optimizer"].size_bytes,
        "saved": save(trainer, folder / "saved", after),
    }
    rt.close()
    again = attached(checkpoint, mode, folder / "again")
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return shown | {"resumed": all(torch.equal(after[name], p) for name, p in whole(again.model).items())}


def main(checkpoint, results):
    torch.set_num_threads(1)
    runs = {mode: found(checkpoint, mode, Path(results, mode)) for mode in ("masters", "lora")}
    Path(results, f"{os.environ['RANK']}.json").write_text(json.dumps(runs))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
