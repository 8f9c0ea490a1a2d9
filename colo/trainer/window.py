"""The window on the device that an optimizer's state in host memory passes through as it is stepped.

State that classes compute element by element lies in planes, and passes in ranges (colo/trainer/planes.py). Classes
that look beyond an element but not beyond a parameter (Adafactor, Muon, 8-bit state) step some whole parameters at a
time, whose state is parked like any other (`colo.memory.parking`), the next ones coming meanwhile.

Some planes may stay on the device: their ranges pass through the slots too, so that a step that fails has changed no
state, but not over the bus. They are a segment of their own, which leaves for good when its room is needed.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from colo.errors import BudgetError, Unsupported
from colo.memory.arena import ALIGNMENT_BYTES
from colo.memory.offload import Mover
from colo.memory.parking import Kept, Parking
from colo.memory.probe import free_device_bytes
from colo.memory.region import Region, allocate_region, carve, carved_bytes
from colo.memory.storage import local_bytes, local_shard, storage_key
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import TRAINER_OPTIMIZER, TRAINER_RESIDENT_STATE, Done, Move, Residency, check_move
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.optimizers import REGROUPED, base_of, is_elementwise, own_step, parameters_of
from colo.trainer.planes import Note, Planes, Range, StateSlot, Work, part_of
from colo.trainer.remainders import DIGEST_ELEMENTS, MOMENTS
from colo.trainer.state import Stock, take_stock
from colo.units import MIB, align_up, batches, format_bytes

NUM_SLOTS = 3  # ranges on the device at once: one comes, one is stepped, one leaves; one more for those that stay

RANGE_BYTES = 128 * MIB
"""State of a range. On an H100 ranges of 32 to 256 MiB are stepped at the speed of the bus; at 16 MiB Python bounds
the step, at 512 MiB too few ranges are under way to overlap. It bounds ranges of 64 MiB, too, where state
stays on the device, and where gradients are released: it queues the backward pass as well."""


@dataclass(eq=False)
class Bucket(Work):
    """Whole parameters, whose state is parked."""

    parking: Parking
    expected_bytes: int  # of what a first step makes
    transient_bytes: int


class StateWindow:
    """Host memory of streamed state, and the device memory that it passes through.

    To the scheduler it is the segment `trainer.optimizer`. Ownership: owns slots, planes and parked state.
    """

    name = TRAINER_OPTIMIZER
    away = Residency.OFFLOADED

    def __init__(
        self,
        optimizer: Any,
        mover: Mover,
        *,
        range_bytes: int,
        resident_bytes: int = 0,
        moment_dtype: torch.dtype = torch.float32,
        agree: Callable[[int], int] = int,
    ) -> None:
        """`agree` makes one of the seeds that ranks have drawn for a step."""
        self.optimizer = optimizer
        self.kept: list[Kept] = []
        self.resident = Parking(TRAINER_RESIDENT_STATE, mover, name_of=lambda _: "a plane of the state")
        """The planes that stay on the device, at most `resident_bytes` of them."""

        self._resident_bytes = resident_bytes  # what may still be added to them
        self._mover = mover
        self._range_bytes, self._moment_dtype, self._agree = range_bytes, moment_dtype, agree
        self._has_masters = isinstance(optimizer, MasterWeightsOptimizer)
        self.base: Any = base_of(optimizer)
        """The optimizer whose class steps, and which keeps the state."""

        self._masters: Mapping[torch.Tensor, Any] = optimizer.masters if self._has_masters else {}
        if self._has_masters:
            optimizer.is_streamed = True
        self._planes: list[Planes] = []
        self._buckets: list[Bucket] = []
        self._written: list[dict[str, Any]] = []  # what a bucket's call has made of the groups' hyperparameters
        self._number = 0
        self._work_of: dict[int, list[Work]] = {}
        self._seed: int | None = None  # of the present step; one that is begun again keeps it
        # rounding loses numbers, and a runtime that is refused must lose none
        states = self.base.state.values() if moment_dtype is not torch.float32 else ()
        self._given = [(state, name, state[name]) for state in states for name in MOMENTS & state.keys()]
        self._is_open = False
        self._region: Region | None = None
        self._slots: list[StateSlot] = []
        self._turn = 0
        self._streams: dict[str, torch.cuda.Stream] = {}
        # streams of their own: copies in and out go both ways over the bus at once, beside the step's kernels
        if mover.device.type == "cuda":
            self._streams = {lane: torch.cuda.Stream(mover.device) for lane in ("in", "out")}
        self.stock = take_stock(optimizer)

    # ---- as a segment -----------------------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        """`RESIDENT` while the window is on the device, `OFFLOADED` otherwise."""
        return Residency.RESIDENT if self._is_open else Residency.OFFLOADED

    @property
    def size_bytes(self) -> int:
        """Bytes of the window: slots and flat parameters, and what three neighbouring buckets have."""
        sizes = [0, *(max(b.parking.size_bytes, b.expected_bytes) for b in self._buckets), 0]
        # the one before may still be leaving and the next is fetched ahead, so that three are on the device at once
        windows = (
            before + own + after + bucket.transient_bytes
            for bucket, before, own, after in zip(self._buckets, sizes, sizes[1:], sizes[2:], strict=False)
        )
        return carved_bytes(self._parts()) + max(windows, default=0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; a window that state stays beside has one more."""
        return max((carved_bytes(planes.specs) for planes in self._planes if planes.ranges), default=0)

    @property
    def _num_slots(self) -> int:
        return NUM_SLOTS + any(planes.stays is not None for planes in self._planes)

    @property
    def device_bytes(self) -> int:
        """Device bytes held at this moment."""
        region_bytes = self._region.device_bytes if self._region is not None else 0
        return region_bytes + sum(bucket.parking.device_bytes for bucket in self._buckets)

    @property
    def host_bytes(self) -> int:
        """Bytes of the arena held."""
        return sum(p.host_bytes for p in self._planes) + sum(b.parking.host_bytes for b in self._buckets)

    @property
    def total_bytes(self) -> int:
        """Bytes of all state, what a first step is expected to make included."""
        return sum(planes.total_bytes for planes in self._planes) + sum(
            max(bucket.parking.size_bytes, bucket.expected_bytes) for bucket in self._buckets
        )

    @property
    def home_bytes(self) -> int:
        """Host bytes of the state, but for that of planes on the device, in the pages that the arena lends."""
        away = [planes for planes in self._planes if planes.stays is None]
        resident_bytes = sum(planes.total_bytes for planes in self._planes if planes.stays is not None)
        return self.total_bytes - resident_bytes + sum(len(planes.layout) for planes in away) * ALIGNMENT_BYTES

    def begin(self, target: Residency) -> Move:
        """Open the window, or close it; see `Segment.begin`."""
        if target is self.residency and target is not Residency.RESIDENT:
            return Done()  # an open one is looked at again: a parameter that has joined may want a wider one
        if target is not self.residency:
            check_move(self.name, self.residency, target)
        with uninterrupted():
            if target is Residency.RESIDENT:
                self._open()
            else:
                self._leave()
        # nothing to wait for: opening maps memory, no state comes with it
        return Done()

    def accept(self) -> None:
        """Let go of moments as they were before they were rounded: a runtime has been built with these."""
        self._given = []

    def close(self, *, on_device: bool) -> None:
        """Give all state memory of its own: on the device where there is room for it, or in host memory, as it is."""
        # waits for copies under way: the planes must be whole before they are given away
        self._leave()
        is_full = on_device and not self._has_room()
        # a part on the device would be of no use, and in the weights' way
        on_device = on_device and not is_full
        if not on_device:
            with suppress(BudgetError):  # without room in the arena it stays, and the loop may move it
                self.resident.begin(Residency.OFFLOADED).wait()
        self._let_resident_go()
        left_bytes = self.host_bytes if is_full else 0
        if self._region is not None:
            # the window's memory first: the state needs its room on a full device
            self._region.close()
            self._region, self._slots = None, []
        for planes in self._planes:
            left_bytes += planes.let_go(on_device=on_device)
        for bucket in self._buckets:
            if on_device:
                with suppress(BudgetError, torch.OutOfMemoryError):
                    bucket.parking.begin(Residency.RESIDENT).wait()
                left_bytes += bucket.parking.host_bytes if bucket.parking.residency is Residency.OFFLOADED else 0
            bucket.parking.hand_over()
        self._planes, self._buckets = [], []
        for state, name, moment in self._given:
            state[name] = moment
        if self._has_masters:
            # from here on the optimizer loads and steps its masters itself again
            self.optimizer.is_streamed = False
            self.publish()
        if left_bytes:
            warnings.warn(
                f"{format_bytes(left_bytes)} of the optimizer's state stay in host memory, since "
                f"{self._mover.device} has no room for them: it steps again once it is shared with a runtime, or loads "
                "its state where there is room",
                stacklevel=6,
            )

    def _has_room(self) -> bool:
        """Tell whether the device has room for all state that is returned to it; a CPU has it already."""
        returned_bytes = sum(planes.returned_bytes for planes in self._planes)
        returned_bytes += sum(bucket.parking.host_bytes for bucket in self._buckets)
        return self._mover.device.type == "cpu" or free_device_bytes(self._mover.device) >= returned_bytes

    def _open(self) -> None:
        """Take the slots' memory. Raises: `BudgetError` when the device has no room."""
        parts = self._parts()
        if size_bytes := carved_bytes(parts):
            num_slots = self._num_slots
            # a parameter that has joined since may need larger slots; without state that stays there is one less
            if self._region is not None and (self._region.size_bytes < size_bytes or len(self._slots) != num_slots):
                self._settle()
                self._region.close()
                self._region, self._slots = None, []
            if self._region is None:
                self._region = allocate_region(size_bytes, self._mover.device, name=self.name)
                memory = carve(self._region.bytes, parts)
                flats, slots = memory[:-num_slots], memory[-num_slots:]
                self._slots = [StateSlot(flats, slot) for slot in slots]
            elif not self._region.resident:
                self._region.restore()
        self._is_open = True

    def _settle(self) -> None:
        """Wait for copies under way: the host reads its own memory, and unmaps the device's, whatever streams do."""
        for stream in self._streams.values():
            stream.synchronize()

    def _leave(self) -> None:
        self._settle()
        for slot in self._slots:
            slot.forget()
        if self._region is not None and self._region.resident:
            self._region.release()
        # not waited for here: the next move of the same bucket waits
        for bucket in self._buckets:
            bucket.parking.begin(Residency.OFFLOADED)
        self._is_open = False

    def _parts(self) -> list[tuple[tuple[int], torch.dtype]]:
        """Memory of the flat parameter, its gradient, 16-bit weights and wide moments, and of the slots."""
        used = [planes for planes in self._planes if planes.ranges]
        if not used:
            return []
        # flat memory is shared by all planes, of the largest; each takes a part of it
        elements = max(planes.range_elements for planes in used)
        flat_bytes = max(planes.dtype.itemsize for planes in used) * elements
        # only bf16 and fp16 weights have masters: 2 bytes each
        weight_bytes = 2 * elements if self._masters else 0
        wide = max(planes.num_rounded for planes in used) * (4 * elements,)
        slots = self._num_slots * (self.slot_bytes,)
        return [((n,), torch.uint8) for n in (flat_bytes, flat_bytes, weight_bytes, *wide, *slots)]

    def _look_at_resident(self) -> None:
        """Show the segment of planes on the device its tensors; one that has left ends, and its planes are streamed."""
        if self.resident.residency is Residency.OFFLOADED:
            if self.resident.poll():
                self._let_resident_go()
            return
        staying = [planes for planes in self._planes if planes.stays is not None]
        # planes that are made are counted as they are: in the segment, or among what is kept
        missing = [planes.total_bytes + planes.padding_bytes for planes in staying if not planes.slabs]
        self.resident.expected_bytes = sum(missing)
        self.resident.look(tensor for planes in staying for tensor in planes.tensors_on_device())

    def _let_resident_go(self) -> None:
        """Leave the tensors of planes on the device to themselves, wherever they are."""
        was_parked = self.resident.residency is Residency.OFFLOADED
        with uninterrupted():  # planes that nobody moves back are streamed from now on
            self.resident.hand_over()
            self._resident_bytes = self.resident.expected_bytes = 0
            for planes in self._planes:
                if was_parked:
                    planes.stays = None

    # ---- what there is to step --------------------------------------------------------------------------------------

    def host_memory(self) -> list[torch.Tensor]:
        """The planes in host memory, as bytes (uint8)."""
        streamed = [planes for planes in self._planes if not planes.is_on_device]
        return [plane.view(torch.uint8) for planes in streamed for plane in planes.slabs.values()]

    def work(self) -> Iterator[Work]:
        """Yield everything that a step handles, in the order in which it is stepped."""
        here, away = ([r for p in self._planes if p.is_on_device is on for r in p.ranges] for on in (True, False))
        # ranges on the device are spread over the others, beside whose copies they are stepped
        spread = [((n + 0.5) / len(ranges), work) for ranges in (here, away) for n, work in enumerate(ranges)]
        yield from (work for _, work in sorted(spread, key=itemgetter(0)))
        yield from self._buckets

    def work_of(self, parameter: torch.Tensor) -> list[Work]:
        """The ranges of a parameter, or its bucket."""
        return self._work_of[id(parameter)]

    def has_planes(self, parameter: torch.Tensor) -> bool:
        """True for a parameter whose state lies in planes."""
        return isinstance(next(iter(self._work_of.get(id(parameter), ())), None), Range)

    def released_bytes(self) -> int:
        """Bytes of gradients alive at once when each range drops its own: the most that two neighbours have."""
        in_order: list[Work] = [*chain.from_iterable(planes.ranges for planes in self._planes), *self._buckets]
        sizes = [sum(local_bytes(p) for p in work.parameters if p.requires_grad) for work in in_order]
        return max((one + other for one, other in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)

    def take_in(self) -> None:
        """Find parameters that are new, and state that somebody has made, replaced or loaded; it goes to the host.

        Raises: `BudgetError` when the host has no room for it.
        """
        self._extend()
        with torch.no_grad():
            for planes in self._planes:
                planes.take_in()
            self._look_at_resident()
        self.stock = take_stock(self.optimizer)
        shared = self._park(self.stock)
        self.kept = [kept for bucket in self._buckets for kept in bucket.parking.kept] + shared

    def prepare(self) -> None:
        """Reserve host memory for all state, and agree with other ranks on what rounds moments.

        Raises: `BudgetError`; `TransferError` where other ranks are elsewhere; `Unsupported` for parameters that have
        changed their group. Nothing has changed then.
        """
        groups = self.optimizer.param_groups
        numbers = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        if any(numbers.get(id(p)) != planes.group for planes in self._planes for p in planes.parameters):
            raise Unsupported(REGROUPED)
        self.accept()
        self._extend()
        if self.resident.residency is Residency.OFFLOADED:
            self.resident.settle()
            self._let_resident_go()
        if self._seed is None and self._moment_dtype is not torch.float32:
            # of torch's generator, so that `torch.manual_seed` and a checkpoint of its state repeat a run; one number,
            # however many planes there are, since other parts of the run draw of it too
            self._seed = self._agree(int(torch.randint(1 << 48, (), device="cpu")))
        seed = self._seed or 0
        with torch.no_grad():
            # state that the loop has loaded goes into the planes before its scalars are compared
            for planes in self._planes:
                planes.take_in()
                planes.begin_step(seed)
                seed += planes.num_seeds
        self._mover.arena.reserve(sum(max(0, b.expected_bytes - b.parking.host_bytes) for b in self._buckets))

    def load(self, loaded: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Write loaded state of planes to the host, once torch has loaded the scalars."""
        self._seed = None
        self._settle()
        self.accept()
        for planes in self._planes:
            planes.load({p: loaded[p] for p in planes.parameters if p in loaded})
        self.publish()

    def publish(self) -> None:
        """Copy the state into `optimizer.state`, for an optimizer with masters."""
        if self._has_masters:
            self.optimizer.publish_state()

    def _extend(self) -> None:
        by_kind: dict[Any, list[torch.Tensor]] = defaultdict(list)
        rest: list[torch.Tensor] = []
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                is_new = id(parameter) not in self._work_of
                # frozen parameters without state join when they begin to train
                if not is_new or not (parameter.requires_grad or self.optimizer.state.get(parameter)):
                    continue
                if is_elementwise(self.base) and _has_plain_elements(parameter, self._mover.device):
                    # one plane has one group's hyperparameters, one dtype and one kind of master: one call of `step`
                    # serves its range
                    by_kind[number, parameter.dtype, type(self._masters.get(parameter))].append(parameter)
                else:
                    rest.append(parameter)
        for (number, _, kind), parameters in by_kind.items():
            how = partial(Planes, kind=kind, mover=self._mover, moment_dtype=self._moment_dtype)
            make = partial(how, self.base, self._masters, number)
            planes = make(parameters)
            staying = self._take_resident(planes) if self._resident_bytes else []
            if staying:
                self._add(make(staying, stays=self.resident))
                ids = set(map(id, staying))
                parameters = [p for p in parameters if id(p) not in ids]
            if parameters:
                self._add(make(parameters) if staying else planes)
        # 8 bytes an element stand for two fp32 moments where nothing is known yet
        for parameters in batches(rest, lambda p: self._expected_bytes(p) or 8 * p.numel(), self._range_bytes):
            parking = Parking(self.name, self._mover, name_of=lambda t: self.stock.name_of(t), keeps_addresses=False)
            transient_bytes = sum(self.optimizer.transient_bytes(p) for p in parameters) if self._has_masters else 0
            expected_bytes = sum(map(self._expected_bytes, parameters))
            bucket = Bucket(self._number, parameters, parking, expected_bytes, transient_bytes)
            self._number += 1
            self._buckets.append(bucket)
            self._work_of.update({id(p): [bucket] for p in parameters})

    def _take_resident(self, planes: Planes) -> list[torch.Tensor]:
        """Take parameters whose state stays on the device, the first that there is room for."""
        taken, padding_bytes = [], planes.padding_bytes
        # without any state yet nobody knows how much a class that begins to keep some will keep
        for parameter in planes.parameters if planes.layout else ():
            size_bytes = planes.bytes_of(align_up(local_shard(parameter).numel(), DIGEST_ELEMENTS))
            if padding_bytes + size_bytes <= self._resident_bytes:
                taken.append(parameter)
                self._resident_bytes -= padding_bytes + size_bytes
                padding_bytes = 0
        return taken

    def _add(self, planes: Planes) -> None:
        planes.cut(self._range_bytes, self._number)
        self._number += len(planes.ranges)
        self._planes.append(planes)
        for work in planes.ranges:
            for parameter in work.parameters:
                self._work_of.setdefault(id(parameter), []).append(work)

    def _expected_bytes(self, parameter: torch.Tensor) -> int:
        """Bytes that a first step makes for a parameter in a bucket, as far as is known."""
        return self.optimizer.expected_master_bytes(parameter) if self._has_masters else 0

    def _park(self, stock: Stock) -> list[Kept]:
        """Give each bucket the tensors of its parameters' state; what several parameters share stays on the device.

        So does what the optimizer itself refers to, such as a table: it may use it for any parameter.
        """
        if not self._buckets:
            return []
        own = [value for name, value in vars(self.base).items() if name not in ("state", "param_groups")]
        shared = {id(leaf) for leaf in pytree.tree_leaves(own) if isinstance(leaf, torch.Tensor)}
        numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(self.optimizer))}
        bucket_of: dict[Any, int] = {numbers.get(id(p)): b.number for b in self._buckets for p in b.parameters}
        owners: dict[int, set[int]] = defaultdict(set)
        for tensor in (*stock.moments, *stock.masters):
            owners[storage_key(tensor)] |= {bucket_of.get(key, -1) for key in stock.keys_of(tensor)}
        members: dict[int, list[torch.Tensor]] = defaultdict(list)
        kept = []
        for tensor in (*stock.moments, *stock.masters):
            first, *others = owners[storage_key(tensor)]
            # `-1` stands for parameters in planes, whose tensors are not parked
            if not others and first == -1:
                continue  # of planes
            if others or id(tensor) in shared:
                kept.append(Kept(stock.name_of(tensor), tensor.nbytes, "several parameters share it"))
            else:
                members[first].append(tensor)
        for bucket in self._buckets:
            bucket.parking.look(members[bucket.number])
            if members[bucket.number]:
                bucket.expected_bytes = 0
            # an open window has the bucket where it is; closing it will send it away
            if not self._is_open:
                bucket.parking.begin(Residency.OFFLOADED)
        return kept

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def step(self, work: Work, due: list[torch.Tensor], following: Work | None, note: Note) -> None:
        """Step the parameters of `work` that are `due`, and `note` each stepped one, also on an error."""
        if isinstance(work, Range):
            self._step_range(work, due, note)
        else:
            assert isinstance(work, Bucket)
            self._step_bucket(work, due, following, note)

    def _step_bucket(self, bucket: Bucket, due: list[torch.Tensor], following: Work | None, note: Note) -> None:
        bucket.parking.begin(Residency.RESIDENT).wait()
        if isinstance(following, Bucket):
            following.parking.begin(Residency.RESIDENT)
        try:
            if self._has_masters:
                self.optimizer.step_part(due)
            else:
                ids = set(map(id, due))
                groups = [
                    # groups keep their hyperparameters: a schedule has changed them for this step
                    {**group, "params": [p for p in group["params"] if id(p) in ids]}
                    for group in self.base.param_groups
                ]
                own_step(type(self.base))(part_of(self.base, groups, self.base.state))
                # kept until the step ends: each bucket finds the groups as they were before it
                self._written = [
                    {k: v for k, v in made.items() if k != "params" and (k not in given or given[k] is not v)}
                    for made, given in zip(groups, self.base.param_groups, strict=True)
                ]
            changes = getattr(self.optimizer, "changes", None)
            # before the state leaves, for which the host may have no room: these weights have been stepped
            note(due, [changes] if changes is not None else [])
        finally:
            # the first step has made state, which must leave with the bucket like any other
            self.stock = take_stock(self.optimizer)
            self._park(self.stock)
            bucket.parking.begin(Residency.OFFLOADED)

    def _step_range(self, work: Range, due: list[torch.Tensor], note: Note) -> None:
        """Copy a range's state into a slot, step it there, and queue its way back."""
        planes = work.planes
        if planes.is_on_device:  # in a slot and on a stream that copies over the bus do not wait for
            slot, streams = self._slots[NUM_SLOTS], {}
        else:
            # slots in turn: the range that had this one was two turns earlier
            slot, streams = self._slots[self._turn % NUM_SLOTS], self._streams
            self._turn += 1
        # on its own stream, so that the copy overlaps with the step of the range before
        with _on(streams.get("in")):
            state = slot.views(planes)
            self._wait(slot.left)  # the range that was here last is still being copied out
            self._wait(work.left)  # and so may this one be, by a step that has failed
            planes.copy_in(work, state)
            arrived = _event(streams.get("in"))
        self._wait(arrived)
        ids, leaving = set(map(id, due)), []
        try:
            for pieces in planes.intervals(work, ids):
                names, changes = planes.step(slot, pieces, state)
                leaving.append((pieces, names))
                note([piece[0] for piece in pieces], changes)
        finally:  # weights that have been written and their state belong together
            stepped = _event(torch.cuda.current_stream(self._mover.device) if streams else None)
            with _on(streams.get("out")):
                self._wait(stepped)
                for pieces, names in leaving:
                    planes.copy_out(work, pieces, names, state)
                slot.left = work.left = _event(streams.get("out"))

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            # of the window's device, which may not be the current one
            torch.cuda.current_stream(self._mover.device).wait_event(event)

    def end_part(self, parameters: Iterable[torch.Tensor]) -> None:
        """End the step for some parameters, all of whose elements have been stepped: the next is another one."""
        ids = set(map(id, parameters))
        for planes in self._planes:
            planes.end_part(ids)

    def end_step(self) -> None:
        """Wait until the host's state is whole, and show what a step has counted."""
        self._seed = None
        self._settle()
        for planes in self._planes:
            planes.end_step()
        for group, written in zip(self.base.param_groups, self._written, strict=False):
            group.update(written)  # such as a count of steps
        self._written = []
        if self._has_masters:
            self.optimizer.end_step()
        self.publish()


def _has_plain_elements(parameter: torch.Tensor, device: torch.device) -> bool:
    shard = local_shard(parameter)
    return (
        shard.device == device
        and parameter.dim() > 0
        and shard.numel() > 0
        and shard.is_floating_point()
        and shard.is_contiguous()
        # a sparse gradient has no elements in order: such parameters go into a bucket
        and not (parameter.grad is not None and parameter.grad.layout is not torch.strided)
    )


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()
