"""Tensors in words travel as JSON, whatever is none is refused where it arrives, and a manifest counts them."""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import TransferError
from colo.memory.specs import DTYPE_BYTES, NOWHERE, CopySpec, Manifest, Place, TensorSpec

NEWER = {"bcomplex32"} - set(vars(torch))  # torch has it from 2.14 on
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
SPECS = st.lists(
    st.builds(TensorSpec, st.text(min_size=1, max_size=8), st.sampled_from(sorted(DTYPE_BYTES)), SHAPES),
    unique_by=lambda spec: spec.name,
    max_size=8,
)
MANIFESTS = st.builds(lambda specs: Manifest(specs=tuple(specs)), SPECS)


def small() -> Manifest:
    specs = (TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "float32", ()), TensorSpec("c", "int8", (0, 4)))
    return Manifest(specs=specs)


def test_dtype_table_agrees_with_torch():
    for name in set(DTYPE_BYTES) - NEWER:
        dtype, size_bytes = getattr(torch, name), DTYPE_BYTES[name]
        assert (str(dtype), dtype.itemsize) == (f"torch.{name}", size_bytes)


def test_dtype_table_knows_every_dtype_of_torch_that_fills_bytes():
    every = {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
    assert {name for name in every if not re.fullmatch(r"q.*|bits.*|u?int[1-7]", name)} == set(DTYPE_BYTES) - NEWER


@pytest.mark.parametrize("name", ["bool", "bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2", "complex128", "uint32"])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_sizes_agree_with_torch(name, shape):
    tensor = torch.empty(shape, dtype=getattr(torch, name))
    spec = TensorSpec("w", name, tensor.shape)
    assert (spec.num_elements, spec.size_bytes) == (tensor.numel(), tensor.nbytes)


def test_shape_becomes_a_plain_tuple():
    assert type(TensorSpec("w", "int8", torch.Size([2, 3])).shape) is tuple
    assert hash(TensorSpec("w", "int8", [2, 3])) == hash(TensorSpec("w", "int8", (2, 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("", "int8", ()), ValueError, "needs a name"),
        (("w", "torch.int8", ()), ValueError, "known are bcomplex32, bfloat16"),
        (("w", "int8", (2, -1)), ValueError, "-1 in"),
        (("w", "int8", (2.0,)), TypeError, "2.0 in"),
        (("w", "int8", (True,)), TypeError, "True in"),
        ((1, "int8", ()), TypeError, "strings"),
        (("w", torch.int8, ()), TypeError, "strings"),
    ],
)
def test_bad_specs_are_refused(args, error, words):
    with pytest.raises(error, match=words):
        TensorSpec(*args)


def test_totals_of_a_manifest():
    assert small().names == ("a", "b", "c")
    assert small().total_bytes == 12 + 4 + 0


def test_manifest_refuses_doubled_names():
    spec = TensorSpec("w", "int8", (1,))
    with pytest.raises(ValueError, match="w came more than once"):
        Manifest(specs=(spec, spec))


def test_digest_is_stable_across_processes():
    assert small().digest == "4818d8fd69cd4a672417251c6b41c55d530241cfccec0db751dc003f02f9b470"


def test_digest_depends_on_name_dtype_shape_and_order():
    a, b, c = small().specs
    others = [
        (b, a, c),
        (a, b),
        (TensorSpec("A", a.dtype, a.shape), b, c),
        (TensorSpec("a", "float16", a.shape), b, c),
        (TensorSpec("a", a.dtype, (3, 2)), b, c),
    ]
    digests = {Manifest(specs=specs).digest for specs in others}
    assert len(digests) == len(others)
    assert small().digest not in digests


@settings(max_examples=40)
@given(MANIFESTS, st.randoms(use_true_random=False))
def test_everything_received_once_is_accepted_in_any_order(manifest, random):
    received = list(manifest.names)
    random.shuffle(received)
    manifest.check_received(received, 3)


@settings(max_examples=60)
@given(MANIFESTS.filter(lambda m: m.specs), st.data())
def test_a_lost_a_doubled_and_a_strange_name_are_each_noticed(manifest, data):
    names = list(manifest.names)
    index = data.draw(st.integers(0, len(names) - 1))
    with pytest.raises(TransferError, match="1 missing"):
        manifest.check_received(names[:index] + names[index + 1 :], 3)
    with pytest.raises(TransferError, match="1 doubled"):
        manifest.check_received([*names, names[index]], 3)
    with pytest.raises(TransferError, match="1 unknown: a stranger"):
        manifest.check_received([*names, "a stranger"], 3)


def test_one_error_lists_every_kind_of_difference():
    with pytest.raises(TransferError) as error:
        small().check_received(["a", "c", "c", "d"], 3)
    message = str(error.value)
    assert "version 3" in message
    assert "1 missing: b;" in message
    assert "1 doubled: c (2 times);" in message
    assert "1 unknown: d." in message


def test_long_lists_are_cut_and_counted():
    manifest = Manifest(specs=tuple(TensorSpec(f"w{i}", "int8", ()) for i in range(300)))
    with pytest.raises(TransferError, match=r"300 missing: w0, w1, w2, w3, w4 and 295 more") as error:
        manifest.check_received([], 3)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(("count", "tail"), [(5, "w3, w4."), (6, "w3, w4 and 1 more.")])
def test_a_list_says_how_many_more_there_are(count, tail):
    manifest = Manifest(specs=tuple(TensorSpec(f"w{n}", "int8", (1,)) for n in range(count)))
    with pytest.raises(TransferError, match=re.escape(f"{count} missing: w0, w1, w2, {tail}")):
        manifest.check_received([], 3)


# ---- on the wire -----------------------------------------------------------------------------------------------------

SPEC = TensorSpec("a.weight", "bfloat16", (2, 3), (3, 1))
PLACE = Place(SPEC, 1, 512)
COPY = CopySpec((2, 3), (1, 2), 4, PLACE)


@pytest.mark.parametrize("one", [SPEC, TensorSpec("s", "float32", ()), PLACE, Place(SPEC, NOWHERE, 0), COPY])
def test_it_comes_back_as_it_was(one):
    assert type(one).from_wire(json.loads(json.dumps(one.to_wire()))) == one


def test_strides_are_no_part_of_what_tells_versions_of_a_model_apart():
    assert SPEC.size_bytes == TensorSpec("a.weight", "bfloat16", (2, 3)).size_bytes == 12
    assert COPY.name == "a.weight"


@pytest.mark.parametrize(
    ("kind", "wire", "words"),
    [
        (TensorSpec, SPEC.to_wire() | {"dtype": "int3"}, "a.weight: unknown dtype 'int3'"),
        (TensorSpec, SPEC.to_wire() | {"strides": [1]}, "a.weight: 2 dimensions have 1 strides"),
        (TensorSpec, SPEC.to_wire() | {"shape": [-2, 3]}, "a.weight: the sizes of a shape are not negative"),
        (TensorSpec, SPEC.to_wire() | {"shape": 2}, "not iterable"),
        (TensorSpec, {"name": "a", "dtype": "int8"}, "'shape' is missing"),
        (TensorSpec, ["a", "int8", [2], None], "list indices must be integers"),
        (Place, PLACE.to_wire() | {"offset_bytes": "4"}, "offset_bytes of a Place is an integer, not '4'"),
        (Place, PLACE.to_wire() | {"memory": -2}, "a.weight cannot lie in memory -2 at 512"),
        (Place, PLACE.to_wire() | {"tensor": SPEC.to_wire() | {"strides": None}}, "a.weight needs strides"),
        (CopySpec, COPY.to_wire() | {"strides": [1]}, "a.weight cannot be read as"),
        (CopySpec, COPY.to_wire() | {"shape": [2.0, 3]}, "size 0 of a CopySpec is an integer, not 2.0"),
        (CopySpec, COPY.to_wire() | {"target": None}, "Place: 'NoneType' object is not subscriptable"),
    ],
)
def test_what_is_none_is_refused_with_what_is_wrong(kind, wire, words):
    with pytest.raises(TransferError, match=f"what arrived is no .*{words}"):
        kind.from_wire(wire)
