"""GRPO on a server: the trainer is here, the engine is an SGLang or LMDeploy server that was started before.

    python -m sglang.launch_server --model-path MODEL --host 127.0.0.1 --enable-memory-saver
    python examples/server_grpo.py --model MODEL --url http://localhost:30000

    lmdeploy serve api_server MODEL --backend pytorch --logprobs-mode raw_logprobs --server-name 127.0.0.1
    python examples/server_grpo.py --model MODEL --url http://localhost:23333

The reward is the share of a completion's tokens in the lower quarter of the vocabulary, which any model learns.
"""

from __future__ import annotations

import argparse
import random

import torch
from transformers import AutoModelForCausalLM

import colo
from colo.rl.loop import GRPOConfig, Problem, grpo

PROBLEMS = 8  # a step


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on a server.")
    parser.add_argument("--model", required=True, help="folder or hub id of the checkpoint that the server has loaded")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    parser.add_argument("--url", default="http://localhost:30000")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    engine = colo.connect(args.url, device=device)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    generator, vocabulary = random.Random(0), engine.vocab_size

    def low(completion: colo.Completion, _: object) -> float:
        return sum(token < vocabulary // 4 for token in completion.token_ids) / len(completion.token_ids)

    with colo.share(engine, model, optimizer) as rt:
        batches = [
            [Problem(prompt=tuple(generator.randrange(vocabulary) for _ in range(6))) for _ in range(PROBLEMS)]
            for _ in range(args.steps)
        ]
        for step, metrics in enumerate(grpo(rt, batches, low, GRPOConfig(max_tokens=12))):
            if step % 5 == 0 or step == args.steps - 1:
                print(f"step {step:3}  reward {metrics['reward']:.2f}  apart {metrics['mismatch']:.1e}")
        print(rt.report())


if __name__ == "__main__":
    main()
