"""The comparison after a transfer: digests of what ranks have sent, of what engines hold, and of parts held twice.

Every rank digests its own memory in one launch and tells the others in one small gather; then each knows of all. What
is compared with what was settled when the exchange was planned, so that nothing here is done tensor by tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from colo.weights.boxes import Box
from colo.weights.exchange.plan import ExchangePlan, Slice
from colo.weights.ranks import RankGroup


@dataclass(frozen=True, slots=True)
class Differences:
    """Findings of a comparison; `failed` and `anywhere` are the same on every rank."""

    failed: bool
    """True if a rank could not compute its digests."""

    anywhere: bool
    """True if some rank's engine holds other bytes than were sent."""

    taken: list[int]
    """Indices of what differs among the targets of this rank."""

    apart: list[str]
    """Parts of which ranks have different values: the weight and the ranks, in words."""


class Comparison:
    """The digests of a plan that have to be equal. The same on every rank.

    A row of numbers comes from each rank: whether it has failed, then digests of what it sends, of what it takes, both
    in the order of `ExchangePlan.every`, and of the parts that others hold too (`shared`).
    """

    def __init__(self, plan: ExchangePlan, held: Mapping[int, Sequence[Slice]], ranks: RankGroup) -> None:
        """`held` is by rank; a part of this rank is known by its index there."""
        self._ranks = ranks
        self._every = plan.every
        owners: dict[tuple[str, Box], dict[int, int]] = defaultdict(dict)
        for rank, slices in sorted(held.items()):
            for index, part in enumerate(slices):
                owners[part.name, part.box].setdefault(rank, index)
        self._shared = [(n, of) for (n, box), of in owners.items() if len(of) > 1 and box.num_elements]
        sent, taken, shared = (dict[int, list[int]]() for _ in range(3))
        for places in (sent, taken, shared):
            places |= {rank: [] for rank in held}
        for number, delivery in enumerate(self._every):
            sent[delivery.sender].append(number)
            taken[delivery.receiver].append(number)
        for number, (_, of) in enumerate(self._shared):
            for rank in of:
                shared[rank].append(number)
        self._width = 1 + max((len(sent[r]) + len(taken[r]) + len(shared[r]) for r in held), default=0)
        self.shared = [self._shared[number][1][ranks.rank] for number in shared.get(ranks.rank, ())]
        """Indices of this rank's parts that others hold too."""

        row = {rank: number * self._width + 1 for number, rank in enumerate(sorted(held))}
        at: list[dict[int, dict[int, int]]] = []
        for places in (sent, taken, shared):
            at.append({r: {n: row[r] + i for i, n in enumerate(numbers)} for r, numbers in places.items()})
            row = {rank: start + len(places[rank]) for rank, start in row.items()}
        left = [at[0][d.sender][n] for n, d in enumerate(self._every)]
        right = [at[1][d.receiver][n] for n, d in enumerate(self._every)]
        self._pairs = [(n, first, rank) for n, (_, (first, *of)) in enumerate(self._shared) for rank in of]
        left += [at[2][first][n] for n, first, _ in self._pairs]
        right += [at[2][rank][n] for n, _, rank in self._pairs]
        self._left, self._right = (torch.tensor(of, dtype=torch.int64, device=ranks.device) for of in (left, right))

    def of(self, digests: Sequence[torch.Tensor] | None) -> Differences:
        """Compare. A collective. `digests` (int64) are of what this rank sends, takes and shares; `None` if it cannot.

        Waits for the digests.
        """
        row = torch.zeros(self._width, dtype=torch.int64, device=self._ranks.device)
        if digests is None:
            row[0] = 1
        else:
            found = torch.cat([row[:0], *(part.to(self._ranks.device) for part in digests)])
            row[1 : 1 + len(found)] = found
        rows = self._ranks.rows(row)
        flags = rows.view(-1)[self._left] != rows.view(-1)[self._right]
        num_deliveries = len(self._every)
        flags = torch.cat([flags, rows[:, 0].any()[None]])
        if not flags.any():
            return Differences(failed=False, anywhere=False, taken=[], apart=[])
        others = flags.nonzero().flatten().tolist()
        failed = others[-1] == len(flags) - 1
        sent = [self._every[n] for n in others if n < num_deliveries]
        apart = dict.fromkeys(
            self._pairs[n - num_deliveries][0] for n in others if num_deliveries <= n < len(flags) - 1
        )
        return Differences(
            failed=failed,
            anywhere=bool(sent),
            taken=[delivery.taken for delivery in sent if delivery.receiver == self._ranks.rank],
            apart=[f"{name} on ranks {', '.join(map(str, of))}" for name, of in (self._shared[n] for n in apart)],
        )
