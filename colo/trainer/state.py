"""Optimizer state, found through torch's own hooks and moved as sets of tensors.

State is found, not declared: `take_stock` walks `optimizer.state`, after each step and before phases change.
The tensor objects stay the same, and so do containers and tensor subclasses around them (`DTensor`, quantized state):
only where the bytes lie changes. Scalars such as step counters stay where optimizers read them, on the host. What colo
cannot move stays on the device, in `trainer.kept`, and is named in the report.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from colo.errors import BudgetError, Unsupported
from colo.memory.offload import Mover
from colo.memory.parking import Kept, Parking
from colo.memory.region import ALIGNMENT_BYTES
from colo.memory.storage import dense_parts, local_bytes, local_shard
from colo.phases.phase import TRAINER_KEPT, TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, FixedSegment, Residency, Segment
from colo.trainer.gradients import Gradients, HoldsGradient, make_gradients
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.optimizers import (
    MegatronOptimizers,
    OptimizerParts,
    as_torch,
    base_of,
    is_elementwise,
    parameters_of,
)
from colo.trainer.remainders import MOMENTS, OF_MASTERS
from colo.units import GIB, align_up

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a `step`, the optimizer first."""


class StateSegment(Segment, Protocol):
    """A segment of an optimizer's state."""

    kept: list[Kept]


class TrainerState:
    """The state of an optimizer and its gradients as segments.

    Everything is resident when a step begins; what a step has made is found when it ends. `state_dict()` is torch's
    own: of parked state it has the host tensors, and it is live, as torch's always are.

    Ownership: owns the segments. `close` leaves an optimizer that works without colo.
    """

    releases = False  # true while backward passes may step, and drop gradients

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: Mover,
        *,
        region_bytes: int = GIB,
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
        other_gradients: Callable[[], Sequence[HoldsGradient]] = lambda: (),
    ) -> None:
        """Raises: `Unsupported` for an optimizer without torch's hooks, `BudgetError` without room for its state."""
        self.optimizer: Any = as_torch(optimizer)
        # before any segment is built: an optimizer without hooks would never tell of its steps
        _check_hooks(self.optimizer)
        self._mover = mover
        self._before_step = before_step or self.bring_back
        self._after_step = after_step or (lambda: None)
        self._replaced: set[str] = set()  # segments that have left the device for state that is being loaded
        self._stock = Stock()
        self._sizes = expected_sizes(self.optimizer)
        self._identities: list[int] = []  # of what was in the state when stock was taken
        self.gradients: Gradients = make_gradients(self.optimizer, mover, other_gradients)
        self.parkings = self._make_parkings(region_bytes)
        self.kept = KeptSegment(self)
        self._hooks: list[RemovableHandle] = []
        try:
            # `untraced`: with a compiled optimizer torch.compile would trace the runtime through its own hooks
            self._hooks.append(self.optimizer.register_step_pre_hook(untraced(self._pre_hook)))
            self._hooks.append(self.optimizer.register_step_post_hook(untraced(lambda *_: self._stepped())))
            after_load = untraced(lambda _: self._after_load())
            self._hooks.append(self.optimizer.register_load_state_dict_post_hook(after_load))
            self._hooks.append(self._watch_loading())
            self.refresh()
        except BaseException:
            with suppress(Exception):  # state that cannot be moved back stays where it is; the optimizer works on
                self.close()
            raise

    def _make_parkings(self, region_bytes: int) -> Sequence[StateSegment]:
        _widen_moments(self.optimizer)
        return [
            Parking(name, self._mover, name_of=self._name_of, pack_bytes=region_bytes)
            for name in (TRAINER_OPTIMIZER, TRAINER_MASTER_WEIGHTS)
        ]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """`trainer.optimizer`, `trainer.master_weights`, `trainer.gradients`."""
        return (*self.parkings, self.gradients)

    def refresh(self) -> None:
        """Look through the state and the gradients: a step or a loop may have made, replaced or shared some."""
        self.gradients.refresh()
        self._find_state()

    def _find_state(self) -> None:
        is_gradient = any(reason is IS_GRADIENT for _, reason in self._stock.staying)  # it may be none by now
        identities = _identities(self.optimizer.state)
        is_other = identities != self._identities or is_gradient
        if is_other:
            self._identities, self._stock = identities, take_stock(self.optimizer)
        if is_other or not identities:  # parameters may have joined, or been frozen, before the first step
            self._sizes = expected_sizes(self.optimizer)
        state, masters = self.parkings
        # streaming overrides this method: its segments are of another kind
        assert isinstance(state, Parking) and isinstance(masters, Parking)
        state.look(self._stock.moments)
        masters.look(self._stock.masters)
        of_state, masters.expected_bytes = self._sizes
        # a first step makes no second copy of state that stays
        state.expected_bytes = 0 if self.kept.holds_state else of_state

    def bring_back(self) -> None:
        """Make everything resident and wait for it. Raises: `BudgetError` when the device has no room."""
        # all are started before the first is waited for, so that copies overlap
        for move in [segment.begin(Residency.RESIDENT) for segment in self.segments if segment.host_bytes]:
            move.wait()

    def before_gradient(self) -> None:
        """Make ready for a gradient that is about to be added to what its parameter has."""

    def close(self, device: torch.device | None = None) -> None:
        """Give the state memory of its own, on the device or where `device` is the host there, and remove the hooks.

        On the host that is the arena's memory, without another copy. Idempotent; may be called again after an error.
        Raises: `BudgetError` when the device has no room for the state; it is then where it was.
        """
        if not self._hooks:
            return
        self._return_state(to_host=device is not None and device.type == "cpu")
        while self._hooks:  # an interrupt between the two repeats a removal, which does nothing then
            self._hooks[-1].remove()
            self._hooks.pop()

    def _return_state(self, *, to_host: bool) -> None:
        if to_host:
            # gradients stay the loop's, and on the device
            self.gradients.begin(Residency.RESIDENT).wait()
            for parking in self.parkings:
                with suppress(BudgetError):  # without room in the arena it stays, and the loop may move it
                    parking.begin(Residency.OFFLOADED).wait()
        else:
            self.bring_back()
        for segment in self.segments:
            assert isinstance(segment, Parking), "streamed state is returned otherwise"
            segment.hand_over()

    def _pre_hook(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Step pre-hook: make state resident. Streaming returns new `(args, kwargs)` for `step`.

        Never leave it to torch to notice what is away: a `foreach` step has decayed the weights by then.
        """
        self._before_step()
        return None

    def _stepped(self) -> None:
        try:
            if _identities(self.optimizer.state) != self._identities:
                self._find_state()
        finally:  # whatever became of its state, the step has been made
            self._after_step()

    def _watch_loading(self) -> Any:
        return self.optimizer.register_load_state_dict_pre_hook(untraced(lambda _, given: self._before_load(given)))

    def _before_load(self, given: dict[str, Any]) -> dict[str, Any]:
        """Move the present state out of the way of the loaded one, which torch puts into new memory on the device.

        A state dict that does not fit the optimizer changes nothing: the old state is in host memory until then.
        """
        self._replaced.clear()  # of a load that was refused
        for parking in self.parkings:
            if parking.residency is Residency.RESIDENT:
                # torch casts and copies the loaded state to the parameters' device before it lets go of the old
                with suppress(BudgetError, torch.OutOfMemoryError):  # the host has no room: both are there for a while
                    parking.begin(Residency.OFFLOADED).wait()
                    self._replaced.add(parking.name)
        return given

    def _after_load(self) -> None:
        # what had left before the load leaves again; what left for it comes back as the loaded state
        was_away = [p for p in self.parkings if p.residency is Residency.OFFLOADED and p.name not in self._replaced]
        self._replaced.clear()
        self._find_state()
        for parking in was_away:  # the scheduler, which counts bytes, does not know that new ones have come
            parking.begin(Residency.OFFLOADED).wait()

    def _name_of(self, tensor: torch.Tensor) -> str:
        return self._stock.name_of(tensor)


class KeptSegment(FixedSegment):
    """State and gradients that never leave the device, for example because unknown code refers to their memory."""

    def __init__(self, state: TrainerState) -> None:
        super().__init__(TRAINER_KEPT, 0, Residency.RESIDENT)
        self._state = state

    @property
    def items(self) -> list[Kept]:
        """The name, the size and the reason of everything that stays."""
        state, device = self._state, self._state._mover.device
        kept = [*state._stock.kept(device), *(kept for parking in state.parkings for kept in parking.kept)]
        if isinstance(state.optimizer, MegatronOptimizers):
            kept += state.optimizer.kept()
        return kept + state.gradients.kept

    @property
    def holds_state(self) -> bool:
        """True when state of the optimizer is among it."""
        return any(parking.kept for parking in self._state.parkings) or bool(self._state._stock.staying)

    @property
    def size_bytes(self) -> int:
        """Bytes of everything that stays."""
        return sum(kept.size_bytes for kept in self.items)


# ---- what an optimizer keeps -----------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class Found:
    """A tensor of the state and where it was found."""

    tensor: torch.Tensor
    key: object  # number of the parameter whose state it is, or another key of `optimizer.state`
    within: object  # the value of `optimizer.state` under that key
    attributes: str = ""  # path from the leaf of `within` to the tensor, for a part of a tensor subclass
    leaf: object = None  # the leaf itself, for such a part

    @property
    def name(self) -> str:
        """Such as `state[3]['exp_avg']`."""
        leaf = self.tensor if self.leaf is None else self.leaf
        for path, value in pytree.tree_flatten_with_path(self.within)[0]:
            if value is leaf:
                return f"state[{self.key}]{pytree.keystr(path)}{self.attributes}"
        return f"state[{self.key}]"


class Stock:
    """Every tensor in an optimizer's state at one moment, each object once."""

    def __init__(self) -> None:
        self.moments: list[torch.Tensor] = []
        """Plain tensors that can move, also those within tensor subclasses, but for masters."""

        self.masters: list[torch.Tensor] = []
        """Such tensors of fp32 masters: whole ones, or their remainders and digests."""

        self.staying: list[tuple[Found, str]] = []  # tensors that colo can never move, and why
        self._found: dict[int, Found] = {}
        self._shared: dict[int, list[object]] = {}  # further keys of tensors of several parameters
        self._parameters: set[int] = set()
        self._gradients: set[int] = set()

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a tensor by its place in the state."""
        found = self._found.get(id(tensor))
        return found.name if found is not None else "a tensor that the optimizer has dropped"

    def keys_of(self, tensor: torch.Tensor) -> list[object]:
        """The numbers of the parameters whose state a tensor is."""
        return [self._found[id(tensor)].key, *self._shared.get(id(tensor), ())]

    def kept(self, device: torch.device) -> Iterator[Kept]:
        """Describe what cannot move, as far as it is on `device`. Gradients and parameters are counted elsewhere."""
        for found, reason in self.staying:
            tensor = found.tensor
            if tensor.device == device and tensor.dim():
                is_counted = (
                    tensor.layout is torch.strided
                    and local_shard(tensor).untyped_storage()._cdata in self._parameters | self._gradients
                )
                yield Kept(found.name, 0 if is_counted or reason is IS_GRADIENT else tensor_bytes(tensor), reason)


def take_stock(optimizer: Any) -> Stock:
    """List the tensors of an optimizer's state as they are now."""
    stock = Stock()
    parameters = parameters_of(optimizer)
    numbers = {}
    for number, parameter in enumerate(parameters):
        numbers[id(parameter)] = number
        stock._parameters.add(_storage_of(parameter))
        if parameter.grad is not None and local_shard(parameter.grad).layout is torch.strided:
            stock._gradients.add(_storage_of(parameter.grad))
    state: Mapping[Any, Any] = optimizer.state
    for key in list(state):
        value = state[key]
        name = numbers.get(id(key), key)
        masters = {id(value[of]) for of in OF_MASTERS if of in value} if isinstance(value, dict) else set()
        # a plain dict is by far the most frequent, and walked without pytree's overhead
        leaves = value.values() if type(value) is dict else [value]
        for leaf in leaves:
            if type(leaf) is torch.Tensor:
                _add(stock, Found(leaf, name, value), is_master=id(leaf) in masters)
            elif not isinstance(leaf, _OPAQUE):
                for part in pytree.tree_leaves(leaf):
                    if isinstance(part, torch.Tensor):
                        _add(stock, Found(part, name, value), is_master=id(part) in masters)
                    # no container to pytree: its tensors cannot be moved, since nobody knows who else reads them
                    elif not isinstance(part, _OPAQUE):
                        reason = f"colo does not look into objects of type {type(part).__name__}"
                        within = _tensors_within(part)
                        stock.staying += [(Found(tensor, name, value, leaf=part), reason) for tensor in within]
    return stock


def _identities(state: Mapping[Any, Any]) -> list[int]:
    """List ids of all keys and tensors of an optimizer's state: another list means that a tensor was replaced."""
    # ids, not values: a tensor that is replaced has another, and nothing is read from the device
    values = list(state.values())
    if all(type(value) is dict for value in values):
        leaves = list(chain.from_iterable(map(dict.values, values)))
        if not any(issubclass(kind, (dict, list, tuple)) for kind in set(map(type, leaves))):
            return [*map(id, state), *map(id, leaves)]  # by functions of C, as there are thousands
    found = []
    for key, value in state.items():
        found.append(id(key))
        if type(value) is dict:
            for leaf in value.values():
                found.append(id(leaf))
                if type(leaf) is not torch.Tensor and isinstance(leaf, (dict, list, tuple)):
                    found += [id(part) for part in pytree.tree_leaves(leaf)]
        else:
            found += [id(part) for part in pytree.tree_leaves(value)]
    return found


IS_GRADIENT = "it is a gradient"

_OPAQUE = (int, float, str, bytes, type(None))
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _storage_of(tensor: torch.Tensor) -> int:
    if type(tensor) not in _PLAIN:
        tensor = local_shard(tensor)
    key: int = tensor.untyped_storage()._cdata
    return key


def _add(stock: Stock, found: Found, *, is_master: bool) -> None:
    tensor = found.tensor
    if (known := stock._found.get(id(tensor))) is not None:
        if known.key != found.key:
            stock._shared.setdefault(id(tensor), []).append(found.key)
        return
    stock._found[id(tensor)] = found
    if type(tensor) in _PLAIN:
        reason = None if tensor.layout is torch.strided else f"its layout is {tensor.layout}"
        if reason is None:
            if not tensor.dim() or not tensor.numel():
                return  # optimizers read scalars, such as step counts, on the host
            storage = tensor.untyped_storage()._cdata
            # a view of a parameter's memory, counted and moved with the weights
            if storage in stock._parameters:
                return
            reason = IS_GRADIENT if storage in stock._gradients else _peculiarity(tensor)
        if reason is not None:
            stock.staying.append((found, reason))
        else:
            (stock.masters if is_master else stock.moments).append(tensor)
    elif (inner := _inner_tensors(tensor)) is not None:
        leaf = tensor if found.leaf is None else found.leaf
        for name, part in inner.items():
            path = f"{found.attributes}.{name}"
            _add(stock, Found(part, found.key, found.within, path, leaf), is_master=is_master)
    else:
        stock.staying.append((found, f"colo does not know tensors of type {type(tensor).__name__}"))


def _peculiarity(tensor: torch.Tensor) -> str | None:
    """Say why a tensor cannot be pointed to other memory; `None` when it can."""
    # pointing `.data` elsewhere would leave the graph, or the hooks, with the old memory
    if tensor.grad_fn is not None or tensor._backward_hooks:
        return "it is part of an autograd graph"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "it is quantized, conjugated or negated"
    return "it has a gradient" if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None else None


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor of any layout, not of its whole storage."""
    if (inner := _inner_tensors(tensor)) is not None:
        return sum(map(tensor_bytes, inner.values()))
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))


def _inner_tensors(tensor: Any) -> dict[str, torch.Tensor] | None:
    """List the tensors that a subclass wraps and names, by attribute; `None` for a tensor that wraps none."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    named = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: inner for name, inner in named.items() if isinstance(inner, torch.Tensor)}


def _tensors_within(value: object) -> list[torch.Tensor]:
    """List tensors in an object that is no container to torch: in its attributes or its items."""
    if isinstance(value, (set, frozenset, list, tuple)):
        held: Any = list(value)
    elif isinstance(value, Mapping):
        held = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # by fields: a dataclass with slots has no `__dict__`
        held = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        held = list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []
    return [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.Tensor)]


def expected_sizes(optimizer: Any) -> tuple[int, int]:
    """Bytes of state, without masters, and of masters, that a first step will make.

    For optimizers whose state is known: Adam's and SGD's kinds, of torch's own and in what `as_torch` gives.
    """
    if isinstance(optimizer, MegatronOptimizers):  # whose main parameters require no gradients themselves
        return sum(_bytes_of_state(part, part.param_groups, steps_all=True) for part in optimizer.inner), 0
    if isinstance(optimizer, OptimizerParts):
        sizes = [expected_sizes(part) for part in optimizer.inner]
        return sum(state for state, _ in sizes), sum(masters for _, masters in sizes)
    if isinstance(optimizer, MasterWeightsOptimizer):
        masters_bytes = sum(map(optimizer.expected_master_bytes, parameters_of(optimizer)))
        return _bytes_of_state(optimizer.inner, optimizer.param_groups), masters_bytes
    return _bytes_of_state(optimizer, optimizer.param_groups), 0


def _bytes_of_state(inner: Any, groups: list[dict[str, Any]], *, steps_all: bool = False) -> int:
    """Bytes of the state of `groups`' parameters. Adam, AdamW: two moments (three with amsgrad); SGD: its momentum."""
    num_bytes = 0
    for outer, group in zip(groups, inner.param_groups, strict=True):
        copies = int(isinstance(inner, torch.optim.SGD) and group.get("momentum", 0) != 0)
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            copies = 3 if group.get("amsgrad") else 2
        # aligned as packs are: the plan would otherwise be short by up to a page for each tensor
        for parameter, stepped in zip(outer["params"], group["params"], strict=True) if copies else ():
            if parameter.requires_grad or steps_all:
                # of what is stepped: moments of masters are fp32, whatever the weights are
                num_bytes += copies * align_up(local_bytes(stepped), ALIGNMENT_BYTES)
    return num_bytes


def _widen_moments(optimizer: Any) -> None:
    """Keep moments in fp32 that a runtime has left in bf16 on the host: torch steps fp32 parameters by no others."""
    base = base_of(optimizer)
    if not (isinstance(base, torch.optim.Optimizer) and is_elementwise(base)):
        return  # other classes may keep bf16 themselves
    narrow = [
        (state, name)
        for parameter, state in base.state.items()
        for name in MOMENTS & state.keys()
        if torch.is_tensor(state[name]) and (state[name].dtype, parameter.dtype) == (torch.bfloat16, torch.float32)
    ]
    for state, name in narrow:
        state[name] = state[name].to(torch.float32)
    if narrow and base is not optimizer:
        optimizer.publish_state()


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer within accelerate's wrappers of it, which have no hooks; of a list, those of all."""
    if isinstance(optimizer, (list, tuple)):
        return [unwrapped(one) for one in optimizer]
    module = sys.modules.get("accelerate.optimizer")  # without which there are none
    while module is not None and isinstance(optimizer, module.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _check_hooks(optimizer: Any) -> None:
    """Raise `Unsupported` for an optimizer that torch has not initialized, such as some that wrap another one."""
    for part in optimizer.inner if isinstance(optimizer, OptimizerParts) else [optimizer]:
        # the attribute is made by `torch.optim.Optimizer.__init__` alone; some wrappers only copy `param_groups`
        if not hasattr(part, "_optimizer_state_dict_post_hooks"):
            raise Unsupported(
                f"{type(part).__name__} does not call torch.optim.Optimizer.__init__, so it has no hooks and colo "
                "cannot tell when it steps: use the optimizer that it wraps, or call super().__init__() in its class"
            )


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a hook from tracing: a step under `torch.compile` calls it."""
    disabled: Callable[..., Any] = torch.compiler.disable(hook)
    return disabled


class UncopiedHook(partial[None]):
    """A hook of a module; a copy of the module, or one that is saved, has it without effect.

    It has no frame of its own for torch.compile to trace.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return UncopiedHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass
