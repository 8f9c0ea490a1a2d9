"""A transformers model, possibly wrapped by PEFT, as a source of weights in Hugging Face names.

Weights are what a checkpoint holds of a model: its parameters, and buffers such as a router's correction bias, which no
gradient reaches and which an engine needs all the same.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import nn

from colo.errors import StaleWeights, TransferError
from colo.memory.load_plan import Part, num_covered
from colo.memory.share import spec_of
from colo.memory.specs import TensorSpec
from colo.memory.storage import local_shard
from colo.weights.boxes import PlacedPart, parts_of
from colo.weights.ranks import RankGroup
from colo.weights.sources.base import Gathered, WeightSource, in_layers, plain_name
from colo.weights.sources.heads import added_heads, is_peft_model
from colo.weights.sources.peft import adapter_settings, adapter_weights

if TYPE_CHECKING:
    from peft import PeftModel

    from colo.engine import AdapterWeights

T = TypeVar("T")
_parameters_of, _buffers_of = operator.attrgetter("_parameters"), operator.attrgetter("_buffers")
_version_of = operator.attrgetter("_version")
# a module may be false: one of no length, or of none that can be asked
_is_there = cast("Callable[[nn.Module | None], TypeGuard[nn.Module]]", partial(operator.is_not, None))

OUTPUT_LAYER = "lm_head.weight"
"""The output layer of a transformers model that generates, unless that is the embedding."""

_ADAPTER_PARTS = (".lora_", ".modules_to_save.", ".lora_magnitude_vector.")


_UNKNOWN = ("KeyError", "no module or parameter named", "has no parameter")
"""Words of loaders about a name that they do not know: vLLM's, in two ways, and the embedded engine's."""


class ModuleSource(WeightSource):
    """The base weights of a model: what an engine loads, without adapters.

    Iterating gives `(name, tensor)` with the plain Hugging Face names, each tied tensor once. Tensors are looked up
    anew each time, so that a replaced one is noticed; sharded ones are `DTensor`s (see
    `colo.weights.sources.base`).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.foreign: set[str] = set()
        self.heads = added_heads(model)
        """Names of modules that train along and are not the engine's; see `colo.weights.sources.heads`."""

        self._has_adapter = is_peft_model(model)  # as the runtime began
        self._names: frozenset[str] | None = None
        self._key: tuple[Sequence[object], Sequence[object], Sequence[object]] = ((), (), ())
        self._num_foreign = 0
        self._items: list[tuple[str, torch.Tensor]] = []
        self._computed: dict[str, torch.Tensor] = {}  # copies of buffers, as names were settled
        self._fsdp = _fsdp_modules(model)
        # first, since FSDP2's parameters are `DTensor`s only while they are sharded
        self.reshard()
        self.ranks = RankGroup(model.parameters())
        self.is_sharded = not self.ranks.is_alone

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return cached items while the model has the same tensors under the same names: finding them is slow."""
        self.reshard()
        modules = all_modules(self.model)
        names, tensors = held_by(modules)
        # kept whole, so that a new tensor at the address of one that is gone is not taken for it
        key = (modules, names, tensors)
        is_known = all(itertools.starmap(_are_same, zip(key, self._key, strict=True)))
        if not is_known or len(self.foreign) != self._num_foreign:
            self._key, self._num_foreign, self._items = key, len(self.foreign), list(self._found())
        return iter(self._items)

    def _found(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in (*self.model.named_parameters(), *saved_buffers(self.model)):
            if any(part in name for part in _ADAPTER_PARTS) or (plain := plain_name(name)) in self.foreign:
                continue
            if not self.heads or plain.partition(".")[0] not in self.heads:
                yield plain, tensor

    @property
    def modules(self) -> list[nn.Module]:
        """The model alone."""
        return [self.model]

    def specs(self) -> list[TensorSpec]:
        """Every base weight, whole and without data, in order."""
        return [spec_of(name, tensor) for name, tensor in self]

    def parts(self) -> list[PlacedPart]:
        """Parts of every base weight on this rank: all of it, or the boxes of a `DTensor`."""
        return [part for name, tensor in self for part in parts_of(name, tensor)]

    def memory(self) -> list[torch.Tensor]:
        """The base weights themselves."""
        return [tensor for _, tensor in self]

    def places(self) -> tuple[list[torch.Tensor], list[Hashable]]:
        """All parameters and buffers, and the addresses of their local shards."""
        self.reshard()
        modules = all_modules(self.model)
        tensors = [t for m in modules for of in (m._parameters, m._buffers) for t in of.values() if t is not None]
        return tensors, [local_shard(tensor).data_ptr() for tensor in tensors]

    def groups(self) -> list[list[str]]:
        """Names in order, those of a layer together."""
        return in_layers(name for name, _ in self)

    def reshard(self) -> None:
        """Make the model hold parts again where FSDP2 has left whole weights, after a pass without a backward one."""
        for module in self._fsdp:
            module.reshard()

    def outermost_sharded(self) -> list[nn.Module]:
        """Modules that FSDP2 has taken over and that are in none of the others: where its backward passes begin."""
        inner = {id(part) for module in self._fsdp for part in all_modules(module)[1:]}
        return [module for module in self._fsdp if id(module) not in inner]

    def given_to(self, take: Callable[[dict[str, torch.Tensor]], T]) -> T:
        """Return what `take` returns for every weight, without buffers that the engine's loader does not know.

        Such buffers are no weights from then on. Raises: what `take` raises for others.
        """
        # a loader names one unknown buffer at a time
        while True:
            tensors = self.tensors()
            try:
                return take(tensors)
            except (KeyError, ValueError, TransferError) as error:
                said = f"{type(error).__name__}: {error}"
                buffers = [name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)]
                named = {name for name in buffers if name.rpartition(".")[2] in said}
                # an error that only happens to name a buffer is the caller's
                if not named or not any(words in said for words in _UNKNOWN):
                    raise
                self.foreign |= named

    def settle_names(self) -> None:
        """Fix the names of the engine's weights, and the values of computed buffers, as those of now."""
        self._names = frozenset(name for name, _ in self)
        self._computed = {name: buffer.detach().clone() for name, buffer in computed_buffers(self.model)}

    def check_computed(self) -> None:
        """Raise `StaleWeights` when a buffer that engines compute for themselves has other values than at the start."""
        for name, begun in self._computed.items():
            with suppress(AttributeError):  # it is gone
                buffer = self.model.get_buffer(name)  # by name: a module may have been put in its place
                # of another shape is a table that a pass has made longer
                if buffer.shape != begun.shape or torch.equal(buffer.to(begun.device, begun.dtype), begun):
                    continue
                raise StaleWeights(
                    f"{plain_name(name)} has been written to: no checkpoint holds this buffer, and the engine computes "
                    "its own from the config, so that it would sample from another model. Put the values back, or "
                    "close the runtime, change the config (rope_parameters, say) and build another"
                )

    def check_names(self, names: Iterable[str] | None = None) -> None:
        """Raise `StaleWeights` when the model has other weights, by name, than when the engine was given them."""
        if self._names is None:
            return
        now = {name for name, _ in self} if names is None else set(names)
        if added := sorted(now - self._names):
            raise StaleWeights(
                f"the model has {len(added)} weights that it did not have when the runtime was built, {added[0]} for "
                "one: the engine computes without them. Take them out, or close the runtime and build another with "
                "the model as it is now"
            )
        # a loader may tell that a buffer is foreign only when weights are first loaded, after names were settled
        if lacking := sorted(self._names - now - self.foreign):
            raise StaleWeights(
                f"the model has {len(lacking)} weights no longer that the engine computes with, {lacking[0]} for one: "
                "put them back, or close the runtime and build another with the model as it is now"
            )

    def adapter(self) -> AdapterWeights | None:
        """The model's active adapter; `None` without one. Raises: as `adapter_weights`."""
        return adapter_weights(cast("PeftModel", self.model)) if is_peft_model(self.model) else None

    def settings(self) -> Hashable:
        """Settings of the model's adapter; `None` without one. Raises: `StaleWeights` for one that came later."""
        if not is_peft_model(self.model):
            return None
        if not self._has_adapter:
            raise StaleWeights(
                "the model has an adapter, and had none when the runtime began: the engine samples without it. Close "
                "the runtime and build another, with an optimizer of the adapter's parameters"
            )
        return adapter_settings(cast("PeftModel", self.model))

    def fingerprint(self) -> Hashable:
        """Changes when a base weight is written to or replaced, except through `.data`, which torch does not count."""
        tensors = self.tensors()
        shards = map(local_shard, tensors.values()) if self.is_sharded else tensors.values()
        return tuple(map(torch.Tensor.data_ptr, shards)), tuple(map(_version_of, tensors.values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every base weight by name."""
        return dict(self)

    def held(self) -> dict[str, torch.Tensor]:
        """Every base weight by name: all of it or its shard lies on this rank."""
        return dict(self)

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """`tensors`, each whole when it is its turn; every rank takes them in order. See `Gathered`."""
        return Gathered(tensors) if self.is_sharded else nullcontext(tensors)


def all_modules(model: nn.Module) -> list[nn.Module]:
    """List every module, a shared one once for each reference: ten times as fast as `nn.Module.modules`."""
    found = [model]
    for module in found:  # grows while it is walked
        found += filter(_is_there, module._modules.values())
    return found


def held_by(modules: Sequence[nn.Module]) -> tuple[list[str], list[torch.Tensor | None]]:
    """Names within their modules, and tensors, of all parameters and buffers: by functions of C, as there are many."""
    holders = [*map(_parameters_of, modules), *map(_buffers_of, modules)]
    return list(itertools.chain.from_iterable(holders)), list(itertools.chain.from_iterable(map(dict.values, holders)))


def _are_same(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _fsdp_modules(model: nn.Module) -> list[Any]:
    """Modules that FSDP2 has taken over."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [module for module in all_modules(model) if kind is not None and isinstance(module, kind)]


def why_shared(model: nn.Module) -> str:
    """Name two places in which a model has one module, or one weight, but for its output layer; else nothing."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    places: dict[int, str] = {}
    for second, parameter in model.named_parameters(remove_duplicate=False):
        first, kind = places.setdefault(id(parameter), second), "weight"
        if first == second or parameter is getattr(output, "weight", None):
            continue
        owners = first.rpartition(".")[0], second.rpartition(".")[0]
        while owners[0] != owners[1] and model.get_submodule(owners[0]) is model.get_submodule(owners[1]):
            (first, second), kind = owners, "module"
            owners = first.rpartition(".")[0], second.rpartition(".")[0]
        return (
            f"{first} and {second} of the model are one {kind}, and the engine has one for each: put a copy.deepcopy "
            "of it in the second place, before the optimizer is made"
        )
    return ""


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point buffers that checkpoints hold, by name, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in own_saved_buffers(module):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def computed_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point buffers that no checkpoint holds, by name: transformers computes them, and engines their own.

    Those that a pass computes anew for its length (dynamic NTK, LongRoPE) are left out.
    """
    for prefix, module in model.named_modules():
        if not module._non_persistent_buffers_set or not type(module).__module__.startswith("transformers."):
            continue
        ropes = getattr(module, "rope_type", None)
        kinds = ropes.values() if isinstance(ropes, Mapping) else [ropes]
        if any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield f"{prefix}.{name}", buffer


def own_saved_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of a module without its children."""
    for name, buffer in module._buffers.items():
        if buffer is None or name in module._non_persistent_buffers_set:
            continue
        if buffer.is_floating_point() and buffer.numel():
            yield name, buffer


def recording_specs(
    weights: Iterable[tuple[str, torch.Tensor]], specs: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, each noted in `specs` as it passes: a parameter as one, without its memory."""
    for name, tensor in weights:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        specs[name] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        yield name, tensor


def check_taken(tensors: Mapping[str, torch.Tensor], left_out: Sequence[Mapping[str, Iterable[Part]]]) -> None:
    """Raise `TransferError` for weights that no worker of an engine takes, or only in part.

    `left_out` has, for each worker, the parts taken of weights that it does not take whole. Whole buffers may be left
    out, since an engine computes some itself.
    """
    for name in left_out[0]:
        # a worker that does not name it takes it whole
        if not all(name in parts for parts in left_out):
            continue
        tensor, num_taken = tensors[name], num_covered([part for parts in left_out for part in parts[name]])
        if num_taken >= tensor.numel() or (not num_taken and not isinstance(tensor, nn.Parameter)):
            continue
        raise TransferError(
            f"the engine takes {num_taken} of the {tensor.numel()} elements of {name} {tuple(tensor.shape)}: it would "
            "sample from another model. Start it on a checkpoint of this very architecture, sizes, biases and tied "
            "embeddings included"
        )


def own_output_layer(num_elements: int) -> TransferError:
    """The error for an output layer of the model's own where the engine's is its embedding, which it would become."""
    return TransferError(
        f"the engine takes 0 of the {num_elements} elements of {OUTPUT_LAYER}: its output layer is its embedding, and "
        "the model's is not. Start it on a checkpoint of this very architecture"
    )
