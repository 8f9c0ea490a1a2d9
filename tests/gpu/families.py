"""A model of some family, an engine of the same in this process, and what has to be true of the two."""

from contextlib import contextmanager

import pytest
import torch
from tiny_vllm import CUDA, PROMPTS, difference
from transformers import AutoModelForCausalLM

from colo.units import GIB
from colo.weights.sources.module import ModuleSource

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "bfloat16",
}


@contextmanager
def both(kind, changes, folder, *, max_lora_rank=0, own_loader=False):
    """A transformers model of random weights, and vLLM that has loaded it from `folder`."""
    pytest.importorskip("vllm")
    from colo.engines.vllm.client.engine import VLLMEngine

    model = AutoModelForCausalLM.from_config(kind(**(SIZES | changes)), dtype=torch.bfloat16).to(CUDA)
    randomize(model, seed=0)
    model.save_pretrained(folder)
    engine = VLLMEngine(
        folder,
        max_lora_rank=max_lora_rank,
        own_process=False,
        share_memory=not own_loader,
        kv_cache_bytes=GIB // 4,
        device=CUDA,
        enforce_eager=True,
        enable_sleep_mode=False,  # of which vLLM has one for each process
        max_model_len=256,
        disable_log_stats=True,
    )
    engine.commit(0)
    try:
        yield model.eval(), engine
    finally:
        engine.close()


@torch.no_grad()
def randomize(model, seed):
    generator = torch.Generator(CUDA).manual_seed(seed)  # vLLM, as it starts, sets the seed of torch's own
    for name, tensor in ModuleSource(model):
        is_scale = "norm" in name or not isinstance(tensor, torch.nn.Parameter)
        std = 0.01 if "embed" in name and "gemma" in model.config.model_type else 0.05  # else tokens repeat themselves
        tensor.normal_(float(is_scale), std, generator=generator)


def assert_every_byte_is_recorded_and_replayed(model, engine, *, all_are_aliases, close):
    """`close` is how far the two may be apart in log-probability, on average."""
    parameters = ModuleSource(model).tensors()
    plan = engine.record_plan(parameters)
    assert plan.fallbacks == {}
    assert not all_are_aliases or plan.aliases.keys() == parameters.keys()
    assert plan.differences(parameters) == []
    for seed in (1, 2):
        assert difference(model, _sample(engine)) < close
        randomize(model, seed)
        assert set(plan.differences(parameters)) == set(parameters)
        assert difference(model, _sample(engine)) > 2 * close
        plan.replay(parameters)
        assert plan.differences(parameters) == []


def _sample(engine):
    engine.reset_prefix_cache()
    return engine.generate(PROMPTS, engine.sampling_params(temperature=0, max_tokens=16, ignore_eos=True))
