"""`rollouts`: tokens a second where the lengths of completions have a tail: whole batches, and those that end first.

Both take turns, a step each, on one vLLM. One in `MEAN_TOKENS` tokens is the one that ends a completion: its logit is
raised, since weights are random. A step is a rollout of `prompts` groups of `SAMPLES`, after weights have changed. The
second has a quarter more groups under way, which go on from the new weights.

Then each trains from the same weights, `train` steps of `_TRAINED` groups at most: the reward is the share of tokens in
the lower quarter of the vocabulary, and what each token was sampled with goes into the loss. One in `MEAN_TOKENS` of
the vocabulary ends a completion there, for the trainer knows of no raised logits. vLLM looks through all of those for
every token, so that the seconds of these rollouts say nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import Record, Row
from benchmarks.workload import Setup, prepared
from colo.engine import Completion
from colo.rl.loop import GRPOConfig, train_step
from colo.trl.partial import SURPLUS

SAMPLES = 8
MEAN_TOKENS = 64
MOST_TOKENS = 16 * MEAN_TOKENS
_END = 1
_STEPS = 9  # the first of which is not measured: prompts of the second way are all new
_TRAINED = 32
_FEW = 5  # steps, whose rewards are averaged
_LEARNING_RATE = 1e-3  # random weights move far


def run(record: Record, *, shape: str, device: str, prompts: int | None = None, train: int = 0) -> None:
    """Measure one shape; see `prepared`. `prompts` of a step are the device's usual ones by default."""
    with prepared(record, shape, device) as setup:
        count = prompts or setup.size.prompts
        setup = setup.resized(new_tokens=MOST_TOKENS, prompts=count)
        setup.tell("an engine on the trainer's weights")
        rt = setup.launched()
        vocab_size = rt.engine.vocab_size
        asked: dict[str, Any] = {"n": SAMPLES, "max_tokens": MOST_TOKENS, "ignore_eos": True}
        sampling = asked | {"stop_token_ids": [_END], "logit_bias": {_END: math.log(vocab_size / MEAN_TOKENS)}}
        more = setup.size.token_ids[: max(1, int(SURPLUS * count))]

        def whole() -> list[Completion]:
            return rt.generate(setup.size.token_ids, **sampling)

        def first() -> list[Completion]:
            new = setup.size.token_ids + ([] if rt.carried else more)
            return rt.generate(new, until=count, **sampling)

        sides: dict[Callable[[], list[Completion]], list[tuple[list[Completion], float]]] = {whole: [], first: []}
        for step in range(_STEPS):
            setup.tell(f"both in turns, step {step + 1} of {_STEPS}")
            for side, found in sides.items():
                with torch.no_grad():
                    next(rt.model.parameters()).mul_(1)  # another version of the same weights
                with rt.rollout():
                    began_s = time.perf_counter()
                    found.append((side(), time.perf_counter() - began_s))
        names = ("whole batches", f"{count} of {count + len(more)} groups that end first")
        record.add(*(_row(name, found[1:]) for name, found in zip(names, sides.values(), strict=True)))
        rt.close()
        small = setup.resized(prompts=min(count, _TRAINED))
        for name, partly in zip(names, (False, True), strict=True) if train else ():
            setup.tell(f"training, {name}")
            ends = {"stop_token_ids": list(range(_END, vocab_size, MEAN_TOKENS))}
            record.add(_trained(f"training, {name}", small, asked | ends, train, partly=partly))


def _trained(way: str, setup: Setup, sampling: Mapping[str, Any], steps: int, *, partly: bool) -> Row:
    """Train on whole batches, or on those that end first."""
    torch.manual_seed(0)
    rt = setup.launched()
    for group in rt.optimizer.param_groups:
        group["lr"] = _LEARNING_RATE
    low, token_ids = rt.engine.vocab_size // 4, setup.size.token_ids
    more = token_ids[: max(1, int(SURPLUS * len(token_ids)))] if partly else []
    rewards = list[float]()
    for _ in range(steps):
        with rt.rollout():
            if partly:
                done = rt.generate(token_ids + ([] if rt.carried else more), until=len(token_ids), **sampling)
            else:
                done = rt.generate(token_ids, **sampling)
        scores = [statistics.fmean(token < low for token in completion.token_ids) for completion in done]
        with rt.train():
            train_step(rt, done, scores, GRPOConfig(group_size=SAMPLES, micro_batch_size=setup.size.train_sequences))
        rewards.append(statistics.fmean(scores))
    rt.close()
    few = max(1, min(_FEW, steps // 3))
    middle = (steps - few) // 2
    return {
        "way": way,
        "steps": steps,
        "first_reward": statistics.fmean(rewards[:few]),
        "middle_reward": statistics.fmean(rewards[middle : middle + few]),
        "last_reward": statistics.fmean(rewards[-few:]),
    }


def _row(way: str, steps: Sequence[tuple[list[Completion], float]]) -> Row:
    completions = [completion for found, _ in steps for completion in found]
    lengths = sorted(len(completion.token_ids) for completion in completions)
    carried = sum(len(completion.spans) > 1 for completion in completions)
    return {
        "way": way,
        "step_s": statistics.median(spent_s for _, spent_s in steps),
        "tokens_per_s": sum(lengths) / sum(spent_s for _, spent_s in steps),
        "mean_tokens": statistics.fmean(lengths),
        "longest": lengths[-1],
        "carried": carried / len(completions),
    }
