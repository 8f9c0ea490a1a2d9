"""Gradients as a segment: parked in host memory while a rollout needs their room, and back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from colo.memory.arena import Extent
from colo.memory.dtensor import assembly_of, part_bytes, part_of
from colo.memory.offload import Mover, Transfer
from colo.memory.region import ALIGNMENT_BYTES
from colo.memory.segment import Done, Move
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import TRAINER_GRADIENTS, Residency, check_move
from colo.units import align_up

Assembly = Callable[[torch.Tensor], torch.Tensor]
"""Makes a tensor of a part."""


@runtime_checkable
class StepsInParts(Protocol):
    """An optimizer whose step, once failed, goes on with the gradients that it has not taken in."""

    def taken_in(self) -> list[torch.Tensor]:
        """Parameters whose present gradients a step that failed has taken in."""
        ...

    def take_in(self, parameters: Iterable[torch.Tensor]) -> None:
        """Treat the present gradients of `parameters` as taken in: they are the same, in other memory."""
        ...


class GradientSegment:
    """The gradients of some parameters, which autograd allocates and the optimizer consumes.

    Gradients that a step has consumed are worth nothing and are dropped; others, of an accumulation that goes on after
    a rollout, are copied to the host arena and come back as they were.
    """

    name = TRAINER_GRADIENTS
    away = Residency.OFFLOADED

    def __init__(self, optimizer: torch.optim.Optimizer, *, mover: Mover) -> None:
        self._optimizer = optimizer
        self._mover = mover
        self._extent: Extent | None = None
        self._parked: list[tuple[torch.Tensor, torch.Tensor, Assembly]] = []
        """Parameters, the parts of their gradients as arena views, and what makes gradients of such parts."""

        self._taken_in: set[torch.Tensor] = set()  # of these, what a step that failed has taken in

    @property
    def residency(self) -> Residency:
        """`RESIDENT` while there are gradients, `OFFLOADED` while they are parked, `DISCARDED` without any."""
        if self._parked:
            return Residency.OFFLOADED
        return Residency.RESIDENT if self.device_bytes else Residency.DISCARDED

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradients there are or, without any, of those a backward pass will make."""
        if self._parked:
            return sum(view.numel() * view.element_size() for _, view, _ in self._parked)
        trainable = (part_bytes(p) for p in parameters_of(self._optimizer) if p.requires_grad)
        return self.device_bytes or sum(trainable)

    @property
    def device_bytes(self) -> int:
        """Bytes of the gradients on the device."""
        return sum(part_bytes(p.grad) for p in parameters_of(self._optimizer) if p.grad is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes of the arena held."""
        return self._extent.size_bytes if self._extent else 0

    def drop(self) -> None:
        """Forget every gradient that is on the device."""
        for parameter in parameters_of(self._optimizer):
            parameter.grad = None

    def begin(self, target: Residency) -> Move:
        """Move at once; see `colo.memory.segment.Segment.begin`."""
        source = self.residency
        if target is source or (source is Residency.DISCARDED and target is Residency.RESIDENT):
            return Done()  # the backward pass makes them
        check_move(self.name, source, target)
        if target is Residency.OFFLOADED:
            return self._park()
        if target is Residency.RESIDENT:
            return self._unpark()
        self.drop()
        self._forget_parked()
        return Done()

    def _park(self) -> Move:
        with_gradient = [p for p in parameters_of(self._optimizer) if p.grad is not None]
        gradients = [part_of(p.grad).contiguous() for p in with_gradient if p.grad is not None]
        assemblies = [assembly_of(p.grad) for p in with_gradient if p.grad is not None]
        offsets = _offsets(gradients)
        extent = self._mover.arena.allocate(offsets[-1])
        try:
            host = self._mover.arena.view(extent)
            flat = [_as_bytes(gradient) for gradient in gradients]
            views = [host.narrow(0, offset, one.numel()) for one, offset in zip(flat, offsets, strict=False)]
            _copy_all(self._mover.copy_out, zip(flat, views, strict=True))
        except BaseException:  # the gradients are where they were
            self._mover.arena.release(extent)
            raise
        with uninterrupted():
            self._taken_in = set(self._optimizer.taken_in()) if isinstance(self._optimizer, StepsInParts) else set()
            self._extent = extent
            self._parked = [
                (parameter, view.view(gradient.dtype).view(gradient.shape), assembly)
                for parameter, gradient, view, assembly in zip(with_gradient, gradients, views, assemblies, strict=True)
            ]
            self.drop()
        return Done(offsets[-1])

    def _unpark(self) -> Move:
        back = [torch.empty(view.shape, dtype=view.dtype, device=self._mover.device) for _, view, _ in self._parked]
        pairs = list(zip(self._parked, back, strict=True))
        _copy_all(self._mover.copy_in, [(_as_bytes(view), _as_bytes(part)) for (_, view, _), part in pairs])
        with uninterrupted():
            for (parameter, _, assembly), part in pairs:
                gradient = assembly(part)
                if parameter.grad is not None:  # backward passes since then have only added to what was parked
                    self._taken_in.discard(parameter)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if isinstance(self._optimizer, StepsInParts):
                self._optimizer.take_in(self._taken_in)
            self._forget_parked()
        return Done(sum(part.nbytes for part in back))

    def _forget_parked(self) -> None:
        self._parked.clear()
        self._taken_in.clear()
        if self._extent is not None:
            self._mover.arena.release(self._extent)
            self._extent = None


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer trains, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy_all(
    copy: Callable[[torch.Tensor, torch.Tensor], Transfer], pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Copy, and return or raise when no copy is under way any more: what it reads or writes may be freed then."""
    with uninterrupted():
        transfers: list[Transfer] = []
        try:
            transfers.extend(copy(source, target) for source, target in pairs)
        finally:
            for transfer in transfers:
                transfer.wait()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor starts when they lie one after another, aligned; the last entry is the end."""
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + align_up(tensor.numel() * tensor.element_size(), ALIGNMENT_BYTES))
    return offsets
