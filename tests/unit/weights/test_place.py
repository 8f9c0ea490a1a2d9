"""Places and copies travel as JSON, and whatever is no place is refused where it arrives."""

import json

import pytest

from colo.errors import TransferError
from colo.weights.manifest import TensorSpec
from colo.weights.place import NOWHERE, CopySpec, Place

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
        (TensorSpec, ["a", "int3", [2], None], "a: unknown dtype 'int3'"),
        (TensorSpec, ["a", "int8", [2], [1, 1]], "a: 1 dimensions have 2 strides"),
        (TensorSpec, ["a", "int8", [-2], None], "a: the sizes of a shape are not negative"),
        (TensorSpec, ["a", "int8", 2, None], "not iterable"),
        (TensorSpec, ["a", "int8"], "not enough values to unpack"),
        (Place, ["a", "int8", [2], [1], 0, "4"], "offset_bytes of a Place is an integer, not '4'"),
        (Place, ["a", "int8", [2], [1], -2, 0], "a cannot lie in memory -2 at 0"),
        (Place, ["a", "int8", [2], None, 0, 0], "a needs strides"),
        (CopySpec, [[2], [1, 1], 0, PLACE.to_wire()], "a.weight cannot be read as"),
        (CopySpec, [[2.0], [1], 0, PLACE.to_wire()], "size 0 of a CopySpec is an integer, not 2.0"),
        (CopySpec, [[2], [1], 0, None], "Place: cannot unpack"),
    ],
)
def test_what_is_none_is_refused_with_what_is_wrong(kind, wire, words):
    with pytest.raises(TransferError, match=f"what arrived is no .*{words}"):
        kind.from_wire(wire)
