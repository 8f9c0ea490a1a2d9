"""States of sequences in the embedded engine: a buffer of keys and values, or transformers' own caches, counted.

A `KVCacheBuffer` is one piece of memory, which transformers' `generate` has no way to use or to let go: keys and values
of one shape for every layer are written in place, every call takes views of it, and nothing is allocated.
Multi-head latent attention, recurrent and hybrid models keep other things, in caches of their own (`ModelCaches`).
Those are ordinary memory, which the region of the KV cache counts and does not take: as many sequences run together as
`Footprint` says will fit in it. Beside it there is one layer's growth at a time, which those caches copy. Sequences
that run together have prompts of one length, so that nothing is padded: a recurrent state would take padding for text.
Nothing is kept from call to call. Calls whose sequences do not fit are cut into waves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from colo.engines.text import NO_LIMIT, Positions
from colo.errors import BudgetError, Unsupported
from colo.memory.region import Region, require_free
from colo.planning.kv_cache import LayerCache
from colo.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, of one forward pass. Bounds the activations, which are not part of the buffer."""

_RAISE = ": raise kv_cache_bytes (colo_kv_cache_bytes under TRL's flag) to what a prompt and its completion take"


class BufferLayer(DynamicLayer):  # type: ignore[misc]  # transformers ships no types
    """Keys and values of one layer, [rows, heads, length, head_dim]: views of memory with room for more columns."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin empty in this memory, [rows, heads, max_length, head_dim]."""
        super().__init__()
        self.room = (keys, values)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.set_length(0)

    def set_length(self, length: int) -> None:
        """Declare the first `length` columns to be filled."""
        # slices of memory that is there: no call allocates, and `generate` of transformers would
        self.keys, self.values = (states[:, :, :length] for states in self.room)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the next tokens' states, [rows, heads, num_tokens, head_dim], and return all that is filled."""
        start = self.keys.shape[-2]
        self.set_length(start + key_states.shape[-2])
        self.keys[:, :, start:].copy_(key_states)
        self.values[:, :, start:].copy_(value_states)
        return self.keys, self.values

    def take(self, source: BufferLayer, index: torch.Tensor) -> None:
        """Hold the rows `index` (int64) of `source`, which may be this layer, instead of what was here."""
        # a copy first: rows may move within the same memory
        taken = [states.index_select(0, index) for states in (source.keys, source.values)]
        keys, values = self.room
        self.room = (keys[: len(index)], values[: len(index)])
        self.set_length(source.keys.shape[-2])
        self.keys.copy_(taken[0])
        self.values.copy_(taken[1])


class BufferCache(Cache):  # type: ignore[misc]  # transformers ships no types
    """A transformers cache over a piece of the buffer, with the left padding of its rows."""

    def __init__(
        self, block: torch.Tensor, padding: torch.Tensor, *, padded: bool, num_positions: int | None = None
    ) -> None:
        """`block` is [2 * layers, rows, heads, max_length, head_dim]; `padding` [rows] counts columns (int64).

        `padded` says whether any is positive, without waiting for the device. Rows stay at the last of `num_positions`.
        """
        super().__init__(
            layers=[BufferLayer(keys, values) for keys, values in zip(block[::2], block[1::2], strict=True)]
        )
        self._block = block
        self._padding = padding
        self._padded = padded
        self._num_positions = num_positions

    def position_ids(self, query_length: int) -> torch.Tensor:
        """Positions of the next tokens within their own sequences, int64 [rows, query_length]; 0 on padding."""
        start = self.get_seq_length()
        columns = torch.arange(start, start + query_length, device=self._padding.device)
        last = None if self._num_positions is None else self._num_positions - 1
        # rows that have ended go on with the others, and must not run out of positions
        return (columns - self._padding[:, None]).clamp(0, last)

    def attention_mask(self, query_length: int) -> torch.Tensor | None:
        """Mask of the columns that are tokens, bool [rows, length + query_length]; `None` when all are."""
        if not self._padded:
            # `None` lets attention take its fast path: a mask, even of ones, would not
            return None
        columns = torch.arange(self.get_seq_length() + query_length, device=self._padding.device)
        return columns >= self._padding[:, None]

    def parts(self, num_rows: int) -> Iterator[BufferCache]:
        """Caches over the same memory, each of at most `num_rows` of the rows."""
        for block, padding in zip(self._block.split(num_rows, dim=1), self._padding.split(num_rows), strict=True):
            yield BufferCache(block, padding, padded=self._padded, num_positions=self._num_positions)

    def set_length(self, length: int) -> None:
        """Declare the first `length` columns to be filled, by `parts` of this cache or by an earlier one."""
        for layer in self.layers:
            layer.set_length(length)

    def take(self, source: BufferCache, index: torch.Tensor) -> None:
        """Hold the rows `index` (int64) of `source`; one layer's rows are copied through a temporary at a time."""
        for layer, source_layer in zip(self.layers, source.layers, strict=True):
            layer.take(source_layer, index)
        self._block = self._block[:, : len(index)]
        self._padding, self._padded = source._padding[index], source._padded

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows `index` (int64) only, in that order."""
        self.take(self, index)

    def append(self, model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
        """Append one token to each row (int64 [rows]); returns the logits that follow, [rows, vocab]."""
        return forward(model, token_ids[:, None], self)


class KVCacheBuffer:
    """The bytes of a region as keys and values, prompts first, so that the next call finds them again.

    As in vLLM, prompts are found by their tokens and the adapter's name alone: call `forget` after new weights.
    """

    def __init__(
        self,
        region: Region,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        positions: Positions = NO_LIMIT,
    ) -> None:
        """Use `region` for a model with `num_heads` key-value heads a layer. `ValueError` when no token fits."""
        self._region = region
        self._num_layers, self._num_heads, self._head_dim = num_layers, num_heads, head_dim
        self._dtype = dtype
        self._positions = positions
        self._prefix: tuple[tuple[tuple[int, ...], ...], str | None, torch.Tensor] | None = None
        """Prompts at the front of the buffer, their adapter, and the logits after each, [prompts, vocab]."""

        layer = LayerCache(num_heads=num_heads, key_size=head_dim, value_size=head_dim)
        self.bytes_per_token = num_layers * layer.token_bytes(dtype_bytes=dtype.itemsize)
        self.capacity_tokens = region.size_bytes // self.bytes_per_token
        if not self.capacity_tokens:
            raise ValueError(
                f"a KV cache of {region.size_bytes} bytes holds no token of {self.bytes_per_token} bytes{_RAISE}"
            )

    def plan(self, prompts: Sequence[tuple[int, ...]], *, n: int, max_tokens: int) -> list[Wave]:
        """The waves of a call. Raises: `BudgetError` when one sequence does not fit even alone."""
        limits = self._positions.limits(prompts, max_tokens)
        check_room(prompts, limits, lambda length: length * self.bytes_per_token, self._region.size_bytes)
        return plan_groups(
            prompts,
            key=self._positions.is_long,
            limits=limits,
            plan=lambda group, ends: plan_waves(group, n=n, limits=ends, capacity=self.capacity_tokens),
        )

    def start(self, model: PreTrainedModel, wave: Wave, adapter: str | None) -> tuple[torch.Tensor, BufferCache]:
        """The logits that follow each row's prompt, [rows, vocab], and the cache that the rows go on in."""
        prompts, rows = self.open(wave)
        logits = self.recall(wave, adapter)
        if logits is None:
            logits = prefill(model, wave, prompts)
            self.remember(wave, adapter, logits)
        # parts have advanced caches of their own over this memory
        prompts.set_length(wave.prompt_length)
        slots = torch.tensor(wave.slots, device=self._region.device)
        rows.take(prompts, slots)
        return logits[slots], rows

    def recall(self, wave: Wave, adapter: str | None) -> torch.Tensor | None:
        """The logits [prompts, vocab] after the prompts of `wave`, if computed last; else forget what was computed."""
        # in place, prompt and completion share columns: no later call would find the prompts where it looks
        if self._prefix is not None and not wave.in_place and self._prefix[:2] == (wave.prompts, adapter):
            return self._prefix[2]
        self.forget()
        return None

    def remember(self, wave: Wave, adapter: str | None, logits: torch.Tensor) -> None:
        """Note that the prompts of `wave` have been computed, and the `logits` [prompts, vocab] that follow them."""
        if not wave.in_place:
            self._prefix = (wave.prompts, adapter, logits)

    def forget(self) -> None:
        """Compute every prompt anew: the weights have changed, or the memory has lost its content."""
        self._prefix = None

    def open(self, wave: Wave) -> tuple[BufferCache, BufferCache]:
        """Caches for a wave's prompts and sequences until the next `open`; the same one if it runs in place."""
        length = wave.prompt_length
        padding = torch.tensor([length - len(prompt) for prompt in wave.prompts], device=self._region.device)
        padded = any(len(prompt) < length for prompt in wave.prompts)
        row_length, count = length + wave.max_tokens, self._positions.count
        if wave.in_place:
            cache = BufferCache(self._block(0, 1, row_length), padding, padded=padded, num_positions=count)
            return cache, cache
        num_prompts = len(wave.prompts)
        prompts = BufferCache(self._block(0, num_prompts, length), padding, padded=padded, num_positions=count)
        # behind the prompts, so that these stay for a next call with the same ones
        block = self._block(num_prompts * length, len(wave.rows), row_length)
        no_padding = padding.new_zeros(len(wave.rows))
        return prompts, BufferCache(block, no_padding, padded=False, num_positions=count)

    def _block(self, first_token: int, num_rows: int, length: int) -> torch.Tensor:
        first_byte, size_bytes = first_token * self.bytes_per_token, num_rows * length * self.bytes_per_token
        shape = (2 * self._num_layers, num_rows, self._num_heads, length, self._head_dim)
        return self._region.bytes.narrow(0, first_byte, size_bytes).view(self._dtype).view(shape)


def check_room(
    prompts: Sequence[tuple[int, ...]], limits: Sequence[int], size_bytes: Callable[[int], int], free_bytes: int
) -> None:
    """Raise `BudgetError` when a sequence of a prompt and its limit does not fit in `free_bytes` even alone."""
    lengths = [(len(prompt) + limit, len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
    total, length, limit = max(lengths, default=(0, 0, 0))
    needed_bytes = size_bytes(total)
    if needed_bytes > free_bytes:
        raise BudgetError(
            f"a prompt of {length} tokens and max_tokens={limit} need {format_bytes(needed_bytes)} of KV cache "
            f"({size_bytes(1)} bytes a token), which has {format_bytes(free_bytes)}: lower max_tokens, shorten the "
            f"prompt, or raise kv_cache_bytes to {needed_bytes}",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def forward(model: PreTrainedModel, token_ids: torch.Tensor, cache: BufferCache) -> torch.Tensor:
    """Append `token_ids` (int64 [rows, tokens]) to `cache`; returns the logits after the last, [rows, vocab]."""
    size = token_ids.shape[1]
    where = {"attention_mask": cache.attention_mask(size), "position_ids": cache.position_ids(size)}
    given = {_cache_name(model): cache, "use_cache": True, "logits_to_keep": 1}
    output = model(input_ids=token_ids, **given, **where)
    logits: torch.Tensor = output.logits[:, -1]
    return logits


def prefill(model: PreTrainedModel, wave: Wave, cache: BufferCache) -> torch.Tensor:
    """Compute the prompts of `wave`; returns the logits after each, [prompts, vocab]. The caller sets the length."""
    length = wave.prompt_length
    # padding on the left, so that every row's next token is in the same column
    token_ids = torch.tensor([(0,) * (length - len(prompt)) + prompt for prompt in wave.prompts], device="cpu")
    num_rows = max(1, PREFILL_TOKENS // length)
    parts = zip(token_ids.to(model.device).split(num_rows), cache.parts(num_rows), strict=True)
    return torch.cat([forward(model, *part) for part in parts])


# ---- what a buffer cannot hold ---------------------------------------------------------------------------------------

_CACHES = ("cache", "past_key_values", "cache_params")
"""Names of a model's cache, as an argument and in its output: transformers' own from 5.24 on, that before, Mamba's."""

_PADDED = {"attention_mask", "position_ids", "logits_to_keep"}
"""Arguments that a model takes, beside a cache, whose prompts can be padded."""

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
"""Model types whose log-probabilities with a cache differ from a pass over the whole sequence, with the reason."""

_BUFFER_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_SHORT, _LONG = 2, 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes that a model keeps of a sequence."""

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
    """Rows of its cache can be selected. Those of a model that adds states of its own to its layers cannot."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, positions: Positions) -> Footprint:
        """Measure it by a few tokens through the model. `Unsupported` if it keeps nothing, or cannot go on from it."""
        if model.config.model_type in _ODD:
            raise _unsupported(model, _ODD[model.config.model_type])
        lengths = [min(length, positions.count or length) for length in (_SHORT, _LONG)]
        token_ids = torch.zeros(1, lengths[1], dtype=torch.int64, device=model.device)
        try:
            # a caller's autocast would change the dtype of what is measured
            with torch.autocast(model.device.type, enabled=False):
                caches = [_forward(model, token_ids[:, :length], None, 0)[1] for length in lengths]
                sizes = [sum(tensor.nbytes for tensor in _tensors(cache, set())) for cache in caches]
                buffer = _buffer_shape(model, caches[0])
                # a cache that a buffer cannot stand for has to go on from what it holds
                if buffer is None and lengths[0] < lengths[1]:
                    _forward(model, token_ids[:, :1], caches[0], lengths[0])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _unsupported(model, f"{type(error).__name__}: {error}") from error
        # rounded up: a cache that grows in steps must not be counted short
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
        # torch keeps freed blocks, which other segments need
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
        # a cache that overrides `batch_select_indices` knows states that `reorder_cache` misses
        elif type(self.cache).batch_select_indices is not Cache.batch_select_indices:
            self.cache.batch_select_indices(index)
        else:
            self.cache.reorder_cache(index)

    def append(self, model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
        """Append one token to each row that goes on (int64 [rows]); returns their next logits, [rows, vocab]."""
        if self.index is not None:
            # rows that have ended are fed token 0: the cache cannot drop them
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
                f"{footprint.size_bytes(1)} bytes{_RAISE}"
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
        slots = torch.tensor(wave.slots, device=model.device)
        token_ids = torch.tensor(wave.prompts, device=model.device)
        if not self._footprint.selects:
            logits, cache = _forward(model, token_ids[slots], None, 0)
            return logits, Rows(cache, wave.prompt_length, torch.arange(len(slots), device=slots.device))
        logits, cache = _forward(model, token_ids, None, 0)
        rows = Rows(cache, wave.prompt_length)
        # rows are prompts already: no selection, no copy
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


def _arguments(model: PreTrainedModel) -> frozenset[str]:
    """Arguments of a model's forward pass, and of that which it overrides where it passes others on by `**`."""
    return _taken(cast("Hashable", type(model)))


@functools.cache
def _taken(kind: type[nn.Module]) -> frozenset[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if "forward" in vars(base):
            parameters = inspect.signature(base.forward).parameters  # type: ignore[attr-defined]
            found |= parameters.keys()
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return frozenset(found)


def _cache_name(model: PreTrainedModel) -> str:
    """The argument of a model's forward pass that is its cache. Raises: `Unsupported` where there is none."""
    taken = _arguments(model)
    name = next((name for name in _CACHES if name in taken), None)
    if name is None:
        raise Unsupported("it takes no cache and would compute every token anew")
    return name


def _forward(
    model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache | None, length: int
) -> tuple[torch.Tensor, Cache]:
    """The logits after the last of `token_ids` (int64 [rows, tokens]), [rows, vocab], and the cache that has them."""
    taken, name = _arguments(model), _cache_name(model)
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
    if not _arguments(model) >= _PADDED or _cache_name(model) == "cache_params" or not layers:
        return None
    # exact types: a subclass may keep more than keys and values
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
    # layers of transformers' own select their rows; a model's own layer may not
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


# ---- waves: sequences of a call that run together, so that their states fit ------------------------------------------

MAX_ROWS = 1024
"""Sequences of one wave. Bounds the logits of a step, which are not part of the KV cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """Sequences that run together."""

    prompts: tuple[tuple[int, ...], ...]
    """The distinct prompts, each computed once."""

    rows: tuple[tuple[int, int], ...]
    """Prompt index and sample index of every sequence."""

    slots: tuple[int, ...]
    """Position in `prompts` of every sequence's prompt."""

    limits: tuple[int, ...]
    """Most tokens by which each sequence may grow."""

    in_place: bool = False
    """A single sequence grows where its prompt was computed, since there is no room for both."""

    @property
    def max_tokens(self) -> int:
        """The most tokens that one of them may grow by."""
        return max(self.limits)

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt, to which the others are padded on the left."""
        return max(len(prompt) for prompt in self.prompts)


def plan_waves(
    prompts: Sequence[tuple[int, ...]],
    *,
    n: int,
    limits: Sequence[int],
    capacity: int,
    size: Callable[[int], int] = lambda length: length,
    max_rows: int = MAX_ROWS,
    max_prompts: int = MAX_ROWS,
) -> list[Wave]:
    """Cut `n` sequences of each prompt into waves of at most `max_rows`, in prompt order, then sample order.

    A wave takes `size(prompt_length)` of the `capacity` for each distinct prompt, `max_prompts` at most, and
    `size(prompt_length + max_tokens)` for each sequence. Every prompt must fit alone with its limit.
    """
    waves: list[Wave] = []
    rows: list[tuple[int, int]] = []
    distinct: set[tuple[int, ...]] = set()
    length = growth = 0
    for row in ((p, s) for p in range(len(prompts)) for s in range(n)):
        prompt, limit = prompts[row[0]], limits[row[0]]
        num_prompts = len(distinct) + (prompt not in distinct)
        longest, most = max(length, len(prompt)), max(growth, limit)
        needed = num_prompts * size(longest) + (len(rows) + 1) * size(longest + most)
        if rows and (needed > capacity or len(rows) == max_rows or num_prompts > max_prompts):
            waves.append(_wave(prompts, rows, limits))
            rows, distinct, longest, most = [], set(), len(prompt), limit
        distinct.add(prompt)
        rows.append(row)
        length, growth = longest, most
    if rows:
        waves.append(_wave(prompts, rows, limits))
    return [replace(wave, in_place=not _has_room(wave, capacity, size)) for wave in waves]


def plan_groups(
    prompts: Sequence[tuple[int, ...]],
    *,
    key: Callable[[tuple[int, ...]], Hashable],
    limits: Sequence[int],
    plan: Callable[[list[tuple[int, ...]], list[int]], list[Wave]],
) -> list[Wave]:
    """The waves that `plan` makes of the prompts (and limits) of each `key` alone, with the indices of `prompts`."""
    groups: dict[Hashable, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(key(prompt), []).append(index)
    waves = []
    for group in groups.values():
        planned = plan([prompts[index] for index in group], [limits[index] for index in group])
        waves += [replace(wave, rows=tuple((group[i], sample) for i, sample in wave.rows)) for wave in planned]
    return waves


def _wave(prompts: Sequence[tuple[int, ...]], rows: Sequence[tuple[int, int]], limits: Sequence[int]) -> Wave:
    slots: dict[tuple[int, ...], int] = {}
    for index, _ in rows:
        slots.setdefault(prompts[index], len(slots))
    return Wave(
        prompts=tuple(slots),
        rows=tuple(rows),
        slots=tuple(slots[prompts[index]] for index, _ in rows),
        limits=tuple(limits[index] for index, _ in rows),
    )


def _has_room(wave: Wave, capacity: int, size: Callable[[int], int]) -> bool:
    prompts_size = len(wave.prompts) * size(wave.prompt_length)
    return prompts_size + len(wave.rows) * size(wave.prompt_length + wave.max_tokens) <= capacity
