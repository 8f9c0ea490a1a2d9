import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import colo
from colo.errors import Unsupported
from colo.planning.estimate import estimate
from colo.planning.model_shape import ModelShape, load_model_config

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TINY_MOE = {**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
LLAMA_31_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
GEMMA_3_4B_TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
}
CONFIGS = {
    "llama": {"model_type": "llama", **TINY},
    "llama, biases, tied": {
        "model_type": "llama",
        **TINY,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama, heads of its own": {"model_type": "llama", **TINY, "num_key_value_heads": None, "head_dim": None},
    "mistral": {"model_type": "mistral", **TINY},
    "qwen2": {"model_type": "qwen2", **TINY, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", **TINY},
    "qwen3, biases": {"model_type": "qwen3", **TINY, "attention_bias": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **TINY_MOE},
    "qwen3_moe, dense layers": {"model_type": "qwen3_moe", **TINY_MOE, "mlp_only_layers": [0], "attention_bias": True},
    "qwen3_moe, every second": {"model_type": "qwen3_moe", **TINY_MOE, "decoder_sparse_step": 2},
    "gemma3_text": {"model_type": "gemma3_text", **TINY},
    "gemma3_text, untied": {"model_type": "gemma3_text", **TINY, "tie_word_embeddings": False, "attention_bias": True},
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Llama-3.1-8B": LLAMA_31_8B,
    "Gemma-3-4b text": GEMMA_3_4B_TEXT,
}
MODULES = {
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    "norm": "norms",
    "self_attn": "attention",
    "experts": "experts",
    "gate.weight": "router",
    "mlp": "mlp",
}


def build(config, device="meta"):
    settings_ = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings_))


def parameters(shape, tp=1):
    """Parameters by module on one of `tp` ranks."""
    counts = Counter()
    for group in shape.groups:
        counts[group.module] += group.num_parameters(tp)
    return counts


def windows(shape):
    """The window of every layer that has one."""
    return [cache.window for cache in shape.caches if cache.window is not None]


def module_of(name):
    """The module that a transformers parameter belongs to, by its name."""
    if "norm" in name:
        return "norms"
    if "mlp.gate.weight" in name:
        return "router"
    return next(module for part, module in MODULES.items() if part in name)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_counts_equal_those_of_transformers_module_by_module(name):
    expected: dict[str, int] = {}
    for key, parameter in build(CONFIGS[name]).named_parameters():
        expected[module_of(key)] = expected.get(module_of(key), 0) + parameter.numel()
    shape = ModelShape.from_config(CONFIGS[name])
    assert parameters(shape) == expected
    assert shape.num_parameters == sum(expected.values())


@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",
        "qwen3_next",
        "gpt2",
        "mamba2",
        "gpt_oss",
        "gpt_neox",
        "lfm2",
        "falcon_h1",
        "gemma3n_text",
        "glm4_moe",
    ],
)
def test_every_architecture_of_transformers_is_counted_and_planned(kind):
    shape = ModelShape.from_config({"model_type": kind})
    assert shape.num_parameters == sum(p.numel() for p in build({"model_type": kind}).parameters())
    found = estimate(shape, gpu_memory_bytes=1 << 50, mode="lora", context=4096, generations=8)
    assert found.segments.pop("trainer.master_weights") == 0  # adapters are in fp32
    assert found.fits and all(found.segments.values())


def test_a_text_model_that_is_only_a_part_of_another_is_counted_alone():
    parts = {"text_config": {**TINY, "model_type": "qwen2_5_vl_text"}, "vision_config": {"depth": 2}}
    shape = ModelShape.from_config({"model_type": "qwen2_5_vl", "tie_word_embeddings": False, **parts})
    alone = ModelShape.from_config({"model_type": "qwen2", **TINY, "head_dim": 16, "tie_word_embeddings": False})
    assert shape.num_parameters == alone.num_parameters
    assert shape.kv_bytes(10) == alone.kv_bytes(10)
    assert shape.uncounted == ("vision_config",)


def test_experts_that_every_token_takes_are_told_from_the_others():
    sizes = {**TINY_MOE, "n_shared_experts": 1, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1}
    shape = ModelShape.from_config({"model_type": "glm4_moe", **sizes, "topk_group": 1})
    assert (shape.num_dense_layers, shape.num_moe_layers, shape.num_experts, shape.experts_per_token) == (1, 2, 4, 2)
    assert (shape.intermediate_size, shape.moe_intermediate_size, shape.shared_intermediate_size) == (160, 48, 48)


def test_qwen3_8b_is_what_the_papers_say():
    shape = ModelShape.from_config(QWEN3_8B)
    assert shape.weight_bytes() == 16_381_470_720
    assert shape.weight_bytes(dtype_bytes=4) == 2 * 16_381_470_720
    assert shape.kv_bytes(1) == 147_456


SHAPES = {name: ModelShape.from_config(config) for name, config in CONFIGS.items()}
MIXED = ("qwen3_moe, dense layers", "qwen3_moe, every second")


def peft_adapters(name):
    model = get_peft_model(build(CONFIGS[name]), LoraConfig(r=8, target_modules="all-linear"))
    return sorted(tuple(p.shape) for p in model.parameters() if p.requires_grad)


def our_adapters(name):
    placed = ModelShape.from_config(CONFIGS[name]).adapter_shapes(8)
    return sorted(shape for shape, count in placed for _ in range(count))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in MIXED and "B" not in name])
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning:peft")  # PEFT's own pattern
def test_adapters_are_those_that_peft_places_on_all_linear_layers(name):
    assert our_adapters(name) == peft_adapters(name)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning:peft")
def test_adapters_of_dense_layers_among_experts_are_counted_though_peft_skips_them(name):
    ours, theirs = our_adapters(name), peft_adapters(name)
    assert all(ours.count(shape) >= theirs.count(shape) for shape in set(theirs))


def test_nf4_packs_linear_layers_and_leaves_the_rest():
    shape = ModelShape.from_config(CONFIGS["llama, biases, tied"])
    model = build(CONFIGS["llama, biases, tied"])
    linear = [
        m.weight.numel() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n
    ]
    rest = shape.num_parameters - sum(linear)
    scales = sum(4 * math.ceil(size / 64) for size in linear)
    assert shape.weight_bytes(nf4=True) == sum(linear) // 2 + scales + 2 * rest


def test_packed_experts_stay_unpacked():
    shape = ModelShape.from_config(QWEN3_30B_A3B)
    assert shape.weight_bytes(nf4=True) > 2 * parameters(shape)["experts"]


@pytest.mark.parametrize("name", CONFIGS)
def test_sliding_layers_are_those_of_transformers(name):
    config = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, **CONFIGS[name]}
    built = AutoConfig.for_model(**config)
    shape = ModelShape.from_config(config)
    if config["model_type"] == "llama":
        kinds = ["full_attention"] * built.num_hidden_layers
    else:  # a family without layer types slides in every layer
        kinds = getattr(built, "layer_types", None) or ["sliding_attention"] * built.num_hidden_layers
    window = None if config["model_type"] == "llama" else built.sliding_window
    assert windows(shape) == ([] if window is None else kinds.count("sliding_attention") * [window])


def test_a_window_that_the_config_switches_off_does_not_count():
    assert windows(ModelShape.from_config({**CONFIGS["qwen3"], "sliding_window": 8})) == []
    assert windows(ModelShape.from_config({**CONFIGS["mistral"], "sliding_window": None})) == []


def test_layer_types_say_which_layers_slide():
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    shape = ModelShape.from_config({**CONFIGS["gemma3_text"], "layer_types": kinds, "sliding_window": 8})
    assert windows(shape) == [8]
    assert shape.kv_bytes(100) == 2 * 2 * 32 * 2 * (8 + 100 + 100)


def test_kv_cache_stops_growing_at_the_window():
    shape = ModelShape.from_config(GEMMA_3_4B_TEXT)
    per_layer = 2 * 4 * 256 * 2
    assert shape.kv_bytes(1024) == 34 * 1024 * per_layer
    assert shape.kv_bytes(5000) == (29 * 1024 + 5 * 5000) * per_layer
    mistral = ModelShape.from_config({**CONFIGS["mistral"], "sliding_window": 8})
    assert mistral.kv_bytes(8) == mistral.kv_bytes(1_000_000)


def test_a_nested_text_config_is_read_and_the_rest_is_named():
    text = {key: value for key, value in GEMMA_3_4B_TEXT.items() if key != "model_type"}
    nested = ModelShape.from_config(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    )
    alone = ModelShape.from_config(GEMMA_3_4B_TEXT)
    assert parameters(nested) == parameters(alone)
    assert nested.kv_bytes(4096) == alone.kv_bytes(4096)
    assert nested.uncounted == ("vision_config",)
    assert alone.uncounted == ()


@pytest.mark.parametrize("name", ["llama, biases, tied", "qwen3", "qwen3_moe, dense layers"])
def test_tensor_parallel_ranks_hold_shares_of_matrices_and_whole_norms(name):
    shape = ModelShape.from_config(CONFIGS[name])
    for group in shape.groups:
        whole = math.prod(group.shape)
        assert math.prod(group.local_shape(2)) == (whole if group.split_axis is None else whole // 2)
    assert parameters(shape, 2)["norms"] == parameters(shape)["norms"]
    assert parameters(shape, 2).get("router") == parameters(shape).get("router")


def test_a_bias_is_cut_with_its_matrix_unless_it_follows_a_reduction():
    shape = ModelShape.from_config(CONFIGS["llama, biases, tied"])
    q, kv, hidden, width, layers = 4 * 32, 2 * 32, 64, 160, 3
    attention = layers * ((2 * q * hidden + 2 * kv * hidden + q + 2 * kv) // 2 + hidden)
    mlp = layers * ((3 * hidden * width + 2 * width) // 2 + hidden)
    assert parameters(shape, 2)["attention"] == attention
    assert parameters(shape, 2)["mlp"] == mlp


def test_key_value_heads_are_replicated_rather_than_cut():
    shape = ModelShape.from_config(CONFIGS["qwen3"])  # 4 heads share 2 key/value heads
    kv = next(group for group in shape.groups if group.granule > 1)
    assert [kv.local_shape(tp)[0] for tp in (1, 2, 4)] == [64, 32, 32]
    assert [shape.local_kv_heads(tp) for tp in (1, 2, 4)] == [2, 1, 1]
    assert shape.kv_bytes(10, tp=4) == shape.kv_bytes(10, tp=2) == shape.kv_bytes(10) // 2


@pytest.mark.parametrize(
    ("tp", "key"), [(3, "num_attention_heads"), (0, "num_attention_heads"), (8, "num_attention_heads")]
)
def test_a_tp_that_does_not_divide_heads_is_refused(tp, key):
    with pytest.raises(ValueError, match=f"tp {tp} does not divide {key} = 4"):
        ModelShape.from_config(CONFIGS["qwen3"]).check_tp(tp)


def test_a_tp_that_does_not_divide_widths_is_refused():
    odd = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 96, "head_dim": 8}
    with pytest.raises(ValueError, match="tp 3 does not divide intermediate_size = 160"):
        ModelShape.from_config({**CONFIGS["llama"], **odd}).check_tp(3)
    with pytest.raises(ValueError, match="tp 3 does not divide moe_intermediate_size = 50"):
        ModelShape.from_config({**CONFIGS["qwen3_moe"], **odd, "moe_intermediate_size": 50}).check_tp(3)
    with pytest.raises(ValueError, match="tp 4 does not divide num_key_value_heads = 6"):
        ModelShape.from_config({**CONFIGS["llama"], **odd, "num_key_value_heads": 6}).check_tp(4)


@given(tp=st.sampled_from([1, 2, 4]), name=st.sampled_from(sorted(CONFIGS)), context=st.integers(1, 100_000))
@settings(max_examples=60)
def test_ranks_together_hold_at_least_the_model(tp, name, context):
    shape = SHAPES[name]
    shape.check_tp(tp)
    assert tp * sum(parameters(shape, tp).values()) >= shape.num_parameters
    assert tp * shape.kv_bytes(context, tp=tp) >= shape.kv_bytes(context)
    assert shape.kv_bytes(context + 1) >= shape.kv_bytes(context)


@pytest.mark.parametrize(
    ("kind", "why"), [("no_such_type", r"transformers [\d.]+ does not know it"), ("vit", "no causal language model")]
)
def test_what_transformers_cannot_build_is_named(kind, why):
    with pytest.raises(Unsupported, match=f"cannot plan a model of type '{kind}': .*{why}"):
        ModelShape.from_config({"model_type": kind})


@pytest.mark.parametrize(
    "kind",
    [kind for kind in ("zamba", "moshi", "zaya", "blt", "dots3_note_text", "rwkv", "bert") if kind in CONFIG_MAPPING],
)
def test_a_model_whose_layers_cache_what_nobody_knows_is_named(kind):
    with pytest.raises(Unsupported, match=f"cannot plan a model of type '{kind}': colo does not know what its layers"):
        ModelShape.from_config({"model_type": kind})


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"model_type": "qwen3", **TINY, "max_position_embeddings": 512}, 512),
        ({"model_type": "gpt2", "n_positions": 512}, 512),
        ({"model_type": "mpt", "max_seq_len": 512}, 512),
        ({"model_type": "whisper", "max_target_positions": 448}, 448),
        ({"model_type": "bloom"}, None),  # ALiBi has no limit
    ],
)
def test_the_longest_context_is_read_by_whichever_name_it_has(config, longest):
    assert ModelShape.from_config(config).max_context == longest


def test_a_config_without_a_type_is_refused():
    with pytest.raises(ValueError, match="no key 'model_type'"):
        ModelShape.from_config(TINY)


def test_what_a_config_leaves_out_takes_the_default_of_transformers():
    left_out = {key: value for key, value in CONFIGS["qwen3_moe"].items() if key != "moe_intermediate_size"}
    shape = ModelShape.from_config(left_out)
    assert shape.moe_intermediate_size == AutoConfig.for_model("qwen3_moe").moe_intermediate_size
    assert shape.num_parameters == sum(p.numel() for p in build(left_out).parameters())


def test_sizes_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="transformers cannot build a qwen3 of this model config: .*rope_parameters"):
        ModelShape.from_config({**CONFIGS["qwen3"], "rope_parameters": 3})


def test_the_whole_of_transformers_reason_is_told(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("Validation error for field 'x':\n    TypeError: expected int\n")

    monkeypatch.setattr("transformers.AutoConfig.for_model", refuse)
    with pytest.raises(ValueError, match="model config: Validation error for field 'x': TypeError: expected int$"):
        ModelShape.from_config(CONFIGS["qwen3"])


@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True, None])
def test_a_size_must_be_a_positive_integer(value):
    with pytest.raises(ValueError, match=r"hidden_size of the model config must be an integer of at least 1, but is"):
        ModelShape.from_config({**CONFIGS["qwen3"], "hidden_size": value})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"model_type": "gpt2", "n_layer": 1001}, "n_layer"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 100_000}}, "num_hidden_layers"),
    ],
)
def test_more_layers_than_any_model_has_are_refused_before_one_is_made(monkeypatch, config, key):
    monkeypatch.setattr("colo.planning.model_shape.build_on_meta", None)
    with pytest.raises(
        ValueError, match=f"{key} of the model config is 1[0-9]+, and at most 1000 layers can be planned"
    ):
        ModelShape.from_config(CONFIGS["qwen3"] | config)


def test_a_size_of_more_than_64_bits_is_an_error_of_one_line():
    with pytest.raises(ValueError, match="cannot build a qwen3 of this model config: ") as refused:
        ModelShape.from_config({**CONFIGS["qwen3"], "vocab_size": 10**30})
    assert "frame #0" not in str(refused.value) and len(str(refused.value)) < 300


def test_a_plan_of_what_is_no_name_says_what_it_takes():
    with pytest.raises(TypeError, match="a plan is of a folder or a hub id, such as 'Qwen/Qwen3-8B', not of a dict"):
        colo.plan(CONFIGS["qwen3"])


def test_a_folder_with_a_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    assert load_model_config(str(tmp_path)) == CONFIGS["qwen3"]


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[" * 100_000, "not valid JSON"), ("[1]", "holds a list, not a JSON object")],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_model_config(str(tmp_path))


def test_a_hub_model_is_downloaded(tmp_path):
    def download(model: str, file_name: str) -> str:
        assert (model, file_name) == ("Qwen/Qwen3-8B-Base", "config.json")
        path = Path(tmp_path, "blob")
        path.write_text(json.dumps(QWEN3_8B))
        return str(path)

    assert load_model_config("Qwen/Qwen3-8B-Base", download=download) == QWEN3_8B


def test_a_model_that_cannot_be_reached_says_to_pass_a_folder():
    def download(model: str, file_name: str) -> str:
        raise OSError(f"cannot reach the hub for {model}\nand a long story")

    with pytest.raises(ValueError, match=r"'Qwen/None'.*cannot reach the hub for Qwen/None\): pass a folder with a"):
        load_model_config("Qwen/None", download=download)


def test_a_path_that_is_no_hub_name_says_to_pass_a_folder():
    with pytest.raises(ValueError, match=r"no folder '\./no/such/folder'.*pass a folder with a config\.json"):
        load_model_config("./no/such/folder")
