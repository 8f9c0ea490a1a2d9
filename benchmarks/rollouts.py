"""`rollouts`: tokens a second where the lengths of completions have a tail: whole batches, and those that end first.

Both take turns, a step each, on one vLLM. One in `MEAN_TOKENS` tokens of random weights ends a completion. A step is a
rollout of `prompts` groups of `SAMPLES`, after weights have changed. The second has a quarter more groups under way,
which go on from the new weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common import Record, Row
from benchmarks.workload import prepared
from colo.engine import Completion
from colo.trl.partial import SURPLUS

SAMPLES = 8
MEAN_TOKENS = 64
MOST_TOKENS = 16 * MEAN_TOKENS
_STEPS = 9  # the first of which is not measured: prompts of the second way are all new


def run(record: Record, *, shape: str, device: str, prompts: int | None = None) -> None:
    """Measure one shape; see `prepared`. `prompts` of a step are the device's usual ones by default."""
    with prepared(record, shape, device) as setup:
        count = prompts or setup.size.prompts
        setup = setup.resized(new_tokens=MOST_TOKENS, prompts=count)
        setup.tell("an engine on the trainer's weights")
        rt = setup.launched()
        ends = range(1, rt.engine.vocab_size, MEAN_TOKENS)
        sampling: dict[str, Any] = {
            "n": SAMPLES,
            "max_tokens": MOST_TOKENS,
            "stop_token_ids": list(ends),
            "ignore_eos": True,
        }
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
