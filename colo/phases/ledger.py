"""Who holds how many bytes, on the device and on the host, and what is free. Pure data; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from colo.errors import BudgetError
from colo.phases.phase import Residency, check_move
from colo.units import format_bytes

if TYPE_CHECKING:
    from colo.phases.segment import Segment


@runtime_checkable
class LivesOnHost(Protocol):
    """A segment with host bytes beside those that it takes while it is offloaded."""

    @property
    def home_bytes(self) -> int:
        """Host bytes in every residency, as of streamed state, which is never on the device as a whole."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One segment's line in the ledger."""

    name: str
    size_bytes: int  # device bytes when resident; for a discarded segment, what becoming resident will take
    residency: Residency
    away: Residency | None = None  # where it goes when its bytes are needed; `None` for never
    home_bytes: int = 0  # host bytes that it takes in any residency

    @property
    def device_bytes(self) -> int:
        """Device bytes in this residency."""
        return self.size_bytes if self.residency is Residency.RESIDENT else 0

    @property
    def host_bytes(self) -> int:
        """Host bytes in this residency."""
        return self.home_bytes + (self.size_bytes if self.residency is Residency.OFFLOADED else 0)

    @property
    def eviction_cost_bytes(self) -> int:
        """Bytes that would cross the bus if it left now."""
        return self.size_bytes if self.away is Residency.OFFLOADED else 0

    @classmethod
    def of(cls, segment: Segment) -> Holding:
        """The line of a live segment."""
        return cls(
            name=segment.name,
            size_bytes=segment.size_bytes,
            residency=segment.residency,
            away=segment.away,
            home_bytes=segment.home_bytes if isinstance(segment, LivesOnHost) else 0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """All segments of a runtime on one device."""

    capacity_bytes: int  # device bytes that the segments and the phases' working memory may take together
    host_capacity_bytes: int  # host bytes that offloaded segments may take together
    holdings: Mapping[str, Holding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "holdings", MappingProxyType(dict(self.holdings)))

    @classmethod
    def of(cls, holdings: Iterable[Holding], *, capacity_bytes: int, host_capacity_bytes: int) -> Ledger:
        """A ledger of `holdings`, whose names must differ. Raises: `ValueError` naming one that is there twice."""
        rows: dict[str, Holding] = {}
        for holding in holdings:
            if holding.name in rows:
                raise ValueError(f"two segments are called {holding.name}")
            rows[holding.name] = holding
        return cls(capacity_bytes=capacity_bytes, host_capacity_bytes=host_capacity_bytes, holdings=rows)

    @property
    def device_bytes(self) -> int:
        """Device bytes of all segments."""
        return sum(holding.device_bytes for holding in self.holdings.values())

    @property
    def host_bytes(self) -> int:
        """Host bytes of all segments."""
        return sum(holding.host_bytes for holding in self.holdings.values())

    @property
    def free_bytes(self) -> int:
        """Device bytes left; negative when the segments hold more than the capacity."""
        return self.capacity_bytes - self.device_bytes

    @property
    def fits_host(self) -> bool:
        """True if the host has room for the offloaded segments."""
        return self.host_bytes <= self.host_capacity_bytes

    def moved(self, name: str, target: Residency) -> Ledger:
        """The ledger after one segment has moved. Raises: `PhaseError` for an illegal move."""
        holding = self.holdings[name]
        check_move(name, holding.residency, target)
        return replace(self, holdings={**self.holdings, name: replace(holding, residency=target)})

    def refuse(self, what: str, *, needed_bytes: int, free_bytes: int | None = None, advice: str) -> BudgetError:
        """A `BudgetError` that says what does not fit, by how much, who holds the rest, and what to change."""
        free_bytes = self.free_bytes if free_bytes is None else free_bytes
        message = (
            f"{what} needs {format_bytes(needed_bytes)}, but {format_bytes(max(0, free_bytes))} could be made free: "
            f"{format_bytes(needed_bytes - free_bytes)} are missing. {advice}\n{self.render()}"
        )
        return BudgetError(message, needed_bytes=needed_bytes, free_bytes=free_bytes)

    def render(self) -> str:
        """The ledger as text, one segment a line, largest first."""
        rows = sorted(self.holdings.values(), key=lambda h: (-h.size_bytes, h.name))
        width = max([len(h.name) for h in rows] + [len("capacity")])
        lines = [f"  {h.name:<{width}}  {format_bytes(h.size_bytes):>11}  {h.residency}" for h in rows]
        lines.append(f"  {'free':<{width}}  {format_bytes(self.free_bytes):>11}")
        lines.append(f"  {'capacity':<{width}}  {format_bytes(self.capacity_bytes):>11}")
        host = f"{format_bytes(self.host_bytes)} of {format_bytes(self.host_capacity_bytes)}"
        return "\n".join(["ledger of the device:", *lines, f"  host arena: {host}"])
