"""GRPO on every weight of a model that FSDP2 shards over two ranks, each of which samples from an engine of its own.

    torchrun --nproc-per-node 2 examples/fsdp_two_gpus.py                             # a tiny model, on CPUs or GPUs
    torchrun --nproc-per-node 2 examples/fsdp_two_gpus.py --model Qwen/Qwen3-0.6B     # a folder or a hub id

A rank holds half of every weight. Before a rollout its engine takes the other halves from the other rank, in slices;
no weight is ever whole on the trainer's side. Ranks sample different sums, and FSDP2 averages their gradients. The
task is one-digit addition: the reward is 1 for the right sum. Without `--model` a small model is first shown sums
until it answers about a fifth of them.
"""

from __future__ import annotations

import argparse
import os
import random
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import colo
from colo.demo import ALPHABET, warm_up
from colo.rl.loop import Batch
from colo.rl.loss import group_advantages, grpo_loss
from colo.testing import tiny_tokenizer
from colo.trainer.master_weights import MasterWeights

PROBLEMS = 25  # a step, on each rank
GROUP = 8  # completions for each problem
EVERY_SUM = [(a, b) for a in range(10) for b in range(10)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on a model that FSDP2 shards over two ranks.")
    parser.add_argument("--model", help="folder or hub id of a checkpoint; by default a tiny model is made")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    return parser.parse_args()


def join(device: str | None) -> torch.device:
    """Join the other rank, and return this rank's device."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        torch.set_num_threads(1)  # a model this small gains nothing from more
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    own = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    return own


def build(name: str | None, device: torch.device) -> tuple[Any, Any]:
    """A model, the same on every rank, and its tokenizer."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device), tokenizer
    torch.manual_seed(0)
    return warm_up(torch.device("cpu"), seed=0, tell=lambda words: None).to(device), tiny_tokenizer(ALPHABET)


def share(args: argparse.Namespace, device: torch.device) -> colo.Runtime:
    """A runtime over a sharded model and an engine of this rank's."""
    model, tokenizer = build(args.model, device)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Masters in fp32 where the model is in 16 bits; they are sharded like the model, and parked during rollouts.
    learning_rate = 1e-6 if args.model else 5e-4
    make_optimizer = MasterWeights(lambda params: torch.optim.AdamW(params, lr=learning_rate, weight_decay=0.0))
    config = colo.RuntimeConfig(offload=colo.Offload.ALWAYS)
    return colo.share("torch", model, make_optimizer(model.parameters()), tokenizer=tokenizer, config=config)


def reward(completion: colo.Completion, answer: int) -> float:
    """1 when the first number of the text is the answer."""
    number = re.match(r"\s*(\d+)", completion.text or "")
    return float(number is not None and int(number[1]) == answer)


def train_step(rt: colo.Runtime, completions: Sequence[colo.Completion], rewards: Sequence[float]) -> None:
    """One optimizer step on what both ranks have sampled."""
    batch = Batch.of(completions, rt.device)
    logits = rt.model(input_ids=batch.input_ids_BT, attention_mask=batch.attention_mask_BT).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids_BT[:, 1:, None])[..., 0]
    advantages = group_advantages(torch.tensor(rewards, device=rt.device), GROUP)
    mask = batch.completion_mask_BT[:, 1:]
    grpo_loss(logprobs, None, advantages, mask, engine_logprobs_BT=batch.engine_logprobs_BT).loss.backward()
    rt.optimizer.step()  # the engines sample from the new weights from here on
    rt.optimizer.zero_grad()


def mean_over_ranks(value: float, device: torch.device) -> float:
    total = torch.tensor(value, device=device)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


def main() -> None:
    args = arguments()
    device = join(args.device)
    rank = distributed.get_rank()
    generator = random.Random(rank)  # every rank draws sums of its own
    with share(args, device) as rt:
        for step in range(args.steps):
            sums = generator.sample(EVERY_SUM, PROBLEMS)
            with rt.rollout():
                completions = rt.generate([f"{a}+{b}=" for a, b in sums], n=GROUP, max_tokens=4, seed=step)
            rewards = [reward(completion, sum(sums[completion.prompt_index])) for completion in completions]
            with rt.train():
                train_step(rt, completions, rewards)
            mean = mean_over_ranks(sum(rewards) / len(rewards), device)
            rt.log(reward=mean)
            if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
                print(f"step {step:3}  reward {mean:.2f}")
        if rank == 0:
            print(rt.report())
            print("how weights reach the engine:", rt.transport.reason)
            print(f"bytes that a publication brings from other ranks: {rt.transport.bytes_to_receive}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
