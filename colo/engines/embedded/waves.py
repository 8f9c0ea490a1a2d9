"""Waves: sequences of a call that run together, so that their states fit, and within the positions of a model.

Pure: knows lengths, sizes and configs, imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """The positions that a model can compute with."""

    count: int | None = None
    """Number of positions; `None` for a model that has no such limit."""

    boundary: int | None = None
    """Sequences that are longer are computed with other frequencies from their first token on (LongRoPE)."""

    def limits(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[int]:
        """Limit of the tokens that each prompt may grow by: `max_tokens`, or, as in vLLM, the positions that are left.

        No sequence grows over the boundary, where a trainer would compute its first tokens with other frequencies than
        they were drawn with. `ValueError` for a prompt that ends right at it.
        """
        for index, prompt in enumerate(prompts):
            if len(prompt) == self.boundary:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens, after which LongRoPE computes the whole sequence with "
                    "other frequencies: add or leave out a token"
                )
        return [min(max_tokens, last - len(prompt)) for prompt in prompts for last in [self._last(len(prompt))]]

    def is_long(self, prompt: tuple[int, ...]) -> bool:
        """Tell whether a prompt is beyond the boundary, and cannot run beside shorter ones."""
        return self.boundary is not None and len(prompt) > self.boundary

    def _last(self, length: int) -> int:
        ends = [end for end in (self.boundary, self.count) if end is not None and length < end]
        return min(ends, default=1 << 62)


NO_LIMIT = Positions()


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


# ---- positions -------------------------------------------------------------------------------------------------------

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")
"""Config keys for the number of positions, a subset of those that vLLM reads."""


def positions_of(config: PretrainedConfig) -> Positions:
    """The positions of a model of `config`: the smallest limit that it names, as in vLLM.

    Dynamic NTK frequencies change with every token beyond `max_position_embeddings`. A trainer could not compute such
    tokens again, so that they are not offered.
    """
    text = config.get_text_config()
    found = [value for key in _KEYS if isinstance(value := getattr(text, key, None), int) and value > 0]
    boundaries = [
        rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for rope in _ropes(getattr(text, "rope_parameters", None))
        if rope.get("rope_type", rope.get("type")) == "longrope"
    ]
    return Positions(count=min(found, default=None), boundary=min(filter(None, boundaries), default=None))


def _ropes(parameters: Any) -> Iterable[Mapping[str, Any]]:
    """The settings of rotary embeddings: one set, or one for every kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]
