"""README's table of the smallest cards is what `colo plan` says."""

import re
from pathlib import Path

import pytest

from colo.planning.cards import MODELS
from colo.planning.estimate import WAYS, ModelShape, Workload, smallest_cards
from colo.planning.model_shape import load_model_config
from colo.units import format_bytes

README = Path(__file__).parents[2] / "README.md"
SHAPES = {name: ModelShape.from_config(load_model_config(name)) for name in MODELS}


def planned(model, context):
    return smallest_cards(SHAPES[model], Workload(gpu_memory_bytes=1, context=context, generations=8))


def test_readme_names_the_smallest_card_of_every_way_to_train():
    rows = re.findall(r"^\|(Qwen3-[\w.]+)\|(.*)\|$", README.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [name for name in MODELS if "A3B" not in name]
    for name, row in rows:
        cards = [card.name if card else "none" for _, card in planned(name, 4096).values()]
        cards = [card.removeprefix("RTX ").replace(" ", "-") for card in cards]
        assert row.split("|") == cards and len(cards) == len(WAYS)


@pytest.mark.parametrize(("model", "place"), [("Qwen3-1.7B", 0), ("Qwen3-8B", 1)])
def test_readme_says_what_qlora_takes_where_others_take_5_and_16_gb(model, place):
    said = " ".join(README.read_text().split())
    figures = re.search(r"sequences of 1,024 tokens QLoRA takes ([\d.]+) GiB at 1.7B and ([\d.]+) GiB at 8B", said)
    needed_bytes, _ = planned(model, 1024)["QLoRA"]
    assert format_bytes(needed_bytes) == f"{figures[place + 1]} GiB"
