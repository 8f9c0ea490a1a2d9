"""Weights from another process of this machine, in a vLLM worker: recorded copies out of memory that the sender owns.

    bind                                    what is sent, its order, and how the model takes it
    begin -> copy                -> finish  direct: the sender's tensors are mapped, and copied as a CUDA graph
    begin -> take_all            -> finish  staged: buckets arrive in turn in two slabs; one is filled while the other
                                            is read, under interprocess events and counts in shared host memory

`finish` attests: every tensor of the manifest came once, and what is in the engine is what was sent. Until it has
returned, the model's weights are neither the old nor the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colo.errors import TransferError, Unsupported
from colo.memory.checksum import WORD_BYTES, folded, partial_sums
from colo.memory.slab import Description, open_slab
from colo.units import align_up
from colo.weights.copies import copy_all, differ
from colo.weights.load_plan import Copy, LoadPlan
from colo.weights.manifest import Manifest, TensorSpec
from colo.weights.pieces import meets
from colo.weights.transports.export import Place, opened
from colo.weights.transports.turns import ReadersTurns

Record = Callable[[dict[str, torch.Tensor], str | None], LoadPlan]
"""How a worker's model loads parameters of a model type."""

_Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources."""


class Receiver:
    """The receiving end in one worker."""

    def __init__(self, device: torch.device, record: Record, *, number: int = 0) -> None:
        """`number` tells the workers of one engine apart."""
        self._device = device
        self._record = record
        self._number = number
        self._plan: LoadPlan | None = None
        self._manifest: Manifest | None = None
        self._sources: dict[str, torch.Tensor] = {}
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, torch.Tensor | None]] = {}
        self._replays = 0
        self._slabs: list[torch.Tensor] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._buckets: list[_Bucket] = []
        self._turns: ReadersTurns | None = None
        self._read_back: torch.Tensor | None = None
        self._update: _Update | None = None

    def bind(
        self, parameters: list[list[Any]], model_type: str | None, places: list[Place], memory: list[Description]
    ) -> dict[str, str]:
        """Learn what will be sent: [name, dtype, shape, strides] of each parameter; return why some cannot be copied.

        With `places` and `memory` (see `Exported`) the sender's tensors are mapped.
        Raises: `TransferError` when memory cannot be mapped, or parameters do not cover the model exactly once.
        """
        self.release()
        specs = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape, _ in parameters)
        empty = {
            name: torch.empty_strided(tuple(shape), tuple(stride), dtype=getattr(torch, dtype), device="meta")
            for name, dtype, shape, stride in parameters
        }
        self._plan = self._record(empty, model_type)
        self._manifest = Manifest(specs=specs, version=0)
        if not self._plan.fallbacks and places:
            self._sources = opened(places, memory, self._device)
        return dict(self._plan.fallbacks)

    def stage(
        self,
        slabs: list[Description],
        events: list[list[str]],
        buckets: list[list[list[Any]]],
        turns: Description | None = None,
        readers: int = 1,
    ) -> None:
        """Learn where buckets arrive: two slabs in turn, with the events [filled, read] of each (CUDA), and of every
        bucket the pieces [name, start, size, offset], in bytes. `turns` is for `take_all`: the counts of the sender,
        and of `readers` workers.

        Raises: `Unsupported` for a tensor that cannot be put together from pieces.
        """
        plan = self._bound()
        self._slabs = [open_slab(slab, self._device) for slab in slabs]
        self._events = [(self._event(filled), self._event(read)) for filled, read in events]
        by_name: dict[str, list[Copy]] = {}
        for copy in plan.copies:
            by_name.setdefault(copy.name, []).append(copy)
        dtypes = {name: dtype for name, (dtype, _) in plan.sources.items()}
        self._buckets = [
            _Bucket.of(pieces, self._slabs[index % len(self._slabs)], by_name, dtypes)
            for index, pieces in enumerate(buckets)
        ]
        self._turns = ReadersTurns(turns, readers=readers, number=self._number) if turns is not None else None

    def begin(self, version: int, digest: str) -> None:
        """Start taking in a version. Raises: `TransferError` when it consists of other tensors than were described."""
        self._bound()
        assert self._manifest is not None
        if digest != self._manifest.digest:
            raise TransferError(
                f"version {version} consists of other tensors (digest {digest[:12]}) than were described "
                f"({self._manifest.digest[:12]}): describe them again"
            )
        self._update = _Update(version)

    @torch.no_grad()
    def copy(self, *, verify: bool) -> None:
        """Copy everything from where it is mapped."""
        plan, update = self._bound(), self._updating()
        if not self._sources:
            raise TransferError("no memory of the sender is mapped: describe it first")
        flags = self._replay(plan, verify=verify)
        update.mapped += list(plan.sources)
        if flags is not None:
            update.different += plan.named(flags)

    @torch.no_grad()
    def take(self, index: int, *, verify: bool) -> None:
        """Copy bucket number `index` from its slab. Queued: on CUDA the event `read` says when the slab is free."""
        update, bucket = self._updating(), self._buckets[index]
        turn = index % len(self._slabs)
        stream = torch.cuda.current_stream(self._device) if self._events else None
        if stream is not None:
            stream.wait_event(self._events[turn][0])
        targets, sources = bucket.pairs
        copy_all(targets, sources)
        if verify:
            slab = self._slabs[turn]
            update.sums.append(partial_sums(slab[: bucket.size_bytes]))
            if self._read_back is None:
                self._read_back = torch.empty_like(slab)
            update.flags += bucket.differences(slab, self._read_back)
        if stream is not None:
            self._events[turn][1].record(stream)
        update.taken.append(index)

    def take_all(self, *, verify: bool) -> None:
        """Take every bucket once, each as soon as the sender has filled it.

        Raises: `TransferError` when the sender stops, ends, or says nothing for a minute.
        """
        if self._turns is None:
            raise TransferError("nothing was said about turns: stage again")
        try:
            for index in range(len(self._buckets)):
                if not self._turns.wait_filled(index + 1):
                    return  # another worker has failed, and says why
                self.take(index, verify=verify)
                self._turns.read(index + 1)
        except BaseException:
            self._turns.fail()
            raise

    def finish(self, checksums: list[int] | None) -> dict[str, Any]:
        """Attest: version, number of tensors and bytes; with the sender's `checksums` of every bucket compared.

        Raises: `TransferError` naming what is missing, came twice, or is not what was sent.
        """
        update, manifest = self._updating(), self._manifest
        assert manifest is not None
        self._update = None
        arrived = [*update.mapped, *self._arrived(update.taken)]
        if arrived != list(manifest.names):
            Manifest(specs=manifest.specs, version=update.version).check_received(arrived)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if checksums is not None:
            own = [folded(sums) for sums in update.sums]
            wrong = [index for index, (a, b) in enumerate(zip(own, checksums, strict=True)) if a != b]
            if wrong:
                raise TransferError(
                    f"the checksums of {len(wrong)} of {len(own)} buckets differ from the sender's, that with "
                    f"{self._buckets[update.taken[wrong[0]]].pieces[0][0]} for one: the bytes changed on their way"
                )
        different = update.different + _named(update.flags)
        if different:
            raise TransferError(
                f"{len(different)} tensors in the engine differ from what was sent, {different[0]} for one"
            )
        return {"version": update.version, "num_tensors": len(manifest.specs), "num_bytes": manifest.total_bytes}

    @torch.no_grad()
    def differences(self) -> list[str]:
        """Names of mapped tensors that the engine does not hold as they are now."""
        return self._bound().differences(self._sources) if self._sources else []

    def release(self) -> None:
        """Unmap the sender's memory. The sender frees it after this."""
        self._graphs = {}
        self._sources, self._slabs, self._events, self._buckets = {}, [], [], []
        self._plan = self._update = self._turns = self._read_back = None
        self._replays = 0

    def _replay(self, plan: LoadPlan, *, verify: bool) -> torch.Tensor | None:
        """Copy, and compare: flags for `LoadPlan.named`. The first time as it is, from then on as a CUDA graph."""

        def run() -> torch.Tensor | None:
            plan.replay(self._sources)
            return plan.flags(self._sources) if verify else None

        self._replays += 1
        if self._device.type != "cuda" or self._replays == 1:
            return run()
        if verify not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                flags = run()
            self._graphs[verify] = graph, flags
        graph, flags = self._graphs[verify]
        graph.replay()
        return flags

    def _arrived(self, taken: Sequence[int]) -> list[str]:
        """Tensors of which every bucket has been taken, as often as the one that was taken most."""
        counts: dict[str, list[int]] = {}
        for index, bucket in enumerate(self._buckets if taken else ()):
            for name, *_ in bucket.pieces:
                counts.setdefault(name, []).append(taken.count(index))
        return [name for name, times in counts.items() if min(times) for _ in range(max(times))]

    def _event(self, handle: str) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(self._device, bytes.fromhex(handle))
        return event

    def _bound(self) -> LoadPlan:
        if self._plan is None:
            raise TransferError("nothing was described yet: call bind first")
        if self._plan.fallbacks:
            name, reason = next(iter(self._plan.fallbacks.items()))
            raise Unsupported(f"{name} cannot be copied: {reason}")
        return self._plan

    def _updating(self) -> _Update:
        if self._update is None:
            raise TransferError("no update has begun")
        return self._update


class _Update:
    """What has arrived of one version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.mapped: list[str] = []
        self.taken: list[int] = []
        self.different: list[str] = []
        self.sums: list[torch.Tensor] = []
        self.flags: list[tuple[str, torch.Tensor]] = []


class _Bucket:
    """Where the pieces of one bucket go."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.names: list[str] = []
        """Of the tensor of every pair."""

        self.pairs: _Pairs = ([], [])
        self.pieces: list[tuple[str, int, int]] = []
        """Tensor, and where its words of eight bytes begin and end."""

        self._back: _Pairs | None = None
        self._apart: list[int] = []

    @classmethod
    def of(
        cls,
        pieces: Sequence[Sequence[Any]],
        slab: torch.Tensor,
        copies: Mapping[str, Sequence[Copy]],
        dtypes: Mapping[str, torch.dtype],
    ) -> _Bucket:
        bucket = cls()
        for name, start_bytes, size_bytes, offset_bytes in pieces:
            dtype, stop_bytes = dtypes[name], offset_bytes + size_bytes
            memory = slab[offset_bytes:stop_bytes].view(dtype)
            for copy in copies.get(name, ()):
                for target, source in meets(copy, start_bytes // dtype.itemsize, memory) if size_bytes else ():
                    bucket.names.append(name)
                    bucket.pairs[0].append(target)
                    bucket.pairs[1].append(source)
            bucket.pieces.append((name, offset_bytes // WORD_BYTES, -(-stop_bytes // WORD_BYTES)))
            bucket.size_bytes = max(bucket.size_bytes, align_up(stop_bytes, WORD_BYTES))
        return bucket

    def differences(self, slab: torch.Tensor, read_back: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Tensors, and whether the engine holds other bytes of them than `slab` (bool, queued, not waited for).

        What went to the engine is read back, to where it lay in the slab, into memory as large: comparing two of those
        takes a few launches, and a bucket may consist of thousands of copies.
        """
        size = self.size_bytes
        if size == 0:
            return []
        if self._back is None:
            # What goes to two places, or is converted on its way, is compared by itself.
            places: dict[tuple[Any, ...], int] = {}
            for index, (target, source) in enumerate(zip(*self.pairs, strict=True)):
                if target.dtype == source.dtype:
                    places.setdefault((source.storage_offset() * source.itemsize, source.shape), index)
            once = set(places.values())
            alike = [pair for index, pair in enumerate(zip(*self.pairs, strict=True)) if index in once]
            self._apart = [i for i in range(len(self.names)) if i not in once]
            first = int(slab.storage_offset())
            mirrored = [
                read_back.view(s.dtype).as_strided(s.shape, s.stride(), s.storage_offset() - first // s.itemsize)
                for _, s in alike
            ]
            self._back = mirrored, [target for target, _ in alike]
        read_back[:size].copy_(slab[:size])  # for what this worker takes no part of
        copy_all(*self._back)
        changed = read_back[:size].view(torch.int64) != slab[:size].view(torch.int64)
        flags = [(name, changed[start:stop].any()) for name, start, stop in self.pieces if start < stop]
        targets, sources = self.pairs
        return flags + [(self.names[i], differ(sources[i], targets[i])) for i in self._apart]


def _named(flags: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Names whose flag is set, each once. Waits for the flags."""
    if not flags:
        return []
    values = torch.stack([flag for _, flag in flags]).tolist()
    return list(dict.fromkeys(name for (name, _), value in zip(flags, values, strict=True) if value))
