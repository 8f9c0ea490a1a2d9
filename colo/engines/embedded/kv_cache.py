"""The KV cache of the embedded engine: one piece of memory; every call takes views of it.

Nothing here allocates: keys and values are written in place. Calls whose sequences do not fit are cut into waves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from colo.engines.embedded.waves import NO_LIMIT, Positions, Wave, plan_groups, plan_waves
from colo.errors import BudgetError
from colo.memory.region import Region
from colo.planning.kv_cache import LayerCache
from colo.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, of one forward pass. Bounds the activations, which are not part of the buffer."""


class BufferLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """Keys and values of one layer, each [rows, heads, max_length, head_dim]; the first `length` columns are filled."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory was there before the layer."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the next tokens' states, [rows, heads, num_tokens, head_dim], and return the filled part of each."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.keys[:, :, start : self.length].copy_(key_states)
        self.values[:, :, start : self.length].copy_(value_states)
        return self.filled()

    def filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [rows, heads, length, head_dim]."""
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def take(self, source: BufferLayer, index: torch.Tensor) -> None:
        """Hold the rows `index` (int64) of `source`, which may be this layer, instead of what was here."""
        taken = [states.index_select(0, index) for states in source.filled()]
        self.length = source.length
        self.keys, self.values = self.keys[: len(index)], self.values[: len(index)]
        for states, rows in zip(self.filled(), taken, strict=True):
            states.copy_(rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the keys that a query of `query_length` will see, and the position of the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens written so far."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return int(self.keys.shape[-2])

    def get_max_cache_shape(self) -> int:
        """What `get_max_length` is called in transformers 5.10."""
        return self.get_max_length()


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
        return (columns - self._padding[:, None]).clamp(0, last)

    def attention_mask(self, query_length: int) -> torch.Tensor | None:
        """Which columns are tokens, bool [rows, length + query_length]; `None` when all are."""
        if not self._padded:
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
            layer.length = length

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
            raise ValueError(f"a KV cache of {region.size_bytes} bytes holds no token of {self.bytes_per_token} bytes")

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
        prompts.set_length(wave.prompt_length)
        slots = torch.tensor(wave.slots, device=self._region.device)
        rows.take(prompts, slots)
        return logits[slots], rows

    def recall(self, wave: Wave, adapter: str | None) -> torch.Tensor | None:
        """The logits [prompts, vocab] after the prompts of `wave`, if computed last; else forget what was computed."""
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
    num_tokens = token_ids.shape[1]
    output = model(
        input_ids=token_ids,
        attention_mask=cache.attention_mask(num_tokens),
        position_ids=cache.position_ids(num_tokens),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits


def prefill(model: PreTrainedModel, wave: Wave, cache: BufferCache) -> torch.Tensor:
    """Compute the prompts of `wave`; returns the logits after each, [prompts, vocab]. The caller sets the length."""
    length = wave.prompt_length
    token_ids = torch.tensor([(0,) * (length - len(prompt)) + prompt for prompt in wave.prompts])
    num_rows = max(1, PREFILL_TOKENS // length)
    parts = zip(token_ids.to(model.device).split(num_rows), cache.parts(num_rows), strict=True)
    return torch.cat([forward(model, *part) for part in parts])
