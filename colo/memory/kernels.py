"""Triton kernels: memory copied, digested or compared in many places in one launch, and masters in two bytes.

Import through `colo.memory.copy_plan`.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # masters that one program handles

_WORDS_AT_ONCE = 1024  # words of a tile that a program loads before it stores the first

_TILES_PER_PROGRAM = 4  # few, so that NCCL's blocks come in as soon as programs end


@triton.jit
def _number_of(position):
    """The odd number (int32) of a word's position in a digest: see `colo.memory.copy_plan`."""
    mixed = position.to(tl.uint32) + 0x9E3779B9
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    return ((mixed ^ (mixed >> 16)) | 1).to(tl.int32, bitcast=True)


@triton.jit
def _weighed(bits, byte, WIDTH: tl.constexpr):
    """The part of a digest (int64) that elements of `WIDTH` bytes have: words of four bytes, or parts of such."""
    words = bits.to(tl.int32)
    if WIDTH < 4:
        mask: tl.constexpr = (1 << (8 * WIDTH)) - 1
        # widening has copied the sign into bits that belong to the word's other elements
        words = (words & mask) << ((byte & 3) * 8).to(tl.int32)
    return words.to(tl.int64) * _number_of(byte >> 2).to(tl.int64)


@triton.jit
def _rounded(numbers):
    """Bits of the nearest bf16, the even one of two, as torch rounds; a NaN becomes the plain one."""
    numbers = numbers.to(tl.float32)
    bits = numbers.to(tl.int32, bitcast=True)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(numbers != numbers, 0x7FC0, upper).to(tl.int16)


@triton.jit
def _walk_tile(
    tile,
    found,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    COPY: tl.constexpr,
    DIGEST: tl.constexpr,
    COMPARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Handle one tile, in words of `LANES` elements, which are read as `SOURCE` and are `TARGET`, of `BITS`, then."""
    width: tl.constexpr = BITS.primitive_bitwidth // 8
    # lets Triton load and store words whole; `CopyRows.kind` has chosen them so that they are aligned
    source = tl.multiple_of(tl.load(tile).to(tl.pointer_type(SOURCE)), LANES * SOURCE.primitive_bitwidth // 8)
    target = tl.multiple_of(tl.load(tile + 1).to(tl.pointer_type(TARGET)), LANES * width)
    source_step = tl.load(tile + 2)
    target_step = tl.load(tile + 3)
    row_words = tl.load(tile + 4).to(tl.int32)
    words = tl.load(tile + 5).to(tl.int32)
    position = tl.load(tile + 7)
    position_step = tl.load(tile + 8)
    # none of a tile that is only digested
    written = words * tl.load(tile + 10).to(tl.int32)
    lanes = tl.arange(0, LANES)[None, :]
    sums = tl.zeros([BLOCK], tl.int64)
    others = tl.zeros([BLOCK, LANES], tl.int32)
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = at // row_words
        column = (at - row * row_words).to(tl.int64)
        inside = (at < words)[:, None]
        elements = tl.load(source + ((row * source_step + column) * LANES)[:, None] + lanes, mask=inside, other=0)
        there = target + ((row * target_step + column) * LANES)[:, None] + lanes
        # bits have to be those that torch's own cast makes, of NaN too
        if TARGET == tl.bfloat16 and SOURCE != tl.bfloat16:  # noqa: SIM300 - constants of a call
            bits = _rounded(elements)
        else:
            bits = elements.to(TARGET).to(BITS, bitcast=True)
        if COPY:
            tl.store(there, bits.to(TARGET, bitcast=True), mask=(at < written)[:, None])
        if COMPARE:
            theirs = tl.load(there, mask=inside, other=0).to(BITS, bitcast=True)
            others |= tl.where(inside & (bits != theirs), 1, 0)
        if DIGEST:
            byte = (position + row * position_step + column * (LANES * width))[:, None] + lanes * width
            sums += tl.sum(tl.where(inside, _weighed(bits, byte, width), 0), 1)
    if DIGEST:
        # integers, so that the order in which programs add does not matter
        tl.atomic_add(found + tl.load(tile + 9), tl.sum(sums))
    if COMPARE:  # noqa: SIM102 - Triton decides only this at compile time
        if tl.max(tl.max(others, 1)) != 0:
            tl.store(found + tl.load(tile + 9), 1)


# Triton would compile the kernel once more for a `count` of 1 and for multiples of 16
@triton.jit(do_not_specialize=["count"])
def _walk(tiles, found, count, COPY: tl.constexpr, DIGEST: tl.constexpr, COMPARE: tl.constexpr, BLOCK: tl.constexpr):
    # tiles of one program are far apart in the table, so that local and remote ones load every multiprocessor alike
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = tiles + number * 11
        kind = tl.load(tile + 6)
        # aligned words and the wide cast first: nearly every tile of a model is one of the two
        if kind == 16:
            _walk_tile(tile, found, tl.int32, tl.int32, tl.int32, 4, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 33:
            _walk_tile(tile, found, tl.float32, tl.bfloat16, tl.int16, 4, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 8:
            _walk_tile(tile, found, tl.int32, tl.int32, tl.int32, 2, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 4:
            _walk_tile(tile, found, tl.int32, tl.int32, tl.int32, 1, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 2:
            _walk_tile(tile, found, tl.int16, tl.int16, tl.int16, 1, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 1:
            _walk_tile(tile, found, tl.int8, tl.int8, tl.int8, 1, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 32:
            _walk_tile(tile, found, tl.float32, tl.bfloat16, tl.int16, 1, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 34:
            _walk_tile(tile, found, tl.bfloat16, tl.float32, tl.int32, 1, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 36:
            _walk_tile(tile, found, tl.float32, tl.float16, tl.int16, 1, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 38:
            _walk_tile(tile, found, tl.float16, tl.float32, tl.int32, 1, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 40:
            _walk_tile(tile, found, tl.bfloat16, tl.float16, tl.int16, 1, COPY, DIGEST, COMPARE, BLOCK)
        elif kind == 42:
            _walk_tile(tile, found, tl.float16, tl.bfloat16, tl.int16, 1, COPY, DIGEST, COMPARE, BLOCK)


@triton.jit
def _split(masters, weights, remainders, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bits = tl.load(masters + at, mask=inside, other=0)
    # rounding could carry a NaN's payload into the exponent: it becomes a plain NaN (-64 is 0xFFC0) without a remainder
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    upper = (bits + 0x8000) >> 16
    remainder = tl.where(is_nan, 0, bits - (upper << 16))
    upper = tl.where(is_nan, tl.where(bits < 0, -64, 0x7FC0), upper)
    tl.store(weights + at, upper.to(tl.int16), mask=inside)
    tl.store(remainders + at, remainder.to(tl.int16), mask=inside)


@triton.jit
def _open(weights, remainders, digests, numbers, masters, count, BLOCK: tl.constexpr):
    """Join a block of weights with its remainders, or with zeros where the block's digest is another."""
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK + lane
    inside = at < count
    weight = tl.load(weights + at, mask=inside, other=0).to(tl.int32)
    digest = tl.sum((weight * tl.load(numbers + lane)).to(tl.int64))
    # a block of weights that somebody has written to is its own master
    is_same = digest == tl.load(digests + tl.program_id(0))
    remainder = tl.load(remainders + at, mask=inside, other=0).to(tl.int32)
    tl.store(masters + at, (weight << 16) + tl.where(is_same, remainder, 0), mask=inside)


@triton.jit
def _close(masters, weights, remainders, digests, numbers, changed, count, BLOCK: tl.constexpr):
    """Split a block of masters, digest its weights and count those that are others than before."""
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK + lane
    inside = at < count
    bits = tl.load(masters + at, mask=inside, other=0)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    upper = (bits + 0x8000) >> 16
    remainder = tl.where(is_nan, 0, bits - (upper << 16))
    weight = tl.where(is_nan, tl.where(bits < 0, -64, 0x7FC0), upper).to(tl.int16)
    before = tl.load(weights + at, mask=inside, other=0)
    # ahead of the stores, after which reducing what was loaded takes thrice as long
    tl.atomic_add(changed, tl.sum(tl.where(inside & (weight != before), 1, 0)).to(tl.int64))
    tl.store(weights + at, weight, mask=inside)
    tl.store(remainders + at, remainder.to(tl.int16), mask=inside)
    tl.store(digests + tl.program_id(0), tl.sum((weight.to(tl.int32) * tl.load(numbers + lane)).to(tl.int64)))


@triton.jit(do_not_specialize=["seed"])
def _round(values, rounded, seed, count, BLOCK: tl.constexpr):
    # one call of the generator makes 128 random bits, enough for eight elements, which lie an eighth of a block apart
    place = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    numbers = tl.randint4x(seed, place)
    for number in tl.static_range(4):
        for half in tl.static_range(2):
            at = tl.program_id(0) * BLOCK + (2 * number + half) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
            inside = at < count
            bits = tl.load(values + at, mask=inside, other=0)
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            # a carry from the lower half, with a probability of its share of the upper half's last place
            random = ((numbers[number] >> (16 * half)) & 0xFFFF).to(tl.int32)
            upper = (bits + tl.where((bits & 0x7FFF0000) == 0x7F7F0000, 0, random)) >> 16  # none to infinity
            tl.store(rounded + at, tl.where(is_nan, 0x7FC0, upper).to(tl.int16), mask=inside)


def round_stochastically(values, rounded, seed: int) -> None:
    """Round bits of fp32 values (int32) to those of bf16 ones (int16); see `round_stochastically` of remainders."""
    if count := values.numel():
        with torch.cuda.device_of(values):
            _round[(triton.cdiv(count, _BLOCK),)](values, rounded, seed, count, BLOCK=_BLOCK)


def open_masters(weights, remainders, digests, numbers, masters) -> None:
    """Write bits of masters (int32) for weights, remainders (int16) and digests: see `open_masters` of remainders."""
    if count := weights.numel():
        # Triton launches on the current device, which need not be that of its arguments
        with torch.cuda.device_of(weights):
            size = numbers.numel()
            _open[(triton.cdiv(count, size),)](weights, remainders, digests, numbers, masters, count, BLOCK=size)


def close_masters(masters, weights, remainders, digests, numbers, changed) -> None:
    """Write masters (int32) back as weights, remainders and digests, and add to `changed`; see there."""
    if count := weights.numel():
        with torch.cuda.device_of(weights):
            size = numbers.numel()
            grid = (triton.cdiv(count, size),)
            _close[grid](masters, weights, remainders, digests, numbers, changed, count, BLOCK=size)


def split_masters(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of bf16 weights, and remainders (both int16), of the bits of masters (int32); see `split` there."""
    weights, remainders = (torch.empty_like(masters, dtype=torch.int16) for _ in range(2))
    if count := masters.numel():
        with torch.cuda.device_of(masters):
            _split[(triton.cdiv(count, _BLOCK),)](masters, weights, remainders, count, BLOCK=_BLOCK)
    return weights, remainders


def walk(table: torch.Tensor, found: torch.Tensor, doing: str) -> None:
    """Queue the kernel that copies, digests or compares a table of `colo.memory.copy_plan.cut`.

    `found` (int64) has a number for each pair, 0 before: a digest is added to it, a difference makes it 1. `doing` is
    "copy", "digest", "copy and digest" or "compare".
    """
    programs = triton.cdiv(len(table), _TILES_PER_PROGRAM)
    switches = {"COPY": "copy" in doing, "DIGEST": "digest" in doing, "COMPARE": doing == "compare"}
    with torch.cuda.device_of(table):
        _walk[(programs,)](table, found, len(table), **switches, BLOCK=_WORDS_AT_ONCE, num_warps=8)
