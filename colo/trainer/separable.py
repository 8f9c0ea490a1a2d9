"""Optimizers that update each parameter by itself, so that a step may be cut into several, each for some of them."""

from __future__ import annotations

from typing import Any

import torch

from colo.trainer.megatron import MegatronOptimizers, OptimizerParts

_KNOWN: dict[str, frozenset[str]] = {
    "torch.optim": frozenset(
        {"Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD"}
        | {"Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
    ),
    "transformers.optimization": frozenset({"Adafactor"}),
    # Of these two packages the class that defines `step`, which all of its optimizers share.
    "bitsandbytes.optim": frozenset({"Optimizer8bit"}),
    "torchao.optim": frozenset({"_AdamBase"}),
}
"""By package, the classes that define such a `step`. `tests/zoo/test_streamed.py` trains with each."""

_ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Classes of torch whose update of an element reads that element's gradient and state alone."""

_REGISTERED: set[type] = set()


def register_separable(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Declare that the `step` of an optimizer's class updates each parameter from that one's gradient and state alone.

    It may read its groups' hyperparameters, but must count nothing there: a streamed step calls it once for every
    bucket of parameters, with the gradients of others absent. May be used as a decorator.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"register_separable takes a class of optimizers, such as AdamW, not {kind!r}")
    _REGISTERED.add(kind)
    return kind


def why_not_separable(optimizer: Any) -> str | None:
    """Say why an optimizer has to have all of its state at once; `None` when it can be stepped in parts."""
    name = type(optimizer).__name__
    if isinstance(optimizer, MegatronOptimizers):
        return "Megatron's optimizers step all of their buffers at once"
    if isinstance(optimizer, OptimizerParts):
        return "several optimizers are stepped by the loop, each at once"
    inner = getattr(optimizer, "inner", None)
    if isinstance(inner, torch.optim.Optimizer) and hasattr(
        optimizer, "master_of"
    ):  # `MasterWeights`, which imports this
        if optimizer.bucket_bytes is None:
            return "MasterWeights(bucket_bytes=None) asks for one step of all parameters"
        return why_not_separable(inner)
    step = own_step(type(optimizer))
    if any(step is own_step(kind) for kind in _REGISTERED):
        return None
    for package, names in _KNOWN.items():
        if step.__module__.startswith(package) and step.__qualname__ in {f"{known}.step" for known in names}:
            return None
    return (
        f"{name} is not known to update each parameter by itself; if it does, declare it: "
        f"colo.optim.register_separable({name})"
    )


def is_elementwise(optimizer: Any) -> bool:
    """Tell whether an optimizer updates each element by itself, so that a step may be cut anywhere."""
    step = own_step(type(optimizer))
    return step.__module__.startswith("torch.optim") and step.__qualname__ in {f"{name}.step" for name in _ELEMENTWISE}


def own_step(kind: type) -> Any:
    """The `step` of an optimizer's class, or of the base that it has it from, without torch's hooks around it."""
    step: Any = kind.step  # type: ignore[attr-defined]
    while getattr(step, "hooked", False):  # once for each class that there was an instance of
        step = step.__wrapped__
    return step
