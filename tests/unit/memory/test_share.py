"""Memory that processes share, between processes that really are two, and sets of tensors in it."""

import gc
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from colo.errors import TransferError, Unsupported
from colo.memory import cuda_driver, share
from colo.memory.share import (
    Exported,
    MappedBuffer,
    Opened,
    SharedMemory,
    Staging,
    dtype_name,
    open_shared_memory,
    probing,
    why_not_mapped,
)
from colo.memory.specs import Place, TensorSpec
from colo.memory.storage import num_references, places_of

CPU = torch.device("cpu")
SIZE_BYTES = 1 << 16

PEER = """
import json, sys, torch
from colo.memory.share import open_shared_memory

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
from colo.memory.share import SharedMemory

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
    shared.bytes[:64].copy_(torch.arange(64, dtype=torch.uint8))
    yield shared
    shared.close()


def open_files():
    """Those of this process, by number; threads of other tests may close theirs meanwhile."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder itself
            found.add((file.name, file.readlink()))
    return found


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
    monkeypatch.setattr(share, "device_id", lambda device: f"GPU-{device.index}")
    cuda = torch.device("cuda", 0)
    shared = SharedMemory(16, cuda)
    assert (shared.bytes.data_ptr(), shared.device, shared.size_bytes) == (memory.data_ptr(), cuda, 16)
    description = json.loads(json.dumps(shared.describe(to_pid=1)))
    assert open_shared_memory(description, cuda) == (bytes([16]) * 3, 16, cuda)
    with pytest.raises(TransferError, match="cannot map 16 B of GPU GPU-0: this process runs on another GPU, GPU-1"):
        open_shared_memory(description, torch.device("cuda", 1))
    assert open_shared_memory(shared.describe(to_pid=os.getpid()), cuda) is shared.bytes
    shared.close()
    assert shared.bytes.numel() == 0


def test_a_description_travels_as_json(shared):
    description = shared.describe(to_pid=1)
    assert json.loads(json.dumps(description)) == description


def test_closing_is_idempotent_leaves_tensors_alone_and_keeps_no_file_open():
    gc.collect()
    before = open_files()
    shared = SharedMemory(SIZE_BYTES, CPU)
    held = shared.bytes[:4].fill_(6)
    mapped = open_shared_memory(shared.describe(to_pid=1), CPU)
    shared.close()
    shared.close()
    assert held.tolist() == mapped[:4].tolist() == [6] * 4
    del held, mapped
    assert open_files() <= before


def test_shared_memory_that_nobody_holds_keeps_no_file_open():
    gc.collect()
    before = open_files()
    SharedMemory(SIZE_BYTES, CPU)
    assert open_files() <= before


# ---- read as it lies, or through a copy ------------------------------------------------------------------------------


def test_a_mapped_buffer_follows_the_memory(shared):
    buffer = MappedBuffer(shared.describe(to_pid=0), CPU)
    shared.bytes.fill_(7)
    assert not buffer.is_copy and buffer.bytes.eq(7).all()


def test_a_copied_buffer_follows_as_far_as_it_is_refreshed(shared):
    buffer = MappedBuffer(shared.describe(to_pid=0), CPU, copied=True)
    buffer.refresh()
    assert torch.equal(buffer.bytes, shared.bytes)
    shared.bytes.fill_(7)
    buffer.refresh(8, 16)
    assert buffer.bytes[8:16].eq(7).all()
    assert torch.equal(buffer.bytes[16:64], torch.arange(16, 64, dtype=torch.uint8)) and buffer.bytes[7] == 7
    assert torch.equal(buffer.bytes[:8], torch.arange(8, dtype=torch.uint8))


def test_memory_that_is_gone_is_told(shared):
    description = shared.describe(to_pid=0)
    shared.close()
    with pytest.raises(TransferError):
        MappedBuffer(description, CPU)
    assert "cannot map" in why_not_mapped(description, CPU)


def test_memory_of_another_gpu_is_not_even_tried():
    probe = {"kind": "cuda", "handle": "", "size_bytes": 512, "device": "that of somebody else"}
    assert "this process runs on another GPU" in why_not_mapped(probe, CPU)


def test_on_a_cpu_there_is_nothing_to_probe():
    with probing(CPU) as probe:
        assert probe is None and why_not_mapped(probe, CPU) is None


def test_what_could_not_be_exported_is_the_reason():
    assert why_not_mapped({"kind": "none", "why": "not here"}, CPU) == "not here"


# ---- a GPU's memory --------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """The calls of the driver that a probe makes, on memory of a CPU."""
    calls = SimpleNamespace(error=None, waited=[], freed=[])

    class FakeSharedMemory:
        def __init__(self, size_bytes, device):
            self.size_bytes = size_bytes

        def describe(self, to_pid):
            if calls.error:
                raise calls.error
            return {"kind": "cuda", "to": to_pid, "size_bytes": self.size_bytes}

        def close(self):
            calls.freed.append(self)

    monkeypatch.setattr(share, "SharedMemory", FakeSharedMemory)
    monkeypatch.setattr(share, "open_shared_memory", lambda probe, device: torch.zeros(4, dtype=torch.uint8))
    monkeypatch.setattr(share, "wait_for_queued", calls.waited.append)
    return calls


def test_a_probe_names_its_gpu_is_for_another_process_and_is_freed(gpu):
    cuda = torch.device("cuda")
    with probing(cuda) as probe:
        assert probe == {"kind": "cuda", "to": 0, "size_bytes": 512}
        assert why_not_mapped(probe, cuda) is None
        assert gpu.waited == [cuda] and not gpu.freed
    assert len(gpu.freed) == 1


def test_a_probe_that_cannot_be_exported_says_why_and_is_freed(gpu):
    gpu.error = TransferError("no IPC here")
    with probing(torch.device("cuda")) as probe:
        assert why_not_mapped(probe, CPU) == "no IPC here"
    assert len(gpu.freed) == 1


def test_what_is_copied_from_is_page_locked_as_long_as_the_buffer_lives(shared, monkeypatch):
    locked = []
    monkeypatch.setattr(cuda_driver, "page_lock", lambda *arguments: locked.append(arguments))
    buffer = MappedBuffer(shared.describe(to_pid=0), CPU, copied=True)
    ((owner, mapped, device),) = locked
    assert owner is buffer and device == CPU and torch.equal(mapped, shared.bytes)


# ---- sets of tensors -------------------------------------------------------------------------------------------------


def opened(wire):
    mapped = Opened(CPU)
    mapped.open(json.loads(json.dumps(dict(wire))))
    return mapped.tensors


def tensors():
    return {
        "matrix": torch.arange(12.0).view(3, 4),
        "none": torch.empty(0, 4),
        "half": torch.arange(5).bfloat16(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "gaps": torch.arange(24.0).view(4, 6)[:, ::2],
        "last": torch.arange(3, dtype=torch.uint8),
    }


def test_a_peer_has_the_same_bytes_and_every_write():
    held = tensors()
    values = {name: tensor.clone() for name, tensor in held.items()}
    exported = Exported(held)
    mapped = opened(exported.wire)
    assert list(mapped) == list(values)
    for name, value in values.items():
        assert (mapped[name].dtype, mapped[name].shape) == (value.dtype, value.shape)
        assert torch.equal(mapped[name], value) and torch.equal(held[name], value)
    for tensor in held.values():
        tensor.fill_(2)
    assert all(tensor.eq(2).all() for tensor in mapped.values())


def test_what_is_no_longer_where_it_was_is_known():
    held = tensors()
    exported = Exported(held)
    assert exported.is_current(held) is True
    assert not exported.is_current({name: held[name] for name in list(held)[1:]})
    held["matrix"].data = held["matrix"].clone()
    assert exported.is_current(held) is False


def mappings():
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:colo")


def test_a_tensor_is_alone_in_its_storage_as_it_was():
    held = {name: tensor.clone() for name, tensor in tensors().items()}
    exported = Exported(held)
    for tensor in held.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and num_references(tensor) == 1
    exported.close()
    assert held["matrix"].sum() == 66, "whoever has it keeps it"


def aliases():
    """Tensors that share memory with another that is exported, or with one that somebody holds."""
    whole, tied, flat = torch.arange(6.0), torch.ones(4), torch.arange(12.0)
    yield {"alone": torch.ones(3), "whole": whole, "half": whole[3:]}, None
    yield {"alone": torch.ones(3), "one": tied, "other": tied}, None
    yield {"alone": torch.ones(3), "part": flat[:4].data}, flat


def test_memory_that_another_thread_forgets_meanwhile_is_forgotten(monkeypatch):
    opened = {7: (lambda: opened.pop(7) and None, {})}
    monkeypatch.setattr(share, "_opened", opened)
    with pytest.raises(Unsupported, match="ordinary host memory"):
        share.description_of(torch.zeros(3))
    assert opened == {}


@pytest.mark.parametrize("held", list(aliases()), ids=["views", "tied", "part of a buffer"])
def test_memory_of_several_tensors_is_refused_and_stays_theirs(held):
    tensors, flat = held
    places = places_of(tensors)
    with pytest.raises(Unsupported, match=r"(whole|one|part) is not alone in its memory"):
        Exported(tensors)
    assert places_of(tensors) == places and (flat is None or flat[:4].data_ptr() == tensors["part"].data_ptr())


def test_memory_is_kept_until_it_is_closed_and_is_gone_then():
    before, held = mappings(), tensors()
    exported = Exported(held)
    assert mappings() == before + 1
    held.clear()
    gc.collect()
    assert opened(exported.wire)["matrix"].sum() == 66
    exported.close()
    exported.close()
    gc.collect()
    assert mappings() == before
    with pytest.raises(TransferError):
        opened(exported.wire)


def test_nothing_can_be_exported():
    exported = Exported({})
    assert opened(exported.wire) == {}
    empty = Exported({"none": torch.empty(0)})
    assert opened(empty.wire)["none"].shape == (0,)


def test_tensors_lie_in_the_memory_that_they_name_with_their_strides():
    slabs = [SharedMemory(64, CPU) for _ in range(3)]
    for number, slab in enumerate(slabs):
        slab.bytes.view(torch.float32).copy_(torch.arange(16) + 100 * number)
    memory = [slab.describe(to_pid=0) for slab in slabs]
    places = [
        Place(TensorSpec("none", "float16", (2, 0), (1, 1)), -1, 0).to_wire(),
        Place(TensorSpec("first", "float32", (3,), (1,)), 0, 4).to_wire(),
        Place(TensorSpec("second", "float32", (2, 3), (1, 2)), 1, 8).to_wire(),
        Place(TensorSpec("third", "float32", (2, 2), (14, 1)), 2, 0).to_wire(),
        Place(TensorSpec("wide", "float32", (1,), (50,)), 2, 60).to_wire(),
    ]
    found = opened({"tensors": places, "memory": memory})
    assert found["first"].tolist() == [1, 2, 3]
    assert found["second"].tolist() == [[102, 104, 106], [103, 105, 107]]
    assert found["third"].tolist() == [[200, 201], [214, 215]]
    assert found["wide"].tolist() == [215]
    assert (found["none"].shape, found["none"].stride(), found["none"].dtype) == ((2, 0), (1, 1), torch.float16)


def test_a_tensor_that_does_not_lie_within_its_memory_is_refused():
    slab = SharedMemory(64, CPU)
    with pytest.raises(RuntimeError):
        opened(
            {
                "tensors": [Place(TensorSpec("far", "float32", (17,), (1,)), 0, 0).to_wire()],
                "memory": [slab.describe(to_pid=0)],
            }
        )


def test_names_of_dtypes_are_torchs_own_without_the_module():
    assert dtype_name(torch.empty(0, dtype=torch.bfloat16)) == "bfloat16"


def test_a_tensor_that_cannot_be_exported_is_named_with_its_size(monkeypatch):
    def refuse(tensor):
        raise Unsupported("CUDA IPC does not export this memory")

    monkeypatch.setattr(share, "_all_on_gpu", lambda tensors: True)
    monkeypatch.setattr(cuda_driver, "export_range", refuse)
    with pytest.raises(Unsupported, match=r"does not export this memory \(matrix, 48 B\)"):
        Exported({"none": torch.empty(0), "matrix": torch.zeros(3, 4)})


def test_allocations_of_a_gpu_are_described_once_however_many_tensors_lie_in_them(monkeypatch):
    block = torch.arange(12.0)
    held = {"a": block[:4].view(2, 2), "b": block[8:]}
    monkeypatch.setattr(share, "_all_on_gpu", lambda tensors: True)
    monkeypatch.setattr(share, "device_id", lambda device: "cpu")
    place = lambda tensor: (b"block", block.nbytes, tensor.data_ptr() - block.data_ptr())  # noqa: E731
    monkeypatch.setattr(cuda_driver, "export_range", place)
    monkeypatch.setattr(cuda_driver, "open_exported", lambda *_: block.view(torch.uint8))
    exported = Exported(held)
    assert [memory["size_bytes"] for memory in exported.wire["memory"]] == [48]
    assert all(torch.equal(tensor, held[name]) for name, tensor in opened(exported.wire).items())


def test_copies_follow_each_put_and_are_described_once():
    staging, held = Staging(CPU), tensors()
    wire = staging.put(held)
    peer = Opened(CPU)
    for value in (3, 4):
        for tensor in held.values():
            tensor.fill_(value)
        assert staging.put(held) is wire
        peer.open(wire)
        assert all(tensor.eq(value).all() for tensor in peer.tensors.values())
    assert staging.put({"matrix": held["matrix"]}) is not wire
    staging.close()
    staging.close()
    with pytest.raises(TransferError):
        peer.__class__(CPU).open(wire)


def test_memory_that_is_described_again_stays_mapped_and_other_memory_goes(shared):
    peer, before = Opened(CPU), mappings()
    first, second = Exported({"a": torch.ones(3)}), Exported({"b": torch.ones(3)})
    peer.open(first.wire)
    address = peer.tensors["a"].data_ptr()
    peer.open(first.wire)
    assert peer.tensors["a"].data_ptr() == address
    peer.open(second.wire)
    assert list(peer.tensors) == ["b"]
    first.close()
    assert mappings() == before + 2, "the second one's and the peer's"


def test_groups_are_as_large_as_they_may_be_and_every_tensor_is_in_one(monkeypatch):
    monkeypatch.setattr(share, "GROUP_BYTES", 512)
    staging = Staging(CPU)
    held = [(f"t{n}", torch.full((n * 20,), float(n))) for n in range(1, 8)]
    seen = {}
    for wire in staging.put_groups(held):
        seen |= {name: tensor.clone() for name, tensor in opened(wire).items()}
    assert list(seen) == [name for name, _ in held]
    assert all(torch.equal(seen[name], tensor) for name, tensor in held)
    staging.close()
