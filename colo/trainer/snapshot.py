"""State dicts in host memory, of state that may be away, and state dicts to load from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from colo.trainer.gradients import parameters_of
from colo.trainer.inventory import original_of
from colo.trainer.stand_ins import ParkedTensor
from colo.trainer.state_slots import StateSlot
from colo.trainer.subclasses import inner_tensors, is_wrapper, wrapped


def snapshot(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with copies of its tensors in host memory. Offloaded tensors are copied without coming back.

    Tensors within containers that torch knows (`torch.utils._pytree`) are copied, each once; other objects are shared.
    """
    return {**state_dict, "state": _map_tensors(state_dict["state"], _host_copy)}


def detach_state(state_dict: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict to load into `optimizer` whose tensors the optimizer may keep.

    Loading keeps scalars and tensors that are on the optimizer's device already, so these are copies here: training
    must not change the caller's tensors. Loading copies the others itself.
    """
    devices = {parameter.device for parameter in parameters_of(optimizer)}

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if tensor.device in devices or not tensor.dim() else tensor.detach()

    return {**state_dict, "state": _map_tensors(state_dict["state"], detach)}


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested containers in which `function` replaces every tensor, and the same tensor once."""
    made: dict[int, torch.Tensor] = {}

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = function(leaf)
        return made[id(leaf)]

    return pytree.tree_map(replaced, value)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    original = original_of(tensor)
    if isinstance(original, ParkedTensor) and isinstance(original.keeper, StateSlot):
        return original.keeper.host_copy()
    if is_wrapper(original):
        copies = {name: _host_copy(inner) for name, inner in inner_tensors(original).items()}
        return wrapped(original, copies).detach()
    return original.detach().to("cpu", copy=True)
