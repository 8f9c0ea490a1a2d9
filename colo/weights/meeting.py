"""Process groups of trainers' ranks with those of engines elsewhere. Nothing of torch's own groups is touched.

A group is torch's backend itself, NCCL between GPUs and gloo between CPUs, and a key of the store that its ranks have
met at: whoever gives up sets it, so that no other rank waits for the deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from colo.errors import TransferError
from colo.memory.uninterrupted import end_wait

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_GIVEN_UP = "colo-given-up"
_LOOK_AFTER_S = 0.05
_NEVER_SENT, _AT_ONCE = 1, timedelta(milliseconds=1)  # a tag; a patience


@dataclass(frozen=True, slots=True)
class Meeting:
    """A place and a name by which the ranks of a group find one another."""

    address: str
    port: int
    name: str
    size: int  # number of ranks
    backend: str


def meet_at(address: str, device: torch.device, size: int, deadline_s: float) -> tuple[Meeting, Any]:
    """Make a place where `size` ranks with devices of one kind meet, and the store that it is held by.

    `address` is this machine's, as the others reach it.
    """
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        address, 0, size, is_master=True, timeout=timedelta(seconds=deadline_s), wait_for_workers=False
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    return Meeting(address, store.port, f"colo-{secrets.token_hex(4)}", size, backend), store


def store_of(meeting: Meeting, deadline_s: float) -> Any:
    """A connection to the store of a meeting. Raises: `RuntimeError` as torch does."""
    return distributed.TCPStore(  # type: ignore[attr-defined]
        meeting.address,
        meeting.port,
        meeting.size,
        is_master=False,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
    )


def join(meeting: Meeting, rank: int, deadline_s: float, store: Any = None) -> GroupEnd:
    """A rank's end of a group. `store` is that of who holds it. Raises: `RuntimeError` as torch does.

    The names of stores are nested as `init_process_group` of torch nests them, by which an SGLang server joins.
    """
    deadline = timedelta(seconds=deadline_s)
    signals = store_of(meeting, deadline_s)
    # where one backend serves every kind of device, it is made once, under the name of the first
    kind = next(
        iter(distributed_c10d.BackendConfig(distributed_c10d.Backend(meeting.backend)).get_device_backend_map())
    )
    store = nested = store_of(meeting, deadline_s) if store is None else store
    for name in (meeting.name, f"{meeting.name}/", f"{kind}/"):
        nested = distributed_c10d.PrefixStore(name, nested)
    if meeting.backend == "gloo":
        group: Any = distributed.ProcessGroupGloo(nested, rank, meeting.size, timeout=deadline)
        return GroupEnd(group, store, signals, deadline_s)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = 2 * deadline  # torch ends the process at this one; ours comes before
    return GroupEnd(distributed.ProcessGroupNCCL(nested, rank, meeting.size, options), store, signals, deadline_s)


def give_up(signals: Any, why: BaseException) -> None:
    """Let every rank of a group know that one has given it up; the first reason stays. `signals`: a `store_of`."""
    with suppress(RuntimeError):  # who has held the store may be gone
        signals.compare_set(_GIVEN_UP, "", (str(why) or type(why).__name__)[:1000])


def why_given_up(signals: Any) -> str | None:
    """The reason why some rank has given a group up, `None` if none has."""
    try:
        return str(signals.get(_GIVEN_UP).decode()) if signals.check([_GIVEN_UP]) else None
    except RuntimeError:
        return "the rank that has made the group has ended, or let go of it"


class GroupEnd:
    """One rank's end of a group. One in which something has failed is not used again: see `give_up`."""

    def __init__(self, group: Any, store: Any, signals: Any, deadline_s: float) -> None:
        """`signals` is a connection of its own to the store: one that waits answers nobody."""
        self._store = store  # which others read as long as this end is there
        self._group: Any = group
        self._signals = signals
        self._deadline_s = deadline_s
        self._flying: list[_Work] = []
        self._is_connected = False  # NCCL makes its communicator in the first operation, which waits for all ranks

    def broadcast(self, whole: torch.Tensor) -> None:
        """Begin to send what rank 0 has in `whole`, uint8, or to receive it there."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._begun(self._group.broadcast([whole], options))

    def connect(self, device: torch.device) -> None:
        """Wait for all ranks of the group. A collective. Raises: `TransferError` where one does not come."""
        options = distributed.AllreduceOptions()
        self._begun(self._group.allreduce([torch.zeros(1, device=device)], options))
        self.settle(device)

    def send_and_receive(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Begin to send memory to ranks of the group, and to receive from them. Raises: `RuntimeError`, as torch."""
        group = self._group
        if not group.supports_coalescing or not (sends or receives):
            works = [group.send([data], rank, 0) for rank, data in sends]
            works += [group.recv([data], rank, 0) for rank, data in receives]
            return [self._begun(work) for work in works]
        group._start_coalescing()
        for rank, data in sends:
            group.send([data], rank, 0)
        for rank, data in receives:
            group.recv([data], rank, 0)
        return [self._begun(group._end_coalescing())]

    def _begun(self, work: Any) -> _Work:
        self._is_connected = True
        self._flying.append(_Work(work, self._flying))
        return self._flying[-1]

    def settle(self, device: torch.device) -> None:
        """Wait until all that has begun has ended. Raises: `TransferError` where it has failed, or another gave up."""
        give_up_s = time.monotonic() + self._deadline_s
        try:
            for work in list(self._flying):
                work.wait()
            if device.type == "cuda":
                # torch has made the stream wait and not this process: a kernel of NCCL waits for ever
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                look_s = time.monotonic() + _LOOK_AFTER_S
                while not event.query():
                    if (now_s := time.monotonic()) > look_s:
                        look_s = now_s + _LOOK_AFTER_S
                        self.check()
                    if now_s > give_up_s:
                        raise TransferError(f"other ranks have not come for {self._deadline_s:g} s")
                    time.sleep(_LOOK_AFTER_S / 1000)
                self.check()  # what has ended may have been ended
        except RuntimeError as error:
            self.check()
            raise TransferError(f"a transfer between ranks failed: {error}") from error

    def check(self) -> None:
        """Raise `TransferError` if some rank has given the group up."""
        if (why := why_given_up(self._signals)) is not None:
            raise TransferError(f"the transfer was given up: {why}")

    def tell(self, why: BaseException) -> None:
        """Let every rank give the group up, this one too: none waits for another any more."""
        give_up(self._signals, why)
        self._disconnect()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block in which this rank waits no longer once another has given the group up."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_LOOK_AFTER_S):
                try:
                    self.check()
                except TransferError:
                    self._disconnect()
                    return

        watching = threading.Thread(target=watch, name="colo-watch", daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()

    def give_up(self, why: E) -> E | TransferError:
        """End what is under way, here and on every other rank, and let go of the group. Idempotent.

        Returns the error to raise: `why`, or that another rank had given the group up before.
        """
        if self._group is None:
            return why
        first = why_given_up(self._signals)
        self.tell(why)
        # torch waits for what is under way where a group is dropped, and all of Python with it
        threading.Thread(target=_outlast, args=(list(self._flying), self._group), daemon=True).start()
        self._group = None
        return why if first is None else TransferError(f"the transfer was given up: {first}")

    def _disconnect(self) -> None:
        """Make every wait for another rank fail."""
        group = self._group
        if group is None:
            return
        if group._get_backend_name() == "nccl":
            if self._is_connected:
                with suppress(RuntimeError):
                    group.abort()
            return
        # gloo closes a connection at which a wait has been in vain, and every other wait there fails
        for other in set(range(group.size())) - {group.rank()}:
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], other, _NEVER_SENT).wait(_AT_ONCE)

    @property
    def is_whole(self) -> bool:
        """True until it is given up."""
        return self._group is not None


def meet(
    meeting: Meeting,
    rank: int,
    device: torch.device,
    deadline_s: float,
    *,
    store: Any = None,
    others: Sequence[Future[Any]] = (),
) -> GroupEnd:
    """Join a group, and wait until all of its ranks have, and `others`, calls that make some of them, have ended.

    Raises: `TransferError`, on every rank as soon as it fails on one.
    """
    where = f"the group at {meeting.address}:{meeting.port}"
    try:
        signals = store_of(meeting, deadline_s)
    except RuntimeError as error:
        raise TransferError(f"rank {rank} cannot reach {where}: {error}") from error

    def join_and_connect() -> GroupEnd:
        end = join(meeting, rank, deadline_s, store)
        end.connect(device)
        return end

    joining = in_thread(join_and_connect, device)  # until the deadline at the latest: torch waits for all others
    calls = [*others, joining]
    while True:
        failed = [raised for call in calls if call.done() and (raised := call.exception()) is not None]
        if failed:
            give_up(signals, failed[0])
        if (why := why_given_up(signals)) is not None or failed:
            raise TransferError(f"{where} was not made: {why or failed[0]}") from next(iter(failed), None)
        if all(call.done() for call in calls):
            return joining.result()
        wait(calls, timeout=_LOOK_AFTER_S, return_when=FIRST_EXCEPTION)
        end_wait("other ranks")


def in_thread(call: Callable[[], T], device: torch.device | None = None) -> Future[T]:
    """Begin a call in a thread, in the present stream of `device`. Python does not wait for it as it ends."""
    asked: Future[T] = Future()
    stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None

    def run() -> None:
        try:
            if stream is not None:
                torch.cuda.set_device(device)
            with torch.cuda.stream(stream):  # of none it does nothing
                asked.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            asked.set_exception(error)

    threading.Thread(target=run, name="colo-beside", daemon=True).start()
    return asked


def result(asked: Future[T], awaited: str) -> T:
    """Wait for a call, and return or raise what it has. `awaited` is what it waits for, in words."""
    while not wait([asked], timeout=_LOOK_AFTER_S).done:
        end_wait(awaited)
    return asked.result()


class _Work:
    """A work of torch's, which is waited for once: a second wait for what gloo has sent never ends."""

    def __init__(self, work: Any, flying: list[_Work]) -> None:
        self._work, self._flying = work, flying

    def wait(self) -> None:
        """Wait until it has ended, on a GPU in the present stream. Raises: `RuntimeError`, as torch does."""
        self._flying.remove(self)
        self._work.wait()


def _outlast(works: Sequence[_Work], group: object) -> None:
    """Hold a group until what is under way has ended, by its deadline at the latest."""
    for work in works:
        with suppress(RuntimeError, ValueError):  # somebody else waits for it
            work.wait()


def indices(ranks: Sequence[int]) -> Mapping[int, int]:
    """The place of each rank of a plan in the group that they meet in."""
    return {rank: place for place, rank in enumerate(sorted(ranks))}
