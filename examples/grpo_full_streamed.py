"""Full fine-tuning on a device that has room for weights, gradients and a window onto the optimizer's state.

    python examples/grpo_full_streamed.py                     # a tiny model, made on the spot, on CPU or GPU
    python examples/grpo_full_streamed.py --model Qwen/Qwen3-8B   # streamed where the GPU has no room for all of it

The state, ten bytes for each parameter, stays in host memory. A step brings it up a range of elements at a time, and
the weights that it makes are, bit for bit, those of a step on a device where all of it fits.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch

import colo
from colo.demo import ALPHABET, warm_up
from colo.phases.phase import ENGINE_WEIGHTS, TRAINER_OPTIMIZER, Phase
from colo.rl.loop import GRPOConfig, Problem, grpo
from colo.testing import tiny_tokenizer
from colo.units import MIB, format_bytes

PROBLEMS = [Problem(prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(4) for b in range(4)]
LOOP = GRPOConfig(group_size=8, max_tokens=4, micro_batch_size=64, seed=0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Full fine-tuning with the optimizer's state in host memory.")
    parser.add_argument("--model", help="folder or hub id of a checkpoint; by default a tiny model is made")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    return parser.parse_args()


def launch(model: Any, device: str | None, **settings: Any) -> colo.Runtime:
    """A runtime in bf16, whose optimizer keeps 16 bits of each fp32 master beside the weight."""
    if isinstance(model, str):
        return colo.launch(model, device=device, dtype="bfloat16", config=colo.RuntimeConfig(**settings))
    adamw = colo.optim.MasterWeights(lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0))
    small = {"kv_cache_bytes": MIB // 2, "region_bytes": 64 * 1024}  # ranges of a tiny model
    config = colo.RuntimeConfig(**(small | settings))
    tokenizer = tiny_tokenizer(ALPHABET)
    model = copy.deepcopy(model)
    return colo.launch(model, dtype="bfloat16", optimizer=adamw, device=device, tokenizer=tokenizer, config=config)


def train(rt: colo.Runtime, steps: int) -> list[torch.Tensor]:
    """Teach sums by GRPO; the weights afterwards."""
    for step, metrics in enumerate(grpo(rt, [PROBLEMS] * steps, lambda c, answer: float(c.text == answer), LOOP)):
        if step % 6 == 0:
            print(f"step {step:3}  reward {metrics['reward']:.2f}")
    return [p.detach().cpu().clone() for p in rt.model.parameters()]


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if args.model is not None:
        with launch(args.model, args.device) as rt:
            train(rt, args.steps)
            print(rt.report())
        return
    tiny = warm_up(torch.device("cpu"), seed=0, tell=print)
    with launch(tiny, args.device, optimizer="streamed") as rt:
        sizes = {name: rt.scheduler.segments[name].size_bytes for name in (ENGINE_WEIGHTS, TRAINER_OPTIMIZER)}
    limit_bytes = 2 * sizes[ENGINE_WEIGHTS] + sizes[TRAINER_OPTIMIZER]  # weights, gradients, the window
    try:
        launch(tiny, args.device, optimizer="resident", device_limit_bytes=limit_bytes)
    except colo.BudgetError as error:
        print(f"on {format_bytes(limit_bytes)}, with resident state: {format_bytes(error.missing_bytes)} are missing")
    with launch(tiny, args.device, device_limit_bytes=limit_bytes) as rt:
        streamed = train(rt, args.steps)
        print(rt.report().facts["optimizer"])
        peak_bytes = rt.trace.peak_bytes(Phase.TRAIN)
        print(f"most bytes while training: {format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}")
    with launch(tiny, args.device, optimizer="resident") as rt:
        resident = train(rt, args.steps)
    print("weights equal, bit for bit:", all(torch.equal(a, b) for a, b in zip(streamed, resident, strict=True)))


if __name__ == "__main__":
    main()
