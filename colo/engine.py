"""The protocol of an inference engine: what every one has, and what some can do besides.

States of an engine, and what each allows:

    AWAKE    --pause-->  PAUSED      generating raises, weights may change
    PAUSED   --resume--> AWAKE
    AWAKE or PAUSED --sleep--> ASLEEP   some of its memory is away; generating and updating raise
    ASLEEP   --wake-->   PAUSED      once every segment is resident again; resume() lets it generate
    any      --close-->  CLOSED
    any      --its process ends-->  LOST  --recover-->  AWAKE

Whether it may generate is a second, independent question: `weights_version` names what it holds, and `poison(cause)`
withdraws it (after a failed update, or a wake from level 2) until `commit(version)` gives it a new one.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, overload, runtime_checkable

from colo.errors import TransferError, Unsupported
from colo.units import check_digits

if TYPE_CHECKING:
    import torch

    from colo.memory.load_plan import LoadPlan
    from colo.memory.offload import Mover
    from colo.phases.phase import Segment

T = TypeVar("T")


class EngineState(StrEnum):
    """States of the table above."""

    AWAKE = "awake"
    PAUSED = "paused"
    ASLEEP = "asleep"
    CLOSED = "closed"
    LOST = "lost"
    """Its process has ended, or does not answer: `recover()` starts it again."""


class SleepLevel(StrEnum):
    """Sleep depths. `1` and `2` mean what they mean in vLLM."""

    KEEP_WEIGHTS = "keep-weights"
    """Weights stay on the device, the KV cache is dropped."""

    LEVEL_1 = "1"
    """Weights go to the host arena, the KV cache is dropped."""

    LEVEL_2 = "2"
    """Weights and KV cache are both dropped; waking asks for new weights."""


_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Options for drawing tokens. Names and meanings follow vLLM's `SamplingParams`."""

    n: int = 1
    """Completions for each prompt."""

    max_tokens: int = 16
    """The most tokens to generate for one completion."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy, and less than 1e-30, by which fp32 cannot be divided, becomes that."""

    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities add up to at least this."""

    top_k: int = 0
    """Keep this many of the most likely tokens; 0 keeps all, as does -1, which becomes 0."""

    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most likely one."""

    seed: int | Sequence[int] | None = None
    """Makes every completion a function of (seed, prompt index, sample index, weights); `None` draws anew.

    A list has a seed for each prompt, whatever its index: sample `j` of it draws from that seed plus `j`."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, beside the model's end-of-sequence token; the token is kept in the output."""

    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, plain(getattr(self, option.name)))
            if option.name != "seed" and getattr(self, option.name) is None:
                raise ValueError(f"{option.name} cannot be None: give a value, or leave it out for {option.default}")
        if isinstance(self.seed, Sequence) and not isinstance(self.seed, (str, bytes)):
            object.__setattr__(self, "seed", _integers("seed", self.seed, "a whole number, or a list of them"))
        elif self.seed is not None:
            check_number("seed", self.seed, Integral, "a whole number, or a list with one for each prompt")
        for name in ("n", "max_tokens", "top_k"):
            check_number(name, getattr(self, name), Integral, "a whole number")
        for name in ("temperature", "top_p", "min_p"):
            check_number(name, value := getattr(self, name), Real, "a number")
            # torch computes with no fractions, and with integers of 64 bits; what no float holds is refused below
            if abs(value) <= sys.float_info.max:
                object.__setattr__(self, name, float(value))
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", _LEAST_TEMPERATURE)
        ids = _integers("stop_token_ids", self.stop_token_ids, "a list of token ids, such as [2]")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        checks = {
            "n must be at least 1": self.n >= 1,
            "ignore_eos must be True or False": self.ignore_eos in (True, False),  # "false" would be true
            "max_tokens must be at least 1": self.max_tokens >= 1,
            "temperature must be at least 0 and finite": 0 <= self.temperature <= sys.float_info.max,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (all) or positive": self.top_k >= 0,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
            "stop_token_ids must be numbers of 64 bits": all(-(2**63) <= each < 2**63 for each in ids),
            "seed must be numbers of 64 bits, with n added": isinstance(self.seed, (int, type(None)))
            or all(-(2**63) <= each <= 2**64 - self.n for each in self.seed),
        }
        for message, holds in checks.items():
            if not holds:
                name = message.split()[0]
                raise ValueError(f"{message}, but is {getattr(self, name)}")


def check_number(name: str, value: Any, kind: type, words: str) -> None:
    """Raise `TypeError` for a value that is not of this kind, `ValueError` for more digits than a message can hold."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} must be {words}, not {value!r}")
    check_digits(name, value)


def plain(value: Any) -> Any:
    """Return a value with Python's own numbers and lists in place of NumPy's and torch's, which no message can hold."""
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def _integers(name: str, given: Any, words: str) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"{name} must be {words}, not {given!r}") from None
    for each in found:
        check_digits(f"one of {name}", each)
    return found


class _Text:
    """A text, or what decodes it: called when it is first read, and never again."""

    @overload
    def __get__(self, completion: None, owner: type) -> None: ...
    @overload
    def __get__(self, completion: Completion, owner: type) -> str | None: ...

    def __get__(self, completion: Completion | None, owner: type) -> str | None:
        if completion is None:
            return None  # the default
        text: str | Callable[[], str] | None = completion._text
        if callable(text):
            text = text()
            self.__set__(completion, text)
        return text

    def __set__(self, completion: Completion, text: str | Callable[[], str] | None) -> None:
        object.__setattr__(completion, "_text", text)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt."""

    prompt_index: int
    """Index of the prompt in the call."""

    sample_index: int
    """Index among the `n` samples of that prompt."""

    prompt_token_ids: tuple[int, ...]
    """The prompt as the engine saw it."""

    token_ids: tuple[int, ...]
    """Tokens that were generated, the stop token included."""

    logprobs: tuple[float, ...]
    """Log-probability of each generated token under the distribution it was drawn from (temperature and filters
    applied; for greedy decoding the unscaled softmax)."""

    finish_reason: str
    """`stop` when a stop token ended it, `length` when it ran into a limit, `carried` while it is to go on."""

    weights_version: int
    """Version of the weights that its tokens were sampled from, the last one's where they are of several."""

    spans: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) in order, of a completion that was continued (`until`); else empty."""

    adapter: str | None = None
    """Name of the LoRA adapter that was applied, if any."""

    routed_experts: Any = None
    """Experts that a mixture's routers chose, of an engine that returns them: a NumPy array of integers (tokens,
    layers, experts a token), for all tokens of prompt and completion but the last; of one that was continued, by the
    weights of its last part. See `colo.replay_routing`."""

    key: Any = None
    """The caller's object for its prompt, of a call with `keys`."""

    text: _Text = _Text()
    """The tokens decoded alone by the runtime's tokenizer, without the stop token and special ones, or the engine's own
    text as far as that goes, which ends before a stop string; `None` where neither has a tokenizer. What decodes it may
    be given in its place, and is called when the text is first read."""

    output: Any = None
    """The engine's own object for this sample, where it has one (`vllm.CompletionOutput`, whose own text is empty where
    colo decodes)."""

    _text: ClassVar[Any] = None  # a text, or a callable that decodes it

    @property
    def token_versions(self) -> tuple[int, ...]:
        """Version of the weights that each token was sampled from, for importance weights."""
        spans = self.spans or ((self.weights_version, len(self.token_ids)),)
        return tuple(version for version, count in spans for _ in range(count))

    def with_text(self, decode: Callable[[str | None], str]) -> Completion:
        """This completion with the text that `decode` makes when it is read, of the engine's own or `None`.

        One that something decodes already stays.
        """
        return self if callable(self._text) else replace(self, text=partial(decode, self._text))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_text": self.text}  # what decodes it need not be in another process


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterWeights:
    """A LoRA adapter as tensors in memory, in the engine's own module names.

    For every module `name` the engine computes `y = W x + scalings[name] * B (A x)`.
    """

    a: Mapping[str, torch.Tensor]
    """Module name to A, shape (rank, in_features)."""

    b: Mapping[str, torch.Tensor]
    """Module name to B, shape (out_features, rank)."""

    scalings: Mapping[str, float]
    """Module name to its scaling, rank and alpha patterns and rsLoRA already resolved."""

    shared: bool = False
    """The tensors are the trainer's own and may be referred to rather than copied; they are never written."""

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every A, then every B, by names as PEFT has them."""
        return [
            (f"{module}.{part}", tensor)
            for part, tensors in (("lora_A", self.a), ("lora_B", self.b))
            for module, tensor in tensors.items()
        ]


@runtime_checkable
class Engine(Protocol):
    """An inference engine that takes turns with a trainer, in this process, in another, or behind HTTP.

    What only some engines can do is a small protocol of its own below, asked for by `isinstance`: `LoadPlans`,
    `Adapters`, `Recovers`, `PacksWeights`, `Gathers`, and in colo/weights/transports/ `Peer` (ipc.py) and `TakesSlices`
    (remote.py).
    colo/engines/base.py has a base class for the states and the sleep levels.
    """

    @property
    def name(self) -> str:
        """Short name for reports, such as `torch` or `vllm`."""

    @property
    def device(self) -> torch.device:
        """Device that engine and trainer share."""

    @property
    def mover(self) -> Mover:
        """The mover of this process's memory between that device and the host."""

    @property
    def placement(self) -> str:
        """A phrase for reports: where it runs and its weights lie."""

    @property
    def residual_bytes(self) -> Mapping[str, int]:
        """Device bytes that no sleep gives back, by kind, as far as they are known."""

    @property
    def model_type(self) -> str | None:
        """`model_type` of the model's configuration."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def state(self) -> EngineState:
        """State by the table above: what it can do now."""

    @property
    def weights_version(self) -> int | None:
        """Version of the weights it holds; `None` while poisoned."""

    @property
    def segments(self) -> Sequence[Segment]:
        """`engine.weights` and `engine.kv_cache`, for the scheduler to move."""

    before_generate: Callable[[], None] | None
    """Called first by `generate`, whoever calls that: a runtime brings the weights up to date."""

    def sampling_params(self, params: Any = None, **sampling: Any) -> Any:
        """Make what `generate` takes, from `SamplingParams`, from the engine's own kind, or from options by name."""

    def sampling_temperature(self, params: Any) -> float | None:
        """The temperature at which softmax gives a completion's `logprobs`; `None` where filters change them too."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt of token ids, in prompt order, then sample order.

        Raises: `PhaseError` unless awake, `StaleWeights` while poisoned, `BudgetError` for a sequence longer than
        the KV cache, `ValueError` for an empty prompt, one that leaves no position to sample for, a token id outside
        the vocabulary, or an unknown adapter; `FloatingPointError` when the log-probabilities are not numbers. Where
        the model's positions end a completion does, with `length`.
        """

    def pause(self) -> None:
        """Stop generating, so that weights may change. Idempotent; `PhaseError` when asleep or closed."""

    def resume(self) -> None:
        """Generate again. Idempotent; `PhaseError` unless every segment is resident."""

    def sleep(self, level: SleepLevel | int) -> None:
        """Give memory back. Idempotent at the same level; `PhaseError` while the weights are someone else's and
        the level would move them."""

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int | None:
        """Load by the engine's own loader, the authority on names, fusion and padding. `PhaseError` while asleep.

        Returns the bytes that were sent, unless they are those of all tensors.
        """

    def commit(self, version: int) -> None:
        """Declare that the engine now holds `version`; lifts a poisoning."""

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""

    def close(self) -> None:
        """Release everything. Idempotent."""


def missing_members(given: object, protocol: type = Engine) -> list[str]:
    """Members of a protocol that an object has not."""
    return sorted(name for name in vars(protocol) if not name.startswith("_") and not hasattr(given, name))


@runtime_checkable
class LoadPlans(Protocol):
    """An engine whose loading can be recorded as copies into memory that this process sees.

    Its weights may be the trainer's own memory. Other engines get every version through `load_weights`.
    """

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Record what the engine's own loader does with `source`, in Hugging Face names; no byte is moved."""

    def share_weights(self) -> bool:
        """Let a trainer work on the engine's own memory (`LoadPlan.aliases`): from now on it never leaves the device.

        Returns true where that memory outlives the engine, as that of a `vllm.LLM` of the caller's.
        Raises: `PhaseError` unless the weights are resident.
        """


@runtime_checkable
class Adapters(Protocol):
    """An engine that takes LoRA adapters from memory."""

    def load_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Make a LoRA adapter available by name. `ValueError` for a name in use, `Unsupported` for a module that
        the engine cannot adapt: every key is accounted for, none dropped."""

    def replace_adapter(self, old: str, new: str, adapter: AdapterWeights) -> None:
        """Load `adapter` as `new` in place of `old`, which is gone then: the next version of an adapter.

        Ordering: pause first. What was computed with an earlier adapter of the name `new` is forgotten.
        Raises: `ValueError` when there is no `old` or `new` is in use, and nothing has changed; otherwise as
        `load_adapter`, and `old` is gone.
        """

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. `ValueError` when there is none of that name."""


def adapters_of(engine: Engine) -> Adapters:
    """The engine as one that takes adapters. Raises: `Unsupported` for another."""
    if not isinstance(engine, Adapters):
        raise Unsupported(
            f"the {engine.name} engine takes no adapters: merge the adapter (model.merge_and_unload()) and share the "
            "merged model"
        )
    return engine


@runtime_checkable
class Recovers(Protocol):
    """An engine in another process, which may end."""

    def recover(self) -> None:
        """Start a lost engine again; it is awake and poisoned then. `PhaseError` for one that is not lost."""


@runtime_checkable
class PacksWeights(Protocol):
    """An engine that packs weights as it reads them, in memory that a trainer's layers can use."""

    def packed_weights(self) -> Mapping[str, Any]:
        """`PackedWeight`s by parameter name: what the engine keeps packed in 4 bits and this process can use."""


@runtime_checkable
class Gathers(Protocol):
    """An engine, or a link to one, of which each of several processes runs a part."""

    def gather(self, value: T) -> list[T]:
        """All-gather `value` over the engine's ranks (a collective); see `in_all_ranks`."""


def in_all_ranks(
    engine: object, operation: str, call: Callable[[], T], tell: Callable[[T], Any] = lambda result: None
) -> tuple[T, list[Any]]:
    """Call on every rank of an engine; return the result and what `tell` makes of it on each rank.

    An engine that is no `Gathers` has one rank.
    Ordering: every rank calls, in the same order, and waits for the others. An interrupt or `SystemExit` of one alone
    leaves them waiting until its process ends.
    Raises: what `call` raises; `TransferError`, with rank and cause, when `operation` has failed on another rank.
    """
    gather: Callable[[Any], list[Any]] = engine.gather if isinstance(engine, Gathers) else lambda value: [value]
    try:
        result = call()
    except Exception as error:
        gather((None, f"{type(error).__name__}: {error}"))
        raise
    told = gather((tell(result), None))
    for rank, (_, cause) in enumerate(told):
        if cause is not None:
            raise TransferError(f"{operation} failed on rank {rank}: {cause}")
    return result, [value for value, _ in told]
