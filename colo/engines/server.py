"""A server of the user's own as an engine: what SGLang's and LMDeploy's have in common.

Server and trainer share a machine and a device, and each has a copy of the weights. Names, shapes and completeness are
checked here against the config of the server's checkpoint, before a byte is sent.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from transformers import AutoConfig, PretrainedConfig

from colo.engine import Completion, SamplingParams
from colo.engines.base import TAGS, EngineBase, EngineStatus
from colo.engines.buckets import Slab
from colo.engines.http import Body, HttpClient, Refused, Silent, asking
from colo.engines.layout import empty_model
from colo.engines.sampling import check_seeds
from colo.engines.text import check_count, check_prompts
from colo.errors import BudgetError, EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.memory.specs import TensorSpec
from colo.phases.phase import Done, Move, Residency, check_move
from colo.planning.kv_cache import layer_caches
from colo.units import format_bytes
from colo.weights.mismatch import not_numbers
from colo.weights.packed import refuse_quantized
from colo.weights.sources.module import OUTPUT_LAYER, ModuleSource, own_output_layer
from colo.weights.sources.names import checkpoint_views

# ---- what a server is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's account of itself, and what follows from the config of its checkpoint."""

    model_path: str
    config: PretrainedConfig
    dtype: torch.dtype
    device: str  # "cpu" or "cuda"
    num_positions: int
    max_prompt: int  # tokens of the longest prompt
    num_cached_tokens: int

    more_cache: ClassVar[str]
    """The flag, and a space, that makes the KV cache hold so many tokens."""

    @property
    def lacking_flags(self) -> Mapping[str, str]:
        """Options that it was started without, and what it cannot do therefore."""
        return {}

    def check_room(self, prompt_tokens: int, max_tokens: int, cache_bytes: int) -> None:
        """Raise `BudgetError` for a sequence that the KV cache of `cache_bytes` does not hold, however empty it is."""
        needed, cached = prompt_tokens + max_tokens, self.num_cached_tokens
        if needed > cached:
            needed_bytes = cache_bytes * needed // cached
            raise BudgetError(
                f"a prompt of {prompt_tokens} tokens and max_tokens={max_tokens} need {format_bytes(needed_bytes)} of "
                f"the server's KV cache, which has {format_bytes(cache_bytes)} for {cached} tokens: lower max_tokens, "
                f"shorten the prompt, or start it with {self.more_cache}{needed}",
                needed_bytes=needed_bytes,
                free_bytes=cache_bytes,
            )


def config_of(path: str, where: str, or_else: str = "") -> PretrainedConfig:
    """The config of the checkpoint that a server has loaded.

    Raises: `Unsupported` where it cannot be read here, and for quantized weights.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise Unsupported(
            f"the config of {path}, which {where} has loaded, cannot be read here ({error}): colo needs it to know "
            f"shapes and the vocabulary before it sends anything{or_else}"
        ) from error
    refuse_quantized(config)
    return config


def own_dtype(config: PretrainedConfig) -> torch.dtype | None:
    """The dtype that a config says its checkpoint has."""
    return getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)


def shapes_of(config: PretrainedConfig) -> dict[str, Any]:
    """All that a config says, but for the folder that it came from and who wrote it."""
    said = config.to_dict()
    return {key: said[key] for key in said.keys() - {"_name_or_path", "transformers_version"}}


@dataclass(frozen=True, slots=True)
class Outline:
    """Weights that a server's model has, by Hugging Face name."""

    specs: Mapping[str, TensorSpec]

    def check(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise `TransferError` unless `weights` are the engine's by names and shapes, and all of them."""
        if OUTPUT_LAYER in weights and OUTPUT_LAYER not in self.specs:
            raise own_output_layer(weights[OUTPUT_LAYER].numel())
        for name, tensor in weights.items():
            self.check_one(name, tensor)
        if missing := [name for name in self.specs if name not in weights]:
            raise TransferError(
                f"the model has no {missing[0]}, one of {len(missing)} weights that the server's model has: the server "
                "would keep its own. Start it on a checkpoint of this very architecture"
            )

    def check_one(self, name: str, tensor: torch.Tensor) -> None:
        """Raise `TransferError` for a weight that the engine does not have, or has in another shape."""
        spec = self.specs.get(name)
        if spec is None or spec.shape != tuple(tensor.shape):
            has = "does not have it" if spec is None else f"has {spec.shape}"
            raise TransferError(
                f"the server's model {has}: {name} {tuple(tensor.shape)}. Start it on a checkpoint of this very "
                "architecture, sizes, biases and tied embeddings included"
            )


# ---- its memory ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ServerSegment:
    """Memory of a server that goes and comes by its tag."""

    tag: str
    size_bytes: int
    away: Residency | None
    """Residency in which it waits; `None` if it stays."""

    move: Callable[[ServerSegment, Residency], None]
    """Makes the server release it, or resume it."""

    refused: Mapping[Residency, str] = field(default_factory=dict)
    """Reasons against residencies."""

    residency: Residency = Residency.RESIDENT

    @property
    def name(self) -> str:
        """`engine.weights` or `engine.kv_cache`."""
        return TAGS[self.tag]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now."""
        return self.size_bytes if self.residency is Residency.RESIDENT else 0

    @property
    def host_bytes(self) -> int:
        """Bytes that the server keeps in host memory."""
        return self.size_bytes if self.residency is Residency.OFFLOADED else 0

    def begin(self, target: Residency) -> Move:
        """Make the server release or resume it. Raises: `PhaseError` when it must not leave, `EngineLost`."""
        if target is self.residency:
            return Done()
        if target in self.refused:
            raise PhaseError(f"segment {self.name} cannot become {target}: {self.refused[target]}")
        check_move(self.name, self.residency, target)
        self.move(self, target)
        self.residency = target
        return Done()


# ---- the engine ----------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=ServerFacts)


class ServerEngine(EngineBase, Generic[F]):
    """An `Engine` (see `colo.engine`) over a server, which stays its owner's. One caller at a time.

    It starts poisoned. `recover` takes up the same address again: a server that was started anew, or one that did not
    answer for a while.
    """

    or_else = "leave it out"
    longer: str
    """The flag that lets a server take longer prompts."""

    _facts: F
    _layout: Outline

    def __init__(self, url: str, device: torch.device, server: HttpClient, slab: Slab) -> None:
        """Connect, and own `server` and `slab`. Raises: see `colo.connect`."""
        self.url = url
        self._server, self._slab = server, slab
        self._adapters: dict[str, str] = {}  # the server's name of each
        self._segments: tuple[ServerSegment, ...] = ()
        self._cache_bytes = 0
        status = EngineStatus(lambda: self.segments, on_loss=self._vanish, when_lost="call recover() once it answers")
        super().__init__(device, (), status=status)
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def facts(self) -> F:
        """The server's account of itself when it was last asked."""
        return self._facts

    @property
    def lacking_flags(self) -> Mapping[str, str]:
        """Options that the server was started without, and what it cannot do therefore."""
        return self._facts.lacking_flags

    @property
    def cache_bytes(self) -> int:
        """Bytes of the server's KV cache, on whichever device it is."""
        return self._cache_bytes

    @property
    def model_type(self) -> str | None:
        """`model_type` of the model's configuration."""
        kind: str | None = self._facts.config.model_type
        return kind

    @property
    def vocab_size(self) -> int:
        """Token ids are below it; a server may end at one that is not."""
        return int(self._facts.config.get_text_config().vocab_size)

    def sampling_params(self, params: Any = None, **sampling: Any) -> Any:
        """`SamplingParams`; see `EngineBase`. Raises: `Unsupported` for what the server would not heed."""
        made = super().sampling_params(params, **sampling)
        self._check_sampling(made)
        return made

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt; see `Engine.generate`.

        Raises: `Unsupported` for options that the server would not heed, or would leave out of log-probabilities;
        `StaleWeights` when completions may be of other weights than were published, and the engine is poisoned then.
        """
        version = self.ready()
        params = self.sampling_params(params)
        token_ids = self._check_request(prompts, params)
        if adapter is not None and adapter not in self._adapters:
            raise ValueError(f"the engine has no adapter {adapter!r}, but {sorted(self._adapters)}")
        rows = [(p, s) for p in range(len(token_ids)) for s in range(params.n)]
        answers = self._answers(token_ids, rows, params, adapter)
        return [
            self._completion(row, token_ids[row[0]], answer, version, adapter)
            for row, answer in zip(rows, answers, strict=True)
        ]

    def check_request(self, prompts: Sequence[Sequence[int]], params: Any) -> None:
        """Raise what `generate` would raise for these prompts and parameters."""
        for prompt in self._check_request(prompts, params):
            self._limit(prompt, params)

    @property
    def longest_prompt(self) -> int:  # type: ignore[override]
        """The most tokens of a prompt that the server takes."""
        return self._facts.max_prompt

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Compare names and shapes with the server's model; every weight goes through its loader. See `LoadPlans`.

        Raises: `TransferError` for weights of another model.
        """
        self._layout.check(source)
        return LoadPlan.of(source, fallbacks=dict.fromkeys(source, f"{self.called} has a copy of its own"))

    def share_weights(self) -> bool:
        """Refuse. Raises: `Unsupported`."""
        raise Unsupported("the memory of a server's weights cannot be shared: they are copied")

    def look(self) -> None:
        """Find out by asking whether the server has ended, or another has taken its place: the engine is lost then."""
        if self._status.lost is None:
            self._status.require_open("recover")
            with suppress(EngineLost):
                try:
                    self._check_server()
                except (StaleWeights, TransferError) as error:
                    self._status.lose(str(error))

    def recover(self) -> None:
        """Take up the server's address again; it is poisoned then. `PhaseError` unless it is lost.

        Raises: `EngineLost` while nothing answers there; `Unsupported` as `colo.connect`.
        """
        self.look()
        lost = self._status.lost
        if lost is None:
            raise PhaseError("the engine is not lost: nothing to recover")
        self._status.revive()
        try:
            self._meet()
        except BaseException:
            self._status.lost = self._status.lost or lost
            raise
        self.poison("it has been taken up again: publish to it")

    def _release(self) -> None:
        """Leave the server as `_leave_as_found` does, if it answers."""
        with suppress(EngineLost, TransferError, PhaseError):
            if self._status.lost is None and self._segments:
                self._leave_as_found()
        self._slab.close()
        self._server.close()

    # ---- what a subclass writes --------------------------------------------------------------------------------------

    @abstractmethod
    def _read_facts(self) -> F:
        """Ask the server what it is. Raises: `Unsupported` for one that cannot take weights here."""

    @abstractmethod
    def _meet(self) -> None:
        """Set `_facts`, `_layout` and `_segments` by what the server says of itself now."""

    @abstractmethod
    def _check_server(self) -> None:
        """Raise `StaleWeights`, and poison, unless the server is the one that was published to last."""

    @abstractmethod
    def _check_sampling(self, params: SamplingParams) -> None:
        """Raise `Unsupported` for options that the server would not heed."""

    @abstractmethod
    def _answers(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[tuple[int, int]], params: SamplingParams, adapter: Any
    ) -> list[Mapping[str, Any]]:
        """The server's answer for each row, the index of a prompt and that of a sample."""

    @abstractmethod
    def _completion(
        self, row: tuple[int, int], prompt: tuple[int, ...], answer: Mapping[str, Any], version: int, adapter: Any
    ) -> Completion:
        """The completion in an answer."""

    @abstractmethod
    def _leave_as_found(self) -> None:
        """Leave the server awake and running, as the engine is closed."""

    # ---- for its use -------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Body | None = None, **how: Any) -> Any:
        """The server's answer. Raises: `EngineLost` without one, `TransferError` for a refusal."""
        with asking(self._status, path):
            return self._server.ask(method, path, body, **how)

    def _tell(self, path: str, **body: Any) -> Any:
        """Tell the server to do something. Raises: as `_ask`, also for an answer that says that it did not."""
        answer = self._ask("POST", path, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            why = answer.get("message") or answer.get("error_message")
            raise TransferError(f"the server refuses {path}: {why}")
        return answer

    def _ask_all(self, path: str, bodies: Sequence[Body], on_refusal: Callable[[Refused], None]) -> list[Any]:
        """Ask for completions. Raises: what `on_refusal` does, `EngineLost`, `ValueError` or `TransferError`."""
        try:
            return self._server.ask_all(path, bodies)
        except Silent as error:
            raise self._status.lose(str(error)) from error
        except Refused as error:
            on_refusal(error)
            raise (TransferError if error.is_servers else ValueError)(
                f"the server does not generate: {error}"
            ) from error

    def _learn(self) -> F:
        try:
            facts = self._read_facts()
        except EngineLost as error:
            raise EngineLost(f"no server answers at {self.url}: {self._status.lost}") from error
        if facts.device != self.device.type:
            raise Unsupported(
                f"the server at {self.url} runs on {facts.device} and the trainer on {self.device}: start both on the "
                "same GPU"
            )
        return facts

    def _outline(self) -> tuple[list[TensorSpec], dict[str, int]]:
        """Weights of the server's model, and the bytes of its memory by tag."""
        facts = self._facts
        outline = ModuleSource(empty_model(facts.config, dtype=facts.dtype, attn_implementation=None))
        specs = list(outline.specs())
        token_bytes = sum(c.token_bytes(dtype_bytes=facts.dtype.itemsize) or 0 for c in layer_caches(outline.model))
        weights_bytes = sum(spec.size_bytes for spec in specs)
        self._cache_bytes = facts.num_cached_tokens * token_bytes
        return specs, {"weights": weights_bytes, "kv_cache": self._cache_bytes}

    def _segment(self, tag: str) -> ServerSegment:
        return next(segment for segment in self._segments if segment.tag == tag)

    def _check_same_model(self) -> None:
        """Raise `TransferError` when there is another model at the address by now, before anything is sent."""
        facts = self._learn()
        if shapes_of(facts.config) != shapes_of(self._facts.config) or facts.dtype != self._facts.dtype:
            raise self._another_model(facts)
        self._facts = facts

    def _another_model(self, facts: F) -> TransferError:
        return TransferError(
            f"the server at {self.url} has another model than when it was connected to, {facts.model_path}: "
            "connect to it again, or start it as it was"
        )

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], add: Callable[[str, torch.Tensor], object]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Weights in the server's dtype, by their names in a checkpoint; each is checked, and given to `add`."""
        for name, tensor in weights:
            self._layout.check_one(name, tensor)
            sent = tensor.detach().to(self._facts.dtype)
            add(name, sent)
            yield from checkpoint_views({name: sent}, self.model_type)

    def _check_request(self, prompts: Sequence[Sequence[int]], params: Any) -> list[tuple[int, ...]]:
        token_ids = [tuple(map(operator.index, prompt)) for prompt in prompts]
        check_count(len(token_ids), params.n)
        check_seeds(params.seed, len(token_ids))
        # one position at least is left for what is sampled
        positions = self._facts.max_prompt + 1
        check_prompts(token_ids, self.vocab_size, positions, or_else=f", or start it with more {self.longer}")
        return token_ids

    def _limit(self, prompt: tuple[int, ...], params: SamplingParams) -> int:
        """Tokens that may be sampled after a prompt. Raises: `BudgetError` where the KV cache does not hold them."""
        limit = min(params.max_tokens, self._facts.num_positions - len(prompt))
        self._facts.check_room(len(prompt), limit, self._cache_bytes)
        return limit

    def _made(
        self,
        row: tuple[int, int],
        prompt: tuple[int, ...],
        tokens: Sequence[int],
        pairs: Sequence[Sequence[Any]],
        answer: Mapping[str, Any],
        **known: Any,
    ) -> Completion:
        """The completion of `tokens`, which `pairs` of log-probability and token are of. Raises: `TransferError`."""
        if tuple(tokens) != tuple(token for _, token, *_ in pairs):
            raise TransferError("the server's log-probabilities are of other tokens than those that it has sampled")
        logprobs = tuple(math.nan if value is None else value for value, *_ in pairs)
        if not math.isfinite(sum(logprobs)):
            raise FloatingPointError(not_numbers(None))
        return Completion(
            prompt_index=row[0],
            sample_index=row[1],
            prompt_token_ids=prompt,
            token_ids=tuple(tokens),
            logprobs=logprobs,
            output=answer,
            **known,
        )

    def _vanish(self) -> None:
        for segment in self._segments:
            segment.residency = Residency.DISCARDED
