"""What every engine refuses before it generates."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import colo
from colo.engine import SamplingParams
from colo.engines import text as common
from colo.engines.text import COMPLETION_BYTES, check_count
from colo.errors import BudgetError
from colo.units import MIB
from tests.models import tiny_qwen3


def test_more_completions_than_the_host_can_hold_are_refused(monkeypatch):
    monkeypatch.setattr(common, "available_host_bytes", lambda: 1000 * COMPLETION_BYTES)
    check_count(10, 100)
    with pytest.raises(BudgetError, match="n=101 for 10 prompts asks for 1010 completions") as caught:
        check_count(10, 101)
    assert caught.value.missing_bytes == 10 * COMPLETION_BYTES


def test_a_count_beyond_all_memory_is_refused_and_the_engine_goes_on():
    with colo.launch(tiny_qwen3(), device="cpu", config=colo.RuntimeConfig(kv_cache_bytes=MIB)) as rt:
        with pytest.raises(BudgetError, match=r"n=1000000000000 .* of host memory, and .* are available: lower n"):
            rt.generate([[1, 2]], n=10**12)
        with pytest.raises(
            BudgetError, match=r"at least 4\.66e\+390 TiB of host memory, and .* are available: lower n"
        ):
            rt.generate([[1, 2]], n=10**400)
        for prompt, options, name in (
            ([1, 10**5000], {}, "a token id of prompt 0"),
            ([1], {"seed": -(10**5000)}, "seed"),
            ([1], {"max_tokens": 10**5000}, "max_tokens"),
            ([1], {"temperature": 10**5000}, "temperature"),
            ([1], {"stop_token_ids": [10**5000]}, "one of stop_token_ids"),
            ([1], {"until": -(10**5000)}, "until"),
            ([1], {"until": 1, "max_age": -(10**5000)}, "max_age"),
        ):  # which Python writes in no message
            with pytest.raises(
                ValueError, match=f"^{name} is a whole number of about 5000 digits: give one of 64 bits"
            ):
                rt.generate([prompt], **options)
        assert len(rt.generate([[1, 2]], n=2, max_tokens=1)) == 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"n": "2"}, "n must be a whole number, not '2'"),
        ({"n": True}, "n must be a whole number, not True"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number, not 2.5"),
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"seed": "a"}, "seed must be a whole number, or a list with one for each prompt, not 'a'"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_p": False}, "top_p must be a number, not False"),
        ({"stop_token_ids": 5}, r"stop_token_ids must be a list of token ids, such as \[2\], not 5"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids must be a list of token ids, such as \[2\], not \['a'\]"),
    ],
)
def test_sampling_options_of_another_type_are_named(option, words):
    with pytest.raises(TypeError, match=words):
        SamplingParams(**option)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"stop_token_ids": [1, 2**63]}, "stop_token_ids must be numbers of 64 bits, but is"),
        ({"stop_token_ids": [-(10**30)]}, "stop_token_ids must be numbers of 64 bits, but is"),
        ({"ignore_eos": "false"}, "ignore_eos must be True or False, but is false"),
        ({"temperature": 10**400}, "temperature must be at least 0 and finite, but is 1000"),
        ({"seed": [1, 2**64]}, "seed must be numbers of 64 bits, with n added, but is"),
        ({"seed": [2**64 - 1], "n": 2}, "seed must be numbers of 64 bits, with n added, but is"),
        ({"seed": [-(2**63) - 1]}, "seed must be numbers of 64 bits, with n added, but is"),
    ],
)
def test_numbers_that_no_engine_can_hold_are_named(option, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**option)


def test_probabilities_may_be_fractions():
    params = SamplingParams(temperature=Fraction(1, 2), top_p=Fraction(1, 4), min_p=Fraction(1, 8))
    found = [params.temperature, params.top_p, params.min_p]
    assert found == [0.5, 0.25, 0.125] and all(type(value) is float for value in found)


def test_the_largest_seeds_and_stop_tokens_are_taken():
    with colo.launch(tiny_qwen3(), device="cpu", config=colo.RuntimeConfig(kv_cache_bytes=MIB)) as rt:
        for seed in (2**100, -(2**100), [2**64 - 2], [-(2**63)]):
            found = rt.generate([[1]], n=2, max_tokens=2, seed=seed, stop_token_ids=[2**63 - 1, -(2**63)])
            assert len(found) == 2
        with rt.train():
            pass
        assert len(rt.generate([[1]], max_tokens=2, temperature=2**64)) == 1


@pytest.mark.parametrize("of", [np.array, torch.tensor, lambda value: np.array(value)[()]])
def test_numbers_of_numpy_and_torch_are_pythons(of):
    own = {"n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.0, "seed": 1}
    own |= {"ignore_eos": True, "stop_token_ids": [0, 1]}
    params = SamplingParams(**{name: of(value) for name, value in own.items()})
    assert params == SamplingParams(**own)
    # json.dumps and vLLM take no others
    assert {name: type(getattr(params, name)) for name in own} == {
        name: tuple if name == "stop_token_ids" else type(value) for name, value in own.items()
    }
    assert SamplingParams(seed=of([4, 5])).seed == (4, 5)
    for wrong in ({"n": of([2])}, {"max_tokens": of(2.0)}, {"seed": of(True)}):
        with pytest.raises(TypeError, match="must be a whole number"):
            SamplingParams(**wrong)
