"""The shared buffer: how tensors are cut into groups, and turns between a sender and readers, also one that is gone."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import TransferError
from colo.memory.share import SharedMemory, spec_of
from colo.memory.specs import DTYPE_BYTES, TensorSpec
from colo.weights.boxes import Box
from colo.weights.transports import buffer as buffers
from colo.weights.transports.buffer import ALIGNMENT_BYTES, Piece, ReaderBuffer, SenderBuffer, plan_groups

CPU = torch.device("cpu")
SHAPES = st.one_of(
    st.just(()),
    st.integers(0, 3000).map(lambda n: (n,)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 300)),
)


@st.composite
def problems(draw):
    """Tensors of any dtype and shape, with a legal size of a half."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), max_size=12))
    specs = [TensorSpec(f"w{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    return specs, {"half_bytes": draw(st.integers(ALIGNMENT_BYTES, 8000))}


def mebi(name, num, dtype="uint8"):
    return TensorSpec(name, dtype, (num << 20,))


def num_bytes(piece, specs):
    (dtype,) = (spec.dtype for spec in specs if spec.name == piece.name)
    return piece.box.num_elements * DTYPE_BYTES[dtype]


@settings(max_examples=150)
@given(problems())
def test_every_element_is_in_one_piece_and_tensors_keep_their_order(problem):
    specs, options = problem
    pieces = [piece for group in plan_groups(specs, **options) for piece in group]
    assert list(dict.fromkeys(piece.name for piece in pieces)) == [spec.name for spec in specs]
    for spec in specs:
        counts = torch.zeros(spec.shape, dtype=torch.uint8)
        for piece in pieces:
            if piece.name == spec.name:
                piece.of(counts).add_(1)
        assert counts.eq(1).all()


@settings(max_examples=150)
@given(problems())
def test_pieces_are_aligned_disjoint_and_inside_the_half(problem):
    specs, options = problem
    for group in plan_groups(specs, **options):
        end = 0
        for piece in group:
            assert piece.offset_bytes % ALIGNMENT_BYTES == 0 and piece.offset_bytes >= end
            end = piece.offset_bytes + num_bytes(piece, specs)
        assert end <= options["half_bytes"]


def test_a_tensor_that_fits_is_one_piece_and_begins_a_group_where_it_lacks_room():
    groups = plan_groups([mebi("a", 3), mebi("b", 2), mebi("c", 2)], half_bytes=4 << 20)
    assert [[(piece.name, piece.offset_bytes) for piece in group] for group in groups] == [
        [("a", 0)],
        [("b", 0), ("c", 2 << 20)],
    ]


def test_a_larger_one_is_cut_by_rows_and_what_follows_uses_the_room_that_is_left():
    groups = plan_groups([TensorSpec("w", "float32", (10, 100)), mebi("b", 0)], half_bytes=1024)
    assert [[piece.box.shape for piece in group] for group in groups] == [[(2, 100)]] * 4 + [[(2, 100), (0,)]]


def test_a_half_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="half a buffer of 255 bytes cannot hold one aligned block of 256"):
        plan_groups([], half_bytes=ALIGNMENT_BYTES - 1)
    assert plan_groups([], half_bytes=ALIGNMENT_BYTES) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [({"offset": None}, "not iterable"), ({"offset_bytes": "x"}, "invalid literal"), ({"shape": [2, 2]}, "")],
)
def test_whatever_is_no_piece_is_refused_where_it_arrives(change, words):
    piece = Piece(name="w", box=Box((0,), (2,)), offset_bytes=0)
    assert Piece.from_wire(json.loads(json.dumps(piece.to_wire()))) == piece
    if words:
        with pytest.raises(TransferError, match=f"what arrived is no Piece: .*{words}"):
            Piece.from_wire(piece.to_wire() | change)


# ---- turns -----------------------------------------------------------------------------------------------------------


def sender(count, readers=1):
    """A buffer of `count` groups of one word each."""
    specs = [TensorSpec(f"t{n}", "float64", (ALIGNMENT_BYTES // 8,)) for n in range(count)]
    return SenderBuffer(specs, CPU, half_bytes=ALIGNMENT_BYTES, readers=readers)


def reader(buffer, number=0, **options):
    dtypes = {piece.name: torch.float64 for group in buffer.groups for piece in group}
    return ReaderBuffer(CPU, dtypes, number=number, **json.loads(json.dumps(buffer.describe())), **options)


def contents(count):
    return {f"t{n}": torch.full((ALIGNMENT_BYTES // 8,), float(n)) for n in range(count)}


def running(work):
    """A future of `work`, which begins now."""
    future = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


@settings(max_examples=25)
@given(readers=st.integers(1, 3), groups=st.integers(0, 12), pauses=st.lists(st.integers(0, 2), max_size=12))
def test_every_reader_sees_every_group_in_order_and_none_is_overwritten_before(readers, groups, pauses):
    buffer, seen = sender(groups, readers), [[] for _ in range(readers)]

    def read(number):
        mine = reader(buffer, number)
        for index in range(groups):

            def look(index=index):
                if index < len(pauses) and pauses[index] == number:
                    time.sleep(1e-3)
                (tensor,) = mine.tensors[index].values()
                seen[number].append((float(tensor[0]), float(tensor[-1])))

            assert mine.take(index, look)

    def read_all():
        threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for verify in (True, False):
        sums = buffer.send(contents(groups), lambda: running(read_all), verify=verify)
        assert (sums is None) == (not verify)
        if verify:
            assert sums == buffer.checksums(contents(groups))
    assert seen == [[(float(n), float(n)) for n in range(groups)] * 2] * readers
    buffer.close()


def test_readers_that_end_are_not_waited_for():
    buffer = sender(5, readers=2)
    mine, seen = reader(buffer, 3), []  # of a larger group of workers, of which this sender counts two

    def one_ends():
        for index in range(2):
            mine.take(index, partial(seen.append, index))

    failed = Future()
    failed.set_exception(KeyError("no more"))
    with pytest.raises(KeyError, match="no more"):
        buffer.send(contents(5), lambda: failed, verify=False)
    buffer.send(contents(5), lambda: running(one_ends), verify=False)
    assert seen == [0, 1]


def test_two_workers_that_would_count_as_one_are_refused():
    buffer = sender(5, readers=2)
    reader(buffer, 1)
    reader(buffer, 3)  # the same process again
    place = buffer._turns.bytes.view(torch.int64)
    place[-1] = os.getppid()
    with pytest.raises(TransferError, match=f"processes {os.getppid()} and {os.getpid()} both read the buffer as one"):
        reader(buffer, 1)
    place[-1] = 2**30  # has ended
    reader(buffer, 1)
    buffer.close()


@pytest.fixture
def events(monkeypatch):
    """The present GPU, and the devices that events have come to belong to, as CUDAEvent.h says."""
    now, made = [torch.device("cuda", 0)], []

    @contextmanager
    def entered(device):
        now.append(device)
        yield
        now.pop()

    class Event:
        def __init__(self, *, interprocess):
            self.device = None

        def ipc_handle(self):
            if self.device is None:
                self.device = now[-1]
                made.append(self.device)
            return b"handle"

        def record(self, stream):
            assert (self.device or stream.device) == stream.device

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream = SimpleNamespace(device=torch.device("cuda", 1), wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(buffers, "SharedMemory", lambda size_bytes, place: SharedMemory(size_bytes, CPU))
    return made


def test_events_belong_to_the_buffers_gpu_whichever_is_the_current_one(events):
    weights = {"w": torch.randn(64)}
    sender = SenderBuffer([spec_of("w", weights["w"])], torch.device("cuda", 1), half_bytes=4096, readers=1)
    assert sender.describe()["events"] == [[b"handle".hex()] * 2] * 2
    assert events == [torch.device("cuda", 1)] * 4
    taken = Future()
    taken.set_result(None)
    sender.send(weights, lambda: taken, verify=False)
    sender.close()


def test_closed_memory_is_gone():
    buffer = sender(1)
    description = buffer.describe()
    buffer.close()
    with pytest.raises(TransferError):
        ReaderBuffer(CPU, {"t0": torch.float64}, **description)


def test_a_reader_that_fails_lets_the_sender_and_the_others_go():
    buffer = sender(5, readers=2)
    one, other = (reader(buffer, number) for number in range(2))
    outcomes = []

    def fails():
        raise ValueError("stumbled")

    def both():
        def read_on():
            outcomes.extend(other.take(index, lambda: None) for index in range(3))

        thread = threading.Thread(target=read_on)
        thread.start()
        try:
            one.take(0, fails)
        finally:
            thread.join()

    with pytest.raises(ValueError, match="stumbled"):
        buffer.send(contents(5), lambda: running(both), verify=False)
    assert outcomes[-1] is False


def test_a_sender_that_stops_is_not_waited_for_and_what_it_has_filled_is_read():
    buffer = sender(5)
    mine = reader(buffer)
    seen = []

    def read():
        for index in range(5):
            mine.take(index, lambda index=index: seen.append(index))

    fill = buffer._fill

    def broken(index, tensors):
        if index == 3:
            raise MemoryError("stumbled")
        fill(index, tensors)

    buffer._fill = broken
    future = []
    with pytest.raises(MemoryError, match="stumbled"):
        buffer.send(contents(5), lambda: future.append(running(read)) or future[0], verify=False)
    with pytest.raises(TransferError, match="the sender has stopped before group 4"):
        future[0].result()
    assert seen == [0, 1, 2]


def test_a_sender_that_says_nothing_is_waited_for_until_the_deadline():
    mine = reader(buffer := sender(1), deadline_s=0.05)
    with pytest.raises(TransferError, match="the sender has said nothing for 0 s before group 1"):
        mine.take(0, lambda: None)
    buffer.close()


def test_a_sender_whose_process_has_ended_is_not_waited_for():
    code = """
import json, sys, torch
from colo.memory.specs import TensorSpec
from colo.weights.transports.buffer import SenderBuffer
buffer = SenderBuffer([TensorSpec("t0", "float64", (1,))], torch.device("cpu"), half_bytes=256, readers=1)
print(json.dumps(buffer.describe()), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    mine = ReaderBuffer(CPU, {"t0": torch.float64}, **json.loads(process.stdout.readline()))
    process.kill()
    process.communicate()
    with pytest.raises(TransferError, match="the sender has ended before group 1"):
        mine.take(0, lambda: None)


@pytest.mark.parametrize(
    "change", [{"name": "unknown"}, {"offset_bytes": 4}, {"offset_bytes": 1 << 20}, {"shape": [1 << 20]}]
)
def test_a_piece_that_is_unknown_or_not_within_its_half_is_refused(change):
    buffer = sender(2)
    description = buffer.describe()
    description["groups"][1][0] |= change
    with pytest.raises(TransferError, match="group 1 is unknown, or not within its half of the buffer"):
        ReaderBuffer(CPU, {"t0": torch.float64, "t1": torch.float64}, **description)
    buffer.close()
