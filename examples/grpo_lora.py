"""GRPO on a LoRA adapter: the base stays as it is, shared by engine and trainer, and so is the adapter.

    python examples/grpo_lora.py                                  # a tiny model, made on the spot, on CPU or GPU
    python examples/grpo_lora.py --model Qwen/Qwen3-0.6B          # a checkpoint: a folder or a hub id

The task is one-digit addition, as in grpo_full.py. At the end the base and the tuned model, both still in memory,
answer all hundred sums.
"""

from __future__ import annotations

import argparse
import random
import re

import torch
from peft import LoraConfig

import colo
from colo.demo import ALPHABET, warm_up
from colo.rl.loop import GRPOConfig, train_step
from colo.testing import tiny_tokenizer

PROBLEMS = 50  # a step
CONFIG = GRPOConfig(group_size=8, max_tokens=4, micro_batch_size=400)
GREEDY = colo.SamplingParams(temperature=0, max_tokens=CONFIG.max_tokens)
EVERY_SUM = [(a, b) for a in range(10) for b in range(10)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on a LoRA adapter.")
    parser.add_argument("--model", help="folder or hub id of a checkpoint; by default a tiny model is made")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    return parser.parse_args()


def launch(model: str | None, device: str | None) -> colo.Runtime:
    """A runtime over a checkpoint, or over a tiny model, with an adapter on every linear layer but the head."""
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")

    def optimizer(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-5 if model else 3e-3, weight_decay=0.0)

    if model is not None:
        return colo.launch(model, lora=lora, optimizer=optimizer, device=device)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small gains nothing from more
    tiny = warm_up(torch.device("cpu"), seed=0, tell=print)
    return colo.launch(tiny, lora=lora, optimizer=optimizer, device=device, tokenizer=tiny_tokenizer(ALPHABET))


def prompts(sums: list[tuple[int, int]]) -> list[str]:
    return [f"{a}+{b}=" for a, b in sums]


def is_right(text: str | None, answer: int) -> bool:
    """Whether the first number of a text is the answer."""
    number = re.match(r"\s*(\d+)", text or "")
    return number is not None and int(number[1]) == answer


def base_and_tuned(rt: colo.Runtime) -> tuple[list[str], list[str]]:
    """Greedy answers to every sum: of the base, which is the engine without an adapter, and of the tuned model."""
    token_ids = [rt.tokenizer(prompt)["input_ids"] for prompt in prompts(EVERY_SUM)]
    with rt.rollout():
        base = rt.engine.generate(token_ids, GREEDY, adapter=None)
        tuned = rt.generate(prompts(EVERY_SUM), GREEDY)
    decode = rt.tokenizer.decode
    return [decode(c.token_ids, skip_special_tokens=True) for c in base], [c.text or "" for c in tuned]


def compare(base: list[str], tuned: list[str]) -> None:
    """Print both models' answers to some sums, and how many of all sums each gets right."""
    print("  sum    base  tuned")
    for (a, b), before, after in list(zip(EVERY_SUM, base, tuned, strict=True))[7::11]:
        print(f"  {a}+{b}={a + b:<3} {before:>5}  {after:>5}")
    for name, texts in (("base", base), ("tuned", tuned)):
        right = sum(is_right(text, a + b) for text, (a, b) in zip(texts, EVERY_SUM, strict=True))
        print(f"right answers, {name}: {right} of {len(EVERY_SUM)}")


def main() -> None:
    args = arguments()
    generator = random.Random(0)
    with launch(args.model, args.device) as rt:
        for step in range(args.steps):
            sums = generator.sample(EVERY_SUM, PROBLEMS)
            with rt.rollout():
                completions = rt.generate(prompts(sums), n=CONFIG.group_size, max_tokens=CONFIG.max_tokens, seed=step)
            rewards = [float(is_right(c.text, sum(sums[c.prompt_index]))) for c in completions]
            with rt.train():
                metrics = train_step(rt, completions, rewards, CONFIG)
            rt.log(reward=sum(rewards) / len(rewards), **metrics)
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step:3}  reward {rt.trace.metrics['reward'][-1]:.2f}")
        compare(*base_and_tuned(rt))
        print(rt.report())
        print("bytes copied from trainer to engine:", rt.bytes_synced)
        print("picture:", rt.plot("grpo_lora.html", title="GRPO on an adapter"))


if __name__ == "__main__":
    main()
