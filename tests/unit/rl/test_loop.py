"""The reference loop's pieces: batches, and a training step against the loss computed from full logits."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import colo
from colo.config import RuntimeConfig
from colo.engine import Completion
from colo.rl.loop import Batch, GRPOConfig, Problem, Reference, grpo, train_step
from colo.rl.loss import Aggregation, GRPOLossConfig
from colo.units import MIB
from colo.weights.routing import routing_of
from colo.weights.sources.base import plain_name
from tests.checkpoints import char_tokenizer, save_checkpoint
from tests.models import SMALL, add_adapter, tiny_qwen3
from tests.runtimes import make_engine

PROMPTS = [(5, 6, 7), (8, 9)]
REWARDS = [1.0, 0.0, 0.25, 0.0]


def completion(prompt, tokens, logprobs, prompt_index=0, sample_index=0):
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_token_ids=prompt,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason="length",
        weights_version=0,
    )


COMPLETIONS = [
    completion((5, 6, 7), (1, 2), (-0.5, -2.0)),
    completion((5, 6, 7), (3,), (-1.5,), sample_index=1),
    completion((8, 9), (4, 1, 2, 2), (-3.0, -1.0, -0.25, -2.5), prompt_index=1),
    completion((8, 9), (2,), (-4.0,), prompt_index=1, sample_index=1),
]


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


@pytest.fixture
def rt():
    runtime = colo.launch(
        tiny_qwen3(num_hidden_layers=2), optimizer=sgd, device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB)
    )
    yield runtime
    runtime.close()


def twin(rt):
    """A model of its own with the runtime's weights."""
    model = AutoModelForCausalLM.from_config(tiny_qwen3(num_hidden_layers=2))
    model.load_state_dict({name: p.detach().clone() for name, p in rt.model.state_dict().items()})
    return model


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def loss_by_hand(model, completions, rewards, config):
    """The policy gradient of every token alone, from full logits: -min(1, clipped) importance weight * A * ratio."""
    total, count = 0.0, 0
    for start in range(0, len(completions), config.group_size):
        group = torch.tensor(rewards[start : start + config.group_size])
        advantages = (group - group.mean()) / (group.std() + 1e-4)
        for c, advantage in zip(completions[start : start + config.group_size], advantages, strict=True):
            ids = torch.tensor([c.prompt_token_ids + c.token_ids])
            logprobs = (model(input_ids=ids).logits[0] / config.temperature).log_softmax(-1)
            for position, (token, engine) in enumerate(zip(c.token_ids, c.logprobs, strict=True)):
                logprob = logprobs[len(c.prompt_token_ids) - 1 + position, token]
                weight = min(math.exp(float(logprob.detach()) - engine), config.loss.importance_clip_max)
                total = total - weight * advantage * torch.exp(logprob - logprob.detach())
                count += 1
    return total / count


# ---- batches -------------------------------------------------------------------------------------------------------


def test_a_batch_is_padded_on_the_right_and_marks_what_was_generated():
    batch = Batch.of(COMPLETIONS[1:3], torch.device("cpu"))
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 3, 0, 0], [8, 9, 4, 1, 2, 2]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert batch.completion_mask_BT.tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert batch.input_ids_BT.dtype is torch.long


def test_the_engines_logprobs_stand_where_the_token_is_predicted():
    batch = Batch.of(COMPLETIONS[1:3], torch.device("cpu"))
    assert batch.engine_logprobs_BT.tolist() == [[0, 0, -1.5, 0, 0], [0, -3.0, -1.0, -0.25, -2.5]]
    assert batch.engine_logprobs_BT.dtype is torch.float32
    scored = batch.engine_logprobs_BT != 0
    assert torch.equal(scored, batch.completion_mask_BT[:, 1:].bool())


def test_a_batch_is_as_long_as_its_longest_completion():
    assert Batch.of(COMPLETIONS[:2], torch.device("cpu")).input_ids_BT.shape == (2, 5)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no completions to collate: sample more, or skip the step"):
        Batch.of([], torch.device("cpu"))
    with pytest.raises(ValueError, match="no completions to collate"):
        Batch.of(iter(()), torch.device("cpu"))


def test_a_batch_is_made_of_what_can_be_read_once():
    batch, same = Batch.of(iter(COMPLETIONS), torch.device("cpu")), Batch.of(COMPLETIONS, torch.device("cpu"))
    assert torch.equal(batch.engine_logprobs_BT, same.engine_logprobs_BT)
    assert torch.equal(batch.input_ids_BT, same.input_ids_BT)


def test_tokens_without_log_probabilities_are_refused():
    silent = replace(COMPLETIONS[1], logprobs=())
    with pytest.raises(ValueError, match="completion 1 has 1 tokens and 0 log-probabilities: have its engine return"):
        Batch.of([COMPLETIONS[0], silent], torch.device("cpu"))


# ---- a step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_is_the_gradient_of_the_loss_computed_from_full_logits(rt, temperature):
    config = GRPOConfig(group_size=2, temperature=temperature)
    expected, before = twin(rt), parameters(rt.model)
    loss = loss_by_hand(expected, COMPLETIONS, REWARDS, config)
    loss.backward()
    with rt.train():
        metrics = train_step(rt, COMPLETIONS, REWARDS, config)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    gradients = {name: p.grad for name, p in expected.named_parameters()}
    for name, after in parameters(rt.model).items():
        assert torch.allclose(before[name] - after, gradients[name], atol=1e-6), name  # SGD with a rate of 1
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-2


def alone(rt):
    """What a step needs, without a runtime, on the same weights."""
    model = twin(rt)
    return SimpleNamespace(model=model, device=rt.device, optimizer=sgd(model.parameters()))


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_micro_batches_add_up_to_the_step_of_the_whole_batch(rt, micro_batch_size, aggregation):
    loss = GRPOLossConfig(aggregation=aggregation, max_length=8 if aggregation is Aggregation.CONSTANT else None)
    other = alone(rt)
    completions = [*COMPLETIONS[:3], completion((8, 9), (), (), prompt_index=1, sample_index=1)]
    whole = train_step(other, completions, REWARDS, GRPOConfig(group_size=2, micro_batch_size=64, loss=loss))
    config = GRPOConfig(group_size=2, micro_batch_size=micro_batch_size, loss=loss)
    with rt.train():
        parts = train_step(rt, completions, REWARDS, config)
    assert parts == pytest.approx(whole, abs=1e-6)
    expected = parameters(other.model)
    for name, after in parameters(rt.model).items():
        assert torch.allclose(after, expected[name], atol=1e-6), name


def test_a_step_that_failed_leaves_nothing_for_the_next(rt, monkeypatch):
    other, config = alone(rt), GRPOConfig(group_size=2, micro_batch_size=1)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        calls = []

        def of(completions, device, make=Batch.of):
            calls.append(completions)
            if len(calls) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(completions, device)

        patch.setattr(Batch, "of", of)
        with rt.train():
            train_step(rt, COMPLETIONS, REWARDS, config)
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=1)
    for each in (rt, other):
        train_step(each, COMPLETIONS[2:], REWARDS[2:], config)
    expected = parameters(other.model)
    for name, after in parameters(rt.model).items():
        assert torch.allclose(after, expected[name], atol=1e-6), name


def test_log_probabilities_are_float32_whatever_the_default_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        batch = Batch.of([completion((5,), (1,), (-10.03,))], torch.device("cpu"))
        assert torch.equal(batch.engine_logprobs_BT, torch.tensor([[-10.03]], dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def test_equal_rewards_teach_nothing(rt):
    before = parameters(rt.model)
    with rt.train():
        metrics = train_step(rt, COMPLETIONS, [1.0] * 4, GRPOConfig(group_size=2))
    assert metrics["loss"] == 0
    assert all(torch.equal(before[name], after) for name, after in parameters(rt.model).items())


def test_incomplete_groups_are_refused_before_anything_is_trained(rt):
    with rt.train(), pytest.raises(ValueError, match="group"):
        train_step(rt, COMPLETIONS[:3], REWARDS[:3], GRPOConfig(group_size=2))
    assert rt.weights_version == 0


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([*REWARDS, 1.0, 0.0], "rewards hold 6 values for 4 completions: give a list of 4 numbers"),
        ([1.0, None, 0.0, 0.0], "rewards hold None for completion 1 of 4: give a finite number"),
        (torch.tensor([1.0, 0.0, math.nan, 0.0]), "rewards hold nan for completion 2 of 4"),
    ],
    ids=str,
)
def test_rewards_that_are_not_one_number_each_are_refused_before_anything_is_trained(rt, rewards, words):
    with rt.train(), pytest.raises(ValueError, match=words):
        train_step(rt, COMPLETIONS, rewards, GRPOConfig(group_size=2))
    assert rt.weights_version == 0


# ---- the loop ------------------------------------------------------------------------------------------------------


def wants_token_4(completion, answer):
    return completion.token_ids.count(answer) / len(completion.token_ids)


def batches(num_steps):
    return [[Problem(prompt=prompt, answer=4) for prompt in PROMPTS] for _ in range(num_steps)]


def run(rt, seed=0):
    config = GRPOConfig(group_size=4, max_tokens=5, seed=seed)
    return list(grpo(rt, batches(2), wants_token_4, config))


def test_every_step_yields_and_logs_its_metrics(rt):
    steps = run(rt)
    assert len(steps) == 2 == rt.weights_version
    for name in ("reward", "loss", "mismatch", "completion_tokens"):
        assert rt.trace.metrics[name] == [metrics[name] for metrics in steps]
    assert steps[0]["completion_tokens"] == 5
    assert all(0 <= metrics["reward"] <= 1 for metrics in steps)
    assert all(0 <= metrics["mismatch"] < 1e-5 for metrics in steps)


def test_samples_of_a_seed_are_the_same_and_steps_draw_anew(rt):
    other = colo.launch(twin(rt), optimizer=sgd, device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB))
    assert run(rt) == run(other)
    other.close()
    drawn = []

    def reward(completion, answer):
        drawn.append(completion.token_ids)
        return 0.0

    list(grpo(rt, batches(2), reward, GRPOConfig(group_size=4, max_tokens=5, seed=0)))
    assert len(drawn) == 16
    assert drawn[:8] != drawn[8:]


def test_rewards_see_the_answer_of_their_own_problem(rt):
    problems = [Problem(prompt=prompt, answer=prompt) for prompt in PROMPTS]
    pairs = []

    def reward(completion, answer):
        pairs.append((completion.prompt_token_ids, answer))
        return 0.0

    list(grpo(rt, [problems], reward, GRPOConfig(group_size=2, max_tokens=1)))
    assert pairs == [(prompt, prompt) for prompt in PROMPTS for _ in range(2)]


@pytest.mark.parametrize(("name", "least"), [("group_size", 2), ("max_tokens", 1), ("micro_batch_size", 1)])
def test_settings_have_least_values(name, least):
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, but is {least - 1}"):
        GRPOConfig(**{name: least - 1})
    assert getattr(GRPOConfig(**{name: least}), name) == least


def test_a_group_of_one_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="group_size must be at least 2, but is 1: advantages compare the completions"):
        GRPOConfig(group_size=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_size": 8.0}, r"group_size must be a whole number, not 8\.0"),
        ({"micro_batch_size": None}, "micro_batch_size must be a whole number, not None"),
        ({"seed": "1"}, "seed must be a whole number, not '1'"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"temperature": 0}, "temperature must be positive and finite, for completions that differ, but is 0"),
        ({"temperature": math.nan}, "temperature must be positive and finite"),
        ({"temperature": 1e-300}, "for completions that differ, but is 1e-300: logits are divided by it in fp32"),
    ],
)
def test_settings_that_no_step_can_be_made_with_are_refused(settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        GRPOConfig(**settings)


# ---- several rewards -------------------------------------------------------------------------------------------------

CONFIG = GRPOConfig(group_size=2, max_tokens=3, seed=0)


def shortness(prompts, completions, **columns):
    return [1.0 / (1 + len(ids)) for ids in columns["completion_ids"]]


def wanted(completions, token):
    """Takes what it names only."""
    return [ids.count(wanted) for ids, wanted in zip(completions, token, strict=True)]


def with_tokens(num_steps=2):
    return [
        [Problem(prompt=prompt, columns={"token": token}) for prompt, token in zip(PROMPTS, (4, 7), strict=True)]
        for _ in range(num_steps)
    ]


def test_rewards_are_added_with_their_weights_and_logged_by_name(rt, tmp_path):
    seen, logged = [], []

    def length(prompts, completions, completion_ids, token):
        seen.append((prompts, token))
        assert completions == completion_ids  # there is no tokenizer
        return torch.tensor([float(len(ids)) for ids in completion_ids])

    rewards = {"length": length, "wanted": wanted}
    weights = {"length": 0.5, "wanted": -2}
    steps = list(grpo(rt, with_tokens(), rewards, CONFIG, reward_weights=weights, log=logged.append))
    assert seen == [([PROMPTS[0]] * 2 + [PROMPTS[1]] * 2, [4, 4, 7, 7])] * 2
    assert logged == steps
    for metrics in steps:
        assert metrics["rewards/length"] == 3
        assert metrics["reward"] == pytest.approx(1.5 - 2 * metrics["rewards/wanted"])
    assert rt.trace.metrics["rewards/wanted"] == [metrics["rewards/wanted"] for metrics in steps]
    assert "rewards/length" in rt.plot(tmp_path / "run.html").read_text()


def test_rewards_have_names_of_their_own_and_weights_of_one(rt):
    (metrics,) = grpo(rt, with_tokens(1), [shortness, wanted], CONFIG)
    assert metrics["reward"] == pytest.approx(metrics["rewards/shortness"] + metrics["rewards/wanted"])


def test_a_conversation_is_answered_by_a_message(tmp_path):
    talk = [{"role": "user", "content": "1+2="}]
    problems = [Problem(prompt=talk, columns={"sum": 3}), Problem(prompt="1+1=", columns={"sum": 2})]
    seen = []

    def reward(prompts, completions, completion_ids, **columns):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return [0.0] * len(prompts)

    with colo.launch(save_checkpoint(tmp_path), device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB)) as rt:
        list(grpo(rt, [problems], {"none": reward}, CONFIG))
    texts = [char_tokenizer().decode(ids, skip_special_tokens=True) for _, _, ids in seen]
    replies = [[{"role": "assistant", "content": text}] for text in texts[:2]] + texts[2:]
    assert [(prompt, reply) for prompt, reply, _ in seen] == list(zip([talk] * 2 + ["1+1="] * 2, replies, strict=True))


# ---- a reference -----------------------------------------------------------------------------------------------------

KL = GRPOLossConfig(kl_coefficient=0.5)


def logprobs_of(model, completion):
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[len(completion.prompt_token_ids) - 1 :]


def kl_by_hand(model, reference, completions):
    """Mean over tokens of p_ref / p - log(p_ref / p) - 1."""
    terms = []
    for completion in completions:
        ratio = logprobs_of(reference, completion).detach() - logprobs_of(model, completion)
        terms.append(ratio.exp() - ratio - 1)
    return torch.cat(terms).mean()


@pytest.mark.parametrize("micro_batch_size", [1, 64])
def test_the_kl_term_is_that_of_the_weights_as_they_were(rt, micro_batch_size):
    config = GRPOConfig(group_size=2, micro_batch_size=micro_batch_size, loss=KL)
    reference, frozen = Reference(rt.model), twin(rt)
    assert reference.size_bytes == sum(p.nbytes for p in frozen.parameters())
    with torch.no_grad():
        for parameter in rt.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    expected, before = twin(rt), parameters(rt.model)
    kl = kl_by_hand(expected, frozen, COMPLETIONS)
    (KL.kl_coefficient * kl).backward()
    with rt.train():
        metrics = train_step(rt, COMPLETIONS, [1.0] * 4, config, reference)  # equal rewards: nothing but the KL term
    assert metrics["kl"] == pytest.approx(float(kl.detach()), rel=1e-4)
    assert metrics["loss"] == pytest.approx(KL.kl_coefficient * float(kl.detach()), rel=1e-4)
    gradients = {name: p.grad for name, p in expected.named_parameters()}
    for name, after in parameters(rt.model).items():
        assert torch.allclose(before[name] - after, gradients[name], atol=1e-6), name
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3


@pytest.mark.parametrize("is_peft", [True, False], ids=["peft", "transformers"])
def test_the_reference_of_an_adapter_is_the_model_without_it(is_peft):
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    options = {"optimizer": sgd, "device": "cpu", "config": RuntimeConfig(kv_cache_bytes=MIB)}
    torch.manual_seed(0)
    if is_peft:
        rt = colo.launch(tiny_qwen3(num_hidden_layers=2), lora=lora, **options)
    else:
        model = AutoModelForCausalLM.from_config(tiny_qwen3(num_hidden_layers=2))
        add_adapter(model, lora)
        engine = make_engine(config=tiny_qwen3(num_hidden_layers=2))
        rt = colo.share(engine, model, sgd([p for p in model.parameters() if p.requires_grad]))
    base = AutoModelForCausalLM.from_config(tiny_qwen3(num_hidden_layers=2))
    weights = {plain_name(name): p for name, p in rt.model.state_dict().items() if "lora_" not in name}
    base.load_state_dict(weights)
    with torch.no_grad():
        base_logprobs = logprobs_of(base, COMPLETIONS[0])
    reference = Reference(rt.model)
    assert reference.size_bytes == 0
    trained = {name for name, p in rt.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name in trained:
            rt.model.get_parameter(name).add_(0.1)
    found = reference.run(lambda model: logprobs_of(model, COMPLETIONS[0]))
    assert torch.allclose(found, base_logprobs, atol=1e-6)
    assert not torch.allclose(found, logprobs_of(rt.model, COMPLETIONS[0]), atol=1e-3)
    steps = list(grpo(rt, with_tokens(2), [shortness], GRPOConfig(group_size=2, max_tokens=3, seed=0, loss=KL)))
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)  # the loop's reference is of now
    assert {name for name, p in rt.model.named_parameters() if p.requires_grad} == trained
    assert rt.weights_version == 3
    rt.close()


def test_a_kl_term_begins_at_zero_and_grows(rt):
    config = GRPOConfig(group_size=4, max_tokens=5, seed=0, loss=KL)
    steps = list(grpo(rt, batches(3), lambda completion, answer: float(completion.token_ids[0]), config))
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[2]["kl"] > 1e-5


def test_dropout_is_off_in_the_reference_and_modes_are_kept(rt):
    rt.model.train()
    rt.model.model.layers[0].eval()
    reference = Reference(rt.model)
    assert reference.run(lambda model: any(module.training for module in model.modules())) is False
    assert rt.model.training and not rt.model.model.layers[0].training


def test_a_kl_term_without_a_reference_says_what_to_do(rt):
    with rt.train(), pytest.raises(ValueError, match=r"needs a reference: make Reference\(rt.model\) before"):
        train_step(rt, COMPLETIONS, REWARDS, GRPOConfig(group_size=2, loss=KL))


def test_a_reference_that_the_host_cannot_hold_is_refused(rt, monkeypatch):
    monkeypatch.setattr("colo.rl.loop.available_host_bytes", lambda: 1000)
    with pytest.raises(
        colo.BudgetError, match=r"is a copy of the weights, .* of host memory, and .* train a new adapter"
    ):
        grpo(rt, batches(1), wants_token_4, GRPOConfig(loss=KL))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ([], "batch 1: it is empty"),
        ([Problem(prompt=())], "batch 1: prompt 0 is empty: .* give it at least one token"),
        (
            [Problem(prompt=(1,)), Problem(prompt=(1,) * 64)],
            "batch 1: prompt 1 has 64 tokens, .* 64 positions: shorten",
        ),
        ([Problem(prompt=(64,))], "batch 1: prompt 0 has token id 64, outside the vocabulary of 64"),
        ([Problem(prompt="1+2=")], "batch 1: prompts are texts, but the runtime has no tokenizer"),
    ],
    ids=["batch", "empty", "long", "token", "text"],
)
def test_bad_prompts_are_refused_before_anything_is_sampled(rt, second, words):
    scored = []
    with pytest.raises(ValueError, match=words):
        grpo(rt, [batches(1)[0], second], lambda completion, answer: scored.append(1) or 0.0, CONFIG)
    with pytest.raises(ValueError, match=words):
        list(grpo(rt, iter([batches(1)[0], second]), lambda completion, answer: scored.append(1) or 0.0, CONFIG))
    assert len(scored) == 4  # of the first batch, where the second was not there yet
    assert rt.weights_version == 1


def test_batches_that_can_be_read_once_are_trained_on_like_lists(rt):
    problems = [Problem(prompt=(1, 2)), Problem(prompt=(3,))]
    config = GRPOConfig(group_size=2, max_tokens=2)
    for batch in (iter, reversed, lambda given: (p for p in given), lambda given: filter(None, given)):
        for batches in ([batch(problems)], (batch(problems),), (batch(each) for each in [problems])):
            (metrics,) = grpo(rt, batches, lambda completion, answer: 1.0, config)
            assert metrics["reward"] == 1.0 and metrics["completion_tokens"] > 0
    with pytest.raises(ValueError, match="batch 1: it is empty"):
        grpo(rt, [iter(problems), iter([])], lambda completion, answer: 1.0, config)


def test_problems_in_the_place_of_batches_are_named(rt):
    with pytest.raises(TypeError, match="batch 0: it is a problem: give a list of them"):
        grpo(rt, [Problem(prompt=(1, 2))], lambda completion, answer: 1.0, GRPOConfig())


def test_what_is_no_problem_is_refused(rt):
    with pytest.raises(TypeError, match=r"batch 0: it holds a dict: give Problem\(prompt=..., answer=...\)"):
        grpo(rt, [[{"prompt": (1,)}]], wants_token_4, CONFIG)


def test_a_reward_that_needs_a_column_which_is_not_there_is_refused_at_once(rt):
    problems = [[Problem(prompt=(1,), columns={"token": 3})], [Problem(prompt=(1,), columns={"tokens": 3})]]
    with pytest.raises(ValueError, match="batch 1: reward 'wanted' takes token, and of columns the dataset has tokens"):
        grpo(rt, problems, [wanted], CONFIG)

    def right(completions, answer):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="batch 0: reward 'right' takes answer, and of columns the dataset has none"):
        grpo(rt, [[Problem(prompt=(1,))]], [right], CONFIG)
    assert len(list(grpo(rt, [[Problem(prompt=(1,), answer=2)]], [right], CONFIG))) == 1


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "answer"])
def test_a_column_that_would_stand_for_what_rewards_are_called_with_is_refused(name):
    with pytest.raises(ValueError, match=f"columns hold {name}, which rewards are called with already: give"):
        Problem(prompt=(1,), answer=2, columns={"token": 3, name: 4})
    assert Problem(prompt=(1,), columns={"answer": 4}).columns == {"answer": 4}


@pytest.mark.parametrize("value", [None, "1", math.nan, math.inf])
@pytest.mark.parametrize("several", [True, False])
def test_a_bad_reward_is_named_with_its_step_and_trains_nothing(rt, value, several):
    steps = []

    def odd(completion, answer):
        return value if len(steps) else 0.5

    def strange(prompts, completions, **columns):
        return [1.0, 0.0, 0.5, 1.0] if not steps else [1.0, 0.0, value, 1.0]

    run = grpo(rt, batches(2), {"odd": strange} if several else odd, CONFIG, log=steps.append)
    next(run)
    before = parameters(rt.model)
    with pytest.raises(ValueError, match=f"reward 'odd' returned {value!r} for completion . of 4 at step 2: return a"):
        next(run)
    assert all(torch.equal(before[name], after) for name, after in parameters(rt.model).items())
    assert rt.weights_version == 1
    assert len(list(grpo(rt, batches(1), wants_token_4, CONFIG))) == 1  # the runtime goes on


def test_the_largest_rewards_are_trained_on_and_sums_beyond_them_are_refused(rt):
    def large(prompts, completions, **columns):
        return [1.7e308, 1e300, 1.7e308, 0.0]

    def other(prompts, completions, **columns):
        return [0.0, 0.0, 1.7e308, 0.0]

    before = parameters(rt.model)
    (metrics,) = grpo(rt, batches(1), [large], CONFIG)
    assert metrics["reward"] == metrics["rewards/large"] == pytest.approx(8.5e307)
    trained = parameters(rt.model)
    assert any(not torch.equal(before[name], after) for name, after in trained.items())
    assert all(weight.isfinite().all() for weight in trained.values())
    words = r"add up to inf for completion 2 of 4 at step 1 \(large 1.7e\+308, other 1.7e\+308\): return smaller"
    with pytest.raises(ValueError, match=words):
        list(grpo(rt, batches(1), [large, other], CONFIG))
    assert all(torch.equal(trained[name], after) for name, after in parameters(rt.model).items())


def test_an_error_of_a_reward_names_it_its_step_and_its_line(rt):
    def broken(prompts, completions, **columns):
        return [{}["solution"]]

    with pytest.raises(
        ValueError, match=r"reward 'broken' raised KeyError at step 1: 'solution' \(test_loop.py, line "
    ) as caught:
        list(grpo(rt, batches(1), [broken], CONFIG))
    assert isinstance(caught.value.__cause__, KeyError)
    assert rt.weights_version == 0


def test_a_mixture_is_trained_through_the_experts_that_the_engine_took():
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with colo.launch(config, optimizer=sgd, device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB)) as rt:
        draw = np.random.default_rng(0)
        routed = [
            replace(
                c,
                routed_experts=np.array(
                    [
                        [draw.permutation(4)[:2] for _ in range(config.num_hidden_layers)]
                        for _ in range(len(c.prompt_token_ids) + len(c.token_ids) - 1)
                    ],
                    dtype=np.uint8,
                ),
            )
            for c in COMPLETIONS
        ]
        taken = []
        rt.model.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, out: taken.append(out[2].detach()))
        for completions in (COMPLETIONS, routed):
            with rt.train():
                train_step(rt, completions, REWARDS, GRPOConfig(group_size=2, micro_batch_size=4))
        own, replayed = taken
        given = routing_of(routed)[:, :, 1]
        known = given[..., 0] >= 0
        assert torch.equal(replayed.view(given.shape)[known].sort().values, given[known].sort().values)
        assert not torch.equal(own.view(given.shape)[known].sort().values, given[known].sort().values)
