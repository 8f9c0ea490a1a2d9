"""Weights as an engine wants them, out of transformers models and PEFT's wrappers of them."""

import pytest
import torch
from peft import BdLoraConfig, KasaConfig, LoraConfig, VeraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from colo.errors import StaleWeights, TransferError, Unsupported
from colo.memory.digest import Digest
from colo.weights.sources.base import plain_name
from colo.weights.sources.heads import is_peft_model
from colo.weights.sources.module import ModuleSource, check_taken, own_output_layer, recording_specs
from colo.weights.sources.peft import (
    active_adapter,
    adapter_settings,
    adapter_weights,
    check_lora_config,
    is_disabled,
)
from tests.models import tiny_qwen3

PATTERNS = {
    "plain": {},
    "rank and alpha patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 8},
        "alpha_pattern": {"v_proj": 3, "q_proj": 64},
    },
    "rank-stabilized": {"use_rslora": True, "rank_pattern": {"k_proj": 9}},
}


def base_model(tied=False):
    config = tiny_qwen3(num_hidden_layers=2, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config).eval()


def lora(**changes):
    return LoraConfig(**({"r": 4, "lora_alpha": 12, "target_modules": "all-linear"} | changes))


def peft_model(config=None, **changes):
    """A model with an adapter that has been trained: B is not zero any more."""
    model = get_peft_model(base_model(), config or lora(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


# ---- models --------------------------------------------------------------------------------------------------------


def test_a_plain_model_is_its_own_names_and_live_parameters():
    model = base_model()
    tensors = ModuleSource(model).tensors()
    assert list(tensors) == [name for name, _ in model.named_parameters()]
    assert all(tensors[name] is parameter for name, parameter in model.named_parameters())


def test_tied_weights_come_once():
    names = list(ModuleSource(base_model(tied=True)).tensors())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "lm_head"], ["embed_tokens", "v_proj"]])
def test_a_wrapped_model_has_the_names_of_the_plain_one_without_adapters(target):
    model = peft_model(target_modules=target)
    tensors = ModuleSource(model).tensors()
    assert {name: t.shape for name, t in tensors.items()} == {n: p.shape for n, p in base_model().named_parameters()}


def test_whole_modules_that_an_adapter_saves_are_no_base_weights():
    model = get_peft_model(base_model(), lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert not any(id(tensor) in trained for tensor in ModuleSource(model).tensors().values())


def test_a_replaced_parameter_is_noticed():
    model = base_model()
    source = ModuleSource(model)
    before = source.tensors()["model.norm.weight"]
    model.model.norm.weight = nn.Parameter(torch.ones(32))
    after = source.tensors()["model.norm.weight"]
    assert after is model.model.norm.weight and after is not before


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_plain_names(name, plain):
    assert plain_name(name) == plain


# ---- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", PATTERNS.values(), ids=PATTERNS)
def test_ranks_and_scalings_are_those_that_peft_has_for_each_module(options):
    model = peft_model(**options)
    adapter = adapter_weights(model)
    modules = {plain_name(name): module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert set(adapter.a) == set(adapter.b) == set(adapter.scalings) == set(modules)
    assert len(modules) == 14
    for name, module in modules.items():
        assert adapter.scalings[name] == module.scaling["default"]
        assert adapter.a[name].shape == (module.r["default"], module.in_features)
        assert adapter.b[name].shape == (module.out_features, module.r["default"])


def test_patterns_change_what_they_name_only():
    scalings = adapter_weights(peft_model(**PATTERNS["rank and alpha patterns"])).scalings
    assert scalings["model.layers.0.self_attn.q_proj"] == 64 / 2
    assert scalings["model.layers.1.self_attn.v_proj"] == 3 / 4
    assert scalings["model.layers.1.mlp.down_proj"] == 12 / 8
    assert scalings["model.layers.0.mlp.down_proj"] == 12 / 4
    stabilized = adapter_weights(peft_model(**PATTERNS["rank-stabilized"])).scalings
    assert stabilized["model.layers.0.self_attn.k_proj"] == 12 / 3
    assert stabilized["model.layers.0.self_attn.q_proj"] == 12 / 2


@pytest.mark.parametrize("options", PATTERNS.values(), ids=PATTERNS)
def test_base_weights_and_adapter_together_compute_what_the_peft_model_computes(options):
    model = peft_model(**options)
    adapter, weights = adapter_weights(model), ModuleSource(model).tensors()
    merged = base_model()
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(weights[name])
            module = name.removesuffix(".weight")
            if module in adapter.a:
                parameter += adapter.scalings[module] * adapter.b[module] @ adapter.a[module]
        ids = torch.tensor([[1, 2, 3, 4, 5]])
        expected, plain = model(input_ids=ids).logits, base_model_logits(model, ids)
        assert torch.allclose(merged(input_ids=ids).logits, expected, atol=1e-4)
    assert not torch.allclose(plain, expected, atol=1e-2)


def base_model_logits(model, ids):
    with model.disable_adapter():
        return model(input_ids=ids).logits


def test_the_tensors_are_the_trainers_own():
    model = peft_model()
    adapter = adapter_weights(model)
    owned = {id(p) for p in model.parameters() if p.requires_grad}
    assert adapter.shared
    assert {id(t) for t in (*adapter.a.values(), *adapter.b.values())} == owned


def test_the_active_adapter_is_the_one_that_is_sent():
    model = peft_model()
    model.add_adapter("second", lora(r=2, target_modules=["q_proj"]))
    assert active_adapter(model) == "default"
    model.set_adapter("second")
    adapter = adapter_weights(model)
    assert set(adapter.a) == {f"model.layers.{n}.self_attn.q_proj" for n in range(2)}
    assert {tensor.shape[0] for tensor in adapter.a.values()} == {2}


def test_adapters_are_switched_off_everywhere_or_in_some_layers():
    model = peft_model()
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    settings = adapter_settings(model)
    assert is_disabled(model) is False and is_disabled(base_model()) is False
    with model.disable_adapter():
        assert is_disabled(model) is True
        assert adapter_settings(model) == settings and len(adapter_weights(model).a) == 14
    layers[3].enable_adapters(False)
    assert is_disabled(model) is False
    assert adapter_settings(model) != settings and len(adapter_weights(model).a) == 13
    layers[3].enable_adapters(True)
    assert adapter_settings(model) == settings


def test_a_layer_without_the_active_adapter_is_left_out_and_one_with_another_is_refused():
    model = peft_model()
    model.add_adapter("second", lora(r=2, target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.set_adapter([])
    assert "model.layers.1.self_attn.q_proj" not in adapter_weights(model).a
    layer.set_adapter("second")
    for read in (adapter_weights, adapter_settings):
        with pytest.raises(Unsupported, match="a layer of the model computes with adapter second, where default is"):
            read(model)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["embed_tokens"]),
        ("lora_bias", True),
        ("trainable_token_indices", [1]),
        ("layer_replication", [(0, 2), (1, 2)]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("use_bdlora", BdLoraConfig()),
        ("kasa_config", KasaConfig()),
        ("bias", "all"),
        ("bias", "lora_only"),
    ],
)
def test_settings_that_an_engine_cannot_apply_are_refused_by_name(name, value):
    with pytest.raises(Unsupported, match=rf"LoraConfig\({name}=.*not supported"):
        check_lora_config(lora(**{name: value}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_alpha": 0}, "lora_alpha scales"),
        ({"lora_alpha": float("nan")}, "fp32 but 0, not nan"),
        ({"lora_alpha": 1e39}, "fp32 but 0, not 1e"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number, not '16'"),
        ({"lora_dropout": 1}, r"\[0, 1\), not 1"),
        ({"lora_dropout": -0.1}, r"\[0, 1\), not -0.1"),
        ({"lora_dropout": None}, "lora_dropout must be a number, not None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("folded", [False, True])
def test_values_with_which_an_adapter_trains_otherwise_than_asked_are_refused(options, words, folded):
    with pytest.raises((TypeError, ValueError), match=words):
        check_lora_config(lora(**options), folded=folded)


@pytest.mark.parametrize("options", [*PATTERNS.values(), {"lora_dropout": 0.1}, {"init_lora_weights": False}])
def test_settings_that_change_no_more_than_a_b_and_scaling_are_fine(options):
    check_lora_config(lora(**options))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}])
def test_a_model_that_was_made_with_such_a_setting_is_refused(options):
    with pytest.raises(Unsupported, match=next(iter(options))):
        adapter_weights(peft_model(target_modules=["q_proj"], **options))


def test_an_adapter_of_the_embedding_is_refused():
    with pytest.raises(Unsupported, match=r"model\.embed_tokens is adapted as an embedding"):
        adapter_weights(peft_model(target_modules=["embed_tokens"]))


def test_another_kind_of_adapter_is_refused():
    model = get_peft_model(base_model(), VeraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(Unsupported, match=r"default is VERA \(VeraConfig\), and engines apply LoRA only"):
        adapter_weights(model)


def test_two_active_adapters_are_refused():
    model = peft_model()
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(Unsupported, match="2 adapters are active"):
        adapter_weights(model)


def test_a_merged_adapter_would_count_twice():
    model = peft_model()
    model.merge_adapter()
    with pytest.raises(StaleWeights, match=r"default is merged into model\.layers\.0\.self_attn\.q_proj\.weight"):
        adapter_weights(model)
    model.unmerge_adapter()
    assert adapter_weights(model).scalings


@pytest.mark.parametrize("unload", ["merge_and_unload", "unload"])
def test_a_model_without_its_adapter_says_what_to_do(unload):
    model = peft_model()
    getattr(model, unload)()
    with pytest.raises(StaleWeights, match=r"no layer of the model has adapter default any more.*build a new one"):
        adapter_weights(model)


def test_peft_models_are_told_from_others():
    assert is_peft_model(peft_model())
    assert not is_peft_model(base_model())
    assert not is_peft_model(nn.Linear(2, 2))


# ---- buffers -------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("bias", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("counts", torch.ones(2, dtype=torch.long))
        self.register_buffer("none", None)


def test_buffers_that_checkpoints_hold_are_weights_and_others_are_not():
    model = nn.ModuleDict({"a": Router(), "b": Router()})
    tensors = ModuleSource(model).tensors()
    assert list(tensors) == ["a.weight", "b.weight", "a.bias", "b.bias"]
    assert tensors["b.bias"] is model["b"].bias
    before = ModuleSource(model).fingerprint()
    model["a"].bias.add_(1)
    assert ModuleSource(model).fingerprint() != before


def refusing(name, error):
    def take(tensors):
        if name in tensors:
            raise error
        return list(tensors)

    return take


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a.bias"),
        ValueError("There is no module or parameter named 'bias' in Model"),
        TransferError("KeyError: 'bias'"),
        ValueError("the model has no parameter 'a.bias'; weights are loaded under other names"),
    ],
)
def test_a_buffer_that_a_loader_does_not_know_is_no_weight(error):
    source = ModuleSource(nn.ModuleDict({"a": Router(), "b": Router()}))
    assert source.given_to(refusing("a.bias", error)) == ["a.weight", "b.weight"]
    assert source.foreign == {"a.bias", "b.bias"} and list(source.tensors()) == ["a.weight", "b.weight"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a.bias", TransferError("the engine takes 3 of the 4 elements of a.bias")),
        ("a.weight", ValueError("There is no module or parameter named 'weight' in Model")),
    ],
)
def test_other_errors_about_a_buffer_are_raised(name, error):
    source = ModuleSource(nn.ModuleDict({"a": Router()}))
    with pytest.raises(type(error)):
        source.given_to(refusing(name, error))
    assert not source.foreign


TENSORS = {"w": nn.Parameter(torch.zeros(4, 2)), "bias": torch.zeros(4)}


def rows(start, stop):
    """Some rows of `w`, as a part."""
    return 2 * start, (stop - start, 2), (2, 1)


COLUMNS = [(column, (4, 1), (2, 1)) for column in range(2)]


@pytest.mark.parametrize(
    "left_out",
    [
        [{}],
        [{"bias": []}],
        [{"w": [rows(0, 2)]}, {"w": [rows(2, 4)]}],
        [{"w": [rows(0, 3)]}, {"w": [rows(1, 4)]}],
        [{"w": [COLUMNS[0]]}, {"w": [COLUMNS[1]]}],
        [{"w": []}, {}],
        [{"bias": []}, {"bias": []}],
    ],
    ids=str,
)
def test_what_workers_take_together_is_whole(left_out):
    check_taken(TENSORS, left_out)


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ([{"w": []}], r"takes 0 of the 8 elements of w \(4, 2\)"),
        ([{"w": [rows(0, 1)]}, {"w": [rows(1, 3)]}], "takes 6 of the 8 elements of w"),
        ([{"w": [rows(0, 2)]}, {"w": [rows(0, 2)]}], "takes 4 of the 8 elements of w"),
        ([{"w": [COLUMNS[0], COLUMNS[0]]}, {"w": [COLUMNS[0]]}], "takes 4 of the 8 elements of w"),
        ([{"bias": [], "w": [rows(1, 2)]}], "takes 2 of the 8 elements of w"),
        ([{"bias": [], "w": [rows(1, 2)]}, {"w": [rows(2, 3)]}], "takes 4 of the 8 elements of w"),
        ([{"bias": [(0, (3,), (1,))]}], "takes 3 of the 4 elements of bias"),
    ],
)
def test_weights_that_no_engine_takes_are_refused_by_name(left_out, words):
    with pytest.raises(TransferError, match=words):
        check_taken(TENSORS, left_out)


def test_names_are_compared_but_for_buffers_that_turn_out_to_be_foreign():
    model = nn.BatchNorm1d(2)
    source = ModuleSource(model)
    source.check_names()  # nothing is known yet
    source.settle_names()
    source.check_names()
    source.foreign.add("running_mean")
    source.check_names()
    model.register_parameter("extra", nn.Parameter(torch.ones(1)))
    with pytest.raises(StaleWeights, match="1 weights that it did not have when the runtime was built, extra for one"):
        source.check_names()
    del model.extra, model.weight
    with pytest.raises(StaleWeights, match="1 weights no longer that the engine computes with, weight for one"):
        source.check_names()


def test_weights_are_noted_as_they_pass_without_their_memory():
    specs = {}
    given = {"w": nn.Parameter(torch.zeros(4, 2)), "bias": torch.zeros(4, dtype=torch.bfloat16)}
    assert [(name, tensor is given[name]) for name, tensor in recording_specs(given.items(), specs)] == [
        ("w", True),
        ("bias", True),
    ]
    for name, spec in specs.items():
        assert (spec.shape, spec.dtype, spec.is_meta) == (given[name].shape, given[name].dtype, True)
        assert isinstance(spec, nn.Parameter) is isinstance(given[name], nn.Parameter) and not spec.requires_grad


def test_heads_that_train_along_are_no_weights_of_the_engine():
    model = base_model()
    model.v_head = nn.Linear(32, 1)
    tensors = ModuleSource(model).tensors()
    assert list(tensors) == [name for name, _ in base_model().named_parameters()]


class Buffers(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("shared", shared)
        self.register_buffer("empty", torch.ones(0))
        self.register_buffer("last", torch.ones(1))


def test_every_saved_buffer_comes_once_whatever_lies_before_it():
    shared = torch.ones(3)
    model = nn.ModuleDict({"a": Buffers(shared), "b": Buffers(shared)})
    assert list(ModuleSource(model).tensors()) == ["a.shared", "a.last", "b.last"]
    assert list(ModuleSource(Buffers(shared)).tensors()) == ["shared", "last"]


def test_of_many_weights_that_came_or_went_the_first_by_name_is_told():
    model = nn.ParameterDict({name: torch.ones(1) for name in ("m1", "m2", "m3", "m4", "m5")})
    source = ModuleSource(model)
    source.settle_names()
    for name in "edcba":
        model[name] = nn.Parameter(torch.ones(1))
    with pytest.raises(StaleWeights, match="has 5 weights that it did not have when the runtime was built, a for one"):
        source.check_names()
    for name in list(model):
        del model[name]
    with pytest.raises(StaleWeights, match="has 5 weights no longer that the engine computes with, m1 for one"):
        source.check_names()


def test_an_output_layer_that_would_become_the_embedding_is_an_error_of_the_transfer():
    assert "takes 0 of the 12 elements of lm_head.weight" in str(own_output_layer(12))


# ---- sharded over ranks ----------------------------------------------------------------------------------------------


def test_a_model_of_one_process_asks_no_other():
    source = ModuleSource(nn.Linear(2, 2))
    assert source.is_sharded is False and source.outermost_sharded() == []
    assert source.ranks.any(True) is True and source.ranks.any(False) is False
    assert source.ranks.min(3) == 3


def test_a_model_of_which_some_weights_are_sharded_is(mesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    source = ModuleSource(model)
    assert source.is_sharded is True
    then = Digest.of(source.held())
    assert not Digest.of(source.held()).differs(then)
    model[0].weight.data.to_local().add_(1)
    assert Digest.of(source.held()).differs(then) == ["0.weight"]
    with source.gathered(source.tensors()) as whole:
        assert torch.equal(whole["0.weight"], model[0].weight.full_tensor())


def test_ranks_are_asked_together_and_fail_together(both):
    def body(rank):
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)]))
        source = ModuleSource(model)
        asked = source.ranks.any(rank == 0), source.ranks.any(False), source.ranks.min(5 + rank)
        try:
            with source.ranks.fail_together("a test"):
                if rank:
                    raise ValueError("tested")
        except (ValueError, TransferError) as error:
            return (*asked, type(error).__name__)

    assert both(body) == [(True, False, 5, "TransferError"), (True, False, 5, "ValueError")]


def test_where_backward_passes_begin_is_known_of_what_fsdp_has_taken_over(mesh):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    fully_shard(model[0][0], mesh=mesh)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[1], mesh=mesh)
    source = ModuleSource(model)
    assert source.outermost_sharded() == [model[0], model[1]]
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert all(isinstance(tensor, DTensor) for _, tensor in source)
    alone = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with torch.no_grad():
        alone(torch.ones(1, 2))
    assert ModuleSource(alone).is_sharded
