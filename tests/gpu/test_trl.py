"""TRL's flag on CUDA, with the embedded engine."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from colo.phases.phase import Phase
from colo.testing import tiny_tokenizer
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from tests.trainers import ALPHABET, logged, trainer_of

pytestmark = pytest.mark.gpu
LAYERS, HIDDEN, TOKENS, SEQUENCES = 12, 512, 1000, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint in bf16, 12 layers deep."""
    folder, tokenizer = tmp_path_factory.mktemp("deep"), tiny_tokenizer(ALPHABET)
    marks = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        **marks,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**marks)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_activations_in_host_memory_leave_the_device_and_train_to_the_same_bits(checkpoint, tmp_path, deterministic):
    prompts = Dataset.from_dict({"prompt": [f"{i % 10}" * TOKENS for i in range(32)]})

    def run(**changes):
        trainer = trainer_of(
            checkpoint,
            tmp_path,
            kind=ColoGRPOTrainer,
            config=ColoGRPOConfig,
            dataset=prompts,
            use_cpu=False,
            bf16=True,
            gradient_checkpointing=True,
            per_device_train_batch_size=SEQUENCES,
            learning_rate=1e-3,
            fast_inference=True,
            colo_engine="torch",
            colo_kv_cache_bytes="512MiB",
            colo_seeded=True,
            **changes,
        )
        trainer.train()
        weights = [weight.detach().cpu() for weight in trainer.model.parameters()]
        beside_bytes = trainer.colo.scheduler.working_bytes[Phase.TRAIN]
        trainer.colo.close()
        return weights, logged(trainer, "loss"), beside_bytes

    weights, losses, kept_bytes = run()
    same_weights, same_losses, away_bytes = run(colo_offload_activations=True)
    assert losses == same_losses
    assert all(torch.equal(one, other) for one, other in zip(weights, same_weights, strict=True))
    # of the inputs of all layers one or two are there at a time
    assert kept_bytes - away_bytes > (LAYERS - 4) * SEQUENCES * TOKENS * HIDDEN * 2
