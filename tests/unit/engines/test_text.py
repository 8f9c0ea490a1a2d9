from dataclasses import replace

import pytest
import torch
from transformers import BatchEncoding

from colo.demo import CharTokenizer
from colo.engine import Completion
from colo.engines.text import encode_prompts, with_text


def completion(token_ids):
    return Completion(
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=(1,),
        token_ids=token_ids,
        logprobs=(0.0,) * len(token_ids),
        finish_reason="stop",
        weights_version=0,
    )


def test_texts_are_encoded_and_token_ids_kept():
    assert encode_prompts(["1+2", (3, 4)], CharTokenizer()) == [[1, 10, 2], [3, 4]]
    assert encode_prompts([[3, 4]], None) == [[3, 4]]
    assert encode_prompts([], None) == []


def test_what_can_be_read_only_once_is_read_once():
    assert encode_prompts((prompt for prompt in ["1+2", [3, 4]]), CharTokenizer()) == [[1, 10, 2], [3, 4]]
    assert encode_prompts([(token for token in (3, 4))], None) == [[3, 4]]
    with pytest.raises(TypeError, match="pass \\[prompt\\] for one"):
        encode_prompts(iter([1, 2]), None)


@pytest.mark.parametrize("prompts", ["1+2", [1, 2]])
def test_one_prompt_is_not_taken_for_many(prompts):
    with pytest.raises(TypeError, match="pass \\[prompt\\] for one"):
        encode_prompts(prompts, CharTokenizer())


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": "1+2"}], {"role": "user", "content": "1+2"}])
def test_messages_are_not_prompts(prompt):
    with pytest.raises(TypeError, match="apply the tokenizer's chat template first"):
        encode_prompts([prompt], CharTokenizer())


@pytest.mark.parametrize("prompts", [b"1+2", None, 7, torch.tensor([1, 2])])
def test_what_is_no_list_of_prompts_is_refused(prompts):
    with pytest.raises(TypeError, match="prompts is a list of prompts, each a text or a list of token ids"):
        encode_prompts(prompts, CharTokenizer())


def test_what_a_tokenizer_returns_is_not_a_list_of_prompts():
    encoding = BatchEncoding({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]})
    with pytest.raises(TypeError, match="not a BatchEncoding: pass the texts, or the 'input_ids'"):
        encode_prompts(encoding, CharTokenizer())


@pytest.mark.parametrize("prompt", [[1.0, 2.0], ["1", "+"], [[1, 2]], None, b"1+2", torch.tensor([1.0])])
def test_what_is_no_prompt_is_named(prompt):
    with pytest.raises(TypeError, match="prompt 1 is neither a text nor a list of token ids, but "):
        encode_prompts([[1, 2], prompt], CharTokenizer())


@pytest.mark.parametrize(
    "prompts",
    [([1, 2] for _ in range(2)), ((1, 2), (1, 2)), torch.tensor([[1, 2], [1, 2]]), torch.tensor([[1, 2]] * 2).numpy()],
    ids=["generator", "tuple", "tensor", "array"],
)
def test_prompts_may_be_anything_that_gives_integers(prompts):
    assert encode_prompts(prompts, None) == [[1, 2], [1, 2]]


def test_a_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match=r"tokenizer=... to colo.launch or colo.share"):
        encode_prompts(["1"], None)


def test_text_is_added_where_there_is_a_tokenizer():
    assert with_text(completion((8, 12)), CharTokenizer()).text == "8"
    assert with_text(completion((8, 12)), None).text is None


@pytest.mark.parametrize("text", ["", "8;"])
def test_a_text_of_the_engines_own_is_kept(text):
    assert with_text(replace(completion((8, 12)), text=text), CharTokenizer()).text == text
