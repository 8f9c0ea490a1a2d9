"""What a TRL trainer calls `vllm_generation`: rollouts on colo's engine."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from colo.engine import Completion
from colo.errors import EngineLost, Unsupported
from colo.phases.phase import Phase
from colo.runtime import Runtime

Generated = tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]
"""Prompts, completions, and for each token of those a list with its log-probability, and one with its id."""


class ColoGeneration:
    """Has the two methods of TRL's `VLLMGeneration` that a trainer calls."""

    def __init__(
        self, trainer: Any, runtime: Runtime, sampling: Mapping[str, Any], *, context: int, seeded: bool
    ) -> None:
        """`sampling` are the engine's options by name; `context` is the most tokens of a prompt and its completion."""
        self.runtime = runtime
        self.sampling = dict(sampling)
        self.num_tokens = 0
        self.seconds = 0.0
        self.recoveries = 0
        self._trainer = trainer
        self._context = context
        self._seeded = seeded
        self._calls: dict[str, tuple[int, int]] = {}
        # The loop that calls tools reads the length of the context here.
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=context)))

    def sync_weights(self) -> None:
        """Do nothing: a rollout begins with the trainer's present weights."""

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> Generated:
        """Sample one completion for every entry of `prompts`, in which each prompt stands `num_generations` times.

        An engine whose process has ended is started again on the same weights, once, and asked again.
        Raises: `Unsupported` for images; `ValueError` for a prompt that is empty or leaves no room for a completion.
        """
        if images is not None and any(image for image in images):
            raise Unsupported("colo generates from text: images in a dataset are not supported")
        self._check(prompts)
        unique, n = _grouped(prompts, num_generations)
        sampling = {**self.sampling, "n": n} | self._seed()
        began_s = time.perf_counter()
        with profiler or nullcontext():
            try:
                completions = self._sample(unique, sampling)
            except EngineLost:
                self.runtime.enter(None)
                self.runtime.recover()
                self.recoveries += 1
                completions = self._sample(unique, sampling)
        self.seconds += time.perf_counter() - began_s
        ids = [list(completion.token_ids) for completion in completions]
        self.num_tokens += sum(map(len, ids))
        logprobs = [[[logprob] for logprob in completion.logprobs] for completion in completions]
        return prompts, ids, logprobs, [[[token] for token in row] for row in ids]

    def _sample(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[Completion]:
        self.runtime.enter(Phase.ROLLOUT)
        return self.runtime.generate(prompts, **sampling)

    def _check(self, prompts: Iterable[Sequence[int]]) -> None:
        longest = self._context - 1
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {index} of this step has no tokens: remove empty prompts from the dataset")
            if len(prompt) > longest:
                raise ValueError(
                    f"prompt {index} of this step has {len(prompt)} tokens and the engine's context {self._context}: "
                    "shorten or filter prompts, or raise vllm_max_model_length"
                )

    def _seed(self) -> dict[str, int]:
        """The seed of this call, by run, step and how often that has generated: a resumed run draws the same."""
        if not self._seeded:
            return {}
        trainer = self._trainer
        mode = "train" if trainer.model.training else "eval"
        step, count = self._calls.get(mode, (-1, 0))
        count = count + 1 if step == trainer.state.global_step else 0
        self._calls[mode] = trainer.state.global_step, count
        key = (trainer.args.seed, mode, trainer.state.global_step, count, trainer.accelerator.process_index)
        return {"seed": random.Random(repr(key)).getrandbits(31)}


def _grouped(prompts: list[list[int]], num_generations: int) -> tuple[list[list[int]], int]:
    """Each prompt once, and how many completions of it are wanted: 1 where they do not come in equal groups."""
    size = max(1, num_generations)
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    if all(len(group) == group.count(group[0]) == size for group in groups):
        return [group[0] for group in groups], size
    return prompts, 1
