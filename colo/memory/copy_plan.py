"""Copies between strided pieces of memory, recorded once and made in one launch: `CopyPlan(pairs).replay()`.

The same plan digests what it copies and compares both sides. Bits are kept, payloads of NaN too, but for casts.

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

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import torch

from colo.units import MIB, align_up

_LARGE_BYTES = 16 * MIB
"""torch copies a tensor of this size by itself, at full speed, and smaller ones fused, at two thirds of it."""

Pair = tuple[torch.Tensor, "torch.Tensor | Strided"]  # source and target, of the same shape


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
        self._kernels = kernels(self.device)
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
        # copied to the device once: a replay is a launch and nothing else
        self._table = _spread([cut(group, words) for group in fused]).to(self.device)
        self._others_there = torch.tensor(list(self._others), dtype=torch.int64, device="cpu").to(self.device)

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
            # a plain copy writes no numbers, but Triton wants a pointer
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
    places = torch.cat(
        [(torch.arange(len(part), dtype=torch.float64, device="cpu") + 0.5) / max(1, len(part)) for part in every]
    )
    return torch.cat(every)[places.argsort(stable=True)]


def is_fusable(source: torch.Tensor, target: torch.Tensor | Strided, device: torch.device) -> bool:
    """True if the kernel of `device` copies from the one to the other."""
    # a `Strided` lies where kernels of `device` reach it, on whichever GPU
    is_here = source.device == device and (isinstance(target, Strided) or target.device == device)
    return is_here and (source.dtype == target.dtype or (source.dtype, target.dtype) in CASTS)


WORD_BYTES = 4  # bytes of a digest's words

WORDS = 2048
"""Words of a tile at most; a multiple of 8, so that cuts of long rows stay whole lines of 128 bytes."""

CASTS = {
    # even numbers, so that the wide form of a cast can be the next one
    (torch.float32, torch.bfloat16): 32,
    (torch.bfloat16, torch.float32): 34,
    (torch.float32, torch.float16): 36,
    (torch.float16, torch.float32): 38,
    (torch.bfloat16, torch.float16): 40,
    (torch.float16, torch.bfloat16): 42,
}
"""Kinds of tiles whose elements are cast, one at a time; the first also exists, as kind 33, four at a time."""

_WIDEST_BYTES = 16
# the one cast that has a wide form: fp32 masters to bf16 weights
_WIDE_CAST = 32
_VECTOR = 4
_PEELED_BYTES = 256
"""From this size on a row is worth runs of their own for its unaligned ends."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED_AT_ONCE = 1 << 24  # elements that torch compares in one launch; each takes a byte of workspace


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
    """Equally long rows of bytes, at even distances; steps from row to row are in bytes, and 0 for a single row."""

    source: int
    target: int
    rows: int
    row_bytes: int  # bytes of a row in the target
    source_step: int = 0
    target_step: int = 0
    position: int = 0  # bytes of the pair, in a row as the target has them, that come before
    position_step: int = 0
    number: int = 0  # the pair's
    cast: int = 0  # a kind of `CASTS`; 0 for bytes that are copied as they are
    source_bytes: int = 1  # bytes of an element; 1 for what is not cast
    target_bytes: int = 1
    is_written: int = 1  # 0 for what is only digested

    @property
    def kind(self) -> int:
        """The word's width in bytes, or that of a cast."""
        if self.cast:
            # numbers or-ed together end in zero bits only where each of them does: one test tells all alignments
            steps = self.source_step | (self.source_step // self.source_bytes * self.target_bytes) | self.target_step
            bits = self.source | steps | (self.row_bytes * self.source_bytes // self.target_bytes)
            is_wide = bits % (_VECTOR * self.source_bytes) == 0 == (self.target | self.target_step) % 8
            return self.cast + (self.cast == _WIDE_CAST and is_wide)
        places = self.position | self.position_step
        width = _low_bit(
            self.source | self.target | self.row_bytes | self.source_step | self.target_step | _WIDEST_BYTES
        )
        # a copied word must lie within one word of the digest, which counts from the pair's first byte
        return width if places % WORD_BYTES == 0 else min(width, _low_bit(places))

    def peeled(self) -> Iterator[CopyRows]:
        """Split rows into head, body and tail; the body has the widest words that source and target share."""
        # once the target is aligned to this width the source is too: their distance is a multiple of it
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
    # an axis: length, step in source, in target, in the digest; without a cast bytes are counted, whatever the dtype
    axes: list[tuple[int, ...]] = [(1, ours, theirs, theirs)] if cast else [(ours, 1, 1, 1)]
    place = theirs
    for size, left, right in zip(
        reversed(source.shape), reversed(source.strides), reversed(target.strides), strict=True
    ):
        length, *steps = axes[-1]
        # merged only where all three go on: a row's digest positions have to be as regular as its addresses
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
    # what follows is done by torch for all runs at once: a large model has some hundred thousand tiles
    fields = [(*run[:9], kind, *_word_bytes(kind, run), run.is_written) for run in of for kind in (run.kind,)]
    table = torch.tensor(fields, dtype=torch.int64, device="cpu").reshape(len(of), 13)
    row_words = table[:, 3] // table[:, 11]
    # long rows are cut into pieces of equal length, short ones are taken several at a time
    per_row = (row_words + words - 1) // words  # one where rows are short: a tile is several of them then
    piece = ((row_words + per_row - 1) // per_row + 7) // 8 * 8
    high = torch.where(per_row > 1, 1, words // row_words.clamp(max=words))
    counts = (table[:, 2] + high - 1) // high * per_row
    at = torch.repeat_interleave(torch.arange(len(table), device="cpu"), counts)
    index = torch.arange(len(at), device="cpu") - (counts.cumsum(0) - counts)[at]
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
    # `view` to a wider dtype refuses an offset of half a word, and nobody checks the address but us
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


# words whose weights are made at once: those of a whole tensor would take twice its bytes
_CHUNK = 1 << 20
# the kernel counts positions in 32 bits
_REPEATS = 1 << 32


@lru_cache(maxsize=4)
def _weights(first: int, device: torch.device) -> torch.Tensor:
    """Numbers (int64, odd, of 32 bits) of a chunk of positions, by the finalizer of MurmurHash3."""
    mixed = (torch.arange(first, first + _CHUNK, device=device) + 0x9E3779B9) % _REPEATS
    # the product overflows int64, which changes nothing modulo 2^32
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B % _REPEATS
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35 % _REPEATS
    mixed = (mixed ^ (mixed >> 16)) | 1
    # as int32 reads the same bits: the kernel multiplies signed numbers
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


@cache
def kernels(device: torch.device) -> ModuleType | None:
    """The compiled kernels of `colo.memory.kernels`; `None` on a CPU and, with a warning, where Triton fails."""
    if device.type != "cuda":
        return None
    if isinstance(_tried(device).result(), torch.OutOfMemoryError):
        _tried.cache_clear()  # of that moment, not of this machine
    error = _tried(device).result()
    if isinstance(error, torch.OutOfMemoryError):
        _tried.cache_clear()
        raise error
    if error is not None:
        warnings.warn(f"weights are checked without Triton, which is slower: {error}", RuntimeWarning, stacklevel=2)
        return None
    from colo.memory import kernels as compiled

    return compiled


def compile_ahead(device: torch.device) -> None:
    """Begin to compile the kernels for a GPU, beside what the caller does next.

    `kernels` waits for them, and so does the process where it ends before.
    """
    if device.type == "cuda":
        _tried(device)


@cache
def _tried(device: torch.device) -> Future[Exception | None]:
    """Start `try_out` for a device in a thread, once; the future has its error, if any."""

    def trial() -> Exception | None:
        try:
            try_out(device)
        except Exception as error:  # noqa: BLE001 - Triton may lack a compiler, a driver's library, or the GPU's support
            return error.with_traceback(None)  # whose frames would keep tensors, as long as it is kept
        return None

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="colo-compile")
    tried = pool.submit(trial)
    pool.shutdown(wait=False)
    return tried


def try_out(device: torch.device, *, at_once: int = 8) -> None:
    """Compile the kernels for `device`, `at_once` of them at a time, and check their results.

    Raises: Triton's errors; `RuntimeError` for a wrong result.
    """
    trials: list[Callable[[torch.device], None]]
    trials = [partial(_try_walk, doing) for doing in ("copy", "digest", "copy and digest", "compare")]
    trials += [_try_split, _try_round, _try_close_and_open]
    with ThreadPoolExecutor(at_once, thread_name_prefix="colo-compile") as pool:
        for _ in pool.map(lambda trial: trial(device), trials):
            pass


def _try_walk(doing: str, device: torch.device) -> None:
    from colo.memory import kernels as compiled

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (4 * WORDS + 24,), generator=generator, device="cpu")
    words = drawn.to(torch.int32).to(device)
    halves, small = words.view(torch.int16)[: 6 * 40].view(6, 40), words.view(torch.uint8)
    numbers = (words[:40] % 60_000).float() / 7  # not of the default dtype, which vLLM changes while it loads
    # words of every width, by odd offsets, gaps between rows and a transpose
    sources = [words, words[1:7], words[2:8], small[1:42], halves[:, 3:34], halves[:, :9].t()]
    pairs = [(source, torch.zeros_like(source)) for source in sources]
    pairs += [(numbers[1:], torch.zeros(39, dtype=torch.bfloat16, device=device))]  # a cast that is not wide
    pairs += [(numbers.to(source), torch.zeros(40, dtype=target, device=device)) for source, target in CASTS]
    spans = [(Strided.of(source), Strided.of(target)) for source, target in pairs]
    of = [run for number, (source, target) in enumerate(spans) for run in runs(source, target, number)]
    table, found = cut(of).to(device), torch.zeros(len(pairs), dtype=torch.int64, device=device)
    compiled.walk(table, found, doing)
    sums, differing = [int(digest_of(*pair)) for pair in pairs], [1] * len(pairs)
    expected = sums if "digest" in doing else differing if doing == "compare" else [0] * len(pairs)
    # only a copy writes; a comparison runs again after torch's copy, so that it gives both answers
    left = [int(differ(*pair)) for pair in pairs]
    if found.tolist() != expected or left != ([0] * len(pairs) if "copy" in doing else differing):
        raise RuntimeError(f"Triton's kernels are wrong: {doing}, {found.tolist()}, {expected}, {left}")
    if doing == "compare":
        copy_all([target for _, target in pairs], [source for source, _ in pairs])
        compiled.walk(table, found.zero_(), doing)
        if found.any():
            raise RuntimeError(f"Triton's kernels are wrong: {doing}, {found.tolist()}")


def _try_split(device: torch.device) -> None:
    from colo.memory import kernels as compiled

    split = compiled.split_masters(torch.tensor([0x3F808001, -0x00400001], dtype=torch.int32, device=device))
    if [half.tolist() for half in split] != [[0x3F81, -64], [-0x7FFF, 0]]:
        raise RuntimeError(f"Triton's kernels are wrong: {split}")


def _try_round(device: torch.device) -> None:
    from colo.memory import kernels as compiled

    values = torch.tensor([0x3F810000, -0x00800000, 0x7FFFFFFF] + [0x3F808000] * 997, dtype=torch.int32, device=device)
    rounded = torch.zeros(len(values), dtype=torch.int16, device=device)
    compiled.round_stochastically(values, rounded, 7)
    exact, ups = rounded[:3].tolist(), int(rounded[3:].sum()) - 997 * 0x3F80
    if exact != [0x3F81, -0x80, 0x7FC0] or rounded[3:].unique().tolist() != [0x3F80, 0x3F81] or not 400 < ups < 600:
        raise RuntimeError(f"Triton's kernels are wrong: {exact}, {ups}")


def _try_close_and_open(device: torch.device) -> None:
    from colo.memory import kernels as compiled

    numbers = torch.tensor([1, 3, 5, 7], dtype=torch.int32, device=device)
    masters = torch.tensor([0x3F808001, -0x00400001, 0x40000000, 0x7FFF, 0x8000], dtype=torch.int32, device=device)
    weights, kept = (torch.zeros(5, dtype=torch.int16, device=device) for _ in "12")
    digests, changed = (torch.zeros(size, dtype=torch.int64, device=device) for size in (2, 1))
    compiled.close_masters(masters, weights, kept, digests, numbers, changed)
    opened, written = torch.empty_like(masters), torch.empty_like(masters)
    compiled.open_masters(weights, kept, digests, numbers, opened)
    compiled.open_masters(weights, kept, digests + 1, numbers, written)
    told = [found.tolist() for found in (weights, digests, changed, opened, written)]
    if told != [
        [0x3F81, -64, 0x4000, 0, 1],
        [0x3F81 - 3 * 64 + 5 * 0x4000, 1],
        [4],
        [0x3F808001, -0x00400000, 0x40000000, 0x7FFF, 0x8000],
        [0x3F810000, -0x00400000, 0x40000000, 0, 0x10000],
    ]:
        raise RuntimeError(f"Triton's kernels are wrong: {told}")


def wait_for_queued(device: torch.device) -> None:
    """Return when everything queued on the current stream of a GPU has run. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
