"""TRL's trainers with colo beneath them, on the embedded engine: what users do with them goes on working."""

import asyncio
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer

import colo
import colo.trl
from colo.config import RuntimeConfig
from colo.errors import PhaseError
from colo.phases.phase import Phase
from colo.testing import tiny_checkpoint
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer, ColoRLOOConfig, ColoRLOOTrainer
from tests.trainers import ALPHABET, SMALL_CACHE, digits, frozen, logged, sums, trained, trainer_of

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True)
IMPORTANCE = "sampling/importance_sampling_ratio/"
GAP = "sampling/sampling_logp_difference/max"
CLOSE = 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), alphabet=ALPHABET))


@pytest.fixture
def make(checkpoint, tmp_path):
    """Makes trainers of the tiny checkpoint with colo attached, and closes what is open after the test."""
    made = []

    def build(*, lora=False, attach=True, folder=tmp_path, rt_config=SMALL_CACHE, seeded=False, **changes):
        made_with = {"peft_config": LORA} if lora else {}
        made_with |= changes.pop("made_with", {})
        trainer = trainer_of(changes.pop("model", checkpoint), folder, made_with=made_with, **changes)
        made.append(trainer)
        if attach:
            colo.trl.attach(trainer, engine="torch", config=rt_config, seeded=seeded)
        return trainer

    yield build
    for trainer in made:
        colo.trl.detach(trainer)


def assert_same(left, right):
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []


def saved(folder, checkpoint, lora):
    """The weights that a folder has, under the names of a trainer's model."""
    if not lora:
        return trained(AutoModelForCausalLM.from_pretrained(folder))
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    return trained(PeftModel.from_pretrained(base, folder, is_trainable=True))


def assert_trained_on_what_was_sampled(trainer, steps=2, *, rollouts=None):
    rewards = logged(trainer)
    assert len(logged(trainer, "loss")) == steps
    assert len(rewards) == (rollouts or steps)
    assert all(0 <= reward <= len(trainer.reward_funcs) for reward in rewards)
    assert all(torch.tensor(logged(trainer, "loss")).isfinite())
    assert max(logged(trainer, "grad_norm")) > 0
    assert max(logged(trainer, GAP)) < CLOSE
    assert trainer.colo.bytes_synced == 0
    assert trainer.colo.phase is Phase.IDLE


# ---- what is trained, and from which weights completions come -------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_completions_come_from_the_trained_weights_and_nothing_is_sent(make, lora):
    trainer = make(lora=lora, max_steps=3)
    assert trainer.colo.transport.shares
    before, base = trained(trainer.model), frozen(trainer.model)
    trainer.train()
    assert_trained_on_what_was_sampled(trainer, 3)
    for name in ("min", "mean", "max"):
        assert logged(trainer, IMPORTANCE + name) == pytest.approx([1.0] * 3, abs=CLOSE)
    assert all(not torch.equal(before[name], p) for name, p in trained(trainer.model).items())
    assert_same(frozen(trainer.model), base)  # bit for bit
    assert bool(base) is lora
    assert trainer.colo.weights_version == 3


def test_weights_in_bf16_have_masters_and_small_updates_are_not_lost(make):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"}, learning_rate=1e-4)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    masters = trainer.optimizer.optimizer
    assert isinstance(masters, MasterWeightsOptimizer)
    trainer.train()
    assert max(logged(trainer, GAP)) < 0.1
    assert trainer.colo.bytes_synced == 0
    decays = [group["weight_decay"] for group in masters.param_groups]
    assert len(decays) == 2  # TRL's own groups, by the parameters' names


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_same_steps_as_without_parking(make, lora, tmp_path):
    """Where everything leaves for every rollout, weights are bit for bit those of a run in which all stays."""
    ends = []
    for offload in ("never", "always"):
        config = RuntimeConfig(kv_cache_bytes=1 << 20, offload=offload, region_bytes=1 << 18)
        trainer = make(lora=lora, rt_config=config, seeded=True, max_steps=3, folder=tmp_path / offload)
        trainer.train()
        assert_trained_on_what_was_sampled(trainer, 3)
        ends.append(trained(trainer.model))
        in_rollout = [s.host_bytes for s in trainer.colo.trace.samples if s.phase is Phase.ROLLOUT]
        assert (max(in_rollout) > 0) is (offload == "always")
        trainer.colo.close()
    assert_same(*ends)


# ---- how often it generates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rollouts"),
    [
        ({"steps_per_generation": 1}, 8),  # two for each step
        ({"steps_per_generation": 4}, 2),  # one for two steps
        ({"num_iterations": 2}, 2),
        ({"steps_per_generation": 4, "num_iterations": 2}, 1),
        ({"gradient_accumulation_steps": 1}, 4),
    ],
    ids=str,
)
def test_a_rollout_serves_as_many_passes_as_the_config_says(make, changes, rollouts):
    trainer = make(max_steps=4, rt_config=RuntimeConfig(kv_cache_bytes=1 << 20, offload="always"), **changes)
    version = trainer.colo.weights_version
    before = [len(_phases(trainer, phase)) for phase in (Phase.ROLLOUT, Phase.TRAIN)]
    trainer.train()
    assert_trained_on_what_was_sampled(trainer, 4, rollouts=min(4, rollouts))
    assert trainer.colo.weights_version - version == 4
    after = [len(_phases(trainer, phase)) for phase in (Phase.ROLLOUT, Phase.TRAIN)]
    assert after == [count + rollouts for count in before]  # and trains on each without leaving in between


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_reference_model(make, lora):
    trainer = make(lora=lora, beta=0.1, max_steps=3)
    assert (trainer.ref_model is None) is lora
    trainer.train()
    assert_trained_on_what_was_sampled(trainer, 3)
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-4


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradient_checkpointing(make, lora):
    trainer = make(lora=lora, gradient_checkpointing=True)
    trainer.train()
    assert_trained_on_what_was_sampled(trainer)


def test_autocast(make):
    trainer = make(bf16=True)
    trainer.train()
    assert logged(trainer)[0] >= 0
    assert max(logged(trainer, GAP)) < 0.1


# ---- evaluation, checkpoints ----------------------------------------------------------------------------------------


def test_evaluation_before_during_and_after_training_and_training_twice(make):
    trainer = make(eval_strategy="steps", eval_steps=1)
    first = trainer.evaluate()
    assert 0 <= first["eval_reward"] <= 1
    assert trainer.colo.phase is Phase.IDLE
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 2
    trainer.evaluate()
    assert trainer.colo.phase is Phase.IDLE
    trainer.args.max_steps = 4
    trainer.train()
    assert trainer.colo.weights_version == 2 + 4
    assert max(logged(trainer, GAP)) < CLOSE
    assert "test_loss" in trainer.predict(sums(8)).metrics
    assert trainer.colo.phase is Phase.IDLE


def test_the_best_model_is_loaded_at_the_end(make, checkpoint):
    trainer = make(
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=False,
    )
    trainer.train()
    assert_same(trained(trainer.model), saved(trainer.state.best_model_checkpoint, checkpoint, False))
    prompts = [[1, 10, 2, 11]]
    (completion,) = trainer.colo.generate(prompts, max_tokens=4, temperature=1.0, ignore_eos=True)
    loaded = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    ids = torch.tensor([prompts[0] + list(completion.token_ids)])
    expected = loaded(ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
    assert torch.allclose(expected, torch.tensor(completion.logprobs), atol=CLOSE)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("offload", ["auto", "always"])
def test_saves_are_equal_in_every_phase_and_after_close(make, checkpoint, tmp_path, lora, offload):
    expected, phases = {}, set()

    def save(name):
        phases.add(trainer.colo.phase if hasattr(trainer, "colo") else "closed")
        expected[name] = trained(trainer.model)
        trainer.save_model(str(tmp_path / name))

    def reward(completions, **_):
        save(f"reward_{trainer.state.global_step}")
        return digits(completions)

    class Saver(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            save(f"substep_{state.global_step}")

        def on_step_end(self, args, state, control, **_):
            save(f"step_{state.global_step}")

    config = RuntimeConfig(kv_cache_bytes=1 << 20, offload=offload, region_bytes=1 << 18)
    trainer = make(
        lora=lora,
        reward=reward,
        callbacks=[Saver()],
        rt_config=config,
        vllm_importance_sampling_correction=False,  # with which TRL's own forward pass comes before the rewards
    )
    trainer.train()
    trainer.colo.close()
    save("closed")
    assert phases >= {Phase.ROLLOUT, Phase.TRAIN, "closed"}
    assert len(expected) == 7
    for name, weights in expected.items():
        assert_same(weights, saved(tmp_path / name, checkpoint, lora))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("offload", ["auto", "always"])
def test_a_resumed_run_is_bit_equal(make, tmp_path, lora, offload):
    config = RuntimeConfig(kv_cache_bytes=1 << 20, offload=offload, region_bytes=1 << 18)
    given = {"lora": lora, "seeded": True, "rt_config": config, "save_strategy": "steps", "save_steps": 2}
    straight = make(folder=tmp_path / "a", max_steps=4, **given)
    straight.train()
    expected, rewards = trained(straight.model), logged(straight)
    straight.colo.close()
    first = make(folder=tmp_path / "b", max_steps=2, **given)
    first.train()
    first.colo.close()
    second = make(folder=tmp_path / "b", max_steps=4, **given)
    second.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert logged(second) == rewards
    assert_same(trained(second.model), expected)


def test_a_resumed_run_in_bf16_is_bit_equal(make, tmp_path):
    given = {"seeded": True, "save_strategy": "steps", "save_steps": 1, "model_init_kwargs": {"dtype": "bfloat16"}}
    given["learning_rate"] = 1e-4
    straight = make(folder=tmp_path / "a", max_steps=2, **given)
    straight.train()
    again = make(folder=tmp_path / "b", max_steps=2, **given)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert_same(trained(again.model), trained(straight.model))


def test_a_trainer_that_resumes_after_an_error_ends_with_the_same_bits(make, tmp_path):
    def reward(completions, **_):
        if trainer.state.global_step == 1 and not raised:
            raised.append(True)
            raise RuntimeError("this reward is broken")
        return digits(completions)

    raised = [True]
    given = {"reward": reward, "seeded": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    trainer = make(folder=tmp_path / "a", **given)
    trainer.train()
    expected, rewards = trained(trainer.model), logged(trainer)
    raised.clear()
    trainer = make(folder=tmp_path / "b", **given)
    with pytest.raises(RuntimeError, match="this reward is broken"):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert logged(trainer) == rewards
    assert_same(trained(trainer.model), expected)


# ---- rewards and rollouts of the user's -----------------------------------------------------------------------------


def test_several_rewards_and_an_asynchronous_one(make):
    async def slow(completions, **_):
        await asyncio.sleep(0.01)
        return [0.5] * len(completions)

    def unsure(completions, **_):
        return [None if i % 2 else 1.0 for i, _ in enumerate(completions)]

    trainer = make(reward=[digits, slow, unsure])
    trainer.train()
    assert logged(trainer, "rewards/slow/mean") == [0.5, 0.5]
    assert logged(trainer, "rewards/unsure/mean") == [1.0, 1.0]
    assert len(logged(trainer, "rewards/digits/mean")) == 2


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        (lambda n: [1.0], "1 values for 16 completions at step 1: return a list of 16 numbers"),
        (lambda n: ["1"] * n, "'1' for completion 0 of 16 at step 1: return a finite number"),
        (lambda n: "good", "'good' at step 1: return a list"),
        (lambda n: None, "None at step 1: return a list"),
        (lambda n: [0.5, float("nan")] * (n // 2), "nan for completion 1 of 16 at step 1: return a finite number"),
        (lambda n: torch.full((n,), float("inf")), "inf for completion 0 of 16 at step 1: return a finite number"),
        (lambda n: [[1.0]] * n, "[1.0] for completion 0 of 16 at step 1: return a finite number"),
    ],
    ids=["length", "strings", "word", "none", "nan", "infinite", "nested"],
)
def test_a_reward_that_returns_something_else_is_named_before_a_step_is_made(make, returns, words):
    def mine(completions, **_):
        return returns(len(completions)) if broken else digits(completions)

    broken = [True]
    trainer = make(reward=[digits, mine])
    before = trained(trainer.model)
    with pytest.raises(ValueError, match=re.escape(f"reward 'mine' returned {words}")) as raised:
        trainer.train()
    assert "\n" not in str(raised.value)
    assert_same(trained(trainer.model), before)
    broken.clear()
    trainer.train()
    assert_trained_on_what_was_sampled(trainer)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
def test_a_rollout_function_of_two_turns_stays_in_one_phase(make):
    entered = []

    def two_turns(prompts, trainer):
        ids = trainer.processing_class(text=prompts)["input_ids"]
        _, first, first_logprobs, _ = trainer.vllm_generation.generate(ids, None, 4)
        entered.append(len(_phases(trainer, Phase.ROLLOUT)))
        again = [prompt + turn[:1] for prompt, turn in zip(ids, first, strict=True)]
        _, second, second_logprobs, _ = trainer.vllm_generation.generate(again, None, 4)
        entered.append(len(_phases(trainer, Phase.ROLLOUT)))
        return {
            "prompt_ids": ids,
            "completion_ids": [a[:1] + b for a, b in zip(first, second, strict=True)],
            "logprobs": [[x[0] for x in a[:1] + b] for a, b in zip(first_logprobs, second_logprobs, strict=True)],
        }

    trainer = make(made_with={"rollout_func": two_turns})
    trainer.train()
    assert_trained_on_what_was_sampled(trainer)
    assert entered[0] == entered[1] < entered[2] == entered[3]  # no phase has ended between two turns


def frames_compiled(make, attach):
    """How many frames `torch.compile` looks at in three steps, those of files of colo's among them, and the weights."""

    def rollout(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        if attach:
            trainer.vllm_generation.generate(ids, None, 1)
        drawn = torch.Generator().manual_seed(trainer.state.global_step)
        made = torch.randint(0, 12, (len(ids), 4), generator=drawn).tolist()
        return {"prompt_ids": ids, "completion_ids": made, "logprobs": [[-2.5] * 4] * len(ids)}

    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    trainer = make(
        attach=attach,
        made_with={"rollout_func": rollout},
        torch_compile=True,
        torch_compile_backend="eager",
        vllm_importance_sampling_correction=False,
        max_steps=3,
        gradient_accumulation_steps=1,
        rt_config=RuntimeConfig(kv_cache_bytes=1 << 20, offload="always"),
    )
    trainer.train()
    files = [metrics.co_filename or "" for metrics in get_compilation_metrics()]
    folder = str(Path(colo.__file__).parent)
    return counters["frames"]["total"], [name for name in files if name.startswith(folder)], trained(trainer.model)


@pytest.mark.filterwarnings("ignore")  # of the compiler's and of TRL's, on their own features
def test_the_compiler_is_not_sent_through_colos_own_code(make, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        plain, _, expected = frames_compiled(make, False)
        found, of_colo, weights = frames_compiled(make, True)
    finally:
        torch._dynamo.reset()
    assert of_colo == []
    assert 0 < found <= 2 * plain + 20  # a hook is where a graph ends
    assert_same(weights, expected)


def _phases(trainer, phase):
    return [s for s in trainer.colo.trace.spans if s.category == "phase" and s.name == str(phase)]


# ---- conversations, tools, environments -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A model that takes every text, with marks for messages."""
    return str(tiny_checkpoint(tmp_path_factory.mktemp("chat")))


def conversations(**columns):
    prompts = [[{"role": "user", "content": f"{i}?"}] for i in range(8)]
    return Dataset.from_dict({"prompt": prompts} | {name: [value] * 8 for name, value in columns.items()})


def length(completions, **_):
    """More for longer contents; completions are lists of messages."""
    return [len(completion[-1]["content"]) / 100 for completion in completions]


def test_prompts_that_are_conversations(make, chat):
    trainer = make(model=chat, dataset=conversations(), reward=length)
    trainer.train()
    assert_trained_on_what_was_sampled(trainer)


def calling(tokenizer, name, **arguments):
    """`tokenizer`, by which every other answer of a first turn calls a function."""

    def parse(ids, **_):
        content = tokenizer.decode(ids, skip_special_tokens=True)
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}] if ids[0] % 2 else []
        return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})

    tokenizer.response_template, tokenizer.parse_response = {}, parse
    return tokenizer


TOOL_RUN = {
    "max_completion_length": 160,
    "generation_kwargs": {"max_tokens": 6},
    "max_tool_calling_iterations": 1,
    "learning_rate": 1e-3,
}


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory':UserWarning")
@pytest.mark.parametrize("way", ["tools", "environment"])
def test_tools_are_called_and_the_turns_after_them_come_from_the_same_weights(make, chat, way):
    called, entered = [], []

    def double(number: int) -> int:
        """
        Twice a number.

        Args:
            number: The number.
        """
        called.append(number)
        entered.append(len(_phases(trainer, Phase.ROLLOUT)))
        return 2 * number

    class Doubling:
        def reset(self, **_):
            return None

        def double(self, number: int) -> int:
            """
            Twice a number.

            Args:
                number: The number.
            """
            return double(number)

    given = {"tools": [double]} if way == "tools" else {"environment_factory": Doubling}
    given["processing_class"] = calling(AutoTokenizer.from_pretrained(chat), "double", number=21)
    trainer = make(model=chat, dataset=conversations(), reward=length, made_with=given, **TOOL_RUN)
    trainer.train()
    assert_trained_on_what_was_sampled(trainer)
    assert set(called) == {21}
    assert max(logged(trainer, "tools/call_frequency")) > 0
    assert logged(trainer, "tools/failure_frequency") == [0, 0]
    phases = len(_phases(trainer, Phase.ROLLOUT))
    assert phases - min(entered) == 2  # a phase for each step, whose turns no other separates


# ---- what goes wrong, and what can be done then ---------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_reward_that_raises_and_training_again(make, lora):
    def reward(completions, **_):
        if trainer.state.global_step == 1 and not raised:
            raised.append(trainer.colo.phase)
            raise RuntimeError("this reward is broken")
        return digits(completions)

    raised = []
    config = RuntimeConfig(kv_cache_bytes=1 << 20, offload="always")
    trainer = make(lora=lora, reward=reward, rt_config=config)
    with pytest.raises(RuntimeError, match="this reward is broken"):
        trainer.train()
    assert raised == [Phase.TRAIN]
    trainer.train()
    assert trainer.state.global_step == 2
    assert max(logged(trainer, GAP)) < CLOSE
    assert trainer.colo.weights_version == 3


def test_close_after_a_reward_that_raises(make):
    def reward(completions, **_):
        raise RuntimeError("this reward is broken")

    trainer = make(reward=reward)
    with pytest.raises(RuntimeError, match="this reward is broken"):
        trainer.train()
    trainer.colo.close()
    assert not hasattr(trainer, "colo")


@pytest.mark.parametrize("offload", ["auto", "always"])
def test_an_interrupt_in_a_reward_then_save_and_go_on(make, tmp_path, checkpoint, offload):
    def reward(completions, **_):
        if trainer.state.global_step == 1 and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return digits(completions)

    interrupted = []
    trainer = make(reward=reward, rt_config=RuntimeConfig(kv_cache_bytes=1 << 20, offload=offload))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    assert_same(trained(trainer.model), saved(tmp_path / "after", checkpoint, False))
    trainer.train()
    assert trainer.colo.weights_version == 3
    assert max(logged(trainer, GAP)) < CLOSE


# ---- the end of a runtime -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("way", ["detach", "close"])
def test_a_trainer_goes_on_alone(make, lora, way):
    trainer = make(lora=lora, attach=False)
    before = {name: value for name, value in vars(trainer).items() if name != "optimizer"}
    callbacks = list(trainer.callback_handler.callbacks)
    hooks = {name: len(m._forward_pre_hooks) for name, m in trainer.model.named_modules()}
    colo.trl.attach(trainer, engine="torch", config=SMALL_CACHE)
    trainer.train()
    at_end = trained(trainer.model)
    colo.trl.detach(trainer) if way == "detach" else trainer.colo.close()
    assert_same(trained(trainer.model), at_end)
    assert not hasattr(trainer, "colo")
    assert not hasattr(trainer, "vllm_generation")
    for name in ("use_vllm", "vllm_mode", "_last_loaded_step"):
        assert getattr(trainer, name, None) == before.get(name)
    assert trainer.callback_handler.callbacks == callbacks
    assert {name: len(m._forward_pre_hooks) for name, m in trainer.model.named_modules()} == hooks
    trainer.args.max_steps = 4
    trainer.train()
    assert len(logged(trainer)) == 4  # of the second run alone
    assert not any(name.startswith("colo/") for name in trainer.state.log_history[-2])
    colo.trl.detach(trainer)  # does nothing


def test_a_trainer_can_be_attached_to_again(make):
    trainer = make()
    with pytest.raises((PhaseError, ValueError)):
        colo.trl.attach(trainer, engine="torch", config=SMALL_CACHE)
    trainer.train()
    trainer.colo.close()
    colo.trl.attach(trainer, engine="torch", config=SMALL_CACHE)
    trainer.args.max_steps = 4
    trainer.train()
    assert max(logged(trainer, GAP)) < CLOSE


# ---- the flag -------------------------------------------------------------------------------------------------------

FLAG = {"fast_inference": True, "colo_engine": "torch", "colo_kv_cache_bytes": "1MiB"}
KINDS = {
    "grpo": (ColoGRPOTrainer, ColoGRPOConfig),
    "rloo": (ColoRLOOTrainer, ColoRLOOConfig),
}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", KINDS)
def test_the_flag_loads_a_named_model_once(make, checkpoint, tmp_path, name, lora):
    kind, config = KINDS[name]
    trainer = make(attach=False, lora=lora, kind=kind, config=config, **FLAG)
    original = AutoModelForCausalLM.from_pretrained(checkpoint)
    given = dict(trainer.model.get_base_model().named_parameters() if lora else trainer.model.named_parameters())
    for key, p in original.named_parameters():
        assert torch.equal(given.get(key, given.get(key.replace(".weight", ".base_layer.weight"))), p)
    base = frozen(trainer.model)
    trainer.train()
    assert len(logged(trainer)) == 2
    assert max(logged(trainer, "colo/mismatch")) < CLOSE
    assert trainer.colo.bytes_synced == 0
    assert_same(frozen(trainer.model), base)
    trainer.save_model(str(tmp_path / "saved"))
    assert_same(trained(trainer.model), saved(tmp_path / "saved", checkpoint, lora))
    trainer.colo.close()
    assert not hasattr(trainer, "colo")
    trainer.args.max_steps = 3
    trainer.train()


def test_the_flag_attaches_to_a_model_that_is_given(make, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    trainer = make(attach=False, model=model, kind=ColoGRPOTrainer, config=ColoGRPOConfig, **FLAG)
    assert trainer.model is model
    trainer.train()
    assert_trained_on_what_was_sampled(trainer)


def test_the_flags_run_is_that_of_attach(make, tmp_path):
    """With the same seeds, whichever way the engine came to the trainer."""
    flagged = make(
        attach=False, kind=ColoGRPOTrainer, config=ColoGRPOConfig, colo_seeded=True, folder=tmp_path / "a", **FLAG
    )
    flagged.train()
    attached = make(seeded=True, folder=tmp_path / "b")
    attached.train()
    assert_same(trained(flagged.model), trained(attached.model))


def test_released_gradients_train_as_kept_ones(make, tmp_path):
    class Counts(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            self.gradients = sum(p.grad is not None for p in model.parameters())

    counts = {"released": Counts(), "kept": Counts()}

    def run(name, **changes):
        trainer = make(
            attach=False,
            kind=ColoGRPOTrainer,
            config=ColoGRPOConfig,
            folder=tmp_path / name,
            gradient_accumulation_steps=1,
            max_grad_norm=0.0,
            colo_seeded=True,
            **FLAG,
            **changes,
        )
        trainer.add_callback(counts[name])
        trainer.train()
        return trainer

    released, kept = run("released", colo_release_gradients=True), run("kept")
    assert_same(trained(released.model), trained(kept.model))
    assert counts["released"].gradients < counts["kept"].gradients == len(list(kept.model.parameters()))


def test_without_the_flag_it_is_trls_trainer(make):
    with pytest.warns(
        UserWarning, match="ColoGRPOTrainer without fast_inference=True trains as TRL's own .*pass args="
    ):
        trainer = make(attach=False, kind=ColoGRPOTrainer, config=ColoGRPOConfig)
    assert not hasattr(trainer, "colo")
    with pytest.raises(AttributeError, match=r"no runtime: .*fast_inference=True"):
        trainer.colo  # noqa: B018
    with pytest.raises(AttributeError, match="object has no attribute 'of_nothing'"):
        trainer.of_nothing  # noqa: B018
    trainer.train()
    assert len(logged(trainer)) == 2


def test_rloo(make):
    trainer = make(kind=RLOOTrainer, config=RLOOConfig)
    trainer.train()
    assert len(logged(trainer)) == 2
    assert max(logged(trainer, "kl")) < 1
    assert trainer.colo.bytes_synced == 0
    trainer.colo.close()
    trainer.args.max_steps = 3
    trainer.train()


def test_a_subclass_of_the_users(make):
    class Own(GRPOTrainer):
        def compute_loss(self, *arguments, **options):
            seen.append(self.colo.phase)
            return super().compute_loss(*arguments, **options)

    seen = []
    trainer = make(kind=Own)
    trainer.train()
    assert_trained_on_what_was_sampled(trainer)
    assert len(seen) == 4
