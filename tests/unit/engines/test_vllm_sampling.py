"""What becomes of vLLM's outputs, without vLLM: plain objects with the fields of its own."""

from types import SimpleNamespace

import pytest

from colo.engines.vllm.sampling import completions
from colo.errors import StaleWeights


def output(*samples):
    return SimpleNamespace(prompt_token_ids=[1, 2], outputs=list(samples))


def sample(index, **fields):
    rows = [{token: SimpleNamespace(logprob=-float(token))} for token in (5, 7)]
    common = {"token_ids": [5, 7], "logprobs": rows, "finish_reason": "length", "text": "", "index": index}
    return SimpleNamespace(**common | fields)


def spans(*versions):
    return [SimpleNamespace(version=version, start=i, end=i + 1) for i, version in enumerate(versions)]


def test_samples_are_in_order_and_carry_the_version_and_the_adapter():
    found = completions([output(sample(1), sample(0))], 3, "policy@3")
    assert [(c.sample_index, c.weights_version, c.adapter, c.logprobs) for c in found] == [
        (0, 3, "policy@3", (-5.0, -7.0)),
        (1, 3, "policy@3", (-5.0, -7.0)),
    ]


@pytest.mark.parametrize("versions", [None, [], spans("3"), spans("3", "3")])
def test_versions_that_vllm_names_itself_are_the_one_that_was_committed(versions):
    assert completions([output(sample(0, weight_versions=versions))], 3, None)[0].weights_version == 3


@pytest.mark.parametrize("versions", [spans("3", "2"), spans("default"), spans("4")])
def test_tokens_of_another_version_are_refused(versions):
    with pytest.raises(StaleWeights, match="prompt 1 from weights that it calls .* not from version 3"):
        completions([output(sample(0)), output(sample(0, weight_versions=versions))], 3, None)
