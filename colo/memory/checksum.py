"""A checksum of memory that sees where bytes are, not only which: what repacking in place would not get past a sum."""

from __future__ import annotations

import torch

_CHUNK_WORDS = 1 << 22
_MODULUS = 1 << 64


def checksum(data: torch.Tensor) -> int:
    """A 64-bit checksum of `data` (uint8, contiguous, a multiple of four bytes), computed where the bytes are.

    Takes 48 MiB beside them. Raises: `ValueError` for another length.
    """
    return folded(partial_sums(data))


def partial_sums(data: torch.Tensor) -> torch.Tensor:
    """What `folded` makes a checksum of, int64, shape [num_chunks], where the bytes are: queued, not waited for.

    Raises: as `checksum`.
    """
    if data.numel() % 4:
        raise ValueError(f"{data.numel()} bytes are not a multiple of four")
    words = data.view(torch.int32)
    places = torch.arange(1, min(len(words), _CHUNK_WORDS) + 1, device=data.device)
    sums = [torch.sum(part.to(torch.int64) * places[: len(part)]) for part in words.split(_CHUNK_WORDS)]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=data.device)


def folded(sums: torch.Tensor) -> int:
    """The checksum that partial sums make. Waits for them."""
    total = 0
    for value in sums.tolist():
        total = (total * 1_000_003 + value) % _MODULUS
    return total
