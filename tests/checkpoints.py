"""A tokenizer of single characters with a chat template, and a tiny checkpoint that has it, as a user would load it."""

import shutil

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.models import tiny_qwen3

SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
CHARACTERS = "0123456789+=?abcdefghijklmnopqrstuvwxyz \n"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def char_tokenizer(chat_template=TEMPLATE):
    """Every character is a token; `<user>1+2=<end><assistant>` is what a conversation of one question becomes."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=chat_template,
    )


def save_checkpoint(folder, **changes):
    """Write a tiny Qwen3 with that tokenizer."""
    settings = {"vocab_size": 64, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 64} | changes
    AutoModelForCausalLM.from_config(tiny_qwen3(**settings)).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def save_revisions(cache, **folders):
    """Put checkpoints into a cache of the hub's, as revisions of one repository; return its id."""
    repository = cache / "models--me--tiny"
    for number, (revision, folder) in enumerate(folders.items()):
        commit = f"{number:040x}"
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    return "me/tiny"
