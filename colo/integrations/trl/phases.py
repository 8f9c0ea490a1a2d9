"""When a TRL trainer trains and comes to rest, and what it logs of that."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from typing import Any

import torch
from transformers import TrainerCallback

from colo.integrations.trl.generation import ColoGeneration
from colo.integrations.trl.reference import as_policy
from colo.phases.phase import Phase
from colo.runtime import Runtime
from colo.units import GIB


def watch_forwards(model: Any, runtime: Runtime) -> list[Any]:
    """Hooks that enter the training phase before the model computes; returns their handles.

    One is on the embeddings, since some losses call the layers below the model itself. They run before the hooks of
    FSDP2: a pass that compares log-probabilities would otherwise begin within one that FSDP2 takes for begun.
    """

    def before_forward(*_: Any) -> None:
        in_rollout = runtime.phase is Phase.ROLLOUT
        if in_rollout or (model.training and torch.is_grad_enabled() and runtime.phase is not Phase.TRAIN):
            with as_policy(model):
                runtime.enter(Phase.TRAIN)

    watched = (model, model.get_input_embeddings())
    return [module.register_forward_pre_hook(before_forward, prepend=True) for module in watched]


class PhaseCallback(TrainerCallback):  # type: ignore[misc]
    """Leaves a phase where a trainer comes to rest, and adds colo's metrics to the trainer's."""

    def __init__(self, trainer: Any, runtime: Runtime, generation: ColoGeneration) -> None:
        self._trainer = trainer
        self._runtime = runtime
        self._generation = generation
        self._since_s = 0.0
        self._sent_bytes = 0

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """Take over how many backward passes a step has: it may be another than when the trainer was attached."""
        self._runtime.accumulation_steps = args.gradient_accumulation_steps
        self._since_s, self._sent_bytes = self._runtime.trace.now_s(), self._runtime.bytes_synced

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Leave only where a rollout follows: what left for it would come back unused for another step."""
        every = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        every *= getattr(self._trainer, "num_iterations", 1)
        if getattr(self._trainer, "_step", 0) % every == 0:
            self._runtime.enter(None)
        self._add_metrics()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Leave the phase that evaluation was in."""
        self._leave_passes()

    def on_predict(self, *_: Any, **__: Any) -> None:
        """Leave the phase that prediction was in."""
        self._leave_passes()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the phase that training was in."""
        self._runtime.enter(None)

    def _leave_passes(self) -> None:
        """Leave a phase of passes without a backward one, which FSDP2 ends with whole weights where `train()` begins.

        accelerate would look for those in the optimizer.
        """
        self._runtime.enter(None)
        self._runtime.transport.source.reshard()

    def _add_metrics(self) -> None:
        """Add the last step's to what `trainer.log` averages; what a callback adds later is not in its history."""
        trace, generation, since_s = self._runtime.trace, self._generation, self._since_s
        self._since_s = trace.now_s()
        new: dict[str, float] = defaultdict(float)
        for span in takewhile(lambda span: span.end_s > since_s, reversed(trace.spans)):
            if span.category in ("phase", "switch"):
                new[f"{span.name if span.category == 'phase' else 'switch'}_s"] += span.duration_s
        for sample in takewhile(lambda sample: sample.time_s > since_s, reversed(trace.samples)):
            if sample.phase in (Phase.ROLLOUT, Phase.TRAIN):
                name = f"{sample.phase}_gib"
                new[name] = max(new[name], sample.total_bytes / GIB)
        if generation.seconds:
            new["tokens_per_s"] = generation.num_tokens / generation.seconds
            generation.num_tokens, generation.seconds = 0, 0.0
        new["sent_bytes"] = float(self._runtime.bytes_synced - self._sent_bytes)
        self._sent_bytes = self._runtime.bytes_synced
        for name, series in (("mismatch", "mismatch_sampled"), ("changed_fraction", "changed_fraction")):
            if values := trace.metrics.get(series):
                new[name] = values[-1]
        for name, value in new.items():
            self._trainer._metrics["train"][f"colo/{name}"].append(value)
