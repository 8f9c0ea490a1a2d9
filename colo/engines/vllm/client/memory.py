"""The memory of vLLM's workers as the trainer's process sees it: segments, weights, adapters.

The workers' bytes are counted here; colo/engines/vllm/worker/agent.py is the other end. A worker in another process is
told of parameters as `TensorSpec`s. It answers with the copies that vLLM's loader makes, as `CopySpec`s, and with
descriptions of the memory unless the trainer owns it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from colo.engine import AdapterWeights, SleepLevel, in_all_ranks
from colo.engines.vllm import wire
from colo.engines.vllm.client import NamedAdapter, WorkerLink
from colo.engines.vllm.client.elsewhere import WeightsElsewhere
from colo.engines.vllm.store import WeightStore
from colo.errors import ColoError, EngineLost, PhaseError, TransferError, Unsupported
from colo.memory.copy_plan import wait_for_queued
from colo.memory.load_plan import Copy, LoadPlan, Part
from colo.memory.probe import device_id
from colo.memory.region import make_room
from colo.memory.share import Description, Exported, Staging, Wire, open_shared_memory, spec_of, view
from colo.memory.specs import CopySpec
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Done, Move, Residency, check_move
from colo.weights.sources.module import OUTPUT_LAYER, check_taken, own_output_layer, recording_specs
from colo.weights.watch import count_read, uncounted


class WorkerMemory:
    """The segments `engine.weights` and `engine.kv_cache`, the same objects also after an engine's restart."""

    def __init__(self, before_leaving: Callable[[str, Residency], None]) -> None:
        """`before_leaving(name, target)` sees to it that nobody uses a segment any more."""
        self.weights, self.kv_cache = WorkerSegment(self, ENGINE_WEIGHTS), WorkerSegment(self, ENGINE_KV_CACHE)
        self.segments = (self.weights, self.kv_cache)
        self._shared = self._weights_outlive = False
        self._before_leaving = before_leaving

    def hold(self, link: WorkerLink, weights: WorkerWeights) -> None:
        """Be what an engine that has just started holds. Host memory for weights that can leave is pinned meanwhile."""
        info = link.infos[0]
        weights_away = Residency.OFFLOADED if info.weights_can_leave and not self._shared else None
        if weights_away is not None:
            link.call(wire.Prepare())
        self.weights.reset(info.weights_bytes, weights_away)
        self.kv_cache.reset(info.kv_cache_bytes, Residency.DISCARDED if info.kv_cache_can_leave else None)
        self._link, self._weights = link, weights
        # asked now: by the time that the process has ended nobody can be asked
        self._weights_outlive = weights.outlive_the_engine

    def lose(self) -> None:
        """Mark what the engine's process held as lost: it has ended."""
        for segment in self.segments:
            # weights in the trainer's slabs outlive the process
            if segment is self.kv_cache or not self._weights_outlive:
                segment.vanish()

    def release(self) -> None:
        """Bring everything back and drop the workers' records of it: the engine is about to end."""
        self._link.call(wire.Release())
        for segment in self.segments:
            segment.residency, segment.device_bytes = Residency.RESIDENT, segment.size_bytes

    def share_weights(self) -> None:
        """Keep the weights where they are from now on, in all lives of the engine."""
        self._shared = True
        self.weights.away = None

    def settle(self) -> None:
        """Wait until everything that is on its way back has arrived."""
        for segment in self.segments:
            if segment.device_bytes != segment.size_bytes:
                segment.settle()

    def why_it_stays(self, name: str) -> str:
        """The reason why a segment never leaves, in words that follow `it is`."""
        if self._link.through is not None:
            return self._weights.where
        if name == ENGINE_KV_CACHE:
            return f"not in vLLM's sleep pool ({self._link.how_to_free['pool']})"
        return "the trainer's memory too" if self._shared else self._weights.why_they_stay

    def before_move(self, segment: WorkerSegment, target: Residency) -> None:
        """Make ready for a segment's move: room in the device, or nobody who uses what leaves."""
        device = self._link.device
        if target is not Residency.RESIDENT:
            self._before_leaving(segment.name, target)
        else:
            make_room(segment.size_bytes, device)

    def begin_move(self, segment: WorkerSegment, target: Residency) -> None:
        """Start a move in every worker; where one refuses, the others go back."""
        name = segment.name
        answers = self._link.ask(wire.Begin(segment=name, target=str(target)))
        failed = [answer for answer in answers if isinstance(answer, wire.WorkerError)]
        if failed:
            # a part of the workers has moved: all go back to where the segment was
            if len(failed) < len(answers):
                self._link.ask(wire.Begin(segment=name, target=str(segment.residency)))
            raise failed[0].error()

    def wait_for(self, name: str) -> int:
        """Wait until every worker has moved a segment; return its device bytes."""
        return int(self._link.call(wire.Wait(segment=name))[0])


class WorkerSegment:
    """A segment of the engine's memory, moved by its workers."""

    def __init__(self, holder: WorkerMemory, name: str) -> None:
        self.name = name
        self.size_bytes = self.device_bytes = self.host_bytes = 0
        self.away: Residency | None = None
        self.residency = Residency.RESIDENT
        self._holder = holder

    def reset(self, size_bytes: int, away: Residency | None) -> None:
        """Take the size and the rule of an engine that has just started."""
        self.size_bytes = self.device_bytes = size_bytes
        self.away = away
        self.residency = Residency.RESIDENT

    def vanish(self) -> None:
        """Count as discarded: the process that held it has ended."""
        self.residency, self.device_bytes, self.host_bytes = Residency.DISCARDED, 0, 0

    def begin(self, target: Residency) -> Move:
        """Start moving to `target`, engine paused; see `Segment.begin`. `PhaseError` when it must not leave."""
        source = self.residency
        if target is source:
            return Done()
        if self.away is None:
            raise PhaseError(
                f"segment {self.name} cannot become {target}: it is {self._holder.why_it_stays(self.name)}. Level "
                f"'{SleepLevel.KEEP_WEIGHTS}' drops the KV cache only"
            )
        check_move(self.name, source, target)
        self._holder.before_move(self, target)
        try:
            self._holder.begin_move(self, target)
        except Exception:
            raise
        except BaseException:  # an interrupt: whether the workers have moved it is unknown, and to move twice is not
            self.residency = source if target is Residency.RESIDENT else target
            raise
        self.residency = target
        if target is Residency.DISCARDED:
            self.settle()
            return Done()
        return _WorkerMove(self, self.size_bytes if Residency.OFFLOADED in (source, target) else 0)

    def settle(self) -> None:
        """Wait until the workers have moved it."""
        self.device_bytes = self._holder.wait_for(self.name)
        self.host_bytes = max(self.host_bytes, self.size_bytes if self.residency is Residency.OFFLOADED else 0)


class _WorkerMove:
    def __init__(self, segment: WorkerSegment, moved_bytes: int) -> None:
        self._segment = segment
        self.moved_bytes = moved_bytes
        self._target = segment.residency
        self._done = False
        # counted from the start of the wake: its pages are taken from the first moment
        if self._target is Residency.RESIDENT:
            segment.device_bytes = segment.size_bytes

    def wait(self) -> None:
        # else a later move has overtaken this one
        if not self._done and self._segment.residency is self._target:
            self._segment.settle()
        self._done = True

    def poll(self) -> bool:
        return self._done


class WorkerWeights:
    """The weights that the workers of one link hold. Owns what it has mapped of their memory, until `close`."""

    def __init__(self, link: WorkerLink, *, store: WeightStore | None, staging: Staging) -> None:
        self._link = link
        self._store = store
        self._staging = staging
        self._mapped: dict[str, torch.Tensor] = {}
        self._in_slabs = link.infos[0].weights_in == "slabs"
        self._elsewhere = WeightsElsewhere(link) if link.through is not None else None

    @property
    def outlive_the_engine(self) -> bool:
        """True if the weights stay where they are when the engine's process ends."""
        return self._in_slabs and self._store is not None

    @property
    def why_they_stay(self) -> str:
        """The reason why they never leave, in words that follow `it is`."""
        if self._in_slabs:
            whose = "memory that outlives the engine" if self._link.why_not_shared is None else "memory that stays"
            return f"in {whose} ({self._link.how_to_free['slabs']})"
        return f"not in vLLM's sleep pool ({self._link.how_to_free['weights']})"

    @property
    def where(self) -> str:
        """A phrase for reports: the memory that they lie in."""
        if not self._in_slabs:
            places = {
                "pool": "vLLM's sleep pool",
                "memory": "vLLM's own memory",
                "elsewhere": "memory of another device",
            }
            return places[self._link.infos[0].weights_in]
        if self._store is not None:
            return "memory that the trainer owns"
        return "memory of its own" + (" that can be mapped" if self._link.why_not_shared is None else "")

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Record what vLLM's loader does with `source`, one plan for all workers; see `Engine.record_plan`."""
        link = self._link
        if link.why_not_shared is not None:  # each worker records its own when it is to copy
            return LoadPlan.of(source, fallbacks=dict.fromkeys(source, link.why_not_shared))
        parameters = [spec_of(name, tensor).to_wire() for name, tensor in source.items()]
        answers = link.call(wire.Record(parameters=parameters, to_pid=os.getpid()))
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
            # one worker's memory that cannot be mapped turns its weights into fallbacks for all
            except (TransferError, Unsupported) as error:
                fallbacks |= dict.fromkeys((spec.name for spec in specs), str(error))
                continue
            for spec in specs:
                target = view(spec.target, memory[spec.target.memory])
                copies.append(
                    Copy(name=spec.name, shape=spec.shape, stride=spec.strides, offset=spec.offset, target=target)
                )
        plan = LoadPlan.of(source, copies=copies, fallbacks=fallbacks)
        # rank 0 answers for all: what a model leaves out is the same on every rank
        return replace(plan, unused=frozenset(recorded[0].unused))

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int | None:
        """Run vLLM's layerwise reload on all of its weights. When it fails, the model cannot compute.

        Workers elsewhere may take what has changed instead. Returns the bytes that were sent there.
        Raises: what a worker raised, with its traceback; `TransferError` for weights that no worker has a place for.
        """
        specs: dict[str, torch.Tensor] = {}
        _, left_out = in_all_ranks(self._link, "loading weights", lambda: self._reload(weights, specs), lambda c: c)
        check_taken(specs, [parts for of_rank in left_out for parts in of_rank])
        return None if self._elsewhere is None else self._elsewhere.sent_bytes

    def _reload(
        self, weights: Iterable[tuple[str, torch.Tensor]], specs: dict[str, torch.Tensor]
    ) -> list[dict[str, list[Part]]]:
        """See `reload`. Returns what each worker has not taken whole, and leaves in `specs` what it was given."""
        call, elsewhere = self._link.call, self._elsewhere
        if elsewhere is not None and elsewhere.takes_changes():
            elsewhere.send_changes(weights)
            return [{}]
        tied = any(call(wire.BeginReload()))
        checked = _checked(recording_specs(weights, specs), tied=tied)
        try:
            if self._link.same_process:
                given = {name: tensor.detach() for name, tensor in checked}
                call(wire.ReloadTensors(tensors=given, in_process=True))
            elif elsewhere is not None:
                elsewhere.send(checked)
            else:
                for group in self._staging.put_groups(checked):
                    call(wire.ReloadTensors(tensors=group, in_process=False))
        except BaseException:
            # else layers would stay as the reload has begun them
            with suppress(ColoError):
                call(wire.AbandonReload())
            raise
        left_out = call(wire.FinishReload())
        if elsewhere is not None:
            elsewhere.confirm(specs)
        return left_out

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
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        key = repr(description)
        if key not in self._mapped:
            self._mapped[key] = open_shared_memory(description, self._link.device)
        return self._mapped[key]


def _checked(weights: Iterable[tuple[str, torch.Tensor]], *, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, unless a model's own output layer is among them and the engine's is its embedding (`tied`)."""
    for name, tensor in weights:
        # an untied head of the trainer would overwrite the engine's embedding
        if tied and name == OUTPUT_LAYER and isinstance(tensor, nn.Parameter):
            raise own_output_layer(tensor.numel())
        yield name, tensor


# ---- LoRA adapters by name -------------------------------------------------------------------------------------------

# An adapter is a set of tensors. Workers in another process read them where the trainer has them, exported once, while
# their addresses last (`Exported`), or from copies (`Staging`) where that cannot be. A later version then costs a call
# that says no more than that there is one, and the worker's copies.

_FIRST = 1 << 20
"""Adapters are numbered from here, out of the way of those that a user loads by hand."""

_PREFIX = "base_model.model."
"""PEFT's prefix of module names, which vLLM takes off."""

_MOST_NAMES = 64


class AdapterRegistry:
    """The adapters that the workers of one link hold. They know them by number only.

    Ownership: `link` is the engine's; memory that workers map is kept until the adapter is removed, or until `close`.
    """

    def __init__(self, link: WorkerLink) -> None:
        self.numbers: dict[str, int] = {}
        self.why_staged: str | None = None
        """The reason why the adapter sent last was copied on its way; `None` if workers have read it in place."""

        self._link = link
        self._last = _FIRST
        self._sent: dict[int, _Sent] = {}
        self._cached: set[str] = set()
        """Names that vLLM's prefix cache may know."""

    @property
    def refusal(self) -> str | None:
        """The reason why the adapter loaded last is loaded anew for each version; `None` if it is written in place."""
        refusals: list[str | None] = self._link.call(wire.AdapterRefusal())
        return next(filter(None, refusals), None)

    def load(self, name: str, adapter: AdapterWeights) -> bool:
        """Send a new adapter; see `Engine.load_adapter` and `_put`. `Unsupported` also when the engine is full."""
        if name in self.numbers:
            raise ValueError(f"adapter {name} is loaded already: remove it first, or give each version its own name")
        # vLLM's own error about a full cache comes with the request, too late
        capacity = self._link.infos[0].max_adapters
        if capacity and len(self.numbers) >= capacity:
            raise Unsupported(
                f"the engine holds {len(self.numbers)} adapters and takes no more: remove one, or start it with a "
                "larger max_loras"
            )
        # never used again: vLLM's prefix cache may know an adapter by its number
        self._last += 1
        return self._put(self._link.reserve_adapter(self._last, list(_tensors(adapter).items())), name, adapter)

    def replace(self, old: str, new: str, adapter: AdapterWeights) -> bool:
        """Send `adapter` in the place of `old`, whose number it takes over; see `Engine.replace_adapter` and `_put`."""
        number = self._number(old)
        if new != old and new in self.numbers:
            raise ValueError(f"adapter {new} is loaded already: give each version its own name")
        del self.numbers[old]
        return self._put(number, new, adapter)

    def remove(self, name: str) -> None:
        """Forget an adapter. `ValueError` when there is none of that name."""
        number = self._number(name)
        self._remove(number)
        del self.numbers[name]

    def forget_names(self) -> None:
        """Note that vLLM's prefix cache, which goes by the names of adapters, is empty: others come back to it."""
        self._cached = set(self.numbers)

    def close(self) -> None:
        """Let go of the memory. Ordering: the workers have let go of it, or have ended. Idempotent."""
        for sent in self._sent.values():
            sent.close()
        self._sent.clear()

    def named(self, name: str) -> NamedAdapter:
        """One of them, for a request. `ValueError` when there is none of that name."""
        return name, self._number(name)

    def keep(self, named: NamedAdapter) -> None:
        """Let the workers give vLLM an adapter again that somebody else's request has had it evict."""
        if self._link.llm is not None:  # a server's are guarded by the numbers that are reserved there
            self._link.call(wire.KeepAdapter(number=named[1]))

    def _put(self, number: int, name: str, adapter: AdapterWeights) -> bool:
        """Send an adapter. Returns whether vLLM's prefix cache may hold an earlier one of its name."""
        try:
            self._send(number, adapter)
        except Exception:
            with suppress(EngineLost):
                self._remove(number)
            raise
        self.numbers[name] = number
        # past so many names the cache is reset once, instead of remembering all of them
        known = name in self._cached or self._link.goes_by_number or len(self._cached) >= _MOST_NAMES
        self._cached.add(name)
        return known

    def _number(self, name: str) -> int:
        if name not in self.numbers:
            raise ValueError(f"there is no adapter {name}; loaded are {sorted(self.numbers) or 'none'}")
        return self.numbers[name]

    def _remove(self, number: int) -> None:
        self._link.call(wire.RemoveAdapter(number=number))
        if (sent := self._sent.pop(number, None)) is not None:
            sent.close()
        self._link.release_adapter(number)

    @torch.inference_mode(False)
    def _send(self, number: int, adapter: AdapterWeights) -> None:
        """Let workers take an adapter, once all is there that the trainer has queued."""
        tensors = _tensors(adapter)
        scalings = {_PREFIX + module: float(scaling) for module, scaling in adapter.scalings.items()}
        if self._link.same_process:
            asked = wire.SetAdapter(number=number, tensors=tensors, scalings=scalings, in_process=True)
            self._link.call(asked)
            return
        sent = self._sent.setdefault(number, _Sent())
        described, self.why_staged = sent.put(adapter, tensors, self._link)
        is_known = sent.known is not None and sent.known[0] is described and sent.known[1] == scalings
        sent.known = None  # until they answer, they may have either
        # queued kernels of the trainer write the tensors that workers are about to read
        wait_for_queued(self._link.device)
        if is_known:
            self._link.call(wire.SetAdapter(number=number, tensors=None))
        else:
            self._link.call(wire.SetAdapter(number=number, tensors=described, scalings=scalings))
        sent.confirm(described, scalings)
        if self.why_staged is None:
            count_read(sum(tensor.nbytes for tensor in tensors.values()))


@dataclass
class _Sent:
    """Memory from which workers read one adapter, and the part that they have mapped."""

    memory: list[Exported | Staging] = field(default_factory=list)
    """The last one, and those before that workers may not have let go of yet."""

    known: tuple[Wire, Mapping[str, float]] | None = None
    """Tensors and scalings that the workers have answered to hold; `None` while that is unknown."""

    def put(
        self, adapter: AdapterWeights, tensors: Mapping[str, torch.Tensor], link: WorkerLink
    ) -> tuple[Wire, str | None]:
        """Description of the tensors (the same object while nothing has moved), and the reason if they are copies."""
        last = self.memory[-1] if self.memory else None
        why_staged = link.ipc_refusal
        if why_staged is None and isinstance(last, Exported) and last.is_current(tensors):
            return last.wire, None
        if why_staged is None:
            try:
                _check_exportable(adapter, tensors, link.device)
                # an export on a CPU moves tensors into a memory file, which is no write of the trainer's
                with uncounted():  # on a CPU the trainer's tensors move
                    exported = Exported(tensors)
                self.memory.append(exported)
                return exported.wire, None
            except Unsupported as error:
                why_staged = str(error)
        if not isinstance(last, Staging):
            last = Staging(link.device if link.ipc_refusal is None else torch.device("cpu"))
            self.memory.append(last)
        return last.put(tensors), why_staged

    def confirm(self, described: Wire, scalings: Mapping[str, float]) -> None:
        """Note that the workers have mapped `described`, have these scalings, and nothing of before."""
        self.known = (described, scalings)
        # only now: until they have answered, workers may still read the memory of before
        while len(self.memory) > 1:
            self.memory.pop(0).close()

    def close(self) -> None:
        """Let go of the memory."""
        self.known = None
        while self.memory:
            self.memory.pop().close()


def _check_exportable(adapter: AdapterWeights, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raise `Unsupported`, with the reason, unless an adapter's tensors may be exported to workers on `device`."""
    if not adapter.shared:
        raise Unsupported("its tensors are not said to be the trainer's own, which last (AdapterWeights.shared)")
    elsewhere = [name for name, tensor in tensors.items() if tensor.device != device]
    if elsewhere:
        raise Unsupported(f"{elsewhere[0]} is not on {device}")


def _tensors(adapter: AdapterWeights) -> dict[str, Any]:
    """Every A, then every B, by the names that PEFT gives them."""
    return {f"{_PREFIX}{name}.weight": tensor for name, tensor in adapter.named_tensors()}
