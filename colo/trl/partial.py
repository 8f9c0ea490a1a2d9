"""Rollouts that outlive a step under TRL: a batch is made of the prompts that have ended first.

Beside the prompts of a batch a quarter as many more are under way, drawn from the dataset at the first step. Each step
begins the prompts that TRL has drawn for it and trains on as many as end first, of this step's or an earlier one's; TRL
computes importance ratios from the log-probabilities that each token was sampled with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from colo.engine import Completion
from colo.errors import EngineLost, Unsupported
from colo.phases.phase import Phase
from colo.runtime import Runtime
from colo.runtime.carried import options_of

SURPLUS = 0.25
"""Prompts under way beyond a batch, as a share of it."""


class PartialRollouts:
    """Exchanges the rows of a batch for those whose completions have ended."""

    def __init__(
        self, trainer: Any, runtime: Runtime, sampling: Mapping[str, Any], *, max_age: int | None = None
    ) -> None:
        """Raises: `Unsupported` for what a batch of other prompts would break, by name."""
        options_of(None, sampling)
        for what, is_there in (
            ("several ranks, each of which would end another number of prompts", trainer.accelerator.num_processes > 1),
            ("tools, which answer between turns", bool(getattr(trainer, "tools", None))),
            ("environments", bool(getattr(trainer, "environment_factory", None))),
            ("rollout_func", getattr(trainer, "rollout_func", None) is not None),
            ("a dataset without a length", not hasattr(trainer.train_dataset, "__len__")),
            ("a loss without importance ratios", not getattr(trainer, "vllm_importance_sampling_correction", False)),
        ):
            if is_there:
                raise Unsupported(f"colo_partial_rollouts does not go with {what}: leave it out")
        self._trainer = trainer
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
        if any(row != group for row, group in zip([r for r in rows for _ in range(size)], inputs, strict=True)):
            raise Unsupported("colo_partial_rollouts needs batches in which each prompt stands num_generations times")
        wanted = len(rows)
        if not self._has_begun:
            rows += self._more(math.ceil(SURPLUS * wanted))
        began_s = time.perf_counter()
        self._found = self._sample(rows, wanted)
        self.seconds = time.perf_counter() - began_s
        self._has_begun = True
        return [completion.key for completion in self._found]

    def take(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """The completions of the rows that `exchange` has returned, whose `prompts` TRL asks for; none in between."""
        found, self._found = self._found, []
        if found and [list(completion.prompt_token_ids) for completion in found] != [list(ids) for ids in prompts]:
            raise Unsupported("TRL asks for other prompts than it has tokenized: leave colo_partial_rollouts out")
        return found

    def _sample(self, rows: list[Any], wanted: int) -> list[Completion]:
        prompts = self._trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        self._runtime.enter(Phase.ROLLOUT)
        asked = {
            "until": wanted,
            "max_age": self._max_age,
            "n": self._trainer.num_generations,
            **self._sampling,
        }
        try:
            return self._runtime.generate(prompts, keys=rows, **asked)
        except EngineLost:
            self._runtime.enter(None)
            self._runtime.recover()
            self._runtime.enter(Phase.ROLLOUT)
            is_known = any(completion.key is rows[0] for completion in self._runtime.carried)
            return self._runtime.generate([] if is_known else prompts, keys=[] if is_known else rows, **asked)

    def _more(self, count: int) -> list[Any]:
        dataset = self._trainer.train_dataset
        places = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(self._trainer.args.seed))
        return [dataset[place] for place in places[:count].tolist()]
