"""Digests: a checksum of every tensor of a set at one moment, and the names of those that differ at another.

    then = Digest.of(tensors)
    Digest.of(tensors, earlier=then).differs(then)   -> names

On a GPU one launch reads a whole set at the speed of the memory (`CopyPlan`). On a CPU a CRC is several times as fast.
Both depend on where bytes are, so that weights packed in another order do not pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from functools import cached_property

import torch
from torch import nn

from colo.memory.copy_plan import CopyPlan, flat
from colo.memory.storage import local_shard, places_of

_MODULUS = 1 << 64

_TILE_WORDS = 1 << 14
"""Words of a tile at most. Small tiles, as copies have, make a table of a four-hundredth of the weights' bytes."""

_PLAIN = frozenset({torch.Tensor, nn.Parameter})


class Digest:
    """Checksums of a set of tensors, of a `DTensor` those of its local shard. Lifetime: keeps those of a CPU."""

    def __init__(self, prepared: _Prepared) -> None:
        self._prepared = prepared
        self._known, self._queued = prepared.compute()

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], earlier: Digest | None = None) -> Digest:
        """Digest `tensors` now, queued on a GPU; with less work where they lie as they did for `earlier`."""
        # a plan knows addresses, not tensors: it is good as long as every one lies where it did
        if earlier is not None and earlier._prepared.places == _places(tensors):
            return cls(earlier._prepared)
        return cls(_Prepared(tensors))

    def differs(self, other: Digest) -> list[str]:
        """Names of tensors with other bytes, in other memory, or in one of the two digests only. Waits for the sums."""
        here, there = self._prepared.places, other._prepared.places
        # what has moved or changed its layout counts as different without being read
        if here != there:
            return [name for name in here | there if here.get(name) != there.get(name)]
        mine, others = self.sums, other.sums
        return [name for name in here if mine[name] != others[name]] if mine != others else []

    @cached_property
    def sums(self) -> dict[str, int]:
        """A number for each tensor: the same in every process for the same bytes on a device of the same kind."""
        # without a sign, as the CRCs of a CPU are
        found = [*self._known, *(value % _MODULUS for part in self._queued for value in part.tolist())]
        by_name = dict(zip(self._prepared.names, found, strict=True))
        return {name: by_name[name] for name in self._prepared.places}


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, Hashable]:
    """Address, dtype, shape and strides of each tensor, or of its local shard."""
    # few sets hold a `DTensor`, and asking each tensor for its shard is a call in Python for each
    if set(map(type, tensors.values())) <= _PLAIN:
        return places_of(tensors)
    return places_of({name: local_shard(tensor) for name, tensor in tensors.items()})


class _Prepared:
    """A set of tensors ready to be read again and again, and the places that they lie in."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.places = _places(tensors)
        on_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            shard = local_shard(tensor).detach()
            on_device.setdefault(shard.device, {})[name] = shard
        on_host = on_device.pop(torch.device("cpu"), {})
        # a contiguous part is read in place each time; any other one is copied first
        rows = {name: _bytes_of(part) for name, part in on_host.items() if part.is_contiguous()}
        others = {name: part for name, part in on_host.items() if name not in rows}
        self.names = [*rows, *others, *(name for parts in on_device.values() for name in parts)]
        """Names in the order in which `compute` gives their sums."""

        self._rows, self._others = list(rows.values()), list(others.values())
        # source and target are one, since `digests` writes nothing
        self._plans = [
            CopyPlan([(part, part) for part in parts.values()], words=_TILE_WORDS) for parts in on_device.values()
        ]

    def compute(self) -> tuple[list[int], list[torch.Tensor]]:
        """Sums of what is read at once, then those of each GPU, queued and not waited for."""
        on_host = [*map(zlib.crc32, self._rows), *(zlib.crc32(_bytes_of(part.contiguous())) for part in self._others)]
        return on_host, [plan.digests() for plan in self._plans]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return flat(tensor).view(torch.uint8).numpy().data
