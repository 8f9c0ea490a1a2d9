"""Gradients as a segment: parked in host memory while a rollout needs their room, and back as they were."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from colo.errors import PhaseError
from colo.memory.arena import Extent
from colo.memory.dtensor import assembly_of, is_dtensor, local_bytes, local_shard
from colo.memory.offload import Mover, Transfer
from colo.memory.region import ALIGNMENT_BYTES
from colo.memory.storage import num_references
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import TRAINER_GRADIENTS, Residency, check_move
from colo.phases.segment import Done, Move
from colo.trainer.stand_ins import Call, Keeper, ParkedTensor
from colo.trainer.unreduced import HoldsGradient
from colo.units import align_up

Assembly = Callable[[torch.Tensor], torch.Tensor]
"""Makes a tensor of a part."""


@runtime_checkable
class StepsInParts(Protocol):
    """An optimizer whose step, once failed, goes on with the gradients that it has not taken in."""

    def consumed(self) -> list[torch.Tensor]:
        """Parameters whose present gradients a step that failed has taken in."""
        ...

    def mark_consumed(self, parameters: Iterable[torch.Tensor]) -> None:
        """Treat the present gradients of `parameters` as taken in: they are the same, in other memory."""
        ...


@dataclass(slots=True)
class _Parked:
    """One parameter's gradient in the arena."""

    parameter: HoldsGradient
    host: torch.Tensor  # the bytes in the arena; of a sharded gradient, those of this process
    assembly: Assembly  # makes a gradient from such bytes
    stand_in: ParkedTensor  # is the parameter's gradient meanwhile
    was_consumed: bool = False  # by a step that failed and will go on
    is_zeroed: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether the stand-in is still the parameter's gradient: the loop has not dropped or replaced it."""
        return self.parameter.grad is self.stand_in


class GradientSegment(Keeper):
    """The gradients of an optimizer's parameters. Autograd allocates them and the loop zeroes them, as without colo.

    A rollout that needs their memory has them copied to the host arena; they come back unchanged. Meanwhile each
    parameter's `grad` is a stand-in. `zero_grad` works on it, and an assignment to `grad` replaces it; every other use
    calls `on_touch` first. Gradients that other code refers to, and sparse ones, stay on the device.
    """

    name = TRAINER_GRADIENTS
    away = Residency.OFFLOADED

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        mover: Mover,
        others: Callable[[], Sequence[HoldsGradient]] = lambda: (),
        steps_in_parts: Callable[[], StepsInParts | None] = lambda: None,
    ) -> None:
        """`others` gives what else holds gradients at the moment, such as whole ones that FSDP2 has not reduced."""
        self._steps_in_parts = steps_in_parts
        self.expected_bytes: Callable[[], int] = self._bytes_of_all
        """Bytes that a backward pass will have at once."""

        self._optimizer = optimizer
        self._others = others
        self._mover = mover
        self._extent: Extent | None = None
        self._parked: list[_Parked] = []
        self._staying_bytes = 0
        self.on_touch: Callable[[], None] = lambda: self.begin(Residency.RESIDENT).wait()
        """Brings the gradients back, or raises `PhaseError` with what to do, when one that is away is touched."""

    @property
    def residency(self) -> Residency:
        """`RESIDENT` while there are gradients, `OFFLOADED` while some are parked, `DISCARDED` without any."""
        if any(parked.is_wanted for parked in self._parked):
            return Residency.OFFLOADED
        return Residency.RESIDENT if self.device_bytes else Residency.DISCARDED

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradients; without any, bytes of those that a backward pass will make."""
        parked_bytes = sum(parked.host.nbytes for parked in self._parked if parked.is_wanted)
        if parked_bytes:
            return parked_bytes
        return self.device_bytes or max(0, self.expected_bytes() - self.staying_bytes)

    def _bytes_of_all(self) -> int:
        return sum(local_bytes(p) for p in self._parameters() if p.requires_grad)

    @property
    def device_bytes(self) -> int:
        """Bytes of the gradients on the device, without those that stay there."""
        return self._present_bytes() - self.staying_bytes

    @property
    def staying_bytes(self) -> int:
        """Bytes of gradients that were seen, by `refresh`, to be held by something else, or sparse."""
        return min(self._staying_bytes, self._present_bytes()) if self._staying_bytes else 0

    def refresh(self) -> None:
        """Count the gradients that cannot leave, before the scheduler plans."""
        parameters = [p for p in self._holders() if p.grad is not None]
        # No list of gradients here: its references would count as other code's.
        self._staying_bytes = sum(
            local_bytes(_gradient(p)) for p in parameters if not isinstance(p.grad, ParkedTensor) and not _may_leave(p)
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of the arena held."""
        return self._extent.size_bytes if self._extent else 0

    def begin(self, target: Residency) -> Move:
        """Move at once; see `colo.phases.segment.Segment.begin`."""
        source = self.residency
        if target is source or (source is Residency.DISCARDED and target is Residency.RESIDENT):
            return Done()  # the backward pass makes them
        check_move(self.name, source, target)
        assert target is not Residency.DISCARDED, "gradients are the loop's to drop"
        return self._park() if target is Residency.OFFLOADED else self._unpark()

    def on_operation(self, call: Call) -> Any:
        """Zero gradients through their stand-ins; for any other operation bring them back first."""
        function, args, kwargs = call
        verb = getattr(function, "__name__", "")
        if verb in _UNCHANGED:
            return args[0]
        if verb in ("zero_", "_foreach_zero_"):
            return self._zero(args[0])
        self.on_touch()
        return function(*pytree.tree_map(self._returned, list(args)), **pytree.tree_map(self._returned, dict(kwargs)))

    def on_dispatch(self, call: Call) -> Any:
        """Let a backward pass add to gradients that are away: bring them back, and add to those."""
        function, args, kwargs = call
        if getattr(function, "overloadpacket", None) not in (torch.ops.aten.add, torch.ops.aten.add_):
            return super().on_dispatch(call)
        self.on_touch()
        return function(*map(self._returned, args), **kwargs)

    def _holders(self) -> list[HoldsGradient]:
        return [*self._parameters(), *self._others()]

    def _parameters(self) -> list[torch.Tensor]:
        """The parameters on the device: FSDP2's `CPUOffloadPolicy` keeps them and their gradients in host memory."""
        device = self._mover.device
        return [p for p in parameters_of(self._optimizer) if local_shard(p).device == device]

    def _present_bytes(self) -> int:
        gradients = (p.grad for p in self._holders())
        return sum(local_bytes(g) for g in gradients if g is not None and not isinstance(g, ParkedTensor))

    def _zero(self, tensors: torch.Tensor | list[torch.Tensor]) -> Any:
        by_stand_in = {id(parked.stand_in): parked for parked in self._parked}
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            parked = by_stand_in.get(id(tensor))
            if parked is not None:
                parked.is_zeroed, parked.was_consumed = True, False
            else:
                self._returned(tensor).zero_()
        return tensors

    def _returned(self, value: Any) -> Any:
        """The gradient itself in place of its stand-in. Raises: `PhaseError` for one that has been replaced since."""
        if not isinstance(value, ParkedTensor) or value.keeper is not self:
            return value
        parameter: HoldsGradient = value.parameter
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, ParkedTensor):
            raise PhaseError("this stood in for a gradient that was in host memory and is gone: read `parameter.grad`")
        return gradient

    def _park(self) -> Move:
        steps = self._steps_in_parts()
        consumed = set(steps.consumed()) if steps is not None else set()
        leaving = [parameter for parameter in self._holders() if _may_leave(parameter)]
        if not leaving:
            return Done()
        parts = [local_shard(_gradient(parameter)).contiguous() for parameter in leaving]
        offsets = _offsets(parts)
        extent = self._mover.arena.allocate(offsets[-1])
        try:
            host = self._mover.arena.view(extent)
            flat = [_as_bytes(part) for part in parts]
            views = [host.narrow(0, offset, one.numel()) for one, offset in zip(flat, offsets, strict=False)]
            _copy_all(self._mover.copy_out, zip(flat, views, strict=True))
        except BaseException:  # the gradients are where they were
            self._mover.arena.release(extent)
            raise
        with uninterrupted():
            self._forget_parked()
            self._extent = extent
            for parameter, part, view in zip(leaving, parts, views, strict=True):
                gradient = _gradient(parameter)
                host_part = view.view(part.dtype).view(part.shape)
                parked = _Parked(parameter, host_part, assembly_of(gradient), self._stand_in(parameter))
                parked.was_consumed = parameter in consumed
                self._parked.append(parked)
                parameter.grad = parked.stand_in
        return Done(offsets[-1])

    def _stand_in(self, parameter: HoldsGradient) -> ParkedTensor:
        made = ParkedTensor(_gradient(parameter), self)
        made.parameter = parameter  # type: ignore[attr-defined]  # tensors take attributes
        return made

    def _unpark(self) -> Move:
        wanted = [parked for parked in self._parked if parked.is_wanted]
        back = [torch.empty(p.host.shape, dtype=p.host.dtype, device=self._mover.device) for p in wanted]
        pairs = list(zip(wanted, back, strict=True))
        copied = [(_as_bytes(p.host), _as_bytes(part)) for p, part in pairs if not p.is_zeroed]
        _copy_all(self._mover.copy_in, copied)
        with uninterrupted():
            for parked, part in pairs:
                parked.parameter.grad = parked.assembly(part.zero_() if parked.is_zeroed else part)
            if (steps := self._steps_in_parts()) is not None:
                consumed = [p.parameter for p in wanted if p.was_consumed and isinstance(p.parameter, torch.Tensor)]
                steps.mark_consumed(consumed)
            self._forget_parked()
        return Done(sum(part.nbytes for part in back))

    def _forget_parked(self) -> None:
        self._parked.clear()
        if self._extent is not None:
            self._mover.arena.release(self._extent)
            self._extent = None


_UNCHANGED = frozenset({"requires_grad_", "detach_", "__set__"})
"""Calls of `zero_grad` that change nothing of a gradient without history."""


def _gradient(parameter: HoldsGradient) -> torch.Tensor:
    assert parameter.grad is not None, "only parameters with gradients are parked"
    return parameter.grad


def _may_leave(parameter: HoldsGradient) -> bool:
    """Whether a parameter has a gradient that no other code refers to, and that is no view of a bucket (DDP's are)."""
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, ParkedTensor) or gradient.layout is not torch.strided:
        return False
    del gradient
    return is_dtensor(_gradient(parameter)) or num_holders(parameter) == 0


def num_holders(parameter: HoldsGradient) -> int:
    """Number of variables, attributes and views that refer to the gradient of `parameter`, without the parameter."""
    own = getattr(parameter, "own_references", 0)
    return max(0, _count_references(parameter) - _references_of_nobody() - own)


def _count_references(parameter: HoldsGradient) -> int:
    gradient = _gradient(parameter)
    return sys.getrefcount(gradient) + num_references(gradient)


@cache
def _references_of_nobody() -> int:
    """The count for a gradient that only its parameter holds; it depends on the versions of Python and torch."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return _count_references(parameter)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy_all(
    copy: Callable[[torch.Tensor, torch.Tensor], Transfer], pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Copy all pairs. No copy is still running when this returns or raises, so the memory may be freed."""
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
