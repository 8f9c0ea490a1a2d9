"""Weights from another process of this machine, in a vLLM worker: recorded copies out of memory that the sender owns.

    bind                       what is sent, its order, and how the model takes it
    stage                      the shared buffer, for tensors that are not exported themselves
    begin -> copy -> finish    a version

Copying replays the plan of the model's own loader. Tensors that the sender has exported are one group, which is always
there. Others come in groups through the two halves of a buffer (`colo.weights.transports.buffer`), and the plan is
replayed group by group.
`finish` attests: every tensor of the manifest came once, and the engine holds what was sent. Until it has returned, the
model's weights are neither the old nor the new ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from colo.errors import TransferError, Unsupported
from colo.memory.copy_plan import CopyPlan, wait_for_queued
from colo.memory.digest import Digest
from colo.memory.load_plan import Copy, LoadPlan, contiguous_strides
from colo.memory.share import Opened, empty
from colo.memory.specs import Manifest, TensorSpec
from colo.weights.boxes import Landing, landings
from colo.weights.transports.buffer import Piece, ReaderBuffer, keyed

Record = Callable[[dict[str, torch.Tensor]], LoadPlan]
"""Records the plan of a worker's model for parameters."""


class Receiver:
    """The receiving end in one worker."""

    def __init__(self, device: torch.device, record: Record, *, number: int = 0) -> None:
        """`number` tells the workers of one engine apart."""
        self._device = device
        self._record = record
        self._number = number
        self._plan: LoadPlan | None = None
        self._manifest: Manifest | None = None
        self._opened = Opened(device)
        self._buffer: ReaderBuffer | None = None
        self._groups: list[_Group] = []
        self._update: _Update | None = None

    def bind(self, tensors: list[dict[str, Any]], exported: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Take the description of what will be sent: each tensor as `TensorSpec.to_wire` gives it, with strides.

        What is `exported` (`Exported.wire`) is mapped. Returns `fallbacks` and `left_out` of the `LoadPlan`. Raises:
        `TransferError` when memory cannot be mapped, or tensors do not cover the model exactly once.
        """
        self.release()
        specs = tuple(map(TensorSpec.from_wire, tensors))
        plan = self._plan = self._record({spec.name: empty(spec) for spec in specs})
        self._manifest = Manifest(specs=specs)
        if exported and not plan.fallbacks:
            self._opened.open(exported)
            names = {name: name for name in plan.sources}
            self._groups = [_Group(plan, self._opened.tensors, names)]
        return {"fallbacks": dict(plan.fallbacks), "left_out": plan.left_out}

    def stage(self, **buffer: Any) -> None:
        """Map the buffer that groups arrive in, from the arguments of `SenderBuffer.describe`.

        Raises: as `ReaderBuffer`; `Unsupported` for a tensor with gaps, which cannot be put together from pieces.
        """
        plan = self._bound()
        dtypes = {name: dtype for name, (dtype, _) in plan.sources.items()}
        self._buffer = ReaderBuffer(self._device, dtypes, number=self._number, **buffer)
        by_name: dict[str, list[Copy]] = {}
        for copy in plan.copies:
            by_name.setdefault(copy.name, []).append(copy)
        self._groups = [
            _Group(_plan_of(plan, pieces, by_name), self._buffer.tensors[index], {k: p.name for k, p in pieces.items()})
            for index, pieces in enumerate(map(keyed, self._buffer.groups))
        ]

    def begin(self, version: int, digest: str) -> None:
        """Start taking in a version. Raises: `TransferError` when it consists of other tensors than were described."""
        self._bound()
        assert self._manifest is not None
        # the plan was recorded for other names or shapes: its copies would go astray without an error
        if digest != self._manifest.digest:
            raise TransferError(
                f"version {version} consists of other tensors (digest {digest[:12]}) than were described "
                f"({self._manifest.digest[:12]}): describe them again"
            )
        self._update = _Update(version)

    @torch.no_grad()
    def copy(self, *, verify: bool) -> None:
        """Copy everything, each group of a buffer in its turn. Raises: as `ReaderBuffer.take`."""
        self._bound()
        if not self._groups:
            raise TransferError("no memory of the sender is mapped: describe it first")
        for index in range(len(self._groups)):
            if self._buffer is None:
                self._copy(index, verify=verify)
            elif not self._buffer.take(index, lambda: self._copy(index, verify=verify)):  # noqa: B023 - called at once
                return  # another worker has failed, and says why

    def finish(self, checksums: list[list[int]] | None) -> dict[str, Any]:
        """Check that every tensor came once, and that the engine holds what was sent; returns version and counts.

        `checksums` has a list for each group of a buffer, of `Digest.sums` of its pieces. Raises: `TransferError`
        naming what is missing, came twice, or differs.
        """
        update, manifest = self._updating(), self._manifest
        assert manifest is not None
        # over whatever is found: an update that failed is begun anew, not finished again
        self._update = None
        arrived = list(_arrived(self._groups, update.copied))
        # all in order is the usual case, and takes no counting
        if arrived != list(manifest.names):
            manifest.check_received(arrived, update.version)
        # when this returns the sender may write to, or free, what was copied from
        wait_for_queued(self._device)
        if len(update.digests) != len(checksums or ()):
            raise TransferError(
                f"{len(update.digests)} groups were summed, and checksums of {len(checksums or ())} were given: give "
                "those of each group that is copied with verify=True, and none else"
            )
        different = [name for index, flags in update.flags.items() for name in self._groups[index].named(flags)]
        for given, (index, digest) in zip(checksums or (), sorted(update.digests.items()), strict=True):
            sums = digest.sums
            if len(given) != len(sums):
                raise TransferError(f"group {index} has {len(sums)} pieces, and {len(given)} checksums were given")
            different += [self._groups[index].names[k] for k, own in zip(sums, given, strict=True) if sums[k] != own]
        if different := list(dict.fromkeys(different)):
            raise TransferError(
                f"{len(different)} tensors in the engine differ from what was sent, {different[0]} for one"
            )
        return {"version": update.version, "num_tensors": len(manifest.specs), "num_bytes": manifest.total_bytes}

    @torch.no_grad()
    def differences(self) -> list[str]:
        """Names of exported tensors that the engine does not hold as they are now."""
        self._bound()
        groups = self._groups if self._buffer is None else []
        return [name for group in groups for name in group.named(group.copies.flags())]

    def release(self) -> None:
        """Unmap the sender's memory. The sender frees it after this."""
        self._groups, self._buffer, self._opened = [], None, Opened(self._device)
        self._plan = self._update = None

    def _copy(self, index: int, *, verify: bool) -> None:
        update, group = self._updating(), self._groups[index]
        flags = group.copy(verify=verify)
        update.copied.append(index)
        if flags is not None:
            update.flags[index] = flags
            if self._buffer is not None:  # which the sender may have filled with something else
                group.digest = update.digests[index] = Digest.of(group.tensors, group.digest)

    def _bound(self) -> LoadPlan:
        if self._plan is None:
            raise TransferError("nothing was described yet: call bind first")
        if self._plan.fallbacks:
            name, reason = next(iter(self._plan.fallbacks.items()))
            raise Unsupported(f"{name} cannot be copied: {reason}")
        return self._plan

    def _updating(self) -> _Update:
        if self._update is None:
            raise TransferError("no update has begun")
        return self._update


STEPS: dict[str, Callable[..., Any]] = {
    name: member for name, member in vars(Receiver).items() if not name.startswith("_")
}
"""Steps that a sender may ask for: the public methods of `Receiver`, by name."""


def run_step(receiver: Receiver, step: str, arguments: Mapping[str, Any]) -> Any:
    """Run a step and return its result. Raises: `TransferError` for an unknown step, and whatever the step raises."""
    if step not in STEPS:
        raise TransferError(f"{step!r} is no step of a transfer, which has {', '.join(STEPS)}")
    return STEPS[step](receiver, **arguments)


@dataclass
class _Update:
    """Groups copied for one version, and the results to check."""

    version: int
    copied: list[int] = field(default_factory=list)
    flags: dict[int, torch.Tensor] = field(default_factory=dict)
    """Result of the comparison of each group, for `_Group.named`."""

    digests: dict[int, Digest] = field(default_factory=dict)
    """Digest of each group of a buffer as it was copied."""


class _Group:
    """Tensors, or pieces of them, present at the same time, and the part of the plan that copies them."""

    def __init__(self, plan: LoadPlan, tensors: dict[str, torch.Tensor], names: dict[str, str]) -> None:
        self.tensors = tensors
        self.names = names  # by key of `tensors`, names of the whole tensors
        self.digest: Digest | None = None
        self._plan = plan

    def copy(self, *, verify: bool) -> torch.Tensor | None:
        """Queue the copies and, with `verify`, a comparison of every byte: flags for `named`."""
        self.copies.replay()
        return self.copies.flags() if verify else None

    @cached_property
    def copies(self) -> CopyPlan:
        """The copies, which also compare what the engine holds with where it came from: flags for `named`."""
        return self._plan.comparison(self.tensors)

    def named(self, flags: torch.Tensor) -> list[str]:
        """Names of the tensors whose flag is set. Waits for the flags."""
        return [self.names[key] for key in self._plan.named(flags)]


def _plan_of(plan: LoadPlan, pieces: Mapping[str, Piece], copies: Mapping[str, Sequence[Copy]]) -> LoadPlan:
    """The part of a plan that takes `pieces` of its tensors, by their keys."""
    sources = {key: (plan.sources[piece.name][0], piece.box.shape) for key, piece in pieces.items()}
    taken = (_copies_of(plan, key, piece, copies.get(piece.name, ())) for key, piece in pieces.items())
    return LoadPlan(
        copies=tuple(itertools.chain.from_iterable(taken)),
        sources=sources,
        strides={key: contiguous_strides(shape) for key, (_, shape) in sources.items()},
    )


def _copies_of(plan: LoadPlan, key: str, piece: Piece, copies: Sequence[Copy]) -> Iterator[Copy]:
    shape, strides = plan.sources[piece.name][1], plan.strides[piece.name]
    for copy in copies:
        target = copy.target
        steps, offsets = (copy.stride, target.stride()), (copy.offset, int(target.storage_offset()))
        for landing in landings((shape, strides), copy.shape, steps, offsets):
            if (taken := _taken(key, piece, landing, target)) is not None:
                yield taken


def _taken(key: str, piece: Piece, landing: Landing, target: torch.Tensor) -> Copy | None:
    """The part of a loader's copy that a piece covers."""
    part = landing.box.meet(piece.box)
    if part is None:
        return None
    offset, sizes, strides = landing.of(part)
    own = contiguous_strides(piece.box.shape)
    start = sum((a - b) * step for a, b, step in zip(part.offset, piece.box.offset, own, strict=True))
    return Copy(name=key, shape=sizes, stride=own, offset=start, target=target.as_strided(sizes, strides, offset))


def _arrived(groups: Sequence[_Group], copied: Sequence[int]) -> Iterator[str]:
    """Tensors whose groups have all been copied, each as often as its most frequent group."""
    counts: dict[str, list[int]] = {}
    for index, group in enumerate(groups if copied else ()):
        for name in group.names.values():
            counts.setdefault(name, []).append(copied.count(index))
    for name, times in counts.items():
        yield from [name] * (max(times) if min(times) else 0)
