"""The distance of log-probabilities, for a model whose logits are a table."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from colo.engine import Completion
from colo.weights import mismatch
from colo.weights.mismatch import (
    MAX_TOKENS,
    PASS_TOKENS,
    Mismatch,
    MismatchCheck,
    first_not_finite,
    logprob_difference,
    not_numbers,
)

CPU = torch.device("cpu")
NAN = float("nan")


class Table(nn.Module):
    """Logits of the next token by the last one; noise while it trains."""

    def __init__(self, size=6, keeps_all=False):
        super().__init__()
        self.keeps_all = keeps_all
        self.logits = nn.Parameter(torch.randn(size, size))
        self.frozen, self.trained = nn.Dropout(), nn.Dropout()
        self.asked, self.shapes = [], []
        self.frozen.eval()

    def forward(self, input_ids, *, logits_to_keep, use_cache):
        assert not use_cache and not torch.is_grad_enabled()
        self.asked.append(logits_to_keep)
        self.shapes.append(tuple(input_ids.shape))
        logits = self.logits[input_ids][:, 0 if self.keeps_all else -logits_to_keep :]
        return SimpleNamespace(logits=logits + 100 * torch.rand_like(logits) * self.training)


def completion(model, prompt, tokens, errors, *, temperature):
    """What an engine would have that is off by `errors`."""
    before = [prompt[-1], *tokens[:-1]]
    logprobs = (model.logits[before] / temperature).log_softmax(-1)[range(len(tokens)), list(tokens)]
    return Completion(
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(tokens),
        logprobs=tuple((logprobs.detach()[: len(errors)] + torch.tensor(errors)).tolist()),
        finish_reason="length",
        weights_version=0,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("keeps_all", [True, False])
def test_it_is_the_mean_over_every_token_in_whichever_direction(temperature, keeps_all):
    model = Table(keeps_all=keeps_all)  # as models do that do not know the argument
    found = [
        completion(model, [0, 4, 1, 2], [3, 0, 5], [0.1, -0.2, 0.6], temperature=temperature),
        completion(model, [4], [4], [-0.3], temperature=temperature),
    ]
    difference = logprob_difference(model, found, temperature=temperature, device=CPU)
    assert difference == pytest.approx((0.1 + 0.2 + 0.6 + 0.3) / 4, abs=1e-5)
    assert model.asked == [4, 2]  # of a whole vocabulary, no more than are compared


def test_the_first_tokens_that_have_log_probabilities_are_compared():
    model = Table()
    tokens = [number % 6 for number in range(MAX_TOKENS + 10)]
    errors = [0.5] * MAX_TOKENS + [3.0] * 10
    assert logprob_difference(
        model, [completion(model, [1], tokens, errors, temperature=1.0)], temperature=1.0, device=CPU
    ) == pytest.approx(0.5, abs=1e-5)
    few = completion(model, [1], tokens[:5], [0.25, 0.25], temperature=1.0)
    assert logprob_difference(model, [few], temperature=1.0, device=CPU) == pytest.approx(0.25, abs=1e-5)


def test_without_any_token_there_is_nothing_to_compare():
    model = Table()
    assert logprob_difference(model, [], temperature=1.0, device=CPU) is None
    none = completion(model, [1], [2], [], temperature=1.0)
    assert logprob_difference(model, [none], temperature=1.0, device=CPU) is None
    some = completion(model, [1], [2], [0.5], temperature=1.0)
    assert logprob_difference(model, [none, some], temperature=1.0, device=CPU) == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("together", [None, False, True])
def test_equally_long_ones_in_a_row_are_computed_in_one_pass(together):
    model = Table()
    errors = [[0.1, -0.2], [0.6, 0.3], [0.7, -0.4], [0.5], [0.9, 0.2]]
    found = [completion(model, [1, 2], range(len(row)), row, temperature=1.0) for row in errors[:4]]
    found.append(completion(model, [1, 2, 3], [3, 4], errors[4], temperature=1.0))
    found.insert(2, completion(model, [1, 2], [4], [], temperature=1.0))  # of which there is nothing to compare
    asked = {} if together is None else {"together": together}
    difference = logprob_difference(model, found, temperature=1.0, device=CPU, **asked)
    assert difference == pytest.approx(sum(abs(error) for row in errors for error in row) / 9, abs=1e-5)
    assert model.shapes == ([(3, 4), (1, 3), (1, 5)] if together else [(1, 4)] * 3 + [(1, 3), (1, 5)])


def test_a_pass_is_over_no_more_tokens_than_one_completion_or_the_limit_has():
    model = Table()
    long = [completion(model, [1] * (PASS_TOKENS // 2 - 1), [2], [0.5], temperature=1.0) for _ in range(3)]
    longer = [completion(model, [1] * PASS_TOKENS, [2], [0.5], temperature=1.0) for _ in range(2)]
    difference = logprob_difference(model, long + longer, temperature=1.0, device=CPU, together=True)
    assert difference == pytest.approx(0.5, abs=1e-5)
    assert model.shapes == [(2, PASS_TOKENS // 2), (1, PASS_TOKENS // 2)] + [(1, PASS_TOKENS + 1)] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_is_in_the_mode_that_it_was_in(fails):
    model = Table()
    found = completion(model, [1], [2], [0.0], temperature=1.0)
    if fails:
        model.logits = None
        with pytest.raises(TypeError):
            logprob_difference(model, [found], temperature=1.0, device=CPU)
    else:
        logprob_difference(model, [found], temperature=1.0, device=CPU)
    assert (model.training, model.frozen.training, model.trained.training) == (True, False, True)


class Hiding(Table):
    """Has hidden states in place of logits where Unsloth's setting asks for them."""

    def forward(self, input_ids, **options):
        if os.environ.get("UNSLOTH_RETURN_HIDDEN_STATES") == "1":
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 1))
        return super().forward(input_ids, **options)


def test_logits_are_compared_where_a_trainer_of_unsloths_has_asked_for_hidden_states(monkeypatch):
    model = Hiding().eval()
    found = completion(model, [1], [2], [0.5], temperature=1.0)
    monkeypatch.setenv("UNSLOTH_RETURN_HIDDEN_STATES", "1")
    assert logprob_difference(model, [found], temperature=1.0, device=CPU) == pytest.approx(0.5, abs=1e-5)
    assert os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] == "1"


class Source:
    """Weights of which another rank has `fewest` completions to compare."""

    def __init__(self, fewest=9, *, is_alone=False):
        self.ranks = SimpleNamespace(min=lambda count, at="": min(count, fewest), is_alone=is_alone)
        self.resharded = 0

    def reshard(self):
        self.resharded += 1


def measured(check, source, model, version=0):
    return check.measure(source, model, version=version, device=CPU)


def test_the_first_of_what_was_noted_is_compared_once():
    model, source, check = Table(), Source(), MismatchCheck(num_sequences=2, max_mismatch=None)
    assert not check.has_noted
    found = [completion(model, [1], [2], [error], temperature=0.5) for error in (0.25, -0.75, 5.0)]
    check.note(0.5, found)
    assert check.has_noted
    mismatch = measured(check, source, model)
    assert mismatch.mean == pytest.approx(0.5, abs=1e-5) and mismatch.temperature == 0.5
    assert source.resharded == 1, "a pass gathers weights that are sharded"
    assert not check.has_noted and measured(check, source, model) is None
    check.note(1.0, [])
    assert not check.has_noted
    assert source.resharded == 1


def test_only_what_was_sampled_from_these_weights_is_compared():
    model, source = Table(), Source()
    check = MismatchCheck(num_sequences=4, max_mismatch=None)
    check.note(
        1.0, [completion(model, [1], [], [], temperature=1.0), completion(model, [1], [2], [1.0], temperature=1)]
    )
    assert measured(check, source, model, version=1) is None and source.resharded == 0
    check.note(
        1.0, [completion(model, [1], [], [], temperature=1.0), completion(model, [1], [2], [1.0], temperature=1)]
    )
    assert measured(check, source, model).mean == pytest.approx(1.0, abs=1e-5)
    check.note(1.0, [completion(model, [1], [2], [], temperature=1.0)])
    assert measured(check, source, model) is None, "it has no log-probabilities"


@pytest.mark.parametrize("is_alone", [False, True])
def test_only_a_model_of_one_rank_computes_several_in_one_pass(is_alone):
    model, check = Table(), MismatchCheck(num_sequences=2, max_mismatch=None)
    check.note(1.0, [completion(model, [1], [2], [0.5], temperature=1.0)] * 2)
    assert measured(check, Source(is_alone=is_alone), model).mean == pytest.approx(0.5, abs=1e-5)
    assert model.shapes == ([(2, 2)] if is_alone else [(1, 2)] * 2), "ranks make as many passes as one another"


@pytest.mark.parametrize(("fewest", "mean"), [(0, None), (1, 0.25), (2, 0.5)])
def test_ranks_compute_as_many_passes_as_the_fewest_of_them_have(fewest, mean):
    model, check = Table(), MismatchCheck(num_sequences=4, max_mismatch=None)
    check.note(1.0, [completion(model, [1], [2], [error], temperature=1.0) for error in (0.25, 0.75)])
    mismatch = measured(check, Source(fewest), model)
    assert (mismatch and mismatch.mean) == (mean if mean is None else pytest.approx(mean, abs=1e-5))


@pytest.mark.parametrize(
    ("most", "mean", "temperature", "is_refused"),
    [
        (None, 9.0, 1.0, False),
        (0.3, 0.2, 1.0, False),
        (0.3, 0.4, 1.0, True),
        (0.3, 0.4, 0.5, False),  # a temperature below one makes more of every difference
        (0.3, 0.8, 0.5, True),
        (0.3, 0.2, 2.0, False),
        (0.3, 0.4, 2.0, True),
        (0.3, 0.5, 1.7, True),
    ],
)
def test_a_mismatch_over_the_limit_is_too_large(most, mean, temperature, is_refused):
    cause = MismatchCheck(num_sequences=1, max_mismatch=most).why_too_large(Mismatch(mean, temperature))
    assert (cause is not None) is is_refused
    if cause is not None:
        assert f"by {mean:g} on average at temperature {temperature:g}, and max_mismatch allows 0.3" in cause


# ---- log-probabilities that are not numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_first_tensor_with_such_values_is_named_with_their_number(value, dtype):
    bad = torch.zeros(2, 3, dtype=dtype)
    bad[0, 1] = bad[1, 2] = value
    tensors = [("good", torch.ones(4)), ("bad", bad), ("worse", torch.full((3,), NAN))]
    assert first_not_finite(tensors) == "bad (2, 3) has 2 values that are NaN or infinite"


def test_finite_weights_codes_and_tensors_without_elements_are_passed_over():
    tensors = [("codes", torch.tensor([1, 255], dtype=torch.uint8)), ("none", torch.empty(0, 4)), ("w", torch.ones(3))]
    assert first_not_finite(tensors) is None
    assert first_not_finite([*tensors, ("bad", torch.tensor(NAN))]) == ("bad () has 1 values that are NaN or infinite")


def test_a_tensor_is_looked_at_to_its_end():
    long = torch.zeros(2, mismatch._CHUNK_ELEMENTS, dtype=torch.float16)[:, : mismatch._CHUNK_ELEMENTS // 2 + 1]
    long[0, 0] = long[1, -1] = NAN
    assert first_not_finite([("long", long)]) == f"long {tuple(long.shape)} has 2 values that are NaN or infinite"


def test_of_a_sharded_tensor_the_part_is_looked_at_and_the_whole_shape_is_told(mesh):
    sharded = distribute_tensor(torch.tensor([[1.0, NAN], [2.0, 3.0]]), mesh, [Shard(0)])
    assert first_not_finite([("w", sharded)]) == "w (2, 2) has 1 values that are NaN or infinite"


def test_the_message_has_the_culprit_or_says_that_there_is_none():
    assert "are not numbers: w has 1 values. Load weights that are finite" in not_numbers("w has 1 values")
    assert "are not numbers: every weight is finite, so that an activation has overflowed" in not_numbers(None)
