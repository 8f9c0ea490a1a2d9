"""Layouts, checksums and buckets of SGLang's servers, without one."""

import base64
import hashlib
import io
import pickle

import pytest
import torch

from colo.engine import AdapterWeights
from colo.engines.buckets import Slab
from colo.engines.sglang import weights as sglang_weights
from colo.engines.sglang.ranks import Ranks
from colo.engines.sglang.weights import EngineLayout, Expected, adapter_as_taken, payloads, settled
from colo.errors import TransferError, Unsupported
from colo.memory.specs import TensorSpec

SHAPES = {"a.qkv.weight": (2, 2), "l.q_proj.weight": (4, 3), "l.k_proj.weight": (2, 3), "l.v_proj.weight": (2, 3)}
SPECS = [TensorSpec(name, "float32", shape) for name, shape in SHAPES.items()]
PARAMETERS = ["a.qkv.weight", "l.qkv_proj.weight"]


@pytest.fixture
def weights():
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def test_a_fused_parameter_is_summed_over_its_parts_in_whatever_order_they_come(weights):
    layout = EngineLayout.of(SPECS, PARAMETERS, Ranks())
    expected = Expected(layout)
    for name in reversed(weights):
        expected.add(name, weights[name])
    whole = torch.cat([weights[f"l.{part}_proj.weight"] for part in "qkv"])
    held = {"a.qkv.weight": weights["a.qkv.weight"], "l.qkv_proj.weight": whole}
    sums = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for name, t in held.items()}
    expected.check([sums])
    with pytest.raises(TransferError, match="1 of 2 parameters of the server are not what was sent, l.qkv_proj"):
        expected.check([sums | {"l.qkv_proj.weight": "0" * 16}])


def test_what_was_not_sent_is_named(weights):
    expected = Expected(EngineLayout.of(SPECS, PARAMETERS, Ranks()))
    expected.add("a.qkv.weight", weights["a.qkv.weight"])
    expected.add("l.q_proj.weight", weights["l.q_proj.weight"])
    with pytest.raises(TransferError, match="nothing was sent for l.q_proj.weight, 3 in all"):
        expected.check([{}])


def test_a_layout_that_is_not_known_is_refused():
    with pytest.raises(Unsupported, match=r"does not know \(l.experts.w13_weight, 4 in all\)"):
        EngineLayout.of(SPECS, ["a.qkv.weight", "l.experts.w13_weight"], Ranks())


def test_a_vocabulary_has_rows_that_pad_it():
    table = torch.randn(100, 3)
    for count in (1, 2):
        shares = [Ranks(tp_size=count).share("model.embed_tokens.weight", table, rank) for rank in range(count)]
        assert torch.equal(torch.cat(shares), torch.cat([table, torch.zeros(28, 3)])) and len(shares[0]) == 128 / count


def joined(ranks, name, weight, dim):
    return torch.cat([ranks.share(name, weight, rank) for rank in range(ranks.tp_size)], dim)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_ranks_share_a_layer_and_every_element_is_somewhere(count):
    ranks = Ranks(tp_size=count, num_kv_heads=4)
    weight, bias = torch.randn(16, 8), torch.randn(16)
    for module in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert torch.equal(joined(ranks, f"{module}.weight", weight, 0), weight)
        assert torch.equal(joined(ranks, f"{module}.bias", bias, 0), bias)
    for module in ("self_attn.o_proj", "mlp.down_proj"):
        assert torch.equal(joined(ranks, f"{module}.weight", weight, 1), weight)
        assert all(ranks.share(f"{module}.bias", bias, rank) is bias for rank in range(count))
    for name in ("self_attn.q_norm.weight", "mlp.gate.weight", "model.norm.weight"):
        assert all(ranks.share(name, weight, rank) is weight for rank in range(count))
    keys = joined(ranks, "self_attn.k_proj.weight", weight, 0)
    assert torch.equal(keys, weight if count < 8 else weight.view(4, 4, 8).repeat_interleave(2, 0).view(32, 8))


@pytest.mark.parametrize(("count", "groups"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_experts_are_dealt_out_and_each_is_shared_by_a_group(count, groups):
    ranks = Ranks(tp_size=count, ep_size=groups, num_experts=8)
    for number in range(8):
        weight = torch.randn(4, 8)
        for module, dim in (("gate_proj", 0), ("down_proj", 1), ("w3", 0), ("w2", 1)):
            name = f"layers.0.mlp.experts.{number}.{module}.weight"
            shares = {rank: ranks.share(name, weight, rank) for rank in range(count)}
            held = {rank: share for rank, share in shares.items() if share is not None}
            first = number * groups // 8 * (count // groups)
            assert list(held) == list(range(first, first + count // groups))
            assert torch.equal(torch.cat(list(held.values()), dim), weight)


def test_stacked_experts_are_summed_as_the_engine_stacks_them():
    stacks = {"l.mlp.experts.gate_up_proj": torch.randn(2, 6, 4), "l.mlp.experts.down_proj": torch.randn(2, 4, 3)}
    specs = [TensorSpec(name, "float32", tuple(stack.shape)) for name, stack in stacks.items()]
    parameters = ["l.mlp.experts.w13_weight", "l.mlp.experts.w2_weight"]
    layout = EngineLayout.of(specs, parameters, Ranks(num_experts=2), "qwen3_moe")
    expected = Expected(layout)
    for name, stack in stacks.items():
        expected.add(name, stack)
    sums = [hashlib.sha256(stack.numpy().tobytes()).hexdigest()[:16] for stack in stacks.values()]
    expected.check([dict(zip(parameters, sums, strict=True))])
    assert layout.rank_bytes == sum(stack.nbytes for stack in stacks.values())


def test_a_rank_that_holds_something_else_is_named(weights):
    expected = Expected(EngineLayout.of(SPECS, PARAMETERS, Ranks(tp_size=2, num_kv_heads=2)))
    for name, weight in weights.items():
        expected.add(name, weight)
    expected.check(expected.sums)
    first, second = expected.sums
    assert first["a.qkv.weight"] == second["a.qkv.weight"] and first["l.qkv_proj.weight"] != second["l.qkv_proj.weight"]
    with pytest.raises(TransferError, match="1 of 4 parameters .* l.qkv_proj.weight of rank 1 for one"):
        expected.check([first, second | {"l.qkv_proj.weight": "0" * 16}])
    with pytest.raises(TransferError, match="2 of 4 parameters .* a.qkv.weight of rank 1 for one"):
        expected.check([first])


def test_a_payload_has_every_byte_at_an_aligned_place():
    tensors = {"a": torch.randn(3, 5).to(torch.bfloat16), "b": torch.randn(7), "c": torch.tensor(2.0)}
    packed, other = payloads(Slab(torch.device("cpu")), list(tensors.items()), 2)
    assert packed == other, "each rank takes its own"
    read = pickle.load(io.BytesIO(base64.b64decode(packed)))
    for described in read["metadata"]:
        assert described.start_idx % 16 == 0 and described.numel == described.end_idx - described.start_idx
        part = read["flattened_tensor"][described.start_idx : described.end_idx]
        assert torch.equal(part.view(described.dtype).reshape(described.shape), tensors[described.name])
    assert len(read["metadata"]) == 3


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SERVED = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (["q_proj"], {"q_proj", "k_proj", "v_proj"}),
        (["v_proj", "up_proj"], {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        (["o_proj", "down_proj"], {"o_proj", "down_proj"}),
    ],
)
def test_an_adapter_has_all_parts_of_what_the_server_fuses(given, sent):
    """The server ends where it misses one."""
    specs = [TensorSpec(f"l.{module}.weight", "float32", (6, 4)) for module in ADAPTED]
    layout = EngineLayout.of(specs, [spec.name for spec in specs], Ranks())
    a, b = ({f"l.{module}": torch.randn(shape) for module in given} for shape in ((2, 4), (6, 2)))
    adapter = AdapterWeights(a=a, b=b, scalings=dict.fromkeys(a, 1.5))
    tensors, settings = adapter_as_taken(adapter, layout, SERVED)
    assert set(settings["target_modules"]) == sent and len(tensors) == 2 * len(sent)
    for module in sent:
        parts = {part: tensors[f"base_model.model.l.{module}.lora_{part.upper()}.weight"] for part in "ab"}
        if module in given:
            assert torch.equal(parts["a"], a[f"l.{module}"]) and torch.equal(parts["b"], b[f"l.{module}"])
        else:
            assert (
                parts["a"].shape == (2, 4) and parts["b"].shape == (6, 2) and not any(p.any() for p in parts.values())
            )


def plain_hash(data):
    """SGLang's kernel, word by word in Python's integers."""
    low, seed = 0xFFFFFFFF, 0x243F6A88
    words = [int.from_bytes(data[i : i + 4].ljust(4, b"\0"), "little") for i in range(0, len(data), 4)]

    def mix(x):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = ((x ^ x >> shift) * factor) & low
        return x ^ x >> 16

    total = 0
    for start in range(0, len(words), 8192):
        for place, (seeded, factor, turns) in enumerate(
            ((seed, 0x27D4EB2D, 15), ((seed * 0x9E3779B1 ^ 0xDEADBEEF) & low, 0x165667B1, 13))
        ):
            value = 0
            for i, word in enumerate(words[start : start + 8192], start):
                position = ((i * factor + seeded) & low) ^ ((i << turns | i >> (32 - turns)) & low)
                value = (value + mix(word ^ position)) & low
            total += mix(value ^ (4 * len(words) & low)) << (32 if place == 0 else 0)
    total &= (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = ((total ^ total >> shift) * factor) & (1 << 64) - 1
    return total ^ total >> 31


@pytest.mark.parametrize("chunk", [8192, 16384])
def test_the_hash_of_a_gpu_is_sglangs(monkeypatch, chunk):
    monkeypatch.setattr(sglang_weights, "_CHUNK", chunk)
    held = {n: torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (1, 4, 1000, 4 * 8192, 4 * 8192 * 2 + 3)}
    queued = {str(n): sglang_weights._sum_of_tiles(data) for n, data in held.items()}
    found = settled(queued | {"of a CPU": "0123456789abcdef"})
    assert found.pop("of a CPU") == "0123456789abcdef"
    assert found == {str(n): f"{plain_hash(data.numpy().tobytes()):016x}" for n, data in held.items()}
