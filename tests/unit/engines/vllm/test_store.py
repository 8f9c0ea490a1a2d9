"""The conversation between a vLLM worker and the store of its weights, over a real socket, without vLLM."""

import errno
import gc
import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from colo.engines.vllm import store as module
from colo.engines.vllm.store import StoreClient, WeightStore
from colo.errors import TransferError
from colo.memory.specs import Place, TensorSpec
from colo.units import MIB

CPU = torch.device("cpu")
SIZES = [2 * MIB, MIB, 3 * MIB]
PATIENCE_S = 60
"""Limit of a wait for what comes at once on a machine with nothing else to do."""


@pytest.fixture
def store():
    store = WeightStore(CPU)
    yield store
    store.close()


@contextmanager
def worker(store, *, rank=0, pid=1):
    """A worker that ends, as a process would, whether it has finished or not."""
    client = StoreClient(store.address, rank=rank, pid=pid, device=CPU)
    try:
        yield client
    finally:
        with suppress(OSError):
            client._stream.close()
        client._socket.close()


def load(store, sizes=SIZES, *, rank=0, pid=1):
    """A worker that takes its pieces, writes its number of the piece into each and finishes."""
    with worker(store, rank=rank, pid=pid) as client:
        pieces = [client.take(size_bytes) for size_bytes in sizes]
        for index, piece in enumerate(pieces):
            piece.fill_(10 * rank + index)
        client.done({})
    return pieces


def has_to_fill(store, **who):
    with worker(store, **who) as client:
        return client.fill


def store_threads():
    return [thread for thread in threading.enumerate() if thread.name == "colo-store"]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pieces_are_given_back_in_the_stores_own_process_too(store):
    with worker(store, pid=os.getpid()) as client:
        pieces = [client.take(size_bytes) for size_bytes in SIZES]
        storages = {1: StorageWeakRef(pieces[1].untyped_storage())}
        used = pieces[1].fill_(7)
        client.drop(storages)
        client.done({})
    assert store.size_bytes == SIZES[0] + SIZES[2]
    assert used.eq(7).all()


def test_pieces_that_nothing_uses_are_given_back_and_taken_anew_by_the_next_worker(store):
    with worker(store) as client:
        pieces = [client.take(size_bytes) for size_bytes in SIZES]
        for piece in pieces:
            piece.fill_(7)
        storages = {index: StorageWeakRef(pieces[index].untyped_storage()) for index in (0, 2)}
        mapped = pieces[2].view(-1)
        del piece, pieces[2], pieces[0]
        client.drop(storages)
        client.done({})
    assert store.size_bytes == SIZES[1] + SIZES[2]
    assert list(store.digest().sums) == ["slab 1 of rank 0", "slab 2 of rank 0"]
    assert mapped.eq(7).all()
    with worker(store) as again:
        assert not again.fill
        assert [again.take(size_bytes)[0].item() for size_bytes in SIZES] == [0, 7, 7]
    assert store.size_bytes == sum(SIZES)


@pytest.mark.parametrize("pid", [1, os.getpid()], ids=["another process", "the same process"])
def test_the_first_worker_fills_and_the_next_finds_its_weights(store, pid):
    first = load(store, pid=pid)
    with worker(store, pid=pid) as again:
        assert not again.fill
        found = [again.take(size_bytes) for size_bytes in SIZES]
        again.done({})
    assert [piece.unique().tolist() for piece in found] == [[0], [1], [2]]
    assert (found[0].data_ptr() == first[0].data_ptr()) is (pid == os.getpid())
    found[1].fill_(99)
    assert (first[1] == 99).all()


def test_the_trainer_sees_what_the_worker_has_written(store):
    assert has_to_fill(store)
    load(store)
    assert [slab.unique().tolist() for slab in store.slabs(0)] == [[0], [1], [2]]
    assert store.size_bytes == sum(SIZES)


def test_every_rank_has_its_own_memory(store):
    load(store, rank=0)
    assert has_to_fill(store, rank=1)
    load(store, rank=1)
    assert store.slabs(0)[2].unique().tolist() == [2]
    assert store.slabs(1)[2].unique().tolist() == [12]
    assert store.size_bytes == 2 * sum(SIZES)


def test_an_unfinished_first_start_starts_over(store):
    with worker(store) as unfinished:
        unfinished.take(MIB).fill_(50)
    with worker(store) as again:
        assert again.fill
        assert not again.take(2 * MIB).any()
        again.done({})
    assert store.size_bytes == 2 * MIB
    assert not has_to_fill(store)


def test_an_unfinished_first_start_keeps_no_file_open(store):
    before = set(store_threads())  # one of a test before may end meanwhile
    files = []
    for _ in range(3):
        with worker(store) as client:
            client.take(MIB)
        wait_until(lambda: set(store_threads()) <= before)
        files.append(open_files())
    assert files[-1] <= files[0]  # other files of this process may have been closed meanwhile


@pytest.mark.parametrize("sizes", [[2 * MIB, 2 * MIB], [*SIZES, MIB]], ids=["another size", "one more"])
def test_a_worker_that_asks_for_other_pieces_is_refused(store, sizes):
    load(store)
    message = rf"piece {len(sizes) - 1} of the weights has {sizes[-1] // MIB}.00 MiB now, which is not"
    with worker(store) as client, pytest.raises(TransferError, match=message):
        for size_bytes in sizes:
            client.take(size_bytes)


HEAD, EMBEDDING = (
    Place(TensorSpec(name, "float32", (8, 4), (4, 1)), *place).to_wire()
    for name, place in (("head", (1, 0)), ("embedding", (0, 512)))
)


def test_a_worker_hears_where_weights_lay_and_is_refused_with_others(store):
    first = {"lm_head.weight": EMBEDDING, "model.embed_tokens.weight": EMBEDDING}
    with worker(store) as client:
        assert client.layout == {}
        client.take(MIB)
        client.done(first)
    for other in (first | {"lm_head.weight": HEAD}, {"model.embed_tokens.weight": EMBEDDING}, first | {"more": HEAD}):
        with (
            worker(store) as again,
            pytest.raises(TransferError, match="1 weights of the engine, (lm_head|more).* are"),
        ):
            assert again.layout == first
            again.done(other)
    with worker(store) as again:
        again.done(first)


def test_a_worker_that_is_refused_takes_no_weights_along(store):
    first = {"lm_head.weight": HEAD, "model.embed_tokens.weight": EMBEDDING}
    with worker(store) as client:
        for number in (1, 2, 3):
            client.take(MIB).fill_(number)
        client.done(first)
        client.drop({2: StorageWeakRef(torch.ones(1).untyped_storage())})
    assert store.size_bytes == 2 * MIB
    with worker(store) as other:
        pieces = [other.take(MIB) for _ in range(3)]
        del pieces
        gone = StorageWeakRef(torch.ones(1).untyped_storage())
        other.drop(dict.fromkeys((1, 2), gone))
        with pytest.raises(TransferError, match="lm_head"):
            other.done({"model.embed_tokens.weight": EMBEDDING})
    assert store.size_bytes == 2 * MIB
    with worker(store) as again:
        assert [again.take(MIB)[0].item() for _ in range(3)] == [1, 2, 0]
        again.done(first)


def test_a_worker_whose_place_another_has_taken_is_refused(store):
    load(store)
    with worker(store) as old, worker(store) as new:
        for ask in (lambda: old.take(SIZES[0]), lambda: old.drop({0: StorageWeakRef(torch.ones(1).untyped_storage())})):
            with pytest.raises(TransferError, match="another worker of rank 0 has taken the place of process 1"):
                ask()
        assert [new.take(size_bytes)[0].item() for size_bytes in SIZES] == [0, 1, 2]


def test_a_worker_that_ends_within_a_line_ends_its_own_conversation_only(store):
    before = set(store_threads())  # one of a test before may end meanwhile
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as torn:
        torn.connect(store.address)
        torn.sendall(b'{"op": "hel')
    wait_until(lambda: set(store_threads()) <= before)
    load(store)
    assert not has_to_fill(store)


def test_a_process_that_ends_without_closing_leaves_no_folder_and_its_forked_child_leaves_it_alone(tmp_path):
    code = """
import os, torch
from colo.engines.vllm.store import WeightStore
store = WeightStore(torch.device("cpu"))
if os.fork() == 0:
    raise SystemExit
os.wait()
assert os.path.exists(store.address)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)
    assert list(tmp_path.glob("colo-*")) == []


@contextmanager
def connected(store):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(store.address)
        yield lambda line: (connection.sendall(line + b"\n"), json.loads(connection.recv(1 << 16)))[1]


HELLO = json.dumps({"op": "hello", "rank": 0, "pid": 1, "device": "cpu"}).encode()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"\xff\xfe\x00", "Expecting value"),
        (b"5", "5 is no request"),
        (b"null", "None is no request"),
        (b'"size_bytes"', "'size_bytes' is no request"),
        (b'{"size_bytes": 4}', "is no request: op is one of hello, slab, done, drop"),
        (b'{"op": "resize", "layout": {}}', "is no request: op is one of hello, slab, done, drop"),
        (b'{"op": "slab", "size_bytes": "x"}', "cannot be interpreted as an integer"),
        (b'{"op": "slab", "size_bytes": 1152921504606846976}', "memory .1048576.00 TiB asked for"),
        (b'{"op": "drop", "indices": [3]}', "out of range"),
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_is_said_has_an_answer_and_the_conversation_goes_on(store, said, words):
    with connected(store) as ask:
        assert ask(HELLO)["fill"] is True
        assert re.search(words, ask(said)["error"])
        assert ask(HELLO)["fill"] is True, "and nothing was taken for done"


@pytest.mark.parametrize("op", ["slab", "done", "drop"])
def test_a_worker_says_first_who_it_is(store, op):
    with connected(store) as ask:
        assert ask(json.dumps({"op": op}).encode())["error"] == f"{op} before hello"


def test_a_store_that_was_closed_makes_no_memory_for_a_worker_that_is_left(store):
    with connected(store) as ask:
        ask(HELLO)
        store.close()
        assert ask(b'{"op": "slab", "size_bytes": 4096}') == {"error": "the store was closed"}
    assert store.size_bytes == 0


@pytest.mark.parametrize("fails", ["bind", "listen", "thread"])
def test_a_store_that_cannot_begin_leaves_no_folder_and_no_file(monkeypatch, tmp_path, fails):
    def fail(*_):
        raise OSError(f"no {fails}")

    kind = type("Socket", (socket.socket,), {} if fails == "thread" else {fails: fail})
    gc.collect()  # what earlier tests left open
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(module.tempfile, "tempdir", str(tmp_path))
        patch.setattr(module.socket, "socket", kind)
        if fails == "thread":
            patch.setattr(module.threading.Thread, "start", fail)
        with pytest.raises(OSError, match=f"no {fails}") as raised:
            WeightStore(CPU)
    assert "TMPDIR may be a shorter path" in raised.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []
    assert open_files() <= before  # a thread of an earlier test may have closed its own meanwhile


def test_a_checkpoint_may_take_longer_to_read_than_an_answer(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "DEADLINE_S", 0.2)
        with connected(store) as ask:
            ask(HELLO)
            ask(b'{"op": "slab", "size_bytes": 4096}')
            time.sleep(0.6)
            assert ask(b'{"op": "done", "layout": {}}') == {}
    assert not has_to_fill(store)


def test_nobody_answering_is_an_error(store, tmp_path):
    with pytest.raises(TransferError, match="weight store does not answer at"):
        StoreClient(str(tmp_path / "nobody"), rank=0, pid=1, device=CPU)
    store.close()
    with pytest.raises(TransferError, match="weight store does not answer at"):
        has_to_fill(store)


def test_a_gpu_that_the_trainer_does_not_see_is_refused_by_name(store):
    with (
        worker(store) as client,
        pytest.raises(TransferError, match="does not see the GPU some-uuid.*CUDA_VISIBLE_DEVICES"),
    ):
        client._ask(op="hello", rank=0, pid=1, device="some-uuid")


def test_only_this_user_reaches_it(store):
    folder = Path(store.address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_closing_is_idempotent_and_leaves_no_folder_and_no_thread(store):
    before = len(store_threads())
    mine = WeightStore(CPU)
    (kept,) = load(mine, [MIB])
    mine.close()
    mine.close()
    assert not Path(mine.address).parent.exists()
    assert (kept == 0).all()
    wait_until(lambda: len(store_threads()) <= before)


@pytest.mark.parametrize("answer", [b'{"pid": 1, "fi', b"\xff\xfe\n", b""], ids=["cut", "no text", "nothing"])
def test_a_trainer_that_ends_within_a_line_is_an_error_of_ours(tmp_path, answer):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "store"))
    listener.listen()

    def tell():
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    with pytest.raises(TransferError, match="stopped answering|the trainer has ended"):
        StoreClient(str(tmp_path / "store"), rank=0, pid=1, device=CPU)
    thread.join()
    listener.close()


@pytest.mark.parametrize("silent_from", [0, 1])
def test_a_trainer_that_says_nothing_is_an_error_at_the_deadline(tmp_path, monkeypatch, silent_from):
    monkeypatch.setattr(module, "DEADLINE_S", 0.3)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "store"))
    listener.listen()
    held, has_said = [], threading.Event()

    class Socket(socket.socket):
        """One whose deadline begins when the trainer has said all that it says."""

        def connect(self, address):
            super().connect(address)
            assert has_said.wait(PATIENCE_S)

    def answer():
        held.append(listener.accept()[0])
        held[0].sendall(silent_from * b'{"pid": 1, "fill": true, "layout": {}}\n')
        has_said.set()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    monkeypatch.setattr(module.socket, "socket", Socket)
    start_s = time.monotonic()
    with pytest.raises(TransferError, match="stopped answering"):
        with closing(StoreClient(str(tmp_path / "store"), rank=0, pid=1, device=CPU)) as client:
            client.take(MIB)
    assert time.monotonic() - start_s < 5
    thread.join()
    held.pop().close()
    listener.close()


class FailingListener:
    """A listener whose `accept` fails a few times, as when the process has no files left."""

    def __init__(self, listener, errors):
        self._listener, self._errors = listener, errors

    def accept(self):
        if self._errors:
            raise self._errors.pop(0)
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED])
def test_a_store_goes_on_listening_after_an_error(monkeypatch, code):
    errors = [OSError(code, os.strerror(code)) for _ in range(3)]
    make = module.socket.socket
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(module.socket, "socket", lambda *args: FailingListener(make(*args), errors))
        store = WeightStore(CPU)
    client = StoreClient(store.address, rank=0, pid=os.getpid(), device=CPU)
    assert client.fill and not errors
    client.close()
    store.close()


def test_a_store_goes_on_when_no_thread_can_be_started(monkeypatch):
    store = WeightStore(CPU)
    begin, failures = module.threading.Thread.start, [RuntimeError("can't start new thread")]

    def start(thread):
        if failures:
            raise failures.pop()
        begin(thread)

    monkeypatch.setattr(module.threading.Thread, "start", start)
    with pytest.raises(TransferError):
        StoreClient(store.address, rank=0, pid=os.getpid(), device=CPU)
    client = StoreClient(store.address, rank=0, pid=os.getpid(), device=CPU)
    assert client.fill
    client.close()
    store.close()


def test_a_process_out_of_files_answers_once_it_has_some_again(monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    store = WeightStore(CPU)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 4096), before[1]))
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        waiting.connect(store.address)
        time.sleep(0.1)
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    waiting.sendall(json.dumps({"op": "hello", "rank": 0, "pid": os.getpid(), "device": "cpu"}).encode() + b"\n")
    waiting.settimeout(PATIENCE_S)
    assert json.loads(waiting.recv(4096))["fill"] is True
    waiting.close()
    store.close()
