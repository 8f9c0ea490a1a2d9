"""Shared memory, between processes that really are two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colo.errors import TransferError
from colo.memory import cuda_driver
from colo.memory.shared_memory import SharedMemory, open_shared_memory

CPU = torch.device("cpu")
SIZE_BYTES = 1 << 16

PEER = """
import json, sys, torch
from colo.memory.shared_memory import open_shared_memory

memory = open_shared_memory(json.loads(sys.stdin.readline()), torch.device("cpu"))
print("mapped", flush=True)
for line in sys.stdin:
    command, value = line.split()
    if command == "fill":
        memory.fill_(int(value))
    print(int(memory[int(value) % memory.numel()]), flush=True)
"""

OWNER = """
import json, sys, torch
from colo.memory.shared_memory import SharedMemory

shared = SharedMemory(int(sys.argv[1]), torch.device("cpu"))
shared.bytes.fill_(7)
print(json.dumps(shared.describe(to_pid=int(sys.argv[2]))), flush=True)
sys.stdin.readline()
"""


class Process:
    """A Python process that is talked to by lines."""

    def __init__(self, code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def ask(self, line):
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self):
        return self._process.stdout.readline().strip()

    def end(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start():
    processes = []

    def begin(code, *arguments):
        processes.append(Process(code, *arguments))
        return processes[-1]

    yield begin
    for process in processes:
        process.end()


@pytest.fixture
def shared():
    shared = SharedMemory(SIZE_BYTES, CPU)
    yield shared
    shared.close()


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_two_processes_see_what_the_other_writes_and_the_peer_keeps_what_the_owner_lets_go_of(shared, start):
    peer = start(PEER)
    assert peer.ask(json.dumps(shared.describe(to_pid=peer.pid))) == "mapped"
    shared.bytes.fill_(5)
    assert peer.ask("read 100") == "5"
    assert peer.ask("fill 9") == "9"
    assert (shared.bytes == 9).all()
    shared.bytes[3] = 77
    shared.close()
    assert peer.ask("read 3") == "77"
    assert peer.ask("fill 1") == "1"


def test_memory_outlives_its_owner_where_it_is_mapped_and_cannot_be_mapped_after(start):
    owner = start(OWNER, SIZE_BYTES, os.getpid())
    description = json.loads(owner.answer())
    memory = open_shared_memory(description, CPU)
    owner.end()
    assert memory.shape == (SIZE_BYTES,)
    assert (memory == 7).all()
    memory.fill_(8)
    with pytest.raises(TransferError, match=rf"cannot map 64.00 KiB of process {owner.pid}: .*; it has ended"):
        open_shared_memory(description, CPU)


def test_a_description_for_another_process_is_mapped_too_and_for_the_same_one_is_the_memory_itself(shared):
    same = open_shared_memory(shared.describe(to_pid=os.getpid()), CPU)
    assert same.data_ptr() == shared.bytes.data_ptr()
    other = open_shared_memory(shared.describe(to_pid=1), CPU)
    assert other.data_ptr() != shared.bytes.data_ptr()
    other.fill_(3)
    assert (shared.bytes == 3).all()


@pytest.mark.parametrize("to_pid", [1, os.getpid()], ids=["another process", "the same process"])
def test_what_its_owner_has_closed_cannot_be_opened(shared, to_pid):
    description = shared.describe(to_pid=to_pid)
    shared.close()
    with pytest.raises(TransferError, match="cannot map|has been closed by its owner"):
        open_shared_memory(description, CPU)


@pytest.mark.parametrize("to_pid", [1, os.getpid()], ids=["another process", "the same process"])
def test_no_two_owners_give_the_same_description_though_their_files_have_the_same_number(to_pid):
    first = SharedMemory(SIZE_BYTES, CPU)
    before = first.describe(to_pid=to_pid)
    first.close()
    second = SharedMemory(SIZE_BYTES, CPU)
    after = second.describe(to_pid=to_pid)
    assert before.get("path") == after.get("path"), "else this shows nothing"
    assert before != after
    with pytest.raises(TransferError, match="has been closed by its owner"):
        open_shared_memory(before, CPU)
    second.close()


def test_shared_memory_of_a_gpu_is_the_drivers_memory_by_its_handle(monkeypatch):
    memory = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(cuda_driver, "allocate", lambda size_bytes, device: memory[:size_bytes])
    monkeypatch.setattr(cuda_driver, "export", lambda data: bytes([data.numel()]) * 3)
    monkeypatch.setattr(cuda_driver, "open_exported", lambda handle, size, device: (handle, size, device))
    cuda = torch.device("cuda", 0)
    shared = SharedMemory(16, cuda)
    assert (shared.bytes.data_ptr(), shared.device, shared.size_bytes) == (memory.data_ptr(), cuda, 16)
    description = json.loads(json.dumps(shared.describe(to_pid=1)))
    assert open_shared_memory(description, cuda) == (bytes([16]) * 3, 16, cuda)
    assert open_shared_memory(shared.describe(to_pid=os.getpid()), cuda) is shared.bytes
    shared.close()
    assert shared.bytes.numel() == 0


def test_a_description_travels_as_json(shared):
    description = shared.describe(to_pid=1)
    assert json.loads(json.dumps(description)) == description


def test_closing_is_idempotent_leaves_tensors_alone_and_keeps_no_file_open():
    before = open_files()
    shared = SharedMemory(SIZE_BYTES, CPU)
    held = shared.bytes[:4].fill_(6)
    mapped = open_shared_memory(shared.describe(to_pid=1), CPU)
    shared.close()
    shared.close()
    assert held.tolist() == mapped[:4].tolist() == [6] * 4
    del held, mapped
    assert open_files() == before


def test_shared_memory_that_nobody_holds_keeps_no_file_open():
    before = open_files()
    SharedMemory(SIZE_BYTES, CPU)
    assert open_files() == before
