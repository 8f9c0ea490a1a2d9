"""Copies between strided pieces of memory, recorded once and made in one launch: `CopyPlan(pairs).replay()`.

The same plan digests what it copies and compares both sides. Bits are kept, payloads of NaN too, but for casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from colo.memory import triton_kernels
from colo.memory.tiles import CASTS, CopyRows, Strided, bits_of, cut, differ, digest_of, runs
from colo.units import MIB

_LARGE_BYTES = 16 * MIB
"""torch copies a tensor of this size by itself, at full speed, and smaller ones fused, at two thirds of it."""

Pair = tuple[torch.Tensor, torch.Tensor | Strided]
"""Source and target, of the same shape."""


class CopyPlan:
    """Copies that one launch makes. Sources and targets must not overlap, and no byte may have two sources.

    Lifetime: on a GPU addresses are recorded, and no memory is kept alive. Record again when any of it has moved.
    """

    def __init__(
        self,
        *groups: Sequence[Pair],
        device: torch.device | None = None,
        words: int | None = None,
        read: Sequence[torch.Tensor] = (),
    ) -> None:
        """Record pairs; tiles of several groups are spread among each other, so that HBM and NVLink work at once.

        `device` is where the launch runs, by default that of the first source; a tile has `words` words at most. A pair
        that its kernel cannot copy (of another device, another cast, on a CPU) is left to torch; its target is a
        tensor.
        Tensors to `read` are digested by the same launch, after the pairs in number, and not written.
        Raises: `ValueError` for a pair that differs in shape.
        """
        self._num_written = sum(map(len, groups))
        groups = (*groups, [(tensor, tensor) for tensor in read])
        pairs = [pair for group in groups for pair in group]
        self.device = device or (pairs[0][0].device if pairs else torch.device("cpu"))
        written = pairs[: self._num_written]
        self.num_bytes = sum(source.numel() * target.dtype.itemsize for source, target in written)
        """Bytes that are written."""

        self._count = len(pairs)
        self._kernels = triton_kernels.kernels(self.device)
        self._others: dict[int, tuple[torch.Tensor, torch.Tensor | Strided]] = {}
        """Pairs that are torch's, by number; a target that is no tensor only says how to digest."""

        fused: list[list[CopyRows]] = []
        numbers = iter(range(len(pairs)))
        for group in groups:
            fused.append([])
            for source, target in group:
                if tuple(source.shape) != tuple(target.shape):
                    raise ValueError(f"cannot copy {tuple(source.shape)} to {tuple(target.shape)}")
                number = next(numbers)
                if self._kernels is not None and is_fusable(source, target, self.device):
                    there = target if isinstance(target, Strided) else Strided.of(target)
                    fused[-1] += runs(Strided.of(source), there, number, is_written=number < self._num_written)
                else:
                    self._others[number] = source.detach(), target
        self._table = _spread([cut(group, words) for group in fused]).to(self.device)
        self._others_there = torch.tensor(list(self._others), dtype=torch.int64).to(self.device)

    @property
    def holds_tensors(self) -> bool:
        """True where it keeps memory alive, as for pairs that torch copies; otherwise it knows addresses only."""
        return bool(self._others)

    @torch.no_grad()
    def replay(self) -> None:
        """Queue all copies."""
        self._copy_others()
        self._launch("copy")

    @torch.no_grad()
    def replay_digested(self) -> torch.Tensor:
        """Queue all copies and, in the same launch, digests of the sources; see `digests`."""
        self._copy_others()
        return self._found("copy and digest", digest_of)

    @torch.no_grad()
    def digests(self) -> torch.Tensor:
        """Queue the digests of the sources, cast as the copies do: int64, one for each pair, on the plan's device."""
        return self._found("digest", digest_of)

    @torch.no_grad()
    def flags(self) -> torch.Tensor:
        """Queue a comparison, bit by bit: bool, true for each pair whose target does not hold what a copy would leave.

        NaN equals itself, and -0 does not equal 0.
        """
        return self._found("compare", differ).bool()

    def _copy_others(self) -> None:
        written = [pair for number, pair in self._others.items() if number < self._num_written]
        pairs = [(source, target) for source, target in written if isinstance(target, torch.Tensor)]
        assert len(pairs) == len(written), "torch copies between tensors"
        copy_all([target for _, target in pairs], [source for source, _ in pairs])

    def _found(self, doing: str, by_torch: Callable[[torch.Tensor, Any], torch.Tensor]) -> torch.Tensor:
        """Queue a launch that writes a number for each pair (int64), and torch's part of it."""
        found = torch.zeros(self._count, dtype=torch.int64, device=self.device)
        self._launch(doing, found)
        if self._others:
            values = [by_torch(*pair).to(self.device, torch.int64) for pair in self._others.values()]
            found.index_copy_(0, self._others_there, torch.stack(values))
        return found

    def _launch(self, doing: str, found: torch.Tensor | None = None) -> None:
        if len(self._table):
            assert self._kernels is not None
            self._kernels.walk(self._table, self._table if found is None else found, doing)


@torch.no_grad()
def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy every source to its target now: large ones each by themselves, the others in a few launches.

    Pairs of one dtype are copied as integers: torch takes bf16 through fp32 in `_foreach_copy_`, which changes NaNs.
    """
    fused: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if target.numel() * target.element_size() >= _LARGE_BYTES:
            target.copy_(source)
            continue
        is_cast = target.dtype != source.dtype
        fused[0].append(target if is_cast else bits_of(target))
        fused[1].append(source if is_cast else bits_of(source))
    if fused[0]:
        torch._foreach_copy_(*fused)


def _spread(groups: Sequence[torch.Tensor]) -> torch.Tensor:
    """Merge tables of tiles, the tiles of each at even distances."""
    every = [part for part in groups if len(part)] or [cut([])]
    places = torch.cat([(torch.arange(len(part), dtype=torch.float64) + 0.5) / max(1, len(part)) for part in every])
    return torch.cat(every)[places.argsort(stable=True)]


def is_fusable(source: torch.Tensor, target: torch.Tensor | Strided, device: torch.device) -> bool:
    """True if the kernel of `device` copies from the one to the other."""
    is_here = source.device == device and (isinstance(target, Strided) or target.device == device)
    return is_here and (source.dtype == target.dtype or (source.dtype, target.dtype) in CASTS)
