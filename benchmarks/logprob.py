"""Time and memory of `colo.rl.logprob.token_logprobs`, forward and backward, compared with the full computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import Record, Row, median_s, synchronize
from colo.rl.logprob import token_logprobs

Inputs = tuple[Tensor, Tensor, Tensor]
"""Hidden states (tokens, hidden), LM head (vocab, hidden) and token ids (tokens,)."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function from `Inputs` to log-probabilities (tokens,)."""


def run(record: Record, *, device: str, **sizes: int) -> None:
    """Measure chunked and full log-probabilities; on a CPU of a few tokens. `sizes` are those of `measure`."""
    record.tell("chunked and full log-probabilities")
    small = {"tokens": 512, "vocab": 4096, "hidden": 128, "full_tokens": 128} if device == "cpu" else {}
    for row in measure(device=device, **(small | sizes)):
        record.add(row)


def measure(
    *,
    device: str,
    tokens: int = 65_536,
    vocab: int = 151_936,
    hidden: int = 4096,
    full_tokens: int = 8192,
    repeats: int = 5,
) -> Iterator[Row]:
    """Measure in bfloat16 on random data, with a trained head and with a frozen one.

    Three rows for each: chunked at `tokens`, chunked at `full_tokens`, and full at `full_tokens`. Keys of a row:

        case               "chunked" or "full"
        weight_gradient    whether the head is trained
        device, dtype, tokens, vocab, hidden
        fits               False when the device ran out of memory; everything below is then None
        seconds            median of `repeats` forward and backward passes, after one that is not counted
        extra_bytes        peak above the inputs
        extra_beyond_gradients_bytes   peak above the inputs and the gradients that backward returns
        ratio_to_full      seconds over those of the full computation at the same size, where that was measured

    The byte counts are torch's own (`torch.cuda.max_memory_allocated`) and None on other devices. Full means
    `log_softmax(hidden @ weight.T)` with float32 softmax, gathered at the tokens.

    Raises: `ValueError` for a size below 1.
    """
    sizes = {"tokens": tokens, "vocab": vocab, "hidden": hidden, "full_tokens": full_tokens, "repeats": repeats}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}")
    for weight_gradient in (True, False):
        one = partial(
            _measure, device=device, vocab=vocab, hidden=hidden, weight_gradient=weight_gradient, repeats=repeats
        )
        yield one("chunked", token_logprobs, tokens=tokens)
        small = one("chunked", token_logprobs, tokens=full_tokens)
        full = one("full", _full_logprobs, tokens=full_tokens)
        if small["fits"] and full["fits"]:
            small["ratio_to_full"] = small["seconds"] / full["seconds"]
        yield small
        yield full


def _full_logprobs(hidden_states: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    logprobs = (hidden_states @ weight.T).log_softmax(-1, dtype=torch.float32)
    return logprobs.gather(1, token_ids[:, None]).squeeze(1)


def _measure(
    case: str,
    compute: Compute,
    *,
    device: str,
    tokens: int,
    vocab: int,
    hidden: int,
    weight_gradient: bool,
    repeats: int,
) -> Row:
    """One row, with `ratio_to_full` left open."""
    row: Row = {"case": case, "weight_gradient": weight_gradient, "device": device}
    row |= {"dtype": "bfloat16", "tokens": tokens, "vocab": vocab, "hidden": hidden, "fits": True}
    row |= dict.fromkeys(("seconds", "extra_bytes", "extra_beyond_gradients_bytes", "ratio_to_full"))
    target = torch.device(device)
    if target.type == "cuda":
        row["device"] = torch.cuda.get_device_name(target)
    inputs = _inputs(target, tokens, vocab, hidden, weight_gradient)
    try:
        extra_bytes = _peak_bytes(compute, inputs, target)
        row["seconds"] = median_s(partial(_step, compute, inputs), target, repeats=repeats, warmup=0)
    except torch.OutOfMemoryError:
        return row | {"fits": False}
    if extra_bytes is not None:
        gradient_bytes = sum(t.nbytes for t in inputs if t.requires_grad)
        row |= {"extra_bytes": extra_bytes, "extra_beyond_gradients_bytes": extra_bytes - gradient_bytes}
    return row


def _inputs(device: torch.device, tokens: int, vocab: int, hidden: int, weight_gradient: bool) -> Inputs:
    """Hidden states of unit variance and a head that gives logits of about the spread of a trained model's."""
    generator = torch.Generator(device).manual_seed(0)
    hidden_states = torch.randn((tokens, hidden), generator=generator, device=device, dtype=torch.bfloat16)
    weight = torch.randn((vocab, hidden), generator=generator, device=device, dtype=torch.bfloat16)
    weight.mul_(3.0 / hidden**0.5)
    token_ids = torch.randint(vocab, (tokens,), generator=generator, device=device)
    return hidden_states.requires_grad_(), weight.requires_grad_(weight_gradient), token_ids


def _step(compute: Compute, inputs: Inputs) -> None:
    """Forward and backward; the gradients are dropped."""
    hidden_states, weight, token_ids = inputs
    compute(hidden_states, weight, token_ids).mean().backward()
    hidden_states.grad = weight.grad = None


def _peak_bytes(compute: Compute, inputs: Inputs, device: torch.device) -> int | None:
    if device.type != "cuda":
        _step(compute, inputs)
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    _step(compute, inputs)
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes
