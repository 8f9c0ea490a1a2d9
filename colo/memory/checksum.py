"""A checksum of memory that sees where bytes are, not only which: what repacking in place would not get past a sum."""

from __future__ import annotations

from functools import cache

import torch

WORD_BYTES = 8
"""What is checked comes in multiples of this."""

_COLUMNS, _ROWS = 1 << 10, 1 << 12
"""Of a chunk, in words of four bytes: 16 MiB, so that what is computed from it stays in a GPU's cache."""

_MODULUS = 1 << 64


def checksum(data: torch.Tensor) -> int:
    """A 64-bit checksum of `data` (uint8, contiguous, a multiple of eight bytes), computed where the bytes are.

    Takes 32 MiB beside them. Raises: `ValueError` for another length.
    """
    return folded(partial_sums(data))


def partial_sums(data: torch.Tensor) -> torch.Tensor:
    """What `folded` makes a checksum of, int64, shape [num_chunks], where the bytes are: queued, not waited for.

    Words of 32 bits, each times a random odd number of its column, summed by rows; the sums, each times one of its row,
    summed again, modulo 2^64. No change of one word gets past it, and one of many only by a chance of 2^-33 at most,
    which is that of signs: were words as wide as the sums, an even number of changed signs would always cancel.
    Raises: as `checksum`.
    """
    if data.numel() % WORD_BYTES:
        raise ValueError(f"{data.numel()} bytes are not a multiple of {WORD_BYTES}")
    words = data.view(torch.int32)
    of_column, of_row = _weights(_COLUMNS, 1, data.device), _weights(_ROWS, 2, data.device)
    whole = len(words) // _COLUMNS * _COLUMNS
    rows = [*words[:whole].view(-1, _COLUMNS).split(_ROWS)] if whole else []
    rows += [words[whole:].view(1, -1)] if whole < len(words) else []
    sums = [(part.to(torch.int64).mul_(of_column[: part.shape[1]]).sum(1) * of_row[: len(part)]).sum() for part in rows]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=data.device)


def folded(sums: torch.Tensor) -> int:
    """The checksum that partial sums make. Waits for them."""
    total = 0
    for value in sums.tolist():
        total = (total * 1_000_003 + value) % _MODULUS
    return total


@cache
def _weights(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits that look random and are always the same (SplitMix64)."""
    numbers, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % _MODULUS
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % _MODULUS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % _MODULUS
        odd = (mixed ^ (mixed >> 31)) | 1
        numbers.append(odd - _MODULUS if odd >= _MODULUS // 2 else odd)
    return torch.tensor(numbers, dtype=torch.int64, device=device)
