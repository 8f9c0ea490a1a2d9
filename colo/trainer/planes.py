"""Optimizer state in host memory, in planes, which is stepped range by range.

For classes that compute element by element (Adam's kind, SGD, RMSprop, ...) each kind of state (`exp_avg`,
`exp_avg_sq`; `master_remainder`, by which bf16 weights differ from their fp32 masters) is one pinned slab over many
parameters in order, and a parameter's state is an ordinary host tensor over its stretch of it. A step walks the
elements in equal ranges, wherever parameters begin and end, through a ring of slots: copy in, step, copy out, each in a
stream of its own. A slot steps by the user's class, over one flat parameter that never moves. So nothing is pointed,
hidden or gathered, a large embedding needs no larger window, and Python runs per range, not per parameter.

Planes may lie on the device instead, as one set of tensors that is parked once its room is needed: from then on they
are planes like the others.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any

import torch

from colo.errors import BudgetError
from colo.memory.arena import Extent
from colo.memory.offload import Mover
from colo.memory.parking import Parking
from colo.memory.probe import free_device_bytes
from colo.memory.region import ALIGNMENT_BYTES, carve
from colo.memory.storage import is_dtensor, local_shard
from colo.phases.phase import Residency
from colo.trainer.master_weights import SplitMaster, WholeMaster
from colo.trainer.optimizers import is_elementwise, own_step
from colo.trainer.remainders import (
    DIGEST_ELEMENTS,
    MASTER_DIGESTS,
    MASTER_REMAINDER,
    MASTER_WEIGHT,
    MOMENTS,
    OF_MASTERS,
    OF_VARIANCE,
    close_masters,
    open_masters,
    round_stochastically,
    round_to_nearest,
    split,
)
from colo.units import align_up, format_bytes

Pieces = list[tuple[torch.Tensor, int, int, int]]  # (parameter, start, stop, place in the range) of elements

Note = Callable[[list[torch.Tensor], list[tuple[torch.Tensor, int]]], None]
"""Told which parameters have been stepped, and the changed and all elements of their 16-bit weights."""


@dataclass(eq=False)
class Work:
    """Unit of a step: `parameters`, or a range of their elements. `number` is unique."""

    number: int
    parameters: list[torch.Tensor]


@dataclass(eq=False)
class Range(Work):
    """Elements [first, last) of some planes."""

    planes: Planes
    first: int
    last: int
    pieces: Pieces = field(default_factory=list)
    left: torch.cuda.Event | None = None  # the end of its last copy to the host


class StateSlot:
    """Device memory for the state of a range."""

    def __init__(self, flats: list[torch.Tensor], memory: torch.Tensor) -> None:
        # of weights in the dtype of the step, gradients, 16-bit weights, and moments that planes have in bf16
        self._flats, self._memory = flats, memory
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._parameters: dict[tuple[torch.dtype, int, int], torch.nn.Parameter] = {}
        self.left: torch.cuda.Event | None = None

    def views(self, planes: Planes) -> dict[str, torch.Tensor]:
        """The slot's memory as state of `planes`, by name; the slot keeps what is added."""
        found = self._views.get(id(planes))
        if found is None:
            found = dict(zip(planes.layout, carve(self._memory, planes.specs), strict=True))
            self._views[id(planes)] = found
        for name, plane in planes.slabs.items():
            # begun since the window was laid out, and so outside of its region
            if name not in found:
                found[name] = torch.empty(planes.range_elements, dtype=plane.dtype, device=self._memory.device)
        return found

    def forget(self) -> None:
        """Let go of memory outside of the region. Ordering: after the copies that use it."""
        self._views.clear()

    def scratch(self, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Memory for the 16-bit weights of elements, beside the flat parameter."""
        return self._flats[2].view(dtype)[start:stop]

    def wide(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Memory for elements of the moment of a number in fp32, whose plane is bf16; all slots share it."""
        if 3 + number < len(self._flats):
            return self._flats[3 + number].view(torch.float32)[start:stop]
        # begun since the window was laid out
        return torch.empty(stop - start, dtype=torch.float32, device=self._memory.device)

    def flat(self, dtype: torch.dtype, start: int, stop: int) -> torch.nn.Parameter:
        """The elements [start, stop) of the flat parameter of a dtype, with a gradient; all slots share its memory."""
        key = (dtype, start, stop)
        found = self._parameters.get(key)
        if found is None:
            weight, gradient = (flat.view(dtype)[start:stop] for flat in self._flats[:2])
            found = torch.nn.Parameter(weight)
            found.grad = gradient
            self._parameters[key] = found
        return found


class Planes:
    """The state of some parameters of one group, of one dtype and with one kind of master, over all their elements."""

    def __init__(
        self,
        base: Any,
        masters: Mapping[torch.Tensor, Any],
        group: int,
        parameters: list[torch.Tensor],
        kind: type,
        mover: Mover,
        stays: Parking | None = None,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`base` is the optimizer whose class steps; `kind` is that of all masters.

        With `stays` the planes are made on the device, as tensors of that segment. fp32 moments are kept in
        `moment_dtype`.
        """
        self.parameters = parameters
        self.stays = stays
        """The segment of planes on the device; `None` for host memory, also once they have left for it."""

        self.ranges: list[Range] = []
        self.range_elements = 0
        self.slabs: dict[str, torch.Tensor] = {}
        """Pinned slabs by the name of the state, shape [elements], of digests [blocks]; or tensors of the device."""

        self.group = group
        self._base, self._masters, self._mover = base, masters, mover
        self._is_split, self._is_whole = kind is SplitMaster, kind is WholeMaster
        # masters are fp32 whatever the weights are; without a master the class steps in the weights' own dtype
        self.dtype = torch.float32 if self._is_split or self._is_whole else parameters[0].dtype
        """The dtype that the class steps in."""

        self._moment_dtype = moment_dtype
        is_centered = bool(base.param_groups[group].get("centered"))
        self._moments = MOMENTS - OF_VARIANCE if is_centered else MOMENTS
        self._seed = 0  # by which the present step rounds moments
        self._is_on_cpu = mover.device.type == "cpu"
        self._starts: dict[torch.Tensor, int] = {}
        start = 0
        for parameter in parameters:
            self._starts[parameter] = start
            # at a block of digests, so that no block spans two parameters
            start += align_up(local_shard(parameter).numel(), DIGEST_ELEMENTS)
        self._num_elements = start
        self.extents: dict[str, Extent] = {}
        self._views: dict[torch.Tensor, dict[str, torch.Tensor]] = {parameter: {} for parameter in parameters}
        self._tokens: dict[torch.Tensor, object] = {}  # parameters with equal scalars have the same
        self._noted: dict[torch.Tensor, tuple[Any, ...]] = {}  # identities of the scalars that a token is of
        self._after: dict[object, tuple[object, dict[str, Any]]] = {}  # token: that after the step, and its scalars
        self._stepped: dict[torch.Tensor, object] = {}
        self.layout = self._layout()  # the dtype of each kind of state, as it was when the window was laid out

    # ---- layout -----------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, torch.dtype]:
        """List the kinds of state that the class keeps of each element: of some parameter, or of a trial."""
        names: dict[str, torch.dtype] = {}
        if self._is_split:
            names |= {MASTER_REMAINDER: torch.int16, MASTER_DIGESTS: torch.int64}
        if self._is_whole:
            names[MASTER_WEIGHT] = torch.float32
        # classes keep the same state for every parameter of a group, so that the first with any answers for all
        for parameter in self.parameters:
            state = self._state_of(parameter)
            for name, value in state.items():
                if is_plane(value, parameter):
                    names[name] = self.dtype_of(name, value.dtype)
            if state:
                return names
        # before its first step only the class knows what it keeps: it steps two elements, into a state of their own
        trial = torch.nn.Parameter(torch.zeros(2, dtype=self.dtype, device=self._mover.device))
        trial.grad = torch.zeros_like(trial)
        trials: dict[Any, dict[str, Any]] = defaultdict(dict)
        # `own_step`, not `step`: torch's profiling wrapper would run the user's hooks for this trial
        own_step(type(self._base))(part_of(self._base, [self._options([trial])], trials))
        made = {name: value.dtype for name, value in trials[trial].items() if is_plane(value, trial)}
        return names | {name: self.dtype_of(name, dtype) for name, dtype in made.items()}

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which planes keep state that is given in `dtype`."""
        # whatever it is given in: moments that another runtime has left in bf16 are stepped in fp32 like others
        return self._moment_dtype if name in self._moments and self.dtype is torch.float32 else dtype

    @property
    def num_seeds(self) -> int:
        """Number of seeds that a step may use, from that of `begin_step` on."""
        return len(MOMENTS) * self._num_elements

    @property
    def num_rounded(self) -> int:
        """Number of the kinds of state that are rounded: moments in bf16."""
        return sum(map(self._is_rounded, self.layout))

    def _is_rounded(self, name: str) -> bool:
        return self.dtype_of(name, torch.float32) is not torch.float32

    def _options(self, parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
        return {**self._base.param_groups[self.group], "params": parameters}

    def count(self, name: str, elements: int) -> int:
        """Entries of a plane for a number of elements."""
        return -(-elements // DIGEST_ELEMENTS) if name == MASTER_DIGESTS else elements

    @property
    def specs(self) -> list[tuple[tuple[int], torch.dtype]]:
        """Shape and dtype of a range's state, by kind."""
        return [((self.count(name, self.range_elements),), dtype) for name, dtype in self.layout.items()]

    @property
    def total_bytes(self) -> int:
        """Bytes of all planes."""
        return self.bytes_of(self._num_elements)

    def bytes_of(self, elements: int) -> int:
        """Bytes of the state of a number of elements."""
        return sum(self.count(name, elements) * dtype.itemsize for name, dtype in self.layout.items())

    @property
    def padding_bytes(self) -> int:
        """Bytes that all planes take beside theirs, at the most, where each is parked as a tensor of its own."""
        return len(self.layout) * ALIGNMENT_BYTES

    @property
    def host_bytes(self) -> int:
        """Host bytes that the planes hold, but for those of a segment of planes on the device."""
        made = self.slabs.items() if self.stays is None else ()
        left = sum(slab.nbytes for name, slab in made if name not in self.extents)
        return left + sum(extent.size_bytes for extent in self.extents.values())

    @property
    def returned_bytes(self) -> int:
        """Device bytes that `let_go` takes: of what is in host memory, and of moments in fp32, wherever they are."""
        made = self.slabs.items()
        narrow_bytes = sum(slab.nbytes for name, slab in made if self._is_rounded(name))
        others = sum(slab.nbytes for name, slab in made if name in self.extents and not self._is_rounded(name))
        return torch.float32.itemsize // torch.bfloat16.itemsize * narrow_bytes + others

    @property
    def is_on_device(self) -> bool:
        """True while the planes are on the device, or will be made there."""
        return self.stays is not None and self.stays.residency is not Residency.OFFLOADED

    def tensors_on_device(self) -> list[torch.Tensor]:
        """The tensors over planes that were made on the device: slabs, state and masters of parameters."""
        names = [name for name in self.slabs if name not in self.extents]
        found = [self.slabs[name] for name in names]
        for parameter, views in self._views.items():
            found += [local_shard(views[name]) for name in names]
            if MASTER_WEIGHT in names and self._masters[parameter].state:
                found.append(local_shard(self._masters[parameter].tensor))  # see `_adopt_master`
        return found

    def cut(self, range_bytes: int, number: int) -> None:
        """Cut the elements into ranges of about `range_bytes`, at digests' blocks, numbered from `number` on."""
        # digests are one number for 1024 elements, too few to count in a range's size
        element_bytes = max(1, sum(t.itemsize for n, t in self.layout.items() if n != MASTER_DIGESTS))
        size = max(DIGEST_ELEMENTS, range_bytes // element_bytes // DIGEST_ELEMENTS * DIGEST_ELEMENTS)
        self.range_elements = size = min(size, self._num_elements)
        if not size:
            return
        for n, first in enumerate(range(0, self._num_elements, size)):
            self.ranges.append(Range(number + n, [], self, first, min(first + size, self._num_elements)))
        for parameter, start in self._starts.items():
            stop = start + local_shard(parameter).numel()
            # `max` is for a parameter without elements on this rank, whose stop is its start
            for work in self.ranges[start // size : max(start, stop - 1) // size + 1]:
                a, b = max(start, work.first), min(stop, work.last)
                if a < b:
                    work.pieces.append((parameter, a - start, b - start, a - work.first))
                    work.parameters.append(parameter)

    # ---- the host's side --------------------------------------------------------------------------------------------

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state that the stepping class keeps of a parameter, as the optimizer has it."""
        state: dict[str, Any] = self._base.state.get(self._key_of(parameter), {})
        return state

    def _key_of(self, parameter: torch.Tensor) -> torch.Tensor:
        # under `MasterWeights` the inner optimizer's keys are the masters, not the model's parameters
        master = self._masters.get(parameter)
        return parameter if master is None else master.tensor

    def take_in(self) -> None:
        """Copy state that the loop has made or loaded into the planes, and give the optimizer the planes' tensors."""
        for parameter in self.parameters:
            state = self._state_of(parameter)
            if state:
                self._adopt(parameter, state)
            master = self._masters.get(parameter)
            if master is not None and (kept := master.state):
                self._adopt_master(parameter, master, kept)

    def _adopt(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        own = self._views[parameter]
        for name, value in state.items():
            if value is not None and own.get(name) is value:
                plane = self.slabs[name]
                address = plane.data_ptr() + self.count(name, self._starts[parameter]) * plane.dtype.itemsize
                if local_shard(value).data_ptr() != address:  # somebody has assigned its data
                    host = self._stretch_of(name, parameter)
                    host.copy_(local_shard(value))
                    # the optimizer keeps its tensor object, which a loop may hold; only its memory becomes the plane's
                    local_shard(value).data = host
            elif is_plane(value, parameter):
                self._need(name, self.dtype_of(name, value.dtype))
                # read anew: `_need` may just have made this view
                own = self._views[parameter]
                self._write(name, own[name], value)
                state[name] = own[name]

    def _write(self, name: str, view: torch.Tensor, value: torch.Tensor) -> None:
        if self._is_rounded(name):
            round_to_nearest(local_shard(value), local_shard(view))
        else:
            local_shard(view).copy_(local_shard(value))

    def _adopt_master(self, parameter: torch.Tensor, master: Any, kept: Mapping[str, torch.Tensor]) -> None:
        # the usual case of every step, found without touching memory
        if all(self._views[parameter].get(name) is value for name, value in kept.items()):
            return
        for name, value in kept.items():
            self._need(name, value.dtype)
            view = self._views[parameter][name]
            if name == MASTER_WEIGHT:
                host, local = local_shard(view), local_shard(value)
                if local.data_ptr() != host.data_ptr():
                    # the inner optimizer steps this very object: its memory changes, the object stays
                    host.copy_(local)
                    local.data = host
            else:
                view.copy_(value)
        if self._is_split:
            master.adopt({name: self._views[parameter][name] for name in kept})

    def _need(self, name: str, dtype: torch.dtype) -> None:
        """Make the plane `name`, if there is none. Raises: `BudgetError` without host memory for it."""
        # those on the device are made together, so that their segment has its size from the first on
        for wanted, of in ({name: dtype} | self.layout if self.is_on_device else {name: dtype}).items():
            if wanted not in self.slabs:
                self._make(wanted, of)

    def _make(self, name: str, dtype: torch.dtype) -> None:
        count = self.count(name, self._num_elements)
        if self.is_on_device:
            self.slabs[name] = self._made_on_device(name, count, dtype)
        else:
            extent = self._mover.arena.allocate(count * dtype.itemsize)
            self.extents[name] = extent
            self.slabs[name] = self._mover.arena.tensor(extent, 0, count * dtype.itemsize).view(dtype)
        for parameter in self._starts:
            self._views[parameter][name] = _like(parameter, self._stretch_of(name, parameter))

    def _made_on_device(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(count, dtype=dtype, device=self._mover.device)
        except torch.OutOfMemoryError:
            raise BudgetError(
                f"{format_bytes(count * dtype.itemsize)} of the optimizer's state ({name}) find no room on "
                f"{self._mover.device}, where resident_state_bytes has them stay: make it smaller, or the batch",
                needed_bytes=count * dtype.itemsize,
                free_bytes=free_device_bytes(self._mover.device),
            ) from None

    def _stretch_of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor over a parameter's stretch of a plane, no view of another; in the arena with its own storage."""
        plane, shard = self.slabs[name], local_shard(parameter)
        dtype = plane.dtype
        first, length = self.count(name, self._starts[parameter]), self.count(name, shard.numel())
        memory = plane[first : first + length]
        if name in self.extents:
            memory = self._mover.arena.tensor(self.extents[name], first * dtype.itemsize, length * dtype.itemsize)
        shape = torch.Size([length]) if name == MASTER_DIGESTS else shard.shape
        # `set_` makes no view: a view would keep its base, and with it the whole extent, alive
        made = torch.empty(0, dtype=dtype, device=plane.device)
        at = memory.storage_offset() * memory.element_size() // dtype.itemsize
        # strides of a contiguous tensor: a shard may have others, and the plane's elements lie in order
        return made.set_(memory.untyped_storage(), at, shape, torch.empty(shape, device="meta").stride())

    def load(self, loaded: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Write what a state dict has into the planes; scalars are in the optimizer's state already."""
        for parameter, given in loaded.items():
            master = self._masters.get(parameter)
            if master is not None:
                of_master = {name: given[name] for name in OF_MASTERS if name in given}
                if of_master:
                    master.load(of_master)
                    self._adopt_master(parameter, master, master.state)
            for name, value in given.items():
                if name not in OF_MASTERS and is_plane(value, parameter):
                    # the plane's dtype wins over the file's: a checkpoint in another precision is cast here
                    self._need(name, self.layout.get(name, self.dtype_of(name, value.dtype)))
                    self._write(name, self._views[parameter][name], value)
                    self._base.state[self._key_of(parameter)][name] = self._views[parameter][name]

    def let_go(self, *, on_device: bool) -> int:
        """Give the state memory of its own: on the device as far as there is room; bytes that stay on the host."""
        left_bytes = 0
        # tensors of the state stay valid after the runtime, over host memory if need be
        for name, extent in self.extents.items():  # it goes back with the last tensor over it
            parts = [local_shard(views[name]) for views in self._views.values() if name in views]
            self._mover.arena.release_after(extent, parts)
        for parameter, views in self._views.items():
            # a parameter that waits in host memory has its state there too
            if local_shard(parameter).device != self._mover.device:
                continue
            for name, view in views.items():
                host = local_shard(view)
                try:
                    if self._is_rounded(name) and (on_device or self._is_on_cpu):
                        self._widen(parameter, name, view)
                    elif on_device and not self.is_on_device:
                        host.data = host.to(self._mover.device, copy=True)
                        if name == MASTER_WEIGHT:
                            # `_adopt_master` made master and plane the same memory, so that both have to follow
                            local_shard(self._masters[parameter].tensor).data = host
                # one that does not fit stays where it is; smaller ones behind it may still fit
                except torch.OutOfMemoryError:
                    left_bytes += host.nbytes
        return left_bytes

    def _widen(self, parameter: torch.Tensor, name: str, view: torch.Tensor) -> None:
        """Give a parameter a moment in fp32: torch steps fp32 parameters by no other."""
        state = self._state_of(parameter)
        if state.get(name) is view:  # one that was never stepped has none
            state[name] = _like(parameter, local_shard(view).to(self._mover.device, torch.float32))

    # ---- a step -----------------------------------------------------------------------------------------------------

    def begin_step(self, seed: int) -> None:
        """Make the planes, and note which parameters have the same scalars: those are stepped together.

        By `seed` moments are rounded. Raises: `BudgetError` without host memory for the planes.
        """
        for name, dtype in self.layout.items():
            self._need(name, dtype)
        self._after.clear()
        self._stepped.clear()
        self._seed = seed
        for parameter in self.parameters:
            scalars = self._scalars_of(parameter)
            if self._noted.get(parameter) != _identities(scalars):  # else no value is read, which would wait for a GPU
                values = tuple(
                    (n, v.item() if torch.is_tensor(v) and v.numel() == 1 else repr(v)) for n, v in scalars.items()
                )
                self._tokens[parameter] = (bool(self._state_of(parameter)), values)
                self._noted[parameter] = _identities(scalars)

    def copy_in(self, work: Range, state: dict[str, torch.Tensor]) -> None:
        """Queue copies of a range's state into a slot."""
        # all planes, also those that the class has begun to use since the layout: `views` has made room for them
        for name, plane in self.slabs.items():
            first, last = self.count(name, work.first), self.count(name, work.last)
            state[name][: last - first].copy_(plane[first:last], non_blocking=True)

    def copy_out(self, work: Range, pieces: Pieces, names: Iterable[str], state: dict[str, torch.Tensor]) -> None:
        """Queue copies of the state of some pieces back to the host."""
        # only what was stepped: elements that are not due keep the host's values
        start, stop = _extent_of(pieces)
        for name in names:
            first, last, offset = (self.count(name, n) for n in (start, stop, work.first))
            self.slabs[name][offset + first : offset + last].copy_(state[name][first:last], non_blocking=True)

    def intervals(self, work: Range, due: set[int]) -> list[Pieces]:
        """Pieces of a range that are due, those next to each other with equal scalars together."""
        # neighbours are stepped by one call; one call for each parameter would be bound by kernel launches
        found: list[Pieces] = []
        last: object = None
        for piece in work.pieces:
            token = self._tokens[piece[0]] if id(piece[0]) in due else None
            # A CPU's kernels round the last few elements of a tensor otherwise than the rest: one parameter at a time.
            if token is not None and token == last and not self._is_on_cpu:
                found[-1].append(piece)
            elif token is not None:
                found.append([piece])
            last = token
        return found

    def step(
        self, slot: StateSlot, pieces: Pieces, state: dict[str, torch.Tensor]
    ) -> tuple[list[str], list[tuple[torch.Tensor, int]]]:
        """Step pieces next to each other by the user's class.

        Returns the names of the state that has changed, and the 16-bit elements that did with the number of all.
        """
        start, stop = _extent_of(pieces)
        flat = slot.flat(self.dtype, start, stop)
        gradient = flat.grad
        assert gradient is not None
        mine = {name: view[self.count(name, start) : self.count(name, stop)] for name, view in state.items()}
        places = [slice(at - start, at - start + b - a) for _, a, b, at in pieces]
        weights = [local_shard(p).detach().view(-1)[a:b] for p, a, b, _ in pieces]
        gaps = [
            slice(one.stop, other.start) for one, other in pairwise([*places, slice(stop - start, None)])
        ]  # between parameters, of which digests are of zeros
        old = slot.scratch(weights[0].dtype, start, stop) if self._is_split or self._is_whole else None
        # without masters the flat parameter is read and written itself
        read = flat.data if old is None else old
        torch._foreach_copy_([read[place] for place in places], weights)
        if old is not None:
            # garbage in a gap would be digested, and the next step would take its block for written to
            _zero(old, gaps)
            self._fill(flat.data, old, places, pieces, mine)
        held = [(local_shard(p.grad), a, b) for p, a, b, _ in pieces]
        gradients = [(g if g.layout is torch.strided else g.to_dense()).reshape(-1)[a:b] for g, a, b in held]
        torch._foreach_copy_([gradient[place] for place in places], gradients)
        rounded = [name for name in mine if self._is_rounded(name)]
        wide = {name: slot.wide(n, start, stop) for n, name in enumerate(rounded)}
        if wide:
            torch._foreach_copy_(list(wide.values()), [mine[name] for name in rounded])
        made = self._step_flat(flat, pieces, mine | wide)
        # a stretch of a plane has random numbers of its own, whatever else is stepped
        seeds = count(self._seed + len(MOMENTS) * (self._starts[pieces[0][0]] + pieces[0][1]))
        # the names come from what the class has made, not from the layout: it may drop or begin a state
        names = [name for name, value in made.items() if is_plane(value, flat)]
        for name in names:
            if name not in mine:  # the class has begun to use it: the plane is made, and a slot has it from the next on
                dtype = self.dtype_of(name, made[name].dtype)
                self._need(name, dtype)
                state[name] = torch.empty(self.range_elements, dtype=dtype, device=flat.device)
                mine[name] = state[name][start:stop]
            if self._is_rounded(name):  # the class has used the gradient, whose memory is free
                round_stochastically(made[name], mine[name], gradient.view(torch.int32), next(seeds))
            # some classes replace a state tensor (`state[x] = new`) where others write in place
            elif made[name].data_ptr() != mine[name].data_ptr():
                mine[name].copy_(made[name])
        changes = []
        if old is not None:
            # the class has stepped the gaps too, by whatever gradient lay there
            _zero(flat.data, gaps)
            changes = [(self._empty(flat.data, old, mine), sum(weight.numel() for weight in weights))]
            names += [name for name in OF_MASTERS if name in self.layout]
        # last: until here the model still has the weights from before the step
        torch._foreach_copy_(weights, [read[place] for place in places])
        token = self._tokens[pieces[0][0]]
        # scalars of the first interval serve all with the same token: equal before, they are equal afterwards
        self._after.setdefault(token, (object(), {n: v for n, v in made.items() if not is_plane(v, flat)}))
        self._stepped.update((piece[0], token) for piece in pieces)
        return names, changes

    def _step_flat(self, flat: torch.nn.Parameter, pieces: Pieces, mine: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Call the class's step for the flat parameter; the state that it has afterwards."""
        base, known = self._base, self._state_of(pieces[0][0])
        given = {
            # clones: the class counts its `step` in place, and other intervals of the parameter still need the old
            # count
            name: mine[name] if name in mine else value.detach().clone() if torch.is_tensor(value) else value
            for name, value in known.items()
        }
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        if given:
            state[flat] = given
        own_step(type(base))(part_of(base, [self._options([flat])], state))
        return state.get(flat, {})

    def _fill(
        self, flat: torch.Tensor, old: torch.Tensor, places: list[slice], pieces: Pieces, state: dict[str, torch.Tensor]
    ) -> None:
        """Write the masters of 16-bit weights into the flat parameter."""
        if self._is_whole:
            master = state[MASTER_WEIGHT]
            # a weight that is not its master rounded was written by somebody: it becomes its own master
            flat.copy_(torch.where(_rounded(master, old.dtype) == old, master, old.to(torch.float32)))
            return
        known = [bool(self._masters[piece[0]].state) for piece in pieces]
        if all(known):
            open_masters(old, state[MASTER_REMAINDER], state[MASTER_DIGESTS], flat)
            return
        flat.copy_(old)  # the first step: masters are the weights, unless state of them was loaded
        for place, is_known in zip(places, known, strict=True):
            if is_known:
                blocks = slice(place.start // DIGEST_ELEMENTS, -(-place.stop // DIGEST_ELEMENTS))
                open_masters(old[place], state[MASTER_REMAINDER][place], state[MASTER_DIGESTS][blocks], flat[place])

    def _empty(self, flat: torch.Tensor, old: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """Write the masters back, into the slot and over the 16-bit weights; the number of those that have changed."""
        changed = torch.zeros((), dtype=torch.int64, device=flat.device)
        if self._is_split:
            close_masters(flat, old, state[MASTER_REMAINDER], state[MASTER_DIGESTS], changed)
        else:
            state[MASTER_WEIGHT].copy_(flat)
            rounded = _rounded(flat, old.dtype)
            changed += (rounded != old).sum()
            old.copy_(rounded)
        return changed

    def end_step(self) -> None:
        """Give every parameter that was stepped its state: the planes' tensors, and the scalars that the class made."""
        self.end_part({id(parameter) for parameter in self._stepped})
        self._after.clear()

    def end_part(self, ids: set[int]) -> None:
        """End the step for some of the parameters; see `end_step`."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        ended = {p: token for p, token in self._stepped.items() if id(p) in ids}
        for parameter, token in ended.items():
            after, scalars = self._after[token]
            state = self._base.state[self._key_of(parameter)]
            for name, value in scalars.items():
                mine = state.get(name)
                if torch.is_tensor(value) and torch.is_tensor(mine):
                    pairs.append((mine, value))
                else:  # each parameter has a tensor of its own, which a checkpoint may load to elsewhere
                    state[name] = value.detach().clone() if torch.is_tensor(value) else value
            views = self._views[parameter]
            # masters' entries are not the class's state: the optimizer around it publishes them
            state.update((name, view) for name, view in views.items() if name not in OF_MASTERS)
            if self._is_split:
                self._masters[parameter].adopt({name: views[name] for name in (MASTER_REMAINDER, MASTER_DIGESTS)})
            # the next step compares tokens, not values, which would wait for the GPU
            self._tokens[parameter] = after
        # one launch for all counters, instead of one for each parameter
        if pairs:
            torch._foreach_copy_([mine for mine, _ in pairs], [value for _, value in pairs])
        # after the copies, which raise the versions that `_identities` looks at
        for parameter in ended:
            self._noted[parameter] = _identities(self._scalars_of(parameter))
            del self._stepped[parameter]

    def _scalars_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {name: v for name, v in self._state_of(parameter).items() if not is_plane(v, parameter)}


def part_of(optimizer: Any, groups: list[dict[str, Any]], state: Any) -> Any:
    """An object of the optimizer's class, with all it has but for its parameter groups, its state and its hooks.

    Hooks belong to the user's one step; a class whose `step` calls that of its base has torch call them once more.
    """
    # `__init__` would make groups and state anew: only the class's `step` is wanted
    made = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}
    made.__dict__.update(optimizer.__dict__, param_groups=groups, state=state, **hooks)
    return made


def refuse_sparse(optimizer: Any) -> None:
    """Let the class step one number by a sparse gradient: torch's own raise `RuntimeError` where they do not take any.

    What planes step is dense, whatever the gradients were.
    """
    one = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    one.grad = torch.zeros(1, device="cpu").to_sparse()
    if is_elementwise(optimizer):
        with suppress(KeyError):  # of Adagrad, which has state before it steps, and takes them
            group = {**optimizer.param_groups[0], "params": [one]}
            own_step(type(optimizer))(part_of(optimizer, [group], defaultdict(dict)))


def _zero(flat: torch.Tensor, places: list[slice]) -> None:
    for place in places:
        if place.start < place.stop:
            flat[place].zero_()


def _extent_of(pieces: Pieces) -> tuple[int, int]:
    _, start, stop, at = pieces[-1]
    return pieces[0][3], at + stop - start


def _identities(scalars: Mapping[str, Any]) -> tuple[Any, ...]:
    """Fingerprint of a parameter's scalars: differs once one was replaced or written to. Reads no device memory."""
    return tuple((n, id(v), v._version) if torch.is_tensor(v) else (n, v) for n, v in scalars.items())


def is_plane(value: Any, parameter: torch.Tensor) -> bool:
    """True for state of each element of a parameter. Parameters of no dimension, like counters of steps, have none."""
    return torch.is_tensor(value) and value.shape == parameter.shape


def _like(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
    """Wrap a shard, on any device, as a tensor that is sharded like a parameter."""
    if not is_dtensor(parameter):
        return shard
    # a moment of a 16-bit weight with a master is fp32, or bf16 of an fp32 one: operators go by the dtype in the spec
    spec = replace(parameter._spec, tensor_meta=parameter._spec.tensor_meta._replace(dtype=shard.dtype))
    made: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor(shard, spec, requires_grad=False)
    return made


def _rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # `Tensor.to` rounds halves to even, and a remainder of 16 bits cannot tell those apart
    return split(master)[0] if dtype is torch.bfloat16 else master.detach().to(dtype)
