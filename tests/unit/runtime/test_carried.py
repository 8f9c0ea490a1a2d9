"""Completions that outlive a call: what is returned when, from which weights, and what a failure leaves."""

import copy
import random
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import colo
from colo.config import RuntimeConfig
from colo.errors import Unsupported
from colo.runtime import carried
from tests.runtimes import PROMPTS, launch, launch_lora, qwen3, train_step

STOPS = tuple(range(20))
"""Token ids that end a completion: one in five, so that lengths have a tail."""


ONE_ROUND = timedelta(microseconds=1)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(carried, "ROUND_TOKENS", 4)


def recomputed(model, completion, version):
    """Log-probabilities by `model` of the tokens that were sampled from `version`."""
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(completion.prompt_token_ids) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return logprobs[[at == version for at in completion.token_versions]]


def sampled_at(completion, version):
    pairs = zip(completion.logprobs, completion.token_versions, strict=True)
    return torch.tensor([logprob for logprob, at in pairs if at == version])


def test_sampled_in_parts_greedy_completions_are_the_same(rt):
    with rt.rollout():
        whole = rt.generate(PROMPTS, n=2, max_tokens=11, temperature=0)
        parts = rt.generate(PROMPTS, n=2, max_tokens=11, temperature=0, until=1.0)
    assert [c.token_ids for c in parts] == [c.token_ids for c in whole]
    assert [(c.prompt_index, c.sample_index) for c in parts] == [(c.prompt_index, c.sample_index) for c in whole]
    assert [c.finish_reason for c in parts] == [c.finish_reason for c in whole] == ["length"] * 6
    for one, other in zip(parts, whole, strict=True):
        assert torch.tensor(one.logprobs) == pytest.approx(torch.tensor(other.logprobs), abs=1e-5)
    assert rt.carried == []


@pytest.mark.parametrize("launched", [launch, launch_lora])
def test_tokens_have_the_log_probabilities_of_the_version_in_their_span(launched):
    rt = launched()
    twins, done = {}, []
    for step in range(3):
        twins[step] = copy.deepcopy(rt.model).eval()
        with rt.rollout():
            done += rt.generate(PROMPTS if step < 2 else [], n=2, max_tokens=16, until=ONE_ROUND)
        with rt.train():
            train_step(rt)
    with rt.rollout():
        done += rt.generate([], until=1.0)
    twins[3] = rt.model
    assert {(c.prompt_index, c.sample_index) for c in done} == {(i, j) for i in range(6) for j in range(2)}
    assert all(len(c.token_ids) == 16 == sum(count for _, count in c.spans) for c in done)
    assert any(len(c.spans) > 1 for c in done)
    for completion in done:
        assert completion.weights_version == completion.spans[-1][0]
        for version, _ in completion.spans:
            expected = recomputed(twins[version], completion, version)
            assert sampled_at(completion, version) == pytest.approx(expected, abs=1e-4)
    rt.close()


def test_completions_begun_with_an_adapter_do_not_go_on_without_it_nor_the_other_way():
    rt = launch_lora()
    train_step(rt)
    with rt.rollout():
        rt.generate(PROMPTS, n=2, max_tokens=40, until=1)
        before = rt.carried
        assert before
        with rt.model.disable_adapter():
            with pytest.raises(Unsupported, match="begun with the adapter, and this call samples without it"):
                rt.generate(PROMPTS, max_tokens=4, until=1)
            assert rt.carried == before
            assert rt.generate(PROMPTS, max_tokens=4)[0].adapter is None
            rt.drop_carried()
            rt.generate(PROMPTS, n=2, max_tokens=40, until=1)
        with pytest.raises(Unsupported, match="begun without the adapter"):
            rt.generate(PROMPTS, max_tokens=4, until=1)
        rt.drop_carried()
        assert rt.generate(PROMPTS, max_tokens=4, until=1.0)[0].adapter is not None
    rt.close()


def test_groups_are_returned_whole_and_the_others_wait(rt):
    with rt.rollout():
        first = rt.generate(
            [[i, i + 1] for i in range(20)], n=3, max_tokens=40, until=0.5, stop_token_ids=STOPS, seed=0
        )
    returned = {c.prompt_index for c in first}
    assert 10 <= len(returned) < 20 and len(first) == 3 * len(returned)
    assert all(c.finish_reason in ("stop", "length") for c in first)
    waiting = rt.carried
    assert {c.prompt_index for c in waiting} == set(range(20)) - returned
    assert {c.finish_reason for c in waiting} >= {"carried", "stop"}  # a sample that has ended waits for its group
    with rt.rollout():
        second = rt.generate([[50, 51]], n=3, max_tokens=40, until=1.0, stop_token_ids=STOPS)
    assert {c.prompt_index for c in second} == set(range(21)) - returned
    before = {(c.prompt_index, c.sample_index): c for c in waiting}
    for completion in second[:-3]:
        old = before[completion.prompt_index, completion.sample_index]
        assert completion.token_ids[: len(old.token_ids)] == old.token_ids
        assert completion.logprobs[: len(old.token_ids)] == old.logprobs
    assert rt.carried == []


def test_keys_may_be_an_array(rt):
    with rt.rollout():
        done = rt.generate(PROMPTS, max_tokens=2, until=1.0, keys=torch.tensor([7, 8, 9]))
    assert [int(c.key) for c in done] == [7, 8, 9]


@pytest.mark.parametrize("keys", [lambda: iter((7, 8, 9)), lambda: {7: 0, 8: 0, 9: 0}.keys()], ids=["once", "view"])
def test_keys_may_be_read_once(rt, keys):
    with rt.rollout():
        done = rt.generate(PROMPTS, max_tokens=2, until=1.0, keys=keys())
    assert [c.key for c in done] == [7, 8, 9]


def test_a_number_and_a_time_end_a_call(rt):
    prompts = [[i] for i in range(1, 9)]
    with rt.rollout():
        first = rt.generate(prompts, max_tokens=40, until=3, stop_token_ids=STOPS, seed=1)
        assert 3 <= len(first) < 8
        rt.drop_carried()
        assert rt.carried == []
        assert rt.generate(prompts, max_tokens=40, until=ONE_ROUND) == []
        assert [len(c.token_ids) for c in rt.carried] == [4] * 8
        last = rt.generate([], until=timedelta(hours=1))
    assert [c.prompt_index for c in last] == list(range(8, 16))


@pytest.mark.parametrize(
    ("until", "given"),
    [(2, np.int64(2)), (2, torch.tensor(2)), (0.5, np.float32(0.5)), (ONE_ROUND, np.timedelta64(1, "us"))],
)
def test_a_number_and_a_time_may_be_numpys(rt, until, given):
    counts = []
    for condition, age in ((until, 1), (given, np.int64(1))):
        rt.drop_carried()
        with rt.rollout():
            done = rt.generate(PROMPTS, max_tokens=8, until=condition, max_age=age, temperature=0)
        counts.append((len(done), [len(c.token_ids) for c in rt.carried]))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("share", [0.07, 0.14, 0.28, 0.55, np.float32(0.55), 0.56, np.float32(0.9), 1.0])
def test_a_share_waits_for_no_prompt_more_than_it_says(rt, share):
    wanted = round(100 * float(share))
    with rt.rollout():
        rt.generate([[1]] * (100 - wanted), max_tokens=40, until=ONE_ROUND)
        done = rt.generate([[2]] * wanted, max_tokens=1, until=share)
    assert len(done) == wanted


def test_samples_with_tokens_that_are_too_old_begin_anew(rt):
    for version in range(4):
        with rt.rollout():
            assert rt.generate([[version + 1]], n=2, max_tokens=40, until=ONE_ROUND, max_age=1) == []
        spans = {c.prompt_index: c.spans for c in rt.carried}
        assert spans[version] == ((version, 4),)
        if version:
            assert spans[version - 1] == ((version - 1, 4), (version, 4))
        if version > 1:
            assert spans[version - 2] == ((version, 4),)  # its first tokens were two versions old
        with rt.train():
            train_step(rt)
    with rt.rollout():
        done = rt.generate([], until=1.0, max_age=0)
    assert all(c.spans == ((4, 40),) for c in done) and len(done) == 8


def test_a_seed_decides_what_is_drawn_and_no_round_repeats_another(rt):
    def run(seed):
        with rt.rollout():
            done = rt.generate([[1], [2]], n=2, max_tokens=12, until=1.0, seed=seed)
        return [c.token_ids for c in done]

    rt.drop_carried()
    first = run(0)
    rt._carried = carried.Carried()  # which counts its prompts from 0
    assert run(0) == first
    rt._carried = carried.Carried()
    assert run([0, 0]) == first
    assert run([0, 0]) != first
    rounds = {ids[start : start + 4] for ids in first for start in (0, 4, 8)}
    assert len(rounds) == 12


def test_numbers_of_numpy_draw_what_pythons_draw(rt):
    def run(seed, stop):
        rt._carried = carried.Carried()
        with rt.rollout():
            done = rt.generate([[1], [2]], n=2, max_tokens=12, until=1, seed=seed, stop_token_ids=stop)
            done += rt.generate([[3], [4]], n=2, max_tokens=12, until=3, seed=seed, stop_token_ids=stop)
        return [c.token_ids for c in done]

    assert run(np.array([5, 6]), np.arange(3)) == run([5, 6], [0, 1, 2])
    assert run(torch.tensor(7), torch.arange(3)) == run(7, [0, 1, 2])


@pytest.mark.parametrize("kind", [iter, lambda ids: (i for i in ids), lambda ids: map(int, ids), reversed])
def test_stop_tokens_that_can_be_read_once_end_completions_in_every_round(rt, kind):
    stops = list(range(0, 100, 3))
    with rt.rollout():
        done = rt.generate(PROMPTS, n=4, max_tokens=40, until=1.0, seed=1, stop_token_ids=kind(stops))
    assert all(len(c.token_ids) < 40 and c.token_ids[-1] in stops for c in done)


def test_drawn_in_parts_tokens_come_from_the_same_distribution(rt):
    with rt.rollout():
        whole = rt.generate([[1, 2]], n=4000, max_tokens=8, seed=1)
        parts = rt.generate([[1, 2]], n=4000, max_tokens=8, seed=1, until=1.0)
    for place in (3, 4, 7):  # on both sides of where a round ends
        one, other = (
            torch.bincount(torch.tensor([c.token_ids[place] for c in side]), minlength=100) for side in (whole, parts)
        )
        likely = (one + other) > 40
        spread = ((one - other)[likely].float() ** 2 / (one + other)[likely]).sum()
        assert spread < 2 * int(likely.sum()) + 20  # chi squared


def test_a_model_without_positions_left_ends_a_completion():
    rt = launch(qwen3(max_position_embeddings=11))
    with rt.rollout():
        done = rt.generate([[1, 2, 3], [4, 5, 6, 7]], max_tokens=100, until=1.0)
        whole = rt.generate([[1, 2, 3], [4, 5, 6, 7]], max_tokens=100)
    assert [len(c.token_ids) for c in done] == [len(c.token_ids) for c in whole] == [8, 7]
    assert {c.finish_reason for c in done} == {"length"}
    rt.close()


def test_a_completion_that_ends_a_round_right_where_longrope_changes_ends_there():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rt = launch(qwen3(max_position_embeddings=64, rope_parameters=rope))
    prompts = [[1] * 4, [2] * 20, [3] * 13]  # the first is 8, 12 and 16 tokens long after rounds
    with rt.rollout():
        assert rt.generate(prompts, max_tokens=30, until=ONE_ROUND)[0].prompt_index == 2
        done = rt.generate([], until=ONE_ROUND) + rt.generate([], until=ONE_ROUND) + rt.generate([], until=1.0)
        whole = rt.generate(prompts, max_tokens=30)
    assert [len(c.token_ids) for c in done] == [12, 30]
    assert [len(c.token_ids) for c in whole] == [12, 30, 3]
    rt.close()


def test_a_round_that_fails_loses_no_tokens_and_prompts_that_have_none_are_not_kept(rt, monkeypatch):
    generate, calls = rt.engine.generate, []

    def failing(prompts, params, *, adapter=None):
        calls.append(len(prompts))
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return generate(prompts, params, adapter=adapter)

    monkeypatch.setattr(rt.engine, "generate", failing)
    with pytest.raises(KeyboardInterrupt), rt.rollout():
        rt.generate(PROMPTS, max_tokens=16, until=1.0)
    assert rt.carried == []
    with pytest.raises(KeyboardInterrupt), rt.rollout():
        rt.generate(PROMPTS, max_tokens=16, until=1.0)
    assert [(c.prompt_index, len(c.token_ids)) for c in rt.carried] == [(0, 10), (1, 10), (2, 10)]
    with rt.rollout():
        done = rt.generate([[7, 7]], max_tokens=16, until=1.0)
    assert [(c.prompt_index, len(c.token_ids)) for c in done] == [(0, 16), (1, 16), (2, 16), (3, 16)]


@pytest.fixture
def calls(rt, monkeypatch):
    """Prompts, samples of each and tokens that the engine was asked for, by call."""
    generate, found = rt.engine.generate, []

    def noted(prompts, params, *, adapter=None):
        found.append((len(prompts), params.n, params.max_tokens))
        return generate(prompts, params, adapter=adapter)

    monkeypatch.setattr(rt.engine, "generate", noted)
    return found


def test_a_round_is_one_call_and_half_as_long_again_where_nothing_ends(rt, calls):
    with rt.rollout():
        rt.generate(PROMPTS, n=2, max_tokens=40, until=ONE_ROUND)
        assert calls == [(3, 2, 4)]  # a prompt is computed once for all of its samples
        calls.clear()
        done = rt.generate(PROMPTS[:2], n=2, max_tokens=30, temperature=0.5, until=1.0)
    assert len(done) == 10
    # those of other options are a call of their own; no row is asked for more than another may get
    assert calls[:2] == [(6, 1, 4), (2, 2, 4)] and [call[2] for call in calls if call[0] == 6] == [4, 6, 9, 13, 4]
    calls.clear()
    with rt.rollout():
        rt.generate(PROMPTS, n=2, max_tokens=40, until=ONE_ROUND)
        rt.generate([[9]], n=2, max_tokens=40, until=1.0)
    # new prompts beside rows that go on
    assert calls == [(3, 2, 4), (8, 1, 4), (8, 1, 6), (8, 1, 9), (8, 1, 13), (8, 1, 4), (2, 1, 4)]


class Scripted:
    """An engine whose rows end after so many tokens: `lengths[prompt][sample]`. Notes what it is asked for."""

    weights_version = 0

    def __init__(self, lengths):
        self.lengths, self.rounds = lengths, []

    def sampling_params(self, **options):
        return colo.SamplingParams(**options)

    def generate(self, prompts, params, *, adapter=None):
        self.rounds.append(params.max_tokens)
        found = []
        for index, (prompt, *before) in enumerate(prompts):
            for sample in before[:1] or range(params.n):
                left = self.lengths[prompt][sample] - len(before)
                count = min(left, params.max_tokens)
                found.append(
                    colo.Completion(
                        prompt_index=index,
                        sample_index=0 if before else sample,
                        prompt_token_ids=(prompt, *before),
                        token_ids=(sample,) * count,
                        logprobs=(0.0,) * count,
                        finish_reason="stop" if count == left else "length",
                        weights_version=0,
                    )
                )
        return found


LENGTHS = {
    "a chance at each token": lambda draw: draw.expovariate(1 / 300),
    "few are long": lambda draw: draw.lognormvariate(6, 0.8),
    "most are alike": lambda draw: draw.gammavariate(4, 300),
    "two kinds": lambda draw: draw.gauss(300, 50) if draw.random() < 0.9 else draw.uniform(2000, 6000),
}


def test_rounds_grow_again_after_a_short_one(monkeypatch):
    monkeypatch.setattr(carried, "ROUND_TOKENS", 128)
    engine = Scripted([[300]] * 62 + [[5000]] * 18)
    carried.Carried().run([[i] for i in range(80)], {"max_tokens": 8000}, engine=engine, adapter=None, until=64)
    assert sum(engine.rounds) < 6000 and len(engine.rounds) < 16


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_round_lasts_until_enough_groups_should_have_ended(kind, monkeypatch):
    monkeypatch.setattr(carried, "ROUND_TOKENS", 128)
    draw = random.Random(0)
    lengths = [[min(8000, 1 + max(0, int(LENGTHS[kind](draw)))) for _ in range(8)] for _ in range(80)]
    needed = sorted(map(max, lengths))[63]
    asked = {"n": 8, "max_tokens": 8000}

    def sampled(**options):
        engine = Scripted(lengths)
        done = carried.Carried().run([[i] for i in range(80)], asked | options, engine=engine, adapter=None, until=64)
        found = {(c.prompt_index, c.sample_index): len(c.token_ids) for c in done}
        assert len(found) == 64 * 8 and all(lengths[i][j] == length for (i, j), length in found.items())
        return engine.rounds

    rounds = sampled()
    assert needed <= sum(rounds) < 1.15 * needed and len(rounds) < 14
    assert rounds[0] == 128 and min(rounds) >= 16
    # what a row draws from its seed does not depend on when others end
    assert all(later == earlier * 3 // 2 for earlier, later in pairwise(sampled(seed=0)))


def test_no_row_gets_more_than_it_may(rt, calls):
    with rt.rollout():
        rt.generate([[1], [2]], n=2, max_tokens=6, temperature=0, until=ONE_ROUND)
        done = rt.generate([[3]], n=2, max_tokens=6, temperature=0, until=1.0)
        whole = rt.generate([[1], [2], [3]], n=2, max_tokens=6, temperature=0)
    assert [call[2] for call in calls] == [4, 4, 2, 6]  # two rows were asked for two tokens too many
    assert [c.token_ids for c in done] == [c.token_ids for c in whole]
    assert all((len(c.logprobs), c.finish_reason, c.spans) == (6, "length", ((0, 6),)) for c in done)


def test_a_row_near_its_limit_needs_no_more_room_than_it_was_begun_with():
    tokens = 16  # of the prompt and the completion, which fill the KV cache
    rt = launch(config=RuntimeConfig(kv_cache_bytes=tokens * 512))
    assert rt.engine.kv_bytes_per_token == 512
    with rt.rollout():
        whole = rt.generate([[1, 2], [3, 4]], max_tokens=14, temperature=0)
        rt.generate([[1, 2]], max_tokens=14, temperature=0, until=ONE_ROUND)
        rt.generate([], until=ONE_ROUND)
        rt.generate([], until=ONE_ROUND)
        done = rt.generate([[3, 4]], max_tokens=14, temperature=0, until=1.0)
    assert [c.token_ids for c in done] == [c.token_ids for c in whole]
    rt.close()


def test_what_is_drawn_does_not_depend_on_the_room_for_what_goes_on_beside_it():
    def drawn(tokens):
        torch.manual_seed(0)  # of the weights
        rt = launch(config=RuntimeConfig(kv_cache_bytes=tokens * 512))
        with rt.rollout():
            for _ in range(3):
                rt.generate([[1, 2]] if not rt.carried else [], n=2, max_tokens=14, until=ONE_ROUND, seed=1)
            done = rt.generate([[3, 4]], n=2, max_tokens=14, until=1.0, seed=2)
        rt.close()
        return [c.token_ids for c in done]

    assert drawn(16) == drawn(1000)


def test_what_is_drawn_does_not_depend_on_what_goes_on_beside_it(rt):
    with rt.rollout():
        alone = rt.generate([[5]], n=3, max_tokens=8, until=1.0, seed=[4])
        rt.generate(PROMPTS, n=3, max_tokens=40, until=ONE_ROUND, seed=1)
        rt._carried._num_prompts = 0  # the number of a prompt is part of what its samples draw by
        groups = dict(rt._carried._groups)
        rt._carried._groups = {100 + index: group for index, group in groups.items()}
        beside = rt.generate([[5]], n=3, max_tokens=8, until=1, seed=[4])
    assert [c.token_ids for c in beside[:3]] == [c.token_ids for c in alone]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"until": 0.0}, ValueError, "in (0, 1], and not 0.0"),
        ({"until": 1.5}, ValueError, "a number is an int"),
        ({"until": 0}, ValueError, "at least 1"),
        ({"until": True}, TypeError, "a share such as 0.9"),
        ({"until": "0.9"}, TypeError, "a share such as 0.9"),
        ({"until": timedelta()}, ValueError, "longer than"),
        ({"until": 0.9, "max_age": -1}, ValueError, "whole number of versions"),
        ({"max_age": 1}, ValueError, "give until"),
        ({"until": 0.9, "repetition_penalty": 1.2}, ValueError, "does not take repetition_penalty"),
        ({"until": 0.9, "tempersature": 1}, ValueError, "does not take tempersature, but n, max_tokens"),
        ({"until": 0.9, "keys": [1]}, ValueError, "keys has 1 for 3 prompts"),
        ({"until": 0.9, "keys": iter([1])}, ValueError, "keys has 1 for 3 prompts"),
        ({"until": 0.9, "keys": 5}, TypeError, "keys must be a list with an object for each prompt, not 5"),
        ({"until": 0.9, "n": 10**12}, colo.BudgetError, "completions, which take at least"),
        ({"until": 0.9, "seed": [1]}, ValueError, "1 seeds for 3 prompts"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_under_way(rt, options, error, words):
    with rt.rollout(), pytest.raises(error) as caught:
        rt.generate(PROMPTS, **options)
    assert words in str(caught.value)
    assert rt.carried == []
    with rt.rollout(), pytest.raises(ValueError, match="outside the vocabulary"):
        rt.generate([[1], [1000]], until=0.9)
    assert rt.carried == []


class Anything:
    """An engine that knows all options."""

    def sampling_params(self, **sampling):
        return sampling


def test_options_that_look_at_earlier_tokens_are_refused_by_name_where_the_engine_has_them():
    with pytest.raises(colo.Unsupported, match="min_tokens, stop with until"):
        carried.options_of(Anything(), None, {"stop": ["a"], "min_tokens": 3, "n": 2})
    with pytest.raises(colo.Unsupported, match="max_tokens=None with until"):
        carried.options_of(Anything(), None, {"max_tokens": None})
    assert carried.options_of(
        Anything(), colo.SamplingParams(n=2), {"min_tokens": 0, "skip_special_tokens": False}
    ) == {
        **{name: getattr(colo.SamplingParams(n=2), name) for name in colo.SamplingParams.__dataclass_fields__},
        "skip_special_tokens": False,
    }


def test_what_an_earlier_call_asked_for_is_compared_at_no_other_temperature(rt):
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=8, temperature=0.2, until=ONE_ROUND)
        assert len(rt.generate([], until=1.0)) == 3
    with rt.train():
        pass
    assert "mismatch_sampled" not in rt.trace.metrics
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=8, temperature=0.2, until=1.0)
    with rt.train():
        pass
    assert rt.trace.metrics["mismatch_sampled"][-1] < 1e-4


def test_groups_that_have_waited_hide_no_gap_of_the_present_weights(rt):
    with rt.rollout():
        assert len(rt.generate([[i] for i in range(1, 7)], max_tokens=8, until=1)) == 1
    with rt.train():
        train_step(rt)
    before = len(rt.trace.metrics["mismatch_sampled"])
    with rt.rollout():
        assert len(rt.generate([[i] for i in range(7, 11)], max_tokens=8, until=9)) == 9
    with rt.train():
        pass
    assert len(rt.trace.metrics["mismatch_sampled"]) == before + 1 and rt.trace.metrics["mismatch_age_1"]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.floats(0.1, 1.0)), min_size=1, max_size=6))
def test_every_sample_of_every_prompt_is_returned_once(calls):
    rt = launch()
    done, num_prompts, asked = [], 0, {}
    for number, (count, n, until) in enumerate(calls):
        with rt.rollout():
            found = rt.generate(
                [[1, i + 1] for i in range(count)], n=n, max_tokens=12, until=until, stop_token_ids=STOPS
            )
        asked |= {num_prompts + i: n for i in range(count)}
        num_prompts += count
        done += found
        if number % 2:
            with rt.train():
                train_step(rt)
        waiting = {c.prompt_index for c in rt.carried}
        assert waiting | {c.prompt_index for c in done} == set(asked)
    with rt.rollout():
        done += rt.generate([], until=1.0)
    assert sorted((c.prompt_index, c.sample_index) for c in done) == [
        (i, j) for i, n in asked.items() for j in range(n)
    ]
    for completion in done:
        versions = completion.token_versions
        assert len(versions) == len(completion.token_ids) == len(completion.logprobs) <= 12
        assert list(versions) == sorted(versions)
        assert not set(completion.token_ids[:-1]) & set(STOPS)
    rt.close()


def test_the_report_says_how_many_go_on_and_how_old_tokens_are(rt):
    for step in range(2):
        with rt.rollout():
            rt.generate(PROMPTS if not step else [], max_tokens=8, until=ONE_ROUND)
        with rt.train():
            train_step(rt)
    assert rt.trace.metrics["carried"] == [1.0, 0.0]
    assert rt.trace.metrics["token_age"] == [0.5] and rt.trace.metrics["token_age_max"] == [1]
    assert set(rt.trace.metrics) >= {"mismatch_age_1"} and "mismatch_sampled" not in rt.trace.metrics
    told = " ".join(str(rt.report()).split())
    assert "0% of the prompts under way went on" in told and "0.5 versions old on average, 1 at most" in told
