"""Memory in many places as a table of small tiles, which one kernel reads in one launch, one program a tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORD_BYTES = 4

WORDS = 1 << 16
"""Words of a tile at most: 256 KiB, small enough to keep every multiprocessor busy."""


def in_words(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's memory as words of four bytes (int32, flat); `None` where it is not contiguous, aligned words."""
    num_bytes, start_bytes = (n * tensor.element_size() for n in (tensor.numel(), tensor.storage_offset()))
    if not tensor.is_contiguous() or any(n % WORD_BYTES for n in (num_bytes, start_bytes, tensor.data_ptr())):
        return None
    return tensor.detach().view(-1).view(torch.int32)


def cut(starts: Sequence[int], lengths: Sequence[int], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut ranges at the multiples of `width`; returns each tile's range, offset within it, and length (int64)."""
    start = torch.tensor(starts, dtype=torch.int64)
    stop = start + torch.tensor(lengths, dtype=torch.int64)
    first = start // width
    counts = (stop - first * width + width - 1) // width
    index = torch.repeat_interleave(torch.arange(len(start)), counts)
    number = torch.arange(len(index)) - (counts.cumsum(0) - counts)[index] + first[index]
    low, high = torch.maximum(number * width, start[index]), torch.minimum((number + 1) * width, stop[index])
    return index, low - start[index], high - low


def table(
    starts: Sequence[int], lengths: Sequence[int], *columns: tuple[Sequence[int], int], device: torch.device
) -> torch.Tensor:
    """Cut ranges into tiles at the multiples of `WORDS`; a row holds a tile's `columns` and its length (int64).

    A column has a value for each range, and a step by which it grows from word to word.
    """
    index, offset, length = cut(starts, lengths, WORDS)
    grown = [torch.tensor(values, dtype=torch.int64)[index] + offset * step for values, step in columns]
    return torch.stack([*grown, length], 1).to(device)
