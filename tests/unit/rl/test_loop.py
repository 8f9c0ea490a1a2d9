"""The reference loop's pieces: batches, and a training step against the loss computed from full logits."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.engine import Completion
from colo.rl.loop import Batch, GRPOConfig, Problem, grpo, train_step
from colo.rl.loss import Aggregation, GRPOLossConfig
from colo.units import MIB
from tests.models import tiny_qwen3

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
