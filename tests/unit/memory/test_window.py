"""What a process reads of another one's slab, mapped or copied, and how it finds out which."""

from types import SimpleNamespace

import pytest
import torch

from colo.errors import TransferError
from colo.memory import cuda_driver, window
from colo.memory.slab import Slab
from colo.memory.window import Window, probing, why_not_mapped

CPU = torch.device("cpu")


@pytest.fixture
def slab():
    slab = Slab(64, CPU)
    slab.bytes.copy_(torch.arange(64, dtype=torch.uint8))
    yield slab
    slab.close()


def test_a_mapped_window_follows_the_slab(slab):
    window = Window(slab.describe(to_pid=0), CPU)
    slab.bytes.fill_(7)
    assert not window.is_copy and window.bytes.eq(7).all()


def test_a_copied_window_follows_as_far_as_it_is_refreshed(slab):
    window = Window(slab.describe(to_pid=0), CPU, copied=True)
    window.refresh()
    assert torch.equal(window.bytes, slab.bytes)
    slab.bytes.fill_(7)
    window.refresh(16)
    assert window.bytes[:16].eq(7).all()
    assert torch.equal(window.bytes[16:], torch.arange(16, 64, dtype=torch.uint8))


def test_a_slab_that_is_gone_is_told(slab):
    description = slab.describe(to_pid=0)
    slab.close()
    with pytest.raises(TransferError):
        Window(description, CPU)
    assert "cannot map" in why_not_mapped(description | {"device": "cpu"}, CPU)


def test_memory_of_another_gpu_is_not_even_tried(slab):
    probe = slab.describe(to_pid=0) | {"device": "that of somebody else"}
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

    class FakeSlab:
        def __init__(self, size_bytes, device):
            self.size_bytes = size_bytes

        def describe(self, to_pid):
            if calls.error:
                raise calls.error
            return {"kind": "cuda", "to": to_pid, "size_bytes": self.size_bytes}

        def close(self):
            calls.freed.append(self)

    monkeypatch.setattr(window, "Slab", FakeSlab)
    monkeypatch.setattr(window, "device_id", lambda device: "GPU-1")
    monkeypatch.setattr(window, "open_slab", lambda probe, device: torch.zeros(4, dtype=torch.uint8))
    monkeypatch.setattr(window, "wait_for_queued", calls.waited.append)
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


def test_what_is_copied_from_is_page_locked_as_long_as_the_window_lives(slab, monkeypatch):
    locked = []
    monkeypatch.setattr(cuda_driver, "page_lock", lambda *arguments: locked.append(arguments))
    window = Window(slab.describe(to_pid=0), CPU, copied=True)
    ((owner, mapped, device),) = locked
    assert owner is window and device == CPU and torch.equal(mapped, slab.bytes)
