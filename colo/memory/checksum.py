"""A checksum of memory that sees where bytes are, not only which: what repacking in place would not get past a sum."""

from __future__ import annotations

import torch

WORD_BYTES = 8
_ROW_WORDS = 1 << 10
_CHUNK_ROWS = 1 << 15
_MODULUS = 1 << 64


def checksum(data: torch.Tensor) -> int:
    """A 64-bit checksum of `data` (uint8, contiguous, a multiple of eight bytes), computed where the bytes are.

    Raises: `ValueError` for another length.
    """
    return folded(partial_sums(data))


def partial_sums(data: torch.Tensor) -> torch.Tensor:
    """What `folded` makes a checksum of, int64, shape [num_chunks], where the bytes are: queued, not waited for.

    Of each chunk the sum of its words, each times an odd number of its own, modulo 2^64: no change of one word gets
    past it. Sums of rows and of columns give it without writing anything as large as the data.
    Raises: as `checksum`.
    """
    if data.numel() % WORD_BYTES:
        raise ValueError(f"{data.numel()} bytes are not a multiple of {WORD_BYTES}")
    words = data.view(torch.int64)
    whole = len(words) // _ROW_WORDS * _ROW_WORDS
    column_weights = 2 * torch.arange(_ROW_WORDS, device=data.device) + 1
    row_weights = 2 * _ROW_WORDS * torch.arange(_CHUNK_ROWS, device=data.device)
    sums = [
        torch.sum(rows.sum(0) * column_weights) + torch.sum(rows.sum(1) * row_weights[: len(rows)])
        for rows in (words[:whole].view(-1, _ROW_WORDS).split(_CHUNK_ROWS) if whole else ())
    ]
    if whole < len(words):
        sums.append(torch.sum(words[whole:] * column_weights[: len(words) - whole]))
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=data.device)


def folded(sums: torch.Tensor) -> int:
    """The checksum that partial sums make. Waits for them."""
    total = 0
    for value in sums.tolist():
        total = (total * 1_000_003 + value) % _MODULUS
    return total
