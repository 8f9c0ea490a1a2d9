"""Parts of weights that several ranks hold: whether their values are the same, without which engines would differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from colo.memory.digest import Digest
from colo.weights.boxes import Box
from colo.weights.exchange.plan import Slice
from colo.weights.ranks import RankGroup
from colo.weights.sources.parts import PlacedPart

_BITS = 62
"""Bits of a checksum that are compared: the number and its negative have 64, and one is above them all."""


class Replicas:
    """The parts that more than one rank holds. The same on every rank."""

    def __init__(self, held: Mapping[int, Sequence[Slice]], ranks: RankGroup) -> None:
        """`held` is by rank; a part of this rank is known by its index there."""
        owners: dict[tuple[str, Box], dict[int, int]] = defaultdict(dict)
        for rank, slices in sorted(held.items()):
            for index, part in enumerate(slices):
                owners[part.name, part.box].setdefault(rank, index)
        self._ranks = ranks
        self._shared = [(name, of) for (name, box), of in owners.items() if len(of) > 1 and box.num_elements]

    @torch.no_grad()
    def apart(self, parts: Sequence[PlacedPart], device: torch.device) -> list[str]:
        """What differs, in words: a weight and the ranks that hold the part. A collective, the same on every rank.

        `parts` are this rank's, in the order of `held`; `device` is one that the ranks can reduce on.
        """
        if not self._shared:
            return []
        rank = self._ranks.rank
        own = [(n, parts[of[rank]].tensor) for n, (_, of) in enumerate(self._shared) if rank in of]
        known = {n: tensor for n, tensor in own if tensor is not None}
        sums = torch.full((2, len(self._shared)), 1 << _BITS, dtype=torch.int64)
        for number, value in _sums(known).items():
            sums[0, number], sums[1, number] = value, -value
        low, negated = self._ranks.lowest(sums.to(device)).cpu()
        return [
            f"{name} on ranks {', '.join(map(str, of))}"
            for (name, of), is_other in zip(self._shared, (low != -negated).tolist(), strict=True)
            if is_other
        ]


def _sums(tensors: Mapping[int, torch.Tensor]) -> dict[int, int]:
    """Checksum every tensor."""
    sums = Digest.of({str(number): tensor for number, tensor in tensors.items()}).sums
    return {number: sums[str(number)] % (1 << _BITS) for number in tensors}
