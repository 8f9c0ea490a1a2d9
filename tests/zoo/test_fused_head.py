"""TRL's fused LM head on every architecture: it computes what the model does, or `attach` refuses by name."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from colo.errors import Unsupported
from colo.trl.checks import check_fused_head
from tests.zoo.architectures import LEFT_OUT, tiny_config
from tests.zoo.test_logprobs import make_model, set_steps

pytest.importorskip("trl", reason="trl is not installed")

NOT_FOLLOWED = {"prophetnet": "its head computes two streams in one tensor"}
"""Architectures that are refused though TRL's head computes what they do."""

CRASH = {"llama4", "llama4_text", "rembert"}
"""Architectures that TRL's head fails on with an error of its own."""


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("model_type", [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in LEFT_OUT])
def test_trls_head_computes_what_the_model_does_or_is_refused(model_type):
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL takes full logits")
    config = tiny_config(model_type)
    set_steps(config)
    model = make_model(config, torch.float32)
    ids = torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        expected = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        utils.add_fused_lm_head(model)
        try:
            check_fused_head(model)
        except Unsupported as error:
            assert "on other log-probabilities than its own" in str(error)
            if model_type not in CRASH and model_type not in NOT_FOLLOWED:
                found = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
                assert (found - expected).abs().max() > 1e-3, "refused without a reason"
            return
        assert model_type not in CRASH
        found = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    assert (found - expected).abs().max() < 1e-4
