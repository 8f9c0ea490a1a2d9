"""Slices to engines elsewhere, from ranks of a trainer that are processes to ranks of engines that are threads."""

import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from colo.errors import TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.weights import exchange, meeting
from colo.weights.meeting import Meeting, Signals, in_thread, join, meet, meet_at
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.remote import PlanWords, RemoteSlices, SliceTaker, SliceTarget, Taken, what_is_taken
from tests.unit.weights.transports.test_slices import LAYOUTS, Net, engine_memory, is_same, loaded

CPU = torch.device("cpu")


def travelled(message):
    """A message after its way as JSON."""
    return type(message).from_wire(json.loads(json.dumps(message.to_wire())))


class Threads:
    """A `SliceTaker` of an engine whose `tp` ranks are threads of this process."""

    address, members = "127.0.0.1", 0

    def __init__(self, tp=1, dtype=torch.float32, deadline_s=60.0):
        self.deadline_s = deadline_s
        self.memories = [engine_memory(rank, tp, dtype) for rank in range(tp)]
        self.targets = []

    def taken(self, weights):
        source = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in weights.items()}
        for target in self.targets:
            target.let_go("asked anew")
        tp = len(self.memories)
        self.targets = []
        for rank, memory in enumerate(self.memories):
            plan = LoadPlan.record(
                lambda given, rank=rank, memory=memory: loaded(given, rank, tp, memory), source, memory
            )
            self.targets.append(SliceTarget(plan, CPU))
        return [[travelled(target.taken) for target in self.targets]]

    def plan(self, words, first):
        for number, target in enumerate(self.targets):
            target.plan(travelled(words), first + number)

    def meet(self, meeting, first, deadline_s):
        self.each(lambda number, target: target.meet(meeting, first + number, deadline_s))

    def begin(self):
        self.each(lambda _, target: target.begin())

    def take(self):
        self.each(lambda _, target: target.take())

    def sums(self):
        return [target.sums() for target in self.targets]

    def each(self, call):
        with ThreadPoolExecutor(len(self.targets)) as pool:
            list(pool.map(call, range(len(self.targets)), self.targets))

    def expected(self, whole):
        """What the memories have to hold of a whole model."""
        found = [{name: t.clone() for name, t in memory.items()} for memory in self.memories]
        for rank, memory in enumerate(found):
            loaded(ModuleSource(whole), rank, len(found), memory)
        return found

    def holds(self, whole):
        return all(map(is_same, self.memories, self.expected(whole)))


def models(shard=None, size=1, dtype=torch.float32):
    torch.manual_seed(0)
    whole = Net(dtype)
    torch.manual_seed(0)
    model = Net(dtype)
    if shard is not None:
        shard(model, size)
    return whole, model


def change(whole, model, step):
    with torch.no_grad():
        for one in (whole, model):
            for parameter in one.parameters():
                parameter.mul_(-1 - step)


def transport_to(taker, model, bucket_bytes=200):
    return RemoteSlices(
        ModuleSource(model), taker, device=CPU, why_not_shared="it is elsewhere", bucket_bytes=bucket_bytes
    )


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_of_an_engine_holds_what_its_loader_would_have_copied(ranks, layout, tp):
    size, shard = LAYOUTS[layout]

    def body(rank):
        whole, model = models(shard, size)
        taker = Threads(tp) if rank == 0 else SliceTaker()
        transport = transport_to(taker, model)
        held = []
        for step in range(3):
            sent_bytes = transport.transfer(step)
            transport.verify()
            held.append((rank > 0 or taker.holds(whole), transport.is_current()))
            change(whole, model, step)
            held.append(transport.is_current())
        transport.close()
        return held, transport.reason, sent_bytes

    found = ranks(body, size)
    received = sum(t.nbytes for memory in Threads(tp).memories for t in memory.values())
    assert sum(sent_bytes for _, _, sent_bytes in found) == received
    for held, reason, _ in found:
        assert held == [(True, True), False] * 3
        assert f"slices go from {size} of the trainer's ranks to {tp} of engines" in reason


@pytest.mark.parametrize(("ours", "theirs"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")])
def test_dtypes_are_converted_as_a_copy_converts_them(ranks, ours, theirs):
    def body(rank):
        whole, model = models(dtype=getattr(torch, ours))
        taker = Threads(2, getattr(torch, theirs))
        transport = transport_to(taker, model)
        transport.transfer()
        transport.verify()
        return taker.holds(whole)

    assert ranks(body, 1) == [True]


def test_engines_of_several_ranks_are_filled_at_once(ranks):
    size, shard = LAYOUTS["1-D"]

    def body(rank):
        whole, model = models(shard, size)
        taker = Threads(2 + rank)
        transport = transport_to(taker, model)
        transport.transfer()
        transport.verify()
        return taker.holds(whole), transport.reason.partition("; ")[2].partition(",")[0]

    assert ranks(body, 2) == [(True, "slices go from 2 of the trainer's ranks to 5 of engines")] * 2


def test_bytes_that_an_engine_does_not_hold_are_named_on_every_rank(ranks):
    size, shard = LAYOUTS["1-D"]

    def body(rank):
        _, model = models(shard, size)
        taker = Threads(2) if rank == 1 else SliceTaker()
        transport = transport_to(taker, model)
        transport.transfer()
        if rank == 1:
            taker.memories[1]["down"].view(torch.uint8)[3, 1] ^= 1
        with pytest.raises(TransferError, match="1 tensors differ after the transfer, down.weight for one"):
            transport.verify()
        return transport.is_current()

    assert ranks(body, 2) == [False, False]


@pytest.mark.parametrize("step", ["taken", "plan", "meet", "sums"])
def test_a_look_at_what_an_engine_holds_that_fails_spoils_no_later_transfer(ranks, step):
    size, shard = LAYOUTS["1-D"]

    def body(rank):
        whole, model = models(shard, size)
        taker = Threads(2) if rank == 0 else SliceTaker()
        transport = transport_to(taker, model)
        transport.transfer()
        change(whole, model, 1)
        transport.reconnect()

        def fail(*arguments):
            del taker.__dict__[step]
            raise TransferError("out of luck")

        if rank == 0:
            taker.__dict__[step] = fail
        with pytest.raises(TransferError, match="out of luck"):
            transport.is_current()
        transport.transfer()
        transport.verify()
        return rank > 0 or taker.holds(whole), transport.is_current()

    assert ranks(body, 2, limit_s=60) == [(True, True)] * 2


def interrupting(monkeypatch, ready=lambda: True):
    """Interrupt this process once, while it waits for others and `ready()`; the list gets when."""
    interrupted_s = []

    def interrupt(awaited):
        if not interrupted_s and ready():
            interrupted_s.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(meeting, "end_wait", interrupt)
    return interrupted_s


def test_an_interrupt_while_ranks_meet_is_told_to_the_others(ranks, monkeypatch):
    size, shard = LAYOUTS["1-D"]
    the_other_waits = multiprocessing.get_context("fork").Event()

    def body(rank):
        _, model = models(shard, size)
        taker, over = Threads(2) if rank == 0 else SliceTaker(), threading.Event()
        if rank == 0:
            taker.meet = lambda *arguments: over.wait(50)
            interrupted_s = interrupting(monkeypatch, the_other_waits.is_set)
        else:
            monkeypatch.setattr(meeting, "end_wait", lambda awaited: the_other_waits.set())
        with pytest.raises(KeyboardInterrupt if rank == 0 else TransferError):
            transport_to(taker, model)
        over.set()
        return rank or time.monotonic() - interrupted_s[0] < 15

    assert ranks(body, 2, limit_s=60) == [True, 1]


def test_an_interrupt_ends_a_transfer_that_waits(ranks, monkeypatch):
    def body(rank):
        _, model = models()
        taker, over = Threads(2), threading.Event()
        transport = transport_to(taker, model, bucket_bytes=100)
        taker.take = lambda: over.wait(50)  # and nothing is received
        interrupted_s = interrupting(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            transport.transfer()
        took_s = time.monotonic() - interrupted_s[0]
        over.set()
        del taker.take
        transport.transfer()
        transport.verify()
        return took_s < 15

    assert ranks(body, 1) == [True]


def test_a_store_that_does_not_answer_keeps_nobody_waiting():
    reader, writer = os.pipe()

    def hold():
        where, store = meet_at("127.0.0.1", CPU, 1, 60.0)
        os.write(writer, str(where.port).encode())
        time.sleep(60)
        del store

    held = multiprocessing.get_context("fork").Process(target=hold, daemon=True)
    held.start()
    signals = Signals(Meeting("127.0.0.1", int(os.read(reader, 9)), "held", 1, "gloo"), 60.0)
    os.kill(held.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    signals.give_up(ValueError("no patience"))
    assert time.monotonic() - started_s < 15
    with pytest.raises(TransferError, match="no patience"):
        signals.check()
    held.kill()
    held.join()


def test_what_was_under_way_in_a_group_that_is_given_up_has_not_arrived(ranks):
    def body(_):
        where, store = meet_at("127.0.0.1", CPU, 2, 30.0)
        asked = in_thread(lambda: meet(where, 1, CPU, 30.0))
        sender = meet(where, 0, CPU, 30.0, store=store)
        receiver = asked.result()
        (work,) = receiver.send_and_receive([], [(0, torch.zeros(4, dtype=torch.uint8))])
        receiver.give_up(TransferError("no more"))
        with pytest.raises(TransferError, match="the group was given up"):
            work.wait()
        for end in (receiver, sender):
            with pytest.raises(TransferError, match="given up"):
                end.give_up(TransferError("over"))
                end.settle(CPU)
        return True

    assert ranks(body, 1) == [True]


def test_nobody_listens_for_a_group_that_was_dropped_or_was_never_whole(ranks):
    def listeners():
        return [thread for thread in threading.enumerate() if thread.name.startswith("colo-signals")]

    def body(_):
        where, store = meet_at("127.0.0.1", CPU, 1, 30.0)
        end = join(where, 0, 30.0, store)
        (listening,) = listeners()
        del end
        listening.join(30)
        where, store = meet_at("127.0.0.1", CPU, 2, 1.0)
        with pytest.raises(RuntimeError):  # the other does not come
            join(where, 0, 1.0, store)
        for listening in listeners():
            listening.join(30)
        return listeners()

    assert ranks(body, 1) == [[]]


def test_ranks_without_an_engine_are_refused():
    _, model = models()
    with pytest.raises(Unsupported, match="no rank of the trainer has an engine that takes slices"):
        transport_to(SliceTaker(), model)


def test_a_buffer_that_an_engine_does_not_know_is_left_out_on_every_rank(ranks):
    size, shard = LAYOUTS["1-D"]

    def body(rank):
        whole, model = models()
        model.register_buffer("positions", torch.arange(3.0))
        shard(model, size)
        taker = Threads(2) if rank == 0 else SliceTaker()
        transport = transport_to(taker, model)
        for step in range(2):
            transport.transfer()
            transport.verify()
            change(whole, model, step)
            transport.reconnect()
        transport.transfer()
        transport.verify()
        return rank > 0 or taker.holds(whole)

    assert ranks(body, 2) == [True, True]


@pytest.mark.parametrize("step", ["taken", "plan", "meet", "begin", "take", "sums"])
def test_a_failure_of_an_engine_is_told_on_every_rank_and_the_next_transfer_goes_through(ranks, step):
    size, shard = LAYOUTS["1-D"]

    def body(rank):
        whole, model = models(shard, size)
        taker = Threads(2) if rank == 0 else SliceTaker()
        transport = transport_to(taker, model)

        def transferred():
            transport.transfer()
            transport.verify()

        transferred()
        change(whole, model, 1)
        transport.reconnect()  # so that every step is taken

        def fail(*arguments):
            del taker.__dict__[step]
            raise TransferError("out of luck")

        if rank == 0:
            taker.__dict__[step] = fail
        started_s = time.monotonic()
        with pytest.raises(TransferError, match="out of luck"):
            transferred()
        took_s = time.monotonic() - started_s
        transferred()
        return took_s < 15, rank > 0 or taker.holds(whole)

    assert ranks(body, 2, limit_s=60) == [(True, True)] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_a_rank_is_told_on_every_other(ranks, failing, monkeypatch):
    size, shard = LAYOUTS["1-D"]

    def body(rank):
        whole, model = models(shard, size)
        taker = Threads(2) if rank == 0 else SliceTaker()
        transport = transport_to(taker, model)
        transport.transfer()
        change(whole, model, 1)

        def fail(*arguments):
            raise ValueError("no memory for it")

        with monkeypatch.context() as broken:
            if rank == failing:
                broken.setattr(exchange, "_pack", fail)
            with pytest.raises((TransferError, ValueError), match="no memory for it"):
                transport.transfer()
        transport.transfer()
        transport.verify()
        return rank > 0 or taker.holds(whole)

    assert ranks(body, 2) == [True, True]


def test_an_engine_that_receives_nothing_is_waited_for_no_longer_than_its_deadline(ranks):
    size, shard = LAYOUTS["1-D"]

    def body(rank):
        whole, model = models(shard, size)
        taker = Threads(2, deadline_s=8.0) if rank == 0 else SliceTaker()
        transport = transport_to(taker, model, bucket_bytes=100)
        over = threading.Event()

        def wait():
            over.wait(60)
            raise TransferError("it has waited")

        if rank == 0:
            taker.take = wait
            threading.Timer(12, over.set).start()
        started_s = time.monotonic()
        with pytest.raises(TransferError, match="broke off at bucket|it has waited|was given up"):
            transport.transfer()
        waited_s = time.monotonic() - started_s
        taker.__dict__.pop("take", None)
        transport.transfer()
        transport.verify()
        return 4 < waited_s < 30, rank > 0 or taker.holds(whole)

    assert ranks(body, 2, limit_s=60) == [(True, True), (True, True)]


def test_weights_that_an_engine_takes_whole_or_not_at_all_are_refused():
    _, model = models()

    class Refuses(SliceTaker):
        def __init__(self, *taken):
            self.found = [list(taken)]

        def taken(self, weights):
            return self.found

    with pytest.raises(Unsupported, match="rank 1 of the engine takes whole weights: it computes"):
        what_is_taken(ModuleSource(model), Refuses(Taken((), {}, None), Taken((), {}, "it computes")))
    left_out = {"k.weight": [(0, (3, 6), (6, 1))]}
    with pytest.raises(TransferError, match=r"takes 18 of the 54 elements of k.weight"):
        what_is_taken(ModuleSource(model), Refuses(Taken((), left_out, None), Taken((), left_out, None)))


def test_an_engine_whose_loader_computes_says_why_it_takes_no_slices():
    source = dict(ModuleSource(nn.Linear(3, 3)))
    target = SliceTarget(LoadPlan.of(source, fallbacks={"bias": "it is scaled"}), CPU)
    assert (target.taken.slices, target.taken.refusal) == ((), "bias: it is scaled")
    with pytest.raises(TransferError, match="no slices have been planned with this engine"):
        target.begin()


def test_words_that_are_no_plan_are_refused_with_the_reason():
    for kind, words in ((PlanWords, {"held": {"x": []}}), (Taken, {"slices": [["w"]], "left_out": {}})):
        with pytest.raises(TransferError, match=kind.__name__):
            kind.from_wire(words)
