"""Messages between a client of vLLM's workers and the workers: requests, accounts of themselves, and errors.

Each is a dataclass, declared here once, and travels as JSON by the names of its fields.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, dataclass_transform, get_args, get_origin, get_type_hints

from colo import errors
from colo.memory.specs import arriving

Description = dict[str, Any]
"""Memory, as `SharedMemory.describe` gives it to another process."""

COLO = "colo"
"""The model loader (`--load-format colo`), the sleep-mode backend and the weight-transfer backend."""

WORKER_EXTENSION = "colo.engines.vllm.worker.ColoWorker"

STORE_KEY = "colo_store"
"""Address of the `WeightStore` whose memory the weights lie in; without, the worker takes memory of its own."""

FORMAT_KEY = "colo_load_format"
"""vLLM's load format for what is read into that memory, such as `auto` or `dummy`."""

_TRACEBACK_CHARACTERS = 20_000
"""The last so many travel."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """A frozen dataclass that travels by the names of its fields, and checks them by their types on both sides.

    Between processes it is JSON; within one, a field of any type may hold tensors.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if not _fits(getattr(self, name), hint):
                raise TypeError(f"{name} is {getattr(self, name)!r}")

    def to_wire(self) -> dict[str, Any]:
        """Every field by its name."""
        return {name: getattr(self, name) for name in get_type_hints(type(self))}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """Raises: `TransferError` with the reason."""
        with arriving(cls):
            return cls(**wire)


# ---- what a worker is asked: one class for each method of its agent --------------------------------------------------


class Request(Message):
    """An operation of a worker. Its name is that of the class, as a method's."""

    @classmethod
    def operation(cls) -> str:
        """Name on the wire, such as `begin_reload`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class Envelope(Message):
    """A request on its way: the argument of the worker's method `colo`."""

    operation: str
    arguments: Mapping[str, Any]
    client: str
    """Identifies the client; only the last one to describe itself is answered."""


class Describe(Request):
    """Meet a new client; the answer is a `WorkerInfo`."""

    same_process: bool
    client_pid: int | None = None
    """Process that the worker's is to end with."""

    probe: Description | None = None
    """Memory that the worker tries to map; see `share.probing`."""

    home: Description | None = None
    """Memory of the client's that holds its name, which only workers of its machine find."""


class Record(Request):
    """Record the load plan of parameters; the answer is a `Recorded`, or within one process the plan itself."""

    parameters: Sequence[Mapping[str, Any]]
    """`TensorSpec.to_wire` of each."""

    to_pid: int


class Recorded(Message):
    """A load plan for another process."""

    copies: Sequence[Mapping[str, Any]]
    """`CopySpec.to_wire` of each."""

    fallbacks: Mapping[str, str]
    memory: Sequence[Description | None]
    """Memory of the copies' targets, by index; `None` for a slab that has been dropped."""

    unused: Sequence[str]


class Packed(Request):
    """Tell the weights that bitsandbytes has packed; within one process only."""


class PinnedBytes(Request):
    """Tell how much host memory is pinned."""


class Prepare(Request):
    """Pin host memory for a level-1 sleep in the background."""


class Begin(Request):
    """Start moving a segment to the residency `target`."""

    segment: str
    target: str


class Wait(Request):
    """Answer with the device bytes of a segment, once it has arrived."""

    segment: str


class Release(Request):
    """Bring everything back, and unmap the client's memory, which is about to be freed."""


class Forget(Request):
    """Let go of the model and its KV cache: the engine is about to end."""


class BeginReload(Request):
    """Begin a layerwise reload; the answer tells whether the output layer is the embedding."""


class ReloadTensors(Request):
    """Load a part of the weights."""

    tensors: Any
    """By name (`in_process`), or as `Exported.wire` describes them."""

    in_process: bool


class ReloadVersion(Request):
    """Load all of the weights, or `changes` of them, out of a version that `WeightsFolder` has written."""

    folder: str
    """Path, or URL of a `WeightsBucket`."""

    changes: bool = False


class JoinGroup(Request):
    """Join a process group of the trainer's, in place of one before."""

    meeting: Mapping[str, Any]
    """Fields of a `Meeting`."""

    deadline_s: float


class SliceStep(Request):
    """Run a step of `SliceSteps` (colo/engines/vllm/worker/weights.py): slices come from the trainer's ranks."""

    step: str
    """Its name, such as `take_slices`."""

    arguments: Mapping[str, Any]


class ReloadBroadcast(Request):
    """Load a part of the weights, or of their `changes`, which is being broadcast in the group.

    The answer has a digest of each, by name.
    """

    weights: Sequence[Sequence[Any]]
    """Name, dtype and shape of each, in the order of their bytes."""

    changes: bool = False


class Land(Request):
    """Record where changes of weights will land; the answer is a `Landed`. For weights that have just been loaded."""

    parameters: Sequence[Mapping[str, Any]]
    """`TensorSpec.to_wire` of each, contiguous."""


class Landed(Message):
    """Answer of a worker: the regions of its weights (`DeltaTarget.regions`), or why it takes no changes."""

    regions: Sequence[Sequence[Any]]
    refusal: str | None


class BeginChanges(Request):
    """Begin to take changes from the version `base`; the answer is false if a worker does not hold that."""

    base: str


class Attest(Request):
    """Take what lies in memory for a version; the answer has a digest of each region (`DeltaTarget.sums`)."""

    version: str


class AbandonReload(Request):
    """End a layerwise reload that has failed, if one has begun."""


class FinishReload(Request):
    """Finish a layerwise reload; the answer has what was taken of tensors that were not taken whole, by name."""


class Receive(Request):
    """Run steps of `Receiver`; the answer is the last step's."""

    steps: Sequence[Mapping[str, Any]]
    """`step`, its name, and `arguments` of each."""


class SetAdapter(Request):
    """Load or replace a LoRA adapter; the answer tells whether that was done in place."""

    number: int
    tensors: Any
    """By PEFT's names (`in_process`), or as `Exported.wire` describes them; `None` for those of the last call."""

    scalings: Mapping[str, float] | None = None
    in_process: bool = False


class AdapterRefusal(Request):
    """Tell why the adapter that was activated last cannot be updated in place, if so."""


class AdapterNumbers(Request):
    """Tell the numbers of all LoRA adapters that a worker holds."""


class KeepAdapter(Request):
    """Give vLLM a LoRA adapter again that another request has had it evict."""

    number: int


class RemoveAdapter(Request):
    """Forget a LoRA adapter, and unmap the memory that it was read from."""

    number: int


# ---- what it answers -------------------------------------------------------------------------------------------------


class WorkerInfo(Message):
    """Account of a worker: who it is, what it runs, where its weights lie and what it can give back."""

    pid: int
    pid_namespace: int
    """Number of the namespace of its process ids: another container has another."""

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
    """`slabs` of colo's loader, vLLM's sleep `pool`, or other `memory`; `elsewhere` to a client on another device."""

    weights_can_leave: bool
    kv_cache_bytes: int
    kv_cache_can_leave: bool
    is_asleep: bool
    """vLLM's own `sleep` has taken memory away."""

    max_adapters: int
    """LoRA adapters that can be used at once; 0 without LoRA."""

    takes_adapters_by_name: bool = False
    """Clients of a server may add adapters (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`)."""

    ipc_refusal: str | None = None
    """The reason why it cannot map the client's memory on its GPU; `None` where it can, or need not."""

    residual_bytes: Mapping[str, int] = field(default_factory=dict)
    """Device bytes that no sleep gives back, by what they are."""

    placing_s: float = 0.0
    """Seconds that moving the weights into slabs took."""

    outside: Mapping[str, str] = field(default_factory=dict)
    """Weights that lie in no slab, with the reason."""


def _fits(value: Any, hint: Any) -> bool:
    """Check a value against a type such as `int`, `str | None`, `Mapping[str, int]` or `Sequence[str]`."""
    if hint is Any:
        return True
    if isinstance(hint, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is Sequence:
        (content,) = get_args(hint)
        return isinstance(value, list | tuple) and all(_fits(one, content) for one in value)
    if get_origin(hint) in (Mapping, dict):
        key, content = get_args(hint)
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, content) for k, v in value.items())
    if hint is NoneType:
        return value is None
    kinds = (int, float) if hint is float else (hint,)
    return isinstance(value, kinds) and (hint is bool or not isinstance(value, bool))


_KINDS: Mapping[str, Callable[..., Exception]] = {
    kind.__name__: kind for kind in (*errors.ColoError.__subclasses__(), ValueError)
}
"""Errors that keep their kind on the way; every other is a `TransferError` that names it."""


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
