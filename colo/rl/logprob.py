"""Log-probabilities of given tokens from hidden states and an LM head, without ever holding the full logits.

Shape suffixes: B batch, T time, N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from colo.errors import Unsupported
from colo.memory.storage import is_dtensor
from colo.rl.logit_tiles import Head, LogitStep, TokenLogprobs, check_steps, tile_sides
from colo.units import GIB

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    token_ids_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    vocab_size: int | None = None,
    steps: Sequence[LogitStep] = (),
    temperature: float = 1.0,
    token_chunk: int | None = None,
    vocab_chunk: int | None = None,
    workspace_bytes: int = 1 * GIB,
) -> Tensor:
    """Log-softmax of `steps(hidden @ weight.T + bias) / temperature`, at one given token a row.

    `hidden_ND` is (N, D) or (B, T, D), `weight_VD` (V, D), `bias_V` (V,), all of one dtype: bfloat16, float16, float32
    or float64. `token_ids_N` is (N,) or (B, T), integer. A negative id means "ignored": its log-probability is 0, it
    takes part in no gradient, and its row of `hidden` is never read, so it costs nothing. `vocab_size` restricts the
    softmax to the first rows of a padded head; slicing the weight does the same, but gives a gradient for the slice
    that autograd then copies into one for the whole. `steps` are what a model does to the logits of its head: scales,
    at most one tanh, and a cast to float32, as in `[("div", 30.0), ("tanh", 0.0), ("mul", 30.0)]` for a cap at 30.

    Returns float32 (float64 for float64 inputs) shaped like the ids. Differentiable once, in hidden, weight and bias;
    what needs no gradient (a frozen head under LoRA) costs none. Matrix products run in the inputs' dtype, or in
    autocast's, by a cast, where that is on; maxima, sums and accumulators are float32 (float64).

    Memory beyond the inputs, the results and the gradients that backward returns: `workspace_bytes` during forward and
    during backward, one copy (in the inputs' dtype) of the hidden states that count from forward to backward, if they
    need a gradient, and a few numbers a token. That is 1.5 GiB at the most for 65,536 tokens of 4096 in 16 bits; 1.12
    GiB was measured on an H200 with a vocabulary of 151,936. At 8192 tokens, where the full computation fits, it took
    1.47 times as long as that, and 1.01 times with a frozen head (`python -m benchmarks logprob`). Hidden states that
    cannot be viewed as (N, D) are copied once.

    `token_chunk` and `vocab_chunk` are the sides of a tile; `None` derives them from `workspace_bytes`, down to 128 by
    128. The only waits for the device are two at the start of forward: for the largest id and the ignored positions.

    Raises: `TypeError` for what is no tensor and dtypes that differ or are not supported, `ValueError` for shapes or
    devices that do not fit, an id outside the vocabulary, steps that are none, a temperature that is not positive, or a
    size below 1.
    """
    biases = {} if bias_V is None else {"bias": bias_V}
    check_tensors({"hidden": hidden_ND, "weight": weight_VD, "token ids": token_ids_N, **biases})
    # before what checks the dtypes in which it computes
    hidden_ND, weight_VD, bias_V = _as_autocast_would(hidden_ND, weight_VD, bias_V)
    vocab_size = weight_VD.shape[0] if vocab_size is None else vocab_size
    _check_tensors(hidden_ND, weight_VD, token_ids_N, bias_V)
    _check_numbers(token_ids_N, weight_VD.shape[0], vocab_size, temperature, steps)
    flat_ids_N = token_ids_N.reshape(-1)
    rows, columns = tile_sides(flat_ids_N.numel(), vocab_size, hidden_ND, workspace_bytes, steps)
    head = Head(
        vocab_size=vocab_size,
        inverse_temperature=1.0 / temperature,
        tile_rows=_given("token_chunk", token_chunk, rows),
        tile_columns=_given("vocab_chunk", vocab_chunk, columns),
        # the slope is the hidden gradient, and is computed in forward: without need it would be kept for nothing
        with_slope=torch.is_grad_enabled() and hidden_ND.requires_grad,
        steps=tuple(steps),
    )
    flat_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
    logprobs: Tensor = TokenLogprobs.apply(flat_ND, weight_VD, bias_V, flat_ids_N, head)  # type: ignore[no-untyped-call]
    return logprobs.view(token_ids_N.shape)


def model_logprobs(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    *,
    completion_mask_BT: Tensor | None = None,
    temperature: float = 1.0,
    workspace_bytes: int = 1 * GIB,
) -> Tensor:
    """Log-probabilities that a causal LM gives to `input_ids[:, 1:]`, without the full logits where that is possible.

    `model` is a transformers causal LM, or a PEFT wrapper of one, whose adapters are applied. `input_ids_BT` and
    `attention_mask_BT` are (B, T); positions are counted from the mask, so padding may be on either side. A token
    counts if it and the token before it are attended to and `completion_mask_BT` (B, T), where given, is nonzero at
    it; every other token gets 0, no gradient, and costs nothing in the head.

    Returns float32 (B, T - 1). Differentiable in the model's parameters. `temperature` and `workspace_bytes` are those
    of `token_logprobs`.

    The model's own forward runs, and its head computes the last position only. What the model does to that logit until
    it returns it is recorded as code, not measured: scales, a cap and a cut of the vocabulary are applied to the chunks
    too, in the model's order and dtype. A model that does anything else, or whose head is not a plain linear layer (an
    adapter on it, a quantized or sharded one), computes full logits, now and from now on, which a warning says once.

    Raises: `Unsupported` for a model without logits, or with fewer or more of them than tokens; `TypeError` for what is
    no tensor, or ids that are no integers; `ValueError` for shapes or devices that do not fit.
    """
    targets_BT = _targets(input_ids_BT, attention_mask_BT, completion_mask_BT)
    head = _plain_head(model)
    # remembered: a model that needs full logits would else be run twice in every step
    why = head if isinstance(head, str) else _IN_FULL.get(model)
    if isinstance(head, nn.Linear) and why is None:
        seen = SeenPass(head)
        # one pass tells and serves: the head's input is caught in it
        why = seen.why_not(_run(model, input_ids_BT, attention_mask_BT, seen), input_ids_BT.shape)
        if why is None:
            # up to the last position, which predicts nothing: ids are shifted
            return token_logprobs(
                seen.hidden_BTD,
                head.weight,
                targets_BT,
                bias_V=head.bias,
                vocab_size=seen.vocab_size,
                steps=seen.steps,
                temperature=temperature,
                workspace_bytes=workspace_bytes,
            )[:, :-1]
    logprobs_BT = _in_full(_run(model, input_ids_BT, attention_mask_BT), targets_BT, temperature)
    if model not in _IN_FULL:
        _IN_FULL[model] = str(why)
        vocab_size = getattr(getattr(model, "config", None), "vocab_size", "vocabulary")
        warnings.warn(
            f"log-probabilities of {type(model).__name__} are computed from full logits, tokens x {vocab_size} of "
            f"them at a time, and not in chunks: {why}",
            stacklevel=2,
        )
    return logprobs_BT


def check_tensors(given: Mapping[str, Any]) -> None:
    """Raise `TypeError` for what is no tensor, and `ValueError` for tensors that are not on one device."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {tensor!r:.100}")
    if len({tensor.device for tensor in given.values()}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(f"tensors are not on one device, but {places}: move them with .to(device)")


def _check_ids(name: str, token_ids: Tensor) -> None:
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, not {token_ids.dtype}")


def _as_autocast_would(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inputs in the dtype in which autocast runs a linear layer; unchanged where it is off."""
    device = hidden.device.type
    # autocast leaves float64 alone
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check_tensors(hidden: Tensor, weight_VD: Tensor, token_ids: Tensor, bias_V: Tensor | None) -> None:
    floating = [hidden.dtype, weight_VD.dtype] + ([] if bias_V is None else [bias_V.dtype])
    if hidden.dtype not in _DTYPES or len(set(floating)) > 1:
        names = ", ".join(str(dtype) for dtype in floating)
        raise TypeError(f"hidden, weight and bias must share one of {_DTYPES}, not {names}: cast them, or use autocast")
    _check_ids("token ids", token_ids)
    if hidden.dim() not in (2, 3) or hidden.shape[:-1] != token_ids.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} needs one token id a row, not ids {tuple(token_ids.shape)}")
    if weight_VD.dim() != 2 or weight_VD.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight must be (vocabulary, {hidden.shape[-1]}), but is {tuple(weight_VD.shape)}")
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(f"bias must be ({weight_VD.shape[0]},), but is {tuple(bias_V.shape)}")


def _check_numbers(
    token_ids: Tensor, num_rows: int, vocab_size: int, temperature: float, steps: Sequence[LogitStep] = ()
) -> None:
    if why := check_steps(steps):
        raise ValueError(f"steps {list(steps)} cannot be applied in tiles: {why}")
    if not 1 <= vocab_size <= num_rows:
        raise ValueError(f"vocab_size must be from 1 to the {num_rows} rows of the weight, but is {vocab_size}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, but is {temperature}")
    largest = int(token_ids.max()) if token_ids.numel() else 0
    if largest >= vocab_size:
        raise ValueError(f"token id {largest} is outside the vocabulary of {vocab_size}: use a negative id to ignore")


def _given(name: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, but is {value}")
    return default if value is None else value


def _targets(input_ids_BT: Tensor, attention_mask_BT: Tensor, completion_mask_BT: Tensor | None) -> Tensor:
    """The id that each position predicts, -1 where none counts: shifting ids saves a copy of the hidden states."""
    masks = {"attention_mask": attention_mask_BT}
    masks |= {} if completion_mask_BT is None else {"completion_mask": completion_mask_BT}
    check_tensors({"input_ids": input_ids_BT, **masks})
    _check_ids("input_ids", input_ids_BT)
    for name, mask_BT in masks.items():
        if mask_BT.shape != input_ids_BT.shape:
            raise ValueError(f"{name} must be {tuple(input_ids_BT.shape)}, but is {tuple(mask_BT.shape)}")
    if input_ids_BT.dim() != 2 or not input_ids_BT.numel():
        raise ValueError(f"input ids must be (batch, time) and not empty, but are {tuple(input_ids_BT.shape)}")
    counts_BT = attention_mask_BT.bool()
    wanted_BT = counts_BT if completion_mask_BT is None else counts_BT & completion_mask_BT.bool()
    targets_BT = torch.full_like(input_ids_BT, -1)
    # both have to count: the position that predicts and the token that is predicted
    targets_BT[:, :-1] = input_ids_BT[:, 1:].masked_fill(~(counts_BT[:, :-1] & wanted_BT[:, 1:]), -1)
    return targets_BT


_IN_FULL: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Models whose logits are computed in full, and why."""


def _plain_head(model: nn.Module) -> nn.Linear | str:
    """The LM head, or why its logits cannot be computed from its weight."""
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if (why := why_not_linear(head)) is not None:
        return why
    assert isinstance(head, nn.Linear)
    # a hook may change what the weight alone would give
    if head._forward_hooks or head._forward_pre_hooks:
        return f"the LM head is {type(head).__name__} with hooks on its forward"
    if is_dtensor(head.weight):
        return "the weight of the LM head is sharded over ranks"
    return head


def why_not_linear(head: Any) -> str | None:
    """Say why an LM head computes something else than its weight and bias alone give, or `None` if it does not."""
    named = f"the LM head is {type(head).__name__}"
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        return f"{named}, not a plain linear layer: leave it out of the adapter's and quantizer's target modules"
    # bitsandbytes and PEFT subclass or patch `forward`, and so do models
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return f"{named} with a forward of its own"
    return None


def _run(model: Any, input_ids_BT: Tensor, attention_mask_BT: Tensor, seen: SeenPass | None = None) -> Any:
    """The model's logits; if its head is `seen`, those of the last position alone."""
    given: dict[str, Tensor] = {}
    parameters = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    # Some families begin to count elsewhere than at 0, and know padding on the right by the mask or the token.
    if "position_ids" in parameters and not bool(attention_mask_BT[:, 0].all()):
        given["position_ids"] = (attention_mask_BT.long().cumsum(1) - 1).clamp_(min=0)
    with nullcontext() if seen is None else seen.watching():
        output = model(input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False, **given)
    return getattr(output, "logits", None)


def _in_full(logits_BTV: Any, targets_BT: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (B, T - 1) from full logits, with a softmax over the tokens that count alone."""
    if not isinstance(logits_BTV, Tensor) or logits_BTV.shape[:-1] != targets_BT.shape:
        found = tuple(logits_BTV.shape) if isinstance(logits_BTV, Tensor) else "none"
        raise Unsupported(f"the model gives no logits for each of {tuple(targets_BT.shape)} input tokens, but {found}")
    _check_numbers(targets_BT, logits_BTV.shape[-1], logits_BTV.shape[-1], temperature)
    counts_BT = targets_BT >= 0
    wide_KV = logits_BTV[counts_BT]
    wide_KV = (wide_KV if wide_KV.dtype == torch.float64 else wide_KV.float()) / temperature
    logprobs_K = torch.log_softmax(wide_KV, -1).gather(-1, targets_BT[counts_BT][:, None]).squeeze(-1)
    return logprobs_K.new_zeros(targets_BT.shape).masked_scatter(counts_BT, logprobs_K)[:, :-1]


# ---- the steps from the head's logits to the model's, recorded while it takes them ---------------------------------


class SeenPass:
    """The head's input at all positions in one pass of a model, and the steps from its output to the model's logits."""

    hidden_BTD: Tensor
    steps: tuple[LogitStep, ...]
    vocab_size: int
    """The first rows of the head, which the model's logits are of. All three are there once `why_not` found nothing."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._num_calls = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Put hooks on the head for the passes within, in which it computes the last position only."""
        handles = [
            self._head.register_forward_pre_hook(self._before_head),
            self._head.register_forward_hook(self._after_head, prepend=True),  # others' hooks are steps
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def why_not(self, logits: Any, shape: torch.Size) -> str | None:
        """Say why log-probabilities cannot be computed from hidden states and head, or `None` where they can be."""
        if not self._num_calls:
            return "its forward does not call the head; one that is compiled as a whole runs no hooks: compile layers"
        if self._num_calls != 1 or self.hidden_BTD.shape[:2] != shape:
            return "its forward does not call the head once, with one hidden state for each input token"
        path = getattr(logits, "path", None)
        if path is None:
            return "what it returns as logits is not what its head gives"
        steps = list(path.steps)
        while steps and steps[-1][0] == "float":
            steps.pop()  # statistics are in float32 anyway
        if why := path.unknown or check_steps(steps):
            return f"between its head and its logits is more than scales, a cap and a cast: {why}"
        self.steps, self.vocab_size = tuple(steps), path.vocab_size or self._head.weight.shape[0]
        return None

    def _before_head(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._num_calls += 1
        self.hidden_BTD = args[0]
        # the last position alone: logits of all are what is to be avoided
        return (args[0][:, -1:],) if args[0].dim() == 3 else args

    def _after_head(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        # a subclass of the output: every function that the model calls on it passes through here
        recorded = output.as_subclass(_Recorded)
        recorded.path = _Path()
        return recorded


@dataclass(slots=True)
class _Path:
    """Steps from the head's logits to this tensor."""

    steps: tuple[LogitStep, ...] = ()
    vocab_size: int | None = None
    unknown: str | None = None


class _Recorded(Tensor):
    """Logits that note each function that they are given to: what the code does, not what a comparison shows."""

    path: _Path | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and note it on its result; what is not known is noted on the arguments too, which it may write."""
        kwargs = kwargs or {}
        # also in keywords: `torch.where(..., other=logits)`
        before = [path for a in (*args, *kwargs.values()) if (path := getattr(a, "path", None)) is not None]
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if not before and not isinstance(result, _Recorded):
            return result
        name = getattr(func, "__name__", str(func))
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if isinstance(result, Tensor) or writes:
            # else each of the lines below would be recorded, too
            with torch._C.DisableTorchFunctionSubclass():
                # one recorded argument, and the first: `1 / logits` and `logits + logits` are not known
                known = len(before) == 1 and before[0] is _path_of(args) and not writes
                after = _step(name, args, kwargs, result) if known else None
            if after is None:
                # on the arguments: an unknown function may have written to them in place
                for path in before:
                    path.unknown = path.unknown or name
                after = _Path(unknown=next((p.unknown for p in before if p.unknown), name))
            if isinstance(result, _Recorded):
                result.path = after
        return result


def _path_of(args: tuple[Any, ...]) -> _Path | None:
    return getattr(args[0], "path", None) if args else None


def _step(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> _Path | None:
    """The path after a function whose first argument is recorded; `None` for one that is not known."""
    path = _path_of(args)
    assert path is not None
    if kwargs.get("out") is not None or not isinstance(result, Tensor):
        return None
    added: LogitStep | None = None
    vocab_size = path.vocab_size
    if name in ("mul", "multiply", "__mul__", "__rmul__") or name in ("div", "true_divide", "__truediv__"):
        factor = _number(args[1:], kwargs)
        # a product in another dtype rounds otherwise than the step would
        if factor is None or result.dtype != args[0].dtype:
            return None
        added = ("mul" if "mul" in name else "div", factor)
    elif name == "tanh":
        added = ("tanh", 0.0)
    elif name in ("float", "to", "type", "type_as") and result.shape == args[0].shape:
        if result.dtype != args[0].dtype:
            # a cast to 16 bits is no step that tiles can repeat
            if result.dtype != torch.float32:
                return None
            added = ("float", 0.0)
    elif name == "__getitem__":
        if result.shape[:-1] != args[0].shape[:-1] or not _keeps_the_first(args[1]):
            return None
        vocab_size = result.shape[-1]
    elif name not in ("contiguous", "clone"):
        return None
    return _Path(path.steps if added is None else (*path.steps, added), vocab_size, path.unknown)


def _number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The one number that a function is given; `None` for tensors that are more, or are trained."""
    if len(args) != 1 or kwargs:
        return None
    (value,) = args
    if isinstance(value, Tensor):
        # reads a tensor's value: a scale that is trained would be frozen by it
        return float(value) if value.dim() == 0 and not value.requires_grad else None
    return float(value) if isinstance(value, (int, float)) else None


def _keeps_the_first(index: Any) -> bool:
    """Say if an index takes the first entries of the last dimension, and all of the others."""
    *others, last = index if isinstance(index, tuple) else (index,)
    plain = all(other is Ellipsis or other == slice(None) for other in others)
    return plain and bool(others) and isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)
