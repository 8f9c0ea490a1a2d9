"""GRPO on a Ray cluster: the trainer is here, two vLLM servers are on other nodes, and are replaced when they are lost.

    ray start --head                    # on this machine; on two others `ray start --address HERE:6379`
    python examples/ray_grpo.py --model Qwen/Qwen3-0.6B

The reward is the share of a completion's tokens in the lower quarter of the vocabulary, which any model learns.
"""

from __future__ import annotations

import argparse
import random
import sys

import ray
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.engines.vllm.wire import WORKER_EXTENSION
from colo.integrations.ray import Servers
from colo.rl.loop import GRPOConfig, Problem, grpo

PROBLEMS, ENGINES = 8, 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on a Ray cluster.")
    parser.add_argument("--model", required=True, help="folder or hub id of a checkpoint that every node can read")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    return parser.parse_args()


def serving(model: str, device: str) -> list[str]:
    """The command of a server, whose weights come from the trainer. Keep its port from strangers."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--load-format", "dummy"]
    command += ["--host", "{address}", "--port", "{port}", "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", WORKER_EXTENSION, "--max-model-len", "1024"]
    if device == "cpu":
        command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "64000000"]
    return command


def main() -> None:
    args = arguments()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    ray.init(ignore_reinit_error=True)
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
    group = ray.util.placement_group([bundle] * ENGINES, strategy="SPREAD")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    generator, vocabulary = random.Random(0), model.config.vocab_size

    def low(completion: colo.Completion, _: object) -> float:
        return sum(token < vocabulary // 4 for token in completion.token_ids) / len(completion.token_ids)

    batches = [
        [Problem(prompt=tuple(generator.randrange(vocabulary) for _ in range(6))) for _ in range(PROBLEMS)]
        for _ in range(args.steps)
    ]
    through = colo.Broadcast(ray.util.get_node_ip_address())
    with (
        Servers(
            serving(args.model, device),
            group,
            environment={"VLLM_SERVER_DEV_MODE": "1"},
            device=device,
            through=through,
        ) as servers,
        colo.share(servers.engines, model, optimizer) as rt,
    ):
        for step, metrics in enumerate(grpo(rt, batches, low, GRPOConfig(max_tokens=12))):
            print(f"step {step:3}  reward {metrics['reward']:.2f}  apart {metrics['mismatch']:.1e}", flush=True)
            for engine in servers.replace(rt.engine):
                print("replaced by", engine.placement, flush=True)
        print(rt.report())


if __name__ == "__main__":
    main()
