"""Layouts, checksums and buckets of SGLang's servers, without one."""

import base64
import hashlib
import io
import pickle

import pytest
import torch

from colo.engines.buckets import Slab
from colo.engines.sglang.weights import EngineLayout, Expected, _gpu_hash, checksum, payload
from colo.errors import TransferError, Unsupported
from colo.memory.specs import TensorSpec

SHAPES = {"a.qkv.weight": (2, 2), "l.q_proj.weight": (4, 3), "l.k_proj.weight": (2, 3), "l.v_proj.weight": (2, 3)}
SPECS = [TensorSpec(name, "float32", shape) for name, shape in SHAPES.items()]
PARAMETERS = ["a.qkv.weight", "l.qkv_proj.weight"]


@pytest.fixture
def weights():
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def test_a_fused_parameter_is_summed_over_its_parts_in_whatever_order_they_come(weights):
    layout = EngineLayout.of(SPECS, PARAMETERS)
    expected = Expected(layout)
    for name in reversed(weights):
        expected.add(name, weights[name])
    whole = torch.cat([weights[f"l.{part}_proj.weight"] for part in "qkv"])
    held = {"a.qkv.weight": weights["a.qkv.weight"], "l.qkv_proj.weight": whole}
    sums = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for name, t in held.items()}
    expected.check(sums)
    with pytest.raises(TransferError, match="1 of 2 parameters of the server are not what was sent, l.qkv_proj"):
        expected.check(sums | {"l.qkv_proj.weight": "0" * 16})


def test_what_was_not_sent_is_named(weights):
    expected = Expected(EngineLayout.of(SPECS, PARAMETERS))
    expected.add("a.qkv.weight", weights["a.qkv.weight"])
    expected.add("l.q_proj.weight", weights["l.q_proj.weight"])
    with pytest.raises(TransferError, match="nothing was sent for l.q_proj.weight, 3 in all"):
        expected.check({})


def test_a_layout_that_is_not_known_is_refused():
    with pytest.raises(Unsupported, match=r"does not know \(l.experts.w13_weight, 4 in all\)"):
        EngineLayout.of(SPECS, ["a.qkv.weight", "l.experts.w13_weight"])


def test_a_vocabulary_is_summed_with_the_rows_that_pad_it():
    table = torch.randn(100, 3)
    padded = torch.cat([table, torch.zeros(28, 3)])
    assert checksum([table], padded=True) == checksum([padded]) != checksum([table])


def test_a_payload_has_every_byte_at_an_aligned_place():
    tensors = {"a": torch.randn(3, 5).to(torch.bfloat16), "b": torch.randn(7), "c": torch.tensor(2.0)}
    read = pickle.load(
        io.BytesIO(base64.b64decode(payload(Slab(torch.device("cpu"), num_parts=2), list(tensors.items()))))
    )
    for described in read["metadata"]:
        assert described.start_idx % 16 == 0 and described.numel == described.end_idx - described.start_idx
        part = read["flattened_tensor"][described.start_idx : described.end_idx]
        assert torch.equal(part.view(described.dtype).reshape(described.shape), tensors[described.name])
    assert len(read["metadata"]) == 3


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


@pytest.mark.parametrize("size", [1, 4, 1000, 4 * 8192, 4 * 8192 * 2 + 3])
def test_the_hash_of_a_gpu_is_sglangs(size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert _gpu_hash(data) == plain_hash(data.numpy().tobytes())
