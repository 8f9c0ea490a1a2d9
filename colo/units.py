"""Bytes and seconds as people read and write them. Units are binary (GiB) unless a name says otherwise."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import TypeVar

T = TypeVar("T")

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {"": 1, "b": 1}
_FACTORS |= {f"{p}{rest}": 1 << (10 * (i + 1)) for i, p in enumerate("kmgt") for rest in ("ib", "i", "")}
_FACTORS |= {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_MOST_BITS = 2000
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int, *, least_bytes: int = 0) -> int:
    """Read a size such as `80GiB`, `80G`, which is the same, `24GB`, `1.5 GiB` or a plain number of bytes.

    Raises: `ValueError` naming the text and the units that are understood, or for fewer than `least_bytes`.
    """
    check_digits("the size", text)
    match = _QUANTITY.fullmatch(str(text))
    if not match or match[2].lower() not in _FACTORS:
        raise ValueError(f"cannot read {text!r} as a size: write for example 80GiB, 80G, 24GB or 1073741824")
    size = float(match[1]) * _FACTORS[match[2].lower()]
    if size == float("inf"):
        raise ValueError(f"{text!r:.40} is more than any size: write for example 80GiB")
    num_bytes = round(size)
    if num_bytes < least_bytes:
        unit = f": write {match[1]}GiB, or another unit" if num_bytes and not match[2] else ""
        least = format_bytes(least_bytes)
        raise ValueError(f"{str(text).strip()!r} is {format_bytes(num_bytes)}, less than {least}{unit}")
    return num_bytes


def check_digits(name: str, value: object) -> None:
    """Raise `ValueError` for an integer of more digits than Python writes, which a message cannot name."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        digits = round(value.bit_length() * math.log10(2))
        raise ValueError(f"{name} is a whole number of about {digits} digits: give one of 64 bits at most")


def format_bytes(num_bytes: float) -> str:
    """A size in the binary unit that keeps it readable, such as `1.53 GiB` or `-512 B`."""
    for factor, unit in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= factor:
            if abs(num_bytes) > sys.float_info.max:  # an integer that no float holds
                return f"{Decimal(num_bytes) / factor:.2e} {unit}"
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that keeps it readable, such as `3.1 ms` or `2.4 s`."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def align_up(num_bytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


def batches(items: Iterable[T], size_of: Callable[[T], int], limit_bytes: int | None) -> Iterator[list[T]]:
    """Cut a sequence into lists of at most `limit_bytes` in all, in order; a larger item is a list of its own."""
    batch: list[T] = []
    taken_bytes = 0
    for item in items:
        size_bytes = size_of(item)
        if batch and limit_bytes is not None and taken_bytes + size_bytes > limit_bytes:
            yield batch
            batch, taken_bytes = [], 0
        batch.append(item)
        taken_bytes += size_bytes
    if batch:
        yield batch
