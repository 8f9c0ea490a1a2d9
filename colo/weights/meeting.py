"""Process groups of trainers' ranks with those of engines elsewhere. Nothing of torch's own groups is touched.

A group is torch's backend itself, NCCL between GPUs and gloo between CPUs, and a key of the store that its ranks have
met at: whoever gives up sets it, so that no other rank waits for the deadline.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
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
_SAID_WITHIN_S = 2.0
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


def join(meeting: Meeting, rank: int, deadline_s: float, store: Any = None, signals: Signals | None = None) -> GroupEnd:
    """A rank's end of a group. `store` is that of who holds it. Raises: `RuntimeError` as torch does.

    The names of stores are nested as `init_process_group` of torch nests them, by which an SGLang server joins.
    """
    deadline = timedelta(seconds=deadline_s)
    signals = Signals(meeting, deadline_s) if signals is None else signals
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
    options._timeout = 2 * deadline
    with _without_teardown():
        group = distributed.ProcessGroupNCCL(nested, rank, meeting.size, options)
    return GroupEnd(group, store, signals, deadline_s)


@contextmanager
def _without_teardown() -> Iterator[None]:
    """Make a group that does not end the process when another rank has died: colo gives the group up instead."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Signals:
    """Words between the ranks of a group, through the store that they met at: that one has given up, and why.

    No call waits for the store: it may be held by a process that has stopped. A thread asks it, as long as somebody
    holds these.
    """

    def __init__(self, meeting: Meeting, deadline_s: float) -> None:
        """Connect. Raises: `RuntimeError` as torch does."""
        # a connection of its own: one on which somebody waits answers nobody
        self._store = store_of(meeting, deadline_s)
        self.why: str | None = None
        """The reason why some rank has given the group up, as far as it is known here; `None` if none has."""

        self._said = threading.Event()
        self._saying: str | None = None
        self._num_listening, self._is_over = 0, False
        self._wake = threading.Event()
        weakref.finalize(self, self._wake.set).atexit = False
        listening = (weakref.ref(self), self._wake)
        threading.Thread(target=_listen, args=listening, name=f"colo-signals-{meeting.name}", daemon=True).start()

    def check(self) -> None:
        """Raise `TransferError` if some rank is known to have given the group up."""
        if self.why is not None:
            raise TransferError(f"the transfer was given up: {self.why}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which `why` is looked for."""
        self._num_listening += 1
        self._wake.set()
        try:
            yield
        finally:
            self._num_listening -= 1

    def give_up(self, why: BaseException) -> None:
        """Let every rank know, if no other was faster. Waits for a moment until that has been said."""
        self._saying = (str(why) or type(why).__name__)[:1000]
        self._wake.set()
        if not self._said.wait(_SAID_WITHIN_S):
            self.why = self.why or self._saying

    def close(self) -> None:
        """End the thread."""
        self._is_over = True
        self._wake.set()

    def ask(self) -> bool:
        """Say what is to be said, and look for `why`. False once there is no more to come."""
        try:
            if self._saying is not None:  # the first reason stays
                self._store.compare_set(_GIVEN_UP, "", self._saying)
            if self._store.check([_GIVEN_UP]):
                self.why = self._store.get(_GIVEN_UP).decode()
        except RuntimeError:
            self.why = self._saying or "the rank that has made the group has ended, or let go of it"
        if self.why is None and not self._is_over:
            return True
        self._said.set()
        return False

    @property
    def patience_s(self) -> float | None:
        """Seconds until the next look; `None` while nobody listens."""
        return _LOOK_AFTER_S if self._num_listening else None


def _listen(held: weakref.ref[Signals], wake: threading.Event) -> None:
    """Ask until there is no more to come, or nobody holds the signals any more."""
    while (signals := held()) is not None and signals.ask():
        patience_s = signals.patience_s
        del signals
        wake.wait(patience_s)
        wake.clear()


class GroupEnd:
    """One rank's end of a group. One in which something has failed is not used again: see `give_up`."""

    def __init__(self, group: Any, store: Any, signals: Signals, deadline_s: float) -> None:
        self._store = store  # which others read as long as this end is there
        self._group: Any = group
        self._signals = signals
        self._deadline_s = deadline_s
        self.flying: list[_Work] = []
        """Works that have begun, and are not waited for yet."""

        self._is_connected = False  # NCCL makes its communicator in the first operation, which waits for all ranks

    @property
    def is_whole(self) -> bool:
        """True until it is given up."""
        return self._group is not None

    def broadcast(self, whole: torch.Tensor) -> None:
        """Begin to send what rank 0 has in `whole`, uint8, or to receive it there."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._begun(self._whole_group().broadcast([whole], options))

    def connect(self, device: torch.device) -> None:
        """Wait for all ranks of the group. A collective. Raises: `TransferError` where one does not come."""
        options = distributed.AllreduceOptions()
        self._begun(self._whole_group().allreduce([torch.zeros(1, device=device)], options))
        self.settle(device)

    def send_and_receive(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[_Work]:
        """Begin to send memory to ranks of the group, and to receive from them. Raises: `RuntimeError`, as torch."""
        group = self._whole_group()
        if not group.supports_coalescing or not (sends or receives):
            works = [group.send([data], rank, 0) for rank, data in sends]
            works += [group.recv([data], rank, 0) for rank, data in receives]
            return [self._begun(work) for work in works]
        group._start_coalescing()
        try:
            for rank, data in sends:
                group.send([data], rank, 0)
            for rank, data in receives:
                group.recv([data], rank, 0)
        except BaseException:
            with suppress(RuntimeError):  # else this thread's other groups would queue behind it, and never begin
                group._end_coalescing()
            raise
        return [self._begun(group._end_coalescing())]

    def settle(self, device: torch.device) -> None:
        """Wait until all that has begun has ended. Raises: `TransferError` where it has failed, or another gave up."""
        try:
            for work in list(self.flying):
                work.wait()
            self._whole_group()  # works of one that is given up have ended, somehow
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # of works that have ended, and copies
        except RuntimeError as error:
            self._signals.check()
            raise TransferError(f"a transfer between ranks failed: {error}") from error

    def wait_for(self, work: Any) -> None:
        """Wait for a work of torch's, on a GPU in the present stream too. Raises: `RuntimeError`, as torch does.

        And `TransferError` where another rank has given up, or nothing has come for the deadline.
        """
        if _is_nccl(self._group):
            # torch makes the stream wait and not this process, and a kernel of NCCL waits for ever
            give_up_s = time.monotonic() + self._deadline_s
            with self._signals.listening():
                while not work.is_completed():
                    self._signals.check()
                    if time.monotonic() > give_up_s:
                        raise TransferError(f"other ranks have not come for {self._deadline_s:g} s")
                    time.sleep(_LOOK_AFTER_S / 1000)
            self._signals.check()  # what has ended may have been ended
        work.wait()

    def tell(self, why: BaseException) -> None:
        """Let every rank give the group up, this one too: none waits for another any more."""
        self._signals.give_up(why)
        self._disconnect()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block in which this rank waits no longer once another has given the group up."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_LOOK_AFTER_S):
                if self._signals.why is not None:
                    self._disconnect()
                    return

        watching = threading.Thread(target=watch, name="colo-watch", daemon=True)
        watching.start()
        try:
            with self._signals.listening():
                yield
        finally:
            over.set()
            watching.join(_SAID_WITHIN_S)

    def give_up(self, why: E) -> E | TransferError:
        """End what is under way, here and on every other rank, and let go of the group. Idempotent.

        Returns the error to raise: `why`, or that another rank had given the group up before.
        """
        if self._group is None:
            return why
        first = self._signals.why
        self.tell(why)
        self._signals.close()
        # torch waits for what is under way where a group is dropped, and all of Python with it. Nothing else holds them
        # then: what a forked process finds to collect it would wait for with threads that it has not
        threading.Thread(target=_outlast, args=(self.flying, self._group), daemon=True).start()
        self.flying, self._group = [], None
        return why if first is None else TransferError(f"the transfer was given up: {first}")

    def _whole_group(self) -> Any:
        if self._group is None:
            raise TransferError(
                "the group with engines elsewhere has been given up: the next publication makes another"
            )
        return self._group

    def _begun(self, work: Any) -> _Work:
        self._is_connected = True
        self.flying.append(_Work(self, work))
        return self.flying[-1]

    def _disconnect(self) -> None:
        """Make every wait for another rank fail."""
        group = self._group
        if group is None:
            return
        if _is_nccl(group):
            if self._is_connected:
                with suppress(RuntimeError):
                    group.abort()
            return
        # gloo closes a connection at which a wait has been in vain, and every other wait there fails
        for other in set(range(group.size())) - {group.rank()}:
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], other, _NEVER_SENT).wait(_AT_ONCE)


def _is_nccl(group: Any) -> bool:
    return group is not None and group._get_backend_name() == "nccl"


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
        signals = Signals(meeting, deadline_s)
    except RuntimeError as error:
        raise TransferError(f"rank {rank} cannot reach {where}: {error}") from error

    def join_and_connect() -> GroupEnd:
        end = join(meeting, rank, deadline_s, store, signals)
        try:
            end.connect(device)
        except BaseException as error:
            end.give_up(error)
            raise
        return end

    joining = in_thread(join_and_connect, device)  # until the deadline at the latest: torch waits for all others
    calls = [*others, joining]
    try:
        with signals.listening():
            while True:
                failed = [raised for call in calls if call.done() and (raised := call.exception()) is not None]
                if failed:
                    signals.give_up(failed[0])
                if (why := signals.why) is not None or failed:
                    raise TransferError(f"{where} was not made: {why or failed[0]}") from next(iter(failed), None)
                if all(call.done() for call in calls):
                    return joining.result()
                wait(calls, timeout=_LOOK_AFTER_S, return_when=FIRST_EXCEPTION)
                end_wait("other ranks")
    except BaseException as error:
        signals.give_up(error)
        raise


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

    def __init__(self, end: GroupEnd, work: Any) -> None:
        self._end, self._work = end, work

    def wait(self) -> None:
        """Wait until it has ended. Raises: as `GroupEnd.wait_for`; `TransferError` once the group is given up."""
        work, self._work = self._work, None
        if self in self._end.flying:
            self._end.flying.remove(self)
        if work is None:
            raise TransferError("the group was given up, and what has arrived is unknown")
        self._end.wait_for(work)


def _outlast(works: list[_Work], group: object) -> None:
    """Hold a group until what is under way has ended, by its deadline at the latest."""
    while works:
        with suppress(RuntimeError, TransferError):
            works.pop().wait()


def indices(ranks: Sequence[int]) -> Mapping[int, int]:
    """The place of each rank of a plan in the group that they meet in."""
    return {rank: place for place, rank in enumerate(sorted(ranks))}
