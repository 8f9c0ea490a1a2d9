"""Round values along an axis, units, and values of one kind with the words for them. Knows nothing of traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colo.units import GIB, KIB, MIB

Ticks = Sequence[tuple[float, str]]
"""Places on an axis and their labels."""


class Series(NamedTuple):
    """Values of one kind, how they are drawn, and what is said of them."""

    values: Sequence[float]
    colour: str
    label: str
    detail: str

    @property
    def title(self) -> str:
        """Text that shows when the pointer rests on it."""
        return f"{self.label}: {self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The values from one end of a chart to the other, and those that are labelled."""

    low: float = 0.0
    high: float
    ticks: Ticks = ()


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(rough / step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.15g}") for i in range(first, last + 1)]


Unit = tuple[float, float, str]
"""Smallest size shown in a unit, the size of the unit, and its name."""

TIME_UNITS: Sequence[Unit] = ((10800, 3600, "h"), (600, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms"), (0, 1e-6, "us"))
BYTE_UNITS: Sequence[Unit] = ((GIB, GIB, "GiB"), (MIB, MIB, "MiB"), (KIB, KIB, "KiB"), (0, 1, "B"))
PLAIN_UNITS: Sequence[Unit] = ((-math.inf, 1, ""),)


def count_ticks(count: int) -> list[tuple[float, str]]:
    """Round whole numbers from 1 to `count`, each in the middle of its unit: 1 at 0.5."""
    return [(tick - 0.5, f"{tick:g}") for tick in ticks(1, count) if tick == int(tick)]


def unit_ticks(low: float, high: float, units: Sequence[Unit], count: int = 5) -> list[tuple[float, str]]:
    """Round values from `low` to `high` in the unit that suits `high`, each with its label."""
    _, factor, name = next(unit for unit in units if high >= unit[0])
    values = ticks(low / factor, high / factor, count)
    return [(tick * factor, f"{tick:g} {name}".rstrip() if tick else "0") for tick in values]


def extremes(values: Sequence[float], num_bins: int = 400) -> list[int]:
    """Indices of the values to draw: the finite ones; of many the first, the last, and each bin's extremes."""
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    size = max(1, len(finite) // num_bins)
    keep = {*finite[:1], *finite[-1:]}
    for first in range(0, len(finite), size):
        part = finite[first : first + size]
        keep |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(keep)


def time_axis(start_s: float, end_s: float) -> Axis:
    """Seconds, counted from the left edge."""
    labels = unit_ticks(0, end_s - start_s, TIME_UNITS, 8)
    return Axis(low=start_s, high=end_s, ticks=[(start_s + value, label) for value, label in labels])
