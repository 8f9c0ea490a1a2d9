"""Rollouts that outlive a step: groups of completions that have ended are returned, others go on in a later call.

A group is a prompt with its `n` samples. Between calls it is tokens and log-probabilities on the host, so that the KV
cache can go and weights can change. Engines know nothing of it: in a round all rows ask for so many tokens at a time,
each with all that it has as its prompt, and a call ends after the round in which enough groups have ended. A round is
one call of the engine, which costs what many tokens do, and lasts until enough groups should have ended, going by how
many rows have, of late above all; it is half as long again as the longest before it at most. What an engine keeps of a
prefix makes a round cheap; the embedded one computes the prefix again.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from statistics import fmean
from typing import Any

from colo.engine import Completion, Engine, SamplingParams
from colo.engines.sampling import check_seeds, row_seed, without_neutral
from colo.errors import BudgetError, Unsupported
from colo.units import check_digits

ROUND_TOKENS = 128
"""Tokens that a row asks for in the first round of a call, and in each of one that ends at a time."""

Until = float | int | timedelta
"""Condition on which a call ends: a share of the groups under way (float), a number of groups (int), or a time."""

_ROUNDING = 1e-6
"""Share of a product by which it may be too large: 0.55 of 100 is a little more than 55."""

CARRIED = "carried"
"""`finish_reason` of a completion that goes on in a later call."""

_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "allowed_token_ids", "logit_bias")
_TAKEN = frozenset(option.name for option in fields(SamplingParams)).union(
    _DISTRIBUTION, ("detokenize", "skip_special_tokens")
)
"""Sampling options that look at no earlier token: asked for again in every round, they mean the same."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample so far. Replaced as a whole: an interrupt finds it as it was, or as it is."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()  # see `Completion.spans`
    finish_reason: str = CARRIED
    adapter: str | None = None
    routed_experts: Any = None

    @property
    def is_running(self) -> bool:
        return self.finish_reason == CARRIED

    def grown(self, found: Completion, finish_reason: str) -> _Row:
        """This row with what an engine has sampled after it."""
        spans, version, count = self.spans, found.weights_version, len(found.token_ids)
        if spans and spans[-1][0] == version:
            spans, count = spans[:-1], count + spans[-1][1]
        return _Row(
            token_ids=self.token_ids + found.token_ids,
            logprobs=self.logprobs + found.logprobs,
            spans=(*spans, (version, count)),
            finish_reason=finish_reason,
            adapter=found.adapter,
            routed_experts=found.routed_experts,
        )


@dataclass(eq=False, slots=True)
class _Group:
    """A prompt and its samples."""

    index: int
    prompt: tuple[int, ...]
    key: Any
    options: Mapping[str, Any]  # of its call, without seeds; equal ones are one object
    max_tokens: int
    seed: int | None
    rows: list[_Row]
    attempt: int = 0  # raised when rows begin anew, which draw from other seeds then

    @property
    def has_ended(self) -> bool:
        return not any(row.is_running for row in self.rows)

    def completions(self) -> list[Completion]:
        return [
            Completion(
                prompt_index=self.index,
                sample_index=sample_index,
                prompt_token_ids=self.prompt,
                token_ids=row.token_ids,
                logprobs=row.logprobs,
                finish_reason=row.finish_reason,
                weights_version=row.spans[-1][0] if row.spans else 0,
                spans=row.spans,
                adapter=row.adapter,
                routed_experts=row.routed_experts,  # of the last round, which has passed over all tokens
                key=self.key,
            )
            for sample_index, row in enumerate(self.rows)
        ]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a group that have equal tokens, and are one prompt of a call."""

    group: _Group
    numbers: Sequence[int]  # of the rows
    first: int  # number of the first row of those that began together, from whose seed the others' are counted
    place: int = 0  # of the first of `numbers` among those

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.group.prompt + self.group.rows[self.numbers[0]].token_ids

    @property
    def left(self) -> int:
        """Tokens that each may still get."""
        return self.group.max_tokens - len(self.group.rows[self.numbers[0]].token_ids)

    @property
    def seed(self) -> int:
        """Another in every round: a row must not draw the same numbers again. One of 61 bits, since engines add to it.

        The engine adds the number of the sample. What a row draws is the same in a prompt of its own.
        """
        begun = len(self.group.rows[self.numbers[0]].token_ids)
        found = row_seed(f"{self.group.seed}/{self.group.attempt}/{begun}", self.group.index, self.first) >> 2
        return found + self.place

    def alone(self) -> Iterator[_Part]:
        """Each of its rows as a part."""
        return (_Part(self.group, [number], self.first, place) for place, number in enumerate(self.numbers))


@dataclass(slots=True)
class _Batch:
    """Rows that one call of the engine continues. Parts have as many rows as each other."""

    options: Mapping[str, Any]
    parts: Sequence[_Part]
    limit: int  # of the tokens that each row gets; those beyond its own limit are dropped

    @classmethod
    def of(cls, options: Mapping[str, Any], parts: Sequence[_Part], round_tokens: int) -> _Batch:
        """One call for all parts, longer than `ROUND_TOKENS` only as far as every row may go on."""
        if len({len(part.numbers) for part in parts}) > 1:
            parts = [alone for part in parts for alone in part.alone()]
        left = [part.left for part in parts]
        return cls(options, parts, min(round_tokens, max(left), max(ROUND_TOKENS, min(left))))

    def sampling(self) -> dict[str, Any]:
        """Sampling options by name."""
        asked = {**self.options, "n": len(self.parts[0].numbers), "max_tokens": self.limit}
        return asked if self.parts[0].group.seed is None else asked | {"seed": [part.seed for part in self.parts]}


class Carried:
    """Groups under way, by the number of their prompt among all that were given."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._num_prompts = 0
        self.alike: frozenset[int] = frozenset()
        """Prompts of the last call's completions that were sampled from its own distribution, not an earlier call's."""

        self.options_last_taken: Mapping[str, Any] = {}

    def completions(self) -> list[Completion]:
        """Everything that is under way, so far."""
        return [completion for group in self._groups.values() for completion in group.completions()]

    def clear(self) -> None:
        """Give up what is under way. Prompts are counted on."""
        self._groups = {}

    def metrics(self, ended: Sequence[Completion], version: int) -> dict[str, float]:
        """For the report, after a call: the share of groups that go on, and ages of returned tokens in versions."""
        ages = [version - each for completion in ended for each in completion.token_versions]
        num_ended = len({completion.prompt_index for completion in ended})
        under_way = num_ended + len(self._groups)
        metrics = {"carried": len(self._groups) / under_way if under_way else 0.0}
        return metrics | ({"token_age": fmean(ages), "token_age_max": max(ages)} if ages else {})

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        options: Mapping[str, Any],
        *,
        engine: Engine,
        adapter: str | None,
        until: Until,
        max_age: int | None = None,
        keys: Sequence[Any] | None = None,
    ) -> list[Completion]:
        """Sample for new prompts and for groups under way until enough of those have ended, which are returned.

        In the order of prompts and samples; of a number of groups the first ones, others that have ended wait with the
        rest. Rows with tokens of weights more than `max_age` versions back begin anew.
        When a round fails, rows keep what they have; new prompts are under way only once one of them has tokens.
        `options` are those of `options_of`. Raises: as `Engine.generate`; `Unsupported` for rows that were begun with
        an adapter where there is none now, and the other way.
        """
        begun = [row.adapter for group in self._groups.values() for row in group.rows if row.token_ids]
        if others := sum((name is None) is not (adapter is None) for name in begun):
            now, then = ("without", "with") if adapter is None else ("with", "without")
            raise Unsupported(
                f"{others} completions under way were begun {then} the adapter, and this call samples {now} it: "
                "generate without until=..., or give them up with rt.drop_carried()"
            )
        new = self.add(prompts, options, engine=engine, keys=keys)
        end_s = time.monotonic() + until.total_seconds() if isinstance(until, timedelta) else math.inf
        try:
            self.begin_anew(engine.weights_version, max_age)
            wanted = _number_of(until, len(self._groups))
            round_tokens = longest = ROUND_TOKENS
            sampled, running = self._so_far()
            tokens = ended = 0.0  # sampled and rows ended in this call; a round counts half as much as the next
            while self.num_ended < wanted:
                self.sample(engine, adapter, round_tokens)
                if time.monotonic() >= end_s:
                    break
                if isinstance(until, timedelta):
                    continue
                before, (sampled, running) = (sampled, running), self._so_far()
                tokens, ended = tokens / 2 + sampled - before[0], ended / 2 + before[1] - running
                longest = max(longest, round_tokens)
                round_tokens = self._next_round(wanted, ended / max(1, tokens), most=longest + longest // 2)
        except BaseException:
            if not any(row.token_ids for group in new for row in group.rows):
                self._groups = {index: group for index, group in self._groups.items() if group not in new}
                self._num_prompts -= len(new)
            raise
        return self.take(until if isinstance(until, int) else None, options)

    @property
    def num_groups(self) -> int:
        """Number of groups under way, those that have ended among them."""
        return len(self._groups)

    @property
    def num_ended(self) -> int:
        """Number of groups under way that have ended."""
        return sum(group.has_ended for group in self._groups.values())

    @property
    def is_running(self) -> bool:
        """True if some group has not ended."""
        return self.num_ended < len(self._groups)

    def take(self, count: int | None = None, options: Mapping[str, Any] | None = None) -> list[Completion]:
        """Take the completions of groups that have ended out, of at most `count`, in the order of prompts.

        `alike` are those that were sampled from the distribution of `options`, or of the first that is taken.
        """
        ended = [group for group in self._groups.values() if group.has_ended][:count]
        self._groups = {index: group for index, group in self._groups.items() if group not in ended}
        if options is None:
            options = ended[0].options if ended else {}
        self.alike = frozenset(g.index for g in ended if _distribution(g.options) == _distribution(options))
        self.options_last_taken = options
        return [completion for group in ended for completion in group.completions()]

    def sample(self, engine: Engine, adapter: str | None, round_tokens: int | None = None) -> None:
        """Sample one round for all rows that run, of `ROUND_TOKENS` by default."""
        for batch in self._batches(ROUND_TOKENS if round_tokens is None else round_tokens):
            _sample(batch, engine, adapter)

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        options: Mapping[str, Any],
        *,
        engine: Engine,
        keys: Sequence[Any] | None = None,
    ) -> list[_Group]:
        """Begin groups of new prompts, with options of `options_of`. Raises: as `Engine.generate`; nothing is added."""
        params = engine.sampling_params(**options)
        seeds, options = options.get("seed"), {name: value for name, value in options.items() if name != "seed"}
        options = next((group.options for group in self._groups.values() if group.options == options), options)
        # of the whole length, before anything is sampled
        if (check := getattr(engine, "check_request", None)) is not None:
            check(prompts, params)
        given = [None] * len(prompts) if keys is None else keys
        if len(given) != len(prompts):
            raise ValueError(f"keys has {len(given)} for {len(prompts)} prompts: give one for each")
        check_seeds(seeds, len(prompts))
        if not isinstance(seeds, Sequence):
            seeds = [seeds] * len(prompts)
        new = [
            _Group(
                index=self._num_prompts + place,
                prompt=tuple(prompt),
                key=key,
                options=options,
                max_tokens=params.max_tokens,
                seed=seed,
                rows=[_Row()] * params.n,
            )
            for place, (prompt, key, seed) in enumerate(zip(prompts, given, seeds, strict=True))
        ]
        self._groups = {**self._groups, **{group.index: group for group in new}}
        self._num_prompts += len(new)
        return new

    def begin_anew(self, version: int | None, max_age: int | None) -> None:
        """Drop the tokens of rows that have some older than allowed; those of rows that have ended as well."""
        if version is None or max_age is None:
            return
        for group in self._groups.values():
            old = [number for number, row in enumerate(group.rows) if row.spans and version - row.spans[0][0] > max_age]
            group.attempt += bool(old)
            for number in old:
                group.rows[number] = _Row()

    def _so_far(self) -> tuple[int, int]:
        """Tokens of all rows together, and the number of rows that run."""
        rows = [row for group in self._groups.values() for row in group.rows]
        return sum(len(row.token_ids) for row in rows), sum(row.is_running for row in rows)

    def _next_round(self, wanted: float, rate: float, *, most: int) -> int:
        """Tokens after which so many groups should have ended, if every token is a row's last at this `rate`.

        With seeds it is the `most`: what a row draws depends on where its rounds begin, which other rows' ends must not
        change.
        """
        if any(group.seed is not None for group in self._groups.values() if not group.has_ended):
            return most
        running = [sum(row.is_running for row in group.rows) for group in self._groups.values()]

        def expected(tokens: int) -> float:
            return sum((1 - math.exp(-rate * tokens)) ** count for count in running)

        return max(ROUND_TOKENS // 8, bisect_left(range(most), wanted - 0.5, key=expected))

    def _batches(self, round_tokens: int) -> list[_Batch]:
        """List what to ask for next: a call for all rows of equal options, some of which have seeds or none has.

        Rows of a group that have no tokens are one prompt, which is computed once, unless others go on beside them.
        """
        kinds: dict[tuple[int, bool], list[_Part]] = {}
        for group in self._groups.values():
            running = [number for number, row in enumerate(group.rows) if row.is_running]
            fresh = [number for number in running if not group.rows[number].token_ids]
            parts = kinds.setdefault((id(group.options), group.seed is None), [])
            parts += [_Part(group, fresh, fresh[0])] if fresh else []
            parts += [_Part(group, [number], number) for number in running if number not in fresh]
        return [_Batch.of(parts[0].group.options, parts, round_tokens) for parts in kinds.values() if parts]


def check_until(until: Until | None, max_age: int | None, keys: object) -> None:
    """Raise `TypeError` or `ValueError` for what is no share, number or time, and for the others without it."""
    if until is None:
        for name, given in (("max_age", max_age), ("keys", keys)):
            if given is not None:
                raise ValueError(f"{name} is of completions that go on in a later call: give until=... with it")
        return
    check_digits("until", until)
    if isinstance(until, bool) or not isinstance(until, (int, float, timedelta)):
        raise TypeError(f"until must be a share such as 0.9, a number of prompts, or a timedelta, not {until!r}")
    if isinstance(until, float) and not 0 < until <= 1:
        raise ValueError(f"until is a share of the prompts under way, in (0, 1], and not {until}; a number is an int")
    if isinstance(until, int) and until < 1:
        raise ValueError(f"until must be at least 1, but is {until}")
    if isinstance(until, timedelta) and until <= timedelta():
        raise ValueError(f"until must be a time that is longer than {until}")
    check_digits("max_age", max_age)
    if max_age is not None and (isinstance(max_age, bool) or not isinstance(max_age, int) or max_age < 0):
        raise ValueError(f"max_age must be a whole number of versions, 0 or more, and not {max_age!r}")


def listed_keys(keys: Any) -> Any:
    """The objects of `keys` as a sequence, also where they can be read once. Raises: `TypeError` for what has none."""
    if keys is None or hasattr(keys, "__getitem__"):
        return keys
    if isinstance(keys, Iterable):
        return list(keys)
    raise TypeError(f"keys must be a list with an object for each prompt, not {keys!r}")


def options_of(engine: Engine, params: Any, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options by name, without neutral ones.

    Raises: `TypeError` for parameters of an engine's own kind, `Unsupported` for options that look at earlier tokens;
    as `Engine.sampling_params`, which knows what is an option.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise TypeError(
            f"until takes sampling options by name, or colo.SamplingParams, and no {type(params).__name__}: a "
            "completion is sampled in parts"
        )
    given = {} if params is None else {option.name: getattr(params, option.name) for option in fields(params)}
    # read once here, for parameters that are made anew in every round
    given |= {name: list(value) if isinstance(value, Iterator) else value for name, value in sampling.items()}
    engine.sampling_params(**given)
    left = without_neutral(given, _TAKEN)
    if "max_tokens" in left and left["max_tokens"] is None:
        raise Unsupported("max_tokens=None with until=...: say the most tokens of a completion")
    if others := sorted(left.keys() - _TAKEN):
        raise Unsupported(
            f"{', '.join(others)} with until=...: a completion is sampled in parts, and what looks at earlier tokens "
            f"begins anew with each: leave {'it' if len(others) == 1 else 'them'} out, or generate without until"
        )
    return left


def _distribution(options: Mapping[str, Any]) -> list[Any]:
    return [options.get(name) for name in _DISTRIBUTION]


def _number_of(until: Until, num_groups: int) -> float:
    """The number of groups to wait for."""
    if isinstance(until, timedelta):
        return num_groups
    if isinstance(until, float):
        return math.ceil(until * num_groups * (1 - _ROUNDING))
    return min(until, num_groups)


def _sample(batch: _Batch, engine: Engine, adapter: str | None) -> None:
    """Continue rows by one round."""
    prompts, asked = [part.prompt for part in batch.parts], [min(part.left, batch.limit) for part in batch.parts]
    params = engine.sampling_params(**batch.sampling())
    if batch.limit > min(asked) and (check := getattr(engine, "check_request", None)) is not None:
        try:
            check(prompts, params)
        except BudgetError:  # a row has room for its own limit alone: calls of one limit each, which draw the same
            for limit in sorted(set(asked)):
                alike = [part for part, most in zip(batch.parts, asked, strict=True) if most == limit]
                _sample(replace(batch, parts=alike, limit=limit), engine, adapter)
            return
    longest_prompt, boundary = getattr(engine, "longest_prompt", None), getattr(engine, "boundary", None)
    for found in engine.generate(prompts, params, adapter=adapter):
        part = batch.parts[found.prompt_index]
        group, number = part.group, part.numbers[found.sample_index]
        row = group.rows[number]
        found = _cut(found, group.max_tokens - len(row.token_ids))
        length = len(row.token_ids) + len(found.token_ids)
        goes_on = (
            found.finish_reason == "length"
            and len(found.token_ids) == batch.limit
            and length < group.max_tokens
            # else the model has no position left to sample for
            and (longest_prompt is None or len(group.prompt) + length <= longest_prompt)
            and len(group.prompt) + length != boundary
        )
        group.rows[number] = row.grown(found, CARRIED if goes_on else found.finish_reason)


def _cut(found: Completion, most: int) -> Completion:
    """A completion without tokens beyond the `most` that its row may get."""
    more = len(found.token_ids) - most
    if more <= 0:
        return found
    experts = None if found.routed_experts is None else found.routed_experts[:-more]
    return replace(
        found,
        token_ids=found.token_ids[:most],
        logprobs=found.logprobs[:most],
        finish_reason="length",
        routed_experts=experts,
    )
