"""The model loader named `colo`: vLLM's own loading, into memory that trainer and engine can both map.

Parameters are put there as the model is built, before anything is read into them, so that the weights exist once. With
the address of a `WeightStore` (`model_loader_extra_config={"colo_store": ...}`) the memory is the trainer's; without,
it is the worker's own and can be exported later.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from colo.engines.vllm import compat
from colo.engines.vllm.processes import end_with
from colo.engines.vllm.store import Layout, StoreClient
from colo.engines.vllm.wire import FORMAT_KEY, STORE_KEY
from colo.errors import TransferError
from colo.memory.digest import Digest
from colo.memory.region import ALIGNMENT_BYTES
from colo.memory.share import Description, SharedMemory, spec_of, view
from colo.memory.specs import Place, Wire
from colo.units import MIB, align_up

_FIRST_SLAB_BYTES, _SLAB_BYTES = 2 * MIB, 64 * MIB
"""Small parameters share slabs, each twice the last up to this size; a large one gets a slab of its own size."""


class OwnMemory:
    """Slabs of this process, kept so that they can be exported, with the verbs of `StoreClient`."""

    fill = True
    layout: Layout = MappingProxyType({})

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[SharedMemory] = []

    def take(self, size_bytes: int) -> torch.Tensor:
        """Take another slab: uint8, shape [size_bytes]."""
        self._slabs.append(SharedMemory(size_bytes, self._device))
        return self._slabs[-1].bytes

    def drop(self, unused: Mapping[int, StorageWeakRef]) -> None:
        """Let go of slabs; tensors over them keep the memory."""
        for index in unused:
            self._slabs[index].close()

    def done(self, layout: Layout) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the memory is the model's."""

    def describe(self, *, to_pid: int) -> list[Description | None]:
        """Every slab for another process; `None` for those that have been dropped."""
        return [slab.describe(to_pid=to_pid) if slab.bytes.numel() else None for slab in self._slabs]


@dataclass
class Placement:
    """Places of the parameters of one model."""

    source: OwnMemory | StoreClient
    """Origin of the slabs."""

    device: torch.device
    slabs: list[torch.Tensor] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)
    """Parameters, or tensors derived from them, that are not in the slabs, with the reason."""

    placing_s: float = 0.0
    """Seconds that asking for memory and mapping it took."""

    pool: Any = None
    """Pool of the model's other tensors; it lives as long as the model."""

    loaded_as: Digest | None = None
    """The slabs once the weights had been read into them."""

    _room: torch.Tensor | None = None
    _room_bytes: int = _FIRST_SLAB_BYTES // 2

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """Memory for `parameter`, with its dtype, shape and strides."""
        size_bytes = align_up(parameter.numel() * parameter.element_size(), ALIGNMENT_BYTES)
        if size_bytes > _SLAB_BYTES // 2:
            room = self._take(size_bytes)
        else:
            # small parameters fill a slab in order; a restart asks in the same order and gets the same places
            if self._room is None or self._room.numel() < size_bytes:
                last_bytes = self._room_bytes
                self._room_bytes = max(min(2 * last_bytes, _SLAB_BYTES), align_up(size_bytes, _FIRST_SLAB_BYTES))
                self._room = self._take(self._room_bytes)
            room, self._room = self._room[:size_bytes], self._room[size_bytes:]
        # as bytes first: a slab has no dtype
        return room[: parameter.numel() * parameter.element_size()].view(parameter.dtype).view(parameter.shape)

    def move_in(self, buffer: torch.Tensor) -> None:
        """Point a buffer into the slabs. Its values go along if the slabs are to be filled, else theirs stay."""
        # meta and strided buffers stay: there is no memory, or none that a slab could be
        if buffer.device.type != self.device.type or not buffer.is_contiguous():
            return
        place = self.place(buffer)
        if self.source.fill:
            place.copy_(buffer)
        buffer.data = place

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Index of the slab and offset in bytes, or `None` for a tensor elsewhere."""
        address = tensor.data_ptr()
        for index, slab in enumerate(self.slabs):
            offset = address - slab.data_ptr()
            if 0 <= offset < slab.numel():
                return index, offset
        return None

    def layout(self, model: nn.Module) -> Layout:
        """Lay out the weights of `model` in the slabs."""
        tensors = (*model.named_parameters(remove_duplicate=False), *compat.loadable_buffers(model))
        described = ((name, self._describe(name, tensor)) for name, tensor in tensors if tensor.numel())
        return {name: place for name, place in described if place is not None}

    def put_back(self, model: nn.Module) -> None:
        """Put parameters where they lay when the memory was filled: reading the checkpoint may tie some."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            known = self.source.layout.get(name)
            mine = self._describe(name, parameter)
            if known is None or mine is None or known == mine:
                continue
            place = Place.from_wire(known)
            if (place.tensor.dtype, place.tensor.shape) == (mine["tensor"]["dtype"], tuple(mine["tensor"]["shape"])):
                parameter.data = view(place, self.slabs[place.memory])

    def _describe(self, name: str, tensor: torch.Tensor) -> Wire | None:
        place = self.locate(tensor)
        return None if place is None else Place(spec_of(name, tensor), *place).to_wire()

    def digest(self) -> Digest:
        """Digest all slabs."""
        return Digest.of({f"slab {index}": slab for index, slab in enumerate(self.slabs)})

    def drop_unused(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give back slabs without any of `tensors`, such as the slab of an output layer that has become tied."""
        used = {place[0] for tensor in tensors if (place := self.locate(tensor)) is not None}
        # weak: a slab that nothing refers to any more may go at once
        unused = {
            index: StorageWeakRef(slab.untyped_storage()) for index, slab in enumerate(self.slabs) if index not in used
        }
        self._room = None
        for index in unused:
            self.slabs[index] = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.source.drop(unused)

    def _take(self, size_bytes: int) -> torch.Tensor:
        start_s = time.perf_counter()
        self.slabs.append(self.source.take(size_bytes))
        self.placing_s += time.perf_counter() - start_s
        return self.slabs[-1]


_met: set[str] = set()
"""Stores whose memory holds a model of this process."""

_placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()


def placement_of(model: nn.Module) -> Placement | None:
    """Return the places of the parameters of `model`, if this loader built it."""
    return _placements.get(model)


def placed_models() -> list[nn.Module]:
    """Every model of this process that this loader built."""
    return list(_placements)


class ColoModelLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM ships no types that mypy reads
    """Loads a model as vLLM does, with its parameters in shared memory."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        self._address = extra.pop(STORE_KEY, None)
        load_format = extra.pop(FORMAT_KEY, "auto")
        self._inner = get_model_loader(replace(load_config, load_format=load_format, model_loader_extra_config=extra))
        self._placement: Placement | None = None
        self._building = ExitStack()
        self._tensors_before: set[tuple[int, str, int]] = set()

    def download_model(self, model_config: Any) -> None:
        """Download what vLLM's own loader would."""
        self._inner.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load as vLLM's own loader does, unless the memory holds the weights already."""
        self._building.close()
        # what appears after loading is derived from weights by vLLM's post-processing
        self._tensors_before = {(id(module), name, t.data_ptr()) for module, name, t in _plain_tensors(model)}
        if self._placement is None or self._placement.source.fill:
            self._inner.load_weights(model, model_config)
        else:
            self._placement.put_back(model)
        # buffers that a checkpoint fills are weights too, and their places only known now
        if self._placement is not None:
            for _, buffer in compat.loadable_buffers(model):
                self._placement.move_in(buffer)
            compat.keep_weights_plain(model)
            # before vLLM's post-processing, to see if it writes
            self._placement.loaded_as = self._placement.digest()

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """Build the model over shared memory, and read the checkpoint into it where it is not there yet."""
        device = torch.device(vllm_config.device_config.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        rank = vllm_config.parallel_config.rank
        source: OwnMemory | StoreClient = OwnMemory(device)
        if self._address is not None and self._address not in _met:  # a drafter, which is loaded after it, is its own
            _met.add(self._address)
            source = store = StoreClient(self._address, rank=rank, pid=os.getpid(), device=device)
            end_with(store.owner_pid)
        placement = self._placement = Placement(source, device)
        compat.prefer_sleep_backend(model_config)
        kept_apart: AbstractContextManager[object] = nullcontext()
        if device.type == "cuda":  # what lies beside the parameters must not be in the sleep pool, which is unmapped
            placement.pool = torch.cuda.MemPool()
            kept_apart = torch.cuda.use_mem_pool(placement.pool)
        with kept_apart, self._building:
            built_on = torch.device(vllm_config.load_config.device or vllm_config.device_config.device)
            self._building.enter_context(parameters_in(placement, device, built_on=built_on, fill=source.fill))
            model: nn.Module = super().load_model(vllm_config, model_config, *args, **kwargs)
        # blocks that the building has freed belong to nobody
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        # a parameter that post-processing has replaced is not what the trainer would write to
        for name, parameter in model.named_parameters():
            if parameter.numel() and placement.locate(parameter) is None:
                placement.outside[name] = "vLLM's post-processing replaces it"
        for module, name, tensor in _plain_tensors(model):
            is_new = (id(module), name, tensor.data_ptr()) not in self._tensors_before
            # a single element is taken for a counter or the like
            if is_new and tensor.numel() > 1 and placement.locate(tensor) is None:
                placement.outside[name] = f"{type(module).__name__} keeps a tensor derived from weights"
        if placement.loaded_as is None or placement.digest().differs(placement.loaded_as):
            placement.outside["weights"] = "vLLM's post-processing changes weights in place"
        placement.loaded_as = None  # a digest keeps the memory of a CPU, which `drop_unused` is to give back
        if not placement.outside:  # else a restart has to load and process anew
            source.done(placement.layout(model))
        elif not source.fill:
            name, why = next(iter(placement.outside.items()))
            raise TransferError(
                f"the engine has weights of its own, which the first one shared ({name}: {why}): start it with the "
                "same model and options, or build a new runtime"
            )
        plain = (tensor for _, _, tensor in _plain_tensors(model))
        # after `done`, which says which slabs have weights
        placement.drop_unused(itertools.chain(model.parameters(), model.buffers(), plain))
        source.close()
        _placements[model] = placement
        return model


def _plain_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Tensors that are attributes of modules, or of their implementations, neither parameters nor buffers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield module, name, value
        for name, value in compat.implementation_tensors(module):
            yield module, name, value


# ---- parameters put into slabs while vLLM builds its model, before any weight is read --------------------------------

# Large tensors are made there to begin with, the others move as they are registered. When the slabs hold weights
# already, because an engine is started again on a trainer's, nothing that a module does to its new parameters may reach
# them.

_LARGE_BYTES = MIB
"""Tensors up to this size torch takes from small blocks of its own, and uses again."""


@contextmanager
def parameters_in(slabs: Placement, device: torch.device, *, built_on: torch.device, fill: bool) -> Iterator[None]:
    """Put every parameter registered within the block into `slabs`; these hold weights already unless `fill`.

    `built_on` is the device of the context that the model is built in, which may lack its number.
    """
    seen: dict[int, nn.Parameter] = {}  # also keeps ids from being reused

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # lazy parameters have no memory yet, and others belong to another device
        if parameter is None or id(parameter) in seen or is_lazy(parameter) or parameter.device.type != device.type:
            return
        # one that was made in the slabs lies there already
        if parameter.numel() and parameter.is_contiguous() and slabs.locate(parameter) is None:
            place = slabs.place(parameter)
            if fill:
                place.copy_(parameter.detach())
            parameter.data = place
        seen[id(parameter)] = parameter

    with ExitStack() as undo:
        # torch's global hook sees every parameter of every module that vLLM builds
        undo.callback(register_module_parameter_registration_hook(move).remove)
        if not fill:
            # initializers would overwrite the trainer's weights
            undo.enter_context(_NothingWrittenTo(slabs))
        undo.enter_context(_LargeTensorsIn(slabs, built_on))
        yield


class _LargeTensorsIn(TorchFunctionMode):
    """Makes large tensors in the slabs when `torch.empty` gets no device, as for parameters.

    The mode then sees the context's `torch.device`; vLLM itself passes strings or numbers. A tensor that moved
    later would leave memory behind that torch hardly uses again under vLLM's `max_split_size_mb:20`.
    """

    def __init__(self, slabs: Placement, built_on: torch.device) -> None:
        super().__init__()
        self._slabs = slabs
        self._built_on = built_on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.empty and isinstance(device, torch.device) and device == self._built_on:
            plain = not kwargs.get("pin_memory") and kwargs.get("out") is None and not kwargs.get("requires_grad")
            like = torch.empty(*args, **(kwargs | {"device": "meta"})) if plain else None
            if like is not None and like.nbytes > _LARGE_BYTES and like.is_contiguous():
                return self._slabs.place(like)
        return func(*args, **kwargs)


class _NothingWrittenTo(TorchDispatchMode):
    """Leaves out operations that would write to the slabs, as modules do that initialize their parameters."""

    def __init__(self, slabs: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slabs = slabs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = list(_written(func, args, kwargs))
        # views write nothing, and what does not touch the slabs may run
        if torch.Tag.inplace_view in func.tags or not any(self._slabs.locate(tensor) for tensor in written):
            return func(*args, **kwargs)
        count = len(func._schema.returns)
        return None if count == 0 else written[0] if count == 1 else tuple(written)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The arguments that an operation writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            values: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
            yield from (tensor for tensor in values if isinstance(tensor, torch.Tensor))
