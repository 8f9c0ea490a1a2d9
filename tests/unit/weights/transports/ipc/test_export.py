"""Tensors of this process, mapped as another process would map them."""

import gc
from pathlib import Path

import pytest
import torch

from colo.errors import TransferError
from colo.memory.shared_memory import SharedMemory
from colo.memory.storage import num_references
from colo.weights.place import Place
from colo.weights.transports.ipc.export import Exported, dtype_name, open_places

CPU = torch.device("cpu")


def tensors():
    return {
        "matrix": torch.arange(12.0).view(3, 4),
        "none": torch.empty(0, 4),
        "half": torch.arange(5).bfloat16(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "gaps": torch.arange(24.0).view(4, 6)[:, ::2],
        "last": torch.arange(3, dtype=torch.uint8),
    }


def test_a_peer_has_the_same_bytes_and_every_write():
    held = tensors()
    values = {name: tensor.clone() for name, tensor in held.items()}
    exported = Exported(held)
    mapped = open_places(exported.places, exported.memory, CPU)
    assert list(mapped) == list(values)
    for name, value in values.items():
        assert (mapped[name].dtype, mapped[name].shape) == (value.dtype, value.shape)
        assert torch.equal(mapped[name], value) and torch.equal(held[name], value)
    for tensor in held.values():
        tensor.fill_(2)
    assert all(tensor.eq(2).all() for tensor in mapped.values())


def test_what_is_no_longer_where_it_was_is_known():
    held = tensors()
    exported = Exported(held)
    assert exported.is_current(held) is True
    assert not exported.is_current({name: held[name] for name in list(held)[1:]})
    held["matrix"].data = held["matrix"].clone()
    assert exported.is_current(held) is False


def mappings():
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:colo")


def test_a_tensor_is_alone_in_its_storage_as_it_was():
    held = {name: tensor.clone() for name, tensor in tensors().items()}
    exported = Exported(held)
    for tensor in held.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and num_references(tensor) == 1
    exported.close()
    assert held["matrix"].sum() == 66, "whoever has it keeps it"


def test_memory_is_kept_until_it_is_closed_and_is_gone_then():
    before, held = mappings(), tensors()
    exported = Exported(held)
    assert mappings() == before + 1
    held.clear()
    gc.collect()
    assert open_places(exported.places, exported.memory, CPU)["matrix"].sum() == 66
    exported.close()
    exported.close()
    gc.collect()
    assert mappings() == before
    with pytest.raises(TransferError):
        open_places(exported.places, exported.memory, CPU)


def test_nothing_can_be_exported():
    exported = Exported({})
    assert open_places(exported.places, exported.memory, CPU) == {}
    empty = Exported({"none": torch.empty(0)})
    assert open_places(empty.places, empty.memory, CPU)["none"].shape == (0,)


def test_tensors_lie_in_the_memory_that_they_name_with_their_strides():
    slabs = [SharedMemory(64, CPU) for _ in range(3)]
    for number, slab in enumerate(slabs):
        slab.bytes.view(torch.float32).copy_(torch.arange(16) + 100 * number)
    memory = [slab.describe(to_pid=0) for slab in slabs]
    places = [
        Place.from_wire(["none", "float16", [2, 0], [1, 1], -1, 0]),
        Place.from_wire(["first", "float32", [3], [1], 0, 4]),
        Place.from_wire(["second", "float32", [2, 3], [1, 2], 1, 8]),
        Place.from_wire(["third", "float32", [2, 2], [14, 1], 2, 0]),
        Place.from_wire(["wide", "float32", [1], [50], 2, 60]),
    ]
    found = open_places(places, memory, CPU)
    assert found["first"].tolist() == [1, 2, 3]
    assert found["second"].tolist() == [[102, 104, 106], [103, 105, 107]]
    assert found["third"].tolist() == [[200, 201], [214, 215]]
    assert found["wide"].tolist() == [215]
    assert (found["none"].shape, found["none"].stride(), found["none"].dtype) == ((2, 0), (1, 1), torch.float16)


def test_a_tensor_that_does_not_lie_within_its_memory_is_refused():
    slab = SharedMemory(64, CPU)
    with pytest.raises(RuntimeError):
        open_places([Place.from_wire(["far", "float32", [17], [1], 0, 0])], [slab.describe(to_pid=0)], CPU)


def test_names_of_dtypes_are_torchs_own_without_the_module():
    assert dtype_name(torch.empty(0, dtype=torch.bfloat16)) == "bfloat16"
