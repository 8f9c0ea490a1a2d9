"""A loop's other modules, such as a critic or a reward model, which are on the device while the trainer works.

They are parked as the trainer's own state is (`colo.memory.parking`): weights, gradients and the optimizer's state
leave for rollouts, when their bytes are needed or offload is `always`, and are ordinary host tensors meanwhile.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from types import NoneType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from colo.errors import BudgetError, PhaseError, Unsupported
from colo.memory.offload import Mover
from colo.memory.parking import Parking
from colo.phases.phase import Residency
from colo.trainer.backward import weakly
from colo.trainer.state import UncopiedHook

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class ParkedModule:
    """A module, its gradients and the state of its optimizer, as one segment."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        mover: Mover,
        *,
        name: str,
        taken: Collection[int],
    ) -> None:
        """`taken` are the `id`s of tensors that the runtime moves already. Raises: `Unsupported`, naming a tensor."""
        for given, kind in ((module, nn.Module), (optimizer, (torch.optim.Optimizer, NoneType))):
            if not isinstance(given, kind):
                raise TypeError(f"park() takes a module, and its optimizer or None, not a {type(given).__name__}")
        if not isinstance(name, str):
            raise TypeError(f"name must be a text, not {name!r}")
        self.segment = Parking(name, mover, name_of=lambda _: name)
        # weak: parking keeps neither of them alive
        self._module = ref(module)
        self._optimizer = None if optimizer is None else ref(optimizer)
        if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            raise Unsupported(
                f"{name}: DistributedDataParallel holds on to its parameters' memory: park no such module"
            )
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                raise Unsupported(f"{name}: {key} is a {type(tensor).__name__}; plain tensors can be parked")
            if id(tensor) in taken:
                raise Unsupported(f"{name}: {key} is the runtime's already, which moves it as the phases ask for")
            if tensor.device != mover.device:
                raise Unsupported(f"{name}: {key} is on {tensor.device}: call module.to({str(mover.device)!r}) before")
        stepped = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(parameter) in taken for parameter in stepped):
            raise Unsupported(f"{name}: the optimizer steps weights that the runtime moves already")
        # by our own note: on a CPU, where host and device are one, nothing else would tell
        self.look()
        self._hooks = [module.register_forward_pre_hook(UncopiedHook(weakly(self._check)))]
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(weakly(self._check)))

    def look(self) -> None:
        """Take in gradients and state that are new."""
        self.segment.look(self.tensors())

    def close(self) -> None:
        """Bring everything back, or leave it in host memory where there is no room, and take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        try:
            self.segment.begin(Residency.RESIDENT).wait()
        except (BudgetError, torch.OutOfMemoryError):
            warnings.warn(f"{self.segment.name} stays in host memory: the device has no room for it", stacklevel=7)
        finally:
            self.segment.hand_over()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Weights, buffers, gradients and state, as far as they are there."""
        module = self._module()
        optimizer = None if self._optimizer is None else self._optimizer()
        if module is not None:
            yield from module.buffers()
            for parameter in module.parameters():
                yield parameter
                if parameter.grad is not None and type(parameter.grad) in _PLAIN:
                    yield parameter.grad
        if optimizer is not None:
            leaves = pytree.tree_leaves(list(optimizer.state.values()))
            # counters without a dimension stay on the host, where optimizers read them
            yield from (leaf for leaf in leaves if type(leaf) in _PLAIN and leaf.ndim)

    def _check(self, _: Any) -> None:
        if self.segment.residency is Residency.OFFLOADED:
            raise PhaseError(f"{self.segment.name} is in host memory: use it within `with rt.train():`")
