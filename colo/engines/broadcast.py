"""Weights broadcast to a server elsewhere, over a process group of it and the trainer: `Broadcast(address)`."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from colo.errors import TransferError


class Broadcast:
    """Broadcasts from this process: NCCL between GPUs, gloo between CPUs. Each server has a group of its own."""

    def __init__(self, address: str | None = None) -> None:
        """`address` is this machine's, as servers reach it; by default that of its host name."""
        self.address = address or socket.gethostname()

    def open(self, device: torch.device, deadline_s: float) -> BroadcastGroup:
        """Begin a group, which a server has to join."""
        return BroadcastGroup(self.address, device, deadline_s)


class BroadcastGroup:
    """The process group of trainer, rank 0, and one server. Nothing of torch's own groups is touched.

    Ownership: its store, its connections and a thread, until `close`.
    """

    def __init__(self, address: str, device: torch.device, deadline_s: float) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self._deadline = timedelta(seconds=deadline_s)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.name = f"colo-{secrets.token_hex(4)}"
        store = TCPStore(address, 0, 2, is_master=True, timeout=self._deadline, wait_for_workers=False)
        self.address, self.port = address, store.port
        # prefixes as torch's `init_process_group` nests them on the other side
        self._store = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))
        self._wire: Any = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="colo-broadcast")

    @property
    def joining(self) -> dict[str, Any]:
        """The request to join, in SGLang's words."""
        where = {"master_address": self.address, "master_port": self.port, "rank_offset": 1, "world_size": 2}
        return {**where, "group_name": self.name, "backend": self.backend}

    @property
    def is_open(self) -> bool:
        """False once it has failed, or was closed: what it has sent may still be on its way, and another is needed."""
        return not self._closed

    @contextmanager
    def beside(self, act: Callable[[], object]) -> Iterator[None]:
        """Act here in a thread while the server is told of it within the block. Closes where either fails.

        Raises: what the block raises, and `TransferError` for what `act` does.
        """
        acting = self._thread.submit(act)
        try:
            yield
            acting.result()
        except Exception as error:
            self.close()
            if acting.done() and acting.exception() is error:
                raise TransferError(f"the broadcast of weights to the server failed: {error}") from error
            raise
        except BaseException:  # an interrupt
            self.close()
            raise

    def join(self) -> None:
        """Wait until the server has joined."""
        from torch.distributed.distributed_c10d import Backend, BackendConfig, PrefixStore

        # where one backend serves every kind of device, torch makes it once, under the name of the first
        kind = next(iter(BackendConfig(Backend(self.backend)).get_device_backend_map()))
        store = PrefixStore(f"{kind}/", self._store)
        if self.backend == "gloo":
            from torch.distributed import ProcessGroupGloo

            self._wire = ProcessGroupGloo(store, 0, 2, timeout=self._deadline)
            return
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._deadline
        self._wire = ProcessGroupNCCL(store, 0, 2, options)

    def send(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor of the device, and wait until it is gone."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wire.broadcast([tensor], options).wait()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    def close(self) -> None:
        """Leave the group. A broadcast under way ends by its deadline. Idempotent."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._wire = None
