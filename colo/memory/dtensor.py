"""Tensors sharded over the ranks of a trainer (`DTensor`: FSDP2, tensor parallelism), and their local shards.

State is moved part by part: every process moves what lies in it, and none waits for another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


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
