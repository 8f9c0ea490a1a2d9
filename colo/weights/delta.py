"""Deltas: weights as the entries whose stored bits differ from a base, for engines at the end of a slow link.

    trainer, `DeltaBase`                               engine, `DeltaTarget`
    host copies of what the engine was sent last       its loader's recorded copies, into its own memory
    changes(bucket)                            ---->   apply(changes)
    sums(bucket)                                 ==    sums()

A weight without a changed bit is left out. Any other is one tensor: whole, under its own name, or bytes (uint8) of
changed entries and of where they are, whichever is smallest:

    name           all entries
    name:sparse    changed entries, then the distance of each from the one before in 16 bits
    name:bitmap    changed entries, then a bit for each entry of the weight

Entries replace what is there, so that a delta that arrives twice does what it does once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from colo.errors import TransferError, Unsupported
from colo.memory.copy_plan import wait_for_queued
from colo.memory.digest import Digest
from colo.memory.load_plan import Copy, LoadPlan, contiguous_strides

SPARSE, BITMAP = ":sparse", ":bitmap"

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes of the stored bits of an entry, by its bytes."""

_CHUNK = 1 << 24
"""Entries of a weight that are picked by a mask at a time, for which torch makes indices."""

_MOST = 0xFFFF
"""The longest distance; entries further apart have unchanged ones sent between them."""

Region = tuple[str, Sequence[int], Sequence[int], int, str]
"""Name of a weight, the shape, strides and offset in elements of a part of it, and the dtype that it lands in."""


# ---- one weight ------------------------------------------------------------------------------------------------------


def changes_of(weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Each weight, new and old, as a delta from the old; one in which no bit differs is left out.

    The two are of one dtype, shape and device, contiguous. What only the device knows is waited for once for all.
    """
    found: dict[str, torch.Tensor] = {}
    marked: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # stored bits, and a mark at each that has changed
    for name, (new, old) in weights.items():
        word = _WORDS.get(new.element_size())
        if word is None:
            found |= {} if torch.equal(new, old) else {name: new}
            continue
        ours = new.reshape(-1).view(word)
        marked[name] = ours, ours != old.reshape(-1).view(word)
    counts = _numbers([changed.sum() for _, changed in marked.values()])
    sparse: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # indices of changed entries, and distances
    for (name, (ours, changed)), count in zip(marked.items(), counts, strict=True):
        # indices are made of few entries only: they have eight bytes each
        if count and count * (ours.itemsize + 2) < min(_bitmap_bytes(ours, count), ours.nbytes):
            index = changed.nonzero().squeeze(1)
            sparse[name] = index, torch.diff(index, prepend=index.new_tensor([-1]))
    farthest = dict(zip(sparse, _numbers([distances.max() for _, distances in sparse.values()]), strict=True))
    for (name, (ours, changed)), count in zip(marked.items(), counts, strict=True):
        if not count:
            continue
        bitmap_bytes = _bitmap_bytes(ours, count)
        if name in sparse:
            index, distances = sparse[name]
            if farthest[name] > _MOST:
                index, distances = _in_reach(distances)
            if len(distances) * (ours.itemsize + 2) < bitmap_bytes:
                found[name + SPARSE] = _joined(ours[index], distances.to(torch.int16))
                continue
        if bitmap_bytes < ours.nbytes:
            pairs = zip(ours.split(_CHUNK), changed.split(_CHUNK), strict=True)
            found[name + BITMAP] = _joined(torch.cat([part[here] for part, here in pairs]), _packed(changed))
        else:
            found[name] = weights[name][0]
    return found


def _numbers(scalars: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of a device, waited for once."""
    return torch.stack([one.to(scalars[0].device) for one in scalars]).tolist() if scalars else []


def _bitmap_bytes(entries: torch.Tensor, num_changed: int) -> int:
    return num_changed * entries.itemsize + math.ceil(len(entries) / 8)


def _in_reach(distances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of entries to send, unchanged ones between those that are far apart among them, and their distances."""
    between = (distances - 1) // _MOST  # unchanged entries to be sent before each
    steps = distances.new_full((len(distances) + int(between.sum()),), _MOST)
    steps[torch.cumsum(between + 1, 0) - 1] = distances - between * _MOST
    return torch.cumsum(steps, 0) - 1, steps


def _joined(entries: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.cat([entries.view(torch.uint8), places.view(torch.uint8)])


def _packed(mask: torch.Tensor) -> torch.Tensor:
    """A bit for each element, the lowest first."""
    octets = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (octets << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def entries_of(
    kind: str, sent: torch.Tensor, dtype: torch.dtype, num_elements: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A mark at each changed entry of a weight, or their flat indices, and their stored bits.

    Marks (bool) are of a `BITMAP`, indices of a `SPARSE` delta. Raises: `ValueError` for one that is none.
    """
    size, word = dtype.itemsize, _WORDS[dtype.itemsize]
    if kind == SPARSE:
        count, rest = divmod(len(sent), size + 2)
        steps = sent[count * size :].clone().view(torch.int16).long() & _MOST if not rest else sent.new_empty(0).long()
        where = torch.cumsum(steps, 0) - 1
        last, least = _numbers([where[-1], steps.min()]) if len(steps) else (0, 0)
        if rest or not least > 0 or last >= num_elements:
            raise ValueError(f"{len(sent)} bytes are no sparse delta of {num_elements} entries")
    else:
        count, rest = divmod(len(sent) - math.ceil(num_elements / 8), size)
        octets = sent[max(0, count) * size :].unsqueeze(1)
        bits = (octets >> torch.arange(8, dtype=torch.uint8, device=sent.device)) & 1
        where = bits.reshape(-1).bool()
        marked, outside = _numbers([where.sum(), where[num_elements:].sum()])
        if rest or marked != count or outside:
            raise ValueError(f"{len(sent)} bytes are no delta of {num_elements} entries with a bit for each")
        where = where[:num_elements]
    return where, sent[: count * size].clone().view(word)


# ---- the trainer's end -----------------------------------------------------------------------------------------------


class DeltaBase:
    """Host copies of the weights that an engine was sent last, pinned for a GPU.

    Ordering: they are written in the present stream, and stand once `settle` returns.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._devices: set[torch.device] = set()
        self._reading: dict[torch.device, torch.cuda.Stream] = {}

    def keep(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Begin to copy weights to the host."""
        copies = self._copies[_key(bucket)] = _like(bucket)
        for copy, (_, tensor) in zip(copies, bucket, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
            self._devices.add(tensor.device)

    def kept(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The copies, a bucket at a time as they came."""
        for key, copies in self._copies.items():
            yield [(name, copy) for (name, _, _), copy in zip(key, copies, strict=True)]

    def changes(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The delta of weights from what is kept of them, which they begin to replace.

        Raises: `TransferError` for others than are kept.
        """
        copies = self._copies.get(_key(bucket))
        if copies is None:
            raise TransferError(
                f"{bucket[0][0]}, or one of {len(bucket)} weights from it on, was not sent before, or has another "
                "dtype or shape than it had: all are sent the next time"
            )
        new = [tensor.detach().contiguous() for _, tensor in bucket]
        old = [self._back(copy, one.device) for copy, one in zip(copies, new, strict=True)]
        found = changes_of({name: (one, its) for (name, _), one, its in zip(bucket, new, old, strict=True)})
        for copy, one in zip(copies, new, strict=True):
            copy.copy_(one, non_blocking=True)
        return found

    def settle(self) -> None:
        """Wait for the copies."""
        for device in self._devices:
            wait_for_queued(device)

    def _back(self, copy: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on its weights' device. It comes while those of the bucket before go the other way."""
        if device.type != "cuda":
            return copy
        if device not in self._reading:
            self._reading[device] = torch.cuda.Stream(device)
        reading, present = self._reading[device], torch.cuda.current_stream(device)
        with torch.cuda.stream(reading):
            there = copy.to(device, non_blocking=True)
        present.wait_stream(reading)
        there.record_stream(present)
        return there


def _key(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[Any, ...]:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket)


def _like(bucket: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Host memory for weights, one piece for all of them: torch rounds each piece of pinned memory up."""
    sizes = [-(-tensor.nbytes // 16) * 16 for _, tensor in bucket]
    pinned = any(tensor.device.type == "cuda" for _, tensor in bucket)
    parts = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, (_, tensor) in zip(parts, bucket, strict=True)
    ]


class BucketSums:
    """Digests of the parts of weights that an engine's `regions` are of, as its device has them, a bucket at a time."""

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self.names = [region[0] for region in regions]
        """The weight that each region is of."""

        self._device = device
        self._regions: dict[str, list[tuple[int, Region]]] = {}  # of each weight, by number
        for number, region in enumerate(regions):
            self._regions.setdefault(region[0], []).append((number, region))
        self._planned: dict[tuple[str, ...], Digest] = {}
        self._queued: list[Digest] = []
        self._known: dict[str, int] = {}

    def begin(self) -> None:
        """Forget what has come."""
        self._queued, self._known = [], {}

    def add(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Digest a bucket's weights as they are now, queued on a GPU. Where they lie as before nothing is planned."""
        parts = {}
        for name, tensor in bucket:
            whole = tensor.detach().contiguous()
            for number, (_, shape, strides, offset, dtype) in self._regions.get(name, ()):
                part = whole.as_strided(tuple(shape), tuple(strides), whole.storage_offset() + offset)
                parts[str(number)] = part.to(self._device, getattr(torch, dtype)).contiguous()
        if not parts:
            return
        key = tuple(name for name, _ in bucket)
        digest = Digest.of(parts, self._planned.get(key))
        if self._device.type == "cuda":
            self._planned[key] = digest
            self._queued.append(digest)
        else:  # it has read all, and would keep copies of what was cast
            self._known |= digest.sums

    def numbers(self) -> list[int]:
        """The digest of each region, 0 for one whose weight has not come. Waits for them."""
        for digest in self._queued:
            self._known |= digest.sums
        return [self._known.get(str(number), 0) for number in range(len(self.names))]


# ---- the engine's end ------------------------------------------------------------------------------------------------


class DeltaTarget:
    """A worker's weights as the base of changes, which land where its loader would have copied them."""

    def __init__(self, plan: LoadPlan) -> None:
        """`plan` is of whole, contiguous weights. Raises: `Unsupported` for one that is not copies alone."""
        if plan.fallbacks:
            name, why = next(iter(plan.fallbacks.items()))
            raise Unsupported(f"changes alone cannot be loaded, of {len(plan.fallbacks)} weights ({name}: {why})")
        self.version: str | None = None
        """Version of the weights that lie in the worker's memory; `None` while that is unknown."""

        self._sources = plan.sources
        self._copies = plan.runs
        self._digest: Digest | None = None  # of the last `sums`, whose plan is used again
        self._by_name: dict[str, list[Copy]] = {}
        for copy in plan.runs:
            self._by_name.setdefault(copy.name, []).append(copy)

    @property
    def regions(self) -> list[Region]:
        """The part of a weight that each of the worker's `sums` is of."""
        return [
            (copy.name, list(copy.shape), list(copy.stride), copy.offset, str(copy.target.dtype).rpartition(".")[2])
            for copy in self._copies
        ]

    @torch.no_grad()
    def apply(self, changes: Mapping[str, torch.Tensor]) -> None:
        """Write changed entries into the worker's memory. Raises: `TransferError` for what is no delta of a weight.

        Nothing of a weight is written then.
        """
        for key, sent in changes.items():
            kind = next((one for one in (SPARSE, BITMAP) if key.endswith(one)), "")
            name = key.removesuffix(kind)
            if name not in self._sources:
                raise TransferError(f"{name} has changed, and is no weight that was described")
            try:
                self._apply(name, kind, sent)
            except (ValueError, RuntimeError) as error:
                raise TransferError(f"the change of {name} cannot be applied: {error}") from error

    def sums(self) -> list[int]:
        """A digest of each region as it lies in the worker's memory."""
        held = {str(number): copy.target for number, copy in enumerate(self._copies)}
        self._digest = Digest.of(held, self._digest)
        return list(self._digest.sums.values())

    def _apply(self, name: str, kind: str, sent: torch.Tensor) -> None:
        dtype, shape = self._sources[name]
        if not kind:
            for copy in self._by_name.get(name, ()):
                copy.target.copy_(copy.region_of(sent.view(shape)))
            return
        where, bits = entries_of(kind, sent, dtype, math.prod(shape))
        spread: tuple[torch.Tensor, torch.Tensor] | None = None  # all entries, and a mark at those that have changed
        for copy in self._by_name.get(name, ()):
            # by their bits: not every dtype can be written to by index, or chosen from
            target, word = copy.target, _WORDS[copy.target.dtype.itemsize]
            if copy.stride == contiguous_strides(copy.shape) and target.is_contiguous():
                here, given = where, bits
                if target.numel() < math.prod(shape):
                    here, given = _within(where, bits, copy.offset, target.numel())
                _write(target.view(-1).view(word), here, given.view(dtype).to(target.dtype).view(word))
                continue
            if spread is None:
                whole = torch.zeros(math.prod(shape), dtype=bits.dtype, device=sent.device)
                marks = torch.zeros(math.prod(shape), dtype=torch.bool, device=sent.device)
                _write(whole, where, bits)
                _write(marks, where, torch.ones_like(bits, dtype=torch.bool))
                spread = whole.view(dtype).view(shape), marks.view(shape)
            entries, is_new = (copy.region_of(one) for one in spread)
            target.view(word).copy_(torch.where(is_new, entries.to(target.dtype).view(word), target.view(word)))


def _within(where: torch.Tensor, bits: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Changes of `count` entries from the `first` on."""
    if where.dtype == torch.bool:
        here = where[first : first + count]
        before = int(where[:first].sum())
        return here, bits[before : before + int(here.sum())]
    begin, end = torch.searchsorted(where, where.new_tensor([first, first + count])).tolist()
    return where[begin:end] - first, bits[begin:end]


def _write(into: torch.Tensor, where: torch.Tensor, entries: torch.Tensor) -> None:
    if where.dtype == torch.bool:
        into.masked_scatter_(where, entries)
    else:
        into[where] = entries
