"""Cards by name, the one that is there, and configs that come along."""

from types import SimpleNamespace

import pytest
import torch

from colo.planning.cards import CARDS, MODELS, known_config, read_card, smallest_card
from colo.planning.estimate import plan
from colo.planning.model_shape import ModelShape, load_model_config
from colo.units import GIB


def test_cards_go_up_and_have_less_than_is_sold():
    sizes = [card.memory_bytes for card in CARDS]
    assert sizes == sorted(sizes)
    sold = {
        "RTX 4060": 8,
        "RTX 3060": 12,
        "RTX 4080": 16,
        "L4": 24,
        "RTX 4090": 24,
        "L40S": 48,
        "H100": 80,
        "H200": 141,
    }
    given = {card.name: card.memory_bytes / GIB for card in CARDS}
    assert all(0.9 * size < given[name] < size for name, size in sold.items())
    assert given["L4"] < given["RTX 4090"] and given["L40S"] < given["A6000"]


@pytest.mark.parametrize(
    "name", ["L4", "l4", "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "4090", "A100-40GB", "H100"]
)
def test_a_card_is_known_however_its_name_is_written(name):
    assert read_card(name) in CARDS


@pytest.mark.parametrize(("memory", "size"), [("24GiB", 24 * GIB), (GIB, GIB), ("16G", 16 * GIB)])
def test_a_size_is_a_card_without_a_name(memory, size):
    assert (read_card(memory).name, read_card(memory).memory_bytes) == ("", size)


@pytest.mark.parametrize("memory", ["80 parsecs", "RTX 9999", "24", ""])
def test_what_is_neither_is_refused_with_the_names(memory):
    with pytest.raises(ValueError, match=r"name a card: RTX 4060, .*B200"):
        read_card(memory)


def test_the_gpu_that_is_there_is_planned_for(monkeypatch):
    plan("Qwen3-0.6B", gpu_memory="L4")  # imports of the model's code ask the GPU for more than is played here
    found = SimpleNamespace(name="NVIDIA L4", total_memory=22 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    assert (read_card(None).name, read_card(None).memory_bytes) == ("NVIDIA L4", 22 * GIB)
    assert plan("Qwen3-0.6B").workload.gpu_memory_bytes == 22 * GIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_card(None).name == "H100, since no GPU is here"


def test_the_smallest_card_holds_what_is_needed():
    for card in CARDS:
        assert smallest_card(card.memory_bytes).memory_bytes == card.memory_bytes
    assert smallest_card(CARDS[0].memory_bytes + 1).name == "RTX 3060"
    assert smallest_card(CARDS[-1].memory_bytes + 1) is None


PARAMETERS = {  # as the models' pages say, in billions
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
}


@pytest.mark.parametrize("name", MODELS)
def test_configs_that_come_along_need_no_hub_and_have_the_models_sizes(name):
    def offline(model, file_name):
        raise OSError("no network")

    for spelled in (name, f"Qwen/{name}"):
        config = load_model_config(spelled, download=offline)
        assert round(ModelShape.from_config(config).num_parameters / 1e9, 1) == PARAMETERS[name]


def test_a_folder_of_the_same_name_comes_first_and_other_names_are_asked_for(tmp_path, monkeypatch):
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    assert load_model_config("Qwen3-8B") == {"model_type": "llama"}
    assert known_config("Qwen/Qwen3-8B-Base") is None
    asked = []

    def download(model, file_name):
        asked.append(model)
        raise OSError("no network")

    with pytest.raises(ValueError, match="known without it: Qwen3-0.6B, "):
        load_model_config("meta-llama/Llama-3.1-8B", download=download)
    assert asked == ["meta-llama/Llama-3.1-8B"]
