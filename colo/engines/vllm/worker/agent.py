"""The agent of a vLLM worker: the other end of every `WorkerLink`.

    vllm serve MODEL --host 127.0.0.1 --load-format colo --worker-extension-cls colo.engines.vllm.worker.ColoWorker

One method is added to the worker, `colo(envelope)`: an `Envelope` of colo/engines/vllm/wire.py by the names of its
fields. Requests and answers are strings, numbers, lists and dictionaries, which vLLM carries between processes without
its insecure-serialization flag, and a server as JSON; within one process they may hold tensors. Errors come back as
answers, so that their kind and figures survive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colo import errors
from colo.engines.elsewhere import read_version, receive, version_at
from colo.engines.vllm import compat, plugin, wire
from colo.engines.vllm.processes import end_with, pid_namespace
from colo.engines.vllm.worker import adapters
from colo.engines.vllm.worker.loader import OwnMemory, Placement, placement_of
from colo.engines.vllm.worker.sleep import WorkerSegments
from colo.engines.vllm.worker.weights import Reload, SliceSteps, check_begun, packed_weights, record
from colo.errors import TransferError
from colo.memory.copy_plan import wait_for_queued
from colo.memory.digest import Digest
from colo.memory.load_plan import LoadPlan, Part
from colo.memory.probe import device_id, torch_pinned_bytes
from colo.memory.share import Allocations, Description, Opened, empty, open_shared_memory, spec_of, why_not_mapped
from colo.memory.specs import CopySpec, Place, TensorSpec
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency
from colo.weights.delta import DeltaTarget
from colo.weights.meeting import GroupEnd, Meeting, join
from colo.weights.packed import BITSANDBYTES, PackedWeight
from colo.weights.transports.receiver import Receiver, run_step

plugin.register()


class ColoWorker:
    """The worker extension: pass its name as `worker_extension_cls`."""

    def colo(self, envelope: dict[str, Any]) -> dict[str, Any]:
        """Run one of `OPERATIONS` for a client and return `{"value": ...}` or `{"error": ...}`."""
        return call(self, envelope)


def call(worker: Any, envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Run one operation on a worker, or on the object that vLLM wraps around one."""
    # vLLM passes the wrapper to functions and the worker to methods
    worker = getattr(worker, "worker", worker)
    try:
        # Kept on the worker itself, so that both go when vLLM lets go of it.
        agent = worker._colo_agent = getattr(worker, "_colo_agent", None) or WorkerAgent(worker)
        return {"value": agent.run(wire.Envelope.from_wire(envelope))}
    except Exception as error:  # noqa: BLE001 - travels to the caller, who raises it
        # an exception would end vLLM's worker, and with it the engine
        return {"error": wire.WorkerError.of(error).to_wire()}


class WorkerAgent:
    """A method for each request of colo/engines/vllm/wire.py, whose class says what is asked.

    Only the client that called `describe` last is answered: one client must not copy what another has bound.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.get_model()
        self._placement: Placement | None = placement_of(self._model)
        self._client: str | None = None
        self._segments: WorkerSegments | None = None
        self._receiver: Receiver | None = None
        self._reload: Reload | None = None
        self._group: GroupEnd | None = None  # of broadcasts by the trainer
        self._target: DeltaTarget | None = None  # of changes of weights
        self._adapters = adapters.WorkerAdapters(worker)
        self._device = torch.device(worker.device)
        self._slices = SliceSteps(self._device, self._plan, worker.rank)  # of the trainer's ranks
        self._given = Opened(self._device)
        """Tensors of the client's that a reload is given."""

        self._adapters_given: dict[int, tuple[Opened, dict[str, float]]] = {}
        """Client's tensors and scaling of every module, by number of the adapter."""

    def run(self, envelope: wire.Envelope) -> Any:
        """Run an operation and return its result. Raises: `EngineLost` when another client has connected since."""
        if envelope.operation not in OPERATIONS:
            raise TransferError(
                f"{envelope.operation!r} is no operation of a worker, which has {', '.join(OPERATIONS)}"
            )
        kind, method = OPERATIONS[envelope.operation]
        asked = kind.from_wire(envelope.arguments)
        if kind is wire.Describe:  # who describes becomes the client
            self._client = envelope.client
        elif envelope.client != self._client:
            raise errors.EngineLost("another client has connected since")
        return method(self, asked)

    def _describe(self, asked: wire.Describe) -> dict[str, Any]:
        """Meet a new client and return `WorkerInfo`. Ends what an earlier client has begun, and unmaps its memory.

        Raises: `TransferError` when `home` is not the client's memory, so that the client is on another machine;
        `BudgetError` when what an earlier client has put to sleep cannot come back.
        """
        if asked.home is not None:
            _check_home(asked.home, self._client or "")
        if asked.client_pid is not None:
            end_with(asked.client_pid)
        # the old client may have ended in the middle of anything
        self._abandon_reload()
        if self._receiver is not None:
            self._receiver.release()
        self._release()
        worker, config, segments = self._worker, self._worker.model_config, self._segments_now().by_name
        pooled_bytes, pooled_cache_bytes = (segments[name].size_bytes for name in (ENGINE_WEIGHTS, ENGINE_KV_CACHE))
        # by address: tied parameters count once
        parameters_bytes = sum({p.data_ptr(): p.nbytes for p in self._model.parameters()}.values())
        placement, pool = self._placement, compat.sleep_pool(worker)
        in_slabs = placement is not None
        return wire.WorkerInfo(
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            rank=worker.rank,
            device=device_id(self._device),
            model_type=getattr(config.hf_config, "model_type", None),
            vocab_size=int(config.get_vocab_size()),
            max_length=int(config.max_model_len),
            logprobs_mode=config.logprobs_mode,
            has_tokenizer=not config.skip_tokenizer_init,
            weights_bytes=parameters_bytes if in_slabs else max(pooled_bytes, parameters_bytes),
            weights_in="slabs" if in_slabs else ("pool" if pooled_bytes else "memory"),
            weights_can_leave=bool(pooled_bytes) and not in_slabs,
            kv_cache_bytes=pooled_cache_bytes or compat.kv_cache_bytes(worker.vllm_config),
            kv_cache_can_leave=bool(pooled_cache_bytes),
            is_asleep=pool is not None and any(record.is_asleep for record in pool.pointer_to_data.values()),
            max_adapters=self._adapters.capacity,
            takes_adapters_by_name=compat.takes_adapters_by_name(),
            ipc_refusal=why_not_mapped(asked.probe, self._device),
            residual_bytes=compat.residual_bytes(worker, same_process=asked.same_process),
            placing_s=placement.placing_s if placement is not None else 0.0,
            outside=dict(placement.outside) if placement is not None else {},
        ).to_wire()

    def _record(self, asked: wire.Record) -> dict[str, Any] | LoadPlan:
        source = {spec.name: empty(spec) for spec in map(TensorSpec.from_wire, asked.parameters)}
        plan = self._plan(source)
        if asked.to_pid == os.getpid():
            return plan
        fallbacks = dict(plan.fallbacks)
        # copies that name the same allocation share one description
        allocations = Allocations()
        copies = []
        for copy in plan.copies:
            try:
                place = Place(spec_of(copy.name, copy.target), *self._place(copy.target, allocations))
            except errors.Unsupported as error:
                fallbacks.setdefault(copy.name, str(error))
                continue
            copies.append(CopySpec(copy.shape, copy.stride, copy.offset, place).to_wire())
        # slabs of this worker's own are described instead: their places are indices of slabs
        memory: Sequence[Description | None] = allocations.memory
        if self._placement is not None and isinstance(self._placement.source, OwnMemory):
            memory = self._placement.source.describe(to_pid=asked.to_pid)
        recorded = wire.Recorded(copies=copies, fallbacks=fallbacks, memory=list(memory), unused=sorted(plan.unused))
        return recorded.to_wire()

    def _place(self, target: torch.Tensor, allocations: Allocations) -> tuple[int, int]:
        """Index of the memory that a weight lies in, and offset in bytes. Raises: `Unsupported` where none maps it."""
        cannot = "the engine keeps it in memory that this process cannot map"
        if self._placement is not None:
            place = self._placement.locate(target)
            if place is None:
                raise errors.Unsupported(cannot)
            return place
        advice = "start vLLM with load_format='colo'"
        if target.device.type != "cuda":
            raise errors.Unsupported(f"{cannot}: {advice}")
        try:
            return allocations.place(target)
        except errors.Unsupported as error:
            raise errors.Unsupported(f"{cannot} ({error}): {advice}") from error

    def _plan(self, source: dict[str, torch.Tensor]) -> LoadPlan:
        return record(self._model, self._worker.model_config, self._device, source)

    def _packed(self, asked: wire.Packed) -> dict[str, PackedWeight]:
        if self._worker.model_config.quantization != BITSANDBYTES:
            return {}
        return packed_weights(self._model)

    def _pinned_bytes(self, asked: wire.PinnedBytes) -> int:
        return self._segments_now().mover.arena.pinned_bytes + torch_pinned_bytes()

    # ---- sleep -------------------------------------------------------------------------------------------------------

    def _prepare(self, asked: wire.Prepare) -> None:
        self._segments_now().prepare()

    def _begin(self, asked: wire.Begin) -> None:
        self._segments_now().begin(asked.segment, Residency(asked.target))

    def _wait(self, asked: wire.Wait) -> int:
        segments = self._segments_now()
        segments.wait(asked.segment)
        return segments.by_name[asked.segment].device_bytes

    def _release(self, asked: wire.Release | None = None) -> None:
        self._given = Opened(self._device)
        self._leave_group()
        self._slices.release()
        self._target = None
        self._adapters_given.clear()
        if self._segments is not None:
            self._segments.close()
            self._segments = None

    def _forget(self, asked: wire.Forget) -> None:
        compat.forget_reloads(self._model)
        compat.free_kv_cache(self._worker)

    def _segments_now(self) -> WorkerSegments:
        if self._segments is None:
            self._segments = WorkerSegments(self._worker)
        return self._segments

    # ---- vLLM's own reload, where copies alone do not do -------------------------------------------------------------

    def _begin_reload(self, asked: wire.BeginReload) -> bool:
        self._abandon_reload()
        self._holds(None)
        self._reload = Reload(self._model, self._worker.model_config, self._device)
        return self._reload.tied

    def _reload_tensors(self, asked: wire.ReloadTensors) -> None:
        reload = check_begun(self._reload)
        if asked.in_process:
            reload.load(asked.tensors, keep=True)
            return
        self._given.open(asked.tensors)
        reload.load(self._given.tensors)

    def _reload_version(self, asked: wire.ReloadVersion) -> None:
        for tensors in read_version(version_at(asked.folder)):
            self._take(tensors, asked)

    def _join_group(self, asked: wire.JoinGroup) -> None:
        meeting = Meeting(**asked.meeting)
        self._leave_group()  # one in which something has failed, or of a trainer before
        try:
            self._group = join(meeting, 1 + self._worker.rank, asked.deadline_s)
        except RuntimeError as error:
            raise TransferError(f"rank {self._worker.rank} cannot join the trainer's group: {error}") from error

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.give_up(TransferError("the engine has left the group"))
        self._group = None

    def _reload_broadcast(self, asked: wire.ReloadBroadcast) -> dict[str, int]:
        shapes = [(name, getattr(torch, dtype), shape) for name, dtype, shape in asked.weights]
        if self._group is None:
            raise TransferError("this worker is in no group, or another client has connected since")
        try:
            tensors = receive(self._group, shapes, self._device)
        except BaseException as error:
            self._group.give_up(error)
            raise
        sums = Digest.of(tensors).sums
        self._take(tensors, asked)
        return sums

    def _take(self, tensors: Mapping[str, torch.Tensor], asked: wire.ReloadVersion | wire.ReloadBroadcast) -> None:
        """Load weights that have come from elsewhere, or changes of them."""
        if not asked.changes:
            check_begun(self._reload).load(tensors, keep=True)
        else:
            on_device = {name: tensor.to(self._device) for name, tensor in tensors.items()}
            self._landed().apply(on_device)

    # ---- slices from a trainer's ranks -------------------------------------------------------------------------------

    def _slice_step(self, asked: wire.SliceStep) -> Any:
        answer = self._slices.run(asked.step, asked.arguments)
        if asked.step == "begin_slices":
            self._abandon_reload()
            self._holds(None)
        return answer

    # ---- changes of weights ------------------------------------------------------------------------------------------

    def _land(self, asked: wire.Land) -> dict[str, Any]:
        source = {spec.name: empty(spec) for spec in map(TensorSpec.from_wire, asked.parameters)}
        self._target = None
        try:
            self._target = DeltaTarget(self._plan(source))
        except Exception as error:  # noqa: BLE001 - of a loader that copies otherwise; weights have been loaded whole
            return wire.Landed(regions=[], refusal=f"{type(error).__name__}: {error}").to_wire()
        return wire.Landed(regions=self._target.regions, refusal=None).to_wire()

    def _begin_changes(self, asked: wire.BeginChanges) -> bool:
        # until the changes are attested what the worker holds is unknown
        return self._target is not None and self._holds(None) == asked.base

    def _attest(self, asked: wire.Attest) -> list[int]:
        sums = self._landed().sums()
        self._holds(asked.version)
        return sums

    def _landed(self) -> DeltaTarget:
        if self._target is None:
            raise TransferError("no weights have been described that could change")
        return self._target

    def _holds(self, version: str | None) -> str | None:
        """Note the version that the worker holds, and return the one before."""
        if self._target is None:
            return None
        before, self._target.version = self._target.version, version
        return before

    def _abandon_reload(self, asked: wire.AbandonReload | None = None) -> None:
        reload, self._reload = self._reload, None
        if reload is not None:
            reload.abandon()

    def _finish_reload(self, asked: wire.FinishReload) -> dict[str, list[Part]]:
        # forgotten first: a reload that fails while it ends cannot be ended again
        reload, self._reload = check_begun(self._reload), None
        return reload.finish()

    # ---- copies out of the trainer's memory --------------------------------------------------------------------------

    def _receive(self, asked: wire.Receive) -> Any:
        if self._receiver is None:
            self._receiver = Receiver(self._device, self._plan, number=self._worker.rank)
        # only the last answer is asked for: the steps before raise or return nothing of use
        return [run_step(self._receiver, one["step"], one["arguments"]) for one in asked.steps][-1]

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def _set_adapter(self, asked: wire.SetAdapter) -> bool:
        """Load a LoRA adapter from memory, or replace what it holds: true if that was done in place.

        Memory of the client stays mapped. Ordering: it has been read when this returns.
        """
        number, scalings = asked.number, dict(asked.scalings or {})
        if asked.in_process:
            return self._adapters.update(number, asked.tensors, scalings)
        # the memory stays mapped: the next version is read at the same addresses, without places
        opened, known = self._adapters_given.get(number, (Opened(self._device), scalings))
        if asked.tensors is not None:
            self._adapters_given.pop(number, None)  # until it is open
            opened.open(asked.tensors)
            self._adapters_given[number] = opened, scalings
        elif number not in self._adapters_given:
            raise TransferError(f"the memory of adapter {number} is not mapped: send its places")
        else:
            opened.refresh()
        in_place = self._adapters.update(number, opened.tensors, scalings if asked.tensors is not None else known)
        wait_for_queued(self._device)
        return in_place

    def _adapter_refusal(self, asked: wire.AdapterRefusal) -> str | None:
        return self._adapters.plan_refusal

    def _adapter_numbers(self, asked: wire.AdapterNumbers) -> list[int]:
        return self._adapters.numbers

    def _keep_adapter(self, asked: wire.KeepAdapter) -> None:
        self._adapters.keep(asked.number)

    def _remove_adapter(self, asked: wire.RemoveAdapter) -> None:
        self._adapters_given.pop(asked.number, None)
        self._adapters.remove(asked.number)


OPERATIONS: dict[str, tuple[type[wire.Request], Callable[[WorkerAgent, Any], Any]]] = {
    kind.operation(): (kind, getattr(WorkerAgent, f"_{kind.operation()}")) for kind in wire.Request.__subclasses__()
}
"""Requests that a client may send, by name, and the method of `WorkerAgent` that answers each."""


def _check_home(home: Description, client: str) -> None:
    """Raise `TransferError` unless `home` is memory of the client, who is on this machine then."""
    name = client.encode()
    if open_shared_memory(home, torch.device("cpu"))[: len(name)].numpy().tobytes() != name:
        raise TransferError("the client is on another machine: what is mapped here is not its memory")
