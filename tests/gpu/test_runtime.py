"""The runtime on CUDA: one copy of the weights, state that really leaves the device, nothing left behind."""

import gc
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, Qwen3Config

import colo
from colo.config import Offload, RuntimeConfig
from colo.memory.probe import free_device_bytes
from colo.phases.phase import TRAINER_OPTIMIZER, Phase
from colo.trainer.master_weights import MasterWeights
from colo.units import GIB, MIB

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]


def config(layers=2):
    return Qwen3Config(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=5000,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )


def fused(params):
    return AdamW(params, lr=1e-3, fused=True)


def launch(**options):
    settings = RuntimeConfig(kv_cache_bytes=64 * MIB, offload=Offload.ALWAYS, region_bytes=8 * MIB)
    return colo.launch(
        config(), **({"engine": "torch", "optimizer": fused, "device": "cuda", "config": settings} | options)
    )


def train_step(rt, step):
    ids = torch.randint(1, 5000, (4, 64), generator=torch.Generator().manual_seed(step)).to(CUDA)
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()
    return ids


@pytest.mark.usefixtures("deterministic")
def test_training_through_the_runtime_is_bit_equal_to_training_without_it():
    rt = launch(optimizer=MasterWeights(fused))
    twin = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).to(CUDA)
    twin.load_state_dict({name: p.detach().clone() for name, p in rt.model.state_dict().items()})
    optimizer = MasterWeights(fused)(twin.parameters())
    for step in range(4):
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=4)
        ids = train_step(rt, step)
        twin(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), (_, other) in zip(rt.model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(mine, other), name
    assert rt.bytes_synced == 0
    rt.close()


def test_state_leaves_the_device_for_a_rollout_and_the_driver_sees_it():
    rt = colo.launch(
        config(layers=16),
        engine="torch",
        optimizer=MasterWeights(fused),
        device="cuda",
        config=RuntimeConfig(kv_cache_bytes=GIB, offload=Offload.ALWAYS),
    )
    train_step(rt, 0)
    state_bytes = sum(rt.scheduler.segments[n].size_bytes for n in ("trainer.optimizer", "trainer.master_weights"))
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=2)
        rt.scheduler.settle()
        torch.cuda.empty_cache()
        in_rollout = free_device_bytes(CUDA)
    with rt.train():
        rt.scheduler.settle()
        torch.cuda.empty_cache()
        assert free_device_bytes(CUDA) - in_rollout >= 0.98 * GIB, "the KV cache has gone"
        rt.scheduler.require("trainer.optimizer")
        rt.scheduler.require("trainer.master_weights")
        left = free_device_bytes(CUDA)
    assert in_rollout + GIB - left >= 0.95 * state_bytes
    rt.close()


@pytest.mark.parametrize("lora", [None, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)])
def test_engine_and_trainer_agree_on_log_probabilities_before_and_after_training(lora):
    rt = launch(lora=lora, dtype=torch.float32)
    for step in range(3):
        with rt.rollout():
            completion = rt.generate([[5, 6, 7]], max_tokens=8, seed=1)[0]
        ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]], device=CUDA)
        with torch.no_grad():
            logprobs = rt.model(input_ids=ids).logits[0, 2:-1].float().log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, 3:, None]).squeeze(-1).cpu()
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-3)
        train_step(rt, step)
    assert rt.bytes_synced == 0
    rt.close()


def test_a_hundred_cycles_grow_nothing_on_the_device():
    rt = launch()
    readings = []
    for cycle in range(100):
        with rt.rollout():
            rt.generate([[1]], max_tokens=1)
        train_step(rt, cycle)
        if cycle in (3, 99):
            rt.scheduler.settle()
            gc.collect()
            torch.cuda.empty_cache()
            readings.append(
                (free_device_bytes(CUDA), rt.engine.mover.arena.pinned_bytes, rt.engine.mover.arena.used_bytes)
            )
    assert readings[0] == readings[1]
    rt.close()


def test_state_that_comes_back_is_no_working_memory():
    settings = RuntimeConfig(kv_cache_bytes=64 * MIB, offload=Offload.ALWAYS)
    found = {}
    for name in (Offload.NEVER, Offload.ALWAYS):
        rt = launch(config=replace(settings, offload=name), optimizer=MasterWeights(fused))
        for step in range(4):
            with rt.rollout():
                rt.generate(PROMPTS, max_tokens=4)
            train_step(rt, step)
        found[name] = rt.scheduler.working_bytes[Phase.TRAIN]
        state_bytes = rt.scheduler.segments[TRAINER_OPTIMIZER].size_bytes
        rt.close()
    # gradients and masters in fp32 take 56 MiB in a step, and moments as much
    assert found[Offload.ALWAYS] < found[Offload.NEVER] + state_bytes / 2


def test_closing_gives_the_device_back():
    launch().close()
    gc.collect()
    torch.cuda.empty_cache()
    before = free_device_bytes(CUDA)
    rt = launch(config=RuntimeConfig(kv_cache_bytes=4 * GIB))
    train_step(rt, 0)
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=4)
        assert before - free_device_bytes(CUDA) >= 4 * GIB
    rt.close()
    assert {p.device.type for p in rt.model.parameters()} == {"cpu"}
    assert {b.device.type for b in rt.model.buffers()} == {"cpu"}
    gc.collect()
    torch.cuda.empty_cache()
    assert before - free_device_bytes(CUDA) < 64 * MIB


def test_a_critic_leaves_the_device_for_a_rollout_and_trains_to_the_same_bits():
    def make():
        torch.manual_seed(0)
        critic = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1)).to(CUDA)
        return critic, fused(critic.parameters())

    def step(critic, optimizer):
        critic(torch.ones(4, 2048, device=CUDA)).square().mean().backward()
        optimizer.step()

    twin, (critic, optimizer) = make(), make()
    rt = launch()
    rt.park(critic, optimizer, name="critic")
    for number in range(3):
        train_step(rt, number)
        with rt.train():
            step(critic, optimizer)
            free = free_device_bytes(CUDA)
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=1)
            assert critic[0].weight.device.type == "cpu" and critic[0].weight.is_pinned()
            assert rt.scheduler.segments["critic"].device_bytes == 0
            assert free_device_bytes(CUDA) > free - 64 * MIB, "the KV cache has come, and the critic has gone"
        step(*twin)  # gradients are kept, and added to
    rt.close()
    assert critic[0].weight.device == CUDA
    assert all(torch.equal(a, b) for a, b in zip(critic.parameters(), twin[0].parameters(), strict=True))


def test_a_rollout_whose_memory_someone_else_took_is_refused_and_can_be_repeated():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=8 * GIB, offload=Offload.ALWAYS))
    train_step(rt, 0)
    rt.scheduler.settle()
    torch.cuda.empty_cache()
    hog = torch.empty(free_device_bytes(CUDA) - GIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(colo.BudgetError, match="engine.kv_cache needs 8.00 GiB"), rt.rollout():
        pytest.fail("entered")
    assert rt.phase == "idle"
    del hog
    with rt.rollout():
        assert rt.generate([[1]])[0].weights_version == 1
    train_step(rt, 1)
    rt.close()
