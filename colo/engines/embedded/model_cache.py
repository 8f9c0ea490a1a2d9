"""What a transformers model keeps of a sequence: measured, and, where a buffer cannot hold it, left to transformers.

A buffer holds keys and values of one shape for every layer. Multi-head latent attention, recurrent and hybrid models
keep other things, in caches of their own. Those are ordinary memory, which the region of the KV cache counts and does
not take: as many sequences run together as `Footprint` says will fit in it. Beside it there is one layer's growth at a
time, which those caches copy. Sequences that run together have prompts of one length, so that nothing is padded: a
recurrent state would take padding for text. Nothing is kept from call to call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from colo.engines.embedded.kv_cache import PREFILL_TOKENS, check_room
from colo.engines.embedded.waves import Positions, Wave, plan_groups, plan_waves
from colo.errors import Unsupported
from colo.memory.region import Region, require_free

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHES = ("past_key_values", "cache_params")
"""What models call their cache, as an argument and in what they return."""

_PADDED = {"attention_mask", "position_ids", "past_key_values", "logits_to_keep"}
"""Arguments that a model takes whose prompts can be padded."""

_ODD = {
    **dict.fromkeys(
        ("big_bird", "megatron-bert", "prophetnet", "rembert", "roformer"),
        "transformers computes it otherwise with a cache than without",
    ),
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        "its positions leave out tokens that are its padding token, also where they were sampled",
    ),
}
"""Model types whose log-probabilities would not be those of a pass over the whole sequence, and why."""

_BUFFER_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_SHORT, _LONG = 2, 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """What a model keeps of a sequence."""

    token_bytes: int
    """Bytes for each token."""

    row_bytes: int
    """Bytes for each sequence, whatever its length: states of convolutions and recurrent layers."""

    buffer: tuple[int, int, int] | None
    """Layers, key-value heads and their size, where keys and values have one shape and prompts can be padded."""

    def size_bytes(self, length: int) -> int:
        """Bytes of a sequence of `length` tokens."""
        return self.row_bytes + length * self.token_bytes

    selects: bool = True
    """Whether rows of its cache can be selected. Those of a model that adds states of its own to its layers cannot."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, positions: Positions) -> Footprint:
        """Measure it by a few tokens through the model. `Unsupported` if it keeps nothing, or cannot go on from it."""
        if model.config.model_type in _ODD:
            raise _unsupported(model, _ODD[model.config.model_type])
        lengths = [min(length, positions.count or length) for length in (_SHORT, _LONG)]
        token_ids = torch.zeros(1, lengths[1], dtype=torch.int64, device=model.device)
        try:
            with torch.autocast(model.device.type, enabled=False):
                caches = [_forward(model, token_ids[:, :length], None, 0)[1] for length in lengths]
                sizes = [sum(tensor.nbytes for tensor in _tensors(cache, set())) for cache in caches]
                buffer = _buffer_shape(model, caches[0])
                if buffer is None and lengths[0] < lengths[1]:
                    _forward(model, token_ids[:, :1], caches[0], lengths[0])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _unsupported(model, f"{type(error).__name__}: {error}") from error
        token_bytes = -(-max(0, sizes[1] - sizes[0]) // max(1, lengths[1] - lengths[0]))
        row_bytes = max(0, sizes[1] - lengths[1] * token_bytes)
        return cls(token_bytes=token_bytes, row_bytes=row_bytes, buffer=buffer, selects=_selects(caches[0]))


class Reservation(Region):
    """Bytes that are counted and not taken: room for ordinary tensors, while it is resident."""

    def __init__(self, name: str, size_bytes: int, device: torch.device) -> None:
        super().__init__(name, torch.empty(0, dtype=torch.uint8, device=device))
        self.size_bytes = size_bytes
        self._require()

    def _release(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _restore(self) -> None:
        self._require()

    def _require(self) -> None:
        if self.device.type == "cuda":
            require_free(self.name, self.size_bytes, self.device)


class Rows:
    """Sequences under way, in a cache of transformers'."""

    def __init__(self, cache: Cache, length: int, index: torch.Tensor | None = None) -> None:
        """`cache` has seen `length` tokens of each row; `index` (int64) are rows that go on in a whole cache."""
        self.cache = cache
        self.length = length
        self.index = index
        self._num_rows = 0 if index is None else len(index)

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows `index` (int64) only, in that order; a row may be there more than once."""
        if self.index is not None:
            self.index = self.index[index]
        elif type(self.cache).batch_select_indices is not Cache.batch_select_indices:
            self.cache.batch_select_indices(index)
        else:
            self.cache.reorder_cache(index)

    def append(self, model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
        """Append one token to each row that goes on (int64 [rows]); returns their next logits, [rows, vocab]."""
        if self.index is not None:
            token_ids = token_ids.new_zeros(self._num_rows).index_copy_(0, self.index, token_ids)
        logits, self.cache = _forward(model, token_ids[:, None], self.cache, self.length)
        self.length += 1
        return logits if self.index is None else logits[self.index]


class ModelCaches:
    """Sequences in transformers' own caches. See the module for whose memory that is."""

    def __init__(self, region: Region, footprint: Footprint, positions: Positions) -> None:
        """Count what sequences take as part of `region`. Raises: `ValueError` when not even one token fits."""
        self._region, self._footprint, self._positions = region, footprint, positions
        self.bytes_per_token = footprint.token_bytes
        if footprint.size_bytes(1) > region.size_bytes:
            raise ValueError(
                f"a KV cache of {region.size_bytes} bytes holds no sequence of one token, which takes "
                f"{footprint.size_bytes(1)} bytes"
            )

    def plan(self, prompts: Sequence[tuple[int, ...]], *, n: int, max_tokens: int) -> list[Wave]:
        """The waves of a call. Raises: `BudgetError` when one sequence does not fit even alone."""
        limits, size_bytes = self._positions.limits(prompts, max_tokens), self._footprint.size_bytes
        check_room(prompts, limits, size_bytes, self._region.size_bytes)
        return plan_groups(
            prompts,
            key=len,
            limits=limits,
            plan=lambda group, ends: plan_waves(
                group,
                n=n,
                limits=ends,
                capacity=self._region.size_bytes,
                size=size_bytes,
                max_prompts=max(1, PREFILL_TOKENS // len(group[0])),
            ),
        )

    def start(self, model: PreTrainedModel, wave: Wave, adapter: str | None) -> tuple[torch.Tensor, Rows]:
        """The logits that follow each row's prompt, [rows, vocab], and the cache that the rows go on in."""
        slots = torch.tensor(wave.slots).to(model.device)
        token_ids = torch.tensor(wave.prompts).to(model.device)
        if not self._footprint.selects:
            logits, cache = _forward(model, token_ids[slots], None, 0)
            return logits, Rows(cache, wave.prompt_length, torch.arange(len(slots), device=slots.device))
        logits, cache = _forward(model, token_ids, None, 0)
        rows = Rows(cache, wave.prompt_length)
        if wave.slots != tuple(range(len(wave.prompts))):
            rows.keep(slots)
        return logits[slots], rows

    def forget(self) -> None:
        """Do nothing: nothing is kept from call to call."""


def _unsupported(model: PreTrainedModel, why: str) -> Unsupported:
    why = " ".join(why.removeprefix("Unsupported: ").split())[:300]
    return Unsupported(
        f"the embedded engine cannot run {model.config.model_type} ({type(model).__name__}): {why}. Use vLLM "
        "(engine='vllm')"
    )


@functools.cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def _forward(
    model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache | None, length: int
) -> tuple[torch.Tensor, Cache]:
    """The logits after the last of `token_ids` (int64 [rows, tokens]), [rows, vocab], and the cache that has them."""
    taken = _arguments(type(model).forward)
    name = next((name for name in _CACHES if name in taken), None)
    if name is None:
        raise Unsupported("it takes no cache and would compute every token anew")
    options: dict[str, Any] = {name: cache} if cache is not None else {}
    if "logits_to_keep" in taken:
        options["logits_to_keep"] = 1
    if "position_ids" in taken:
        positions = torch.arange(length, length + token_ids.shape[1], device=token_ids.device)
        options["position_ids"] = positions.expand_as(token_ids)
    output = model(input_ids=token_ids, use_cache=True, **options)
    found = getattr(output, name, None)
    if not isinstance(found, Cache):
        raise Unsupported(f"it returns {type(found).__name__} as its {name}, not one of transformers' caches")
    logits: torch.Tensor = output.logits[:, -1]
    return logits, found


def _buffer_shape(model: PreTrainedModel, cache: Cache) -> tuple[int, int, int] | None:
    layers = getattr(cache, "layers", [])
    if not _arguments(type(model).forward) >= _PADDED or not layers:
        return None
    if vars(cache).keys() != vars(Cache(layers=layers)).keys() or not all(type(la) in _BUFFER_LAYERS for la in layers):
        return None
    if not all(layer.is_initialized for layer in layers):
        return None
    kinds = {(s.shape[1], s.shape[3], s.dtype) for la in layers for s in (la.keys, la.values) if s.dim() == 4}
    if len(kinds) != 1 or any(la.keys.dim() != 4 for la in layers):
        return None
    ((num_heads, head_dim, dtype),) = kinds
    return (len(layers), num_heads, head_dim) if dtype == model.dtype else None


def _selects(cache: Cache) -> bool:
    known = all(type(layer).__module__ == Cache.__module__ for layer in getattr(cache, "layers", []))
    return known or type(cache).batch_select_indices is not Cache.batch_select_indices


def _tensors(part: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor in a cache, each once."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _tensors(value, seen)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _tensors(value, seen)
    elif hasattr(part, "reorder_cache"):  # a cache, or a layer of one
        yield from _tensors(vars(part), seen)
