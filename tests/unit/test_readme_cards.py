"""README's table of the smallest cards is what `colo plan` says."""

import re
from pathlib import Path

import pytest

from colo.planning.estimate import WAYS, ModelShape, Workload, smallest_cards

README = Path(__file__).parents[2] / "README.md"
COMMON = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
SHAPES = {  # hidden, MLP, layers, heads, tied: of the models' config.json
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12_288, 36, 32, False),
    "Qwen3-14B": (5120, 17_408, 40, 40, False),
    "Qwen3-32B": (5120, 25_600, 64, 64, False),
}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")


@pytest.mark.parametrize("model", SHAPES)
def test_readme_names_the_smallest_card_of_every_way_to_train(model):
    shape = ModelShape.from_config(COMMON | dict(zip(NAMES, SHAPES[model], strict=True)))
    found = smallest_cards(shape, Workload(gpu_memory_bytes=1, context=4096, generations=8))
    (row,) = re.findall(rf"^\|{re.escape(model)}\|(.*)\|$", README.read_text(), re.MULTILINE)
    cards = [(card or "none").removesuffix(" GB") for _, card in found.values()]
    assert row.split("|") == cards and len(cards) == len(WAYS)
