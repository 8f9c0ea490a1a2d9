"""The shared buffer: memory in two halves that is refilled group by group, where workers cannot map the tensors.

    sender                                          every worker
    wait until all are done with group n - 2
    fill half n % 2 with group n        ------->    wait until group n is filled
                                                    copy out of half n % 2, as out of any exported tensors
                                        <-------    say that it is done

So one half is filled while the other is read, as in vLLM's RFC 24163 and Kimi-K2's checkpoint engine. Who has come how
far is counted in host memory that all map, and each waits for the others by looking: a call into an engine's process
takes about a millisecond, in which a half is filled and read several times. On a GPU with one worker the kernels of
both sides are ordered by interprocess events, otherwise each side waits for its own. The halves are on the GPU, or in
host memory for workers that cannot map a GPU's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from colo.errors import TransferError
from colo.memory import cuda_driver
from colo.memory.copy_plan import wait_for_queued
from colo.memory.digest import Digest
from colo.memory.share import Description, MappedBuffer, SharedMemory, open_shared_memory
from colo.memory.specs import DTYPE_BYTES, TensorSpec, arriving
from colo.units import align_up
from colo.weights.boxes import Box

ALIGNMENT_BYTES = 256
"""Alignment that `cudaMalloc` guarantees, so that every dtype and every vectorized kernel can work in place."""

DEADLINE_S = 60.0  # seconds that a worker waits for the next group

_CPU = torch.device("cpu")
_lock = threading.Lock()
_WORD_BYTES = 8
_FILLED, _STOPPED, _FIRST_READER = 0, 1, 2  # places of the counts, in words

_BY_SENDER, _BY_READER = 1, 2  # who has stopped

_SPIN_S, _SLEEP_S = 2e-3, 5e-5
"""Turns take fractions of a millisecond; who has waited longer gives the core away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of one tensor, contiguous in a half of the buffer: all of the tensor, unless that is larger than a half."""

    name: str  # name of the tensor
    box: Box  # elements of it
    offset_bytes: int  # start of the piece in its half; a multiple of `ALIGNMENT_BYTES`

    def to_wire(self) -> dict[str, Any]:
        """Fields by name, to travel as JSON."""
        box = {"offset": list(self.box.offset), "shape": list(self.box.shape)}
        return {"name": self.name, "offset_bytes": self.offset_bytes} | box

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Piece:
        """Raises: `TransferError` with the reason."""
        with arriving(cls):
            box = Box(tuple(map(int, wire["offset"])), tuple(map(int, wire["shape"])))
            return cls(name=str(wire["name"]), box=box, offset_bytes=int(wire["offset_bytes"]))

    def within(self, half: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The piece in a half, uint8."""
        size_bytes = self.box.num_elements * dtype.itemsize
        return half[self.offset_bytes : self.offset_bytes + size_bytes].view(dtype).view(self.box.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of the whole tensor that the piece is a copy of."""
        for dim, (start, size) in enumerate(zip(self.box.offset, self.box.shape, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


Group = tuple[Piece, ...]


def plan_groups(specs: Iterable[TensorSpec], *, half_bytes: int) -> list[Group]:
    """Cut tensors, in order, into groups of at most `half_bytes`; every element is in exactly one piece.

    A tensor that fits into a half is one piece, also one without elements. Raises: `ValueError` for a half that is too
    small for one aligned block.
    """
    if half_bytes < ALIGNMENT_BYTES:
        raise ValueError(
            f"half a buffer of {half_bytes} bytes cannot hold one aligned block of {ALIGNMENT_BYTES} bytes: "
            f"bucket_bytes must be at least {ALIGNMENT_BYTES}"
        )
    groups: list[list[Piece]] = [[]]
    end_bytes = 0  # of the last group
    for spec in specs:
        itemsize = DTYPE_BYTES[spec.dtype]
        for box in Box((0,) * len(spec.shape), spec.shape).cut(half_bytes // itemsize):
            offset_bytes = align_up(end_bytes, ALIGNMENT_BYTES)
            if offset_bytes + box.num_elements * itemsize > half_bytes:
                groups.append([])
                offset_bytes = 0
            groups[-1].append(Piece(name=spec.name, box=box, offset_bytes=offset_bytes))
            end_bytes = offset_bytes + box.num_elements * itemsize
    return [tuple(pieces) for pieces in groups if pieces]


class SenderBuffer:
    """The sender's end. Ownership: owns the memory until `close`."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        device: torch.device,
        *,
        half_bytes: int,
        readers: int,
        in_host_memory: bool = False,
    ) -> None:
        """Take memory for two halves, each as large as the largest group of `specs`; `readers`: number of workers."""
        self.groups = plan_groups(specs, half_bytes=half_bytes)
        self._dtypes = {spec.name: getattr(torch, spec.dtype) for spec in specs}
        self._device = device
        self._in_host_memory = in_host_memory
        self._readers = readers
        ends = [
            piece.offset_bytes + piece.box.num_elements * self._dtypes[piece.name].itemsize
            for pieces in self.groups
            for piece in pieces
        ]
        self._half_bytes = align_up(max([*ends, 1]), ALIGNMENT_BYTES)
        place = _CPU if in_host_memory else device
        self._slab = SharedMemory(2 * self._half_bytes, place)
        self._halves = list(self._slab.bytes.split(self._half_bytes))
        self._filled = self._halves
        """Memory that groups are put together in: the halves or, if those are the host's, one on the device."""

        self._unlock: Callable[[], Any] | None = None
        if in_host_memory:
            # put together, and digested, on the device; a group then goes to the host in one copy
            self._filled = [torch.empty_like(self._halves[0], device=device)] * 2
            self._unlock = cuda_driver.page_lock(self._slab, self._slab.bytes, device)
        # of each worker how many groups it is done with, and its process
        self._turns = SharedMemory((_FIRST_READER + 2 * readers) * _WORD_BYTES, _CPU)
        self._words = self._turns.bytes.view(torch.int64).numpy()[: _FIRST_READER + readers]
        self._events: list[tuple[torch.cuda.Event, ...]] = []  # of each half: filled, and read
        self._exported: list[list[str]] = []
        if place.type == "cuda" and readers == 1:  # an event tells of one reader, the last that has recorded it
            with torch.cuda.device(place):
                self._events = [tuple(torch.cuda.Event(interprocess=True) for _ in "12") for _ in self._halves]
                # here: an event belongs to the device that is the current one as it is exported or recorded first
                self._exported = [[event.ipc_handle().hex() for event in pair] for pair in self._events]
        self._digests: dict[int, Digest] = {}

    def describe(self) -> dict[str, Any]:
        """The arguments of `Receiver.stage`."""
        return {
            "slab": self._slab.describe(to_pid=0),
            "groups": [[piece.to_wire() for piece in pieces] for pieces in self.groups],
            "turns": self._turns.describe(to_pid=0),
            "readers": self._readers,
            "events": self._exported,
            "copied": self._in_host_memory,
        }

    @torch.no_grad()
    def send(
        self, tensors: Mapping[str, torch.Tensor], taking: Callable[[], Future[Any]], *, verify: bool
    ) -> list[list[int]] | None:
        """Fill one group after another while the workers take them; with `verify` the checksums of all pieces.

        `taking` starts the workers, and its result is waited for; a tensor may be whole in its turn only.
        """
        digests = []
        # before the workers begin: counts of the last version would let them in
        self._words[:] = 0
        taken = taking()
        try:
            for index in range(len(self.groups)):  # group n fills the half that group n - 2 was read from
                # done with n - 1 groups: the last of them, n - 2, was in this half
                if not self._wait_read(index - 1, taken):
                    self._stop()
                    break  # and `result` says why
                _fence()
                if self._events and index > 1:  # by now the workers have recorded it
                    torch.cuda.current_stream(self._device).wait_event(self._events[index % 2][1])
                self._fill(index, tensors)
                if verify:
                    digests.append(self._digest(index))
                self._hand_over(index)
        except BaseException:
            self._stop()
            raise
        # raises what a worker has raised
        taken.result()
        # read at the end: waiting for each group's sums would keep the next group from being filled
        return [list(digest.sums.values()) for digest in digests] if verify else None

    @torch.no_grad()
    def checksums(self, tensors: Mapping[str, torch.Tensor]) -> list[list[int]]:
        """The checksums that `send` would find for `tensors`, without sending."""
        digests = []
        for index in range(len(self.groups)):
            self._fill(index, tensors)
            digests.append(self._digest(index))
        return [list(digest.sums.values()) for digest in digests]

    def close(self) -> None:
        """Let go of the memory."""
        # pages that are unmapped while registered make CUDA refuse their address later
        if self._unlock is not None:
            self._unlock()
        self._events, self._digests, self._filled, self._halves = [], {}, [], []
        # NumPy's view would keep the memory mapped
        del self._words
        self._slab.close()
        self._turns.close()

    def _wait_read(self, count: int, taken: Future[Any]) -> bool:
        """Wait until every worker is done with `count` groups; false when one has failed or all have ended before."""
        return _until(
            lambda: int(self._words[_FIRST_READER:].min()) >= count,
            lambda: taken.done() or self._words[_STOPPED] == _BY_READER,
        )

    def _fill(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for piece in self.groups[index]:
            target = piece.within(self._filled[index % 2], self._dtypes[piece.name])
            target.copy_(piece.of(tensors[piece.name].detach()), non_blocking=True)

    def _digest(self, index: int) -> Digest:
        half = self._filled[index % 2]
        pieces = {key: piece.within(half, self._dtypes[piece.name]) for key, piece in keyed(self.groups[index]).items()}
        self._digests[index] = Digest.of(pieces, self._digests.get(index))
        return self._digests[index]

    def _hand_over(self, index: int) -> None:
        """Let workers take a group, once it is in the half that they map."""
        if self._in_host_memory:
            self._halves[index % 2].copy_(self._filled[index % 2], non_blocking=True)
        if self._events:
            self._events[index % 2][0].record(torch.cuda.current_stream(self._device))
        else:
            wait_for_queued(self._device)
        _fence()
        self._words[_FILLED] = index + 1

    def _stop(self) -> None:
        """Let workers wait no longer."""
        # a worker's word stays: it has failed first, and its error is the one to tell
        self._words[_STOPPED] = self._words[_STOPPED] or _BY_SENDER


class ReaderBuffer:
    """A worker's end. Keeps the memory mapped until it is dropped."""

    def __init__(
        self,
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
        *,
        slab: Description,
        groups: Sequence[Sequence[Mapping[str, Any]]],
        turns: Description,
        readers: int,
        number: int = 0,
        events: Sequence[Sequence[str]] = (),
        copied: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Map what `SenderBuffer.describe` describes, as worker `number`.

        Raises: `TransferError` for memory that cannot be mapped, and for pieces of unknown tensors or without room.
        """
        self.groups = [tuple(map(Piece.from_wire, pieces)) for pieces in groups]
        self._window = MappedBuffer(slab, device, copied=copied)
        self._device = device
        self._half_bytes = self._window.bytes.numel() // 2
        self._turns = open_shared_memory(turns, _CPU).view(torch.int64).numpy()
        self._sender = Path(f"/proc/{turns['pid']}")
        self._place = _FIRST_READER + number % readers  # a replica's workers are numbered after those of others
        self._claim(self._place + readers)
        self._deadline_s = deadline_s
        self._events = [
            [torch.cuda.Event.from_ipc_handle(device, bytes.fromhex(handle)) for handle in pair] for pair in events
        ]
        self.tensors = [self._views(index, dtypes) for index in range(len(self.groups))]
        """The pieces of each group by the keys of `keyed`, where they lie for this worker."""

    def take(self, index: int, read: Callable[[], None]) -> bool:
        """Let `read` queue copies out of a group once it is filled; false when another worker has failed before.

        Raises: `TransferError` when the sender has stopped or ended, or says nothing for too long; what `read` raises.
        The sender, and other workers, then wait no longer.
        """
        try:
            if not self._wait_filled(index + 1):
                return False
            _fence()
            start_bytes = index % 2 * self._half_bytes
            stream = torch.cuda.current_stream(self._device) if self._events else None
            if stream is not None:
                stream.wait_event(self._events[index % 2][0])
            self._window.refresh(start_bytes, start_bytes + self._half_bytes)
            read()
            if stream is not None:
                self._events[index % 2][1].record(stream)
            else:
                wait_for_queued(self._device)
            _fence()
            self._turns[self._place] = index + 1
        except BaseException:
            self._turns[_STOPPED] = _BY_READER
            raise
        return True

    def _claim(self, place: int) -> None:
        """Raise `TransferError` where another worker counts at the same place: a half would be filled too early."""
        other = int(self._turns[place])
        if other not in (0, os.getpid()) and Path(f"/proc/{other}").exists():
            raise TransferError(
                f"processes {other} and {os.getpid()} both read the buffer as one worker: the sender counts fewer "
                "workers than there are, as of one replica of several"
            )
        self._turns[place] = os.getpid()

    def _wait_filled(self, count: int) -> bool:
        turns, sender, give_up_s, reason = self._turns, self._sender, time.monotonic() + self._deadline_s, None

        def gives_up() -> bool:
            nonlocal reason
            if turns[_STOPPED]:
                reason = "has stopped"
            elif not sender.exists():
                reason = "has ended"
            elif time.monotonic() > give_up_s:
                reason = f"has said nothing for {self._deadline_s:.0f} s"
            return reason is not None

        if _until(lambda: bool(turns[_FILLED] >= count), gives_up):
            return True
        if turns[_STOPPED] == _BY_READER:
            return False
        raise TransferError(f"the sender {reason} before group {count}")

    def _views(self, index: int, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        half = self._window.bytes[index % 2 * self._half_bytes :][: self._half_bytes]
        try:
            return {key: piece.within(half, dtypes[piece.name]) for key, piece in keyed(self.groups[index]).items()}
        except (KeyError, RuntimeError) as error:
            raise TransferError(f"group {index} is unknown, or not within its half of the buffer: {error}") from error


def keyed(pieces: Sequence[Piece]) -> dict[str, Piece]:
    """Pieces by keys of their own: a tensor may have several in a group."""
    return {f"{number}:{piece.name}": piece for number, piece in enumerate(pieces)}


def _until(holds: Callable[[], bool], gives_up: Callable[[], bool]) -> bool:
    """Poll until `holds` is true, or `gives_up`; returns the last value of `holds`."""
    spin_until_s = time.monotonic() + _SPIN_S
    while not holds():
        if time.monotonic() < spin_until_s:
            # gives up the GIL, which the thread needs that has called the workers
            time.sleep(0)
        elif gives_up():
            # once more: it may have come true in between
            return holds()
        else:
            time.sleep(_SLEEP_S)
    return True


def _fence() -> None:
    """Keep memory accesses of before and after apart. ARM reorders them, and Python has no barrier but its locks."""
    for _ in range(2):  # the release of the first time orders what came before, the second acquisition what follows
        with _lock:
            pass
