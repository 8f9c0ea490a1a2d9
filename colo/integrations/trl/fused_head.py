"""TRL's fused LM head: log-probabilities from hidden states and the head's weight, as TRL 1.16 computes them.

TRL reads a scale and a cap from the config, by the names that it knows. Models that do more, or call it otherwise, get
other log-probabilities from it than their own logits have, without a word.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from colo.errors import Unsupported
from colo.memory.dtensor import is_dtensor
from colo.rl.last_steps import SeenPass
from colo.rl.logit_tiles import LogitStep
from colo.rl.reference import evaluating


def check_fused_head(model: Any) -> None:
    """Raise `Unsupported` where TRL's fused head computes something else than the model does; one pass of two tokens.

    Decided by the code that runs between the backbone and the logits, not by their values. Not for sharded models.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = getattr(base.forward, "__func__", None)
    known = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    head = base.get_output_embeddings()
    if "logit_scale" not in known or not isinstance(head, torch.nn.Linear) or any(map(is_dtensor, base.parameters())):
        return
    why = _why_not(base, head, known["logit_scale"], known.get("final_logit_softcapping"))
    if why is not None:
        raise Unsupported(
            f"TRL would train {type(base).__name__} on other log-probabilities than its own: its fused LM head knows "
            f"hidden states, a scale and a cap, and {why}. Use colo.rl.logprob.model_logprobs in a loop of your own"
        )


@torch.no_grad()
def _why_not(base: Any, head: torch.nn.Linear, scale: float, cap: float | None) -> str | None:
    # TRL calls the backbone, and some models their backbone's decoder; of both, the last to end is the outer one
    outputs: list[Any] = []
    seen = SeenPass(head)
    ids = torch.arange(2, device=head.weight.device)[None]
    watched = dict.fromkeys((base.base_model, base.get_decoder()))
    handles = [module.register_forward_hook(lambda _m, _a, output: outputs.append(output)) for module in watched]
    try:
        with evaluating(base), seen.watching():
            logits = base(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if (why := seen.why_not(logits, ids.shape)) is not None:
        return why
    last = getattr(outputs[-1], "last_hidden_state", None) if outputs else None
    factor = None if last is None or last.shape != seen.hidden_BTD.shape else _factor(last, seen.hidden_BTD)
    if factor is None or (factor != 1 and head.bias is not None):
        return "this model computes something between its last hidden state and the head"
    if seen.vocab_size != head.weight.shape[0]:
        return f"this model's logits are the first {seen.vocab_size} of {head.weight.shape[0]}"
    before, after, is_capped = _scales(seen.steps)
    before *= factor
    expected = (scale / cap, cap) if cap else (scale, 1.0)
    tolerance = 1e-9 if factor == 1 else 0.01  # a factor that is measured is rounded
    if is_capped != bool(cap) or not all(
        math.isclose(found, wanted, rel_tol=tolerance) for found, wanted in zip((before, after), expected, strict=True)
    ):
        found = f"{after:g} * tanh({before:g} * logits)" if is_capped else f"{before:g} * logits"
        theirs = f"{cap:g} * tanh({scale / cap:g} * logits)" if cap else f"{scale:g} * logits"
        return f"this model's logits are {found}, where TRL reads {theirs} from its config"
    return None


def _factor(last: torch.Tensor, hidden: torch.Tensor) -> float | None:
    """Factor from the last hidden state to the head's input (MiniCPM3 has one); `None` where that is more."""
    if last.data_ptr() == hidden.data_ptr():
        return 1.0
    ratio = (hidden.double() / last.double())[last != 0]
    factor = float(ratio.median()) if len(ratio) else 1.0
    is_constant = bool(((ratio - factor).abs() <= 2 * torch.finfo(hidden.dtype).eps * abs(factor)).all())
    return factor if is_constant else None


def _scales(steps: tuple[LogitStep, ...]) -> tuple[float, float, bool]:
    """Products of the scales before and after a tanh, and if there is one."""
    products, is_capped = [1.0, 1.0], False
    for name, value in steps:
        is_capped |= name == "tanh"
        if name in ("mul", "div"):
            products[is_capped] *= value if name == "mul" else 1 / value
    return products[0], products[1], is_capped
