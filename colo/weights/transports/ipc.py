"""The transport to an engine in another process of this machine, where trainer and engine each own their weights.

Direct: the trainer's parameters are exported once, while their addresses last, and the engine's workers copy out of
them. Staged, for parameters that cannot be exported, are not where the engine is, or are sharded over ranks and
gathered on the way: the same copies out of a buffer in two halves (`colo.weights.transports.buffer`). Weights that
the engine cannot take by recorded copies go through its own loader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch

from colo.errors import EngineLost, TransferError, Unsupported
from colo.memory.copy_plan import wait_for_queued
from colo.memory.load_plan import contiguous_strides
from colo.memory.share import Exported, dtype_name, spec_of
from colo.memory.specs import Manifest, TensorSpec
from colo.memory.storage import is_dtensor
from colo.units import MIB
from colo.weights.sources.base import WeightSource
from colo.weights.sources.module import check_taken
from colo.weights.transports.base import CopyingTransport
from colo.weights.transports.buffer import SenderBuffer

BUCKET_BYTES = 256 * MIB  # half of a shared buffer


@runtime_checkable
class Peer(Protocol):
    """An engine whose workers, none of them in this process, this transport can ask."""

    @property
    def device(self) -> torch.device:
        """Device that engine and trainer share."""

    @property
    def pids(self) -> Sequence[int]:
        """Process of every worker, as this process or their own namespace numbers it."""

    @property
    def same_process(self) -> bool:
        """True when the workers run in this process. Process ids do not tell: two namespaces may use the same ones."""

    @property
    def ipc_refusal(self) -> str | None:
        """The reason why a worker cannot map memory of this process on its GPU; `None` where all can, or need not."""

    def receive(self, operation: str, **arguments: Any) -> list[Any]:
        """Run an operation of `Receiver` in every worker; see `colo.weights.transports.receiver`."""

    def receive_all(self, operations: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
        """Run several in a row, and return every worker's answer to the last."""


_STAGED = "staged through a buffer in two halves"


class IpcTransport(CopyingTransport):
    """Copies every weight to an engine in another process, and has its workers attest what they hold.

    Ownership: owns the buffer, and keeps what it has exported alive, until `close`.
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
        self._buffer: SenderBuffer | None = None
        self._sums: list[list[int]] | None = None
        self._layout: list[tuple[str, torch.dtype, torch.Size]] = []
        self._manifest: Manifest | None = None
        self._described: Manifest | None = None  # manifest of the tensors that the workers know
        self._why_staged = f"{_STAGED}, as was asked for"
        if peer.ipc_refusal is not None:
            self._why_staged = f"{_STAGED} in host memory, since a worker says: {peer.ipc_refusal}"
        source.given_to(self._bind)
        how = "copied by the engine out of the trainer's memory" if self._buffer is None else self._why_staged
        self.reason = f"{why_not_shared}; {how}"

    @property
    def working_bytes(self) -> int:
        """Memory for gathering one tensor at a time: at most twice the largest."""
        sizes = [spec.size_bytes for spec in self.source.specs()] if self.source.is_sharded else []
        return 2 * max(sizes, default=0)

    def transfer(self, version: int = 0) -> int:
        """Copy everything and return its bytes. Raises: `TransferError` with whatever the workers find wrong."""
        tensors = self.source.tensors()
        manifest = self._manifest_of(tensors)
        checksums = None
        begin: tuple[str, dict[str, Any]] = ("begin", {"version": version, "digest": manifest.digest})
        with self.source.gathered(tensors) as whole:
            if self._exported is not None:
                if not self._exported.is_current(tensors):
                    self._bind(tensors)
            elif self._buffer is None or self._described is not manifest:
                self._bind(tensors)  # the last attempt failed, or they are of other shapes or dtypes now
            if self._buffer is not None:
                # known again only when every worker has attested this version
                self._sums = None
                self._peer.receive(begin[0], **begin[1])
                checksums = self._send(self._buffer, whole)
                answers = self._peer.receive("finish", checksums=checksums)
            else:
                # streams order nothing across processes: what the optimizer has queued must have been written
                wait_for_queued(self._peer.device)
                # one request for all three steps: each call into vLLM's process takes about a millisecond
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
        """True if the engine holds the trainer's weights as they are now; reads all of them."""
        tensors = self.source.tensors()
        if self._buffer is not None or self.source.is_sharded:  # where ranks ask together, whatever they have
            buffer = self._buffer
            is_missing = self.source.ranks.any(buffer is None, "comparing weights")
            if buffer is None or is_missing:
                return False
            # Without checksums there is nothing to compare with; after a transfer that failed there are none yet.
            if not self._verify:
                return True
            manifest = self._manifest_of(tensors)
            known = self._sums is not None and self._described is manifest
            with self.source.gathered(tensors) as whole:
                differs = not known or self._sums != buffer.checksums(whole)
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
        """Let the workers unmap everything, then let go of it. Idempotent."""
        if self._exported is not None or self._buffer is not None:
            with suppress(EngineLost, TransferError):  # whose mappings have ended, or are another client's by now
                self._peer.receive("release")
            self._drop()

    def _send(self, buffer: SenderBuffer, whole: Mapping[str, torch.Tensor]) -> list[list[int]] | None:
        """Send through the buffer while the workers copy; the checksums of all pieces, if they are verified."""
        # the call returns when the workers have taken everything, and this thread fills the halves meanwhile
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="colo-ipc") as pool:
            return buffer.send(
                whole, lambda: pool.submit(self._peer.receive, "copy", verify=self._verify), verify=self._verify
            )

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # the workers unmap the old memory before it is freed here
        if self._exported is not None or self._buffer is not None:
            self.close()
        exported = None if self._staged else self._export(tensors)
        specs = [
            # pieces in a buffer are packed, whatever the strides are here
            spec_of(name, tensor, None if exported is not None else contiguous_strides(tensor.shape))
            for name, tensor in tensors.items()
        ]
        answers = self._peer.receive(
            "bind",
            tensors=[spec.to_wire() for spec in specs],
            exported=exported.wire if exported is not None else None,
        )
        fallbacks = {name: why for answer in answers for name, why in answer["fallbacks"].items()}
        if fallbacks:
            name, why = next(iter(fallbacks.items()))
            raise Unsupported(f"{name}: {why}")
        check_taken(tensors, [answer["left_out"] for answer in answers])
        self._exported, self._described = exported, self._manifest_of(tensors)
        if exported is None:
            try:
                self._buffer = SenderBuffer(
                    specs,
                    self._peer.device,
                    half_bytes=self._bucket_bytes,
                    readers=len(self._peer.pids),
                    in_host_memory=self._peer.ipc_refusal is not None,
                )
                self._peer.receive("stage", **self._buffer.describe())
            except BaseException:
                with suppress(EngineLost):
                    self._peer.receive("release")
                self._drop()
                raise

    def _manifest_of(self, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """The manifest of the tensors; the last one again while they are like those: its digest takes time."""
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if self._manifest is None or layout != self._layout:
            specs = (TensorSpec(name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items())
            self._layout, self._manifest = layout, Manifest(specs=tuple(specs))
        return self._manifest

    def _export(self, tensors: Mapping[str, torch.Tensor]) -> Exported | None:
        """The tensors exported, or `None` with the reason kept."""
        elsewhere = [name for name, tensor in tensors.items() if tensor.device != self._peer.device]
        if elsewhere:
            self._why_staged = f"{_STAGED}, since {elsewhere[0]} is not on {self._peer.device}"
            return None
        sharded = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
        if sharded:
            self._why_staged = f"{_STAGED}, since {sharded[0]} is sharded over ranks"
            return None
        try:
            return Exported(tensors)
        except Unsupported as error:
            self._why_staged = f"{_STAGED}: {error}"
            return None

    def _drop(self) -> None:
        if self._exported is not None:
            self._exported.close()
        if self._buffer is not None:
            self._buffer.close()
        self._exported = self._buffer = None
