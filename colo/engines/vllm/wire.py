"""What a vLLM worker tells of itself, and the errors that it sends back: both travel as JSON."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from colo import errors
from colo.memory.specs import arriving

_TRACEBACK_CHARACTERS = 20_000
"""The last so many travel."""


class Message:
    """A dataclass that travels as JSON, and whose fields are checked by their types."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if not _fits(getattr(self, name), hint):
                raise TypeError(f"{name} is {getattr(self, name)!r}")

    def to_wire(self) -> dict[str, Any]:
        """Every field by its name."""
        return {name: getattr(self, name) for name in get_type_hints(type(self))}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """Raises: `TransferError` with what is wrong."""
        with arriving(cls):
            return cls(**wire)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo(Message):
    """Who a worker is, what it runs, where its weights lie and what it can give back."""

    pid: int
    pid_namespace: int
    """Which process ids it sees: another container has others."""

    rank: int
    device: str
    """`cpu`, or the UUID of its GPU."""

    model_type: str | None
    """`model_type` of the model's configuration."""

    vocab_size: int
    max_length: int
    """The most tokens of a sequence."""

    logprobs_mode: str
    has_tokenizer: bool

    weights_bytes: int
    weights_in: str
    """`slabs` of colo's loader, vLLM's sleep `pool`, or other `memory`."""

    weights_can_leave: bool
    kv_cache_bytes: int
    kv_cache_can_leave: bool
    is_asleep: bool
    """vLLM's own `sleep` has taken memory away."""

    max_adapters: int
    """How many LoRA adapters can be used at once; 0 without LoRA."""

    takes_adapters_by_name: bool = False
    """Whether clients of a server may add adapters (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`)."""

    ipc_refusal: str | None = None
    """Why it cannot map the client's memory on its GPU; `None` where it can, or need not."""

    residual_bytes: Mapping[str, int] = field(default_factory=dict)
    """Device bytes that no sleep gives back, by what they are."""

    placing_s: float = 0.0
    """How long it took to move the weights into slabs."""

    outside: Mapping[str, str] = field(default_factory=dict)
    """Weights that lie in no slab, with the reason."""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that has come as JSON is of a type such as `int`, `str | None` or `Mapping[str, int]`."""
    if isinstance(hint, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is not None:
        key, content = get_args(hint)
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, content) for k, v in value.items())
    if hint is NoneType:
        return value is None
    kinds = (int, float) if hint is float else (hint,)
    return isinstance(value, kinds) and (hint is bool or not isinstance(value, bool))


_KINDS: Mapping[str, Callable[..., Exception]] = {
    kind.__name__: kind
    for kind in (
        errors.PhaseError,
        errors.BudgetError,
        errors.StaleWeights,
        errors.TransferError,
        errors.EngineLost,
        errors.Unsupported,
        ValueError,
    )
}
"""Errors that keep their kind on the way; every other is a `TransferError` that names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerError(Message):
    """An error of a worker's, on its way to the caller."""

    kind: str
    """A key of the table of errors, such as `PhaseError`."""

    message: str
    traceback: str | None = None
    needed_bytes: int | None = None
    """Bytes that a `BudgetError` is about, as are the free ones."""

    free_bytes: int | None = None

    def __post_init__(self) -> None:
        Message.__post_init__(self)
        if self.kind not in _KINDS:
            raise ValueError(f"kind is {self.kind!r}, none of {', '.join(_KINDS)}")

    @classmethod
    def of(cls, error: Exception) -> WorkerError:
        """Describe an error, with its traceback unless it is one that colo raises on purpose."""
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), None)
        trace = None
        if kind in (None, "TransferError", "ValueError"):
            trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        budget = error if isinstance(error, errors.BudgetError) else None
        return cls(
            kind=kind or "TransferError",
            message=str(error) if kind and str(error) else error_in_words(error),
            traceback=trace,
            needed_bytes=budget.needed_bytes if budget else None,
            free_bytes=budget.free_bytes if budget else None,
        )

    def error(self) -> Exception:
        """The error to raise, with the worker's traceback as a note."""
        figures = {"needed_bytes": self.needed_bytes or 0, "free_bytes": self.free_bytes or 0}
        raised = _KINDS[self.kind](self.message, **(figures if self.kind == "BudgetError" else {}))
        if self.traceback is not None:
            raised.add_note("in the worker:\n" + self.traceback)
        return raised


def error_in_words(error: Exception) -> str:
    """The kind of an error and its message; where it has none, as a failed assertion, the line that raised it."""
    kind, message = type(error).__name__, str(error)
    raised_in = traceback.extract_tb(error.__traceback__)[-1:]
    if message or not raised_in:
        return f"{kind}: {message or 'without a message'}"
    return f"{kind} at {Path(raised_in[0].filename).name}:{raised_in[0].lineno}: {raised_in[0].line}"
