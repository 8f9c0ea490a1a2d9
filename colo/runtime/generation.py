"""Sampling within a rollout: from weights that are current, with the adapter that is trained, back as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from colo.engine import Completion, Engine
from colo.engines.text import Prompts, encode_prompts, with_text
from colo.phases.phase import Phase
from colo.phases.scheduler import Scheduler
from colo.runtime.turns import Turns
from colo.runtime.versions import WeightVersions
from colo.weights.mismatch import MismatchCheck, first_not_finite, not_numbers
from colo.weights.sources.peft import adapter_weights, is_disabled, is_peft_model

if TYPE_CHECKING:
    from peft import PeftModel


class Generation:
    """Calls the engine's `generate`, and refreshes weights before every `generate`, the user's own calls included."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        turns: Turns,
        scheduler: Scheduler,
        versions: WeightVersions,
        mismatch: MismatchCheck,
    ) -> None:
        self._engine = engine
        self._model = model
        self._turns = turns
        self._scheduler = scheduler
        self._versions = versions
        self._mismatch = mismatch
        self._is_running = False

    def run(self, prompts: Prompts, params: Any, sampling: Mapping[str, Any], tokenizer: Any) -> list[Completion]:
        """Sample; see `Runtime.generate`. Ordering: within a rollout."""
        params = self._engine.sampling_params(params, **sampling)
        token_ids = encode_prompts(prompts, tokenizer)
        self._versions.refresh()
        published = self._versions.publisher.adapter_name
        adapter = None if is_peft_model(self._model) and is_disabled(self._model) else published
        self._is_running = True
        try:
            completions = self._engine.generate(token_ids, params, adapter=adapter)
        except FloatingPointError as error:
            self._name_not_finite(error)
            raise
        finally:
            self._is_running = False
        self._scheduler.sample()
        # Of what a base has sampled without the adapter that it is trained with there is nothing to compare.
        temperature = self._engine.sampling_temperature(params)
        if temperature is not None and adapter == published:
            self._mismatch.note(temperature, completions)
        return [with_text(completion, tokenizer) for completion in completions]

    def before_generate(self) -> None:
        """Refresh the weights for a call of the engine's own `generate`, which need not come from `run`."""
        self._turns.check_process()
        if self._turns.phase is Phase.ROLLOUT and not self._is_running:
            self._versions.refresh()

    def _name_not_finite(self, error: Exception) -> None:
        """Raise `FloatingPointError` if a weight of the trainer's is why what was sampled is not made of numbers."""
        parts = self._versions.source.parts()
        weights = [(part.name, part.tensor) for part in parts if part.tensor is not None]
        if is_peft_model(self._model):
            weights += adapter_weights(cast("PeftModel", self._model)).named_tensors()
        culprit = first_not_finite(weights)
        if culprit is not None:
            raise FloatingPointError(not_numbers(culprit)) from error
