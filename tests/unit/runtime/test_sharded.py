"""A model that FSDP2 has sharded over one rank; two ranks are in tests/integration/test_sharded.py."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import colo
from colo.config import Offload
from colo.engine import EngineState
from colo.phases.phase import Phase
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


def test_sharded_16_bit_weights_have_sharded_masters_which_wait_in_host_memory(mesh):
    model = AutoModelForCausalLM.from_config(qwen3(), dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    rt = colo.share(make_engine(torch.bfloat16), model, MasterWeights(adamw)(model.parameters()))
    rt.scheduler.offload = Offload.ALWAYS
    optimizer = MasterWeights(adamw)(twin.parameters())
    for number in range(3):
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=4)
            masters = rt.scheduler.segments["trainer.master_weights"]
            assert masters.device_bytes == 0
            assert masters.host_bytes >= (4 * sum(p.numel() for p in twin.parameters()) if number else 0)
        with rt.train():
            train_step(rt)
        train_step(SimpleNamespace(model=twin, optimizer=optimizer))
        assert rt.optimizer.changed_fraction == optimizer.changed_fraction
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)
        assert torch.equal(rt.optimizer.master_of(mine).full_tensor(), optimizer.master_of(theirs))
    rt.close()


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_sharded_16_bit_weights_whose_state_was_streamed_step_on_when_colo_has_ended(mesh, moment_dtype):
    model = AutoModelForCausalLM.from_config(qwen3(), dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh)
    optimizer = MasterWeights(adamw)(model.parameters())
    config = colo.RuntimeConfig(optimizer="streamed", moment_dtype=moment_dtype)
    with colo.share(make_engine(torch.bfloat16), model, optimizer, config=config) as rt, rt.train():
        train_step(rt)
    before = [p.full_tensor().clone() for p in model.parameters()]
    train_step(SimpleNamespace(model=model, optimizer=optimizer))
    assert any(not torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))


def test_nccls_memory_is_away_while_the_engine_samples_and_back_before_anything_is_sent(mesh):
    model = AutoModelForCausalLM.from_config(qwen3())
    fully_shard(model, mesh=mesh)
    rt = colo.share(make_engine(), model, adamw(model.parameters()), config=colo.RuntimeConfig(suspend_nccl=True))
    said = []
    rt._turns._communicators = SimpleNamespace(  # over gloo there are none
        suspend=lambda: said.append(f"suspended {rt.engine.state}"),
        resume=lambda: said.append(f"resumed {rt.engine.state}"),
    )
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=2)
        assert said == ["suspended awake"]
    assert said == ["suspended awake", "resumed awake"]
    rt._turns._communicators.resume = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError), rt.rollout():
        pass
    assert rt.engine.state is EngineState.PAUSED and rt.phase is Phase.IDLE, "the engine sleeps all the same"
    rt._turns._communicators.resume = lambda: None
    rt.close()


def test_what_torch_distributed_checkpoint_loads_is_all_of_the_optimizers_state(mesh):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def shared():
        model = AutoModelForCausalLM.from_config(qwen3(), dtype=torch.bfloat16)
        fully_shard(model, mesh=mesh)
        return colo.share(make_engine(torch.bfloat16), model, MasterWeights(adamw)(model.parameters()))

    with shared() as rt, rt.train():
        train_step(rt)
        saved = get_optimizer_state_dict(rt.model, rt.optimizer, options=options)
    with shared() as rt:
        set_optimizer_state_dict(rt.model, rt.optimizer, saved, options=options)
        for name, parameter in rt.model.named_parameters():
            state, expected = rt.optimizer.state[parameter], saved["state"][name]
            assert state.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq", "master_weight"}
            assert all(
                torch.equal(getattr(state[key], "full_tensor", lambda v=state[key]: v)(), expected[key])
                for key in state
            )


def test_a_check_leaves_the_model_sharded(mesh):
    """Also what a backward pass would have sharded again; accelerate looks for the shards in the optimizer."""
    model = AutoModelForCausalLM.from_config(qwen3())
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    with colo.share(make_engine(), model, adamw(model.parameters())) as rt:
        colo.check(rt)
        assert all(isinstance(p, DTensor) for p in model.parameters())


def test_a_model_that_fsdp_has_flattened_is_refused(mesh):
    whole = AutoModelForCausalLM.from_config(qwen3())
    model = FullyShardedDataParallel(whole, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(colo.Unsupported, match="shard the model with fully_shard"):
        colo.share(make_engine(), model, adamw(model.parameters()))


def test_a_sharded_adapter_reaches_the_engine_whole_and_the_base_once(mesh):
    model = get_peft_model(AutoModelForCausalLM.from_config(qwen3()), LoraConfig(r=4, target_modules=["q_proj"]))
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    rt = colo.share(make_engine(), model, adamw(trained))
    for _ in range(3):
        rt.generate(PROMPTS, max_tokens=4)
        with rt.train():
            train_step(rt)
    assert rt.trace.metrics["mismatch_sampled"][-1] < 1e-5
    base_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    adapter_bytes = sum(p.nbytes for p in trained)
    assert [p.num_bytes for p in rt.publications] == [base_bytes + adapter_bytes, adapter_bytes, adapter_bytes]
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=4)
        trained[0].to_local().data.add_(1)
        with pytest.raises(colo.StaleWeights, match="what lies in this rank"):
            rt.generate(PROMPTS, max_tokens=4)
    version = rt.weights_version
    rt.generate(PROMPTS, max_tokens=4)
    assert rt.weights_version == version + 1 and len(rt.publications) == 5
    rt.close()
