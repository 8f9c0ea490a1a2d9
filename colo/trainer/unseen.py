"""Optimizer state that colo does not see: of optimizers it was not given, and outside of `optimizer.state`.

Such state never leaves the device, which nothing else would tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from colo.trainer.backward import weakly
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.optimizers import MegatronOptimizers, OptimizerParts, parameters_of
from colo.trainer.state import untraced


class UnseenState:
    """Looks for parameters that are stepped with state that is not moved, and warns of each kind once."""

    def __init__(self, optimizer: Any, model: nn.Module | None) -> None:
        self.num_stepped_elsewhere = 0  # number of parameters that an optimizer unknown to colo steps
        self.num_without_state = 0
        """Number of parameters of which the optimizer has nothing in its state after a step."""

        self._optimizer = optimizer
        self._known = list(_known(optimizer))
        own = parameters_of(optimizer)
        self._own = set(map(id, own))
        others = [p for p in model.parameters() if id(p) not in self._own] if model is not None else []
        # torch's counts of in-place writes, before anybody has trained
        self._versions = {parameter: parameter._version for parameter in others}
        self._parameters = {id(p): p for p in [*own, *others]}
        self._stepped_elsewhere: set[int] = set()  # by optimizers of torch's that colo was not given
        self._stepped: set[int] = set()  # by the others, with a gradient
        self._is_checked = isinstance(optimizer, MegatronOptimizers)  # which has state of copies of them
        # torch keeps this hook for all optimizers of the process: bound weakly, it does not keep a dropped runtime
        self._hooks = [register_optimizer_step_post_hook(untraced(weakly(self._on_step)))]
        # loading writes to weights too: of the whole model, or of a part that another optimizer may train
        for module in model.modules() if others and model is not None else ():
            if module is model or any(
                p.requires_grad and p in self._versions for p in module.parameters(recurse=False)
            ):
                self._hooks.append(module.register_load_state_dict_post_hook(weakly(self._on_load)))
        finalize(self, _remove, self._hooks)  # of a runtime that is dropped

    def remove(self) -> None:
        """Take the hooks back. Idempotent."""
        _remove(self._hooks)

    def look(self) -> None:
        """Count such parameters, between two phases.

        Two things tell of steps of other optimizers: torch's hook for every optimizer, since torch counts no write of a
        fused step, and the count of writes, since an optimizer that is none of torch's calls no hook.
        """
        stepped = {id(p) for p, version in self._versions.items() if p.requires_grad and p._version != version}
        stepped |= self._stepped_elsewhere
        if stepped and not self.num_stepped_elsewhere:
            warnings.warn(
                f"{self._described(stepped)}, are stepped by an optimizer that colo was not given: its state "
                "never leaves the device. Give all optimizers as a list",
                stacklevel=3,
            )
        self.num_stepped_elsewhere = len(stepped)
        if self._stepped and not self._is_checked:
            self._check_state()

    def _check_state(self) -> None:
        """Look, after the first steps, if the optimizers have made state of the parameters."""
        self._is_checked = True
        without = self._stepped - {id(p) for part in self._known for p in _with_state(part)}
        self.num_without_state = len(without)
        if without:
            kind = type(self._known[0]).__name__
            warnings.warn(
                f"{kind} has stepped {self._described(without)}, and has no state of them: any that it keeps elsewhere "
                f"never leaves the device. Keep it in {kind}.state, or give the optimizers within it as a list",
                stacklevel=4,
            )

    def _described(self, keys: set[int]) -> str:
        first = next(p for key, p in self._parameters.items() if key in keys)
        return f"{len(keys)} parameters, one of shape {tuple(first.shape)}"

    def _on_load(self, module: nn.Module) -> None:
        self._versions |= {p: p._version for p in module.parameters() if p in self._versions}

    def _on_step(self, optimizer: torch.optim.Optimizer) -> None:
        # by `state` too: a step in parts calls with objects that share the optimizer's state (`part_of`)
        if not any(optimizer is part or optimizer.state is part.state for part in self._known):
            self._stepped_elsewhere |= self._parameters.keys() & set(map(id, parameters_of(optimizer)))
        elif not self._is_checked:
            # only until the first look: afterwards it is known which have state
            self._stepped |= {id(p) for p in parameters_of(optimizer) if p.grad is not None} & self._own


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _known(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that step what colo was given, those within others too."""
    if isinstance(optimizer, OptimizerParts):
        for part in optimizer.inner:
            yield from _known(part)
        return
    yield optimizer
    if isinstance(optimizer, MasterWeightsOptimizer):
        yield optimizer.inner


def _with_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters whose state is in `optimizer.state`: all where there is any, as some share theirs."""
    has_any = any(map(_is_kept, pytree.tree_leaves(list(optimizer.state.values()))))
    for group in optimizer.param_groups:
        if has_any or (type(optimizer) is torch.optim.SGD and not group["momentum"]):  # which has none
            yield from group["params"]


def _is_kept(leaf: object) -> bool:
    return leaf.dim() > 0 if isinstance(leaf, torch.Tensor) else not isinstance(leaf, (int, float, str, type(None)))
