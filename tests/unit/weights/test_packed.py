"""A model to train over 4-bit weights in memory that is not its own, as an engine has packed them."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.bnb import Linear4bit
from torch import nn
from transformers import AutoModelForCausalLM

from colo.engines.layout import bind, empty_model
from colo.errors import Unsupported
from colo.weights.packed import PackedWeight, is_packed, pack
from tests.models import small_qwen3

functional = pytest.importorskip("bitsandbytes.functional", reason="missing: pip install colo-rl[qlora]")

DTYPE = torch.bfloat16
IDS = torch.tensor([[1, 2, 3, 4, 5]])


def linears(model):
    return {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


@pytest.fixture
def reference():
    """A model whose linear weights are what unpacking the packed ones gives."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_qwen3(), dtype=DTYPE)


@pytest.fixture
def packed(reference):
    """Packed weights by name, all in one piece of memory."""
    states, codes = {}, {}
    for name, layer in linears(reference).items():
        codes[name], states[name] = functional.quantize_4bit(layer.weight.detach(), quant_type="nf4")
        layer.weight.data = functional.dequantize_4bit(codes[name], states[name]).to(DTYPE)
    memory = torch.cat(list(codes.values()))
    ends = torch.tensor([len(c) for c in codes.values()]).cumsum(0).tolist()
    slices = [memory[end - len(c) : end] for end, c in zip(ends, codes.values(), strict=True)]
    return {n: PackedWeight(data=d, quant_state=states[n]) for n, d in zip(codes, slices, strict=True)}


@pytest.fixture
def model(reference, packed):
    made = empty_model(small_qwen3(), dtype=DTYPE, attn_implementation=None)
    pack(made, packed, compute_dtype=DTYPE)
    plain = {name: p.detach() for name, p in reference.named_parameters() if name not in packed}
    bind(made, plain | {name: dict(made.named_parameters())[name] for name in packed}, {})
    return made


def test_it_computes_what_the_unpacked_weights_do_without_memory_of_its_own(model, reference, packed):
    parameters = dict(model.named_parameters())
    for name, weight in packed.items():
        assert is_packed(parameters[name]) and parameters[name].data_ptr() == weight.data.data_ptr()
    assert not any(is_packed(p) for n, p in parameters.items() if n not in packed)
    for train in (True, False):
        before = [p.data_ptr() for p in model.parameters()]
        with torch.no_grad():
            found = model.train(train)(input_ids=IDS).logits
            torch.testing.assert_close(found, reference.train(train)(input_ids=IDS).logits, atol=2e-2, rtol=2e-2)
        assert before == [p.data_ptr() for p in model.parameters()]


def test_an_adapter_over_it_learns_and_the_packed_weights_stay(model, packed):
    before = {name: weight.data.clone() for name, weight in packed.items()}
    peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    assert isinstance(peft.get_submodule("base_model.model.model.layers.1.mlp.up_proj"), Linear4bit)
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = peft(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(before[name], weight.data) for name, weight in packed.items())


def test_what_the_engine_knows_of_its_weights_is_not_touched(model, packed):
    states = {name: dict(vars(weight.quant_state)) for name, weight in packed.items()}
    for layer in model.modules():
        if hasattr(layer, "quant_state"):
            layer.quant_state.absmax = None
    assert all(vars(packed[name].quant_state) == state for name, state in states.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.7.mlp.up_proj.weight", "has no such layer"),
        ("model.layers.0.mlp.down_proj.weight", r"of shape \(64, 64\), and the model has Linear\(in_features=128"),
        ("model.norm.weight", "and the model has Qwen3RMSNorm"),
    ],
)
def test_weights_that_are_no_layer_of_the_model_are_refused(packed, name, message):
    made = empty_model(small_qwen3(), dtype=DTYPE, attn_implementation=None)
    some = packed["model.layers.0.self_attn.o_proj.weight"]
    state = functional.quantize_4bit(torch.zeros(64, 64, dtype=DTYPE), quant_type="nf4")[1]
    with pytest.raises(Unsupported, match=message):
        pack(made, packed | {name: PackedWeight(data=some.data, quant_state=state)}, compute_dtype=DTYPE)
    assert not any(is_packed(p) for p in made.parameters())
