"""Load plans: what an engine's own weight loader copies, recorded once, then aliased or replayed.

The engine's `load_weights` is the only authority on names, fusions, padding and tensor-parallel slices. Running it once
under a dispatch mode that notes every `aten.copy_` out of a source tensor (and runs none of them) yields the copies as
data. From then on a trainer's parameter can *be* the destination (alias: nothing is ever sent), or the copies can be
replayed in a few launches. What the loader computes rather than copies is seen too, and named with a reason.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colo.errors import TransferError, Unsupported
from colo.memory.copy_plan import CopyPlan
from colo.memory.storage import storage_key

AS_IT_WAS = "put it back as it was, or close the runtime and build another with the model as it is now"
"""Advice for a weight that is not what a plan was recorded for, such as a resized embedding."""

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's loader: takes `(name, tensor)` in the names of a checkpoint."""

Views = Callable[[Mapping[str, torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]
"""Gives parameters, or views of them, in the names of a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy that the loader makes: a region of a source tensor into a view of engine memory."""

    name: str  # name of the trainer's parameter, also where the loader was given a part of it under another name
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # offset of the region within the source, in elements
    target: torch.Tensor  # view of the engine's memory that the region is copied to

    def region_of(self, source: torch.Tensor) -> torch.Tensor:
        """The view of `source` that this copy reads."""
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)

    @property
    def num_bytes(self) -> int:
        """Bytes written."""
        return self.target.numel() * self.target.element_size()


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """The copies of one run of an engine's loader, and what could not be recorded.

    Lifetime: valid while the engine's memory keeps its address or, where it is released and restored, its storage.
    """

    copies: tuple[Copy, ...]
    sources: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of every source tensor
    strides: Mapping[str, tuple[int, ...]]  # strides of every source tensor, in elements
    fallbacks: Mapping[str, str] = field(default_factory=dict)  # sources that need the engine's own loader, and why
    unused: frozenset[str] = frozenset()  # sources that the engine leaves out, such as a vision tower
    # a dict of at most one, since the plan is frozen
    _recorded: dict[Hashable, CopyPlan] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, source: Mapping[str, torch.Tensor], *, copies: Iterable[Copy] = (), fallbacks: Mapping[str, str]
    ) -> LoadPlan:
        """The plan of `source`, from copies that are known and reasons why others are not."""
        return cls(
            copies=tuple(copies),
            sources={name: (t.dtype, tuple(t.shape)) for name, t in source.items()},
            strides={name: tuple(t.stride()) for name, t in source.items()},
            fallbacks=fallbacks,
        )

    @classmethod
    def record(
        cls,
        load: Load,
        source: Mapping[str, torch.Tensor],
        destinations: Mapping[str, torch.Tensor],
        *,
        optional: Mapping[str, torch.Tensor] | None = None,
        as_checkpoint: Views | None = None,
    ) -> LoadPlan:
        """Run `load` on stand-ins of `source` and note its copies; no byte of the engine is changed.

        `destinations` is the engine's memory by name, without padding that no weight fills, for the check that every
        byte of it is covered exactly once; of memory that is `optional`, exactly once or not at all. `as_checkpoint`
        turns the stand-ins into what the loader is given, for loaders that want other names or parts than `source` has
        (`checkpoint_views`); copies are noted for the tensors of `source` all the same.
        Raises: `TransferError` naming the tensors when parts of the engine's memory are written twice or never and no
        fallback explains it; whatever the loader raises.
        """
        # with the parameter's strides: copies are noted by offset and strides in its storage
        stand_ins = {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for name, t in source.items()
        }
        optional = optional or {}
        # tensors on the meta device: views and shapes work, values do not exist
        recorder = _Recorder(stand_ins, {**optional, **destinations})
        try:
            with torch.no_grad(), recorder:
                load(iter(stand_ins.items() if as_checkpoint is None else as_checkpoint(stand_ins)))
        except NotImplementedError as error:  # the loader has asked a stand-in for values
            recorder.fallbacks = dict.fromkeys(stand_ins, f"the loader looks at values ({error})")
        recorder.explain_used()
        plan = cls.of(source, copies=recorder.copies, fallbacks=recorder.fallbacks)
        # a loader that computes writes more than was noted
        if not plan.fallbacks:
            _check_coverage(plan.copies, destinations, optional)
        return plan

    @cached_property
    def left_out(self) -> dict[str, list[Part]]:
        """Sources copied in part or not at all, with the parts that are copied.

        One worker alone cannot tell a tensor-parallel slice from a part that the loader drops: put together the parts
        of all workers.
        """
        taken: dict[str, list[Part]] = {name: [] for name in self.sources}
        for copy in self.copies:
            taken[copy.name].append((copy.offset, copy.shape, copy.stride))
        explained = self.fallbacks.keys() | self.unused
        return {
            name: taken[name]
            for name, (_, shape) in self.sources.items()
            if name not in explained and num_covered(taken[name]) < num_covered([(0, shape, self.strides[name])])
        }

    @cached_property
    def aliases(self) -> dict[str, torch.Tensor]:
        """Source name to engine memory that can serve as the source itself: contiguous, same shape and dtype.

        That is so where the copies of a source, one or many, write every element once, all shifted by the same offset
        within one storage.
        """
        by_name: dict[str, list[Copy]] = {}
        for copy in self.copies:
            by_name.setdefault(copy.name, []).append(copy)
        found = {name: self._alias(name, copies) for name, copies in by_name.items() if name not in self.fallbacks}
        return {name: alias for name, alias in found.items() if alias is not None}

    def replay(self, source: Mapping[str, torch.Tensor]) -> int:
        """Copy `source` into the engine's memory and return the bytes written. Dtypes are converted as in `copy_`.

        Raises: `Unsupported` when the plan has fallbacks, `TransferError` when a source is missing or has another
        shape; nothing has been written then.
        """
        if self.fallbacks:
            name, reason = next(iter(self.fallbacks.items()))
            raise Unsupported(f"{len(self.fallbacks)} tensors cannot be replayed, {name} for one: {reason}")
        self.check_source(source)
        plan = self.comparison(source)
        plan.replay()
        return plan.num_bytes

    @cached_property
    def runs(self) -> tuple[Copy, ...]:
        """The copies, merged where one continues another in source and target, such as the experts of a layer."""
        runs: list[list[Copy]] = []
        # hundreds of experts are copied one by one by a loader, and lie one after another
        for copy in sorted(self.copies, key=lambda copy: (copy.name, str(copy.target.device), copy.offset)):
            if runs and _continues(runs[-1][-1], copy):
                runs[-1].append(copy)
            else:
                runs.append([copy])
        return tuple(run[0] if len(run) == 1 else _joined(run) for run in runs)

    def subset(self, names: Iterable[str]) -> LoadPlan:
        """The sub-plan for `names`."""
        chosen = dict.fromkeys(names)
        return LoadPlan(
            copies=tuple(copy for copy in self.copies if copy.name in chosen),
            sources={name: self.sources[name] for name in chosen},
            strides={name: self.strides[name] for name in chosen},
            fallbacks={name: why for name, why in self.fallbacks.items() if name in chosen},
            unused=self.unused & chosen.keys(),
        )

    def check_source(self, source: Mapping[str, torch.Tensor]) -> None:
        """Raise `TransferError` unless `source` holds every tensor of the plan with the recorded shape and strides."""
        missing = [name for name in self.sources if name not in source]
        if missing:
            raise TransferError(
                f"{len(missing)} of {len(self.sources)} tensors are missing, {missing[0]} for one: {AS_IT_WAS}"
            )
        for name, (_, shape) in self.sources.items():
            found, strides = tuple(source[name].shape), source[name].stride()
            if found != shape:
                raise TransferError(f"{name} has shape {found}, but {shape} was recorded: {AS_IT_WAS}")
            if not _same_strides(shape, strides, self.strides[name]):
                raise TransferError(
                    f"{name} has strides {strides}, but {self.strides[name]} were recorded: {AS_IT_WAS}"
                )

    def differences(self, source: Mapping[str, torch.Tensor]) -> list[str]:
        """Names whose bytes in the engine differ from `source`, converted to the engine's dtype. Reads everything."""
        return self.named(self.comparison(source).flags())

    def comparison(self, source: Mapping[str, torch.Tensor]) -> CopyPlan:
        """The copies of `source`, which replay and compare while neither side moves; `named` reads the flags.

        Recorded anew when a tensor lies elsewhere than the last time, or has another dtype.
        Raises: `TransferError` for a shape or strides that were not recorded, which no copy of the plan is made for.
        """
        ours = ((t.data_ptr(), t.dtype, t.stride()) for t in map(source.__getitem__, self.sources))
        where = (*ours, *(copy.target.data_ptr() for copy in self.runs))
        if where not in self._recorded:
            # what lies elsewhere now does not come back, and a table takes device memory
            self._recorded.clear()
            self.check_source(source)
            plan = CopyPlan([(copy.region_of(source[copy.name]), copy.target) for copy in self.runs])
            if plan.holds_tensors:  # kept, it would keep the source's memory alive
                return plan
            self._recorded[where] = plan
        return self._recorded[where]

    def named(self, flags: torch.Tensor) -> list[str]:
        """Names of the tensors whose flag is set. Waits for the flags."""
        different = {copy.name for copy, is_other in zip(self.runs, flags.tolist(), strict=True) if is_other}
        return [name for name in self.sources if name in different]

    def _alias(self, name: str, copies: list[Copy]) -> torch.Tensor | None:
        """Engine memory that holds the same elements as one source after all `copies` of it, if there is any."""
        (dtype, shape), stride = self.sources[name], self.strides[name]
        first = copies[0]
        if any(copy.target.dtype != dtype for copy in copies):
            return None
        if len(copies) == 1 and first.offset == 0 and first.shape == shape and first.target.is_contiguous():
            return first.target if _same_strides(shape, first.stride, stride) else None
        # several copies, as of fused projections: one alias if all shift by the same offset and miss nothing
        storage, shift = storage_key(first.target), _offset(first.target) - first.offset
        if not _is_contiguous(shape, stride) or not all(_shifts(copy, storage, shift) for copy in copies):
            return None
        if _count_misses(prod(shape), [(copy.offset, copy.shape, copy.stride) for copy in copies]) != (0, 0):
            return None
        return first.target.as_strided(shape, contiguous_strides(shape), shift)


def _continues(copy: Copy, following: Copy) -> bool:
    """True if `following` begins where `copy` ends, in source and target alike."""
    return (
        copy.name == following.name
        and copy.offset + copy.target.numel() == following.offset
        and storage_key(copy.target) == storage_key(following.target)
        and copy.target.dtype == following.target.dtype
        and _offset(copy.target) + copy.target.numel() == _offset(following.target)
        and all(c.target.is_contiguous() and _is_contiguous(c.shape, c.stride) for c in (copy, following))
    )


def _joined(run: list[Copy]) -> Copy:
    """One flat copy in place of several that continue one another."""
    first, count = run[0], sum(copy.target.numel() for copy in run)
    target = first.target.as_strided((count,), (1,), _offset(first.target))
    return Copy(name=first.name, shape=(count,), stride=(1,), offset=first.offset, target=target)


Part = tuple[int, Sequence[int], Sequence[int]]
"""Offset, shape and strides of a view, in elements."""


class _NeedsValuesError(NotImplementedError):
    """Says that code asks a stand-in for values."""


_REPLACING = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
)
"""Operations whose target afterwards owes nothing to what was there."""


class _Recorder(TorchDispatchMode):
    """Notes copies out of the stand-ins, and everything else that consumes one; writes nothing to the engine."""

    def __init__(self, stand_ins: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves the mode untyped
        # by identity: storages on the meta device all have the same address, none
        self._names = {t.untyped_storage()._cdata: name for name, t in stand_ins.items()}
        self._computed: dict[int, torch.Tensor] = {}  # results by storage, kept so that no storage is confused
        self._engine = set(map(storage_key, engine.values()))
        self._index = _Index(engine)
        self._used: dict[str, str] = {}  # the engine's tensors that the loader computes with, and how
        self.copies: list[Copy] = []
        self.fallbacks: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self._name_of(args[1])) is not None:
            if self._name_of(args[0]) is not None:
                self.fallbacks.setdefault(name, "the loader writes to the tensor that it was given")
            elif args[0].shape != args[1].shape:
                self.fallbacks.setdefault(name, "the loader broadcasts it")
            elif args[1].numel():
                target, source = args
                shape, stride = tuple(source.shape), tuple(source.stride())
                self.copies.append(
                    Copy(name=name, shape=shape, stride=stride, offset=_offset(source), target=target.detach())
                )
            # noted and not made: the engine's weights stay as they are
            return args[0]
        if func is torch.ops.aten.copy_.default and storage_key(args[1]) in self._computed:
            return args[0]  # its sources are fallbacks already
        # `.item()`, and every comparison in an `if`
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            raise _NeedsValuesError("a stand-in has none")
        # a view has the storage of its base, by which it is known already
        if func.is_view:
            return func(*args, **(kwargs or {}))
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs or {}
        for tensor in self._engines(given.values()):
            # `None` is padding, and whatever else in the same storage no weight fills
            if (func not in _REPLACING or tensor is not args[0]) and (name := self._index.owner_of(tensor)) is not None:
                self._used.setdefault(name, str(func))
        written = [given[a.name] for a in func._schema.arguments if a.is_write and a.name in given]
        # zeros into padding, constants and the like: the engine's weights stay as they are
        if self._engines(written):
            self._explain(func, given.values(), ())
            return written[0] if func._schema.returns else None  # operations on lists return nothing
        result = func(*args, **(kwargs or {}))
        self._explain(func, given.values(), (result,))
        return result

    def _engines(self, values: Iterable[Any]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_in(values) if storage_key(tensor) in self._engine]

    def explain_used(self) -> None:
        """Note the sources of what the loader has copied and then computed with: it does more than copy."""
        for copy in self.copies:
            if (func := self._used.get(self._index.owner_of(copy.target) or "")) is not None:
                self.fallbacks.setdefault(copy.name, f"the loader computes with what it has copied of it ({func})")

    def _explain(self, func: Any, args: Iterable[Any], results: Iterable[Any]) -> None:
        """Note which sources went into a computation; its results count as not copied."""
        inputs = [t for t in tensors_in(args) if self._name_of(t) is not None or storage_key(t) in self._computed]
        for tensor in inputs:
            if (name := self._name_of(tensor)) is not None:
                self.fallbacks.setdefault(name, f"the loader computes with it ({func}) rather than copying it")
        if inputs:
            self._computed.update({storage_key(t): t for t in tensors_in(results) if t.device.type == "meta"})

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(storage_key(tensor)) if tensor.device.type == "meta" else None


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors among arguments of an operation, and within lists and tuples of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _check_coverage(
    copies: Iterable[Copy], destinations: Mapping[str, torch.Tensor], optional: Mapping[str, torch.Tensor]
) -> None:
    """Raise `TransferError` unless every element is written exactly once, or of optional memory none."""
    destinations = {**optional, **destinations}
    by_destination: dict[str, list[torch.Tensor]] = {name: [] for name in destinations}
    index = _Index(destinations)
    for copy in copies:
        name = index.owner_of(copy.target)
        if name is None:
            raise TransferError(f"the loader copies {copy.name} to memory that is no parameter of the engine")
        by_destination[name].append(copy.target)
    for name, targets in by_destination.items():
        if name in optional and not targets:
            continue
        base, num_elements = _offset(destinations[name]), destinations[name].numel()
        never, twice = _count_misses(num_elements, [(_offset(t) - base, t.shape, t.stride()) for t in targets])
        if never or twice:
            raise TransferError(
                f"the loader does not cover {name} exactly once: of {num_elements} elements it leaves "
                f"{never} unwritten and writes {twice} more than once; pass every tensor of the model, "
                "in the sizes that the engine was started with"
            )


class _Index:
    """Index of destinations by storage and byte offset, to find the one that a view belongs to."""

    def __init__(self, destinations: Mapping[str, torch.Tensor]) -> None:
        self._by_storage: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in destinations.items():
            start = _offset(tensor) * tensor.element_size()
            row = (start, start + tensor.numel() * tensor.element_size(), name)
            self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(row)
        for rows in self._by_storage.values():
            rows.sort()

    def owner_of(self, view: torch.Tensor) -> str | None:
        rows = self._by_storage.get(view.untyped_storage().data_ptr(), [])
        start = _offset(view) * view.element_size()
        position = bisect_right(rows, start, key=lambda row: row[0]) - 1
        if position < 0 or start >= rows[position][1]:
            return None
        return rows[position][2]


def num_covered(parts: list[Part]) -> int:
    """Number of elements that some parts of one tensor have together, those of several once."""
    parts = [
        # without strides of 0, by which an expanded view has its elements several times
        (at, [n for n, step in zip(shape, stride, strict=True) if step], [step for step in stride if step])
        for at, shape, stride in parts
        if 0 not in shape
    ]
    end = max((at + _span(shape, stride) for at, shape, stride in parts), default=0)
    return end - _count_misses(end, parts)[0]


def _count_misses(num_elements: int, parts: list[Part]) -> tuple[int, int]:
    """Count elements of a flat tensor that no part covers, and those that several cover."""
    if all(_is_contiguous(shape, stride) for _, shape, stride in parts):
        never = twice = reached = 0
        for start, end in sorted((offset, offset + prod(shape)) for offset, shape, _ in parts):
            never += max(0, start - reached)
            twice += max(0, min(end, reached) - start)
            reached = max(reached, end)
        return never + max(0, num_elements - reached), twice
    if (rows := _in_rows(parts)) is not None:  # columns of a matrix: what is true of a row is true of all
        step, within = rows
        counts = [(count, _count_misses(step, of_row)) for (_, count), of_row in within.items()]
        covered = sum(count * (step - never) for count, (never, _) in counts)
        return num_elements - covered, sum(count * twice for count, (_, twice) in counts)
    # views with other gaps: count element by element
    once, twice_or_more = (torch.zeros(num_elements, dtype=torch.bool, device="cpu") for _ in range(2))
    for offset, shape, stride in parts:
        here = once.as_strided(shape, stride, offset)
        twice_or_more.as_strided(shape, stride, offset).logical_or_(here)
        here.fill_(True)
    return int((~once).sum()), int(twice_or_more.sum())


def _in_rows(parts: list[Part]) -> tuple[int, dict[tuple[int, int], list[Part]]] | None:
    """The length of a row, and by their first row and number the parts of each of those rows.

    `None` unless all parts are within such rows, those of the same or of others.
    """
    steps = {tuple(stride[:1]) for _, _, stride in parts}
    if len(steps) > 1 or not (step := max(steps.pop(), default=0)):
        return None
    found: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for offset, shape, stride in parts:
        row, column = divmod(offset, step)
        if column + _span(shape[1:], stride[1:]) > step:
            return None
        found[row, shape[0]].append((column, shape[1:], stride[1:]))
    rows = sorted(found)
    if any(first + count > following for (first, count), (following, _) in pairwise(rows)):
        return None
    return step, found


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a view that is not empty."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _shifts(copy: Copy, storage: int, shift: int) -> bool:
    """True if `copy` puts its region into `storage` with the same strides, `shift` elements further on."""
    target = copy.target
    return (
        _offset(target) - copy.offset == shift
        and _same_strides(copy.shape, copy.stride, target.stride())
        and storage_key(target) == storage
    )


def _same_strides(shape: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """True if two strides place the elements of `shape` alike; strides of axes of length 1 do not count."""
    return all(size == 1 or a == b for size, a, b in zip(shape, left, right, strict=True))


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return 0 in shape or _same_strides(shape, stride, contiguous_strides(shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor without gaps."""
    return tuple(prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())
