"""Strided memory as a table of small tiles that one kernel copies, digests or compares in one launch; torch's version.

A pair of tensors becomes runs (rows of bytes), and runs become tiles of at most `WORDS` words, a word being as wide as
the alignment of both sides allows. Programs of the kernel take a few tiles each, so that a slice of 1 KB and one of
1 GB load all multiprocessors alike. The same table serves three ends: to copy, to digest what is copied, and to compare
source and target. What differs in dtype is cast on the way.

A digest is the sum, modulo 2^64, of words of 32 bits (signed), each multiplied by a random odd number of its position
among the pair's elements in a row. A change of one word always changes it; one of two is missed with a probability of
about 2^-31. It does not depend on strides or alignment, so that a rank's sum of its part is that of the engine that the
part went to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from colo.units import align_up

WORD_BYTES = 4
"""Bytes of a digest's words."""

WORDS = 2048
"""Words of a tile at most; a multiple of 8, so that cuts of long rows stay whole lines of 128 bytes."""

CASTS = {
    (torch.float32, torch.bfloat16): 32,
    (torch.bfloat16, torch.float32): 34,
    (torch.float32, torch.float16): 36,
    (torch.float16, torch.float32): 38,
    (torch.bfloat16, torch.float16): 40,
    (torch.float16, torch.bfloat16): 42,
}
"""Kinds of tiles whose elements are cast, one at a time; the first also exists, as kind 33, four at a time."""

_WIDEST_BYTES = 16
_WIDE_CAST = 32
_VECTOR = 4
_PEELED_BYTES = 256
"""CopyRows of so many bytes are worth runs of their own for what is not aligned at either end."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED_AT_ONCE = 1 << 24
"""Elements that torch compares in one launch; each takes a byte of workspace."""


@dataclass(frozen=True, slots=True)
class Strided:
    """Strided memory in plain numbers, which may be another GPU's: address, and strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strided:
        """The memory of a tensor, where it lies now."""
        strides = tuple(step * tensor.element_size() for step in tensor.stride())
        return cls(tensor.data_ptr(), tuple(tensor.shape), strides, tensor.dtype)


class CopyRows(NamedTuple):
    """CopyRows of elements; steps from row to row are in bytes, and 0 for a single row."""

    source: int
    target: int
    rows: int
    row_bytes: int
    """Bytes of a row in the target."""

    source_step: int = 0
    target_step: int = 0
    position: int = 0
    """Bytes of the pair, in a row as the target has them, that come before."""

    position_step: int = 0
    number: int = 0
    """The pair's."""

    cast: int = 0
    """A kind of `CASTS`; 0 for bytes that are copied as they are."""

    source_bytes: int = 1
    """Bytes of an element; 1 for what is not cast."""

    target_bytes: int = 1
    is_written: int = 1
    """0 for what is only digested."""

    @property
    def kind(self) -> int:
        """The word's width in bytes, or that of a cast."""
        if self.cast:
            steps = self.source_step | (self.source_step // self.source_bytes * self.target_bytes) | self.target_step
            bits = self.source | steps | (self.row_bytes * self.source_bytes // self.target_bytes)
            is_wide = bits % (_VECTOR * self.source_bytes) == 0 == (self.target | self.target_step) % 8
            return self.cast + (self.cast == _WIDE_CAST and is_wide)
        places = self.position | self.position_step
        width = _low_bit(
            self.source | self.target | self.row_bytes | self.source_step | self.target_step | _WIDEST_BYTES
        )
        return width if places % WORD_BYTES == 0 else min(width, _low_bit(places))

    def peeled(self) -> Iterator[CopyRows]:
        """Split rows into head, body and tail; the body has the widest words that source and target share."""
        width = _low_bit((self.source - self.target) | self.source_step | self.target_step | _WIDEST_BYTES)
        head = -self.target % width
        body = (self.row_bytes - head) // width * width
        if self.cast or self.row_bytes < _PEELED_BYTES or body == self.row_bytes:
            yield self
            return
        for start, size in ((0, head), (head, body), (head + body, self.row_bytes - head - body)):
            if size:
                yield self._replace(
                    source=self.source + start,
                    target=self.target + start,
                    position=self.position + start,
                    row_bytes=size,
                )


def runs(
    source: Strided, target: Strided, number: int = 0, position: int = 0, is_written: bool = True
) -> Iterator[CopyRows]:
    """A copy as few runs: axes that are contiguous on both sides merge, and the longest that is left becomes the rows.

    `position` is where its elements begin, in bytes, in the digest that has this `number`.
    """
    if 0 in source.shape:
        return
    cast = 0 if source.dtype == target.dtype else CASTS[source.dtype, target.dtype]
    ours, theirs = (source.dtype.itemsize, target.dtype.itemsize)
    axes: list[tuple[int, ...]] = [(1, ours, theirs, theirs)] if cast else [(ours, 1, 1, 1)]
    place = theirs
    for size, left, right in zip(
        reversed(source.shape), reversed(source.strides), reversed(target.strides), strict=True
    ):
        length, *steps = axes[-1]
        if [left, right, place] == [length * step for step in steps]:
            axes[-1] = (length * size, *steps)
        elif size > 1:
            axes.append((size, left, right, place))
        place *= size
    (length, *_), *outer = axes
    rows, *others = sorted(outer, reverse=True) or [(1, 0, 0, 0)]
    widths = (cast, ours, theirs) if cast else (0, 1, 1)
    for index in product(*(range(size) for size, *_ in others)):
        starts = [sum(i * axis[side] for i, axis in zip(index, others, strict=True)) for side in (1, 2, 3)]
        source_step, target_step, position_step = rows[1:]
        yield from CopyRows(
            source.address + starts[0],
            target.address + starts[1],
            rows[0],
            length * widths[2],
            source_step,
            target_step,
            position + starts[2],
            position_step,
            number,
            *widths,
            int(is_written),
        ).peeled()


def cut(of: Sequence[CopyRows], words: int | None = None) -> torch.Tensor:
    """Cut runs into tiles of whole rows, or of a part of one: int64, shape [num_tiles, 11].

    Columns: source and target address; steps of source and target from row to row, in words; words of a row; words in
    all; kind; position and its step from row to row, in bytes; number of the pair; 0 for what is not written.
    """
    words = words or WORDS
    fields = [(*run[:9], kind, *_word_bytes(kind, run), run.is_written) for run in of for kind in (run.kind,)]
    table = torch.tensor(fields, dtype=torch.int64).reshape(len(of), 13)
    row_words = table[:, 3] // table[:, 11]
    # long rows are cut into pieces of equal length, short ones are taken several at a time
    per_row = (row_words + words - 1) // words  # one where rows are short: a tile is several of them then
    piece = ((row_words + per_row - 1) // per_row + 7) // 8 * 8
    high = torch.where(per_row > 1, 1, words // row_words.clamp(max=words))
    counts = (table[:, 2] + high - 1) // high * per_row
    at = torch.repeat_interleave(torch.arange(len(table)), counts)
    index = torch.arange(len(at)) - (counts.cumsum(0) - counts)[at]
    source, target, rows, _, source_step, target_step, position, place_step, number, *kinds = table[at].unbind(1)
    kind, ours, theirs, is_written = kinds
    row, word = index // per_row[at] * high[at], index % per_row[at] * piece[at]
    wide = torch.where(per_row[at] > 1, torch.minimum(piece[at], row_words[at] - word), row_words[at])
    starts = (source + row * source_step + word * ours, target + row * target_step + word * theirs)
    total, places = torch.minimum(high[at], rows - row) * wide, position + row * place_step + word * theirs
    columns = (*starts, source_step // ours, target_step // theirs, wide, total, kind, places, place_step)
    return torch.stack([*columns, number, is_written], 1)


def _word_bytes(kind: int, run: CopyRows) -> tuple[int, int]:
    """Bytes of a word in source and target."""
    if not run.cast:
        return kind, kind
    lanes = _VECTOR if kind != run.cast else 1
    return lanes * run.source_bytes, lanes * run.target_bytes


def _low_bit(number: int) -> int:
    return number & -number


# ---- the same by torch ---------------------------------------------------------------------------------------------


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View memory as integers of the same width; a complex number as two, since no integer is as wide."""
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return numbers.view(_BITS[numbers.element_size()])


def in_words(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's memory as words of four bytes (int32, flat); `None` where it is not contiguous, aligned words."""
    num_bytes, start_bytes = (n * tensor.element_size() for n in (tensor.numel(), tensor.storage_offset()))
    if not tensor.is_contiguous() or any(n % WORD_BYTES for n in (num_bytes, start_bytes, tensor.data_ptr())):
        return None
    return flat(tensor.detach()).view(torch.int32)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in a row; `view(-1)` would keep a stride that one element may have."""
    return tensor.as_strided((tensor.numel(),), (1,))


def digest_of(source: torch.Tensor, target: torch.Tensor | Strided | None = None) -> torch.Tensor:
    """The digest of a source, cast to the dtype of `target`: int64, a scalar."""
    cast = source.detach().to(source.dtype if target is None else target.dtype)
    words = in_words(cast)
    if words is None:
        data = flat(bits_of(cast).contiguous()).view(torch.uint8)
        padded = data.new_zeros(align_up(data.numel(), WORD_BYTES))
        padded[: data.numel()] = data
        words = padded.view(torch.int32)
    return sum_of(words)


def sum_of(words: torch.Tensor, position: int = 0) -> torch.Tensor:
    """The part that words (int32, flat) from `position` on, counted in words, have in a digest: int64, a scalar."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    end = position + len(words)
    for chunk in range(position // _CHUNK, -(-end // _CHUNK)):
        low, high, first = max(position, chunk * _CHUNK), min(end, (chunk + 1) * _CHUNK), chunk * _CHUNK
        weights = _weights(first % _REPEATS, words.device)[low - first : high - first]
        total += words[low - position : high - position].to(torch.int64).mul_(weights).sum()
    return total


_CHUNK = 1 << 20
_REPEATS = 1 << 32


@lru_cache(maxsize=4)
def _weights(first: int, device: torch.device) -> torch.Tensor:
    """Numbers (int64, odd, of 32 bits) of a chunk of positions, by the finalizer of MurmurHash3."""
    mixed = (torch.arange(first, first + _CHUNK, device=device) + 0x9E3779B9) % _REPEATS
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B % _REPEATS
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35 % _REPEATS
    mixed = (mixed ^ (mixed >> 16)) | 1
    return torch.where(mixed >= _REPEATS // 2, mixed - _REPEATS, mixed)


def differ(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """True (bool, a scalar, on the target's device) where the target has other bits than the source in its dtype."""
    if source.dtype == target.dtype and source.device == target.device:
        left, right = bits_of(source), bits_of(target)
    else:
        left, right = source, target
    if not right.dim():
        left, right = left[None], right[None]
    rows = max(1, _COMPARED_AT_ONCE // max(1, right[:1].numel()))
    found = [
        (bits_of(mine.to(right.device, right.dtype)) != bits_of(theirs)).any()
        for mine, theirs in zip(left.split(rows), right.split(rows), strict=True)
    ]
    return torch.stack(found).any()
