"""Cut a list of tensors into buckets of bounded size. Imports no torch and allocates nothing.

A bucket is the unit of a transfer: one staging buffer, filled by the sender and emptied by the receiver. Both sides
compute the same plan from the same manifest, so that only bytes have to travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from colo.units import align_up
from colo.weights.manifest import DTYPE_BYTES, TensorSpec

ALIGNMENT_BYTES = 256
"""What `cudaMalloc` guarantees for an address, so that every dtype and every vectorized kernel can work in place."""

_LARGEST_ELEMENT_BYTES = max(DTYPE_BYTES.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A byte range of one tensor and its place in a bucket."""

    name: str
    """Name of the tensor."""

    start_bytes: int
    """Where the range starts within the contiguous tensor; a multiple of the alignment."""

    size_bytes: int
    """Length of the range: whole elements. Zero only for a tensor without elements."""

    offset_bytes: int
    """Where the range lies in the bucket; a multiple of the alignment."""

    @property
    def stop_bytes(self) -> int:
        """Where the range stops within the contiguous tensor."""
        return self.start_bytes + self.size_bytes

    @property
    def end_bytes(self) -> int:
        """Where the range ends in the bucket."""
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Pieces that travel together, in order of their offsets."""

    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer that the pieces need, the gaps of the alignment included."""
        return self.pieces[-1].end_bytes if self.pieces else 0


def plan_buckets(specs: Iterable[TensorSpec], *, bucket_bytes: int, alignment: int = ALIGNMENT_BYTES) -> list[Bucket]:
    """Cut tensors, in order, into buckets of at most `bucket_bytes`.

    Every byte of every tensor is in exactly one piece, and every tensor in at least one: a tensor without elements has
    one empty piece. A tensor that fits an empty bucket is never cut, so most tensors can be used as views of the
    buffer; a larger one is cut at multiples of `alignment`, which no element straddles, and starts in what is left
    of the bucket before it.

    Raises: `ValueError` for an alignment that is not a power of two of at least 16 (the largest element), for a bucket
    too small for one aligned block, and for a name that comes twice.
    """
    items = list(specs)
    _check_names(items)
    _check_sizes(bucket_bytes, alignment)
    packer = _Packer(bucket_bytes, alignment)
    for spec in items:
        packer.add(spec)
    return packer.buckets()


class _Packer:
    """Buckets under construction: whole ones, and the pieces of the one that still has room."""

    def __init__(self, bucket_bytes: int, alignment: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.alignment = alignment
        self.whole: list[Bucket] = []
        self.pieces: list[Piece] = []

    def buckets(self) -> list[Bucket]:
        self._close()
        return self.whole

    def add(self, spec: TensorSpec) -> None:
        wanted = spec.size_bytes
        if self._free_bytes() < wanted <= self.bucket_bytes:
            self._close()
        start = self._place(spec.name, 0, wanted)
        while start < wanted:
            self._close()
            start = self._place(spec.name, start, wanted)

    def _place(self, name: str, start: int, stop: int) -> int:
        """Put as much of `start` to `stop` as there is room for into the open bucket; returns where it stopped."""
        free, size = self._free_bytes(), stop - start
        if size > free:
            size = free // self.alignment * self.alignment
            if size <= 0:
                return start
        piece = Piece(name=name, start_bytes=start, size_bytes=size, offset_bytes=self.bucket_bytes - free)
        self.pieces.append(piece)
        return piece.stop_bytes

    def _free_bytes(self) -> int:
        """Room behind the last piece; negative when the alignment would already step over the end."""
        return self.bucket_bytes - align_up(self.pieces[-1].end_bytes if self.pieces else 0, self.alignment)

    def _close(self) -> None:
        if self.pieces:
            self.whole.append(Bucket(pieces=tuple(self.pieces)))
            self.pieces = []


def _check_names(specs: Sequence[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        doubled = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{doubled} is listed more than once: a plan holds every tensor once")


def _check_sizes(bucket_bytes: int, alignment: int) -> None:
    if alignment < _LARGEST_ELEMENT_BYTES or alignment & (alignment - 1):
        raise ValueError(
            f"alignment must be a power of two of at least {_LARGEST_ELEMENT_BYTES} bytes, so that no cut goes "
            f"through an element, but is {alignment}"
        )
    if bucket_bytes < alignment:
        raise ValueError(
            f"a bucket of {bucket_bytes} bytes cannot hold one aligned block of {alignment} bytes: bucket_bytes must "
            f"be at least {alignment}"
        )
