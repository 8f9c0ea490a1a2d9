"""The weights of an engine as the trainer's process sees them; `colo.engines.vllm.worker.agent` is the other end.

A worker in another process is asked about parameters as [name, dtype, shape, stride]. It answers with the copies that
vLLM's loader makes, each [name, shape, stride, offset, [memory, offset], dtype, shape, stride]: the source, then the
target, and with descriptions of the memory unless the trainer owns it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from colo.engine import in_all_ranks
from colo.engines.vllm.connection import Connection
from colo.engines.vllm.store import WeightStore
from colo.errors import ColoError, TransferError, Unsupported
from colo.memory.load_plan import Copy, LoadPlan
from colo.memory.probe import device_id
from colo.memory.shared_memory import Description
from colo.memory.shared_memory import open_shared_memory as open_slab
from colo.weights.sources.module import OUTPUT_LAYER, check_taken, noted, own_output_layer
from colo.weights.transports.ipc.staging import Staging


class WorkerWeights:
    """The weights that the workers of one connection hold.

    Ownership: owns what it has mapped of the workers' memory, until `close`; `store` and `staging` are the engine's.
    """

    def __init__(self, connection: Connection, *, store: WeightStore | None, staging: Staging) -> None:
        self._connection = connection
        self._store = store
        self._staging = staging
        self._mapped: dict[str, torch.Tensor] = {}
        self._in_slabs = connection.infos[0]["weights_in"] == "slabs"

    @property
    def outlive_the_engine(self) -> bool:
        """Whether they stay where they are when its process ends."""
        return self._in_slabs and self._store is not None

    @property
    def why_they_stay(self) -> str:
        """Why they never leave, where they do not, in words that follow `it is`."""
        if self._in_slabs:
            return "in memory that outlives the engine (start it with share_memory=False to let it go)"
        return "not in vLLM's sleep pool (on a GPU, start vLLM with enable_sleep_mode=True to let it go)"

    @property
    def where(self) -> str:
        """What memory they lie in, in a phrase for reports."""
        if self._in_slabs:
            return "memory that the trainer owns" if self._store is not None else "memory of its own that can be mapped"
        return {"pool": "vLLM's sleep pool", "memory": "vLLM's own memory"}[self._connection.infos[0]["weights_in"]]

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Record what vLLM's loader does with `source`, one plan for all workers; see `Engine.record_plan`."""
        connection = self._connection
        answers: list[Any] = connection.call(
            "record",
            parameters=[[n, str(t.dtype).removeprefix("torch."), [*t.shape], [*t.stride()]] for n, t in source.items()],
            model_type=connection.model_type,
            to_pid=os.getpid(),
        )
        if not connection.own_process:
            plan: LoadPlan = answers[0]  # one worker a process
            return plan
        copies: list[Copy] = []
        fallbacks: dict[str, str] = {}
        for rank, answer in enumerate(answers):
            fallbacks |= answer["fallbacks"]
            try:
                memory = self._memory(rank, answer)
            except (TransferError, Unsupported) as error:
                fallbacks |= dict.fromkeys((copy[0] for copy in answer["copies"]), str(error))
                continue
            copies += (
                Copy(
                    name=name,
                    shape=tuple(shape),
                    stride=tuple(stride),
                    offset=offset,
                    target=_view(memory[place[0]], place[1], dtype, target_shape, target_stride),
                )
                for name, shape, stride, offset, place, dtype, target_shape, target_stride in answer["copies"]
            )
        return LoadPlan(
            copies=tuple(copies),
            sources={name: (t.dtype, tuple(t.shape)) for name, t in source.items()},
            strides={name: tuple(t.stride()) for name, t in source.items()},
            fallbacks=fallbacks,
            unused=frozenset(answers[0]["unused"]),
        )

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run vLLM's layerwise reload on all of its weights. When it fails, the model cannot compute.

        Raises: whatever a worker raised, with its traceback; `TransferError` for weights that none has a place for.
        """
        specs: dict[str, torch.Tensor] = {}
        _, left_out = in_all_ranks(
            self._connection,
            "loading weights",
            lambda: self._reload(weights, specs),
            lambda left_out: left_out,
        )
        check_taken(specs, [counts for of_rank in left_out for counts in of_rank])

    def _reload(
        self, weights: Iterable[tuple[str, torch.Tensor]], specs: dict[str, torch.Tensor]
    ) -> list[dict[str, int]]:
        """See `reload`. Returns what each worker has not taken whole, and leaves in `specs` what it was given."""
        call, model_type = self._connection.call, self._connection.model_type
        tied = any(call("begin_reload"))
        try:
            if not self._connection.own_process:
                given = [[n, t.detach()] for n, t in _checked(noted(weights, specs), tied=tied)]
                call("reload", tensors=given, model_type=model_type, staging=None)
            else:
                to_pid = self._connection.pids[0]
                checked = _checked(noted(weights, specs), tied=tied)
                for tensors, staging in self._staging.put_groups(checked, to_pid=to_pid):
                    call("reload", tensors=tensors, model_type=model_type, staging=staging)
        except BaseException:
            with suppress(ColoError):
                call("abandon_reload")
            raise
        return call("finish_reload")

    def close(self) -> None:
        """Let go of what is mapped. Idempotent."""
        self._mapped.clear()

    def _memory(self, rank: int, answer: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """The memory that one worker's weights lie in.

        Raises: `TransferError` when it cannot be mapped, `Unsupported` when it should not be.
        """
        if self._store is not None:
            return self._store.slabs(rank)
        connection = self._connection
        if connection.owns_llm:
            raise Unsupported("the engine's memory ends with its process: start it with share_memory=True")
        if connection.infos[rank]["device"] != device_id(connection.device):
            raise Unsupported("the engine keeps it on another GPU")
        return [self._opened(description) for description in answer["memory"]]

    def _opened(self, description: Description | None) -> torch.Tensor:
        """Memory of a worker, mapped once; `None` is for what nothing lies in."""
        if description is None:
            return torch.empty(0, dtype=torch.uint8)
        key = repr(description)
        if key not in self._mapped:
            self._mapped[key] = open_slab(description, self._connection.device)
        return self._mapped[key]


def _checked(weights: Iterable[tuple[str, torch.Tensor]], *, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, unless a model's own output layer is among them and the engine's is its embedding (`tied`)."""
    for name, tensor in weights:
        if tied and name == OUTPUT_LAYER and isinstance(tensor, nn.Parameter):
            raise own_output_layer(tensor.numel())
        yield name, tensor


def _view(memory: torch.Tensor, offset_bytes: int, dtype: str, shape: Sequence[int], stride: Sequence[int]) -> Any:
    """A tensor in `memory`, uint8."""
    kind: torch.dtype = getattr(torch, dtype)
    return memory.view(kind).as_strided(tuple(shape), tuple(stride), offset_bytes // kind.itemsize)
