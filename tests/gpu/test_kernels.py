"""The kernels that move and check weights: they compile here, and do what torch does at sizes of many copy_plan."""

import pytest
import torch
from tiny_vllm import CUDA

from colo.memory import copy_plan, digest
from colo.memory.copy_plan import CASTS, CopyPlan
from colo.units import MIB

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def without_kernels(monkeypatch):
    def switch():
        monkeypatch.setattr(copy_plan, "kernels", lambda device: None)

    return switch


def test_sums_of_many_large_tiles_are_those_of_torch(without_kernels):
    assert copy_plan.kernels(CUDA) is not None  # else slow, with a warning
    words = torch.randint(-(2**31), 2**31, (20 * MIB,), device=CUDA).to(torch.int32)
    held = {"all": words, "odd": words[3 : 7 * MIB + 4], "bytes": words.view(torch.uint8)[1 : 5 * MIB]}
    sums = digest.Digest.of(held).sums
    words[11_000_000] ^= 1
    assert digest.Digest.of(held).sums == sums | {"all": digest.Digest.of(held).sums["all"]} != sums
    words[11_000_000] ^= 1
    without_kernels()
    assert digest.Digest.of(held).sums == sums


def test_a_digest_takes_one_launch_and_names_the_tensor_that_has_changed(without_kernels):
    held = {f"t{n}": torch.randn(n * 1000 + 2, device=CUDA).to(DTYPES[n % 2]) for n in range(1, 400)}
    held |= {"odd": torch.arange(7, dtype=torch.uint8, device=CUDA), "gaps": torch.randn(8, 6, device=CUDA)[:, ::2]}
    then = digest.Digest.of(held)
    assert len(then._queued) == 1, "one launch"
    assert digest.Digest.of({name: tensor.clone() for name, tensor in held.items()}).sums == then.sums
    for name in ("t7", "odd", "gaps"):
        before = held[name].clone()
        held[name][-1].add_(1)
        assert digest.Digest.of(held, then).differs(then) == [name]
        held[name].copy_(before)
    without_kernels()
    assert digest.Digest.of(held).sums == then.sums


def test_comparisons_find_one_bit(without_kernels):
    sources = [torch.randn(count, device=CUDA).to(dtype) for count in (2, 999, 5 * MIB) for dtype in DTYPES]
    sources.append(torch.randn(300, 200, device=CUDA).T)
    targets = [source.clone() for source in sources]
    plan = CopyPlan(list(zip(sources, targets, strict=True)))
    assert not plan.holds_tensors and not plan.flags().any()
    for index, target in enumerate(targets):
        flat = target.T.view(-1) if target.dim() == 2 else target
        flat.view(torch.int16)[-1] ^= 1
        assert plan.flags().tolist() == [i == index for i in range(len(targets))]
        flat.view(torch.int16)[-1] ^= 1
    targets[4].neg_()
    found = plan.flags().tolist()
    without_kernels()
    assert CopyPlan(list(zip(sources, targets, strict=True))).flags().tolist() == found


def slices():
    """Pairs as publications have them: whole and cut by columns, misaligned, tiny, transposed, and every cast."""
    bits = torch.randint(-(2**15), 2**15, (6000, 4096), device=CUDA, dtype=torch.int16).view(torch.bfloat16)
    ours = [bits, bits[:, :1024], bits.view(-1)[3:70_001], bits[:3, :5], bits[:400, :300].t(), bits[0, 0]]
    pairs = [(source, torch.zeros(source.shape, dtype=source.dtype, device=CUDA)) for source in ours]
    fused = torch.zeros(6000, 4096, dtype=torch.bfloat16, device=CUDA)
    pairs += [(bits[:, 1024:2048], fused[:, 512:1536]), (bits[:1000, :511], fused[:1000, 2001:2512])]
    for source, target in CASTS:
        numbers = torch.randn(3000, 1000, device=CUDA).to(source)
        pairs += [(numbers, torch.zeros(3000, 1000, dtype=target, device=CUDA))]
        pairs += [(numbers[:, 1:998], torch.zeros(3000, 1000, dtype=target, device=CUDA)[:, 2:999])]
    return pairs


def test_one_launch_copies_every_bit_as_torch_does_and_its_digests_are_those_of_torch(without_kernels):
    pairs = slices()
    plan = CopyPlan(pairs[:4], pairs[4:])
    assert not plan.holds_tensors and plan.flags().all()
    sums = plan.replay_digested()
    assert not plan.flags().any()
    for source, target in pairs:
        assert torch.equal(copy_plan.bits_of(source.to(target.dtype)), copy_plan.bits_of(target))
    assert torch.equal(sums, plan.digests())
    assert torch.equal(sums, CopyPlan([(target, target) for _, target in pairs]).digests())
    without_kernels()
    assert torch.equal(sums, CopyPlan(pairs).digests())


def test_a_copy_between_dtypes_that_the_kernel_does_not_cast_is_torchs():
    numbers = torch.randn(500, dtype=torch.float64, device=CUDA)
    target = torch.zeros(500, dtype=torch.bfloat16, device=CUDA)
    plan = CopyPlan([(numbers, target)])
    plan.replay()
    assert plan.holds_tensors and torch.equal(target, numbers.bfloat16()) and not plan.flags().any()
