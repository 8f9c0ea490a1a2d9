"""Value heads in a causal language model or around it, which train along and are not the engine's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from colo.errors import Unsupported


def is_peft_model(model: nn.Module) -> bool:
    """True if PEFT has wrapped this model, or transformers' `add_adapter` has added one. Does not import PEFT."""
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def is_transformers_model(model: object) -> bool:
    """True for a model of transformers, which is not imported to tell."""
    loaded = sys.modules.get("transformers.modeling_utils")  # where a model exists, this does
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def causal_lm(model: nn.Module) -> nn.Module:
    """The causal language model, with PEFT's wrapper, within a module that adds a head to it; else `model` itself.

    Raises: `Unsupported` when there are several: the caller has to say from which one the engine samples.
    """
    if _generates(model) or type(model).__module__.startswith("torch."):
        return model
    found = list(_outermost(model))
    if len(found) > 1:
        raise Unsupported(
            f"{type(model).__name__} has {len(found)} language models in it ({', '.join(name for name, _ in found)}): "
            "pass the one that the engine samples from; the optimizer may train the others along"
        )
    return found[0][1] if found else model


def added_heads(model: nn.Module) -> frozenset[str]:
    """Names of modules that were added to a causal language model, such as `v_head`, and that no logits depend on.

    They are children that transformers does not give a model of its config. A model with a `forward` of its own has
    none.
    """
    plain = plain_model(model)
    if not is_transformers_model(plain):
        return frozenset()
    usual = (plain.get_output_embeddings(), getattr(plain, plain.base_model_prefix, None))
    others = {name: child for name, child in plain.named_children() if all(child is not module for module in usual)}
    added = {name for name, child in others.items() if next(child.parameters(), None) is not None}
    if not added:
        return frozenset()
    from transformers import AutoModelForCausalLM

    try:
        # transformers' own model of this config, to see which children it has; without memory
        with torch.device("meta"):
            fresh = AutoModelForCausalLM.from_config(copy.deepcopy(plain.config))
    except ValueError:  # not a config of a causal language model
        return frozenset()
    # a forward of the user's may compute with them
    if _forward(plain) is not type(fresh).forward:
        return frozenset()
    return frozenset(added - {name for name, _ in fresh.named_children()})


def refuse_heads(model: nn.Module) -> None:
    """Raise `Unsupported` for a model with heads of its own: `launch` makes another model of its config."""
    if heads := sorted(added_heads(model)):
        raise Unsupported(
            f"launch builds a model of its own, without {', '.join(heads)}: share this one (colo.share), or let the "
            "head lie beside the model (optimizer=lambda ps: AdamW([*ps, *head.parameters()]))"
        )


def _generates(model: Any) -> bool:
    return is_peft_model(model) or (is_transformers_model(model) and bool(model.can_generate()))


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if _generates(child):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def plain_model(model: Any) -> Any:
    """The model without `torch.compile` and PEFT around it."""
    model = getattr(model, "_orig_mod", model)
    if is_peft_model(model) and not is_transformers_model(model):
        # not by `get_base_model`, which asks for an active adapter, and which a `PeftMixedModel` does not have
        base = model.base_model
        model = base if is_transformers_model(base) else base.model
    return getattr(model, "_orig_mod", model)


def _forward(model: nn.Module) -> Any:
    """The function that computes, accelerate's mixed precision around it left out."""
    forward = vars(model).get("_original_forward") or model.forward
    return getattr(forward, "__func__", forward)
