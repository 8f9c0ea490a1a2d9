"""`token_logprobs` on CUDA: the numbers of a float64 computation, within a bound on memory."""

import pytest
import torch

from benchmarks.logprob import measure
from colo.rl.logprob import token_logprobs
from colo.units import GIB, MIB

pytestmark = pytest.mark.gpu


def relative_error(actual, expected):
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 2e-3), (torch.float32, 1e-4)])
def test_values_and_gradients_are_those_of_float64(dtype, tolerance):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_ND = torch.randn((300, 256), generator=generator, device="cuda").to(dtype).requires_grad_()
    weight_VD = (torch.randn((5000, 256), generator=generator, device="cuda") / 8).to(dtype).requires_grad_()
    bias_V = torch.randn(5000, generator=generator, device="cuda").to(dtype).requires_grad_()
    ids_N = torch.randint(5000, (300,), generator=generator, device="cuda")
    grad_N = torch.randn(300, generator=generator, device="cuda")
    ids_N[::7] = -100

    logprobs_N = token_logprobs(hidden_ND, weight_VD, ids_N, bias_V=bias_V, workspace_bytes=4 * MIB)
    logprobs_N.backward(grad_N)

    inputs = [t.detach().double().requires_grad_() for t in (hidden_ND, weight_VD, bias_V)]
    exact_NV = (inputs[0] @ inputs[1].T + inputs[2]).log_softmax(-1)
    exact_N = exact_NV.gather(1, ids_N.clamp(min=0)[:, None]).squeeze(1) * (ids_N >= 0)
    exact_N.backward(grad_N.double())

    assert relative_error(logprobs_N, exact_N) < tolerance
    for actual, exact in zip((hidden_ND, weight_VD, bias_V), inputs, strict=True):
        assert relative_error(actual.grad, exact.grad) < tolerance
    assert torch.all(logprobs_N[::7] == 0)
    assert torch.all(hidden_ND.grad[::7] == 0)


def test_extra_memory_stays_within_the_documented_bound():
    tokens, vocab, hidden = 16_384, 65_536, 1024
    trained, _, full, frozen, _, _ = measure(
        device="cuda", tokens=tokens, vocab=vocab, hidden=hidden, full_tokens=4096, repeats=1
    )
    slack_bytes = 64 * tokens + 8 * MIB  # a few numbers a token, and blocks that the allocator rounds up
    bound_bytes = 1 * GIB + 2 * tokens * hidden + slack_bytes
    assert 0 < trained["extra_beyond_gradients_bytes"] <= bound_bytes
    assert 0 < frozen["extra_beyond_gradients_bytes"] <= bound_bytes
    # a quarter of the tokens takes more in full than all of them in tiles
    assert full["extra_beyond_gradients_bytes"] > trained["extra_beyond_gradients_bytes"]


def test_a_small_workspace_is_kept_to():
    hidden_ND = torch.randn((4096, 512), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn((32_768, 512), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids_N = torch.randint(32_768, (4096,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    token_logprobs(hidden_ND, weight_VD, ids_N, workspace_bytes=32 * MIB).sum().backward()
    extra_bytes = torch.cuda.max_memory_allocated() - before_bytes - weight_VD.nbytes - hidden_ND.nbytes
    assert extra_bytes <= 32 * MIB + hidden_ND.nbytes + 8 * MIB
