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


def changes_of(name: str, new: torch.Tensor, old: torch.Tensor) -> dict[str, torch.Tensor]:
    """`new` as a delta from `old`, of the same dtype, shape and device, contiguous; empty if no bit differs."""
    word = _WORDS.get(new.element_size())
    if word is None:
        return {} if torch.equal(new, old) else {name: new}
    ours, base = new.reshape(-1).view(word), old.reshape(-1).view(word)
    changed = ours != base
    num_changed, size = int(changed.sum()), new.element_size()
    if not num_changed:
        return {}
    bitmap_bytes = num_changed * size + math.ceil(len(ours) / 8)
    # indices are made of few entries only: they have eight bytes each
    if num_changed * (size + 2) < min(bitmap_bytes, new.nbytes):
        entries, steps = _steps(ours, changed)
        if len(steps) * (size + 2) < bitmap_bytes:
            return {name + SPARSE: _joined(entries, steps)}
    if bitmap_bytes < new.nbytes:
        pairs = zip(ours.split(_CHUNK), changed.split(_CHUNK), strict=True)
        return {name + BITMAP: _joined(torch.cat([part[here] for part, here in pairs]), _packed(changed))}
    return {name: new}


def _steps(ours: torch.Tensor, changed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries to send, unchanged ones between those that are far apart among them, and the distance of each."""
    index = changed.nonzero().squeeze(1)
    distances = torch.diff(index, prepend=index.new_tensor([-1]))
    between = (distances - 1) // _MOST  # unchanged entries to be sent before each
    steps = torch.full((len(index) + int(between.sum()),), _MOST, dtype=torch.int64, device=ours.device)
    steps[torch.cumsum(between + 1, 0) - 1] = distances - between * _MOST
    return ours[torch.cumsum(steps, 0) - 1], steps.to(torch.int16)


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
        if rest or not count or int(where[-1]) >= num_elements or not bool((steps > 0).all()):
            raise ValueError(f"{len(sent)} bytes are no sparse delta of {num_elements} entries")
    else:
        count, rest = divmod(len(sent) - math.ceil(num_elements / 8), size)
        octets = sent[max(0, count) * size :].unsqueeze(1)
        bits = (octets >> torch.arange(8, dtype=torch.uint8, device=sent.device)) & 1
        where = bits.reshape(-1).bool()
        if rest or int(where.sum()) != count or bool(where[num_elements:].any()):
            raise ValueError(f"{len(sent)} bytes are no delta of {num_elements} entries with a bit for each")
        where = where[:num_elements]
    return where, sent[: count * size].clone().view(word)


# ---- the trainer's end -----------------------------------------------------------------------------------------------


class DeltaBase:
    """Host copies of the weights that an engine was sent last, pinned for a GPU."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def keep(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy weights to the host."""
        copies = self._copies[_key(bucket)] = _like(bucket)
        for copy, (_, tensor) in zip(copies, bucket, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        _settle(bucket)

    def kept(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The copies, a bucket at a time as they came."""
        for key, copies in self._copies.items():
            yield [(name, copy) for (name, _, _), copy in zip(key, copies, strict=True)]

    def changes(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The delta of weights from what is kept of them, which they replace. Raises: `TransferError` for others."""
        copies = self._copies.get(_key(bucket))
        if copies is None:
            raise TransferError(
                f"{bucket[0][0]}, or one of {len(bucket)} weights from it on, was not sent before, or has another "
                "dtype or shape than it had: all are sent the next time"
            )
        found: dict[str, torch.Tensor] = {}
        for copy, (name, tensor) in zip(copies, bucket, strict=True):
            new = tensor.detach().contiguous()
            found |= changes_of(name, new, copy.to(new.device, non_blocking=True))
            copy.copy_(new, non_blocking=True)
        _settle(bucket)
        return found


def _key(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[Any, ...]:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket)


def _like(bucket: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Host memory for weights, one piece for all of them: torch rounds each piece of pinned memory up."""
    sizes = [-(-tensor.nbytes // 16) * 16 for _, tensor in bucket]
    pinned = any(tensor.device.type == "cuda" for _, tensor in bucket)
    parts = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, (_, tensor) in zip(parts, bucket, strict=True)
    ]


def _settle(bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
    for device in {tensor.device for _, tensor in bucket if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def sums_of(
    bucket: Sequence[tuple[str, torch.Tensor]], regions: Sequence[Region], device: torch.device
) -> dict[int, int]:
    """Digests of those of the `regions` that are of a bucket's weights, by number, as an engine's device has them."""
    given = dict(bucket)
    parts = {}
    for number, (name, shape, strides, offset, dtype) in enumerate(regions):
        if name in given:
            whole = given[name].detach().contiguous()
            part = whole.as_strided(tuple(shape), tuple(strides), whole.storage_offset() + offset)
            parts[str(number)] = part.to(device, getattr(torch, dtype)).contiguous()
    return {int(number): value for number, value in Digest.of(parts).sums.items()} if parts else {}


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
        return list(Digest.of({str(n): copy.target.contiguous() for n, copy in enumerate(self._copies)}).sums.values())

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
