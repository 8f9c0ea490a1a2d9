"""The reference of a trainer's KL term where an adapter adds something from the start.

TRL compares with the model without its adapter, or with an adapter "ref" where there is one. An initialization that
rewrites the base and adds the rest back (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) makes the first another policy than
training began with, and TRL makes the second by running that initialization again, which rewrites the base again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from colo.errors import Unsupported
from colo.weights.sources.peft import active_adapter, adds_nothing, is_disabled

REF = "ref"
"""The adapter that TRL switches to for its reference."""

_REWRITE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@contextmanager
def initialized_once(model: Any, beta: float) -> Iterator[None]:
    """Keep a trainer that is made within from initializing the base of a PEFT model again for its reference."""
    config: Any = getattr(model, "peft_config", {}).get("default") if beta else None
    if not hasattr(config, "init_lora_weights"):
        yield
        return
    before, config.init_lora_weights = config.init_lora_weights, True
    try:
        yield
    finally:
        config.init_lora_weights = before
        if REF in model.peft_config and adds_nothing(model):
            model.delete_adapter(REF)  # the model without its adapter is the same, takes nothing, and is not saved
        elif REF in model.peft_config:
            model.peft_config[REF] = copy.copy(config)
            model.peft_config[REF].init_lora_weights = True


def keep_initial_adapter(trainer: Any) -> Callable[[], None]:
    """Give the trainer a frozen copy of its adapter as "ref", if it needs one and has none; return what takes it back.

    Raises: `Unsupported` where TRL has initialized the base twice.
    """
    model = trainer.model
    if not getattr(trainer, "beta", 0.0) or not hasattr(model, "add_adapter") or not hasattr(model, "get_base_model"):
        return lambda: None
    if REF in model.peft_config:
        init = getattr(model.peft_config[REF], "init_lora_weights", True)
        if str(init).lower().startswith(_REWRITE):
            raise Unsupported(
                f"TRL made the reference of beta={trainer.beta} by init_lora_weights={init!r} once more, which changed "
                "the base weights again: the model is not the one you gave. Set model.peft_config['default']."
                "init_lora_weights = True before the trainer is made, or give the model to ColoGRPOTrainer"
            )
        return lambda: None
    if adds_nothing(model):
        return lambda: None
    name = active_adapter(model)
    config = copy.copy(model.peft_config[name])
    config.init_lora_weights = True
    model.add_adapter(REF, config)
    for key, parameter in list(model.named_parameters()):
        if f".{name}." in key:
            model.get_parameter(key.replace(f".{name}.", f".{REF}.")).data = parameter.detach().clone()
    return lambda: model.delete_adapter(REF)


@contextmanager
def as_policy(model: Any) -> Iterator[None]:
    """Switch a PEFT model to the adapter that trains, within a pass of TRL's reference too.

    That pass may be the first after a rollout, whose log-probabilities are compared with the policy's then.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        yield
    elif is_disabled(model):
        model.base_model.enable_adapter_layers()
        try:
            yield
        finally:
            model.base_model.disable_adapter_layers()
    elif model.active_adapter == REF:
        model.set_adapter(next(name for name in model.peft_config if name != REF))
        try:
            yield
        finally:
            model.set_adapter(REF)
    else:
        yield
