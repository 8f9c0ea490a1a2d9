"""One engine, or a fleet, for all ranks of a trainer: the first rank has it, and the others sample through that.

    engine = colo.MainRankEngine(colo.connect(url, through=...) if rank == 0 else None)
    rt = colo.share(engine, model, optimizer)  # on every rank

Whole weights are gathered once, and the first rank gives them to the engine; or every rank sends it slices, where it
takes those (colo/weights/transports/remote.py). Prompts of all ranks are sampled in one call. Loading and sampling fail
on all ranks where they fail on one; what else a runtime asks is the first rank's alone, within blocks in which its
ranks fail together (`RankGroup`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch

from colo.engine import Completion, Engine, EngineState, Recovers, SamplingParams
from colo.engines.base import EngineBase, EngineStatus
from colo.engines.fleet import Fleet
from colo.engines.sampling import seeded_each
from colo.errors import EngineLost, Unsupported
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, FixedSegment, Residency, Segment
from colo.weights.ranks import RankGroup
from colo.weights.transports.remote import SliceTaker, TakesSlices

T = TypeVar("T")


class MainRankEngine(EngineBase):
    """An `Engine` of all ranks of torch's default process group. Every rank makes the same calls, in order.

    `engine` is that of rank 0, which is closed with it; `None` elsewhere.
    """

    name = "main rank"
    called = "the engine of the main rank"
    asks_together = True

    def __init__(
        self,
        engine: Engine | Sequence[Engine] | None,
        *,
        device: torch.device | str | None = None,
        deadline_s: float = 3600.0,
    ) -> None:
        """A collective. A list of engines is a `Fleet`; other ranks than 0 give `None`.

        `device` is the trainer's, by default one of the engine's kind; ranks wait for others `deadline_s`.
        Raises: `ValueError`, on every rank, unless rank 0 alone has an engine; what making a fleet raises.
        """
        from torch import distributed

        if not distributed.is_initialized():
            raise ValueError("MainRankEngine is for several ranks: call torch.distributed.init_process_group first")
        self._rank = distributed.get_rank()
        # of its own, and on the host: ranks wait in it while the engine samples, and tell each other words
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        self.ranks = RankGroup.of(self._group, torch.device("cpu"))
        """All ranks."""

        with self.ranks.fail_together("making the engine of the main rank"):
            made: Any = Fleet(engine) if isinstance(engine, (list, tuple)) else engine
            facts = None if made is None else _facts(made)
        self.engine: Engine | None = made
        told = list(self.ranks.gather(facts).values())
        if told[0] is None or any(facts is not None for facts in told[1:]):
            has = [rank for rank, facts in enumerate(told) if facts is not None]
            raise ValueError(
                f"engines were given on ranks {has}: a MainRankEngine has that of rank 0, and other ranks give None"
            )
        self._facts: Mapping[str, Any] = told[0]
        self._temperature: float | None = None
        if device is None:
            kind = self._facts["device"]
            device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        nothing = [FixedSegment(name, 0, Residency.RESIDENT) for name in (ENGINE_WEIGHTS, ENGINE_KV_CACHE)]
        status = EngineStatus(lambda: self.segments, when_lost="call recover() on every rank")
        super().__init__(torch.device(device), nothing if made is None else made.segments, status=status)

    @property
    def engines(self) -> Sequence[Engine]:
        """The engine, on rank 0."""
        return [] if self.engine is None else [self.engine]

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def segments(self) -> Sequence[Segment]:
        """Segments of the engine; elsewhere than on rank 0 they are empty."""
        return self._segments if self.engine is None else self.engine.segments

    @property
    def state(self) -> EngineState:
        """State of the engine; elsewhere than on rank 0 nobody knows that it is lost."""
        for engine in self.engines:
            if engine.state is EngineState.LOST and self._status.lost is None:
                self._status.lose("its process has ended, or does not answer")
        return self._status.state

    @property
    def weights_version(self) -> int | None:
        """Version of the weights that the engine holds; `None` while poisoned."""
        version = self._status.version
        return version if self.engine is None or self.engine.weights_version is not None else None

    @property
    def placement(self) -> str:
        """A phrase for reports."""
        return f"of rank 0: {self._facts['placement']}"

    @property
    def model_type(self) -> str | None:
        """`model_type` of the model's configuration."""
        kind: str | None = self._facts["model_type"]
        return kind

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self._facts["vocab_size"])

    @property
    def longest_prompt(self) -> int | None:  # type: ignore[override]
        """The most tokens of a prompt after which a position is left to sample for."""
        most: int | None = self._facts["longest_prompt"]
        return most

    @property
    def residual_bytes(self) -> Mapping[str, int]:
        """Device bytes that the engine keeps when it sleeps."""
        return {} if self.engine is None else self.engine.residual_bytes

    def pause(self) -> None:
        """Stop it."""
        super().pause()
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        """Let it generate again."""
        super().resume()
        for engine in self.engines:
            engine.resume()

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights."""
        for engine in self.engines:
            engine.reset_prefix_cache()

    @property
    def slice_taker(self) -> SliceTaker | None:
        """The engine's taker, which every rank sends slices to; `None` where it takes whole weights only."""
        if not self._facts["takes_slices"]:
            return None
        return self.engine.slice_taker if isinstance(self.engine, TakesSlices) else SliceTaker()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int | None:
        """Load into the engine what all ranks gather; return the bytes that rank 0 sent. A collective."""
        left = iter(weights)
        with self.ranks.fail_together("loading weights"):
            try:
                self.poison_for_load()
                return 0 if self.engine is None else self.engine.load_weights(left)
            finally:
                # other ranks gather with this one until the last weight, whatever has become of the engine
                for _ in left:
                    pass

    def commit(self, version: int) -> None:
        """Declare that the engine holds `version`."""
        super().commit(version)
        for engine in self.engines:
            engine.commit(version)

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""
        super().poison(cause)
        for engine in self.engines:
            engine.poison(cause)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample for the prompts of every rank, and return those of this one; see `Engine.generate`. A collective.

        A rank without prompts calls too. What fails on one rank is `TransferError` on the others.
        """
        with self.ranks.fail_together("asking for completions"):
            version = self.ready()
            if adapter is not None:
                raise ValueError(f"it has no adapters, and {adapter!r} is asked for: share with fold_adapter=True")
            params = seeded_each(params, len(prompts))  # what is drawn must not depend on other ranks
        asked = self.ranks.gather(([tuple(prompt) for prompt in prompts], params))
        told: list[Any] = [None]
        with self.ranks.fail_together("sampling"):
            if self.engine is not None:
                temperatures = [self.engine.sampling_temperature(params) for _, params in asked.values()]
                told = [list(zip(_sample(self.engine, list(asked.values())), temperatures, strict=True))]
        from torch import distributed

        distributed.broadcast_object_list(told, src=0, group=self._group)
        found, self._temperature = told[0][self._rank]
        return [replace(completion, weights_version=version) for completion in found]

    def sampling_temperature(self, params: Any) -> float | None:
        """The temperature that `logprobs` of this rank's last `generate` have in them, by the engine of rank 0."""
        return self._temperature

    def gather(self, value: T) -> list[T]:
        """All-gather `value` over the ranks (a collective); see `in_all_ranks`."""
        return list(self.ranks.gather(value).values())

    def recover(self) -> None:
        """Take the engine up again, on rank 0. Raises: what the engine raises, `PhaseError` unless it is lost."""
        for engine in self.engines:
            if not isinstance(engine, Recovers):
                raise Unsupported(f"the {engine.name} engine cannot be started again from here")
            engine.recover()
        self._status.revive()
        self.poison("it was recovered: publish to it")

    def _release(self) -> None:
        for engine in self.engines:
            with suppress(EngineLost):
                engine.close()
        from torch import distributed

        with suppress(ValueError, AssertionError):  # torch's groups have been destroyed
            distributed.destroy_process_group(self._group)


def _facts(engine: Engine) -> dict[str, Any]:
    names = ("placement", "model_type", "vocab_size")
    facts: dict[str, Any] = {name: getattr(engine, name) for name in names}
    facts["takes_slices"] = isinstance(engine, TakesSlices) and engine.slice_taker is not None
    return facts | {"longest_prompt": getattr(engine, "longest_prompt", None), "device": engine.device.type}


def _sample(engine: Engine, asked: Sequence[tuple[list[tuple[int, ...]], SamplingParams]]) -> list[list[Completion]]:
    """The completions of each rank; ranks that ask for the same but for seeds are one call."""
    found: list[list[Completion]] = [[] for _ in asked]
    left = [rank for rank, (prompts, _) in enumerate(asked) if prompts]
    while left:
        alike = [rank for rank in left if _unseeded(asked[rank][1]) == _unseeded(asked[left[0]][1])]
        left = [rank for rank in left if rank not in alike]
        rows = [(rank, index) for rank in alike for index in range(len(asked[rank][0]))]
        params = asked[alike[0]][1]
        if params.seed is not None:
            seeds: Any = [seed for rank in alike for seed in asked[rank][1].seed]  # type: ignore[union-attr]
            params = replace(params, seed=seeds)
        prompts = [asked[rank][0][index] for rank, index in rows]
        for completion in engine.generate(prompts, engine.sampling_params(params)):
            rank, index = rows[completion.prompt_index]
            found[rank].append(replace(completion, prompt_index=index, output=None))  # which may not travel
    return found


def _unseeded(params: SamplingParams) -> tuple[SamplingParams, bool]:
    return replace(params, seed=None), params.seed is None
