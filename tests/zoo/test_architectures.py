from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from colo.engine import Completion, SamplingParams
from colo.engines.sampling import processed_logprobs
from colo.engines.torch import TorchEngine
from colo.errors import Unsupported
from colo.units import MIB
from colo.weights.sources.module import ModuleSource
from tests.zoo.architectures import LEFT_OUT, REFUSED, tiny_config

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11], [8], [12, 13, 14]]
PARAMS = SamplingParams(n=2, max_tokens=5, seed=0)


@pytest.fixture(scope="module")
def served() -> Iterator[list[str]]:
    """Architectures that the embedded engine serves; how many is printed at the end (`pytest -rA`)."""
    names: list[str] = []
    yield names
    tried = len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - LEFT_OUT.keys())
    sys.stdout.write(
        f"the embedded engine serves {len(names)} of {tried} architectures, and refuses {len(REFUSED)} by name"
    )


def make_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model with weights large enough that a wrong position, mask or state shows in what it says."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name:
                parameter.add_(1)
    return model


def make_engine(model: PreTrainedModel, kv_cache_bytes: int = MIB) -> TorchEngine:
    engine = TorchEngine(model.config, device="cpu", dtype=torch.float32, kv_cache_bytes=kv_cache_bytes)
    engine.load_weights(ModuleSource(model))
    engine.commit(1)
    return engine


@torch.no_grad()
def whole_pass(model: PreTrainedModel, completion: Completion, params: SamplingParams = PARAMS) -> torch.Tensor:
    """Log-probabilities of a completion's tokens, computed over the whole sequence without a cache."""
    token_ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
    logits = model(input_ids=token_ids).logits[0, len(completion.prompt_token_ids) - 1 : -1]
    logprobs = processed_logprobs(logits, params)
    return logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("model_type", [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in LEFT_OUT])
def test_what_is_sampled_has_the_logprobs_of_a_whole_pass_or_the_model_is_refused_by_name(model_type, served):
    model = make_model(tiny_config(model_type))
    if model_type in REFUSED:
        with pytest.raises(Unsupported, match=f"cannot run {model.config.model_type} .*{REFUSED[model_type]}"):
            make_engine(model)
        return
    engine = make_engine(model)
    completions = engine.generate(PROMPTS, PARAMS)
    engine.close()
    assert [(c.prompt_index, c.sample_index) for c in completions] == [(p, s) for p in range(5) for s in range(2)]
    for completion in completions:
        assert torch.allclose(torch.tensor(completion.logprobs), whole_pass(model, completion), atol=1e-4)
    served.append(model_type)
