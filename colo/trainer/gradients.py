"""Gradients as a segment: in host memory while a rollout needs their room, and back as they were.

The gradients are the loop's: autograd allocates them, the loop reads, clips, zeroes and drops them, as without colo.
While they are parked `parameter.grad` is the same object, an ordinary host tensor. A backward pass cannot add to it, so
`BackwardWatch` has gradients brought back first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from colo.memory.offload import Mover
from colo.memory.parking import Kept, Parking
from colo.memory.storage import local_bytes, local_shard
from colo.phases.phase import TRAINER_GRADIENTS, Done, Move, Residency
from colo.trainer.optimizers import MegatronOptimizers

_gradient_of, _bytes_of = attrgetter("grad"), attrgetter("nbytes")


class HoldsGradient(Protocol):
    """A parameter, or whatever else has a gradient."""

    grad: torch.Tensor | None


class ParameterGradients(Parking):
    """The gradients of an optimizer's parameters, each in memory of its own.

    Sparse ones, and those of which something holds a view, such as DDP's buckets, stay on the device.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, mover: Mover, others: Callable[[], Sequence[HoldsGradient]]
    ) -> None:
        """`others` lists what else holds gradients at the moment, such as whole ones that FSDP2 has not reduced."""
        super().__init__(TRAINER_GRADIENTS, mover, name_of=lambda _: "gradients", keeps_addresses=False)
        self.bytes_of_all: Callable[[], int] = self._bytes_of_parameters
        """Bytes of gradients that a backward pass holds at its peak."""

        self._optimizer = optimizer
        self._others = others
        self._staying_bytes = 0
        self._parameters = self._find_parameters()

    @property
    def is_parked(self) -> bool:
        """True while gradients are in host memory, or on their way there."""
        return self._residency is Residency.OFFLOADED and bool(self._regions)

    @property
    def residency(self) -> Residency:
        """`RESIDENT` while there are gradients, `OFFLOADED` while some are parked, `DISCARDED` without any."""
        if self._regions:
            return Residency.OFFLOADED if self.is_parked else Residency.RESIDENT
        # the first that is found will do, unless some stay
        is_any = self.device_bytes > 0 if self._staying_bytes else any(g is not None for g in self._present())
        return Residency.RESIDENT if is_any else Residency.DISCARDED

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradients; without any, bytes of those that a backward pass will make."""
        if self._regions:
            return sum(region.size_bytes for region in self._regions)
        # before the first backward pass the plan must have room for what it will make
        return self.device_bytes or max(0, self.bytes_of_all() - self._staying_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes of the gradients on the device, as they are now, without those that stay there."""
        if self._regions:
            return sum(region.device_bytes for region in self._regions)
        return max(0, self._present_bytes() - self._staying_bytes)

    def refresh(self) -> None:
        """Look for gradients that the loop has dropped or replaced."""
        self._find()
        self._let_loose()

    def _find(self) -> None:
        self._parameters = self._find_parameters()
        held = [gradient for holder in self._holders() if (gradient := holder.grad) is not None]
        if not held and not self._regions:  # the most frequent case: the loop has called `zero_grad()`
            self._loose, self._loose_bytes, self._staying_bytes, self.kept = [], 0, 0, []
            return
        gradients = [g if type(g) is torch.Tensor else local_shard(g) for g in held]
        # the parameter itself owns its gradient in C++, which is no reason to stay
        self._owned = frozenset(id(gradient) for gradient in held if gradient._use_count() > 1)  # type: ignore[attr-defined]
        self.look([gradient for gradient in gradients if gradient.layout is torch.strided])
        sparse = [gradient for gradient in gradients if gradient.layout is not torch.strided]
        if sparse:
            self.kept.append(Kept("gradients", sum(map(local_bytes, sparse)), "they are sparse"))
        self._staying_bytes = sum(kept.size_bytes for kept in self.kept)

    def begin(self, target: Residency) -> Move:
        """Start a move; see `Parking.begin`. Gradients that the loop has dropped since do not come back."""
        if target is not self.residency:
            # a loop may have called `zero_grad` since `refresh`: what it has dropped must not be moved
            self._find()
        elif not self._regions:
            return Done()
        return super().begin(target)

    def _arrived(self) -> None:
        super()._arrived()
        self._let_loose()

    def _let_loose(self) -> None:
        """Refer to no gradient on the device: its memory has to go when the loop drops it."""
        self._loose, self._loose_bytes = [], 0

    def _bytes_of_parameters(self) -> int:
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        return sum(map(_bytes_of if set(map(type, trained)) <= {nn.Parameter} else local_bytes, trained))

    def _holders(self) -> Sequence[HoldsGradient]:
        others = self._others()
        return [*self._parameters, *others] if others else self._parameters

    def _find_parameters(self) -> list[torch.Tensor]:
        """List the parameters on the device: FSDP2's `CPUOffloadPolicy` keeps them and their gradients on the host."""
        device = self._mover.device
        return [
            p
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.device == device and (type(p) is nn.Parameter or local_shard(p).device == device)
        ]

    def _present(self) -> Iterator[torch.Tensor | None]:
        return map(_gradient_of, self._holders())

    def _present_bytes(self) -> int:
        # by functions of C: the scheduler asks often
        held = [gradient for gradient in self._present() if gradient is not None]
        if set(map(type, held)) <= {torch.Tensor}:
            with suppress(RuntimeError):  # of a sparse one torch does not tell
                return sum(map(_bytes_of, held))
        return sum(map(local_bytes, held))


class GradientBuffers(Parking):
    """Gradients in buffers that are there from step to step, as Megatron's data-parallel wrapper has them.

    A buffer moves as a whole, with every view of it that Megatron has; one that something else refers to stays.
    """

    def __init__(self, optimizer: MegatronOptimizers, mover: Mover) -> None:
        advice = "a buffer of gradients; after a step, optimizer.zero_grad() drops gradients of main parameters in it"
        super().__init__(TRAINER_GRADIENTS, mover, name_of=lambda _: advice)
        self._optimizer = optimizer

    @property
    def is_parked(self) -> bool:
        """True while gradients are in host memory, or on their way there."""
        return self.residency is Residency.OFFLOADED

    def refresh(self) -> None:
        """Take in buffers and views of them that are new."""
        self.look(self._optimizer.gradients())


Gradients = ParameterGradients | GradientBuffers


def make_gradients(optimizer: Any, mover: Mover, others: Callable[[], Sequence[HoldsGradient]]) -> Gradients:
    """Make the segment that suits how an optimizer's parameters get their gradients."""
    if isinstance(optimizer, MegatronOptimizers) and optimizer.has_buffers:
        return GradientBuffers(optimizer, mover)
    return ParameterGradients(optimizer, mover, others)


class TakenGradients:
    """Notes on the gradients that an unfinished step has used. One that was written since is another."""

    def __init__(self) -> None:
        self._noted: dict[torch.Tensor, tuple[TensorWeakRef, int]] = {}  # and the writes to each

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Tell whether a gradient of the parameter was noted, the present one or an earlier one."""
        return parameter in self._noted

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note the present gradients of some parameters."""
        # by weak reference: a note must not keep a gradient that the loop drops
        self._noted.update((p, (TensorWeakRef(p.grad), p.grad._version)) for p in parameters if p.grad is not None)

    def present(self) -> list[torch.Tensor]:
        """List parameters that still have the gradients noted of them."""
        return [
            parameter
            for parameter, (gradient, version) in self._noted.items()
            # identity and count: `zero_` keeps the tensor, `backward` may keep it too, and either is another gradient
            if parameter.grad is not None and gradient() is parameter.grad and parameter.grad._version == version
        ]

    def drop_changed(self) -> None:
        """Forget gradients that have changed."""
        self._noted = {parameter: self._noted[parameter] for parameter in self.present()}

    def clear(self) -> None:
        """Forget all: the step has ended."""
        self._noted.clear()


# ---- gradients that FSDP2 keeps whole until they are reduced, as after `set_requires_gradient_sync(False)` -----------


class _Accumulated:
    """An unreduced gradient in the dtype of the reduction, which FSDP2 keeps apart from the parameter."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = self._held.unsharded_accumulated_grad
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self._held.unsharded_accumulated_grad = gradient


def unreduced(modules: Iterable[nn.Module]) -> list[HoldsGradient]:
    """List what holds whole gradients among FSDP2's modules and those within them.

    FSDP2 has no public way to them: they are read from attributes that torch 2.6 to 2.14 have. Where those are missing,
    such gradients stay where they are.
    """
    found: list[HoldsGradient] = []
    for held in _fsdp_parameters(modules):
        whole = getattr(held, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            found.append(whole)
        if getattr(held, "unsharded_accumulated_grad", None) is not None:
            found.append(_Accumulated(held))
    return found


def _fsdp_parameters(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        for inner in module.modules():
            get_state: Any = getattr(inner, "_get_fsdp_state", None)
            state = get_state() if get_state is not None else None
            # newer versions of torch have several groups for a module, older ones one
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in groups:
                yield from getattr(group, "fsdp_params", ())
