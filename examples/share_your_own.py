"""Your own engine, model and optimizer on one copy of the weights, and a checkpoint that resumes bit for bit.

    python examples/share_your_own.py                             # a tiny bf16 model, made on the spot, on CPU or GPU
    python examples/share_your_own.py --model Qwen/Qwen3-0.6B     # a checkpoint: a folder or a hub id

Nothing here is made by colo but the runtime: the model is an `nn.Module`, the optimizer a `torch.optim.Optimizer`, and
the training code calls `backward` and `step` as ever. The reward asks for tokens below half of the vocabulary, which
any model learns fast. Half way, in a rollout, while the optimizer's state is away from the device, a checkpoint is
taken; a second run starts from it and has to end with the same bits as the first.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3Config

import colo
from colo.engines.torch import TorchEngine
from colo.memory.offload import Mover
from colo.rl.logprob import model_logprobs
from colo.rl.loop import Batch
from colo.rl.loss import group_advantages, grpo_loss
from colo.trainer.master_weights import MasterWeights
from colo.units import MIB

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
GROUP = 8
MICRO_BATCHES = 2  # backward passes for each step; their gradients add up


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Your own engine, model and optimizer on one copy of the weights.")
    parser.add_argument("--model", help="folder or hub id of a checkpoint; by default a tiny model is made")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    return parser.parse_args()


def model_config(model: str | None) -> PretrainedConfig:
    if model is not None:
        return AutoConfig.from_pretrained(model)
    torch.set_num_threads(1)  # a model this small gains nothing from more
    return Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
    )


def share(args: argparse.Namespace, checkpoint: dict[str, Any] | None = None) -> colo.Runtime:
    """Build the three yourself, from the start or from a checkpoint, and let them take turns."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = model_config(args.model)
    torch.manual_seed(0)
    if args.model is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    learning_rate = 1e-6 if args.model else 3e-3
    optimizer = MasterWeights(lambda params: torch.optim.AdamW(params, lr=learning_rate))(model.parameters())
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    engine = TorchEngine(config, device=device, dtype=torch.bfloat16, kv_cache_bytes=16 * MIB, mover=Mover(device))
    settings = colo.RuntimeConfig(offload=colo.Offload.ALWAYS, accumulation_steps=MICRO_BATCHES)
    return colo.share(engine, model, optimizer, config=settings)


def reward(completion: colo.Completion, half: int) -> float:
    """The share of tokens below half of the vocabulary."""
    return sum(token < half for token in completion.token_ids) / len(completion.token_ids)


def step_on(rt: colo.Runtime, completions: list[colo.Completion], rewards: list[float]) -> None:
    """One optimizer step over several backward passes."""
    advantages = group_advantages(torch.tensor(rewards, device=rt.device), GROUP)
    size = len(completions) // MICRO_BATCHES
    for start in range(0, len(completions), size):
        part = slice(start, start + size)
        batch = Batch.of(completions[part], rt.device)
        ids, mask = batch.input_ids_BT, batch.completion_mask_BT
        logprobs = model_logprobs(rt.model, ids, batch.attention_mask_BT, completion_mask_BT=mask)
        loss = grpo_loss(logprobs, None, advantages[part], mask[:, 1:]).loss
        (loss / MICRO_BATCHES).backward()
    rt.optimizer.step()
    rt.optimizer.zero_grad()  # so that the next rollout need not keep the gradients


def run(rt: colo.Runtime, steps: range, half: int, *, save: tuple[int, Path] | None = None) -> list[float]:
    """Train, with samples that depend on the step alone, and return the mean reward of every step.

    `save` says in which step's rollout a checkpoint is taken, and where it goes.
    """
    means = []
    for step in steps:
        with rt.rollout():
            completions = rt.generate(PROMPTS, n=GROUP, max_tokens=8, seed=step, ignore_eos=True)
            if save is not None and step == save[0]:
                state = {"model": rt.model.state_dict(), "optimizer": rt.optimizer.state_dict(), "step": step}
                torch.save(state, save[1])
        rewards = [reward(completion, half) for completion in completions]
        with rt.train():
            step_on(rt, completions, rewards)
        means.append(sum(rewards) / len(rewards))
        rt.log(reward=means[-1])
    return means


def main() -> None:
    args = arguments()
    half = model_config(args.model).vocab_size // 2
    with tempfile.TemporaryDirectory() as folder, share(args) as rt:
        path = Path(folder, "checkpoint.pt")
        means = run(rt, range(args.steps), half, save=(args.steps // 2, path))
        print(f"reward {means[0]:.2f} in the first step, {means[-1]:.2f} in the last")
        print(rt.report())
        print("bytes copied from trainer to engine:", rt.bytes_synced)
        checkpoint = torch.load(path, map_location="cpu")
        with share(args, checkpoint) as resumed:
            again = run(resumed, range(checkpoint["step"], args.steps), half)
            pairs = zip(rt.model.parameters(), resumed.model.parameters(), strict=True)
            equal = all(torch.equal(first, second) for first, second in pairs)
        print(f"resumed at step {checkpoint['step']}: rewards equal: {again == means[checkpoint['step'] :]}")
        print(f"resumed at step {checkpoint['step']}: weights equal, bit for bit: {equal}")


if __name__ == "__main__":
    main()
