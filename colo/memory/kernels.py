"""Triton kernels: memory read in many places in one launch, and masters in two bytes.

Import through `colo.memory.triton_kernels`.
"""

import torch
import triton
import triton.language as tl

from colo.memory.tiles import WORDS

_BLOCK = 4096
"""Words, or masters, that one program handles at a time."""


@triton.jit
def _weigh(
    tiles,
    of_column,
    of_row,
    of_chunk,
    sums,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 4
    memory = tl.load(tile).to(tl.pointer_type(tl.int32))
    position = tl.load(tile + 1)
    count = tl.load(tile + 3)
    # Tiles do not cross chunks, so positions within the chunk are enough. Each round handles one row of columns.
    first = (position % (COLUMNS * ROWS)).to(tl.int32)
    last = first + count.to(tl.int32)
    columns = tl.arange(0, COLUMNS)
    column = tl.load(of_column + columns)
    total = tl.zeros([COLUMNS], tl.int64)
    for row in range(first // COLUMNS, tl.cdiv(last, COLUMNS)):
        at = row * COLUMNS + columns
        words = tl.load(memory + (at - first), mask=(at >= first) & (at < last), other=0)
        product = column * tl.load(of_row + row)
        mixed = product ^ (product.to(tl.uint64) >> 32).to(tl.int64) | 1
        total += words.to(tl.int64) * mixed
    chunk = tl.load(of_chunk + position // (COLUMNS * ROWS) % CHUNKS)
    tl.atomic_add(sums + tl.load(tile + 2), tl.sum(total) * chunk)


@triton.jit
def _compare(tiles, flags, BLOCK: tl.constexpr):
    tile = tiles + tl.program_id(0) * 4
    left = tl.load(tile).to(tl.pointer_type(tl.int32))
    right = tl.load(tile + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(tile + 3)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < count
        found |= tl.load(left + offsets, mask=inside, other=0) ^ tl.load(right + offsets, mask=inside, other=0)
    if tl.max((found != 0).to(tl.int32)) != 0:
        tl.store(flags + tl.load(tile + 2), 1)


@triton.jit
def _join(weights, remainders, masters, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    upper = tl.load(weights + at, mask=inside, other=0).to(tl.int32)
    tl.store(masters + at, (upper << 16) + tl.load(remainders + at, mask=inside, other=0).to(tl.int32), mask=inside)


@triton.jit
def _split(masters, weights, remainders, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bits = tl.load(masters + at, mask=inside, other=0)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    upper = (bits + 0x8000) >> 16
    remainder = tl.where(is_nan, 0, bits - (upper << 16))
    upper = tl.where(is_nan, tl.where(bits < 0, -64, 0x7FC0), upper)
    tl.store(weights + at, upper.to(tl.int16), mask=inside)
    tl.store(remainders + at, remainder.to(tl.int16), mask=inside)


def join_masters(weights: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Bits of fp32 masters (int32); `weights` and `remainders` are int16: see `colo.trainer.remainders.join`."""
    masters = torch.empty_like(weights, dtype=torch.int32)
    _launch_over(masters, _join, weights, remainders, masters)
    return masters


def split_masters(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of bf16 weights, and remainders (both int16), of the bits of masters (int32); see `split` there."""
    weights, remainders = (torch.empty_like(masters, dtype=torch.int16) for _ in range(2))
    _launch_over(masters, _split, masters, weights, remainders)
    return weights, remainders


def _launch_over(elements, kernel, *arguments) -> None:
    if count := elements.numel():
        with torch.cuda.device_of(elements):
            kernel[(triton.cdiv(count, _BLOCK),)](*arguments, count, BLOCK=_BLOCK)


def weigh(tiles: torch.Tensor, weights: tuple[torch.Tensor, ...], sums: torch.Tensor) -> None:
    """Queue the kernel that computes the checksums of `colo.memory.checksum` and adds them to `sums`.

    `tiles` (int64, shape [num_tiles, 4]): address, position, index into `sums`, and number of words; none crosses a
    chunk. `weights` (int64): of columns, rows and chunks; the number of columns is a power of two.
    """
    columns, rows, chunks = (len(part) for part in weights)
    _launch(_weigh, tiles, *weights, sums, COLUMNS=columns, ROWS=rows, CHUNKS=chunks, num_warps=8)


def compare(tiles: torch.Tensor, flags: torch.Tensor) -> None:
    """Queue the kernel that sets a flag (int32) where two memories differ.

    `tiles` (int64, shape [num_tiles, 4]): two addresses, index into `flags`, and number of words.
    """
    _launch(_compare, tiles, flags, BLOCK=_BLOCK)


def _launch(kernel, tiles, *arguments, **constants) -> None:
    if len(tiles):
        with torch.cuda.device_of(tiles):
            kernel[(len(tiles),)](tiles, *arguments, **constants)


def try_out(device: torch.device) -> None:
    """Compile the kernels for `device` and check their results. Raises: Triton's errors; `RuntimeError`."""
    words = torch.arange(2 * WORDS, dtype=torch.int32, device=device)
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    address, other = words.data_ptr(), words[WORDS:].data_ptr()
    rows = [[address, address, 0, WORDS], [address, other, 1, WORDS]]
    compare(torch.tensor(rows, dtype=torch.int64, device=device), flags)
    weights = tuple(torch.ones(1 << n, dtype=torch.int64, device=device) for n in (10, 10, 14))
    weigh(torch.tensor([[address, 1022, 0, 4]], dtype=torch.int64, device=device), weights, sums)
    split = split_masters(torch.tensor([0x3F808001, -0x00400001], dtype=torch.int32, device=device))
    joined = join_masters(*split)
    if [*(half.tolist() for half in split), joined.tolist()] != [
        [0x3F81, -64],
        [-0x7FFF, 0],
        [0x3F808001, -0x00400000],
    ]:
        raise RuntimeError(f"Triton's kernels are wrong: {split}, {joined}")
    if (flags.tolist(), sums.tolist()) != ([0, 1], [6]):
        raise RuntimeError(f"Triton's kernels are wrong: {flags.tolist()}, {sums.tolist()}")
