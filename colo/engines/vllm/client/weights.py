"""The weights of an engine as the trainer's process sees them; `colo.engines.vllm.worker.agent` is the other end.

A worker in another process is told of parameters as `TensorSpec`s. It answers with the copies that vLLM's loader makes,
as `CopySpec`s, and with descriptions of the memory unless the trainer owns it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from colo.engine import in_all_ranks
from colo.engines.vllm import wire
from colo.engines.vllm.client.link import WorkerLink
from colo.engines.vllm.store import WeightStore
from colo.errors import ColoError, TransferError, Unsupported
from colo.memory.load_plan import Copy, LoadPlan
from colo.memory.probe import device_id
from colo.memory.share import Description, Staging, open_shared_memory, spec_of, view
from colo.memory.specs import CopySpec
from colo.weights.sources.module import OUTPUT_LAYER, check_taken, own_output_layer, recording_specs


class WorkerWeights:
    """The weights that the workers of one link hold. Owns what it has mapped of their memory, until `close`."""

    def __init__(self, link: WorkerLink, *, store: WeightStore | None, staging: Staging) -> None:
        self._link = link
        self._store = store
        self._staging = staging
        self._mapped: dict[str, torch.Tensor] = {}
        self._in_slabs = link.infos[0].weights_in == "slabs"

    @property
    def outlive_the_engine(self) -> bool:
        """Whether they stay where they are when its process ends."""
        return self._in_slabs and self._store is not None

    @property
    def why_they_stay(self) -> str:
        """Why they never leave, where they do not, in words that follow `it is`."""
        if self._in_slabs:
            whose = "memory that outlives the engine" if self._link.why_not_shared is None else "memory that stays"
            return f"in {whose} ({self._link.how_to_free['slabs']})"
        return f"not in vLLM's sleep pool ({self._link.how_to_free['weights']})"

    @property
    def where(self) -> str:
        """What memory they lie in, in a phrase for reports."""
        if not self._in_slabs:
            return {"pool": "vLLM's sleep pool", "memory": "vLLM's own memory"}[self._link.infos[0].weights_in]
        if self._store is not None:
            return "memory that the trainer owns"
        return "memory of its own" + (" that can be mapped" if self._link.why_not_shared is None else "")

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Record what vLLM's loader does with `source`, one plan for all workers; see `Engine.record_plan`."""
        link = self._link
        if link.why_not_shared is not None:  # each worker records its own when it is to copy
            return LoadPlan.of(source, fallbacks=dict.fromkeys(source, link.why_not_shared))
        parameters = [spec_of(name, tensor).to_wire() for name, tensor in source.items()]
        answers = link.call(wire.Record(parameters=parameters, model_type=link.model_type, to_pid=os.getpid()))
        if link.same_process:
            return cast("LoadPlan", answers[0])  # one worker a process
        copies: list[Copy] = []
        fallbacks: dict[str, str] = {}
        recorded = list(map(wire.Recorded.from_wire, answers))
        for rank, answer in enumerate(recorded):
            fallbacks |= answer.fallbacks
            specs = list(map(CopySpec.from_wire, answer.copies))
            try:
                memory = self._memory(rank, answer)
            except (TransferError, Unsupported) as error:
                fallbacks |= dict.fromkeys((spec.name for spec in specs), str(error))
                continue
            copies += (
                Copy(
                    name=spec.name,
                    shape=spec.shape,
                    stride=spec.strides,
                    offset=spec.offset,
                    target=view(spec.target, memory[spec.target.memory]),
                )
                for spec in specs
            )
        plan = LoadPlan.of(source, copies=copies, fallbacks=fallbacks)
        return replace(plan, unused=frozenset(recorded[0].unused))

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run vLLM's layerwise reload on all of its weights. When it fails, the model cannot compute.

        Raises: what a worker raised, with its traceback; `TransferError` for weights that no worker has a place for.
        """
        specs: dict[str, torch.Tensor] = {}
        _, left_out = in_all_ranks(
            self._link,
            "loading weights",
            lambda: self._reload(weights, specs),
            lambda left_out: left_out,
        )
        check_taken(specs, [counts for of_rank in left_out for counts in of_rank])

    def _reload(
        self, weights: Iterable[tuple[str, torch.Tensor]], specs: dict[str, torch.Tensor]
    ) -> list[dict[str, int]]:
        """See `reload`. Returns what each worker has not taken whole, and leaves in `specs` what it was given."""
        call, model_type = self._link.call, self._link.model_type
        tied = any(call(wire.BeginReload()))
        try:
            if self._link.same_process:
                given = {n: t.detach() for n, t in _checked(recording_specs(weights, specs), tied=tied)}
                call(wire.Reload(tensors=given, model_type=model_type, in_process=True))
            else:
                checked = _checked(recording_specs(weights, specs), tied=tied)
                for group in self._staging.put_groups(checked):
                    call(wire.Reload(tensors=group, model_type=model_type, in_process=False))
        except BaseException:
            with suppress(ColoError):
                call(wire.AbandonReload())
            raise
        return call(wire.FinishReload())

    def close(self) -> None:
        """Let go of what is mapped. Idempotent."""
        self._mapped.clear()

    def _memory(self, rank: int, answer: wire.Recorded) -> Sequence[torch.Tensor]:
        """The memory of one worker's weights. `TransferError` or `Unsupported` where it is not to be mapped."""
        if self._store is not None:
            return self._store.slabs(rank)
        link = self._link
        if link.is_own:
            raise Unsupported("the engine's memory ends with its process: start it with share_memory=True")
        if link.infos[rank].device != device_id(link.device):
            raise Unsupported("the engine keeps it on another GPU")
        return [self._opened(description) for description in answer.memory]

    def _opened(self, description: Description | None) -> torch.Tensor:
        """Memory of a worker, mapped once; `None` is for what nothing lies in."""
        if description is None:
            return torch.empty(0, dtype=torch.uint8)
        key = repr(description)
        if key not in self._mapped:
            self._mapped[key] = open_shared_memory(description, self._link.device)
        return self._mapped[key]


def _checked(weights: Iterable[tuple[str, torch.Tensor]], *, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, unless a model's own output layer is among them and the engine's is its embedding (`tied`)."""
    for name, tensor in weights:
        if tied and name == OUTPUT_LAYER and isinstance(tensor, nn.Parameter):
            raise own_output_layer(tensor.numel())
        yield name, tensor
