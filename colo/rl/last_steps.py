"""The steps that a model takes from its head's logits to those it returns, recorded while it takes them.

Logits that a hook makes `_Recorded` note each function that they are given to, so that what is found is what the code
does, not what a comparison of numbers shows. Shape suffixes: B batch, T time, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colo.rl.logit_tiles import LogitStep, check_steps


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
            self._head.register_forward_hook(self._after_head),
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
        return (args[0][:, -1:],) if args[0].dim() == 3 else args

    def _after_head(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
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
    """Logits that note what a model computes with them."""

    path: _Path | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and note it on its result; what is not known is noted on the arguments too, which it may write."""
        kwargs = kwargs or {}
        before = [path for a in (*args, *kwargs.values()) if (path := getattr(a, "path", None)) is not None]
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if not before and not isinstance(result, _Recorded):
            return result
        name = getattr(func, "__name__", str(func))
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if isinstance(result, Tensor) or writes:
            with torch._C.DisableTorchFunctionSubclass():
                known = len(before) == 1 and before[0] is _path_of(args) and not writes
                after = _step(name, args, kwargs, result) if known else None
            if after is None:
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
        if factor is None or result.dtype != args[0].dtype:
            return None
        added = ("mul" if "mul" in name else "div", factor)
    elif name == "tanh":
        added = ("tanh", 0.0)
    elif name in ("float", "to", "type", "type_as") and result.shape == args[0].shape:
        if result.dtype != args[0].dtype:
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
        return float(value) if value.dim() == 0 and not value.requires_grad else None
    return float(value) if isinstance(value, (int, float)) else None


def _keeps_the_first(index: Any) -> bool:
    """Say if an index takes the first entries of the last dimension, and all of the others."""
    *others, last = index if isinstance(index, tuple) else (index,)
    plain = all(other is Ellipsis or other == slice(None) for other in others)
    return plain and bool(others) and isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)
