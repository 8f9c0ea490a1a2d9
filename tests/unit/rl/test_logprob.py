"""Chunked log-probabilities against the log-softmax of full logits in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from colo.errors import Unsupported
from colo.rl.logprob import model_logprobs, token_logprobs

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
# Relative errors (norm of the difference over norm of the reference) against float64 on the same rounded inputs.
# Logits rounded to 16 bits set them: half a unit in the last place is 2e-3 of a logit in bfloat16, 2e-4 in float16.
VALUE_TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
GRADIENT_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def tensors(num_tokens, vocab, hidden, dtype, *, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn((num_tokens, hidden), generator=generator, dtype=torch.float64).to(dtype)
    weight_VD = torch.randn((vocab, hidden), generator=generator, dtype=torch.float64) * spread / hidden**0.5
    bias_V = torch.randn(vocab, generator=generator, dtype=torch.float64)
    ids_N = torch.randint(vocab, (num_tokens,), generator=generator)
    return hidden_ND.requires_grad_(), weight_VD.to(dtype).requires_grad_(), bias_V.to(dtype).requires_grad_(), ids_N


def in_full(hidden, weight, ids, *, bias=None, temperature=1.0):
    """Log-probabilities the plain way; 0 for negative ids."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logprobs_V = (logits / temperature).log_softmax(-1)
    logprobs = logprobs_V.gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1)
    return logprobs * (ids >= 0)


def exact(tensor):
    return tensor.detach().double().requires_grad_()


def relative_error(actual, expected):
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("dtype", list(VALUE_TOLERANCE))
@pytest.mark.parametrize("chunks", [(None, None), (7, 13), (1, 1), (64, 5), (3, 100)])
def test_values_and_gradients_are_those_of_the_full_computation(dtype, chunks):
    hidden_ND, weight_VD, bias_V, ids_N = tensors(19, 61, 24, dtype)
    ids_N[[0, 5, 18]] = torch.tensor([-1, -100, -7])
    grad_N = torch.randn(19, generator=torch.Generator().manual_seed(1))
    logprobs_N = token_logprobs(
        hidden_ND,
        weight_VD,
        ids_N,
        bias_V=bias_V,
        temperature=0.7,
        token_chunk=chunks[0],
        vocab_chunk=chunks[1],
    )
    logprobs_N.backward(grad_N)

    inputs = [exact(t) for t in (hidden_ND, weight_VD, bias_V)]
    expected_N = in_full(inputs[0], inputs[1], ids_N, bias=inputs[2], temperature=0.7)
    expected_N.backward(grad_N.double())

    assert logprobs_N.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(logprobs_N, expected_N) < VALUE_TOLERANCE[dtype]
    for actual, reference in zip((hidden_ND, weight_VD, bias_V), inputs, strict=True):
        assert actual.grad.dtype == dtype
        assert relative_error(actual.grad, reference.grad) < GRADIENT_TOLERANCE[dtype]


@settings(max_examples=60)
@given(
    num_tokens=st.integers(0, 9),
    vocab=st.integers(1, 20),
    hidden=st.integers(1, 6),
    token_chunk=st.integers(1, 12),
    vocab_chunk=st.integers(1, 25),
    ignored=st.sets(st.integers(0, 8)),
)
def test_any_shape_and_any_chunks_give_the_full_computation(
    num_tokens, vocab, hidden, token_chunk, vocab_chunk, ignored
):
    hidden_ND, weight_VD, _, ids_N = tensors(num_tokens, vocab, hidden, torch.float64)
    ids_N[[i for i in ignored if i < num_tokens]] = -1
    logprobs_N = token_logprobs(hidden_ND, weight_VD, ids_N, token_chunk=token_chunk, vocab_chunk=vocab_chunk)
    gradients = torch.autograd.grad(logprobs_N.sum(), (hidden_ND, weight_VD))
    expected_N = in_full(hidden_ND, weight_VD, ids_N)
    expected = torch.autograd.grad(expected_N.sum(), (hidden_ND, weight_VD))
    torch.testing.assert_close(logprobs_N, expected_N, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def test_gradcheck_of_hidden_weight_and_bias():
    hidden_ND, weight_VD, bias_V, ids_N = tensors(6, 11, 4, torch.float64)
    ids_N[2] = -1

    def logprobs(hidden, weight, bias):
        return token_logprobs(
            hidden, weight, ids_N, bias_V=bias, temperature=1.3, token_chunk=4, vocab_chunk=3, vocab_size=11
        )

    assert torch.autograd.gradcheck(logprobs, (hidden_ND, weight_VD, bias_V))


def test_float32_matches_log_softmax_to_1e_5():
    hidden_ND, weight_VD, _, ids_N = tensors(64, 1000, 48, torch.float32, spread=5.0)
    expected_N = (hidden_ND @ weight_VD.T).log_softmax(-1).gather(1, ids_N[:, None]).squeeze(1)
    torch.testing.assert_close(
        token_logprobs(hidden_ND, weight_VD, ids_N, vocab_chunk=64), expected_N, rtol=0, atol=1e-5
    )


def test_batch_and_time_keep_their_shape():
    hidden_ND, weight_VD, _, ids_N = tensors(12, 30, 8, torch.float32)
    logprobs_BT = token_logprobs(hidden_ND.view(3, 4, 8), weight_VD, ids_N.view(3, 4).int())
    assert torch.equal(logprobs_BT, token_logprobs(hidden_ND, weight_VD, ids_N).view(3, 4))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens_give_no_values_and_zero_gradients(shape):
    hidden = torch.randn(*shape, 8, requires_grad=True)
    weight_VD = torch.randn(30, 8, requires_grad=True)
    logprobs = token_logprobs(hidden, weight_VD, torch.empty(shape, dtype=torch.long))
    logprobs.sum().backward()
    assert logprobs.shape == shape
    assert hidden.grad.shape == hidden.shape
    assert torch.equal(weight_VD.grad, torch.zeros_like(weight_VD))


def test_ignored_rows_are_not_read():
    hidden_ND, weight_VD, _, ids_N = tensors(6, 30, 8, torch.float32)
    ids_N[[1, 4]] = -100
    broken_ND = hidden_ND.detach().clone()
    broken_ND[[1, 4]] = torch.nan
    broken_ND.requires_grad_()
    logprobs_N = token_logprobs(broken_ND, weight_VD, ids_N)
    logprobs_N.sum().backward()
    assert torch.equal(logprobs_N, token_logprobs(hidden_ND, weight_VD, ids_N))
    assert torch.equal(logprobs_N[[1, 4]], torch.zeros(2))
    assert torch.equal(broken_ND.grad[[1, 4]], torch.zeros(2, 8))
    assert torch.isfinite(broken_ND.grad).all()
    assert torch.isfinite(weight_VD.grad).all()


def test_all_tokens_ignored():
    hidden_ND, weight_VD, _, _ = tensors(4, 30, 8, torch.bfloat16)
    token_logprobs(hidden_ND, weight_VD, torch.full((4,), -1)).sum().backward()
    assert torch.equal(hidden_ND.grad, torch.zeros_like(hidden_ND))
    assert torch.equal(weight_VD.grad, torch.zeros_like(weight_VD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite(dtype):
    hidden_ND = torch.full((3, 4), 64.0, dtype=dtype, requires_grad=True)
    weight_VD = torch.full((9, 4), -64.0, dtype=dtype)
    weight_VD[6] = 64.0  # logits of +16,384 against -16,384
    weight_VD.requires_grad_()
    logprobs_N = token_logprobs(hidden_ND, weight_VD, torch.tensor([6, 0, 6]), vocab_chunk=2)
    logprobs_N.sum().backward()
    assert torch.equal(logprobs_N, torch.tensor([0.0, -32768.0, 0.0]))
    assert torch.equal(hidden_ND.grad[1], torch.full((4,), -128.0, dtype=dtype))
    assert torch.equal(hidden_ND.grad[0], torch.zeros(4, dtype=dtype))
    assert torch.isfinite(weight_VD.grad).all()


def test_tokens_forbidden_by_an_infinite_bias_have_no_share():
    hidden_ND, weight_VD, _, _ = tensors(5, 12, 8, torch.float32)
    bias_V = torch.zeros(12)
    bias_V[:6] = -torch.inf
    ids_N = torch.tensor([6, 7, 8, 9, 11])
    logprobs_N = token_logprobs(hidden_ND, weight_VD, ids_N, bias_V=bias_V, vocab_chunk=3)
    logprobs_N.sum().backward()
    torch.testing.assert_close(logprobs_N, in_full(hidden_ND, weight_VD[6:], ids_N - 6))
    assert torch.isfinite(hidden_ND.grad).all()
    assert torch.equal(weight_VD.grad[:6], torch.zeros(6, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_nearly_certain_token_keeps_the_gradient_of_what_is_left(dtype):
    # one minus its probability is about 1e-4, far below the resolution of bfloat16 near 1
    hidden_ND = torch.tensor([[1.0, 0.5]], dtype=dtype, requires_grad=True)
    weight_VD = torch.tensor([[10.0, 0.0], [0.5, 1.0], [0.25, -1.0]], dtype=dtype, requires_grad=True)
    token_logprobs(hidden_ND, weight_VD, torch.tensor([0])).sum().backward()
    inputs = exact(hidden_ND), exact(weight_VD)
    in_full(*inputs, torch.tensor([0])).sum().backward()
    assert relative_error(hidden_ND.grad, inputs[0].grad) < GRADIENT_TOLERANCE[dtype]
    assert relative_error(weight_VD.grad, inputs[1].grad) < GRADIENT_TOLERANCE[dtype]


def test_a_frozen_head_gives_the_same_hidden_gradient_and_none_of_its_own():
    hidden_ND, weight_VD, _, ids_N = tensors(20, 60, 8, torch.float32)
    (trained,) = torch.autograd.grad(token_logprobs(hidden_ND, weight_VD, ids_N).sum(), hidden_ND)
    frozen_VD = weight_VD.detach()
    logprobs_N = token_logprobs(hidden_ND, frozen_VD, ids_N)
    logprobs_N.sum().backward()
    assert torch.equal(hidden_ND.grad, trained)
    assert frozen_VD.grad is None


def test_frozen_hidden_states_leave_the_head_its_gradient():
    hidden_ND, weight_VD, bias_V, ids_N = tensors(20, 60, 8, torch.float32)
    expected_N = in_full(hidden_ND, weight_VD, ids_N, bias=bias_V)
    expected = torch.autograd.grad(expected_N.sum(), (weight_VD, bias_V))
    logprobs_N = token_logprobs(hidden_ND.detach(), weight_VD, ids_N, bias_V=bias_V, token_chunk=6, vocab_chunk=25)
    actual = torch.autograd.grad(logprobs_N.sum(), (weight_VD, bias_V), retain_graph=True)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(torch.autograd.grad(logprobs_N.sum(), bias_V)[0], actual[1])


def test_a_retained_graph_gives_the_same_gradient_twice():
    hidden_ND, weight_VD, _, ids_N = tensors(20, 60, 8, torch.float32)
    total = token_logprobs(hidden_ND, weight_VD, ids_N).sum()
    first = torch.autograd.grad(total, (hidden_ND, weight_VD), retain_graph=True)
    second = torch.autograd.grad(total, (hidden_ND, weight_VD))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_grad_gives_the_same_values():
    hidden_ND, weight_VD, _, ids_N = tensors(20, 60, 8, torch.bfloat16)
    with torch.no_grad():
        values_N = token_logprobs(hidden_ND, weight_VD, ids_N)
    assert not values_N.requires_grad
    assert torch.equal(values_N, token_logprobs(hidden_ND, weight_VD, ids_N))


def test_non_contiguous_hidden_and_weight():
    hidden_ND, weight_VD, _, ids_N = tensors(12, 30, 8, torch.float64)
    wide = torch.zeros(3, 5, 8, dtype=torch.float64)
    wide[:, :-1] = hidden_ND.detach().view(3, 4, 8)
    wide.requires_grad_()
    transposed_DV = weight_VD.detach().T.contiguous().requires_grad_()
    logprobs_BT = token_logprobs(wide[:, :-1], transposed_DV.T, ids_N.view(3, 4), vocab_chunk=7)
    logprobs_BT.sum().backward()
    expected_N = in_full(hidden_ND, weight_VD, ids_N)
    expected_N.sum().backward()
    torch.testing.assert_close(logprobs_BT.flatten(), expected_N)
    torch.testing.assert_close(wide.grad[:, :-1].reshape(12, 8), hidden_ND.grad)
    torch.testing.assert_close(transposed_DV.grad.T, weight_VD.grad)


@pytest.mark.parametrize("cut", ["vocab_size", "slice"])
def test_the_padding_rows_of_a_head_have_no_share(cut):
    hidden_ND, weight_VD, bias_V, ids_N = tensors(12, 30, 8, torch.float32)
    padded_VD = torch.cat([weight_VD.detach(), torch.full((34, 8), 1e3)]).requires_grad_()
    padded_bias_V = torch.cat([bias_V.detach(), torch.full((34,), 1e3)]).requires_grad_()
    if cut == "slice":
        logprobs_N = token_logprobs(hidden_ND, padded_VD[:30], ids_N, bias_V=padded_bias_V[:30])
    else:
        logprobs_N = token_logprobs(hidden_ND, padded_VD, ids_N, bias_V=padded_bias_V, vocab_size=30, vocab_chunk=16)
    logprobs_N.sum().backward()
    expected_N = in_full(hidden_ND, weight_VD, ids_N, bias=bias_V)
    expected_N.sum().backward()
    torch.testing.assert_close(logprobs_N, expected_N)
    torch.testing.assert_close(padded_VD.grad[:30], weight_VD.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded_bias_V.grad[:30], bias_V.grad, rtol=1e-5, atol=1e-5)
    assert not padded_VD.grad[30:].any()
    assert not padded_bias_V.grad[30:].any()


def test_autocast_runs_the_head_in_its_dtype():
    hidden_ND, weight_VD, _, ids_N = tensors(12, 30, 8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs_N = token_logprobs(hidden_ND, weight_VD, ids_N)
    logprobs_N.sum().backward()
    assert torch.equal(logprobs_N, token_logprobs(hidden_ND.bfloat16(), weight_VD.bfloat16(), ids_N))
    assert hidden_ND.grad.dtype == weight_VD.grad.dtype == torch.float32


def test_a_weight_changed_between_forward_and_backward_is_noticed():
    hidden_ND, weight_VD, _, ids_N = tensors(12, 30, 8, torch.float32)
    logprobs_N = token_logprobs(hidden_ND, weight_VD, ids_N)
    with torch.no_grad():
        weight_VD.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs_N.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_VD": torch.zeros(30, 8, dtype=torch.float64)}, TypeError, "must share one of"),
        ({"hidden_ND": torch.zeros(4, 8, dtype=torch.long)}, TypeError, "must share one of"),
        ({"bias_V": torch.zeros(30, dtype=torch.bfloat16)}, TypeError, "must share one of"),
        ({"token_ids_N": torch.zeros(4)}, TypeError, "must be integers, not torch.float32"),
        ({"token_ids_N": torch.zeros(4, dtype=torch.bool)}, TypeError, "must be integers, not torch.bool"),
        ({"token_ids_N": [0, 1, 2, 3]}, TypeError, r"token ids must be a tensor, not \[0, 1, 2, 3\]"),
        ({"bias_V": [0.0] * 30}, TypeError, "bias must be a tensor"),
        ({"weight_VD": torch.zeros(30, 8, device="meta")}, ValueError, "not on one device, but hidden on cpu, weight"),
        ({"token_ids_N": torch.zeros(5, dtype=torch.long)}, ValueError, "one token id a row"),
        ({"hidden_ND": torch.zeros(8), "token_ids_N": torch.tensor(1)}, ValueError, "one token id a row"),
        ({"weight_VD": torch.zeros(30, 9)}, ValueError, r"must be \(vocabulary, 8\), but is \(30, 9\)"),
        ({"bias_V": torch.zeros(29)}, ValueError, r"bias must be \(30,\), but is \(29,\)"),
        ({"token_ids_N": torch.tensor([0, 1, 30, 2])}, ValueError, "token id 30 is outside the vocabulary of 30"),
        ({"vocab_size": 0}, ValueError, "from 1 to the 30 rows"),
        ({"vocab_size": 31}, ValueError, "from 1 to the 30 rows"),
        ({"vocab_size": 3}, ValueError, "token id 3 is outside the vocabulary of 3"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"temperature": float("nan")}, ValueError, "temperature must be positive"),
        ({"token_chunk": 0}, ValueError, "token_chunk must be at least 1, but is 0"),
        ({"vocab_chunk": -1}, ValueError, "vocab_chunk must be at least 1, but is -1"),
        ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be at least 1, but is 0"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {"hidden_ND": torch.zeros(4, 8), "weight_VD": torch.zeros(30, 8), "token_ids_N": torch.arange(4)}
    with pytest.raises(error, match=message):
        token_logprobs(**(arguments | change))


def tiny_model(config_class=Qwen3Config, model_class=Qwen3ForCausalLM, **overrides):
    torch.manual_seed(0)
    config = config_class(**(SIZES | {"attn_implementation": "eager"} | overrides))
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)  # logits of a few units, as trained models have
    return model


def batch():
    generator = torch.Generator().manual_seed(1)
    input_ids_BT = torch.randint(120, (3, 11), generator=generator)
    attention_mask_BT = torch.ones_like(input_ids_BT)
    attention_mask_BT[1, :4] = 0
    attention_mask_BT[2, :7] = 0
    return input_ids_BT, attention_mask_BT


def model_in_full(model, input_ids, attention_mask, *, temperature=1.0):
    """From full logits, one row at a time and without its padding."""
    logprobs_BT = torch.zeros(input_ids.shape[0], input_ids.shape[1] - 1)
    for row, (ids_T, mask_T) in enumerate(zip(input_ids, attention_mask, strict=True)):
        real_T = ids_T[mask_T.bool()]
        logprobs_TV = (model(real_T[None]).logits[0, :-1] / temperature).log_softmax(-1)
        start = int(mask_T.argmax())
        logprobs_BT[row, start : start + len(real_T) - 1] = logprobs_TV.gather(1, real_T[1:, None]).squeeze(1)
    return logprobs_BT


def test_a_model_gives_the_values_and_gradients_of_its_full_logits():
    model = tiny_model()
    logprobs_BT = model_logprobs(model, *batch(), temperature=0.8)
    logprobs_BT.sum().backward()
    actual = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected_BT = model_in_full(model, *batch(), temperature=0.8)
    expected_BT.sum().backward()
    assert logprobs_BT.shape == (3, 10)
    torch.testing.assert_close(logprobs_BT, expected_BT, rtol=0, atol=2e-5)
    torch.testing.assert_close(actual, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-4)


def test_padding_on_the_right_gives_the_same():
    model = tiny_model()
    input_ids_BT, attention_mask_BT = batch()
    right_ids_BT, right_mask_BT = (
        torch.stack([r.roll(-s) for r, s in zip(t, (0, 4, 7), strict=True)]) for t in batch()
    )
    left_BT = model_logprobs(model, input_ids_BT, attention_mask_BT)
    right_BT = model_logprobs(model, right_ids_BT, right_mask_BT)
    for row, shift in enumerate((0, 4, 7)):
        torch.testing.assert_close(left_BT[row, shift:], right_BT[row, : 10 - shift], rtol=0, atol=2e-5)
        assert not right_BT[row, 10 - shift :].any()


def test_positions_are_counted_from_the_mask():
    # learned absolute positions: counted from the padding they would give other numbers
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    torch.testing.assert_close(model_logprobs(model, *batch()), model_in_full(model, *batch()), rtol=0, atol=2e-5)


def test_a_completion_mask_selects_the_tokens_that_count():
    model = tiny_model(tie_word_embeddings=True)
    input_ids_BT, attention_mask_BT = batch()
    completion_mask_BT = torch.zeros_like(input_ids_BT)
    completion_mask_BT[:, -3:] = 1
    selected_BT = model_logprobs(model, input_ids_BT, attention_mask_BT, completion_mask_BT=completion_mask_BT)
    everything_BT = model_logprobs(model, input_ids_BT, attention_mask_BT)
    assert not selected_BT[:, :-3].any()
    torch.testing.assert_close(selected_BT[:, -3:], everything_BT[:, -3:], rtol=0, atol=1e-5)
    assert selected_BT[:, -3:].all()


def lora_model(**overrides):
    torch.manual_seed(0)
    config = LoraConfig(**({"r": 4, "target_modules": ["q_proj", "down_proj"]} | overrides))
    return get_peft_model(tiny_model(), config)


def test_adapters_are_applied_and_trained():
    model = lora_model(init_lora_weights=False)
    logprobs_BT = model_logprobs(model, *batch())
    logprobs_BT.sum().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    actual = {n: p.grad.clone() for n, p in trained.items()}
    model.zero_grad()
    expected_BT = model_in_full(model, *batch())
    expected_BT.sum().backward()
    torch.testing.assert_close(logprobs_BT, expected_BT, rtol=0, atol=2e-5)
    torch.testing.assert_close(actual, {n: p.grad for n, p in trained.items()}, rtol=1e-4, atol=1e-4)
    assert all(p.grad is None for n, p in model.named_parameters() if n not in trained)
    with model.disable_adapter():
        assert not torch.allclose(model_logprobs(model, *batch()), logprobs_BT, atol=1e-2)


def test_a_learned_prefix_is_applied():
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    input_ids_BT = batch()[0]
    attention_mask_BT = torch.ones_like(input_ids_BT)
    logits_BTV = model(input_ids=input_ids_BT, attention_mask=attention_mask_BT).logits
    expected_BT = logits_BTV[:, :-1].log_softmax(-1).gather(2, input_ids_BT[:, 1:, None]).squeeze(2)
    with torch.no_grad():
        actual_BT = model_logprobs(model, input_ids_BT, attention_mask_BT)
    torch.testing.assert_close(actual_BT, expected_BT.detach(), rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_learned_prompt_tokens_are_refused():
    model = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(Unsupported, match=r"no logits for each of \(3, 11\) input tokens, but \(3, 14, 120\)"):
        model_logprobs(model, *batch())


# ---- what a model does to the logits of its head -------------------------------------------------------------------

CAP = [("div", 5.0), ("tanh", 0.0), ("mul", 5.0)]


def stepped(logits, steps):
    for name, value in steps:
        if name == "mul":
            logits = logits * value
        elif name == "div":
            logits = logits / value
        else:
            logits = logits.tanh() if name == "tanh" else logits.float()
    return logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [(None, None), (7, 13)])
@pytest.mark.parametrize(
    "steps",
    [
        [("mul", 0.25)],
        [("div", -3.0)],
        [("float", 0.0)],
        CAP,
        [("float", 0.0), *CAP],
        [("mul", 0.7), *CAP, ("mul", 0.5)],
        [("tanh", 0.0)],
    ],
)
def test_steps_give_the_values_and_gradients_of_the_full_computation(steps, chunks, dtype):
    hidden_ND, weight_VD, bias_V, ids_N = tensors(20, 60, 8, dtype)
    inputs = hidden_ND, weight_VD, bias_V
    logits_NV = stepped(
        torch.nn.functional.linear(*inputs), [s for s in steps if dtype != torch.float64 or s[0] != "float"]
    )
    logprobs_NV = (logits_NV.to(torch.promote_types(dtype, torch.float32)) / 0.8).log_softmax(-1)
    expected_N = logprobs_NV.gather(1, ids_N[:, None]).squeeze(1)
    weights_N = torch.linspace(-1, 1, 20, dtype=expected_N.dtype)
    expected = torch.autograd.grad((expected_N * weights_N).sum(), inputs)
    token_chunk, vocab_chunk = chunks
    actual_N = token_logprobs(
        hidden_ND, weight_VD, ids_N, bias_V=bias_V, steps=steps, temperature=0.8,
        token_chunk=token_chunk, vocab_chunk=vocab_chunk,
    )  # fmt: skip
    actual = torch.autograd.grad((actual_N * weights_N).sum(), inputs)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # in bf16 too: the rounding of each step is the same
    torch.testing.assert_close(actual_N, expected_N, **tolerance)
    for mine, reference in zip(actual, expected, strict=True):
        assert relative_error(mine, reference) < 2 * GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([("pow", 2.0)], "pow is none of mul, div, tanh and float"),
        ([*CAP, *CAP], "there is more than one tanh"),
        ([("div", 0.0)], "a factor is 0 or not finite"),
    ],
)
def test_steps_that_cannot_be_applied_in_tiles_are_refused(steps, why):
    hidden_ND, weight_VD, _, ids_N = tensors(4, 30, 8, torch.float32)
    with pytest.raises(ValueError, match=why):
        token_logprobs(hidden_ND, weight_VD, ids_N, steps=steps)


def plain_logprobs(model, input_ids):
    """From full logits as the model returns them, in float32."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def compared(model):
    """Log-probabilities and gradients by `model_logprobs`, and those of full logits."""
    input_ids = torch.randint(100, (3, 11), generator=torch.Generator().manual_seed(2))
    found = []
    for logprobs in (model_logprobs(model, input_ids, torch.ones_like(input_ids)), plain_logprobs(model, input_ids)):
        model.zero_grad()
        logprobs.sum().backward()
        found.append((logprobs.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config_class", "model_class", "overrides"),
    [
        (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 5.0}),
        (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 30.0}),
        (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": None}),
        (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 4.0}),
        (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
    ],
)
def test_a_model_that_changes_its_logits_has_that_applied_in_chunks(config_class, model_class, overrides, dtype):
    model = tiny_model(config_class, model_class, **overrides).to(dtype)
    (actual_BT, actual), (expected_BT, expected) = compared(model)
    torch.testing.assert_close(actual_BT, expected_BT, rtol=0, atol=2e-5)
    for mine, reference in zip(actual, expected, strict=True):
        assert relative_error(mine, reference) < 2 * GRADIENT_TOLERANCE[dtype]


class Cut(Qwen3ForCausalLM):
    """Logits of a padded head, whose last rows stand for nothing."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits[..., :110]
        return output


class Scaled(Qwen3ForCausalLM):
    scale = 0.3

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.scale * output.logits.float() / torch.tensor(0.5)
        return output


class Old(Qwen3ForCausalLM):
    """A forward without logits_to_keep and position_ids."""

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


@pytest.mark.parametrize("model_class", [Cut, Scaled, Old])
def test_code_between_head_and_logits_is_followed_whoever_wrote_it(model_class):
    (actual_BT, actual), (expected_BT, expected) = compared(tiny_model(model_class=model_class))
    torch.testing.assert_close(actual_BT, expected_BT, rtol=0, atol=2e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def changed(change):
    """A class whose logits are what `change` makes of the head's."""

    class Changed(Qwen3ForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = change(output.logits, self)
            return output

    return Changed


def written(logits, _):
    logits[..., 3] = -50.0
    return logits


def capped_in_place(logits, _):
    logits.data.clamp_(max=3.0)
    return logits


def learned(logits, model):
    return logits * model.model.norm.weight[0]


ODD = {
    "clamp": lambda logits, _: logits.clamp(-4, 4),
    "in place": lambda logits, _: logits.div_(2.0),
    "setitem": written,
    "data": capped_in_place,
    "a bias": lambda logits, _: logits + torch.linspace(0, 3, logits.shape[-1]),
    "a trained scale": learned,
    "a vector": lambda logits, _: logits * torch.linspace(0.5, 2, logits.shape[-1]),
    "a mask": lambda logits, _: torch.where(torch.arange(logits.shape[-1]) < 3, -40.0, logits),
    "a mixture": lambda logits, _: torch.cat([logits[..., :50], logits[..., 50:] * 2], -1),
    "two caps": lambda logits, _: 3 * torch.tanh(4 * torch.tanh(logits / 4) / 3),
    "itself": lambda logits, _: logits * logits.detach(),
    "log_softmax": lambda logits, _: 0.5 * logits.log_softmax(-1),
    "narrower": lambda logits, _: logits.half().float(),
    "another order": lambda logits, _: logits.flip(-1),
    "some": lambda logits, _: logits[..., ::2].repeat_interleave(2, -1),
    "numpy": lambda logits, _: torch.sinh(logits / 4),
    "new": lambda logits, _: logits.detach().clone().as_subclass(torch.Tensor) * 0.1,
}


@pytest.mark.parametrize("odd", ODD)
def test_what_cannot_be_chunked_is_computed_in_full_and_said_once(odd):
    model = tiny_model(model_class=changed(ODD[odd]))
    input_ids_BT = batch()[0]
    with pytest.warns(UserWarning, match="of Changed are computed from full logits, tokens x 120 of them") as told:
        actual_BT = model_logprobs(model, input_ids_BT, torch.ones_like(input_ids_BT))
    assert len(told) == 1
    torch.testing.assert_close(actual_BT, plain_logprobs(model, input_ids_BT), rtol=0, atol=2e-5)
    again_BT = model_logprobs(model, input_ids_BT, torch.ones_like(input_ids_BT))  # a warning would be an error
    assert torch.equal(again_BT, actual_BT)


def with_own_forward(model):
    class Doubled(nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    model.lm_head.__class__ = Doubled


def with_forward_of_the_instance(model):
    head = model.lm_head
    head.forward = lambda hidden: 2 * nn.functional.linear(hidden, head.weight)


HEADS = {
    "a class's own forward": (with_own_forward, "is Doubled with a forward of its own"),
    "the instance's own forward": (with_forward_of_the_instance, "is Linear with a forward of its own"),
    "a hook": (lambda m: m.lm_head.register_forward_hook(lambda _m, _a, out: 2 * out), "with hooks on its forward"),
    "a hook before": (lambda m: m.lm_head.register_forward_pre_hook(lambda _m, a: (a[0] * 2,)), "with hooks on its"),
    "another module": (lambda m: setattr(m, "lm_head", nn.Sequential(m.lm_head)), "is Sequential, not a plain linear"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_is_more_than_its_weight_is_computed_in_full(kind):
    change, why = HEADS[kind]
    model = tiny_model()
    change(model)
    with pytest.warns(UserWarning, match=why):
        (actual_BT, actual), (expected_BT, expected) = compared(model)
    torch.testing.assert_close(actual_BT, expected_BT, rtol=0, atol=2e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapted_head_is_computed_in_full(target):
    model = lora_model(**target, init_lora_weights=False)
    with pytest.warns(UserWarning, match="not a plain linear layer: leave it out of the adapter's"):
        actual_BT = model_logprobs(model, *batch(), temperature=0.8)
    torch.testing.assert_close(actual_BT, model_in_full(model, *batch(), temperature=0.8), rtol=0, atol=2e-5)


def test_a_model_that_is_compiled_as_a_whole_is_computed_in_full():
    model = tiny_model(Gemma2Config, Gemma2ForCausalLM, final_logit_softcapping=5.0)
    expected_BT = model_in_full(model, *batch())
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match="are computed from full logits"):
        actual_BT = model_logprobs(model, *batch())
    torch.testing.assert_close(actual_BT, expected_BT, rtol=0, atol=2e-5)


def test_what_is_no_causal_lm_is_refused():
    class Headless(nn.Module):
        def forward(self, **_):
            return object()

    with pytest.raises(Unsupported, match="no logits for each"):
        model_logprobs(Headless(), *batch())


def test_no_hook_stays_on_the_model():
    model = tiny_model()
    model_logprobs(model, *batch())
    assert not model.lm_head._forward_hooks and not model.lm_head._forward_pre_hooks
    with pytest.raises(IndexError):
        model_logprobs(model, torch.full((1, 4), 1000), torch.ones(1, 4))
    assert not model.lm_head._forward_hooks and not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask_BT": torch.ones(3, 4)}, r"attention_mask must be \(3, 11\), but is \(3, 4\)"),
        ({"completion_mask_BT": torch.ones(3, 4)}, r"completion_mask must be \(3, 11\), but is \(3, 4\)"),
        ({"input_ids_BT": torch.ones(4).long(), "attention_mask_BT": torch.ones(4)}, r"must be \(batch, time\)"),
        ({"input_ids_BT": torch.ones(0, 4).long(), "attention_mask_BT": torch.ones(0, 4)}, "not empty"),
        ({"input_ids_BT": [[1, 2]]}, r"input_ids must be a tensor, not \[\[1, 2\]\]"),
        ({"input_ids_BT": torch.ones(3, 11)}, "input_ids must be integers, not torch.float32"),
        ({"attention_mask_BT": None}, "attention_mask must be a tensor, not None"),
        ({"completion_mask_BT": [[1, 1]]}, "completion_mask must be a tensor"),
        ({"attention_mask_BT": torch.ones(3, 11, device="meta")}, "not on one device, .* attention_mask on meta: move"),
    ],
    ids=str,
)
def test_wrong_inputs_are_named(change, message):
    arguments = dict(zip(("input_ids_BT", "attention_mask_BT"), batch(), strict=True))
    with pytest.raises((ValueError, TypeError), match=message):
        model_logprobs(tiny_model(), **(arguments | change))
