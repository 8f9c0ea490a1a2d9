"""vLLM on CUDA: one copy of the weights, in one process and in two."""

import pytest
import torch
from tiny_vllm import (
    CUDA,
    KV_CACHE_BYTES,
    MARKS,
    OPTIONS,
    PROMPTS,
    SIZES_OF_0_6B,
    config,
    config_of_0_6b,
    difference,
    launch,
    train_step,
)

import colo
from colo.config import RuntimeConfig
from colo.errors import PhaseError
from colo.memory.probe import free_device_bytes
from colo.units import GIB, MIB

pytestmark = MARKS


@pytest.fixture(scope="class", params=["its own process", "this process"])
def rt(request):
    """Qwen3 0.6B, with CUDA graphs and torch.compile."""
    rt = launch(config_of_0_6b(), own_process=request.param == "its own process")
    yield rt
    rt.close()


class TestOneCopy:
    def test_training_is_what_vllm_samples_from_next_and_nothing_is_sent(self, rt):
        with rt.rollout():
            before = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(rt.model, before) < 0.05
        for step in range(3):
            train_step(rt, step)
        with rt.rollout():
            after = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        assert difference(rt.model, after) < 0.05
        assert [c.token_ids for c in before] != [c.token_ids for c in after]
        assert after[0].weights_version == before[0].weights_version + 3
        assert rt.bytes_synced == 0 and rt.transport.name == "shared"
        assert "mismatch" in rt.report().facts

    def test_the_kv_cache_is_with_the_driver_while_training(self, rt):
        with rt.rollout():
            during = free_device_bytes(CUDA)
        with rt.train():
            assert free_device_bytes(CUDA) - during > 0.9 * KV_CACHE_BYTES
            with pytest.raises(PhaseError, match="inside train"):
                rt.generate(PROMPTS)


def test_close_gives_the_memory_back_and_another_can_be_launched_then():
    torch.cuda.empty_cache()
    free = [free_device_bytes(CUDA)]
    for _ in range(2):
        rt = launch(own_process=False)
        train_step(rt, 0)
        with rt.rollout():
            assert difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0)) < 0.02
        rt.close()
        torch.cuda.empty_cache()
        free.append(free_device_bytes(CUDA))
    assert free[0] - free[1] < KV_CACHE_BYTES // 4  # what vLLM's libraries keep in a process: 616 MiB on an H200
    assert free[1] - free[2] < 600 * MIB


def test_the_default_kv_cache_leaves_room_for_the_sampler_of_every_sequence():
    sizes = SIZES_OF_0_6B | {"num_hidden_layers": 8, "max_position_embeddings": 4096}  # 64 x 4,096 tokens: 8 GiB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    options = OPTIONS | {"own_process": False, "enforce_eager": True}
    limit = RuntimeConfig(device_limit_bytes=9 * GIB)
    engine, _ = colo.start(config(**sizes), engine="vllm", engine_options=options, device=CUDA, config=limit)
    engine.close()
    # weights, a KV cache of 0.96 GiB, and logits of 1,024 sequences in fp32 at the least
    assert 2 * GIB < torch.cuda.max_memory_reserved() - before < 8 * GIB
