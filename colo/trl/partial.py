"""Rollouts that outlive a step under TRL: a batch is made of the prompts that have ended first.

Beside the prompts of a batch a quarter as many more are under way, drawn from the dataset at the first step. Each step
begins the prompts that TRL has drawn for it and trains on as many as end first, of this step's or an earlier one's; TRL
computes importance ratios from the log-probabilities that each token was sampled with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from colo.engine import Completion
from colo.engines.sampling import row_seed
from colo.errors import EngineLost, Unsupported
from colo.phases.phase import Phase
from colo.runtime import Runtime
from colo.runtime.carried import options_of

SURPLUS = 0.25
"""Prompts under way beyond a batch, as a share of it."""


def check_partial(args: Any, given: Mapping[str, Any]) -> None:
    """Raise for a config, and other arguments `given` to a trainer by name, with which no batch is of other prompts.

    Raises: `Unsupported` for what such a batch would break, by name; `ValueError` for a `colo_max_age` at which nothing
    would ever go on.
    """
    for what, is_there in (
        ("several ranks, each of which would end another number of prompts", args.world_size > 1),
        ("tools, which answer between turns", bool(given.get("tools"))),
        ("environments", given.get("environment_factory") is not None),
        ("rollout_func", given.get("rollout_func") is not None),
        ("a dataset without a length", not hasattr(given.get("train_dataset"), "__len__")),
        ("a loss without importance ratios", not getattr(args, "vllm_importance_sampling_correction", False)),
    ):
        if is_there:
            raise Unsupported(f"colo_partial_rollouts does not go with {what}: leave it out")
    steps = (args.steps_per_generation or args.gradient_accumulation_steps) * args.num_iterations
    versions = max(1, steps // args.gradient_accumulation_steps)
    if args.colo_max_age is not None and args.colo_max_age < versions:
        raise ValueError(
            f"colo_max_age={args.colo_max_age}, and {versions} versions lie between two generations: whatever goes on "
            f"would begin anew; give {versions} at least, or several times that for long completions"
        )


class PartialRollouts:
    """Exchanges the rows of a batch for those whose completions have ended."""

    def __init__(
        self,
        trainer: Any,
        runtime: Runtime,
        sampling: Mapping[str, Any],
        *,
        check: Callable[[Iterable[Sequence[int]]], None],
        max_age: int | None = None,
    ) -> None:
        """Prepare; `check` refuses tokens of a prompt. Raises: as `options_of`."""
        options_of(runtime.engine, None, sampling)
        self._trainer = trainer
        self._check = check
        self.seconds = 0.0  # that the last batch took
        self._runtime = runtime
        self._sampling = sampling
        self._max_age = max_age
        self._has_begun = False
        self._found: list[Completion] = []

    def exchange(self, inputs: Sequence[Any]) -> list[Any]:
        """Begin the prompts of `inputs`, groups of equal rows, and return as many rows, of prompts that have ended."""
        size = self._trainer.num_generations
        rows = list(inputs[::size])
        asked = [row["prompt"] for row in inputs]  # of other columns equal rows need not be equal, such as NaN
        if len(inputs) % size or asked != [row["prompt"] for row in rows for _ in range(size)]:
            raise Unsupported("colo_partial_rollouts needs batches in which each prompt stands num_generations times")
        wanted = len(rows)
        if not self._has_begun:
            rows += self._more(rows, math.ceil(SURPLUS * wanted))
        began_s = time.perf_counter()
        self._found = self._sample(rows, wanted)
        self.seconds = time.perf_counter() - began_s
        self._has_begun = True
        return [completion.key for completion in self._found]

    def take(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """The completions of the rows that `exchange` has returned, whose `prompts` TRL asks for; none in between."""
        found = self._found
        self.forget()
        if found and [list(completion.prompt_token_ids) for completion in found] != [list(ids) for ids in prompts]:
            raise Unsupported("TRL asks for other prompts than it has tokenized: leave colo_partial_rollouts out")
        return found

    def _sample(self, rows: list[Any], wanted: int) -> list[Completion]:
        prompts = self._trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        self._check(prompts)
        before = {completion.prompt_index for completion in self._runtime.carried}
        self._runtime.enter(Phase.ROLLOUT)
        asked = {
            "until": wanted,
            "max_age": self._max_age,
            "n": self._trainer.num_generations,
            **self._sampling,
        }
        self._runtime.carried_for = None
        try:
            return self._runtime.generate(prompts, keys=rows, **asked)
        except EngineLost:
            self._runtime.enter(None)
            self._runtime.recover()
            self._runtime.enter(Phase.ROLLOUT)
            # prompts are under way once one of them has tokens
            is_known = any(completion.prompt_index not in before for completion in self._runtime.carried)
            return self._runtime.generate([] if is_known else prompts, keys=[] if is_known else rows, **asked)
        finally:
            # not a reward's or a callback's, which share the runtime
            self._runtime.carried_for = "colo_partial_rollouts"

    def begin_run(self) -> None:
        """Give up what an earlier run has left under way, whose prompts TRL draws again."""
        self._runtime.drop_carried()
        self._has_begun = False

    def forget(self) -> None:
        """Drop completions that nobody has taken."""
        self._found = []

    def _more(self, rows: Sequence[Any], count: int) -> list[Any]:
        """Other rows of the dataset, with the columns that `rows` have, in an order that is not TRL's."""
        dataset, args = self._trainer.train_dataset, self._trainer.args
        generator = torch.Generator().manual_seed(row_seed(f"surplus/{args.seed}", 0, 0))
        found: list[Any] = []
        for place in torch.randperm(len(dataset), generator=generator, device="cpu").tolist():
            if len(found) == count:
                break
            row = dataset[place]
            if all(row["prompt"] != other["prompt"] for other in (*rows, *found)):
                found.append({name: row[name] for name in rows[0]})
        return found
