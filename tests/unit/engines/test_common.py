"""What every engine refuses before it generates."""

import numpy as np
import pytest

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


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), seed=np.int32(1), stop_token_ids=np.arange(2))
    assert (params.n, params.temperature, params.stop_token_ids) == (2, 0.5, (0, 1))
