"""The embedded engine's model: parameters laid out as vLLM does, the module over them, and adapters on it.

Projections that read the same input are rows of one parameter, vocabularies are padded to a multiple of 64 rows, all
else is kept as it is. Names and shapes come from the transformers model itself, not from a table of architectures, so
that a family whose projections go by other names simply keeps them unfused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM

from colo.engine import AdapterWeights
from colo.errors import TransferError, Unsupported
from colo.memory.region import Region, allocate_region, carve, carved_bytes
from colo.units import GIB, align_up, batches
from colo.weights.sources.module import saved_buffers
from colo.weights.sources.names import checkpoint_views

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

STACKED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused projections of the engine, each with the checkpoint's projections in the order of their rows."""

VOCABULARY_ROWS = 64
"""Embeddings and language model heads have a multiple of so many rows."""

REGION_BYTES = GIB
"""Parameters are gathered into regions of at most this size; a larger parameter has one to itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Place of a checkpoint's tensor: `shape[0]` rows of `parameter`, from `first_row` on."""

    parameter: str
    first_row: int
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """These rows of `parameter`."""
        return parameter.narrow(0, self.first_row, self.num_rows) if self.shape else parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The engine's parameters, and which rows of them every checkpoint tensor fills."""

    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Engine name to shape and dtype."""

    slots: Mapping[str, Slot]
    """Hugging Face name to place. A tied name is not among them."""

    tied: Mapping[str, str]
    """Hugging Face name of each tied parameter, mapped to the name that has a slot."""

    model_type: str | None = None
    """`model_type` of the model's configuration: checkpoints of some name each expert of a stack."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Layout:
        """The layout of a transformers causal language model, whose parameters may be on the meta device."""
        named, tied = _distinct(model)
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        vocabularies = {id(embedding.weight) for embedding in embeddings if embedding is not None}
        parameters: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        slots: dict[str, Slot] = {}
        for engine_name, members in _stack(named):
            first, num_rows = named[members[0]], 0
            for member in members:
                slots[member] = Slot(parameter=engine_name, first_row=num_rows, shape=tuple(named[member].shape))
                num_rows += slots[member].num_rows
            if id(first) in vocabularies:
                num_rows = align_up(num_rows, VOCABULARY_ROWS)
            parameters[engine_name] = ((num_rows, *first.shape[1:]) if first.dim() else (), first.dtype)
        return cls(parameters=parameters, slots=slots, tied=tied, model_type=model.config.model_type)


def _distinct(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every parameter and saved buffer under its first name, and other names of parameters with the first."""
    first_names: dict[int, str] = {}
    named: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first == name:
            named[name] = parameter
        else:
            tied[name] = first
    return named | dict(saved_buffers(model)), tied


def _stack(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, list[str]]]:
    """Every engine parameter with the names that make it up, in the order of the model."""
    for name in named:
        owner, _, leaf = name.rpartition(".")
        parent, _, module = owner.rpartition(".")
        stacked = next((s for s, members in STACKED.items() if module in members), None)
        members = [f"{parent}.{member}.{leaf}" for member in STACKED[stacked]] if stacked else []
        if not stacked or not _can_stack(named, members):
            yield name, [name]
        # the first member stands for all: the others are rows of the same parameter
        elif name == members[0]:
            yield f"{parent}.{stacked}.{leaf}", members


def _can_stack(named: Mapping[str, torch.Tensor], members: Sequence[str]) -> bool:
    # Biases have no input size.
    return all(m in named for m in members) and len({(named[m].shape[1:], named[m].dtype) for m in members}) == 1


class FusedWeights:
    """The engine's parameters in memory, and the loader that fills them. Whoever makes it closes `regions`."""

    def __init__(self, layout: Layout, *, device: torch.device) -> None:
        """Take the memory; rows that pad a vocabulary are zero. `BudgetError`, and nothing kept, when it is missing."""
        self.layout = layout
        groups = _group(layout.parameters)
        self.regions = _allocate([carved_bytes(list(group.values())) for group in groups], device)
        self.parameters: dict[str, torch.Tensor] = {}
        """Engine name to tensor, padding included."""
        # one region for many: a mapping for each would cost more than its bytes
        for region, group in zip(self.regions, groups, strict=True):
            self.parameters |= zip(group, carve(region.bytes, list(group.values())), strict=True)
        self._views = {name: slot.view(self.parameters[slot.parameter]) for name, slot in layout.slots.items()}
        # experts have two names, the stack's and each one's in a checkpoint; the model's own win
        self._places = {**dict(checkpoint_views(self._views, layout.model_type)), **self._views}
        self.zero_padding()

    def hf_views(self) -> dict[str, torch.Tensor]:
        """Hugging Face name to the rows that hold it, contiguous; tied names are left out."""
        return dict(self._views)

    def unpadded(self) -> dict[str, torch.Tensor]:
        """Engine name to tensor, without the rows that pad a vocabulary: what loading every weight fills."""
        num_rows = {slot.parameter: slot.first_row + slot.num_rows for slot in self.layout.slots.values()}
        return {name: p.narrow(0, 0, num_rows[name]) if p.dim() else p for name, p in self.parameters.items()}

    def zero_padding(self) -> None:
        """Zero the rows that pad a vocabulary, after the memory was taken or restored without its content."""
        for name, rows in self.unpadded().items():
            if rows.shape != self.parameters[name].shape:
                self.parameters[name][len(rows) :].zero_()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy checkpoint tensors, any subset in any order, to their places; dtypes are converted as by `copy_`.

        Experts may come as transformers stacks them, or each by its name in a checkpoint. Tied names are skipped.
        Raises: `ValueError` for an unknown name, `TransferError` for a wrong shape; the tensors before it have been
        copied.
        """
        with torch.no_grad():
            for name, tensor in weights:
                if name in self.layout.tied:
                    continue
                self._destination(name, tensor).copy_(tensor)

    def drop_views(self) -> None:
        """Forget every tensor, so that the address range of closed regions can be used again."""
        self.parameters.clear()
        self._views.clear()
        self._places.clear()

    def _destination(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._places:
            raise ValueError(
                f"the engine's model has no parameter {name!r}; weights are loaded under Hugging Face names such as "
                f"{next(iter(self._views), 'none: the engine is closed')!r}. What a trainer's model has beside them, "
                "such as a value head, goes into a module of its own: a child of the language model, or one around it"
            )
        destination = self._places[name]
        if destination.shape != tensor.shape:
            raise TransferError(
                f"{name} has shape {tuple(tensor.shape)}, but the model's is {tuple(destination.shape)}: "
                "send the whole, unpadded tensor"
            )
        return destination


def empty_model(config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str | None) -> PreTrainedModel:
    """Make a model of `config`, its parameters on the meta device, its buffers computed. Raises: `Unsupported`."""
    require_causal_lm(config)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    # buffers are computed: rotary frequencies are in no checkpoint
    with init_empty_weights(include_buffers=False):
        # a copy: transformers writes the dtype into the config it is given
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    kept = {*(model._keep_in_fp32_modules_strict or ())}
    kept |= {*(model._keep_in_fp32_modules or ())} if dtype == torch.float16 else set()
    for name, buffer in saved_buffers(model):  # as reading a checkpoint would have them
        if kept.intersection(name.split(".")):
            buffer.data = buffer.data.float()
    model.tie_weights()  # making a parameter empty makes it a new one, which unties it
    return model.eval()


def require_causal_lm(config: PretrainedConfig) -> None:
    """Raise `Unsupported` for a config of no text model of transformers', in place of a list of those there are."""
    if not hasattr(config, "model_type"):
        raise TypeError(
            f"an engine takes a config of transformers, such as model.config, not a {type(config).__name__}"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise Unsupported(
            f"transformers has no causal language model of {config.model_type!r} ({type(config).__name__}): colo "
            "samples from text models. Of one that sees images take the language model within, where its checkpoint "
            "can be loaded by AutoModelForCausalLM; of one with code of its own register the classes "
            "(AutoModelForCausalLM.register)"
        )


def bind(model: PreTrainedModel, views: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> None:
    """Make `views`, by Hugging Face name, the frozen parameters and the buffers of `model`.

    An `nn.Parameter` is taken as it is. Other buffers move to the same device. Raises: `KeyError` for a parameter that
    is neither in `views` nor in `tied`.
    """
    frozen = {
        name: view if isinstance(view, nn.Parameter) else nn.Parameter(view, requires_grad=False)
        for name, view in views.items()
    }
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, frozen[tied.get(name, name)])
    device = next(iter(frozen.values())).device
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, views[name] if name in views else buffer.to(device))


_Hook = Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor | None]


class LoadedAdapters:
    """LoRA adapters by name, on the linear modules of one model.

    Hooks on adapted modules stay, and do nothing unless an adapter is applied: no interrupt can leave one counting
    twice.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._by_name: dict[str, AdapterWeights] = {}
        self._hooks: dict[str, _Hook] = {}
        self._applied: AdapterWeights | None = None

    @property
    def names(self) -> list[str]:
        """Names of the adapters, sorted."""
        return sorted(self._by_name)

    def tensors(self, name: str | None) -> list[tuple[str, torch.Tensor]]:
        """A and B of an adapter, by names as PEFT has them; none of `None`."""
        return [] if name is None else self._by_name[name].named_tensors()

    def add(self, name: str, adapter: AdapterWeights) -> None:
        """Keep `adapter`: its own tensors when it is shared, else copies on the model's device.

        Raises: `ValueError` for a name in use, keys that do not agree, a wrong shape or device; `Unsupported` for a
        module that is not linear. Nothing has been kept then.
        """
        if name in self._by_name:
            raise ValueError(f"there is an adapter {name!r} already: remove it, or give each version a name of its own")
        odd = sorted((adapter.a.keys() ^ adapter.b.keys()) | (adapter.a.keys() ^ adapter.scalings.keys()))
        if odd:
            raise ValueError(f"adapter {name!r} needs A, B and a scaling for each module, but lacks one for {odd}")
        for module_name in adapter.a:
            self._check(module_name, adapter)
        for module_name in adapter.a.keys() - self._hooks.keys():
            hook = self._hook(module_name)
            self._modules[module_name].register_forward_hook(hook)
            self._hooks[module_name] = hook  # before which it does nothing, so that one of two can be left behind
        # a shared adapter is read where the trainer has it, so that a step needs no copy
        self._by_name[name] = adapter if adapter.shared else self._copied(adapter)

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises: `ValueError` when there is none of that name."""
        self.require(name)
        del self._by_name[name]

    def require(self, name: str) -> None:
        """Raise `ValueError` when there is no adapter of that name."""
        if name not in self._by_name:
            raise ValueError(f"there is no adapter {name!r}; loaded are {self.names}")

    def clear(self) -> None:
        """Forget every adapter."""
        self._by_name.clear()

    @contextmanager
    def applied(self, name: str | None) -> Iterator[None]:
        """Let the model compute with an adapter, or with none, while the body runs."""
        self._applied = None if name is None else self._by_name[name]
        try:
            yield
        finally:
            self._applied = None

    def _hook(self, name: str) -> _Hook:
        """`y + scaling * B (A x)` in the order and the dtypes of PEFT's `lora.Linear.forward`: results agree."""

        def add(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            adapter = self._applied
            if adapter is None or name not in adapter.a or self._hooks.get(name) is not add:
                return None
            a, b = adapter.a[name], adapter.b[name]
            return (output + F.linear(F.linear(args[0].to(a.dtype), a), b) * adapter.scalings[name]).to(output.dtype)

        return add

    def _check(self, name: str, adapter: AdapterWeights) -> None:
        module, a, b = self._modules.get(name), adapter.a[name], adapter.b[name]
        if not isinstance(module, nn.Linear):
            kind = "there is none of that name" if module is None else f"it is a {type(module).__name__}"
            raise Unsupported(f"cannot adapt module {name!r}: {kind}, and LoRA is applied to linear modules only")
        rank = a.shape[0]
        if a.shape != (rank, module.in_features) or b.shape != (module.out_features, rank):
            raise ValueError(
                f"adapter of {name!r}: A {tuple(a.shape)} and B {tuple(b.shape)} do not fit, expected "
                f"(rank, {module.in_features}) and ({module.out_features}, rank)"
            )
        if adapter.shared and {a.device, b.device} != {module.weight.device}:
            raise ValueError(f"adapter of {name!r} is on {a.device} and {b.device}, not on {module.weight.device}")

    def _copied(self, adapter: AdapterWeights) -> AdapterWeights:
        def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            devices = {name: self._modules[name].get_parameter("weight").device for name in tensors}
            return {name: t.detach().to(devices[name], copy=True) for name, t in tensors.items()}

        return replace(adapter, a=copied(adapter.a), b=copied(adapter.b), scalings=dict(adapter.scalings))


def _group(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> list[dict[str, tuple[Any, torch.dtype]]]:
    """Parameters in order, cut into groups of at most `REGION_BYTES`."""
    return [dict(group) for group in batches(specs.items(), lambda item: carved_bytes([item[1]]), REGION_BYTES)]


def _allocate(sizes_bytes: Sequence[int], device: torch.device) -> list[Region]:
    with ExitStack() as undo:
        regions = []
        # regions that were taken go back when a later one finds no room
        for index, size_bytes in enumerate(sizes_bytes):
            regions.append(allocate_region(size_bytes, device, name=f"engine.weights.{index}"))
            undo.callback(regions[-1].close)
        undo.pop_all()
    return regions
