import pytest
import torch

from colo.memory import triton_kernels


def test_a_cpu_has_no_kernels(recwarn):
    assert triton_kernels.kernels.__wrapped__(torch.device("cpu")) is None
    assert not recwarn.list


def test_kernels_that_do_not_work_are_warned_of_and_memory_that_is_missing_now_is_not_taken_for_that(monkeypatch):
    pytest.importorskip("triton", reason="Triton is missing, which torch for CUDA brings along")
    from colo.memory import kernels

    def fail(error):
        def try_out(device):
            raise error

        monkeypatch.setattr(kernels, "try_out", try_out)

    gpu = torch.device("cuda", 0)
    fail(RuntimeError("no compiler"))
    with pytest.warns(RuntimeWarning, match="without Triton, which is slower: no compiler"):
        assert triton_kernels.kernels.__wrapped__(gpu) is None
    fail(torch.OutOfMemoryError("not now"))
    with pytest.raises(torch.OutOfMemoryError):
        triton_kernels.kernels.__wrapped__(gpu)
    monkeypatch.setattr(kernels, "try_out", lambda device: None)
    assert triton_kernels.kernels.__wrapped__(gpu) is kernels
