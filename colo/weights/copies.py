"""Many copies at once, and whether they have left what they should."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colo.units import MIB

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED_AT_ONCE = 1 << 24
"""Elements, words of eight bytes where that is possible; comparing takes a byte for each."""

_LARGE_BYTES = 16 * MIB
"""From here on a copy of its own, at the device's own speed, beats a share of a fused one, which reaches two thirds."""


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


def differ(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Whether a bit of `target` is not what copying `source` to it leaves, as a tensor (bool, no dimensions).

    Queued, not waited for. NaN equals itself and -0 does not equal 0.
    """
    left, right = source, target
    if source.dtype == target.dtype and _is_in_words(source) and _is_in_words(target):
        left, right = (tensor.view(-1).view(torch.int64) for tensor in (source, target))
    rows = max(1, _COMPARED_AT_ONCE // max(1, right[:1].numel())) if right.dim() else 1
    kind = _BITS[right.element_size()]
    found = [
        (mine.to(right.dtype).view(kind) != theirs.view(kind)).any()
        for mine, theirs in zip(
            left.split(rows) if right.dim() else [left],
            right.split(rows) if right.dim() else [right],
            strict=True,
        )
    ]
    return torch.stack(found).any() if len(found) > 1 else found[0]


def _is_in_words(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in a row and are words of eight."""
    num_bytes, start_bytes = (n * tensor.element_size() for n in (tensor.numel(), tensor.storage_offset()))
    return tensor.is_contiguous() and num_bytes % 8 == start_bytes % 8 == tensor.data_ptr() % 8 == 0
