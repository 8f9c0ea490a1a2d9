"""The transport of a trainer that is spread over ranks, each with an engine: slices go where engines take them.

What a rank's engine takes is a recorded load plan, what ranks hold are placed parts. Where the two meet travels, once,
and only if another rank holds it. No tensor is ever whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from colo.errors import TransferError, Unsupported
from colo.memory.fence import wait_for_queued
from colo.memory.load_plan import LoadPlan
from colo.memory.specs import TensorSpec
from colo.units import MIB, format_bytes
from colo.weights.boxes import landings
from colo.weights.exchange.agreement import agree
from colo.weights.exchange.exchange import Exchange
from colo.weights.exchange.parcels import Target
from colo.weights.exchange.plan import ExchangePlan, Slice
from colo.weights.sources.base import WeightSource
from colo.weights.sources.parts import PlacedPart
from colo.weights.sources.placed import dtype_name, slices_of
from colo.weights.transports.base import CopyingTransport

_NAMED_RANKS = 8
"""Reports name so many ranks at most."""

BUCKET_BYTES = 128 * MIB
"""What a rank sends and receives at a time. Two are under way."""


class SlicesTransport(CopyingTransport):
    """Copies every recorded region out of the parts that hold it, on this rank and others. Each method is a collective.

    The exchange is planned once, and again when a rank holds other parts.
    """

    name = "slices"
    replaces_all = True

    def __init__(
        self,
        source: WeightSource,
        plan: LoadPlan,
        *,
        device: torch.device,
        why_not_shared: str,
        bucket_bytes: int | None = None,
    ) -> None:
        """`plan` is what this rank's engine copies, without fallbacks; buffers are memory of `device`.

        Raises: `TransferError`, on every rank, where ranks do not have parts of the same weights, or not all of them;
        `Unsupported` for weights with gaps between their elements.
        """
        self.source = source
        self._plan = plan
        self._device = device
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._why_not_shared = why_not_shared
        self._exchange, self._planned, self._held = self._connect()

    @property
    def reason(self) -> str:
        """Why not one memory, and how many bytes come from where."""
        own = sum(d.num_bytes for d in self._planned.local if d.receiver == self.source.ranks.rank)
        return (
            f"{self._why_not_shared}; of {len(self._plan.copies)} recorded copies {own} bytes are this rank's own and "
            f"{self.bytes_to_receive} come from other ranks, as slices ({self._by_rank()})"
        )

    def _by_rank(self) -> str:
        """What a transfer brings to each rank, and of many ranks the least and the most."""
        received = {rank: self._planned.received_bytes(rank) for rank in self._all_ranks}
        if len(received) > _NAMED_RANKS:
            least, most = (format_bytes(of(received.values())) for of in (min, max))
            return f"{len(received)} ranks receive {least} to {most} each"
        return ", ".join(f"rank {rank} receives {format_bytes(size)}" for rank, size in received.items())

    @property
    def bytes_to_receive(self) -> int:
        """Bytes that each transfer brings to this rank from others, by the plan."""
        return self._planned.received_bytes(self.source.ranks.rank)

    @property
    def received_bytes(self) -> int:
        """Bytes that have come to this rank since the exchange was planned."""
        return self._exchange.received_bytes

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of this process in transfers by stage; see `Exchange`."""
        return self._exchange.seconds

    @property
    def working_bytes(self) -> int:
        """Memory of two buckets."""
        return self._exchange.working_bytes

    def transfer(self, version: int = 0) -> int:
        """Bring every slice to where it goes, and return the bytes written to this rank's engine."""
        parts = self._parts()
        self._exchange.send(parts)
        for device in {copy.target.device for copy in self._plan.copies}:
            wait_for_queued(device)  # what goes to another GPU ends in that one's stream
        return sum(copy.num_bytes for copy in self._plan.copies)

    def verify(self) -> None:
        """Compare every byte, by checksums where it came from another rank, and parts that several ranks hold.

        Raises: `TransferError` with a name.
        """
        different = self._differences()
        apart = self._replicas.apart(self._parts(), self.source.ranks.device)
        if different:
            raise TransferError(f"{len(different)} tensors differ after the transfer, {different[0]} for one")
        if apart:
            raise TransferError(
                f"ranks that hold the same parts of weights have different values of {len(apart)}, {apart[0]} for one, "
                "and their engines would too: reduce gradients of replicas alike, as Megatron's finalize_model_grads "
                "does for norms and tied embeddings, and step on every rank"
            )

    def is_current(self) -> bool:
        """Whether the engines of all ranks hold what the trainer does, by checksums."""
        return not self.source.ranks.any(bool(self._differences()), "comparing weights")

    def _differences(self) -> list[str]:
        found = self._exchange.differences(self._parts())
        return list(dict.fromkeys(self._names[index] for index in found))

    def _parts(self) -> list[PlacedPart]:
        """What this rank holds now; planned for anew, on every rank, when it is not what was planned for on one."""
        ranks = self.source.ranks
        with ranks.fail_together("looking for slices of the weights"):
            parts = self.source.parts()
            for spec in self.source.specs():
                _check_spec(spec, self._plan)
        if ranks.any(slices_of(parts) != self._held, "looking for slices of the weights"):
            self._exchange, self._planned, self._held = self._connect()
        return parts

    def _connect(self) -> tuple[Exchange, ExchangePlan, list[Slice]]:
        ranks = self.source.ranks
        with ranks.fail_together("planning slices of the weights"):
            specs, held = self.source.specs(), slices_of(self.source.parts())
            targets = _targets(self._plan)
            taken = [Slice(name, target.landing.box, dtype_name(target.memory)) for name, target in targets]
        self._names = [name for name, _ in targets]
        plan, self._replicas, self._all_ranks = agree(ranks, specs, held, taken, bucket_bytes=self._bucket_bytes)
        exchange = Exchange(plan, ranks, [target for _, target in targets], device=self._device)
        return exchange, plan, held


def why_not_sliced(plan: LoadPlan) -> str | None:
    """Why weights have to travel whole to this rank's engine, `None` when slices will do."""
    if plan.fallbacks:
        name, cause = next(iter(plan.fallbacks.items()))
        return f"{name}: {cause}"
    try:
        _targets(plan)
    except Unsupported as error:
        return str(error)
    return None


def _targets(plan: LoadPlan) -> list[tuple[str, Target]]:
    """Every box that the plan's copies read, by name, and where it goes."""
    return [
        (copy.name, Target(copy.target, landing))
        for copy in plan.copies
        for landing in landings(
            (plan.sources[copy.name][1], plan.strides[copy.name]),
            copy.shape,
            (copy.stride, tuple(copy.target.stride())),
            (copy.offset, int(copy.target.storage_offset())),
        )
    ]


def _check_spec(spec: TensorSpec, plan: LoadPlan) -> None:
    """Raise `TransferError` unless a weight has the recorded shape; strides do not matter to parts."""
    recorded = plan.sources.get(spec.name)
    if recorded is None:
        raise TransferError(f"{spec.name} was not there when the engine's copies were recorded")
    if recorded[1] != spec.shape:
        raise TransferError(f"{spec.name} has shape {spec.shape}, but {recorded[1]} was recorded")
