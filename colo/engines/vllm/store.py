"""The weights of a vLLM engine in memory that the trainer owns.

While vLLM builds its model, each of its workers asks for the memory of the parameters, over a socket that only this
user can reach, and maps it. The engine can then live in another process, be killed and come back: the trainer still has
the weights, and a new worker asks for the same pieces in the same order and finds them filled.

    worker                                     store (trainer)
    {"op": "hello", "rank", "pid", "device"}   -> {"pid", "fill", "layout"}   whether a checkpoint has to be read
    {"op": "slab", "size_bytes"}               -> a slab's description    as often as it takes
    {"op": "done", "layout"}                   -> {}                      from here on the content counts
    {"op": "drop", "indices"}                  -> {}                      slabs that no weight lies in after all

A layout says where every parameter and saved buffer lies in the end: a `Place`, whose memory is the slab, by name. A
new worker hears that of the first, and is refused with another one: it would compute with something else.
Nothing is sent while the worker reads its checkpoint, so the store waits for as long as the worker lives.
One JSON object a line; an answer with "error" ends the conversation.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from colo.errors import TransferError
from colo.memory.digest import Digest
from colo.memory.probe import device_id
from colo.memory.share import SharedMemory, open_shared_memory
from colo.memory.specs import Wire
from colo.units import format_bytes

DEADLINE_S = 60.0
"""Longest wait of a worker for an answer."""

_RETRY_S = 0.1
"""Pause before the store listens again after an error, such as EMFILE."""

_OPS = ("hello", "slab", "done", "drop")

Layout = Mapping[str, Wire]
"""`Place.to_wire` of every weight, by name."""


@dataclass
class _Memory:
    """The slabs of one worker, in the order in which it asked for them."""

    device: torch.device
    slabs: list[SharedMemory] = field(default_factory=list)
    filled: bool = False
    layout: Layout = field(default_factory=dict)
    worker: object = None
    """The connection of the worker that uses them."""


@dataclass
class _Worker:
    """One connection, and how many slabs it has been given."""

    rank: int = -1
    pid: int = 0
    given: int = 0


class WeightStore:
    """Owns the memory of an engine's weights, a list of slabs for every worker, until `close`. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._by_rank: dict[int, _Memory] = {}
        # not the abstract namespace, which any user of the machine could reach
        folder = tempfile.mkdtemp(prefix="colo-")  # mode 0700: the socket in it is this user's alone
        # weak: also for a store that is dropped without `close`
        self._remove_folder = weakref.finalize(self, _remove, folder, os.getpid())  # at the process's end too
        self.address = str(Path(folder, "store"))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.address)
            self._listener.listen()
            # a thread, since the constructor of vLLM blocks this one while its worker asks for memory
            threading.Thread(target=self._accept, name="colo-store", daemon=True).start()
        except BaseException as error:
            self.close()
            error.add_note(f"no store for the engine's weights at {self.address}: TMPDIR may be a shorter path")
            raise

    @property
    def size_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.bytes.numel() for memory in self._by_rank.values() for slab in memory.slabs)

    def slabs(self, rank: int) -> list[torch.Tensor]:
        """The bytes of every slab of one worker, uint8."""
        return [slab.bytes for slab in self._by_rank[rank].slabs]

    def digest(self) -> Digest:
        """Digest the slabs that hold weights, by rank and index."""
        return Digest.of(
            {
                f"slab {index} of rank {rank}": slab.bytes
                for rank, memory in self._by_rank.items()
                if memory.filled
                for index, slab in enumerate(memory.slabs)
                if slab.bytes.numel()
            }
        )

    def close(self) -> None:
        """Stop answering and let go of the memory. Idempotent."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._remove_folder()
        for memory in self._by_rank.values():
            for slab in memory.slabs:
                slab.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="colo-store", daemon=True).start()
            except (OSError, RuntimeError) as error:  # out of files, memory or threads, which may come back
                if isinstance(error, RuntimeError):
                    connection.close()
                self._closed.wait(_RETRY_S)

    def _serve(self, connection: socket.socket) -> None:
        # whatever is said, this side serves others too: a line that is no text becomes one that is no JSON
        conversation = connection.makefile("rw", encoding="utf-8", errors="replace")
        with connection, suppress(OSError), conversation as stream:  # of one that ended
            worker = _Worker()
            for line in stream:
                try:
                    with self._lock:
                        answer = self._answer(worker, json.loads(line))
                except Exception as error:  # noqa: BLE001 - raised by the worker
                    answer = {"error": " ".join([str(error), *getattr(error, "__notes__", ())])}
                stream.write(json.dumps(answer) + "\n")
                stream.flush()

    def _answer(self, worker: _Worker, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict) or request.get("op") not in _OPS:
            raise TransferError(f"{request!r} is no request: op is one of {', '.join(_OPS)}")
        if self._closed.is_set():
            raise TransferError("the store was closed")
        if request["op"] != "hello" and worker.rank not in self._by_rank:
            raise TransferError(f"{request['op']} before hello")
        if request["op"] == "hello":
            rank = worker.rank = request["rank"]
            worker.pid = request["pid"]
            memory = self._by_rank.get(rank)
            # never declared filled: nobody knows what is in it
            if memory is None or not memory.filled:  # a start that failed halfway has filled nothing of use
                for slab in memory.slabs if memory is not None else ():
                    slab.close()
                memory = self._by_rank[rank] = _Memory(self._device_of(request["device"]))
            # the last who says hello owns the memory; the connection of one before is refused from now on
            memory.worker = worker
            return {"pid": os.getpid(), "fill": not memory.filled, "layout": memory.layout}
        memory = self._by_rank[worker.rank]
        # a worker of an engine that was killed may still be connected
        if memory.worker is not worker:
            raise TransferError(f"another worker of rank {worker.rank} has taken the place of process {worker.pid}")
        if request["op"] == "slab":
            index, worker.given = worker.given, worker.given + 1
            try:
                return self._slab(memory, index, request["size_bytes"]).describe(to_pid=worker.pid)
            except (OSError, RuntimeError) as error:
                error.add_note(f"({format_bytes(request['size_bytes'])} asked for)")
                raise
        if request["op"] == "drop":
            in_use = {place["memory"] for place in memory.layout.values()}
            # slabs that a weight lies in stay, whatever a worker says
            for index in set(request["indices"]) - in_use:
                memory.slabs[index].close()
            return {}
        if memory.filled:
            _check_layout(memory.layout, request["layout"])
        memory.filled, memory.layout = True, request["layout"]
        return {}

    def _slab(self, memory: _Memory, index: int, size_bytes: int) -> SharedMemory:
        if not memory.filled:
            memory.slabs.append(SharedMemory(size_bytes, memory.device))
            return memory.slabs[-1]
        # an engine that is started again asks for the same slabs in the same order, and finds the weights in them
        known = [slab.size_bytes for slab in memory.slabs]
        if index >= len(known) or known[index] != size_bytes:
            raise TransferError(
                f"piece {index} of the weights has {format_bytes(size_bytes)} now, which is not what the first engine "
                "asked for: start it with the same model and options, or build a new runtime"
            )
        if not memory.slabs[index].bytes.numel():  # dropped, as it will be again
            memory.slabs[index] = SharedMemory(size_bytes, memory.device)
        return memory.slabs[index]

    def _device_of(self, name: str) -> torch.device:
        """The device that another process calls by `name`: `cpu`, or the UUID of a GPU."""
        if name == "cpu":
            return torch.device("cpu")
        for index in range(torch.cuda.device_count()):
            if device_id(torch.device("cuda", index)) == name:
                return torch.device("cuda", index)
        raise TransferError(
            f"this process does not see the GPU {name} that the engine runs on: check CUDA_VISIBLE_DEVICES"
        )


def _remove(folder: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not at the end of a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _check_layout(first: Layout, now: Layout) -> None:
    """Raise `TransferError` when a new worker has weights elsewhere, or others, than the first one had."""
    others = [name for name in first.keys() | now.keys() if first.get(name) != now.get(name)]
    if others:
        raise TransferError(
            f"{len(others)} weights of the engine, {min(others)} for one, are not where those of the first engine "
            "were, and it would compute with others: start it with the same model and options, or build a new runtime"
        )


class StoreClient:
    """Client of a `WeightStore`, in a worker."""

    def __init__(self, address: str, *, rank: int, pid: int, device: torch.device) -> None:
        """Introduce the worker. Raises: `TransferError` when nobody answers within the deadline."""
        self._device = device
        self._address = address
        self._is_local = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(DEADLINE_S)
        try:
            self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise TransferError(f"the trainer's weight store does not answer at {address}: {error}") from error
        self._stream = self._socket.makefile("rw", encoding="utf-8")
        try:
            told = self._ask(op="hello", rank=rank, pid=pid, device=device_id(device))
            self.owner_pid = int(told["pid"])
            self.fill = bool(told["fill"])
            self.layout: Layout = told["layout"]
        except BaseException:
            self.close()
            raise

    def take(self, size_bytes: int) -> torch.Tensor:
        """The next piece of memory, uint8, shape [size_bytes]. Raises: `TransferError` where it cannot be mapped."""
        try:
            description = self._ask(op="slab", size_bytes=size_bytes)
            self._is_local = description["kind"] == "local"  # whoever uses a piece then keeps it
            return open_shared_memory(description, self._device)
        except TransferError as error:
            error.add_note("start the engine with share_memory=False: weights are copied to it then")
            raise

    def drop(self, unused: Mapping[int, StorageWeakRef]) -> None:
        """Give pieces back, by their order, unless something of another process than the store's still maps them."""
        # a slab that something still maps would be freed under it
        self._ask(op="drop", indices=[n for n, storage in unused.items() if self._is_local or storage.expired()])

    def done(self, layout: Layout) -> None:
        """Say where every weight lies, once loaded. `TransferError` unless the first worker's lie there too."""
        self._ask(op="done", layout=dict(layout))

    def close(self) -> None:
        """End the conversation. Idempotent."""
        with suppress(OSError):  # of what could not be sent
            self._stream.close()
        self._socket.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        try:
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
            answer: dict[str, Any] = json.loads(self._stream.readline() or '{"error": "the trainer has ended"}')
        except (OSError, ValueError) as error:  # of a trainer that ended within a line, too
            raise TransferError(f"the trainer's weight store at {self._address} stopped answering: {error}") from error
        if "error" in answer:
            raise TransferError(f"the trainer's weight store refused: {answer['error']}")
        return answer
