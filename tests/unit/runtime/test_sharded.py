"""A model that FSDP2 has sharded over one rank; two ranks are in tests/integration/test_sharded.py."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from transformers import AutoModelForCausalLM

import colo
from colo.trainer.master_weights import MasterWeights
from tests.runtimes import PROMPTS, adamw, make_engine, qwen3, train_step


def test_sharded_fp32_weights_that_compute_in_bf16_reach_an_engine_in_bf16(mesh):
    model = AutoModelForCausalLM.from_config(qwen3())
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    rt = colo.share(make_engine(torch.bfloat16), model, adamw(model.parameters()))
    for _ in range(3):
        assert all(len(c.token_ids) == 4 for c in rt.generate(PROMPTS, max_tokens=4))
        held = rt.engine.weights.hf_views()
        assert all(torch.equal(held[n], p.full_tensor().bfloat16()) for n, p in model.named_parameters())
        with rt.train():
            train_step(rt)
    assert rt.trace.metrics["mismatch_sampled"][-1] < 0.02
    rt.close()


def test_sharded_16_bit_weights_are_trained_without_masters_of_ours(mesh):
    model = AutoModelForCausalLM.from_config(qwen3(), dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh)
    with pytest.raises(colo.Unsupported, match=r"float32 and let FSDP2 compute in 16 bits.*MixedPrecisionPolicy"):
        MasterWeights(adamw)(model.parameters())


def test_a_model_that_fsdp_has_flattened_is_refused(mesh):
    whole = AutoModelForCausalLM.from_config(qwen3())
    model = FullyShardedDataParallel(whole, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(colo.Unsupported, match="shard the model with fully_shard"):
        colo.share(make_engine(), model, adamw(model.parameters()))


def test_a_sharded_adapter_is_refused_by_name(mesh):
    model = get_peft_model(AutoModelForCausalLM.from_config(qwen3()), LoraConfig(r=4, target_modules=["q_proj"]))
    fully_shard(model, mesh=mesh)
    with pytest.raises(colo.Unsupported, match=r"the adapter of model.layers.0.self_attn.q_proj is sharded over ranks"):
        colo.share(make_engine(), model, adamw([p for p in model.parameters() if p.requires_grad]))
