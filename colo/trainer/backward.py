"""Watching backward passes: which one of a step it is, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

PROGRESS_CALLS = 8  # number of calls of `on_progress` in a backward pass


class BackwardWatch:
    """Counts the backward passes since the last step, through hooks that torch calls as each gradient is complete.

    All callbacks run within `backward()`. `admit()` runs for each gradient before autograd accumulates it, also for
    those that `torch.autograd.grad` returns, and may raise, which ends the pass. For `modules` that handle their
    gradients themselves (FSDP2's) it runs before the pass reaches them. `on_pass(n)` runs when the first gradient of
    the n-th pass is there, `on_progress()` several times in each pass.
    """

    def __init__(
        self,
        *,
        modules: Iterable[nn.Module] = (),
        admit: Callable[[], None],
        on_pass: Callable[[int], None],
        on_progress: Callable[[], None],
    ) -> None:
        self.passes = 0  # backward passes that have begun since `forget`
        self._admit = admit
        self._on_pass = on_pass
        self._on_progress = on_progress
        self._step = 0  # raised by `forget`
        self._seen = 0
        # by `id`, and weakly: a parameter that a loop has replaced must be able to go
        self._watched: dict[int, TensorWeakRef] = {}
        self._hooks: list[RemovableHandle] = []
        self._every = 1
        for module in modules:  # before the module's own hooks, which begin a pass
            self._hooks.append(module.register_forward_hook(self._on_output, prepend=True))

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch those of `parameters` that require gradients and are not watched yet."""
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            known = self._watched.get(id(parameter))
            if known is None or known() is not parameter:
                self._watched[id(parameter)] = TensorWeakRef(parameter)
                # before autograd accumulates, when a gradient may still be away, and after, when it is complete
                self._hooks.append(parameter.register_hook(weakly(self._on_admission)))
                counted = weakly(self._on_gradient, _Gradients())
                self._hooks.append(parameter.register_post_accumulate_grad_hook(counted))
        # counted in gradients, since nothing else tells how far a pass has come
        self._every = max(1, len(self._watched) // PROGRESS_CALLS)

    def forget(self) -> None:
        """Start counting from 0: a step has used the gradients."""
        self._step += 1
        self.passes = 0

    def remove(self) -> None:
        """Take the hooks back. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()

    def _on_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._admit())

    def _on_admission(self, _: torch.Tensor) -> None:
        self._admit()

    def _on_gradient(self, _: torch.Tensor, gradients: _Gradients) -> None:
        if gradients.step != self._step:
            gradients.step, gradients.count = self._step, 0
        gradients.count += 1
        # the first parameter to get its n-th gradient begins the n-th pass, also one that ends in what is called here
        is_first = gradients.count > self.passes
        self.passes = max(self.passes, gradients.count)
        self._seen += 1
        if self._seen % self._every == 0:
            self._on_progress()
        if is_first:
            self._on_pass(gradients.count)


class _Gradients:
    """Number of gradients that one parameter has got since the last step."""

    __slots__ = ("count", "step")

    def __init__(self) -> None:
        self.step = self.count = 0


def weakly(method: Callable[..., None], *more: Any) -> Callable[..., None]:
    """Call a method with a hook's first argument, and `more`, while its object lives.

    Python's collector does not look into hooks that autograd holds, and torch holds those of all optimizers for ever.
    """
    # in parts: `WeakMethod` would bind it anew for every gradient
    assert isinstance(method, MethodType)
    owner, function = ref(method.__self__), method.__func__

    def call(subject: Any, *_: Any) -> None:
        if (found := owner()) is not None:
            function(found, subject, *more)

    return call
