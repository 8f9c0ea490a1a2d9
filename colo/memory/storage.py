"""Storages of torch: who refers to one, and tensors with a storage of their own over memory that others share."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies a tensor's storage while it lives, whether or not it holds bytes."""
    return int(tensor.untyped_storage()._cdata)


def num_references(tensor: torch.Tensor) -> int:
    """How many tensors there are over the storage of `tensor`, itself included.

    Counted are those made by any code, in Python or C++, and views of them; not further references to one of them.
    """
    storage = tensor.untyped_storage()  # which is one reference while it is held here
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory whose storage is just its bytes, and which keeps that memory alive.

    Savers such as accelerate's and safetensors' take tensors in one storage for tied, and pickle saves storages whole.
    A tensor with a storage of its own is an ordinary one to all of them, and stays valid for as long as anybody refers
    to it, whatever becomes of its owner. It counts its writes itself. Made through DLPack, whose capsules own what they
    were made from; a storage cannot be resized.
    Raises: `ValueError` unless `tensor` is contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    if not tensor.numel():
        return torch.empty_like(tensor)
    own: torch.Tensor = from_dlpack(tensor.detach())
    return own
