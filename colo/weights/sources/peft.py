"""A PEFT model's LoRA adapter as tensors for an engine, and what is refused before training starts."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from dataclasses import fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from colo.engine import AdapterWeights, check_number
from colo.errors import StaleWeights, Unsupported
from colo.memory.storage import is_dtensor
from colo.weights.sources.base import Gathered, plain_name

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

_EXACT = frozenset(
    {
        # how it is kept
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
        # where it sits
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "fan_in_fan_out",
        "megatron_core",
        "ensure_weight_tying",
        # how it scales
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "bias",
        "lora_dropout",
        # how it begins
        "init_lora_weights",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
    }
)
"""Settings of `LoraConfig` that change how an adapter begins, where it sits or how it scales. All of it reaches the
engine. Whatever else is set, now or in a later PEFT, computes something an engine's `W x + s B (A x)` does not."""

_FOLDS = frozenset({"use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "target_parameters"})
"""Settings of which the effect is in weights once the adapter is folded into them."""

_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""Tasks for which PEFT adds modules to train, of models that sample nothing."""

_REASONS = {
    "use_dora": "DoRA changes the weight's magnitude too",
    "modules_to_save": "whole modules would have to be trained and sent beside the adapter",
    "lora_bias": "a bias beside B has no place in the engine",
    "trainable_token_indices": "the engine shares the embedding as it is",
    "layer_replication": "the engine has the model's own layers",
    "target_parameters": "the engine adapts modules, not single parameters such as a mixture's packed experts, which "
    "target_modules='all-linear' includes: name modules, as in target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']",
    "alora_invocation_tokens": "the engine applies an adapter to every token",
}


TIED_WARNING = "Model has `tie_word_embeddings=True`"
"""Start of PEFT's warning of an adapter on tied weights, which says nothing of logits."""


def check_lora_config(config: LoraConfig, *, folded: bool = False, advice: str = "") -> None:
    """Raise `Unsupported`, naming the setting and the reason, for what an engine could not apply exactly.

    `folded`: the engine gets whole weights with the adapter in them. `advice` is told where that would do.
    Raises: `ValueError` for values with which nothing would be trained, or without the dropout that they ask for.
    """
    _check_values(config)
    reason = _why_not_exact(config, folded=folded)
    if reason is not None and advice:
        check_lora_config(config, folded=True)  # where that is refused too, for its own reason
        raise Unsupported(f"{reason}; {advice}")
    if reason is not None:
        raise Unsupported(reason)


def _check_values(config: LoraConfig) -> None:
    for name in ("lora_alpha", "lora_dropout"):
        check_number(name, getattr(config, name), Real, "a number")
    if not 0 < abs(config.lora_alpha) < 2**127:
        raise ValueError(f"lora_alpha scales the adapter: it must be a number of fp32 but 0, not {config.lora_alpha}")
    if not 0 <= config.lora_dropout < 1:
        raise ValueError(f"lora_dropout must be in [0, 1), not {config.lora_dropout}: PEFT would drop nothing, or all")


def _why_not_exact(config: LoraConfig, *, folded: bool) -> str | None:
    for task in _WITH_HEADS:
        if config.task_type == task:
            return (
                f"LoraConfig(task_type={task!r}) is not supported: PEFT would train that task's head beside the adapter"
            )
    for setting in fields(config):
        value = getattr(config, setting.name)
        # a list of what is allowed: a setting of a later PEFT is refused until it is known
        if setting.name not in _EXACT and value and not (folded and setting.name in _FOLDS):
            reason = _REASONS.get(setting.name, "an engine computes W x + scaling * B (A x) and nothing else")
            return f"LoraConfig({setting.name}={value!r}) is not supported: {reason}"
    if getattr(config, "bias", "none") != "none" and not folded:
        return f"LoraConfig(bias={config.bias!r}) is not supported: it would change the shared base weights"
    return None


def has_adapted_head(model: nn.Module) -> bool:
    """True if an adapter is on the output layer."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None and "lora_A" in head._modules


def warn_of_tied_head(model: Any) -> None:
    """Warn of an adapter on an output layer whose weight is the embedding's."""
    if has_adapted_head(model) and model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        warnings.warn(
            "the adapter is on the output layer, whose weight is the embedding too: merging the adapter changes the "
            "embedding with it, and the model computes other logits than it was trained for. Leave the output layer "
            "out of target_modules, or keep the adapter apart from its base",
            stacklevel=3,
        )


def is_disabled(model: nn.Module) -> bool:
    """True if adapters are switched off in every layer, as within PEFT's `disable_adapter()`."""
    layers = _lora_layers(model)
    return bool(layers) and all(layer.disable_adapters for _, layer in layers)


def adds_nothing(model: nn.Module) -> bool:
    """True if a PEFT model computes what it does without its adapter: in each pair of LoRA's, A or B is zero.

    Not so where the adapter's initialization rewrites the base and adds the rest back (PiSSA, OLoRA, CorDA, LoftQ,
    LoRA-GA), where it is random, or was trained before. Any other tensor that trains counts as adding something.
    """
    if any(p.requires_grad and "lora_A" not in n and "lora_B" not in n for n, p in model.named_parameters()):
        return False
    return not any(
        bool(a.weight.any()) and bool(layer._modules["lora_B"]._modules[name].weight.any())
        for _, layer in _lora_layers(model)
        for name, a in layer._modules["lora_A"]._modules.items()
        if name in layer.active_adapters
    )


def check_adapter_config(config: Any, subject: str) -> None:
    """Raise `Unsupported`, by PEFT's name of it, for an adapter that is not a LoRA."""
    kind = kind_of(config)
    if kind != "LORA":
        raise Unsupported(f"{subject} is {kind} ({type(config).__name__}), and {ONLY_LORA}")


ONLY_LORA = (
    "engines apply LoRA only, W x + scaling * B (A x): train a peft.LoraConfig, or the whole model without an adapter"
)


def kind_of(config: Any) -> str:
    """PEFT's name of a kind of adapters, such as `LORA`."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def active_adapters(model: Any) -> list[str]:
    """Names of the active adapters. Raises: `StaleWeights` for one that is gone."""
    active: Any = getattr(model, "active_adapters", None)
    if callable(active):  # transformers' own, a method
        active = active()
    names = list(active or [model.active_adapter])
    if gone := [name for name in names if name not in model.peft_config]:
        raise StaleWeights(
            f"adapter {gone[0]} is active, and the model has it no longer, as after delete_adapter(): activate another "
            "one with set_adapter"
        )
    return names


def active_adapter(model: PeftModel) -> str:
    """The one active adapter. Raises: `Unsupported` when there are several, or another kind than LoRA."""
    names = active_adapters(model)
    if len(names) != 1:
        raise Unsupported(f"{len(names)} adapters are active ({', '.join(names)}): activate one with set_adapter")
    check_adapter_config(model.peft_config[names[0]], f"adapter {names[0]}")
    return str(names[0])


def adapter_settings(model: PeftModel) -> Hashable:
    """A value that changes with the active adapter, with a scaling, and as a layer's adapter is switched on or off."""
    adapter = active_adapter(model)
    layers = [layer for _, layer in _adapted_layers(model, adapter)]
    off = _are_off(layers, adapter)
    # all of them off is `disable_adapter()`, which passes, and must not count as a change
    partly = any(off) and not all(off)
    return adapter, tuple(layer.scaling[adapter] for layer in layers), tuple(off) if partly else ()


def adapter_weights(model: PeftModel) -> AdapterWeights:
    """The active adapter's live tensors by engine module name, with PEFT's own scaling of each module.

    Layers whose adapter is switched off, but not by `disable_adapter()`, are left out. Raises: `StaleWeights` when the
    adapter is merged into the base, which the engine shares, or is gone; `Unsupported` for layers that are not plain
    LoRA on a linear module. Sharded tensors are `DTensor`s; see `whole_adapter`.
    """
    adapter = active_adapter(model)
    check_lora_config(model.peft_config[adapter])
    a: dict[str, torch.Tensor] = {}
    b: dict[str, torch.Tensor] = {}
    scalings: dict[str, float] = {}
    layers = _adapted_layers(model, adapter)
    # switched off for all, as by `disable_adapter()`, it is the user's passing state and still published
    off = [False] * len(layers) if is_disabled(model) else _are_off([layer for _, layer in layers], adapter)
    for (name, module), is_off in zip(layers, off, strict=True):
        if is_off:
            continue
        plain = plain_name(name)
        # a merged adapter is in the shared weights already, and would be applied twice
        if module.merged:
            raise StaleWeights(
                f"adapter {adapter} is merged into {plain}.weight, which the engine shares: call unmerge_adapter()"
            )
        if adapter not in module._modules["lora_A"]:
            raise Unsupported(f"{plain} is adapted as an embedding; only linear modules are supported")
        a[plain] = module._modules["lora_A"]._modules[adapter].weight
        b[plain] = module._modules["lora_B"]._modules[adapter].weight
        scalings[plain] = float(module.scaling[adapter])
    if not a:
        raise StaleWeights(
            f"no layer of the model has adapter {adapter} any more, as after merge_and_unload(): close its runtime "
            "and build a new one with the model that merge_and_unload() returned"
        )
    return AdapterWeights(a=a, b=b, scalings=scalings, shared=True)


def whole_adapter(adapter: AdapterWeights) -> AdapterWeights:
    """An adapter for an engine, gathered where it is sharded over ranks, which is a collective then.

    Raises: `TransferError` on every rank when gathering has failed on another.
    """
    tensors = dict(adapter.named_tensors())
    # one tensor of each type is asked
    if not any(map(is_dtensor, {type(tensor): tensor for tensor in tensors.values()}.values())):
        return adapter
    with Gathered(tensors) as gathered:
        whole = {name: gathered[name].detach() for name in tensors}
    names = [(module, f"{module}.lora_A", f"{module}.lora_B") for module in adapter.a]
    return AdapterWeights(
        a={module: whole[a] for module, a, _ in names},
        b={module: whole[b] for module, _, b in names},
        scalings=adapter.scalings,
    )


def _lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    # Looked up where modules keep their children: asking thousands for an attribute that few have takes milliseconds.
    return [(name, module) for name, module in model.named_modules() if "lora_A" in module._modules]


def _adapted_layers(model: nn.Module, adapter: str) -> list[tuple[str, Any]]:
    return [
        (name, layer)
        for name, layer in _lora_layers(model)
        if adapter in layer._modules["lora_A"]._modules or adapter in layer.lora_embedding_A
    ]


def _are_off(layers: Iterable[Any], adapter: str) -> list[bool]:
    """For each layer, true if it computes without `adapter`. Raises: `Unsupported` if one computes with another."""
    off = []
    for layer in layers:
        active, is_disabled = layer.active_adapters, layer.disable_adapters
        for name in () if is_disabled or active == [adapter] else active:
            if name == adapter:
                continue
            if name in layer._modules["lora_A"]._modules or name in layer.lora_embedding_A:
                raise Unsupported(
                    f"a layer of the model computes with adapter {name}, where {adapter} is the model's: activate one "
                    "for all layers with set_adapter"
                )
        off.append(is_disabled or adapter not in active)
    return off
