"""`model_logprobs` of every architecture against its full logits, with caps and scales set to what shows."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from colo.rl.logprob import model_logprobs
from tests.zoo.architectures import LEFT_OUT, tiny_config

STEPS = {
    "final_logit_softcapping": 5.0,
    "logits_soft_cap": 4.0,
    "logits_scaling": 4.0,
    "logit_scale": 0.3,
    "lm_head_multiplier": 0.4,
}
"""Settings that change the logits of a head, by the names that configs give them."""

CHANGE_THEIR_LOGITS = {
    *("beam", "cohere", "cohere2", "cohere2_moe", "falcon_h1", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
    *("gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "granite", "granite_swa"),
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hyperclovax", "inkling2_text"),
    *("nanochat", "recurrent_gemma", "vaultgemma"),
}
IN_FULL = {"prophetnet": "does not call the head once"}
NOT_IN_BF16 = {"inkling2_text": "transformers multiplies float32 with bfloat16 in it"}


def set_steps(config: PretrainedConfig) -> None:
    for name, value in STEPS.items():
        if hasattr(config, name):
            with suppress(AttributeError):  # of a property that is derived from others
                setattr(config, name, value)


def make_model(config: PretrainedConfig, dtype: torch.dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name:
                parameter.add_(1)
    return model.to(dtype)


def gradients(model: torch.nn.Module, logprobs: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    logprobs.sum().backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.float().flatten() for gradient in found])


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in LEFT_OUT])
def test_log_probabilities_are_those_of_the_models_own_logits(model_type, dtype):
    if dtype is torch.bfloat16 and model_type in NOT_IN_BF16:
        pytest.skip(NOT_IN_BF16[model_type])
    config = tiny_config(model_type)
    set_steps(config)
    model = make_model(config, dtype)
    ids = torch.randint(3, 60, (2, 9))
    logits = model(input_ids=ids, use_cache=False).logits
    expected = (logits[:, :-1].float() / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected_gradients = gradients(model, expected)
    if model_type in IN_FULL:
        with pytest.warns(UserWarning, match=IN_FULL[model_type]):
            actual = model_logprobs(model, ids, torch.ones_like(ids), temperature=0.7)
    else:
        actual = model_logprobs(model, ids, torch.ones_like(ids), temperature=0.7)
    assert (actual - expected).abs().max() < 2e-5
    difference = (gradients(model, actual) - expected_gradients).norm()
    assert difference < (1e-4 if dtype is torch.float32 else 0.03) * expected_gradients.norm()
    if model_type in CHANGE_THEIR_LOGITS:
        hidden = []
        with model.get_output_embeddings().register_forward_hook(lambda _m, _a, output: hidden.append(output)):
            model(input_ids=ids, use_cache=False)
        assert (hidden[0].float() - logits.float()).abs().max() > 0.1
