"""Memory under tensors: storages and the references to them, and local shards of `DTensor` (FSDP2 and such).

State is moved shard by shard: every process moves what lies in it, and none waits for another.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies a tensor's storage while it lives, whether or not it holds bytes."""
    return int(tensor.untyped_storage()._cdata)


_dtype_and_shape = attrgetter("dtype", "shape")


def places_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Hashable]:
    """Address, dtype, shape and strides of each tensor: asked by functions of C, since a model has hundreds."""
    held = list(tensors.values())
    facts = map(_dtype_and_shape, held)
    places = zip(map(torch.Tensor.data_ptr, held), facts, map(torch.Tensor.stride, held), strict=True)
    return dict(zip(tensors, places, strict=True))


def num_references(tensor: torch.Tensor) -> int:
    """Number of tensors over the storage of `tensor`, itself included.

    Tensors and views made by any code count, in Python or C++; several references to one tensor count once.
    """
    storage = tensor.untyped_storage()  # which is one reference while it is held here
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def num_others(tensors: Sequence[torch.Tensor], owned: Container[int] = ()) -> int:
    """Count other references to the storage that `tensors` lie in, such as views that a caller holds.

    `owned` are the `id`s of those that a parameter has as its gradient: one owner in C++ more.

    These are tensors over the storage, and C++ owners of one of `tensors`, such as an exported DLPack capsule. A tensor
    that only its own views among `tensors` keep alive does not count.
    """
    known = {id(tensor) for tensor in tensors}
    views = {id(view._base): view for view in tensors if view._base is not None and _shares_storage(view, view._base)}
    num_views = Counter(id(tensor._base) for tensor in tensors)
    # the Python object is one owner, and every view owns its base in C++
    owners = sum(_num_owners(tensor) - 1 - num_views[id(tensor)] for tensor in tensors)
    hidden = sum(_is_base_unheld(view, num_views[base]) for base, view in views.items() if base not in known)
    owners -= sum(id(tensor) in owned for tensor in tensors)
    return num_references(tensors[0]) - len(tensors) - hidden + owners


def hidden_bases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """List tensors over the same storage that nothing but views among `tensors` holds, as after `split` or `unbind`."""
    known, num_views = {id(tensor) for tensor in tensors}, Counter(id(tensor._base) for tensor in tensors)
    views = {id(view._base): view for view in tensors if view._base is not None and _shares_storage(view, view._base)}
    found = [v for base, v in views.items() if base not in known and _is_base_unheld(v, num_views[base])]
    return [view._base for view in found if view._base is not None]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage (uint8)."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that hold a tensor's bytes: indices and values of a sparse one, else the tensor itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory whose storage is just its bytes, and which keeps that memory alive.

    accelerate and safetensors take tensors in one storage for tied weights, and pickle saves storages whole; to them
    this is an ordinary tensor. It stays valid while anybody refers to it, even when its owner is gone, and counts its
    writes itself. It is made through DLPack, whose capsule owns the memory; its storage cannot be resized.
    Raises: `ValueError` unless `tensor` is contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    if not tensor.numel():
        return torch.empty_like(tensor)
    # a view would share the storage, and with it the reference count of whatever else lies in the slab
    own: torch.Tensor = from_dlpack(tensor.detach())
    return own


def _num_owners(tensor: Any) -> int:
    """Number of owners: the Python object, and those in C++."""
    return int(tensor._use_count())


def _shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_key(one) == storage_key(other)


def _is_base_unheld(view: torch.Tensor, num_views: int) -> bool:
    """True when nothing but `num_views` views holds the base of `view`."""
    base = view._base
    assert base is not None
    return sys.getrefcount(base) <= _unheld_references() and _num_owners(base) == 1 + num_views


@cache
def _unheld_references() -> int:
    """References that Python counts, within a function, to a base that only its view holds."""
    # measured, since versions of Python count references of the interpreter's own differently
    view = torch.zeros(2, device="cpu")[0]
    base = view._base
    return sys.getrefcount(base)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for a `DTensor`. Does not import torch's distributed tensors, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")  # without which there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Any) -> torch.Tensor:
    """The local shard of a `DTensor`, not a copy; any other tensor is returned as it is."""
    part: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # `to_local()` may give a view of it
    return part


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the local shard; of a sparse tensor those of its values and indices."""
    part = local_shard(tensor)
    if part.layout is torch.sparse_coo:
        return int(part._values().nbytes + part._indices().nbytes)
    return int(part.nbytes)


def assembly_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that makes a tensor sharded like `tensor` from a local shard. Keeps no memory of `tensor`."""
    if not is_dtensor(tensor):
        return lambda part: part
    whole: Any = tensor
    mesh, placements, shape, stride = whole.device_mesh, whole.placements, whole.shape, whole.stride()
    from_local = sys.modules["torch.distributed.tensor"].DTensor.from_local

    def assemble(part: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        return made

    return assemble
