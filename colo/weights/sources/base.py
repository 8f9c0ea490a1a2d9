"""The protocol of a trainer's weights, wherever they lie, and whole weights of those that are spread over ranks.

An engine may take whole tensors only. Making one is a collective: every rank takes part, in the same order, and one
that fails on the way goes on to the end, since the others wait for it, and tells them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from colo.engine import AdapterWeights
from colo.memory.specs import TensorSpec
from colo.memory.storage import is_dtensor
from colo.weights.boxes import PlacedPart
from colo.weights.ranks import RankGroup

T = TypeVar("T")

_LAYER = re.compile(r"(.*?\.\d+)\.")

_COMPILED = "_orig_mod."
_PEFT_PREFIX = "base_model.model."
_PEFT_BASE = ".base_layer."


class WeightSource(Protocol):
    """A trainer's weights in Hugging Face names, each tied tensor once.

    `specs`, `tensors` and `groups` are the same on every rank; `parts`, `held` and `fingerprint` are what this rank
    has. None but `gathered` and what `ranks` asks is a collective. A subclass has what is the same for all.
    """

    ranks: RankGroup  # those that the weights are spread over
    is_sharded: bool  # true if some weights are not whole on every rank
    foreign: set[str]  # names of buffers that are no weights of the engine's; see `given_to`

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors().items())

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The models of this rank: one, or stages of one."""

    def specs(self) -> list[TensorSpec]:
        """Every weight, whole and without data, with strides, in the order in which they travel."""

    def parts(self) -> list[PlacedPart]:
        """Live tensors of this rank. The parts of all ranks are the weights."""

    def memory(self) -> list[torch.Tensor]:
        """Live parameters and buffers of this rank."""

    def places(self) -> tuple[list[torch.Tensor], list[Hashable]]:
        """Tensors and keys to compare with those of an earlier call: any differs once a part has moved. Cheap."""

    def groups(self) -> list[list[str]]:
        """Names in order, those of a layer together."""

    def adapter(self) -> AdapterWeights | None:
        """The adapter that engines apply beside the weights, live; `None` without one, or where it is folded in.

        Raises: `Unsupported` for one that an engine could not apply, `StaleWeights` for one that is merged or gone.
        """
        return None

    def settings(self) -> Hashable:
        """A value that changes as an adapter is activated, scaled, or switched on or off."""
        return None

    def renew(self) -> int:
        """Compute weights anew that are made of other tensors; return the bytes that were written, 0 without such."""
        return 0

    def fingerprint(self) -> Hashable:
        """Changes when what lies on this rank is written to or replaced, except through `.data`."""

    def held(self) -> dict[str, torch.Tensor]:
        """Live tensors of this rank, or `DTensor`s with a shard here, each by a name of its own."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every weight by name: the live one where it is whole or a `DTensor`, without memory ("meta") elsewhere."""

    def given_to(self, take: Callable[[dict[str, torch.Tensor]], T]) -> T:
        """Return what `take` returns for `tensors()`, without buffers that the engine's loader does not know."""
        return take(self.tensors())

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """`tensors`, each whole when it is its turn; every rank takes them in order."""

    def settle_names(self) -> None:
        """Fix the names of the engine's weights as those of now."""
        return

    def check_names(self, names: Iterable[str] | None = None) -> None:
        """Raise `StaleWeights` when there are other weights, by name, than when the engine was given them."""
        return

    def check_computed(self) -> None:
        """Raise `StaleWeights` when a buffer that engines compute for themselves has other values than at the start."""
        return

    def reshard(self) -> None:
        """Make the model hold parts again where a pass has left whole weights."""
        return

    def outermost_sharded(self) -> list[nn.Module]:
        """Modules in which backward passes of a sharded model begin by themselves, as FSDP2's do."""
        return []


def in_layers(names: Iterable[str]) -> list[list[str]]:
    """Names in order, in groups: those up to the number of a layer, such as `model.layers.3`, and those between."""

    def layer(name: str) -> str:
        found = _LAYER.match(name)
        return found[1] if found else ""

    return [list(group) for _, group in groupby(names, key=layer)]


def plain_name(name: str) -> str:
    """The name that a parameter or module has without PEFT or `torch.compile` around the model."""
    return name.replace(_COMPILED, "").removeprefix(_PEFT_PREFIX).replace(_PEFT_BASE, ".")


class InTurn(Mapping[str, torch.Tensor]):
    """Weights by name, whole: each is made when it is asked for, and kept until the next one is.

    A context in which every rank asks for the same names in order, each as often in a row as it likes. Raises: at its
    end, `TransferError` with rank and cause when it has failed on another rank. After an interrupt or a failed
    collective on one rank the others wait until its process ends, or for the group's deadline.

    Args:
        names: all names of the mapping.
        ranks: the ranks that take part.
        order: names of the weights that have to be made, in order.
        doing: what the ranks do, for the error.
    """

    def __init__(self, names: Iterable[str], ranks: RankGroup, *, order: Iterable[str], doing: str) -> None:
        self._names = dict.fromkeys(names)
        self._ranks = ranks
        self._left = deque(order)
        self._doing = doing
        self._held: tuple[str, torch.Tensor] | None = None
        self._is_out_of_step = False

    @abstractmethod
    def _whole(self, name: str) -> torch.Tensor:
        """Makes one whole tensor together with the other ranks."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next one takes memory
            self._held = self._make(until=name)
        return self._held[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> InTurn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held = None
        if self._is_out_of_step or (kind is not None and not issubclass(kind, Exception)):
            return
        # the other ranks go through the whole order, and each weight takes all of them
        while self._left:
            self._make(until=self._left[0])
        self._ranks.report_failure(self._doing, error if isinstance(error, Exception) else None)

    def _make(self, *, until: str) -> tuple[str, torch.Tensor]:
        while True:
            name = self._left.popleft()
            self._is_out_of_step = True  # a rank in which a collective fails takes part in none that follows
            whole = self._whole(name)
            self._is_out_of_step = False
            # those that were passed over are made too: every rank takes part in every one
            if name == until:
                return name, whole


class Gathered(InTurn):
    """Weights by name: sharded ones are whole only in their turn of `order`, others at any time."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], order: Iterable[str] | None = None) -> None:
        sharded = [name for name in (tensors if order is None else order) if is_dtensor(tensors[name])]
        super().__init__(tensors, RankGroup(tensors.values()), order=sharded, doing="gathering the weights")
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return super().__getitem__(name) if is_dtensor(tensor) else tensor

    @torch.no_grad()
    def _whole(self, name: str) -> torch.Tensor:
        tensor: Any = self._tensors[name].detach()
        whole: torch.Tensor = tensor.full_tensor()
        return whole
