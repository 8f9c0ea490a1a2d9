"""Batches of prompts that have ended, of this step or an earlier one, under TRL's flag."""

import pytest
import torch
from trl import GRPOTrainer

from colo.errors import Unsupported
from colo.runtime import carried
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer, ColoRLOOConfig, ColoRLOOTrainer
from tests.trainers import digits, sums

FLAG = {"fast_inference": True, "colo_engine": "torch", "colo_kv_cache_bytes": "1MiB", "colo_partial_rollouts": True}
TAIL = {"max_completion_length": 24, "generation_kwargs": {"stop_token_ids": [4, 5]}}
"""Two of sixteen tokens end a completion, so that few are long."""


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(carried, "ROUND_TOKENS", 4)


@pytest.fixture
def flagged(make):
    def build(kind=ColoGRPOTrainer, config=ColoGRPOConfig, **changes):
        return make(kind=kind, config=config, **(FLAG | TAIL | changes))

    return build


def test_a_batch_has_the_prompts_that_ended_first_with_their_own_columns(flagged):
    batches = []

    def reward(prompts, completions, answer, **_):
        batches.append(list(zip(prompts, completions, answer, strict=True)))
        return digits(completions)

    trainer = flagged(reward=reward, dataset=sums(100), max_steps=6)
    trainer.train()
    assert len(batches) == 6
    for batch in batches:
        assert len(batch) == 16
        groups = [batch[start : start + 4] for start in range(0, 16, 4)]
        assert all(len({(prompt, answer) for prompt, _, answer in group}) == 1 for group in groups)
        assert all(eval(prompt.rstrip("=")) == int(answer) for prompt, _, answer in batch)
    # a quarter of four prompts is under way beside them, at each step
    assert len({completion.prompt_index for completion in trainer.colo.carried}) == 1
    assert trainer.colo.trace.metrics["carried"] == [pytest.approx(0.2)] * 6
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["colo/carried"] == pytest.approx(0.2) and "colo/token_age" in entry for entry in logged)
    assert max(trainer.colo.trace.metrics["token_age_max"]) >= 1
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("n", [1, 4])
def test_a_number_of_completions_among_generation_kwargs_changes_no_group(flagged, n):
    sizes = []

    def reward(completions, **_):
        sizes.append(len(completions))
        return digits(completions)

    trainer = flagged(reward=reward, generation_kwargs={"n": n, **TAIL["generation_kwargs"]})
    trainer.train()
    assert sizes == [16, 16]


@pytest.mark.parametrize("is_partial", [True, False])
def test_another_number_of_completions_among_generation_kwargs_is_refused(flagged, is_partial):
    with pytest.raises(ValueError, match="generation_kwargs has n=2, and num_generations=4 says"):
        flagged(colo_partial_rollouts=is_partial, generation_kwargs={"n": 2})


def test_trl_gets_the_log_probability_that_each_token_was_sampled_with(flagged, monkeypatch):
    given = []
    score = GRPOTrainer._generate_and_score_completions

    def keeping(trainer, inputs):
        found = list(trainer.vllm_generation.partial._found)
        given.append((found, score(trainer, inputs)))
        return given[-1][1]

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", keeping)
    monkeypatch.setattr(carried, "ROUND_TOKENS", 2)  # more completions go on from a later version
    longer = {"max_completion_length": 48, "generation_kwargs": {"stop_token_ids": [4]}}
    trainer = flagged(dataset=sums(100), max_steps=8, **longer)
    trainer.train()
    assert len(given) == 8
    for found, scored in given:
        for completion, row, mask in zip(
            found, scored["sampling_per_token_logps"], scored["completion_mask"], strict=True
        ):
            assert row[mask.bool()].tolist() == pytest.approx(completion.logprobs, abs=1e-6)
    assert any(len(completion.spans) > 1 for found, _ in given for completion in found)


@pytest.mark.parametrize("until", [1.0, 1])
def test_a_reward_takes_no_completions_of_the_trainers(flagged, until):
    """They would be those of other prompts, which the trainer waits for, or its own left to the trainer."""
    refused = []

    def reward(completions, **_):
        rt = trainer.colo
        assert [c.prompt_index for c in rt.generate(["1+1="], n=2, max_tokens=3)] == [0, 0]
        before = [completion.token_ids for completion in rt.carried]
        with pytest.raises(Unsupported, match="completions under way are those of colo_partial_rollouts") as found:
            rt.generate(["1+1="], until=until, n=2, max_tokens=3)
        refused.append(found.value)
        assert [completion.token_ids for completion in rt.carried] == before
        return digits(completions)

    trainer = flagged(reward=reward, dataset=sums(100), max_steps=2)
    trainer.train()
    assert len(refused) == 2
    trainer.colo.drop_carried()
    assert len(trainer.colo.generate(["1+1="], until=until, n=2, max_tokens=3)) == 2


def test_a_run_after_one_that_was_interrupted_has_no_more_under_way(flagged, monkeypatch):
    trainer = flagged(dataset=sums(100), max_steps=2)
    generate, calls = trainer.colo.engine.generate, []

    def failing(*given, **more):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*given, **more)

    monkeypatch.setattr(trainer.colo.engine, "generate", failing)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len({completion.prompt_index for completion in trainer.colo.carried}) == 5
    trainer.train()
    assert len({completion.prompt_index for completion in trainer.colo.carried}) == 1
    assert trainer.colo.trace.metrics["carried"] == [pytest.approx(0.2)] * 2


def test_tokens_are_as_old_as_allowed_and_evaluation_is_of_its_own_prompts(flagged):
    trainer = flagged(dataset=sums(100), max_steps=5, colo_max_age=1, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert max(trainer.colo.trace.metrics["token_age_max"]) == 1
    assert sum("eval_reward" in entry for entry in trainer.state.log_history) >= 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colo_seeded": True}, "leave one out"),
        ({"colo_partial_rollouts": False, "colo_max_age": 1}, "colo_max_age is of colo_partial_rollouts"),
        ({"colo_partial_rollouts": 0.25}, "colo_partial_rollouts must be True or False, not 0.25"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(flagged, changes, words):
    with pytest.raises(ValueError, match=words):
        flagged(**changes)


def test_prompts_beside_the_first_batch_are_others_with_the_columns_that_it_has(flagged):
    asked = []
    trainer = flagged(dataset=sums(100), max_steps=1, remove_unused_columns=True)
    generate = trainer.colo.generate

    def noting(prompts, **given):
        asked.append(given["keys"])
        return generate(prompts, **given)

    trainer.colo.generate = noting
    trainer.train()
    (rows,) = asked
    assert len(rows) == 5 and len({row["prompt"] for row in rows}) == 5
    assert {tuple(row) for row in rows} == {tuple(rows[0])}


def test_a_maximal_age_at_which_all_begins_anew_is_refused_before_an_engine_starts(flagged, monkeypatch):
    monkeypatch.setattr("colo.trl.flag.start", None)
    with pytest.raises(ValueError, match="colo_max_age=1, and 2 versions lie between two generations"):
        flagged(colo_max_age=1, num_iterations=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_importance_sampling_correction": False}, "without importance ratios"),
        ({"kind": ColoRLOOTrainer, "config": ColoRLOOConfig}, "without importance ratios"),
        ({"made_with": {"rollout_func": lambda *_, **__: {}}}, "rollout_func"),
        ({"dataset": sums().to_iterable_dataset()}, "a dataset without a length"),
    ],
)
def test_what_does_not_go_with_other_prompts_is_refused_before_an_engine_starts(flagged, changes, words, monkeypatch):
    monkeypatch.setattr("colo.trl.flag.start", None)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with pytest.raises(Unsupported, match=words):
        flagged(**changes)
