"""Many copies in a few launches, and a comparison of sources with targets afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from colo.memory import tiles, triton_kernels
from colo.units import MIB

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED_AT_ONCE = 1 << 24
"""Elements compared in one launch (words of four bytes where possible); each takes a byte of workspace."""

_LARGE_BYTES = 16 * MIB
"""A tensor of this size is copied by itself, at full speed; smaller ones are fused, at two thirds of it."""


@torch.no_grad()
def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy every source to its target: large ones each by themselves, the others in a few launches."""
    fused: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if target.numel() * target.element_size() >= _LARGE_BYTES:
            target.copy_(source)
        else:
            fused[0].append(target)
            fused[1].append(source)
    if fused[0]:
        torch._foreach_copy_(*fused)


class Comparison:
    """Compares targets, bit by bit, with their sources converted to the targets' dtype. Can be computed repeatedly.

    Lifetime: ends with the memory, whose addresses it keeps. NaN equals itself and -0 does not equal 0.
    """

    def __init__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._pairs = list(zip(sources, targets, strict=True))
        self._device = targets[0].device if targets else torch.device("cpu")
        self._kernels = triton_kernels.kernels(self._device)
        if self._kernels is None:
            return
        in_words = {
            i: pair
            for i, pair in enumerate(map(_words, sources, targets))
            if pair is not None and pair[0].device == self._device
        }
        lengths = [len(left) for left, _ in in_words.values()]
        left, right = ([pair[side].data_ptr() for pair in in_words.values()] for side in (0, 1))
        columns = ((left, tiles.WORD_BYTES), (right, tiles.WORD_BYTES), (list(in_words), 0))
        self._tiles = tiles.table([0] * len(lengths), lengths, *columns, device=self._device)
        self._others = [i for i in range(len(self._pairs)) if i not in in_words]
        self._others_there = torch.tensor(self._others, dtype=torch.int64).to(self._device)

    @torch.no_grad()
    def flags(self) -> torch.Tensor:
        """Queue the comparison; returns one flag for each pair (bool), on the targets' device."""
        if not self._pairs:
            return torch.zeros(0, dtype=torch.bool)
        if self._kernels is None:
            return self._differing(range(len(self._pairs)))
        flags = torch.zeros(len(self._pairs), dtype=torch.int32, device=self._device)
        self._kernels.compare(self._tiles, flags)
        if self._others:
            flags.index_copy_(0, self._others_there, self._differing(self._others).to(torch.int32))
        return flags.bool()

    def _differing(self, numbers: Iterable[int]) -> torch.Tensor:
        """Flags of some pairs, gathered on the GPU of the first target."""
        return torch.stack([_differ(*self._pairs[number]).to(self._device) for number in numbers])


def _words(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Source and target as words, where a copy between them changes no bit."""
    left, right = tiles.in_words(source), tiles.in_words(target)
    if left is None or right is None or (source.dtype, source.device) != (target.dtype, target.device):
        return None
    return left, right


def _differ(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    left, right = _words(source, target) or (source, target)
    if not right.dim():
        left, right = left[None], right[None]
    rows = max(1, _COMPARED_AT_ONCE // max(1, right[:1].numel()))
    found = [
        (_bits(mine.to(right.device, right.dtype)) != _bits(theirs)).any()
        for mine, theirs in zip(left.split(rows), right.split(rows), strict=True)
    ]
    return torch.stack(found).any()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of the same width; a complex number as two, since no integer is as wide."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return numbers.view(_BITS[numbers.element_size()])
