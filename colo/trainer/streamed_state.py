"""Optimizer state that lives in host memory and passes through the device a bucket at a time.

While a step lasts, the device holds the bucket that is stepped, the one that comes next, and the one that is on its way
back: the window. To the scheduler the window is the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from colo.memory.dtensor import local_bytes
from colo.memory.offload import Mover
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import TRAINER_OPTIMIZER, Residency, check_move
from colo.phases.segment import Done, Move
from colo.trainer.expected import StateSizes
from colo.trainer.gradients import parameters_of
from colo.trainer.inventory import Inventory, Kept, StateTensor, kept_of, storage_bytes_of
from colo.trainer.state_bucket import StateBucket
from colo.units import batches

_SHARED = "several parameters share it"

_PARTS = 4
"""New state of a bucket is moved into its regions in about so many parts, each of which is there twice for a moment."""


class StreamedState:
    """The state of an optimizer in buckets, as one segment whose size on the device is the window.

    Resident means that the window is the state's: buckets come into it, as a step asks for them or because somebody
    touches a tensor, and give way to others. Offloaded, every bucket is in host memory.
    Ownership: owns the regions and arena extents of every bucket until `hand_over`.
    """

    name = TRAINER_OPTIMIZER
    away = Residency.OFFLOADED

    def __init__(
        self, optimizer: torch.optim.Optimizer, mover: Mover, *, bucket_bytes: int, on_touch: Callable[[str], None]
    ) -> None:
        self.buckets: list[StateBucket] = []
        self.loose: list[Kept] = []
        """State that lies in no bucket, and stays on the device."""

        self.comes_from_the_end = False
        """Whether steps begin with the last bucket, as backward passes do, rather than with the first."""

        self._optimizer = optimizer
        self._mover = mover
        self._bucket_bytes = bucket_bytes
        self._part_bytes = max(1, bucket_bytes // _PARTS)
        self._on_touch = on_touch
        self._is_open = False
        self._stepping: StateBucket | None = None
        self._shared: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors of several buckets

    # ---- as a segment -----------------------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        """`RESIDENT` while the window is on the device, `OFFLOADED` otherwise."""
        return Residency.RESIDENT if self._is_open else Residency.OFFLOADED

    @property
    def size_bytes(self) -> int:
        """Bytes of the window: the most that a bucket, its neighbours and what its step takes have together.

        A part of state that a step makes is there twice for a moment, as it was made and in its region.
        """
        sizes = [0, *(bucket.size_bytes for bucket in self.buckets), 0]
        windows = (
            before + own + max(after + bucket.transient_bytes, self._part_of(bucket))
            for bucket, before, own, after in zip(self.buckets, sizes, sizes[1:], sizes[2:], strict=False)
        )
        return max(windows, default=0)

    @property
    def device_bytes(self) -> int:
        """Device bytes held at this moment."""
        return sum(bucket.device_bytes for bucket in self.buckets)

    @property
    def host_bytes(self) -> int:
        """Bytes of the arena held."""
        return sum(bucket.host_bytes for bucket in self.buckets)

    @property
    def total_bytes(self) -> int:
        """Bytes of all state, or of what the first step is expected to make."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def released_bytes(self) -> int:
        """Bytes of gradients at once when each bucket's are dropped as it is stepped: the most that two have."""
        sizes = [sum(local_bytes(p) for p in b.parameters if p.requires_grad) for b in self.buckets]
        return max((one + other for one, other in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)

    @property
    def home_bytes(self) -> int:
        """Host bytes that the state takes beside those of the window."""
        return max(0, self.total_bytes - self.size_bytes)

    @property
    def kept(self) -> list[Kept]:
        """State that stays on the device because something else refers to its memory."""
        return [*self.loose, *(kept for bucket in self.buckets for kept in bucket.kept)]

    def begin(self, target: Residency) -> Move:
        """Open the window and start filling it, or have everything in it leave; see `Segment.begin`."""
        if target is self.residency:
            return Done()
        check_move(self.name, self.residency, target)
        with uninterrupted():
            if target is Residency.RESIDENT:
                self._open()
                return Done()
            leaving = [bucket for bucket in self.buckets if bucket.residency is Residency.RESIDENT]
            moves = [bucket.begin(Residency.OFFLOADED) for bucket in leaving]
            self._is_open, self._stepping = False, None
            return _Together(moves)

    def _open(self) -> None:
        self._is_open = True
        first = self.buckets[:-3:-1] if self.comes_from_the_end else self.buckets[:2]
        try:
            for bucket in first:
                self.lift(bucket)
        except BaseException:
            self._is_open = False
            for bucket in first:
                if bucket.residency is Residency.RESIDENT:
                    bucket.begin(Residency.OFFLOADED)
            raise

    # ---- buckets ----------------------------------------------------------------------------------------------------

    def lift(self, bucket: StateBucket) -> None:
        """Start bringing a bucket into the window, once others have made room for it."""
        if bucket.residency is Residency.OFFLOADED:
            self._make_room(bucket.present_bytes, keep=bucket)
            bucket.begin(Residency.RESIDENT)

    def hold(self, bucket: StateBucket, following: StateBucket | None = None) -> None:
        """Have a bucket in the window, and keep it there until `lower`; start bringing the one that follows.

        Where a step will make the bucket's state, there is room for it afterwards, and what follows stays away.
        """
        self._stepping = bucket
        self.lift(bucket)
        if following is not None and bucket.is_made:
            self.lift(following)
        bucket.settle()
        if not bucket.is_made:
            self._make_room(bucket.bytes_to_come + self._part_of(bucket), keep=bucket)

    def lower(self, bucket: StateBucket) -> None:
        """Take in what a step has made, and start moving the bucket to the host.

        Raises: `BudgetError` when the host has no room; the bucket is on the device then, and may be lowered again.
        """
        self.gather(bucket)
        bucket.is_made = True
        if bucket.residency is Residency.RESIDENT:
            bucket.begin(Residency.OFFLOADED)
        self._stepping = None
        for other in self.buckets:
            other.poll()

    def lower_all(self) -> None:
        """Have everything in host memory, and wait for it. Raises: as `lower`."""
        for bucket in self.buckets:
            if bucket.residency is Residency.RESIDENT:
                self.lower(bucket)
        self.settle()
        self._is_open = False

    def settle(self) -> None:
        """Wait for every move that is under way."""
        for bucket in self.buckets:
            bucket.settle()

    def reserve(self) -> None:
        """Make sure of the host memory that all state will take. Raises: `BudgetError`; nothing has changed then."""
        self._mover.arena.reserve(max(0, self.total_bytes - self.host_bytes))

    def _part_of(self, bucket: StateBucket) -> int:
        """The most of a bucket's new state that is moved into a region at once."""
        return min(bucket.bytes_to_come, max(self._part_bytes, bucket.largest_bytes))

    def _make_room(self, needed_bytes: int, *, keep: StateBucket) -> None:
        """Have others leave the window, those first that are on their way, until `needed_bytes` fit into it."""
        allowed_bytes = self.size_bytes - (self._stepping.transient_bytes if self._stepping is not None else 0)
        others = [bucket for bucket in self.buckets if bucket.is_here and bucket not in (keep, self._stepping)]
        for bucket in sorted(others, key=lambda bucket: bucket.residency is Residency.RESIDENT):
            if self.device_bytes + needed_bytes <= allowed_bytes:
                return
            bucket.begin(Residency.OFFLOADED)
            bucket.settle()

    def _bring(self, bucket: StateBucket) -> None:
        """Bring a bucket of which somebody touches a tensor. Raises: as `on_touch`."""
        self._on_touch(self.name)  # which opens the window
        self.lift(bucket)
        bucket.settle()

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def gather_all(self) -> None:
        """Make buckets of parameters that have none yet, and take in all state that there is, to the host.

        Raises: `BudgetError` when the host has no room for it; what has been taken in by then stays.
        """
        self.extend()
        self.loose = []
        known = {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}
        others = [key for key in self._optimizer.state if id(key) not in known]
        rest = Inventory(self._optimizer, of=others)
        groups = rest.loose(self._mover.device)
        self.loose += [kept_of(group, rest, "it is the state of no parameter") for group in groups]
        self.loose += rest.kept(self._mover.device)
        for bucket in self.buckets:
            was_here = bucket.is_here
            self.loose += self.gather(bucket)
            if bucket.is_here and not was_here:
                bucket.begin(Residency.OFFLOADED).wait()
        self.buckets = [bucket for bucket in self.buckets if bucket.parameters or bucket.regions]

    def gather(self, bucket: StateBucket) -> list[Kept]:
        """Move new state of a bucket's parameters into it; returns what cannot move. Where there is any, it comes."""
        inventory = Inventory(self._optimizer, of=bucket.parameters)
        bucket.note(inventory)
        self._let_out_shared(bucket, inventory)
        kept = list(inventory.kept(self._mover.device))
        movable: list[list[StateTensor]] = []
        taken = bucket.storages
        for group in inventory.loose(self._mover.device, but_for=taken):
            is_shared = any(found.tensor in self._shared for found in group)
            reason = _SHARED if is_shared else inventory.why_it_stays(group)
            if reason is None:
                movable.append(group)
            else:
                kept.append(kept_of(group, inventory, reason))
        if movable:
            self.lift(bucket)
            bucket.settle()
            for part in batches(movable, storage_bytes_of, self._part_bytes):
                bucket.adopt(part, self._mover.device)
            bucket.is_made |= not all(found.is_master for group in movable for found in group)
        return kept

    def extend(self) -> None:
        """Make buckets of parameters that have none yet."""
        known = {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}
        new = [parameter for parameter in parameters_of(self._optimizer) if id(parameter) not in known]
        sizes = StateSizes(self._optimizer)
        for parameters in batches(new, sizes.of, self._bucket_bytes):
            self.buckets.append(
                StateBucket(
                    parameters,
                    mover=self._mover,
                    expected_bytes=sum(map(sizes.expected, parameters)),
                    largest_bytes=max(map(sizes.expected, parameters)),
                    transient_bytes=sum(map(sizes.transient, parameters)),
                    on_touch=self._bring,
                )
            )

    def replace_buckets(self) -> list[StateBucket]:
        """Begin with new buckets, without state; returns the old ones, for `keep_dropped` or to be put back."""
        old, self.buckets = self.buckets, []
        self.extend()
        return old

    def keep_dropped(self, old: list[StateBucket]) -> None:
        """Have buckets that the optimizer has dropped for as long as somebody holds a tensor of theirs."""
        for bucket in old:
            bucket.parameters, bucket.expected_bytes, bucket.transient_bytes = [], 0, 0
        self.buckets = [*self.buckets, *old]

    def _let_out_shared(self, bucket: StateBucket, inventory: Inventory) -> None:
        """Give tensors that are in another bucket too, such as a table, memory of their own, which stays."""
        found = [entry.tensor for entry in inventory.tensors.values()]
        own = set(map(id, bucket.tensors_among(found)))
        found = [tensor for tensor in found if id(tensor) not in own]
        for other in self.buckets:
            shared = other.tensors_among(found) if found and other is not bucket else ()
            for tensor in shared:
                self.lift(other)
                other.settle()
                other.let_out(tensor)
                self._shared[tensor] = None

    def hand_over(self, target: torch.device) -> None:
        """Give every tensor ordinary memory on `target`; away ones become host memory. See `StateSegment`."""
        for bucket in self.buckets:
            bucket.hand_over(target)


class _Together:
    """Several departures as one."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = moves
        self.moved_bytes = sum(move.moved_bytes for move in moves)

    def wait(self) -> None:
        for move in self._moves:
            move.wait()

    def poll(self) -> bool:
        arrived = [move.poll() for move in self._moves]  # each is asked, since each frees what it can
        return all(arrived)
