"""The protocol of a trainer's weights, wherever they lie: whole on every rank, sharded, or placed by layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from colo.memory.specs import TensorSpec
    from colo.weights.ranks import RankGroup
    from colo.weights.sources.placed import PlacedPart

T = TypeVar("T")

_LAYER = re.compile(r"(.*?\.\d+)\.")


class WeightSource(Protocol):
    """A trainer's weights in Hugging Face names, each tied tensor once.

    `specs`, `tensors` and `groups` are the same on every rank; `parts`, `held` and `fingerprint` are what this rank
    has. None but `gathered` and what `ranks` asks is a collective.
    """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Give the items of `tensors()`."""

    @property
    def ranks(self) -> RankGroup:
        """The ranks that the weights are spread over."""

    @property
    def is_sharded(self) -> bool:
        """True if some weights are not whole on every rank."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The models of this rank: one, or stages of one."""

    @property
    def foreign(self) -> set[str]:
        """Names of buffers that are no weights of the engine's; see `given_to`."""

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

    def fingerprint(self) -> Hashable:
        """Changes when what lies on this rank is written to or replaced, except through `.data`."""

    def held(self) -> dict[str, torch.Tensor]:
        """Live tensors of this rank, or `DTensor`s with a shard here, each by a name of its own."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every weight by name: the live one where it is whole or a `DTensor`, without memory ("meta") elsewhere."""

    def given_to(self, take: Callable[[dict[str, torch.Tensor]], T]) -> T:
        """Return what `take` returns for `tensors()`, without buffers that the engine's loader does not know."""

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """`tensors`, each whole when it is its turn; every rank takes them in order."""

    def settle_names(self) -> None:
        """Fix the names of the engine's weights as those of now."""

    def check_names(self, names: Iterable[str] | None = None) -> None:
        """Raise `StaleWeights` when there are other weights, by name, than when the engine was given them."""

    def reshard(self) -> None:
        """Make the model hold parts again where a pass has left whole weights."""

    def outermost_sharded(self) -> list[nn.Module]:
        """Modules in which backward passes of a sharded model begin."""


def in_layers(names: Iterable[str]) -> list[list[str]]:
    """Names in order, in groups: those up to the number of a layer, such as `model.layers.3`, and those between."""
    groups: list[list[str]] = []
    last: str | None = None
    for name in names:
        found = _LAYER.match(name)
        layer = found[1] if found else ""
        if layer != last or not groups:
            groups.append([])
        groups[-1].append(name)
        last = layer
    return groups
