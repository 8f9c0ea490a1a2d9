from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from colo.engine import AdapterWeights
from colo.engines import layout as layout_module
from colo.engines.layout import FusedWeights, Layout, LoadedAdapters, bind, empty_model
from colo.errors import TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.weights.sources.names import checkpoint_views
from tests.models import SMALL

CPU = torch.device("cpu")
SIZES = SMALL | {"intermediate_size": 96, "pad_token_id": None}
CONFIGS = {
    "qwen3-tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-biased": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
every_family = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def make_reference(config: PretrainedConfig) -> nn.Module:
    """A model as transformers makes it, with random weights in every place, biases and norms included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def make_weights(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> FusedWeights:
    model = empty_model(config, dtype=dtype, attn_implementation=None)
    return FusedWeights(Layout.of(model), device=CPU)


# ---- layout ---------------------------------------------------------------------------------------------------------


def test_a_qwen3_model_is_laid_out_as_vllm_does():
    layout = Layout.of(empty_model(CONFIGS["qwen3"], dtype=torch.bfloat16, attn_implementation=None))
    layer = {
        "self_attn.qkv_proj.weight": (64 + 32 + 32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate_up_proj.weight": (192, 64),
        "mlp.down_proj.weight": (64, 96),
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
    }
    expected = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    expected |= {"model.embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64), "model.norm.weight": (64,)}
    assert {name: shape for name, (shape, _) in layout.parameters.items()} == expected
    assert {dtype for _, dtype in layout.parameters.values()} == {torch.bfloat16}
    assert layout.tied == {}


@pytest.mark.parametrize(
    ("family", "fused", "num_rows"),
    [
        ("qwen2-tied", "self_attn.qkv_proj.bias", 128),
        ("llama-biased", "self_attn.qkv_proj.bias", 128),
        ("llama-biased", "mlp.gate_up_proj.bias", 192),
    ],
)
def test_biases_are_fused_like_their_weights(family, fused, num_rows):
    layout = Layout.of(empty_model(CONFIGS[family], dtype=torch.float32, attn_implementation=None))
    assert layout.parameters[f"model.layers.1.{fused}"] == ((num_rows,), torch.float32)
    assert layout.tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_projections_that_a_family_has_fused_already_keep_their_names():
    config = Phi3Config(**{**SIZES, "pad_token_id": 0}, tie_word_embeddings=False)
    model = empty_model(config, dtype=torch.float32, attn_implementation=None)
    layout = Layout.of(model)
    assert layout.parameters.keys() == dict(model.named_parameters()).keys()
    assert layout.parameters["model.layers.0.self_attn.qkv_proj.weight"][0] == (128, 64)


def test_projections_of_different_inputs_are_not_fused():
    model = empty_model(CONFIGS["llama"], dtype=torch.float32, attn_implementation=None)
    model.model.layers[0].self_attn.v_proj = nn.Linear(32, 32, bias=False, device="meta")
    names = Layout.of(model).parameters
    assert {f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"} < names.keys()
    assert "model.layers.1.self_attn.qkv_proj.weight" in names


# ---- weights --------------------------------------------------------------------------------------------------------


@every_family
def test_loaded_weights_are_found_under_both_names(config):
    reference, weights = make_reference(config), make_weights(config)
    state = reference.state_dict()
    weights.load(state.items())
    views = weights.hf_views()
    assert views.keys() | weights.layout.tied.keys() == state.keys()
    for name, view in views.items():
        assert view.is_contiguous()
        assert torch.equal(view, state[name])
    prefix = "model.layers.1.self_attn."
    fused = torch.cat([state[f"{prefix}{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(weights.parameters[f"{prefix}qkv_proj.weight"], fused)
    gate_up = torch.cat([state[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")])
    assert torch.equal(weights.parameters["model.layers.0.mlp.gate_up_proj.weight"], gate_up)


def test_experts_are_loaded_stacked_or_each_by_its_name_in_a_checkpoint():
    config = Qwen3MoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16)
    state = make_reference(config).state_dict()
    stacked, apart = make_weights(config), make_weights(config)
    stacked.load(state.items())
    each = checkpoint_views(state, config.model_type)
    assert "model.layers.1.mlp.experts.2.down_proj.weight" in dict(each)
    apart.load(each)
    assert all(torch.equal(apart.parameters[name], tensor) for name, tensor in stacked.parameters.items())
    apart.drop_views()
    with pytest.raises(ValueError, match="the engine is closed"):
        apart.load(each)


def test_padding_rows_are_zero_and_survive_loading():
    config = CONFIGS["qwen3"]
    weights = make_weights(config)
    weights.load(make_reference(config).state_dict().items())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert weights.parameters[name].shape == (128, 64)
        assert weights.unpadded()[name].shape == (100, 64)
        assert weights.parameters[name][100:].eq(0).all()
        weights.parameters[name].fill_(7)
    weights.zero_padding()
    assert weights.parameters["lm_head.weight"][100:].eq(0).all()
    assert weights.parameters["lm_head.weight"][:100].eq(7).all()


def test_part_of_the_weights_may_be_loaded_and_is_converted():
    weights = make_weights(CONFIGS["llama"], dtype=torch.bfloat16)
    for view in weights.hf_views().values():
        view.zero_()
    new = nn.Parameter(torch.randn(32, 64))
    weights.load([("model.layers.0.self_attn.k_proj.weight", new)])
    fused = weights.parameters["model.layers.0.self_attn.qkv_proj.weight"]
    assert torch.equal(fused[64:96], new.bfloat16())
    assert fused[:64].eq(0).all()
    assert fused[96:].eq(0).all()
    assert not fused.requires_grad


def test_names_and_shapes_that_do_not_fit_are_refused_by_name():
    weights = make_weights(CONFIGS["qwen3-tied"])
    with pytest.raises(ValueError, match=r"no parameter 'model.layers.0.self_attn.qkv_proj.weight'"):
        weights.load([("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(128, 64))])
    with pytest.raises(TransferError, match=r"model.embed_tokens.weight has shape \(128, 64\).* \(100, 64\)"):
        weights.load([("model.embed_tokens.weight", torch.zeros(128, 64))])


def test_the_head_of_a_tied_model_is_accepted_and_skipped():
    weights = make_weights(CONFIGS["qwen3-tied"])
    embedding = weights.hf_views()["model.embed_tokens.weight"].fill_(1)
    weights.load([("lm_head.weight", torch.zeros(100, 64))])
    assert embedding.eq(1).all()


@every_family
def test_the_loader_can_be_recorded_and_replayed(config):
    reference, weights = make_reference(config), make_weights(config)
    source = dict(reference.state_dict())
    plan = LoadPlan.record(weights.load, source, weights.unpadded())
    assert not plan.fallbacks
    assert plan.aliases.keys() == weights.hf_views().keys()
    plan.replay(source)
    assert plan.differences(source) == []
    assert all(torch.equal(view, source[name]) for name, view in weights.hf_views().items())


def test_parameters_are_cut_into_regions_of_bounded_size(monkeypatch):
    monkeypatch.setattr(layout_module, "REGION_BYTES", 40_000)
    config = CONFIGS["qwen3"]
    reference, weights = make_reference(config), make_weights(config)
    weights.load(reference.state_dict().items())
    assert len(weights.regions) > 3
    assert all(r.size_bytes <= 40_000 or r.size_bytes == 192 * 64 * 4 for r in weights.regions)
    assert all(torch.equal(view, reference.state_dict()[name]) for name, view in weights.hf_views().items())


def test_dropped_views_leave_nothing_to_load_into():
    weights = make_weights(CONFIGS["llama"])
    weights.drop_views()
    assert (weights.parameters, weights.hf_views()) == ({}, {})
    with pytest.raises(ValueError, match="the engine is closed"):
        weights.load([("model.norm.weight", torch.zeros(64))])


# ---- module ---------------------------------------------------------------------------------------------------------


@every_family
def test_the_bound_module_computes_as_a_model_made_by_transformers(config):
    reference, weights = make_reference(config), make_weights(config)
    model = empty_model(config, dtype=torch.float32, attn_implementation=None)
    assert all(parameter.is_meta for parameter in model.parameters())
    bind(model, weights.hf_views(), weights.layout.tied)
    weights.load(reference.state_dict().items())
    token_ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(model(token_ids).logits, reference(token_ids).logits)
    for (name, buffer), (_, expected) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == config.tie_word_embeddings
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_the_config_of_the_caller_stays_its_own():
    config = copy.deepcopy(CONFIGS["llama"])
    model = empty_model(config, dtype=torch.float32, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert config._attn_implementation != "eager"


# ---- adapters -------------------------------------------------------------------------------------------------------

TINY = nn.ModuleDict({"first": nn.Linear(4, 6), "second": nn.Linear(6, 2), "norm": nn.LayerNorm(4)})


def make_adapter(module: str = "first", *, rank: int = 2, shared: bool = False, dtype=torch.float32) -> AdapterWeights:
    a, b = torch.randn(rank, 4).to(dtype), torch.randn(6, rank).to(dtype)
    return AdapterWeights(a={module: a}, b={module: b}, scalings={module: 0.5}, shared=shared)


def test_an_adapter_works_while_it_is_applied_and_only_then():
    adapters, adapter, x = LoadedAdapters(TINY), make_adapter(), torch.randn(3, 4)
    adapters.add("one", adapter)
    base = TINY["first"](x)
    with adapters.applied("one"):
        adapted = TINY["first"](x)
    assert torch.allclose(adapted, base + 0.5 * x @ adapter.a["first"].T @ adapter.b["first"].T, atol=1e-6)
    with adapters.applied(None):
        assert torch.equal(TINY["first"](x), base)
    assert torch.equal(TINY["first"](x), base)


def test_an_adapter_of_another_dtype_keeps_the_dtype_of_the_base():
    adapters, base = LoadedAdapters(TINY.bfloat16()), torch.randn(3, 4, dtype=torch.bfloat16)
    adapters.add("one", make_adapter(dtype=torch.float32))
    with adapters.applied("one"):
        assert TINY["first"](base).dtype == torch.bfloat16
    TINY.float()


@pytest.mark.parametrize("config", [CONFIGS["qwen3-tied"], CONFIGS["qwen2-tied"]], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("shared", [True, False])
def test_an_adapted_model_computes_as_peft_does(config, shared):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options = LoraConfig(r=4, lora_alpha=12, target_modules=targets, rank_pattern={"o_proj": 2}, use_rslora=True)
    reference = get_peft_model(make_reference(config), options).eval()
    a, b, scalings = {}, {}, {}
    for name, module in reference.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            nn.init.normal_(module.lora_B["default"].weight)
            a[name], b[name] = module.lora_A["default"].weight, module.lora_B["default"].weight
            scalings[name] = module.scaling["default"]
    assert len(a) == 14
    model, token_ids = make_reference(config), torch.arange(24).view(2, 12)
    adapters = LoadedAdapters(model)
    adapters.add("one", AdapterWeights(a=a, b=b, scalings=scalings, shared=shared))
    with torch.no_grad(), adapters.applied("one"):
        found = model(token_ids).logits.log_softmax(-1)
    with torch.no_grad():
        assert torch.allclose(found, reference(token_ids).logits.log_softmax(-1), atol=1e-5)
        assert not torch.allclose(found, model(token_ids).logits.log_softmax(-1), atol=1e-1)


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_adapter_follows_its_tensors_and_a_copied_one_does_not(shared):
    adapters, adapter, x = LoadedAdapters(TINY), make_adapter(shared=shared), torch.randn(3, 4)
    adapters.add("one", adapter)
    with adapters.applied("one"):
        before = TINY["first"](x)
    adapter.b["first"].mul_(2)
    with adapters.applied("one"):
        assert torch.equal(TINY["first"](x), before) != shared


def test_adapters_that_do_not_fit_are_refused_and_not_kept():
    adapters, good = LoadedAdapters(TINY), make_adapter()
    cases = [
        (make_adapter("nowhere"), Unsupported, "'nowhere': there is none of that name"),
        (make_adapter("norm"), Unsupported, "'norm': it is a LayerNorm"),
        (make_adapter("second"), ValueError, r"'second': A \(2, 4\) and B \(6, 2\).* expected \(rank, 6\)"),
        (AdapterWeights(a=good.a, b={}, scalings=good.scalings), ValueError, r"lacks one for \['first'\]"),
        (AdapterWeights(a=good.a, b=good.b, scalings={}), ValueError, r"lacks one for \['first'\]"),
        (AdapterWeights(a=good.a, b=good.b, scalings={**good.scalings, "x": 1.0}), ValueError, r"\['x'\]"),
        (
            AdapterWeights(a={"first": good.a["first"].to("meta")}, b=good.b, scalings=good.scalings, shared=True),
            ValueError,
            "is on meta and cpu, not on cpu",
        ),
    ]
    for adapter, error, message in cases:
        with pytest.raises(error, match=message):
            adapters.add("bad", adapter)
    assert adapters.names == []


def test_names_of_adapters_are_taken_once_and_given_back():
    adapters = LoadedAdapters(TINY)
    adapters.add("one", make_adapter())
    with pytest.raises(ValueError, match="'one' already"):
        adapters.add("one", make_adapter())
    adapters.remove("one")
    with pytest.raises(ValueError, match=r"no adapter 'one'; loaded are \[\]"):
        adapters.remove("one")
    adapters.add("one", make_adapter())
    adapters.clear()
    assert adapters.names == []
