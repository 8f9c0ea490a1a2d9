"""Bytes of optimizer state that a first step will make, known before it is made for optimizers whose state is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from colo.memory.dtensor import local_bytes
from colo.memory.region import ALIGNMENT_BYTES
from colo.trainer.gradients import parameters_of
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.megatron import MegatronOptimizers
from colo.units import align_up


class StateSizes:
    """What an optimizer of a kind that is known keeps for each of its parameters, by the parameter."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer` is one of torch's, `colo.trainer.master_weights.MasterWeightsOptimizer`, or Megatron's."""
        self._sizes: dict[int, int] = {}
        self._masters: Callable[[torch.Tensor], int] = lambda _: 0
        self._transient: Callable[[torch.Tensor], int] = lambda _: 0
        if isinstance(optimizer, MasterWeightsOptimizer):
            self._masters, self._transient = optimizer.expected_master_bytes, optimizer.transient_bytes
        self._parameters = parameters_of(optimizer)
        if isinstance(optimizer, MegatronOptimizers):
            for inner in optimizer.inner:  # whose main parameters require no gradients themselves
                self._note(inner, inner.param_groups, steps_all=True)
        else:
            inner = optimizer.inner if isinstance(optimizer, MasterWeightsOptimizer) else optimizer
            self._note(inner, optimizer.param_groups, steps_all=False)

    def expected(self, parameter: torch.Tensor) -> int:
        """Bytes of the state that the first step makes; 0 where that is not known."""
        return self._sizes.get(id(parameter), 0) + self._masters(parameter)

    def of(self, parameter: torch.Tensor) -> int:
        """The same; where it is not known, those of two moments in fp32."""
        return self.expected(parameter) or 8 * parameter.numel()

    def transient(self, parameter: torch.Tensor) -> int:
        """Bytes that a step takes beside the state while it handles this parameter."""
        return self._transient(parameter)

    @property
    def total(self) -> int:
        """Bytes of the state that the first step makes for all parameters, without masters."""
        return sum(self._sizes.values())

    @property
    def masters_total(self) -> int:
        """Bytes that the first step keeps of masters where nothing of them is there yet."""
        return sum(map(self._masters, self._parameters))

    def _note(self, inner: Any, groups: list[dict[str, Any]], *, steps_all: bool) -> None:
        for outer_group, group in zip(groups, inner.param_groups, strict=True):
            copies = _copies(inner, group)
            for outer, parameter in zip(outer_group["params"], group["params"], strict=True):
                if parameter.requires_grad or steps_all:
                    size_bytes = copies * align_up(local_bytes(parameter), ALIGNMENT_BYTES)
                    self._sizes[id(outer)] = size_bytes


def _copies(inner: Any, group: dict[str, Any]) -> int:
    """How many tensors as large as a parameter the state of one has; 0 for optimizers that are not known.

    Adam, AdamW: two moments (three with amsgrad); SGD with momentum: one buffer.
    """
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        return 3 if group.get("amsgrad") else 2
    return int(isinstance(inner, torch.optim.SGD) and group.get("momentum", 0) != 0)
