"""What a phase that does not fit leaves undone, on a CPU that plays a small device."""

import pytest
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, Qwen3Config

import colo
from colo.config import Offload, RuntimeConfig

CONFIG = Qwen3Config(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    eos_token_id=None,
)


@pytest.fixture
def tight():
    """A runtime where weights and KV cache fit, but not beside the optimizer's state, which has to stay."""
    model_bytes = sum(p.nbytes for p in AutoModelForCausalLM.from_config(CONFIG).parameters())
    config = RuntimeConfig(
        kv_cache_bytes=3 * model_bytes, device_limit_bytes=int(4.5 * model_bytes), offload=Offload.NEVER
    )
    runtime = colo.launch(CONFIG, optimizer=AdamW, config=config, device="cpu")
    yield runtime
    runtime.close()


def test_a_rollout_that_does_not_fit_is_refused_before_weights_are_published(tight):
    with tight.train():
        ids = torch.tensor([[1, 2, 3, 4]])
        tight.model(input_ids=ids, labels=ids).loss.backward()
        tight.optimizer.step()
    before = tight.publications
    with pytest.raises(colo.BudgetError, match="phase rollout needs"):
        with tight.rollout():
            pytest.fail("entered")
    assert tight.publications == before
    assert tight.engine.weights_version == 0

    tight.scheduler.offload = Offload.AUTO
    with tight.rollout():
        assert [publication.version for publication in tight.publications] == [0, 1]
