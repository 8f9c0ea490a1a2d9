"""Cut a list of tensors into buckets of bounded size. Imports no torch and allocates nothing.

A bucket is the unit of a transfer: one staging buffer, filled by the sender and emptied by the receiver. Both sides
compute the same plan from the same manifest, so that only bytes have to travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from colo.units import align_up
from colo.weights.manifest import TensorSpec

ALIGNMENT_BYTES = 256
"""What `cudaMalloc` guarantees for an address, so that every dtype and every vectorized kernel can work in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A byte range of one tensor and its place in a bucket."""

    name: str
    """Name of the tensor."""

    start_bytes: int
    """Where the range starts within the contiguous tensor; a multiple of `ALIGNMENT_BYTES`."""

    size_bytes: int
    """Length of the range: whole elements. Zero only for a tensor without elements."""

    offset_bytes: int
    """Where the range lies in the bucket; a multiple of `ALIGNMENT_BYTES`."""

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


def plan_buckets(specs: Iterable[TensorSpec], *, bucket_bytes: int) -> list[Bucket]:
    """Cut the tensors of a manifest, in order, into buckets of at most `bucket_bytes`.

    Every byte of every tensor is in exactly one piece, and every tensor in at least one: a tensor without elements has
    one empty piece. A tensor that fits an empty bucket is never cut, so most tensors can be used as views of the
    buffer; a larger one is cut at multiples of `ALIGNMENT_BYTES`, which no element straddles, and starts in what is
    left of the bucket before it.

    Raises: `ValueError` for a bucket too small for one aligned block.
    """
    if bucket_bytes < ALIGNMENT_BYTES:
        raise ValueError(
            f"a bucket of {bucket_bytes} bytes cannot hold one aligned block of {ALIGNMENT_BYTES} bytes: bucket_bytes "
            f"must be at least {ALIGNMENT_BYTES}"
        )
    buckets: list[list[Piece]] = [[]]
    offset = 0  # of the next piece in the last bucket
    for spec in specs:
        if bucket_bytes - offset < spec.size_bytes <= bucket_bytes:
            buckets.append([])
            offset = 0
        start = 0
        while True:
            size, room = spec.size_bytes - start, bucket_bytes - offset
            if size > room:
                size = room // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if size > 0 or not spec.size_bytes:
                buckets[-1].append(Piece(name=spec.name, start_bytes=start, size_bytes=size, offset_bytes=offset))
                start += size
                offset = align_up(offset + size, ALIGNMENT_BYTES)
            if start == spec.size_bytes:
                break
            buckets.append([])
            offset = 0
    return [Bucket(pieces=tuple(pieces)) for pieces in buckets if pieces]
