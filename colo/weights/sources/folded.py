"""A PEFT model whose adapter is folded into the weights that engines are given, for adapters that are more than LoRA.

PEFT's own `merge` runs on a stand-in of each adapted layer, whose base weights are copies: the model, its base, hooks
and modes are never touched, so that an error on the way leaves nothing to restore, and the base is what it was bit for
bit. The result lies in memory of the source's own, or in the engine's where the two are shared.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from colo.errors import StaleWeights, Unsupported
from colo.memory.storage import is_dtensor
from colo.units import format_bytes
from colo.weights.packed import is_packed
from colo.weights.sources.base import plain_name
from colo.weights.sources.heads import is_peft_model, plain_model
from colo.weights.sources.module import ModuleSource, all_modules, own_saved_buffers, saved_buffers
from colo.weights.sources.peft import (
    ONLY_LORA,
    active_adapter,
    active_adapters,
    adds_nothing,
    check_lora_config,
    kind_of,
)

_FOLDABLE = frozenset(
    {
        *("ADALORA", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3"),
        *("LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "RANDLORA", "ROAD", "SHIRA"),
        *("TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
    }
)
"""Kinds whose `merge` gives weights that compute what the adapter does, which the tests have seen of each."""

_SUMS = frozenset({"LOHA", "LOKR", "LORA", "VERA"})
"""Kinds that add to the weights, so that several adapters of a layer can be merged in any order."""

_WRITES_ADAPTER = "coft"  # a setting of OFT with which a merge, as every pass, writes to the adapter itself


class FoldedSource(ModuleSource):
    """The weights of a model with its active adapters folded in; weights beside the adapted layers are the live ones.

    Ownership: owns the folded weights, one more copy of those of every adapted layer, unless they are the engine's
    memory. Ordering: they have no memory until `allocate` gives them some, or a transport the engine's; they hold what
    `renew` has computed last.
    """

    def __init__(self, model: nn.Module) -> None:
        self._folded: dict[str, nn.Parameter] = {}
        self._begun: frozenset[str] = frozenset()  # names of those that were adapted as the first were folded
        super().__init__(model)

    def _found(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for prefix, module in _outside(plain_model(self.model)):
            is_adapted = _is_adapted(module)
            held = _base_of(module).named_parameters() if is_adapted else _own_weights(module)
            for name, tensor in held:
                plain = plain_name(prefix + name)
                if id(tensor) in seen or plain in self.foreign or plain.partition(".")[0] in self.heads:
                    continue
                seen.add(id(tensor))
                yield plain, self._memory_for(plain, tensor) if is_adapted else tensor

    def _memory_for(self, name: str, base: torch.Tensor) -> nn.Parameter:
        kept = self._folded.get(name)
        if kept is None or (kept.shape, kept.dtype) != (base.shape, base.dtype):
            kept = self._folded[name] = nn.Parameter(_without_memory(base), requires_grad=False)
        return kept

    def allocate(self) -> None:
        """Give the folded weights memory of their own."""
        base = self.base()
        for name, tensor in self.folded.items():
            tensor.data = torch.empty_like(base[name])

    def release(self) -> None:
        """Let go of the folded weights' memory, or of the engine's."""
        for tensor in self._folded.values():
            tensor.data = _without_memory(tensor)

    @property
    def working_bytes(self) -> int:
        """Memory that folding the largest layer takes: a copy of it, and its change in fp32, which may be copied."""
        layers = [list(_base_of(layer).parameters()) for _, layer in _adapted_layers(self.model)]
        sizes = [sum(p.nbytes + 8 * p.numel() for p in layer) for layer in layers]
        return max(sizes, default=0)

    @property
    def folded(self) -> Mapping[str, torch.Tensor]:
        """Weights of the adapted layers, by name."""
        return {name: tensor for name, tensor in self if name in self._folded}

    def base(self) -> dict[str, torch.Tensor]:
        """The model's own weights beneath the adapter, by name, each tied one once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, layer in _adapted_layers(self.model):
            for name, tensor in _base_of(layer).named_parameters():
                found.setdefault(id(tensor), (plain_name(prefix + name), tensor))
        return dict(found.values())

    def held(self) -> dict[str, torch.Tensor]:
        """Every tensor that the weights are made of: parameters and buffers of base and adapter."""
        return dict((*self.model.named_parameters(), *saved_buffers(self.model)))

    def adapter(self) -> None:
        """Return `None`: it is in the weights."""

    def settings(self) -> Hashable:
        """Changes as an adapter of a layer is activated, scaled, merged or switched off.

        Raises: `StaleWeights` for a layer that has got its first adapter since: it has no memory for the folded weight.
        """
        if new := sorted(self.folded.keys() - self._begun) if self._begun else []:
            raise StaleWeights(
                f"{new[0]} and {len(new) - 1} more have an adapter, and had none when the runtime began, which has no "
                "memory for them folded: put every adapter on before, or close the runtime and build another"
            )
        found = []
        layers: list[Any] = [module for module in all_modules(plain_model(self.model)) if _is_adapted(module)]
        for layer in layers:
            names, scaling = (tuple(layer.active_adapters), tuple(layer.merged_adapters)), getattr(layer, "scaling", {})
            found.append((names, layer.disable_adapters, tuple(scaling.items()) if isinstance(scaling, dict) else ()))
        return tuple(found)

    @torch.no_grad()
    def renew(self) -> int:
        """Fold the active adapters into copies of the base; return the bytes written.

        Takes working memory of one layer at a time: a copy of it, and what PEFT makes of that.
        Raises: `Unsupported` for an adapter that does not fold; whatever PEFT raises.
        """
        # each time: the loop may have activated another adapter since
        check_foldable(self.model)
        self._begun = self._begun or frozenset(self.folded)
        folded, num_bytes = self.folded, 0
        for prefix, layer in _adapted_layers(self.model):
            for name, tensor in _fold(layer).named_parameters():
                target = folded.get(plain_name(prefix + name))
                if target is not None:  # `None` for the second of two tied weights
                    target.copy_(tensor)
                    num_bytes += target.nbytes
        return num_bytes


def module_source(model: nn.Module, *, fold: bool) -> ModuleSource:
    """The source of a model's weights, with its adapter, if it has one, folded into them or beside them."""
    return FoldedSource(model) if fold and is_peft_model(model) else ModuleSource(model)


@torch.no_grad()
def changes_nothing(model: Any) -> bool:
    """True if a PEFT model computes what it does without its adapter, of any kind that folds: a new one, most often.

    Not so if anything trains that switching the adapter off would leave on.
    """
    if adds_nothing(model):
        return True
    layers = list(_adapted_layers(model))
    own = {id(p) for _, layer in layers for p in layer.parameters()} - {
        id(p) for _, layer in layers for p in _base_of(layer).parameters()
    }
    if any(p.requires_grad and id(p) not in own for p in model.parameters()):
        return False
    try:
        check_foldable(model)
    except Unsupported:
        return False
    return all(
        torch.equal(folded, base)
        for _, layer in layers
        for folded, base in zip(_fold(layer).parameters(), _base_of(layer).parameters(), strict=True)
    )


# ---- which adapters fold ---------------------------------------------------------------------------------------------


def check_adapter(model: Any, *, fold: bool) -> None:
    """Raise `Unsupported`, by PEFT's name of it, for an active adapter that an engine cannot apply.

    That is one plain LoRA or, with `fold`, whatever folds into the weights. Looks at configs and classes alone, so that
    it can be called before anything is started.
    """
    if not hasattr(model, "peft_config"):
        return
    if fold:
        check_foldable(model)
        return
    try:
        if not is_peft_model(model) or type(model).__name__ == "PeftMixedModel":
            raise Unsupported(f"a {type(model).__name__} mixes adapters, and {ONLY_LORA}")
        check_lora_config(model.peft_config[active_adapter(model)])
    except Unsupported as error:
        try:
            check_foldable(model)
        except Unsupported:
            raise error from None
        raise Unsupported(
            f"{error}; or publish it folded into the weights, RuntimeConfig(fold_adapter=True), for "
            f"{format_bytes(folded_bytes(model))} of the device (colo_fold_adapter=True in a config of TRL's): one "
            "more copy of the weights that it adapts"
        ) from None


def folded_bytes(model: nn.Module) -> int:
    """Bytes of a second copy of the weights that are adapted."""
    bases = [_base_of(layer) for _, layer in _adapted_layers(model)]
    return sum({id(p): p.nbytes for base in bases for p in base.parameters()}.values())


def check_foldable(model: Any) -> None:
    """Raise `Unsupported`, by PEFT's name, for an active adapter whose effect weights alone do not have.

    Also for one on weights that are quantized, tied to others or sharded over ranks.
    """
    names, kinds = active_adapters(model), [kind_of(model.peft_config[name]) for name in active_adapters(model)]
    for name, kind in zip(names, kinds, strict=True):
        config = model.peft_config[name]
        if kind not in _FOLDABLE:
            raise Unsupported(
                f"adapter {name} is {kind} ({type(config).__name__}), which does not fold into the weights, and "
                f"{ONLY_LORA}"
            )
        if kind == "LORA":
            check_lora_config(config, folded=True)
        if getattr(config, _WRITES_ADAPTER, False):
            raise Unsupported(
                f"{type(config).__name__}({_WRITES_ADAPTER}=True) does not fold: PEFT writes to the adapter to merge"
            )
        if kinds.count(kind) > 1 and (kind not in _SUMS or getattr(config, "use_dora", False)):
            raise Unsupported(
                f"{len(names)} adapters are active ({', '.join(names)}), and PEFT may merge those of kind {kind} in "
                "another order than it applies them: activate one with set_adapter"
            )
    layers = list(_adapted_layers(model))
    for prefix, layer in layers:
        if any(getattr(layer, "lora_bias", {}).values()) and getattr(_base_of(layer), "bias", None) is None:
            raise Unsupported(
                f"{plain_name(prefix)[:-1]} has no bias, into which the one of LoraConfig(lora_bias=True) would fold: "
                "leave lora_bias out, or the module"
            )
        for name, p in _base_of(layer).named_parameters():
            _check_weight(plain_name(prefix + name), p)
    _check_untied(model, layers)


def _check_weight(name: str, weight: torch.Tensor) -> None:
    if "lora_" in name:
        raise Unsupported(f"{name} is within a module that is saved whole: leave one of the two out of the adapter")
    if is_packed(weight) or not weight.is_floating_point() or weight.itemsize < 2:
        raise Unsupported(
            f"the adapter does not fold into {name}, which is quantized ({type(weight).__name__}, {weight.dtype}), "
            "without another rounding than it was trained with: load the model in 16 bits"
        )
    if is_dtensor(weight):
        raise Unsupported(f"the adapter does not fold into {name}, which is sharded over ranks: train a LoRA")


def _check_untied(model: Any, layers: list[tuple[str, Any]]) -> None:
    """Raise `Unsupported` where a weight of an adapted layer is one of another module too, and would be two."""
    adapted = [(prefix, layer, id(p)) for prefix, layer in layers for p in _base_of(layer).parameters()]
    elsewhere = {
        id(p)
        for _, module in _outside(plain_model(model))
        if not _is_adapted(module)
        for p in module._parameters.values()
    }
    first: dict[int, Any] = {}
    for prefix, layer, key in adapted:
        other = first.setdefault(key, layer)
        # PEFT trains the same rows of both
        if key in elsewhere or (other is not layer and not (_trains_rows(layer) and _trains_rows(other))):
            raise Unsupported(
                f"the adapter does not fold into {plain_name(prefix)[:-1]}, whose weight is another layer's too (tied "
                "embeddings, for one): leave it out of the adapter, or untie the two"
            )


# ---- layers ----------------------------------------------------------------------------------------------------------


@functools.cache
def _kinds() -> tuple[type, ...]:
    """PEFT's classes of layers with an adapter, and of those that are trained as a whole or in some rows."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(module, _kinds())


def _outside(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module, with the prefix of its weights' names, but for those within adapted layers."""
    yield prefix, module
    if not _is_adapted(module):
        for name, child in module._modules.items():
            if child is not None:
                yield from _outside(child, f"{prefix}{name}.")


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((prefix, module) for prefix, module in _outside(plain_model(model)) if _is_adapted(module))


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """One element in the place of all."""
    # not a meta tensor, which would lose the device
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _own_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's parameters and the floating-point buffers that checkpoints hold, without those of its children."""
    yield from ((name, p) for name, p in module._parameters.items() if p is not None)
    yield from own_saved_buffers(module)


def _base_of(layer: Any) -> nn.Module:
    """The module that PEFT has wrapped."""
    base: nn.Module = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
    return base


def _trains_rows(layer: Any) -> bool:
    return hasattr(layer, "token_adapter") or hasattr(layer, "trainable_tokens_delta")


def _fold(layer: Any) -> nn.Module:
    """The wrapped module as it would have to be to compute what the adapted layer does; the layer stays as it is."""
    saved = getattr(layer, "modules_to_save", None)
    if saved is not None:
        names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in saved]
        module: nn.Module = saved[names[0]] if names else _base_of(layer)
        return module
    stand_in = _stand_in(layer, {})
    parts: list[Any] = [part for part in stand_in.modules() if isinstance(part, _kinds()[0])]
    for part in reversed(parts):  # an inner one first: the outer one takes what it computes
        if part.disable_adapters and part.merged:
            part.unmerge()  # as its next pass will
        elif not part.disable_adapters and not part.merged:
            part.merge()
    return _base_of(stand_in)


def _stand_in(module: nn.Module, copies: dict[int, nn.Parameter], *, is_base: bool = False) -> nn.Module:
    """A copy of a module over the same tensors, but for the base's parameters: those are `copies`, by `id`.

    What the copy holds (modules, names of merged adapters, cached norms) can be changed without changing the module's.
    """
    # not a deep copy, which would copy the weights
    twin = copy.copy(module)
    held = vars(twin)
    for name, value in vars(module).items():
        # PEFT's `merge` notes what it has merged in lists and dictionaries of the layer
        if isinstance(value, (dict, list, set)):
            # each module has a dozen ordered ones for hooks, which `copy.copy` would take ten times as long for
            held[name] = value.copy() if isinstance(value, OrderedDict) else copy.copy(value)
    kind: Any = type(twin)
    twin.__class__ = _undeleted(kind)
    for name, child in module._modules.items():
        if child is not None:
            twin._modules[name] = _stand_in(child, copies, is_base=is_base or name == "base_layer")
    for name, p in module._parameters.items() if is_base else ():
        if p is not None:
            twin._parameters[name] = copies.setdefault(id(p), nn.Parameter(p.detach().clone(), requires_grad=False))
    return twin


@functools.cache
def _undeleted(kind: Any) -> Any:
    """A class whose end does nothing: OSF's takes its hooks off the parameters, which are the module's too."""
    return type(kind.__name__, (kind,), {"__del__": lambda self: None}) if hasattr(kind, "__del__") else kind
