"""The ways of weights to an SGLang server: requests that tell it of them, and what happens here meanwhile.

SlabWay         bytes within the requests, or on a GPU in a slab of which a CUDA IPC handle travels
FolderWay       files that both see
BroadcastWay    a process group of trainer and server; each request tells of a broadcast that has begun
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable

import torch
from transformers import PretrainedConfig

from colo.engines.buckets import Slab, bucket_bytes, buckets
from colo.engines.elsewhere import Broadcast, Broadcaster, WeightsFolder
from colo.engines.http import Body
from colo.engines.sglang.weights import payloads
from colo.memory.share import dtype_name

Requests = Generator[tuple[str, Body], None, None]
"""Paths and bodies; the server has answered one when the next is asked for. Close it where one has failed."""

_UNFLUSHED: Body = {"flush_cache": False}  # a flush that is refused would end the server
_BUCKET: Body = {"load_format": "flattened_bucket", "selector": "target", **_UNFLUSHED}


class Way:
    """A way of weights to a server."""

    words: str
    """A phrase for reports: how they travel."""

    def meeting(self) -> Requests:
        """Requests to a server that has just been started, or connected to."""
        yield from ()

    @abstractmethod
    def publication(self, weights: Iterable[tuple[str, torch.Tensor]], config: PretrainedConfig) -> Requests:
        """Requests within a session, after which the server has loaded all weights."""

    def parting(self) -> Requests:
        """Requests that leave a server as it was found."""
        yield from ()

    def close(self) -> None:
        """Let go of what is held here. Idempotent."""
        return


def way_of(
    through: WeightsFolder | Broadcast | None,
    slab: Slab,
    fence: Callable[[], object],
    *,
    num_ranks: int,
    deadline_s: float,
) -> Way:
    """The way that `through` asks for to a server of `num_ranks`.

    `slab` and `fence` are those of `SlabWay`; a broadcast has `deadline_s`.
    """
    if isinstance(through, WeightsFolder):
        return FolderWay(through)
    if isinstance(through, Broadcast):
        broadcaster = Broadcaster(through.address, slab.device, num_ranks, deadline_s)
        return BroadcastWay(broadcaster, through.address, slab.device)
    return SlabWay(slab, fence, num_ranks)


class SlabWay(Way):
    """Buckets that a server of this machine unpacks."""

    def __init__(self, slab: Slab, fence: Callable[[], object], num_ranks: int) -> None:
        """`fence` waits until the server has read what it was told of: it answers when it has queued its copies."""
        self._slab, self._fence, self._num_ranks = slab, fence, num_ranks
        self.words = "within requests" if slab.device.type == "cpu" else "by CUDA IPC, out of a slab"

    def publication(self, weights: Iterable[tuple[str, torch.Tensor]], config: PretrainedConfig) -> Requests:
        """Buckets, one after another."""
        for bucket in buckets(weights, self._slab.size_bytes):
            packed = payloads(self._slab, bucket, self._num_ranks, self._fence)
            yield "/update_weights_from_tensor", {"serialized_named_tensors": packed, **_BUCKET}


class FolderWay(Way):
    """A version on a disk for each publication."""

    def __init__(self, folder: WeightsFolder) -> None:
        self._folder = folder
        self.words = f"as files in {folder.path}"

    def publication(self, weights: Iterable[tuple[str, torch.Tensor]], config: PretrainedConfig) -> Requests:
        """A version, which is written before the first request is there."""
        version = self._folder.write(weights, config)
        yield "/update_weights_from_disk", {"model_path": str(version), "load_format": "safetensors", **_UNFLUSHED}


class BroadcastWay(Way):
    """A process group with the server's ranks; each request tells of a broadcast that has begun."""

    def __init__(self, broadcaster: Broadcaster, address: str, device: torch.device) -> None:
        self._broadcaster, self._device = broadcaster, device
        self.words = f"by a broadcast over {broadcaster.backend}, from {address}"

    def meeting(self) -> Requests:
        """Make a group, which the server joins at the same time. Raises: `TransferError` where it does not."""
        with self._broadcaster.meeting() as where:
            told: Body = {"master_address": where.address, "master_port": where.port, "world_size": where.size}
            told |= {"rank_offset": 1, "group_name": where.name, "backend": where.backend}
            yield "/init_weights_update_group", told

    def publication(self, weights: Iterable[tuple[str, torch.Tensor]], config: PretrainedConfig) -> Requests:
        """Buckets, each of which is on its way as the server is told of it. Raises: `TransferError` where one fails."""
        if not self._broadcaster.is_whole:
            yield from self.meeting()
        for bucket in buckets(weights, bucket_bytes(self._device)):
            with self._broadcaster.sending(bucket) as ordered:
                told: Body = {
                    "names": [name for name, _ in ordered],
                    "dtypes": [dtype_name(tensor) for _, tensor in ordered],
                    "shapes": [list(tensor.shape) for _, tensor in ordered],
                }
                group = {"group_name": self._broadcaster.name}
                yield "/update_weights_from_distributed", {**told, **group, **_BUCKET}

    def parting(self) -> Requests:
        """The group's end."""
        if self._broadcaster.is_whole:
            yield "/destroy_weights_update_group", {"group_name": self._broadcaster.name}

    def close(self) -> None:
        """Let go of the group."""
        self._broadcaster.close()
