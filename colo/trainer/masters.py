"""The fp32 master of one 16-bit parameter: kept whole, or as what the weight is short of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from colo.memory.dtensor import assembly_of, is_dtensor, local_shard
from colo.trainer.inventory import MASTER_DIGESTS, MASTER_REMAINDER, MASTER_WEIGHT
from colo.trainer.remainders import join, row_digests, split


class Master(ABC):
    """One parameter's master. `tensor` is what the inner optimizer works on."""

    def __init__(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        self.parameter = parameter
        self.tensor = tensor.requires_grad_(parameter.requires_grad)

    @abstractmethod
    def prepare(self) -> None:
        """Have the master in `tensor` for a step. What somebody has written to the parameter since becomes it."""

    @abstractmethod
    def follow(self) -> None:
        """After a step that failed before it was rounded: take over what somebody has written since."""

    @abstractmethod
    def round(self) -> tuple[torch.Tensor, int]:
        """Make the parameter its master, rounded; the number of elements that changed and of all on this rank."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop what a step that failed may have written, where the master is known without it."""

    @property
    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """What an optimizer's state shows of it, by key."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the master from a state of either kind, into new memory."""

    @abstractmethod
    def value(self) -> torch.Tensor:
        """The master (fp32)."""


class WholeMaster(Master):
    """A master that is kept in fp32."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__(parameter, parameter.detach().to(torch.float32, copy=True))
        self._unrounded: int | None = None  # with a step under way, the writes to the parameter before it

    def prepare(self) -> None:
        """See `Master.prepare`. Elements that nobody has written keep the master's precision."""
        self.follow()
        self._unrounded = self.parameter._version

    def follow(self) -> None:
        """See `Master.follow`."""
        # Where a step has failed, the parameter is not yet its master rounded: then torch's count of writes must do.
        if self._unrounded != self.parameter._version:
            master, weight = self.tensor, self.parameter
            torch.where(self._rounded() == weight, master, weight.to(torch.float32), out=master)

    def round(self) -> tuple[torch.Tensor, int]:
        """See `Master.round`."""
        rounded = self._rounded()
        shard = local_shard(self.parameter)
        changed = (local_shard(rounded) != shard).sum(dtype=torch.float64)
        self.parameter.copy_(rounded)
        self._unrounded = None
        return changed, shard.numel()

    def abandon(self) -> None:
        """See `Master.abandon`: there is no other copy."""

    def _rounded(self) -> torch.Tensor:
        """The master in the parameter's dtype; bf16 as `SplitMaster` rounds it, so that both train alike."""
        if self.parameter.dtype is not torch.bfloat16:
            return self.tensor.to(self.parameter.dtype)
        return assembly_of(self.tensor)(split(local_shard(self.tensor))[0])

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """See `Master.state`."""
        return {MASTER_WEIGHT: self.tensor}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Master.load`."""
        self._unrounded = None
        device = self.parameter.device
        if MASTER_WEIGHT in state:
            part = local_shard(self.tensor)  # a `DTensor` would ignore new data
            part.data = local_shard(state[MASTER_WEIGHT]).to(device, torch.float32, copy=True)
        elif is_dtensor(self.parameter):
            raise ValueError(
                f"the state has {MASTER_REMAINDER} of a whole weight, and this one is sharded: save it by an optimizer "
                "with MasterWeights(..., remainders=False)"
            )
        else:
            remainder, digests = (state[key].to(device) for key in (MASTER_REMAINDER, MASTER_DIGESTS))
            self.tensor.data = join(self.parameter, _without_written_rows(self.parameter, remainder, digests))

    def value(self) -> torch.Tensor:
        """See `Master.value`."""
        return self.tensor.detach()


class SplitMaster(Master):
    """A master of which 16 bits are the bf16 weight, and a remainder has the other 16.

    The fp32 tensor exists while it is stepped. Whether somebody has written to the weights since, digests of their
    rows tell; a row that was written to becomes its master, without a remainder.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__(parameter, _placeholder(parameter))
        self._state: dict[str, torch.Tensor] = {}
        self._is_open = False

    def prepare(self) -> None:
        """See `Master.prepare`."""
        if not self._is_open:
            self.tensor.data = self.value()
            self._is_open = True

    def follow(self) -> None:
        """See `Master.follow`."""
        if self._is_open and self._state:
            written = _written_rows(self.parameter, self._state[MASTER_DIGESTS])
            torch.where(written, self.parameter.detach().to(torch.float32), self.tensor, out=self.tensor.data)

    def round(self) -> tuple[torch.Tensor, int]:
        """See `Master.round`."""
        if not self._is_open:
            return torch.zeros((), dtype=torch.float64, device=self.parameter.device), 0
        weight, remainder = split(self.tensor)
        changed = (weight != self.parameter).sum(dtype=torch.float64)
        found = {MASTER_REMAINDER: remainder, MASTER_DIGESTS: row_digests(weight)}
        self.parameter.copy_(weight)
        for key, value in found.items():
            if key in self._state:  # in memory of the runtime's
                self._state[key].copy_(value)
            else:
                self._state[key] = value
        self.abandon()
        return changed, self.parameter.numel()

    def abandon(self) -> None:
        """See `Master.abandon`: weight and remainder are as before the step."""
        self.tensor.data = _placeholder(self.parameter)
        self._is_open = False

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """See `Master.state`. There is none before the first step, whose masters are the weights."""
        return self._state

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Master.load`."""
        self.abandon()
        device = self.parameter.device
        if MASTER_WEIGHT in state:
            weight, remainder = split(state[MASTER_WEIGHT].to(device, torch.float32))
            self._state = {MASTER_REMAINDER: remainder, MASTER_DIGESTS: row_digests(weight)}
        else:
            self._state = {key: state[key].to(device, copy=True) for key in (MASTER_REMAINDER, MASTER_DIGESTS)}

    def value(self) -> torch.Tensor:
        """See `Master.value`."""
        if self._is_open:
            return self.tensor.detach()
        if not self._state:
            return self.parameter.detach().to(torch.float32)
        remainder, digests = self._state[MASTER_REMAINDER], self._state[MASTER_DIGESTS]
        return join(self.parameter, _without_written_rows(self.parameter, remainder, digests))


def can_be_split(parameter: torch.Tensor) -> bool:
    """Whether a master can be a weight and a remainder: of bf16, and not sharded over ranks."""
    return parameter.dtype is torch.bfloat16 and not is_dtensor(parameter)


def _placeholder(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's shape in fp32, with the memory of one element."""
    return torch.zeros(1, device=parameter.device).expand(parameter.shape)


def _without_written_rows(parameter: torch.Tensor, remainder: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
    return torch.where(_written_rows(parameter, digests), 0, remainder)


def _written_rows(parameter: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
    """Whether each row is another than when `digests` were made, in a shape that broadcasts to the parameter's."""
    written = row_digests(parameter) != digests
    return written.view(*parameter.shape[:-1], 1) if parameter.dim() else written.view(())
