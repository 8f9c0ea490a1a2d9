"""The transport to an engine in another process of this machine, where trainer and engine each own their weights.

Direct: the trainer's parameters are exported once, while their addresses last, and the engine's workers copy out of
them. Staged, for parameters that cannot be exported, are not where the engine is, or are sharded over ranks and
gathered on the way: buckets travel through two slabs, one being filled while the other is read. The slabs are on the
GPU, or in host memory where workers cannot map a GPU's. What the engine cannot take by recorded copies goes through its
own loader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch

from colo.errors import EngineLost, TransferError, Unsupported
from colo.memory import cuda_driver
from colo.memory.checksum import Checksums, values
from colo.memory.dtensor import is_dtensor
from colo.memory.fence import wait_for_queued
from colo.memory.shared_memory import SharedMemory
from colo.memory.tiles import WORD_BYTES, in_words
from colo.units import MIB, align_up
from colo.weights.manifest import Manifest, TensorSpec
from colo.weights.sources.base import WeightSource
from colo.weights.sources.module import check_taken
from colo.weights.transports.base import CopyingTransport
from colo.weights.transports.ipc.bucket import Bucket, plan_buckets
from colo.weights.transports.ipc.export import Exported, dtype_name, spec_of
from colo.weights.transports.ipc.handoff import SenderHandoff

BUCKET_BYTES = 256 * MIB


@runtime_checkable
class Peer(Protocol):
    """An engine whose workers, none of them in this process, this transport can ask."""

    @property
    def device(self) -> torch.device:
        """The device that it shares with a trainer."""

    @property
    def model_type(self) -> str | None:
        """`model_type` of the model's configuration."""

    @property
    def pids(self) -> Sequence[int]:
        """Process of every worker, as this process or their own namespace numbers it."""

    @property
    def ipc_refusal(self) -> str | None:
        """The reason why a worker cannot map memory of this process on its GPU; `None` where all can, or need not."""

    def receive(self, operation: str, **arguments: Any) -> list[Any]:
        """Run an operation of `Receiver` in every worker; see `colo.weights.transports.ipc.receiver`."""

    def receive_all(self, operations: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
        """Run several in a row, and return every worker's answer to the last."""


class IpcTransport(CopyingTransport):
    """Copies every weight to an engine in another process, and has its workers attest what they hold.

    Ownership: owns the staging slabs, and keeps what it has exported alive, until `close`.
    """

    name = "ipc"
    replaces_all = True

    def __init__(
        self,
        source: WeightSource,
        peer: Peer,
        *,
        why_not_shared: str,
        staged: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        verify: bool = True,
    ) -> None:
        """Describe the weights to the workers; `staged` is for parameters that must not be mapped.

        Raises: `Unsupported` with the reason when the engine cannot take them by recorded copies.
        """
        self.source = source
        self._peer = peer
        self._verify = verify
        self._bucket_bytes = bucket_bytes
        self._staged = staged or peer.ipc_refusal is not None
        self._exported: Exported | None = None
        self._staging: _Staging | None = None
        self._sums: list[int] | None = None
        self._layout: list[tuple[str, torch.dtype, torch.Size]] = []
        self._manifest: Manifest | None = None
        self._described: Manifest | None = None
        """What the workers were told of."""

        self._why_staged = "staged through two buckets, as was asked for"
        if peer.ipc_refusal is not None:
            self._why_staged = f"staged through two buckets in host memory, since a worker says: {peer.ipc_refusal}"
        source.given_to(self._bind)
        how = "copied by the engine out of the trainer's memory" if self._staging is None else self._why_staged
        self.reason = f"{why_not_shared}; {how}"

    @property
    def working_bytes(self) -> int:
        """Memory for gathering one tensor at a time, twice that of the largest at most."""
        sizes = [spec.size_bytes for spec in self.source.specs()] if self.source.is_sharded else []
        return 2 * max(sizes, default=0)

    def transfer(self, version: int = 0) -> int:
        """Copy everything and return its bytes. What workers find wrong is raised here, as `TransferError`."""
        tensors = self.source.tensors()
        manifest = self._manifest_of(tensors)
        checksums = None
        begin: tuple[str, dict[str, Any]] = ("begin", {"version": version, "digest": manifest.digest})
        with self.source.gathered(tensors) as whole:
            if self._exported is not None:
                if not self._exported.is_current(tensors):
                    self._bind(tensors)
            elif self._staging is None or self._described is not manifest:
                self._bind(tensors)  # the last attempt failed, or they are of other shapes or dtypes now
            if self._staging is not None:
                self._sums = None
                self._peer.receive(begin[0], **begin[1])
                checksums = self._staging.send(whole, self._peer, verify=self._verify)
                answers = self._peer.receive("finish", checksums=checksums)
            else:
                wait_for_queued(self._peer.device)
                copy = ("copy", {"verify": self._verify})
                answers = self._peer.receive_all([begin, copy, ("finish", {"checksums": None})])
            for attested in answers:
                if (attested["version"], attested["num_tensors"]) != (version, len(manifest.specs)):
                    raise TransferError(
                        f"a worker attests {attested['num_tensors']} tensors of version {attested['version']}, of "
                        f"{len(manifest.specs)} of version {version}"
                    )
        self._sums = checksums
        return manifest.total_bytes

    def verify(self) -> None:
        """Do nothing: `transfer` returns when every worker has attested what it holds."""

    def is_current(self) -> bool:
        """Whether the engine holds the trainer's weights as they are now; reads all of them."""
        tensors = self.source.tensors()
        if self._staging is not None or self.source.is_sharded:  # where ranks ask together, whatever they have
            staging = self._staging
            is_missing = self.source.ranks.any(staging is None, "comparing weights")
            if staging is None or is_missing:
                return False
            # Without checksums there is nothing to compare with; after a transfer that failed there are none yet.
            if not self._verify:
                return True
            manifest = self._manifest_of(tensors)
            known = self._sums is not None and self._described is manifest
            with self.source.gathered(tensors) as whole:
                differs = not known or self._sums != staging.checksums(whole)
            return not self.source.ranks.any(differs, "comparing weights")
        if self._exported is None or not self._exported.is_current(tensors):
            return False
        wait_for_queued(self._peer.device)
        return not any(self._peer.receive("differences"))

    def reconnect(self) -> None:
        """Describe everything anew to an engine that has been started again."""
        self._drop()
        self._bind(self.source.tensors())

    def close(self) -> None:
        """Have the workers unmap everything, then let go of it. Idempotent."""
        if self._exported is not None or self._staging is not None:
            with suppress(EngineLost, TransferError):  # whose mappings have ended, or are another client's by now
                self._peer.receive("release")
            self._drop()

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._exported is not None or self._staging is not None:
            self.close()
        exported = None if self._staged else self._export(tensors)
        places = [place.to_wire() for place in exported.places] if exported is not None else []
        memory = exported.memory if exported is not None else []
        parameters = [
            spec_of(name, tensor, None if exported is not None else _without_gaps(tensor)).to_wire()
            for name, tensor in tensors.items()
        ]
        answers = self._peer.receive(
            "bind", parameters=parameters, model_type=self._peer.model_type, places=places, memory=memory
        )
        fallbacks = {name: why for answer in answers for name, why in answer["fallbacks"].items()}
        if fallbacks:
            name, why = next(iter(fallbacks.items()))
            raise Unsupported(f"{name}: {why}")
        check_taken(tensors, [answer["left_out"] for answer in answers])
        self._exported, self._described = exported, self._manifest_of(tensors)
        if exported is None:
            try:
                self._staging = _Staging(tensors, self._peer, self._bucket_bytes)
            except BaseException:
                with suppress(EngineLost):
                    self._peer.receive("release")
                raise

    def _manifest_of(self, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """The manifest of the tensors; the last one again while they are like those: its digest takes time."""
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if self._manifest is None or layout != self._layout:
            self._layout, self._manifest = layout, _manifest(tensors)
        return self._manifest

    def _export(self, tensors: Mapping[str, torch.Tensor]) -> Exported | None:
        """The tensors exported, or `None` with the reason kept."""
        elsewhere = [name for name, tensor in tensors.items() if tensor.device != self._peer.device]
        if elsewhere:
            self._why_staged = f"staged through two buckets, since {elsewhere[0]} is not on {self._peer.device}"
            return None
        sharded = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
        if sharded:
            self._why_staged = f"staged through two buckets, since {sharded[0]} is sharded over ranks"
            return None
        try:
            return Exported(tensors)
        except Unsupported as error:
            self._why_staged = f"staged through two buckets: {error}"
            return None

    def _drop(self) -> None:
        if self._exported is not None:
            self._exported.close()
        if self._staging is not None:
            self._staging.close()
        self._exported = self._staging = None


class _Staging:
    """Two slabs that buckets pass through, and the events and counts that say who may use which."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], peer: Peer, bucket_bytes: int) -> None:
        specs = _manifest(tensors).specs
        self._buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)
        size_bytes = max((bucket.size_bytes for bucket in self._buckets), default=0)
        self._device = peer.device
        self._in_host_memory = peer.ipc_refusal is not None
        place = torch.device("cpu") if self._in_host_memory else peer.device
        self._slabs = [SharedMemory(align_up(max(size_bytes, 1), WORD_BYTES), place) for _ in range(2)]
        self._filled = [slab.bytes for slab in self._slabs]
        """Where buckets are put together and summed: the slabs or, where those are the host's, memory of the device."""

        self._locks: list[Any] = []
        if self._in_host_memory:
            self._filled = [torch.empty_like(self._slabs[0].bytes, device=peer.device)] * 2
            self._locks = [cuda_driver.page_lock(slab, slab.bytes, peer.device) for slab in self._slabs]
        self._turns = SenderHandoff(len(peer.pids))
        self._checksums: dict[int, Checksums] = {}
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if place.type == "cuda":
            with torch.cuda.device(place):
                self._events = [(_event(), _event()) for _ in self._slabs]
        peer.receive(
            "stage",
            slabs=[slab.describe(to_pid=0) for slab in self._slabs],
            events=[[event.ipc_handle().hex() for event in pair] for pair in self._events],
            buckets=[[[p.name, p.start_bytes, p.size_bytes, p.offset_bytes] for p in b.pieces] for b in self._buckets],
            turns=self._turns.describe(),
            readers=self._turns.readers,
            copied=self._in_host_memory,
        )

    @torch.no_grad()
    def send(self, tensors: Mapping[str, torch.Tensor], peer: Peer, *, verify: bool) -> list[int] | None:
        """Fill every bucket in turn while the workers take them; the checksums of all pieces, if asked for."""
        sums: list[torch.Tensor] = []
        self._turns.begin()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="colo-ipc") as pool:
            taking = pool.submit(peer.receive, "take_all", verify=verify)
            try:
                for index, bucket in enumerate(self._buckets):
                    if not self._wait_until_read(index, taking):
                        self._turns.stop()
                        break  # and `result` says why
                    self._fill(bucket, index, tensors)
                    if verify:
                        sums.append(self._sums(bucket, index))
                    self._hand_over(index)
                    if self._events:
                        self._events[index % len(self._slabs)][0].record(torch.cuda.current_stream(self._device))
                    self._turns.fill(index + 1)
            except BaseException:
                self._turns.stop()
                raise
            taking.result()
        return values(sums) if verify else None

    @torch.no_grad()
    def checksums(self, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        """The checksums that `send` would find for `tensors`, without sending."""
        sums = []
        for index, bucket in enumerate(self._buckets):
            self._fill(bucket, index, tensors)
            sums.append(self._sums(bucket, index))
        return values(sums)

    def close(self) -> None:
        """Let go of the slabs."""
        for unlock in self._locks:
            if unlock is not None:
                unlock()
        for slab in self._slabs:
            slab.close()
        self._turns.close()
        self._events, self._checksums, self._filled = [], {}, []

    def _wait_until_read(self, index: int, taking: Future[Any]) -> bool:
        """Let what is queued from here on write to the slab of bucket `index`; false when the workers have ended."""
        before = index - len(self._slabs) + 1
        if before > 0:
            if not self._turns.wait_read(before, taking.done):
                return False
            if self._events:
                # The workers have recorded it by now; on a CPU they have read.
                torch.cuda.current_stream(self._device).wait_event(self._events[index % len(self._slabs)][1])
        return True

    def _hand_over(self, index: int) -> None:
        """Bring what was filled to the slab that readers map, if that is elsewhere; they have no event to wait for."""
        if self._in_host_memory:
            turn = index % len(self._slabs)
            size_bytes = align_up(self._buckets[index].size_bytes, WORD_BYTES)
            self._slabs[turn].bytes[:size_bytes].copy_(self._filled[turn][:size_bytes], non_blocking=True)
            wait_for_queued(self._device)

    def _fill(self, bucket: Bucket, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        slab = self._filled[index % len(self._slabs)]
        for piece in bucket.pieces:
            flat = _flat(tensors[piece.name])
            target = slab[piece.offset_bytes : piece.offset_bytes + piece.size_bytes]
            target.copy_(flat[piece.start_bytes : piece.stop_bytes], non_blocking=True)
            if piece.size_bytes % WORD_BYTES:  # what an earlier bucket has left would be part of the checksum
                slab[piece.offset_bytes + piece.size_bytes :][: -piece.size_bytes % WORD_BYTES].zero_()

    def _sums(self, bucket: Bucket, index: int) -> torch.Tensor:
        if index not in self._checksums:
            memory = in_words(self._filled[index % len(self._slabs)])
            assert memory is not None
            parts = [
                (number, 0, memory[piece.offset_bytes // WORD_BYTES :][: -(-piece.size_bytes // WORD_BYTES)])
                for number, piece in enumerate(bucket.pieces)
            ]
            self._checksums[index] = Checksums(parts, len(parts), memory.device)
        return self._checksums[index].compute()


def _manifest(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    return Manifest(specs=tuple(TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _without_gaps(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that `_flat` leaves."""
    return torch.empty(tensor.shape, device="meta").stride()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(interprocess=True)
