"""The kernels that check weights: they compile here, and find what torch finds, at sizes of many tiles and chunks."""

import pytest
import torch
from tiny_vllm import CUDA

from colo.memory import checksum, triton_kernels
from colo.memory.copies import Comparison
from colo.units import MIB

pytestmark = pytest.mark.gpu


@pytest.fixture
def without_kernels(monkeypatch):
    def switch():
        monkeypatch.setattr(triton_kernels, "kernels", lambda device: None)

    return switch


def test_checksums_of_scattered_parts_are_those_of_torch(without_kernels):
    assert triton_kernels.kernels(CUDA) is not None  # else slow, with a warning
    words = torch.randint(-(2**31), 2**31, (20 * MIB,), device=CUDA).to(torch.int32)
    lengths = [1, 3, 65_536, 65_537, 1 << 20, (1 << 20) + 5, 7_000_001]
    parts, place = [], 0
    for number, length in enumerate(lengths):
        parts.append((number % 3, place * 13 + number, words[place : place + length]))
        place += length
    found = checksum.values([checksum.Checksums(parts, 3, CUDA).compute()])
    whole = checksum.checksum(words.view(torch.uint8))
    words[11_000_000] ^= 1
    assert checksum.checksum(words.view(torch.uint8)) != whole
    words[11_000_000] ^= 1
    without_kernels()
    assert checksum.values([checksum.Checksums(parts, 3, CUDA).compute()]) == found
    assert checksum.checksum(words.view(torch.uint8)) == whole


def test_comparisons_find_one_bit_also_as_a_cuda_graph(without_kernels):
    sources = [torch.randn(count, device=CUDA).to(dtype) for count in (2, 999, 5 * MIB) for dtype in DTYPES]
    sources.append(torch.randn(300, 200, device=CUDA).T)
    targets = [source.clone() for source in sources]
    compared = Comparison(sources, targets)
    assert not compared.flags().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        flags = compared.flags()
    for index, target in enumerate(targets):
        flat = target.T.view(-1) if target.dim() == 2 else target
        flat.view(torch.int16)[-1] ^= 1
        graph.replay()
        assert flags.tolist() == [i == index for i in range(len(targets))]
        flat.view(torch.int16)[-1] ^= 1
    targets[4].neg_()
    graph.replay()
    found = flags.tolist()
    without_kernels()
    assert Comparison(sources, targets).flags().tolist() == found


DTYPES = (torch.float32, torch.bfloat16)
