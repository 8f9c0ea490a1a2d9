from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from colo.engine import SamplingParams
from colo.engines import sampling
from colo.engines.sampling import (
    Sampler,
    Transcript,
    check_seeds,
    completion_seed,
    distorting,
    invert_cdf,
    needing_tokenizer,
    processed_logprobs,
    row_seed,
    sample_rows,
    sampling_temperature,
    without_neutral,
)

CPU = torch.device("cpu")


def rows_of(num_prompts: int, n: int) -> list[tuple[int, int]]:
    return [(p, s) for p in range(num_prompts) for s in range(n)]


def draw(params: SamplingParams, rows: list[tuple[int, int]], logits: torch.Tensor, steps: int) -> list[list[int]]:
    """Tokens of every row over `steps` steps with the same logits."""
    sampler = Sampler(params, rows, CPU)
    return torch.stack([sampler.sample(logits)[0] for _ in range(steps)], dim=1).tolist()


# ---- the processed distribution -------------------------------------------------------------------------------------


def softmax(scores: dict[int, float]) -> dict[int, float]:
    largest = max(scores.values())
    weights = {token: math.exp(score - largest) for token, score in scores.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def explicit_distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The definitions of temperature, min-p, top-k and top-p, one after another, on plain numbers."""
    probabilities = softmax({token: logit / params.temperature for token, logit in enumerate(logits)})
    floor = params.min_p * max(probabilities.values())
    assume(all(abs(p - floor) > 1e-6 or p == max(probabilities.values()) for p in probabilities.values()))
    kept = {token: logits[token] / params.temperature for token, p in probabilities.items() if p >= floor}
    ranked = sorted(kept, key=lambda token: (-logits[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    probabilities = softmax({token: kept[token] for token in ranked})
    nucleus, total = [], 0.0
    for token in ranked:
        assume(params.top_p == 1 or abs(total - params.top_p) > 1e-6)
        if total < params.top_p or params.top_p == 1:
            nucleus.append(token)
        total += probabilities[token]
    return softmax({token: kept[token] for token in nucleus})


@settings(max_examples=200)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda i: i / 2), min_size=1, max_size=24),
    temperature=st.floats(0.25, 3),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    top_k=st.integers(0, 30),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 0.9)),
)
def test_processed_logprobs_are_the_explicit_definitions(logits, temperature, top_p, top_k, min_p):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    expected = explicit_distribution(logits, params)
    found = processed_logprobs(torch.tensor([logits]), params)[0]
    assert {token for token, p in enumerate(found.exp().tolist()) if p > 0} == set(expected)
    for token, probability in expected.items():
        assert found[token].exp().item() == pytest.approx(probability, rel=1e-4)


def test_top_k_keeps_exactly_k_of_equally_likely_tokens():
    logprobs = processed_logprobs(torch.zeros(1, 10), SamplingParams(top_k=3))
    assert logprobs[0].exp().tolist() == pytest.approx([1 / 3] * 3 + [0] * 7)


def test_top_p_works_on_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of {0.4, 0.3} renormalised, 0.57 alone reaches top_p = 0.5; of all four it takes two tokens.
    assert (processed_logprobs(logits, SamplingParams(top_k=2, top_p=0.5)).exp()[0] > 0).tolist() == [True] + 3 * [
        False
    ]
    assert (processed_logprobs(logits, SamplingParams(top_p=0.5)).exp()[0] > 0).tolist() == 2 * [True] + 2 * [False]


def test_min_p_is_measured_after_the_temperature():
    logits = torch.tensor([[0.0, math.log(0.3)]])
    assert processed_logprobs(logits, SamplingParams(min_p=0.2))[0, 1].isfinite()
    assert not processed_logprobs(logits, SamplingParams(min_p=0.2, temperature=0.5))[0, 1].isfinite()  # 0.3 ** 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-5])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    logits = torch.tensor([[80.0, 90.0, -1e30, 89.0]])
    tokens, logprobs = Sampler(SamplingParams(temperature=temperature), [(0, 0)], CPU).sample(logits)
    assert (tokens.tolist(), logprobs.tolist()) == ([1], [0.0])


def test_greedy_takes_the_largest_logit_and_reports_the_unscaled_softmax():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]], dtype=torch.bfloat16)
    tokens, logprobs = Sampler(SamplingParams(temperature=0, top_k=1, top_p=0.1), rows_of(2, 1), CPU).sample(logits)
    assert (tokens.dtype, logprobs.dtype, tokens.tolist()) == (torch.int64, torch.float32, [1, 0])
    assert torch.equal(logprobs, logits.float().log_softmax(-1).amax(-1))


# ---- drawing --------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1.0)), min_size=1, max_size=40),
    uniform=st.one_of(st.sampled_from([0.0, 1 - 2**-53, 0.5]), st.floats(0, 1, exclude_max=True)),
)
def test_invert_cdf_finds_the_first_token_past_the_uniform_and_never_an_impossible_one(weights, uniform):
    assume(sum(weights) > 1e-20)
    token = invert_cdf(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)).item()
    weights = torch.tensor(weights).tolist()  # as float32 has them
    assert weights[token] > 0
    target = uniform * sum(weights)
    assert sum(weights[:token]) <= target * (1 + 1e-12)
    assert sum(weights[: token + 1]) >= target * (1 - 1e-12)


def test_invert_cdf_never_ends_on_a_token_that_cannot_be_drawn():
    past_the_end = torch.tensor([1.0], dtype=torch.float64)  # stands for a sum that was rounded the wrong way
    assert invert_cdf(torch.tensor([[0.4, 0.6, 0.0, 0.0]]), past_the_end).tolist() == [1]


def test_invert_cdf_stays_within_the_vocabulary_when_logits_are_not_numbers():
    assert 0 <= invert_cdf(torch.full((1, 5), math.nan), torch.tensor([0.9], dtype=torch.float64)).item() < 5


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.02, 0.01, 0.0])
    rows, steps = rows_of(20, 100), 20
    tokens = draw(SamplingParams(seed=11), rows, probabilities.log().expand(len(rows), -1), steps)
    counts = torch.tensor(tokens).flatten().bincount(minlength=7).double()
    expected = probabilities.double() * len(rows) * steps
    assert counts[-1] == 0
    chi_square = ((counts - expected)[:-1] ** 2 / expected[:-1]).sum().item()
    assert chi_square < 20.5  # five degrees of freedom: exceeded by chance once in a thousand seeds


def test_reported_logprobs_are_those_of_the_drawn_tokens():
    params = SamplingParams(seed=3, temperature=0.7, top_k=5, top_p=0.9)
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = Sampler(params, rows_of(40, 1), CPU).sample(logits)
    assert torch.equal(logprobs, processed_logprobs(logits, params).gather(-1, tokens[:, None])[:, 0])
    assert logprobs.isfinite().all()


def test_a_seeded_row_does_not_depend_on_the_rows_beside_it():
    params, rows = SamplingParams(seed=5), rows_of(4, 3)
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(1))
    together = draw(params, rows, logits, steps=130)  # past two blocks of uniforms
    assert all(tokens[:64] != tokens[64:128] for tokens in together)
    for position in (0, 7, 11):
        assert draw(params, [rows[position]], logits[position : position + 1], steps=130)[0] == together[position]
    assert len({tuple(tokens) for tokens in together}) == len(rows)


def test_keeping_rows_keeps_their_numbers():
    params, rows = SamplingParams(seed=5), rows_of(3, 2)
    logits = torch.zeros(len(rows), 1000)
    expected = draw(params, rows, logits, steps=70)
    sampler, index = Sampler(params, rows, CPU), torch.tensor([5, 1, 2])
    before = [sampler.sample(logits)[0] for _ in range(10)]
    sampler.keep(index)
    after = [sampler.sample(logits[:3])[0] for _ in range(60)]
    assert torch.stack([t[index] for t in before] + after, dim=1).tolist() == [expected[row] for row in index]


def test_large_batches_are_drawn_in_chunks_with_the_same_result(monkeypatch):
    params, rows = SamplingParams(seed=5, top_p=0.8), rows_of(7, 1)
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    whole = Sampler(params, rows, CPU).sample(logits)
    monkeypatch.setattr(sampling, "_CHUNK_ELEMENTS", 100)
    chunked = Sampler(params, rows, CPU).sample(logits)
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))


def test_unseeded_draws_differ_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    first, second = (draw(SamplingParams(), [(0, 0)], torch.zeros(1, 10_000), steps=8) for _ in range(2))
    assert first != second
    assert torch.equal(torch.get_rng_state(), state)


def test_row_seeds_are_fixed_for_good():
    assert row_seed(0, 0, 0) == 4808561972376111626
    seeds = {row_seed(s, p, n) for s in (-1, 0, 1, 2**80) for p in range(20) for n in range(20)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---- what was drawn -------------------------------------------------------------------------------------------------


def test_a_row_ends_at_its_first_stop_token_and_keeps_it():
    transcript = Transcript([4] * 3, {9, 8}, CPU)
    steps = [([1, 9, 2], 2), ([3, 9, 4], 2), ([8, 5, 6], 1), ([7, 7, 7], 0)]
    for tokens, num_running in steps:
        assert transcript.append(torch.tensor(tokens), -torch.tensor(tokens).float()) == num_running
    assert transcript.results() == [
        ((1, 3, 8), (-1.0, -3.0, -8.0)),
        ((9,), (-9.0,)),
        ((2, 4, 6, 7), (-2.0, -4.0, -6.0, -7.0)),
    ]


def test_a_shrunken_transcript_goes_on_with_the_remaining_rows():
    transcript = Transcript([3] * 4, {0}, CPU)
    assert transcript.append(torch.tensor([0, 1, 0, 2]), torch.zeros(4)) == 2
    assert transcript.shrink().tolist() == [1, 3]
    assert transcript.append(torch.tensor([3, 0]), torch.zeros(2)) == 1
    assert transcript.shrink().tolist() == [0]
    assert transcript.append(torch.tensor([0]), torch.zeros(1)) == 0
    assert [tokens for tokens, _ in transcript.results()] == [(0,), (1, 3, 0), (0,), (2, 0)]


def test_without_stop_tokens_every_row_runs_to_the_end():
    transcript = Transcript([2, 2], (), CPU)
    assert [transcript.append(torch.tensor([0, 1]), torch.zeros(2)) for _ in range(2)] == [2, 0]
    assert [tokens for tokens, _ in transcript.results()] == [(0, 0), (1, 1)]


def test_rows_end_at_their_own_limits_with_and_without_stop_tokens():
    for stop_token_ids in ((), {9}):
        transcript = Transcript([1, 3, 2], stop_token_ids, CPU)
        running = [transcript.append(torch.tensor([5, 6, 7]) + step, torch.zeros(3)) for step in range(3)]
        assert running == [2, 1, 0]
        assert [tokens for tokens, _ in transcript.results()] == [(5,), (6, 7, 8), (7, 8)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_seen_in_what_was_drawn_and_not_in_what_was_dropped(value):
    transcript = Transcript([3, 3], {9}, CPU)
    transcript.append(torch.tensor([9, 5]), torch.zeros(2))
    transcript.append(torch.tensor([1, 5]), torch.tensor([value, 0.0]))
    assert not transcript.has_nan()
    transcript.append(torch.tensor([1, 5]), torch.tensor([0.0, value]))
    assert transcript.has_nan()


def test_sample_rows_stops_as_soon_as_all_rows_have_and_tells_who_stays():
    next_tokens = torch.tensor([[5, 9, 6, 7], [9, 9, 6, 7], [9, 9, 9, 9]])  # one row a step
    rows_left, kept, step = torch.arange(4), [], 0

    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, 10).float()

    def advance(tokens: torch.Tensor) -> torch.Tensor:
        nonlocal step
        assert torch.equal(tokens, next_tokens[step][rows_left])
        step += 1
        return logits_of(next_tokens[step][rows_left])

    def keep(index: torch.Tensor) -> None:
        nonlocal rows_left
        rows_left = rows_left[index]
        kept.append(rows_left.tolist())

    params = SamplingParams(temperature=0, max_tokens=50)
    transcript = sample_rows(logits_of(next_tokens[0]), rows_of(4, 1), params, {9}, advance=advance, keep=keep)
    assert [tokens for tokens, _ in transcript.results()] == [(5, 9), (9,), (6, 6, 9), (7, 7, 9)]
    assert (kept, step) == ([[2, 3]], 2)


def test_a_seed_for_each_prompt_counts_up_with_its_samples():
    assert completion_seed(3, 1, 2) == row_seed(3, 1, 2)
    assert completion_seed([10, 20], 1, 2) == 22
    check_seeds(None, 3), check_seeds(7, 3), check_seeds((1, 2, 3), 3)
    with pytest.raises(ValueError, match="seed has 2 seeds for 3 prompts: give one for each, or a single one"):
        check_seeds((1, 2), 3)
    assert SamplingParams(seed=[1, 2]).seed == (1, 2)
    for wrong in (1.5, [1.5], "12", True):
        with pytest.raises(TypeError, match="seed must be a whole number, or a list"):
            SamplingParams(seed=wrong)


def test_a_row_draws_by_its_prompts_seed_wherever_the_prompt_stands():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))

    def drawn(seeds, rows):
        params = SamplingParams(seed=seeds, max_tokens=20)
        found = sample_rows(
            logits.expand(len(rows), -1), rows, params, [], advance=lambda t: logits.expand(len(t), -1), keep=id
        )
        return [tokens for tokens, _ in found.results()]

    group = drawn([5, 90], [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert len(set(group)) == 4
    assert drawn([90, 5, 6], [(0, 0), (1, 0), (2, 0)]) == [group[2], group[0], group[1]]


# ---- what options do -------------------------------------------------------------------------------------------------

PLAIN = {
    "n": 4,
    "max_tokens": 8,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": None,
    "structured_outputs": None,
    "seed": [1, 2],
    "stop": ["x"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "detokenize": False,
    "logprobs": 5,
}
CHANGES = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"repetition_penalty": 0.9},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"min_tokens": 3},
    {"logit_bias": {5: 20.0}},
    {"allowed_token_ids": [1, 2]},
    {"bad_words": ["no"]},
    {"structured_outputs": object()},
    {"extra_args": {"mine": 1}},
    {"logits_processors": [id]},
    {"thinking_token_budget": 9},
    {"thinking_token_budget": 0},
    {"trace_decode_token_ids": [1]},
    {"truncate_prompt_tokens": 4},
    {"of_a_later_vllm": 0.5},
]


@pytest.mark.parametrize("change", CHANGES, ids=" ".join)
def test_an_option_that_changes_the_distribution_is_named(change):
    assert distorting(PLAIN) == () and sampling_temperature(PLAIN) == 0.7
    assert distorting(PLAIN | change) == tuple(change)
    assert sampling_temperature(PLAIN | change) is None


def test_greedy_sampling_is_told_by_its_temperature_whatever_the_filters():
    assert distorting({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.2}) == ()
    assert distorting({"temperature": 0, "logit_bias": {1: 2.0}}) == ("logit_bias",)
    assert sampling_temperature({"temperature": 0, "top_p": 0.5}) == 1.0
    assert sampling_temperature(SamplingParams(temperature=0.5)) == 0.5
    assert sampling_temperature(SamplingParams(top_k=2)) is None


def test_options_that_vllm_skips_without_a_tokenizer_are_named():
    assert needing_tokenizer(PLAIN | {"stop": [], "skip_special_tokens": True, "detokenize": True}) == ()
    assert needing_tokenizer({"thinking_token_budget": 0}) == ("thinking_token_budget",)
    assert needing_tokenizer({"skip_special_tokens": False}) == ("skip_special_tokens",)
    assert needing_tokenizer({"spaces_between_special_tokens": False}) == ("spaces_between_special_tokens",)
    given = {"bad_words": ["a"], "stop": "b", "structured_outputs": object(), "thinking_token_budget": 3, "top_k": 2}
    assert needing_tokenizer(given) == ("bad_words", "stop", "structured_outputs", "thinking_token_budget")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_new_tokens": 8}, "in place of max_new_tokens, max_tokens"),
        ({"num_return_sequences": 2}, "in place of num_return_sequences, n"),
        ({"do_sample": False}, "in place of do_sample, temperature=0 is greedy"),
        ({"num_beams": 4}, "there is no beam search"),
        ({"eos_token_id": 2, "max_length": 9}, "stop_token_ids; in place of max_length, max_tokens counts"),
    ],
    ids=str,
)
def test_transformers_names_are_refused_with_ours(given, words):
    with pytest.raises(ValueError, match=words):
        without_neutral(given, ())
    assert without_neutral({"do_sample": True, "num_beams": 1}, ()) == {}
