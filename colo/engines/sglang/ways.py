"""The ways of weights to an SGLang server: requests that tell it of them, and what happens here meanwhile.

SlabWay         bytes within the requests, or on a GPU in a slab of which a CUDA IPC handle travels
FolderWay       files that both see
BroadcastWay    a process group of trainer and server; each request tells of a broadcast that has begun
"""

from __future__ import annotations

import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from transformers import PretrainedConfig

from colo.engines.buckets import Slab, bucket_bytes, buckets, bytes_of
from colo.engines.elsewhere import Broadcast, WeightsFolder
from colo.engines.http import Body
from colo.engines.sglang.weights import payloads
from colo.errors import TransferError
from colo.memory.copy_plan import wait_for_queued

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
        return BroadcastWay(through.address, slab.device, num_ranks, deadline_s)
    return SlabWay(slab, fence, num_ranks)


class SlabWay(Way):
    """Buckets that a server of this machine unpacks."""

    def __init__(self, slab: Slab, fence: Callable[[], object], num_ranks: int) -> None:
        """`fence` waits until the server has read what it was told of: it answers when it has queued its copies."""
        self._slab, self._fence, self._num_ranks = slab, fence, num_ranks
        self.words = "within requests" if slab.device.type == "cpu" else "by CUDA IPC, out of a slab in two halves"

    def publication(self, weights: Iterable[tuple[str, torch.Tensor]], config: PretrainedConfig) -> Requests:
        """Buckets, one after another."""
        for bucket in buckets(weights, bucket_bytes(self._slab.device)):
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
    """A process group of the trainer, rank 0, and the server's ranks. Nothing of torch's own groups is touched.

    A group in which a broadcast has failed is not used again: what it has sent may still be on its way.
    """

    def __init__(self, address: str, device: torch.device, num_ranks: int, deadline_s: float) -> None:
        """`address` is this machine's, as the server of `num_ranks` reaches it."""
        self._address, self._device, self._deadline_s = address, device, deadline_s
        self._size = 1 + num_ranks
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._name = ""
        self._group: Any = None  # torch's backend, while it is whole
        self.words = f"by a broadcast over {self._backend}, from {address}"

    def meeting(self) -> Requests:
        """Make a group, which the server joins at the same time. Raises: `TransferError` where it does not."""
        self._name, made = f"colo-{secrets.token_hex(4)}", list[Any]()
        deadline = timedelta(seconds=self._deadline_s)
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            self._address, 0, self._size, is_master=True, timeout=deadline, wait_for_workers=False
        )

        def join() -> None:
            with suppress(RuntimeError):  # which is noticed below
                made.append(self._joined(store, deadline))

        joining = threading.Thread(target=join, name="colo-broadcast", daemon=True)
        joining.start()
        where = {"master_address": self._address, "master_port": store.port, "rank_offset": 1, "world_size": self._size}
        yield "/init_weights_update_group", {**where, "group_name": self._name, "backend": self._backend}
        joining.join(self._deadline_s)
        if not made:
            raise TransferError(f"the server has not joined the trainer's group at {self._address}:{store.port}")
        (self._group,) = made

    def publication(self, weights: Iterable[tuple[str, torch.Tensor]], config: PretrainedConfig) -> Requests:
        """Buckets, each of which is on its way as the server is told of it. Raises: `TransferError` where one fails."""
        if self._group is None:
            yield from self.meeting()
        group, self._group = self._group, None  # until all of it has arrived
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for bucket in buckets(weights, bucket_bytes(self._device)):
            # the server takes bytes one after another, and wide elements have to begin at multiples of their size
            ordered = sorted(bucket, key=lambda one: -one[1].element_size())
            whole = torch.cat([bytes_of(tensor) for _, tensor in ordered])
            told: Body = {
                "names": [name for name, _ in ordered],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
                "shapes": [list(tensor.shape) for _, tensor in ordered],
            }
            work = group.broadcast([whole], options)
            try:
                yield "/update_weights_from_distributed", {**told, "group_name": self._name, **_BUCKET}
                work.wait()
            except BaseException as error:
                # torch waits for what is under way where a group is dropped, and all of Python with it
                threading.Thread(target=_outlast, args=(work, group), daemon=True).start()
                if isinstance(error, RuntimeError):
                    raise TransferError(f"the broadcast of weights to the server failed: {error}") from error
                raise
            wait_for_queued(self._device)  # `whole` is gone by then
        self._group = group

    def parting(self) -> Requests:
        """The group's end."""
        if self._group is not None:
            yield "/destroy_weights_update_group", {"group_name": self._name}

    def _joined(self, store: Any, deadline: timedelta) -> Any:
        # names as torch's `init_process_group` nests them on the other side; where one backend serves every kind of
        # device, it is made once, under the name of the first
        backend = distributed_c10d.Backend(self._backend)
        kind = next(iter(distributed_c10d.BackendConfig(backend).get_device_backend_map()))
        for name in (self._name, f"{self._name}/", f"{kind}/"):
            store = distributed_c10d.PrefixStore(name, store)
        if self._backend == "gloo":
            return distributed.ProcessGroupGloo(store, 0, self._size, timeout=deadline)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = deadline
        return distributed.ProcessGroupNCCL(store, 0, self._size, options)


def _outlast(work: Any, group: object) -> None:
    """Hold a group until a broadcast has ended, by its deadline at the latest."""
    with suppress(RuntimeError):
        work.wait()
