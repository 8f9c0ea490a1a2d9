"""The engines of other ranks of the host, in memory that this rank maps once and writes straight into.

On a GPU that is CUDA IPC and NVLink; on a CPU it is a memory file. What cannot be mapped, and other hosts, are reached
through buffers instead (`exchange.py` beside this), for which every rank is told the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from colo.errors import TransferError, Unsupported
from colo.memory import cuda_driver
from colo.memory.copy_plan import Pair, Strided, is_fusable, kernels
from colo.memory.probe import device_id
from colo.memory.share import Description, description_of, open_shared_memory
from colo.weights.boxes import Landing
from colo.weights.exchange import Delivery, Target
from colo.weights.ranks import RankGroup

# the same in all containers of a machine, and never on two machines; names of hosts are neither
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """A box of a weight in one of several pieces of memory."""

    memory: int
    landing: Landing  # offset and strides in elements of its dtype, from `shift_bytes` of the memory on
    shift_bytes: int  # bytes of the memory before the storage that the landing counts from; may be negative
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Reach:
    """One rank's engine, as others need to know it to write there."""

    host: str
    gpu: str
    memory: tuple[Description, ...]
    places: tuple[EnginePlace, ...]  # places of what the engine takes, in order
    why_not: str = ""  # the reason why nobody can

    @classmethod
    def of(cls, targets: Sequence[Target], device: torch.device) -> Reach:
        """Describe this rank's engine."""
        host, gpu = _BOOT.read_text().strip() if _BOOT.exists() else "", device_id(device)
        found: dict[str, Description] = {}
        indices: dict[str, int] = {}
        places = []
        try:
            for target in targets:
                description, start_bytes = description_of(target.memory)
                index = indices.setdefault(repr(description), len(indices))
                found.setdefault(repr(description), description)
                item = target.memory.element_size()
                # landings count from the storage's first element, the description from the memory's first byte
                shift = start_bytes - int(target.memory.storage_offset()) * item
                places.append(EnginePlace(index, target.landing, shift, target.memory.dtype))
        except (TransferError, Unsupported) as error:
            return cls(host, gpu, (), (), str(error))
        return cls(host, gpu, tuple(found.values()), tuple(places))


class Peers:
    """Other ranks' engines at addresses of this process.

    Lifetime: owners keep the memory, where it is, until this has been dropped.
    """

    def __init__(self, told: Mapping[int, Reach], to: Sequence[int], device: torch.device) -> None:
        """Map the engines of the ranks in `to`. Raises: `TransferError` or `Unsupported` where one cannot be."""
        self._told = told
        self._mapped: dict[int, list[torch.Tensor | cuda_driver.Mapped]] = {}
        for rank in to:
            self._mapped[rank] = [_open(told[rank], one, device) for one in told[rank].memory]

    def target(self, delivery: Delivery) -> torch.Tensor | Strided:
        """The memory that the elements of a delivery go to."""
        place = self._told[delivery.receiver].places[delivery.taken]
        offset, shape, strides = place.landing.of(delivery.box)
        memory, item = self._mapped[delivery.receiver][place.memory], place.dtype.itemsize
        start_bytes = place.shift_bytes + offset * item
        if isinstance(memory, cuda_driver.Mapped):
            return Strided(memory.address + start_bytes, shape, tuple(step * item for step in strides), place.dtype)
        size = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
        within = memory[start_bytes : start_bytes + size * item].view(place.dtype)
        return within.as_strided(shape, strides, int(within.storage_offset()))


def reach(
    ranks: RankGroup,
    deliveries: Sequence[Delivery],
    targets: Sequence[Target],
    sent: Sequence[tuple[Delivery, torch.Tensor]],
    device: torch.device,
) -> Peers | str:
    """Map the engines that this rank's parts go to, or give the reason why not all ranks can. A collective.

    `deliveries` are everybody's, `targets` the places of what this rank takes, and `sent` what it sends to others.
    """
    told = ranks.gather(Reach.of(targets, device))
    receivers = sorted({delivery.receiver for delivery in deliveries if delivery.sender != delivery.receiver})
    if (num_hosts := len({one.host for one in told.values()})) > 1:
        return f"ranks are on {num_hosts} hosts"
    if lacking := [f"of rank {rank}: {told[rank].why_not}" for rank in receivers if told[rank].why_not]:
        return lacking[0]
    peers = None
    try:
        peers = Peers(told, sorted({delivery.receiver for delivery, _ in sent}), device)
        cause = _why_not_written([(part, peers.target(delivery)) for delivery, part in sent], device)
    except (TransferError, Unsupported) as error:
        cause = str(error)
    causes = ranks.gather(cause)  # all ranks write to peers, or none does: they meet differently
    said = [f"on rank {rank}: {cause}" for rank, cause in causes.items() if cause]
    return said[0] if said or peers is None else peers


def _why_not_written(pairs: Sequence[Pair], device: torch.device) -> str:
    """The reason why this rank's kernel cannot write to others; empty if it can."""
    if device.type == "cpu":
        return ""
    if kernels(device) is None:
        return "Triton does not work here"
    others = (pair for pair in pairs if not is_fusable(*pair, device))
    return next((f"{part.dtype} on {part.device} goes to an engine of {to.dtype}" for part, to in others), "")


def _open(reach: Reach, description: Description, device: torch.device) -> torch.Tensor | cuda_driver.Mapped:
    if description["kind"] != "cuda":
        return open_shared_memory(description, device)
    # by UUID, since each process numbers the GPUs that it sees from 0
    visible = {device_id(torch.device("cuda", number)): number for number in range(torch.cuda.device_count())}
    there = visible.get(reach.gpu, device.index)
    if there != device.index and not torch.cuda.can_device_access_peer(device.index or 0, there):
        raise Unsupported(f"{device} cannot reach the memory of cuda:{there}")
    return cuda_driver.Mapped(bytes.fromhex(description["handle"]), device)
