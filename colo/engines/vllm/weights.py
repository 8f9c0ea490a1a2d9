"""The weights of an engine as the trainer's process sees them; `colo.engines.vllm.worker` is the other end.

A worker in another process is asked about parameters as [name, dtype, shape, stride]. It answers with the copies that
vLLM's loader makes, each [name, shape, stride, offset, [slab, offset], dtype, shape, stride]: the source, then the
target.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from colo.engines.vllm.connection import Connection
from colo.engines.vllm.staging import Staging
from colo.engines.vllm.store import WeightStore
from colo.memory.slab import open_slab
from colo.weights.load_plan import Copy, LoadPlan


class WorkerWeights:
    """The weights that the workers of one connection hold.

    Ownership: owns what it has mapped of the workers' memory, until `close`; `store` and `staging` are the engine's.
    """

    def __init__(self, connection: Connection, *, store: WeightStore | None, staging: Staging) -> None:
        """Map the memory of weights that lie in slabs of the workers' own. Raises: `TransferError` when that fails."""
        self._connection = connection
        self._store = store
        self._staging = staging
        self._mapped: list[list[torch.Tensor]] = []
        self._in_slabs = connection.infos[0]["weights_in"] == "slabs"
        if self._in_slabs and connection.own_process and store is None:
            exported = connection.call("export", to_pid=os.getpid())
            self._mapped = [[open_slab(slab, connection.device) for slab in slabs] for slabs in exported]

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
        plans: list[Any] = connection.call(
            "record",
            parameters=[[n, str(t.dtype).removeprefix("torch."), [*t.shape], [*t.stride()]] for n, t in source.items()],
            model_type=connection.model_type,
            same_process=not connection.own_process,
        )
        if not connection.own_process:
            plan: LoadPlan = plans[0]  # one worker a process
            return plan
        copies = tuple(
            Copy(
                name=name,
                shape=tuple(shape),
                stride=tuple(stride),
                offset=offset,
                target=self._view(rank, place, dtype, target_shape, target_stride),
            )
            for rank, plan in enumerate(plans)
            for name, shape, stride, offset, place, dtype, target_shape, target_stride in plan["copies"]
        )
        return LoadPlan(
            copies=copies,
            sources={name: (t.dtype, tuple(t.shape)) for name, t in source.items()},
            strides={name: tuple(t.stride()) for name, t in source.items()},
            fallbacks={name: why for plan in plans for name, why in plan["fallbacks"].items()},
        )

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run vLLM's layerwise reload on all of its weights. When it fails, the model cannot compute.

        Raises: whatever a worker raised, with its traceback.
        """
        call, model_type = self._connection.call, self._connection.model_type
        call("begin_reload")
        if not self._connection.own_process:
            call("reload", tensors=[[n, t.detach()] for n, t in weights], model_type=model_type, staging=None)
        else:
            for tensors, staging in self._staging.put_groups(weights, to_pid=self._connection.pids[0]):
                call("reload", tensors=tensors, model_type=model_type, staging=staging)
        call("finish_reload")

    def close(self) -> None:
        """Let go of what is mapped. Idempotent."""
        self._mapped.clear()

    def _view(
        self, rank: int, place: tuple[int, int], dtype: str, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """Memory of one worker, at `place` (slab, offset), as a tensor of this process."""
        index, offset = place
        slab = self._store.slab(rank, index) if self._store is not None else self._mapped[rank][index]
        kind: torch.dtype = getattr(torch, dtype)
        return slab.view(kind).as_strided(tuple(shape), tuple(stride), offset // kind.itemsize)
