"""Every tensor in an optimizer's state, by name, and why some of them have to stay on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from colo.memory.dtensor import local_shard
from colo.memory.region import ALIGNMENT_BYTES
from colo.memory.storage import dense_parts, num_others, storage_key
from colo.trainer.gradients import parameters_of
from colo.trainer.stand_ins import ParkedTensor
from colo.trainer.state_slots import StateSlot
from colo.trainer.subclasses import inner_tensors, is_wrapper
from colo.units import align_up

MASTER_WEIGHT = "master_weight"
"""Key under which an optimizer's state keeps a parameter's fp32 master (`colo.optim.MasterWeights`)."""

MASTER_REMAINDER, MASTER_DIGESTS = "master_remainder", "master_digests"
"""Keys of what a bf16 weight is short of its master (int16), and of digests of the weight's rows (int64)."""

OF_MASTERS = (MASTER_WEIGHT, MASTER_REMAINDER, MASTER_DIGESTS)
"""Keys of everything that is kept of a master."""


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """State that stays on the device, and why."""

    name: str
    size_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A tensor of the state and where it was found."""

    tensor: torch.Tensor
    key: object  # number of the parameter whose state it is, or another key of `optimizer.state`
    within: object  # the value of `optimizer.state` under that key
    number: int  # index of the leaf of `within` that is the tensor, or holds it
    is_master: bool
    attributes: str = ""  # path from that leaf to the tensor, for a part of a tensor subclass

    @property
    def name(self) -> str:
        """Such as `state[3]['exp_avg']`."""
        path = pytree.tree_flatten_with_path(self.within)[0][self.number][0]
        return f"state[{self.key}]{pytree.keystr(path)}{self.attributes}"


class Inventory:
    """The state of an optimizer as it is now, each tensor object once.

    Tensors are found within containers that torch knows (`torch.utils._pytree`) and within tensor subclasses with
    `__tensor_flatten__`; both can move. Tensors within other objects are listed, and stay on the device.
    Lifetime: refers to the tensors while it lives.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, of: Iterable[object] | None = None) -> None:
        """`of` are the keys of `optimizer.state` to look at, such as some parameters; by default all."""
        self._all_parameters = parameters_of(optimizer)
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._all_parameters)}
        self.tensors: dict[int, StateTensor] = {}
        """Plain tensors, or their stand-ins, by `id`; also those within subclasses."""

        self.wrappers: dict[int, StateTensor] = {}
        """Tensors of subclasses that wrap others, or their stand-ins, by `id`."""

        self._others: list[tuple[StateTensor, str]] = []
        state: Mapping[Any, Any] = optimizer.state
        for key in list(state) if of is None else [key for key in of if key in state]:
            self._look_through(self._numbers.get(id(key), key), state[key])

    @cached_property
    def _parameters(self) -> set[int]:
        return {storage_key(local_shard(parameter)) for parameter in self._all_parameters}

    @cached_property
    def _gradients(self) -> set[int]:
        return {key for parameter in self._all_parameters if (key := _key_of_gradient(parameter)) is not None}

    def loose(self, device: torch.device, *, but_for: Container[int] = ()) -> list[list[StateTensor]]:
        """Tensors with bytes on `device`, grouped by storage. Leaves out parameters' storages and scalars.

        Leaves out storages whose `storage_key` is in `but_for`, too.
        Optimizers read scalars, such as step counts, on the host.
        """
        groups: dict[int, list[StateTensor]] = {}
        for found in self.tensors.values():
            tensor = found.tensor
            if not isinstance(tensor, ParkedTensor) and tensor.device == device and tensor.layout is torch.strided:
                groups.setdefault(storage_key(tensor), []).append(found)
        return [
            group
            for key, group in groups.items()
            if key not in but_for
            and key not in self._parameters
            and any(f.tensor.dim() and f.tensor.numel() for f in group)
        ]

    def why_it_stays(self, group: Sequence[StateTensor]) -> str | None:
        """Why the tensors in one storage cannot be moved; `None` when they can."""
        for found in group:
            if (reason := _peculiarity(found.tensor)) is not None:
                return reason
        first = group[0].tensor
        if storage_key(first) in self._gradients:
            return "it is a gradient"
        return why_memory_stays([found.tensor for found in group])

    def kept(self, device: torch.device) -> Iterator[Kept]:
        """Tensors on `device` that colo can never move."""
        counted = {*self.tensors, *self.wrappers}
        for found, reason in self._others:
            tensor = found.tensor
            if tensor.device != device or not tensor.dim() or id(tensor) in counted or isinstance(tensor, ParkedTensor):
                continue
            counted.add(id(tensor))
            is_parameters = tensor.layout is torch.strided and storage_key(local_shard(tensor)) in self._parameters
            yield Kept(found.name, 0 if is_parameters else tensor_bytes(tensor), reason)

    def bytes_of(self, group: Sequence[StateTensor]) -> int:
        """Bytes of one storage; 0 for a gradient, which the gradient segment counts."""
        storage = group[0].tensor.untyped_storage()
        return 0 if int(storage._cdata) in self._gradients else int(storage.nbytes())

    def _look_through(self, key: object, value: Any) -> None:
        masters = [id(value.get(key)) for key in OF_MASTERS if key in value] if isinstance(value, dict) else ()
        for number, leaf in enumerate(pytree.tree_leaves(value)):
            if isinstance(leaf, torch.Tensor):
                self._add(StateTensor(leaf, key, value, number, id(leaf) in masters))
            elif not isinstance(leaf, (int, float, str, bytes, type(None))):
                reason = f"colo does not look into objects of type {type(leaf).__name__}"
                self._others += [(StateTensor(t, key, value, number, False), reason) for t in _tensors_within(leaf)]

    def _add(self, found: StateTensor) -> None:
        tensor = found.tensor
        if id(tensor) in self.tensors or id(tensor) in self.wrappers:
            return
        original = original_of(tensor)
        if type(original) is torch.Tensor and original.layout is torch.strided:
            self.tensors[id(tensor)] = found
        elif is_wrapper(original):
            self.wrappers[id(tensor)] = found
            for name, inner in inner_tensors(original).items():
                self._add(dataclasses.replace(found, tensor=inner, attributes=f"{found.attributes}.{name}"))
        elif isinstance(original, ParkedTensor) or type(original) in _PLAIN:
            if original.layout is torch.strided:
                self.tensors[id(tensor)] = found
            else:
                self._others.append((found, f"its layout is {original.layout}"))
        else:
            self._others.append((found, f"colo does not know tensors of type {type(original).__name__}"))


def kept_of(group: Sequence[StateTensor], inventory: Inventory, reason: str) -> Kept:
    """What a storage that stays is called."""
    name = group[0].name if len(group) == 1 else f"{group[0].name} and {len(group) - 1} more"
    return Kept(name, inventory.bytes_of(group), reason)


def storage_bytes_of(group: Sequence[StateTensor]) -> int:
    """Bytes that the storage of some tensors takes in a region."""
    return align_up(group[0].tensor.untyped_storage().nbytes(), ALIGNMENT_BYTES)


def original_of(tensor: torch.Tensor) -> torch.Tensor:
    """The subclass that a stand-in replaces, where it wraps other tensors; any other argument itself."""
    if isinstance(tensor, ParkedTensor) and isinstance(tensor.keeper, StateSlot) and tensor.keeper.region is None:
        return tensor.keeper.original
    return tensor


def why_memory_stays(tensors: Sequence[torch.Tensor]) -> str | None:
    """Why the storage of `tensors` must stay even after they point elsewhere; `None` if it can be freed."""
    if count := num_others(tensors):
        return f"{count} more refer{'s' if count == 1 else ''} to its memory: a view, or a buffer that it is a part of"
    if not tensors[0].untyped_storage().resizable():
        return "its memory is shared with NumPy or another owner"
    return None


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor of any layout, not of its whole storage."""
    if is_wrapper(tensor):
        return sum(map(tensor_bytes, inner_tensors(tensor).values()))
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))


def _peculiarity(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be recreated over other memory: it would lose this; `None` when it can."""
    if tensor.grad_fn is not None or tensor._backward_hooks:
        return "it is part of an autograd graph"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "it is quantized, conjugated or negated"
    return "it has a gradient" if tensor.is_leaf and tensor.grad is not None else None


def _key_of_gradient(parameter: torch.Tensor) -> int | None:
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, ParkedTensor):
        return None
    part = local_shard(gradient)
    return storage_key(part) if part.layout is torch.strided else None


def _tensors_within(value: object) -> list[torch.Tensor]:
    """Tensors in an object that is no container to torch: in its attributes or its items."""
    if isinstance(value, (set, frozenset, list, tuple)):
        held: Any = list(value)
    elif isinstance(value, Mapping):
        held = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        held = list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []
    return [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.Tensor)]
