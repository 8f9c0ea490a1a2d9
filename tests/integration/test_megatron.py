"""Megatron models in several layouts over ranks: their parts, joined, are the unsharded model's weights."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("wants Megatron: pip install 'colo-rl[megatron]'", allow_module_level=True)

FOLDER = Path(__file__).parent
DENSE = ("llama", "qwen2", "qwen3", "qwen3_tied", "qwen3_one_key_head")
MOE = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
LAYOUTS = {
    "tp2": (*DENSE, *MOE, "glm4_moe_mtp"),
    "pp2": (*DENSE, *MOE, "glm4_moe_mtp"),
    "pp2vp2": (*DENSE, *MOE),
    "ep2": (*MOE, "glm4_moe_mtp"),
    "tp2etp1": MOE,
}
LAYOUTS_OF_FOUR = {
    "tp2": DENSE,  # with two replicas
    "tp4": ("qwen3_one_key_head", "qwen3_tied", "llama"),
    "tp2pp2": (*DENSE, "glm4_moe_mtp"),
    "tp2pp2vp2": DENSE,
    "ep4": MOE,
    "pp2ep2": MOE,
    "pp2vp2ep2": MOE,
    "tp2ep2": (*MOE, "glm4_moe_mtp"),
    "tp2ep2etp1": MOE,
    "tp2ep2etp2": MOE,
    "tp2pp2ep2etp1": MOE,
}


def jobs_of(layouts):
    return [f"{layout}={','.join(models)}" for layout, models in layouts.items()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process has found of unsharded models."""
    results = tmp_path_factory.mktemp("results")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, FOLDER / "megatron_alone.py", results]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((results / "0.json").read_text())


@pytest.fixture(scope="module")
def ranks(two_ranks):
    """What both ranks have found, in order."""
    return two_ranks(FOLDER / "megatron_ranks.py", *jobs_of(LAYOUTS))


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"]
)
def test_transformers_computes_the_same_from_the_weights(alone, name):
    found = alone["transformers"][name]
    assert found["told"] == []  # neither missing nor unexpected
    assert found["others"] == []  # names and shapes of the checkpoint that transformers writes
    assert found["difference"] < 2e-5
    assert found["spread"] > 0.5, "logits are all about the same, which hides differences"


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in LAYOUTS for name in LAYOUTS[layout]])
def test_joined_parts_and_engines_are_the_unsharded_weights_bit_for_bit(ranks, alone, layout, name):
    check_joined([found[layout][name] for found in ranks], alone["sums"][name])


@pytest.mark.slow
def test_joined_parts_and_engines_of_four_ranks_are_the_unsharded_weights_bit_for_bit(two_ranks, alone):
    ranks = two_ranks(FOLDER / "megatron_ranks.py", *jobs_of(LAYOUTS_OF_FOUR), count=4)
    for layout, names in LAYOUTS_OF_FOUR.items():
        for name in names:
            check_joined([found[layout][name] for found in ranks], alone["sums"][name])


def check_joined(ranks, alone):
    for found in ranks:
        assert found["wrong"] == []  # replicas are equal, and nothing is missing
        assert found["sums"] == alone["sums"]
        assert found["specs"] == alone["specs"] and found["groups"] == alone["groups"]
        assert found["are_live"]
        same, received, planned = found["engine"]
        assert same and received == planned <= alone["whole"]
    names = [spec["name"] for spec in alone["specs"]]
    assert list(chain(*alone["groups"])) == names
    assert sum(found["held"] for found in ranks) >= alone["whole"]
    assert max(found["held"] for found in ranks) < alone["whole"]


def test_an_engine_gets_layer_after_layer(alone):
    first, *layers, last = alone["sums"]["glm4_moe_mtp"]["groups"]
    assert first == ["model.embed_tokens.weight"] and last == ["model.norm.weight", "lm_head.weight"]
    assert [{name.split(".")[2] for name in layer} for layer in layers] == [{"0"}, {"1"}, {"2"}, {"3"}, {"4"}]


def test_dense_models_are_held_once_but_for_what_every_rank_has(ranks):
    for name in ("llama", "qwen3"):
        for layout in ("tp2", "pp2", "pp2vp2"):
            held = sum(found[layout][name]["held"] for found in ranks)
            assert 1 <= held / ranks[0][layout][name]["whole"] < 1.06  # norms


@pytest.mark.parametrize("layout", ["tp2", "pp2", "pp2vp2"])
def test_one_flipped_bit_in_one_rank_is_seen(ranks, layout):
    (output, norm), (others_output, others_norm) = (found[layout]["qwen3"]["flipped"] for found in reversed(ranks))
    assert output == [True, ["lm_head.weight"], []]
    assert others_output == [False, ["lm_head.weight"], []]
    replicas = ["model.norm.weight"] if layout == "tp2" else []  # of which one differs
    assert norm == [True, ["model.norm.weight"], replicas]
    assert others_norm == [False, ["model.norm.weight"], replicas]


def test_parts_follow_parameters_into_other_memory(ranks):
    assert all(found[layout]["qwen3"]["moved"] for found in ranks for layout in ("tp2", "pp2", "pp2vp2"))


def test_what_is_not_known_is_refused_by_name_on_every_rank(ranks):
    for rank, found in enumerate(ranks):
        family, key, vocabulary, stranger, *wrapped, empty, gamma, good = found["pp2"]["qwen3"]["refused"]
        assert "Unsupported: colo has no table of Megatron's names for qwen1" in family
        assert "Unsupported: Megatron's decoder.layers.0.self_attention.linear_proj.weight has no name" in key
        assert "embedding.word_embeddings.weight has 144 rows, and vocab_size is 1000" in vocabulary
        told = "Unsupported: a Linear is no stage of a Megatron model: pass the list that it made"
        assert stranger == (
            told if rank == 1 else f"TransferError: reading Megatron's weights failed on rank 1: {told}"
        )
        for said, kind in zip(wrapped, ("FullyShardedDataParallel", "TorchFullyShardedDataParallel"), strict=True):
            assert said.startswith(f"Unsupported: {kind} cuts weights over data-parallel ranks")
        assert "no stages of a Megatron model" in empty
        assert "layernorm_zero_centered_gamma of Megatron's config is not supported" in gamma
        assert good is None  # and the ranks are still in step
