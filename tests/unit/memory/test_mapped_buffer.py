"""What a process reads of another one's shared memory, mapped or copied, and how it finds out which."""

from types import SimpleNamespace

import pytest
import torch

from colo.errors import TransferError
from colo.memory import cuda_driver, mapped_buffer
from colo.memory.mapped_buffer import MappedBuffer, probing, why_not_mapped
from colo.memory.shared_memory import SharedMemory

CPU = torch.device("cpu")


@pytest.fixture
def shared():
    shared = SharedMemory(64, CPU)
    shared.bytes.copy_(torch.arange(64, dtype=torch.uint8))
    yield shared
    shared.close()


def test_a_mapped_buffer_follows_the_memory(shared):
    buffer = MappedBuffer(shared.describe(to_pid=0), CPU)
    shared.bytes.fill_(7)
    assert not buffer.is_copy and buffer.bytes.eq(7).all()


def test_a_copied_buffer_follows_as_far_as_it_is_refreshed(shared):
    buffer = MappedBuffer(shared.describe(to_pid=0), CPU, copied=True)
    buffer.refresh()
    assert torch.equal(buffer.bytes, shared.bytes)
    shared.bytes.fill_(7)
    buffer.refresh(16)
    assert buffer.bytes[:16].eq(7).all()
    assert torch.equal(buffer.bytes[16:], torch.arange(16, 64, dtype=torch.uint8))


def test_memory_that_is_gone_is_told(shared):
    description = shared.describe(to_pid=0)
    shared.close()
    with pytest.raises(TransferError):
        MappedBuffer(description, CPU)
    assert "cannot map" in why_not_mapped(description | {"device": "cpu"}, CPU)


def test_memory_of_another_gpu_is_not_even_tried(shared):
    probe = shared.describe(to_pid=0) | {"device": "that of somebody else"}
    assert why_not_mapped(probe, CPU) == "it runs on another GPU than the trainer"


def test_on_a_cpu_there_is_nothing_to_probe():
    with probing(CPU) as probe:
        assert probe is None and why_not_mapped(probe, CPU) is None


def test_what_could_not_be_exported_is_the_reason():
    assert why_not_mapped({"kind": "none", "why": "not here"}, CPU) == "not here"


# ---- on a GPU ------------------------------------------------------------------------------------------------------


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

    monkeypatch.setattr(mapped_buffer, "SharedMemory", FakeSharedMemory)
    monkeypatch.setattr(mapped_buffer, "device_id", lambda device: "GPU-1")
    monkeypatch.setattr(mapped_buffer, "open_shared_memory", lambda probe, device: torch.zeros(4, dtype=torch.uint8))
    monkeypatch.setattr(mapped_buffer, "wait_for_queued", calls.waited.append)
    return calls


def test_a_probe_names_its_gpu_is_for_another_process_and_is_freed(gpu):
    cuda = torch.device("cuda")
    with probing(cuda) as probe:
        assert probe == {"kind": "cuda", "to": 0, "size_bytes": 512, "device": "GPU-1"}
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
