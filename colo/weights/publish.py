"""Publication: making version N of the weights what an engine generates from, or making it refuse to generate.

    pause -> reset prefix cache -> transfer -> verify -> commit N

Any failure on the way poisons the engine, with the cause, until a later publication succeeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colo.engine import AdapterWeights, Engine, EngineState, adapters_of, in_all_ranks
from colo.errors import StaleWeights, TransferError
from colo.memory.digest import Digest
from colo.phases.phase import Phase
from colo.phases.trace import Trace
from colo.weights.sources.peft import whole_adapter
from colo.weights.watch import CopyMeter

if TYPE_CHECKING:
    from collections.abc import Callable

    from colo.weights.transports.base import Transport

MOST_PUBLICATIONS = 10_000  # publications that are remembered one by one

ADAPTER = "policy"
"""Adapters are called `policy@N` in the engine: prefix caches are keyed by name, so every version has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """One publication: version, transport, bytes and seconds."""

    version: int
    transport: str
    num_bytes: int  # bytes that left the trainer's memory, adapters included; 0 where all of it is shared
    adapter_bytes: int  # bytes of the adapter among them; 0 where the engine refers to the trainer's tensors
    seconds: float


class Publisher:
    """Keeps an engine's weights at the trainer's version."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        trace: Trace,
        *,
        adapter: Callable[[], AdapterWeights | None] | None = None,
        fingerprint: Callable[[], Hashable] = lambda: None,
        verify: bool = True,
    ) -> None:
        """`adapter` returns a LoRA run's adapter; `fingerprint` differs after a write to the weights under it."""
        self.version = 0  # version of the trainer's weights: raised by every optimizer step
        self.published: deque[Publication] = deque(maxlen=MOST_PUBLICATIONS)  # the last publications
        self.num_published = 0
        self.bytes_synced = 0  # bytes that all publications together have copied out of the trainer's memory
        self._engine = engine
        self._transport = transport
        self._trace = trace
        self._adapter = adapter
        self._verify = verify
        self.adapter_name: str | None = None  # of the published version; `None` without LoRA
        self._uncertain: set[str] = set()  # names of adapters that an interrupted call may have left in the engine
        self._scalings: dict[str, float] = {}
        self._adapter_digest: Digest | None = None
        self._base_digest: tuple[int, Digest] | None = None  # of whole weights, and the version that they were
        self._shard_digest: Digest | None = None  # of this rank's part of the weights that were published
        self._fingerprint = fingerprint
        self._sent: Hashable | None = None

    @property
    def is_current(self) -> bool:
        """True if the engine holds the trainer's version."""
        return self._engine.weights_version == self.version

    @property
    def replaces_everything(self) -> bool:
        """True if a publication writes all of the engine's weights; those under an adapter are sent once."""
        return self._transport.replaces_all and self._adapter is None

    def has_adapter(self) -> bool:
        """True if the engine holds the adapter as it is now, or there is none, or none that can be read."""
        if self._adapter is None or self._adapter_digest is None:
            return True
        try:
            adapter = self._adapter()
        except StaleWeights:
            return True  # `check` raises it, and poisons
        if adapter is None:
            return True
        now = Digest.of(dict(adapter.named_tensors()), self._adapter_digest)
        return adapter.scalings == self._scalings and not now.differs(self._adapter_digest)

    def note_contents(self) -> None:
        """Digest the weights, to notice writes that torch does not count. Queued."""
        # of sharded weights `_transfer` notes this rank's part instead
        if self._verify and not self._transport.source.is_sharded:
            earlier = self._base_digest[1] if self._base_digest is not None else None
            self._base_digest = (self.version, Digest.of(self._transport.source.held(), earlier))

    def has_other_contents(self) -> bool:
        """True if base weights or adapter were written to since `note_contents` was called for this version."""
        if self._base_digest is None or self._base_digest[0] != self.version:
            return False
        _, noted = self._base_digest
        self.note_contents()
        return bool(noted.differs(self._base_digest[1])) or not self.has_adapter()

    def has_changed_shard(self) -> bool:
        """True if this rank's part of sharded weights, or of an adapter, was written to since its publication.

        False if unknown.
        """
        noted = self._shard_digest
        if noted is None or not self.published or self.published[-1].version != self.version:
            return False
        return bool(noted.differs(Digest.of(self._transport.source.held(), noted))) or not self.has_adapter()

    def check(self) -> None:
        """Raise `StaleWeights`, and poison the engine, unless trainer and engine still hold the same weights."""
        if not self._verify:
            return
        try:
            if self._adapter is not None:
                self._adapter()
            self._check_trainer()
            if self.is_current and self.has_changed_shard():
                raise StaleWeights(
                    "what lies in this rank of the weights is not what was published: torch counts no write through "
                    "`.data`, `to_local()` or `torch._foreach_*`. Leave the rollout, the next one publishes them"
                )
        except StaleWeights as error:
            self._engine.poison(str(error))
            raise

    def _check_trainer(self) -> None:
        self._transport.check()
        self._transport.source.check_computed()

    def start_over(self) -> None:
        """Forget what the lost engine was given: it has been started again."""
        self.adapter_name = self._adapter_digest = self._base_digest = None
        self._uncertain.clear()
        self._sent = None

    def publish(self) -> Publication:
        """Make the trainer's version the engine's, whose weights are resident; it is left paused.

        Raises: whatever failed; the engine is then poisoned with that cause.
        """
        start_s = self._trace.now_s()
        publishing = f"publishing version {self.version}"
        try:
            (base_bytes, adapter_bytes), _ = in_all_ranks(self._engine, publishing, self._transfer)
        except BaseException as error:  # an interrupt, too, may leave weights written in part
            cause = str(error) or type(error).__name__
            self._engine.poison(f"{publishing} failed: {cause}")
            raise
        end_s, num_bytes = self._trace.now_s(), base_bytes + adapter_bytes
        self._trace.add(
            f"publish ({self._transport.name})",
            start_s,
            end_s=end_s,
            category="step",
            phase=Phase.SYNC,
            num_bytes=num_bytes,
        )
        done = Publication(
            version=self.version,
            transport=self._transport.name,
            num_bytes=num_bytes,
            adapter_bytes=adapter_bytes,
            seconds=end_s - start_s,
        )
        self.published.append(done)
        self.num_published += 1
        self.bytes_synced += num_bytes
        return done

    def _transfer(self) -> tuple[int, int]:
        """Send base and adapter; return the bytes of each that have left the trainer's memory."""
        ranks, publishing = self._transport.source.ranks, f"publishing version {self.version}"
        with ranks.fail_together(publishing):
            if self._engine.state is EngineState.AWAKE:
                self._engine.pause()
            self._engine.reset_prefix_cache()  # its blocks hold keys and values of the old weights
            if self._verify:
                self._check_trainer()
            else:
                self._transport.source.check_names()
        # under an adapter the frozen base is sent once, unless somebody has written to it
        has_base = self._has_base()
        self._sent = None  # until it is known to have arrived
        base_bytes = 0 if has_base else self._send()
        adapter_bytes = 0
        # a collective; asked once, since it may read all weights
        is_current = self.num_published > 0 or self._transport.is_current()
        with ranks.fail_together(publishing):
            if self._verify:
                self._transport.verify()
                source = self._transport.source
                self._shard_digest = Digest.of(source.held(), self._shard_digest) if source.is_sharded else None
            if not is_current:
                raise TransferError(
                    f"transport {self._transport.name} says right after its first transfer that the engine has other "
                    "weights than the trainer: is_current() must be true then, or every rollout would publish again"
                )
            adapter = self._adapter() if self._adapter is not None else None
        # a collective that tells of failures itself: within a block, a rank that has failed before would miss it
        whole = whole_adapter(adapter) if adapter is not None else None
        with ranks.fail_together(publishing):
            if adapter is not None and whole is not None:
                adapter_bytes = self._load_adapter(whole)
                if self._verify:
                    self._scalings = dict(adapter.scalings)
                    self._adapter_digest = Digest.of(dict(adapter.named_tensors()), self._adapter_digest)
                self._sent = self._fingerprint()
            # last: only what has arrived and been verified is a version to sample from
            self._engine.commit(self.version)
        return base_bytes, adapter_bytes

    def _send(self) -> int:
        """Run the transport; return the bytes copied: reported by copying ones, measured for the shared one."""
        renewed_bytes = self._transport.source.renew()
        if not self._transport.shares:
            return self._transport.transfer(self.version)
        meter = CopyMeter(lambda: self._transport.source.tensors().values())
        with meter:
            num_bytes = self._transport.transfer(self.version)
        return num_bytes + meter.num_bytes + renewed_bytes

    def _has_base(self) -> bool:
        """True if the engine still holds the frozen weights under an adapter, which are sent once."""
        lacks = (
            self._sent is None
            or not self.published  # the first publication has failed as it was committed
            or self._engine.weights_version != self.published[-1].version
            or self._sent != self._fingerprint()
        )
        # asked together first: `is_current` is a collective, and no rank may be alone in it
        return not self._transport.source.ranks.any(lacks, "publishing") and self._transport.is_current()

    def _load_adapter(self, adapter: AdapterWeights) -> int:
        """Give the engine the adapter, and return the bytes of it that were copied."""
        engine, name = adapters_of(self._engine), f"{ADAPTER}@{self.version}"
        old, self.adapter_name = self.adapter_name, None
        for left in self._uncertain:
            with suppress(ValueError):  # it is not there
                engine.remove_adapter(left)
        # an interrupt within the next call leaves either of them in the engine
        self._uncertain = {name} if old is None else {old, name}
        meter = CopyMeter(lambda: [*adapter.a.values(), *adapter.b.values()])
        with meter:
            if old is None:
                engine.load_adapter(name, adapter)
            else:
                engine.replace_adapter(old, name, adapter)
        self.adapter_name = name
        self._uncertain.clear()
        return meter.num_bytes
