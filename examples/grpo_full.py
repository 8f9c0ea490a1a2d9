"""GRPO on every weight, with the loop written out: sample, reward, train, on one copy of the weights.

    python examples/grpo_full.py                                  # a tiny model, made on the spot, on CPU or GPU
    python examples/grpo_full.py --model Qwen/Qwen3-0.6B          # a checkpoint: a folder or a hub id

The task is one-digit addition: the reward is 1 for the right sum and 0 for anything else. Without `--model` a small
model is first shown sums until it answers about a fifth of them, which gives GRPO something to reinforce.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence

import torch

import colo
from colo.demo import ALPHABET, warm_up
from colo.rl.logprob import model_logprobs
from colo.rl.loop import Batch
from colo.rl.loss import group_advantages, grpo_loss
from colo.testing import tiny_tokenizer
from colo.trainer.master_weights import MasterWeights

PROBLEMS = 50  # a step
GROUP = 8  # completions for each problem
MICRO_BATCH = 200  # completions for each forward and backward pass
EVERY_SUM = [(a, b) for a in range(10) for b in range(10)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on every weight, with the loop written out.")
    parser.add_argument("--model", help="folder or hub id of a checkpoint; by default a tiny model is made")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    return parser.parse_args()


def launch(model: str | None, device: str | None) -> colo.Runtime:
    """A runtime over a checkpoint, or over a tiny model."""
    # The optimizer works on fp32 masters where the model is in 16 bits: at these rates most updates would round away.
    learning_rate = 1e-6 if model else 5e-4
    optimizer = MasterWeights(lambda params: torch.optim.AdamW(params, lr=learning_rate, weight_decay=0.0))
    # "auto", the default, moves only what would not fit; "always" shows the moves on a device that is large enough.
    config = colo.RuntimeConfig(offload=colo.Offload.ALWAYS)
    if model is not None:
        return colo.launch(model, optimizer=optimizer, device=device, config=config)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small gains nothing from more
    tiny = warm_up(torch.device("cpu"), seed=0, tell=print)
    return colo.launch(tiny, optimizer=optimizer, device=device, tokenizer=tiny_tokenizer(ALPHABET), config=config)


def reward(completion: colo.Completion, answer: int) -> float:
    """1 when the first number of the text is the answer."""
    number = re.match(r"\s*(\d+)", completion.text or "")
    return float(number is not None and int(number[1]) == answer)


def train_step(rt: colo.Runtime, completions: Sequence[colo.Completion], rewards: Sequence[float]) -> float:
    """One optimizer step on all completions, some at a time, so that activations stay small. Returns the loss."""
    advantages = group_advantages(torch.tensor(rewards, device=rt.device), GROUP)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    total = 0.0
    for start in range(0, len(completions), MICRO_BATCH):
        part = slice(start, start + MICRO_BATCH)
        batch = Batch.of(completions[part], rt.device)
        logprobs = model_logprobs(
            rt.model,
            batch.input_ids_BT,
            batch.attention_mask_BT,
            completion_mask_BT=batch.completion_mask_BT,
        )
        mask = batch.completion_mask_BT[:, 1:]
        output = grpo_loss(logprobs, None, advantages[part], mask, engine_logprobs_BT=batch.engine_logprobs_BT)
        loss = output.loss * (mask.sum() / num_tokens)  # every token of the step weighs the same
        loss.backward()
        total += float(loss.detach())
    rt.optimizer.step()  # the engine samples from the new weights from here on
    rt.optimizer.zero_grad()  # so that the next rollout need not keep the gradients
    return total


def main() -> None:
    args = arguments()
    generator = random.Random(0)
    with launch(args.model, args.device) as rt:
        for step in range(args.steps):
            sums = generator.sample(EVERY_SUM, PROBLEMS)
            with rt.rollout():
                completions = rt.generate([f"{a}+{b}=" for a, b in sums], n=GROUP, max_tokens=4, seed=step)
            rewards = [reward(completion, sum(sums[completion.prompt_index])) for completion in completions]
            with rt.train():
                loss = train_step(rt, completions, rewards)
            rt.log(reward=sum(rewards) / len(rewards), loss=loss)
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step:3}  reward {rt.trace.metrics['reward'][-1]:.2f}")
        print(rt.report())
        print("bytes copied from trainer to engine:", rt.bytes_synced)
        print("picture:", rt.plot("grpo_full.html", title="GRPO on every weight"))


if __name__ == "__main__":
    main()
