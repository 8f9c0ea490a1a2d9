"""What ranks tell each other before an exchange, and what is wrong with it, which every rank finds alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colo.errors import TransferError
from colo.memory.specs import Manifest, TensorSpec
from colo.weights.exchange.plan import ExchangePlan, Slice, make_plan
from colo.weights.exchange.replicas import Replicas
from colo.weights.ranks import RankGroup


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank says of itself."""

    specs: tuple[TensorSpec, ...]
    """All weights, whole, in the order in which they travel."""

    held: tuple[Slice, ...]
    taken: tuple[Slice, ...]


def agree(
    ranks: RankGroup, specs: Sequence[TensorSpec], held: Sequence[Slice], taken: Sequence[Slice], *, bucket_bytes: int
) -> tuple[ExchangePlan, Replicas, tuple[int, ...]]:
    """The plan of an exchange, what more than one rank holds, and all ranks. A collective.

    Raises: `TransferError`, on every rank the same, where ranks have other weights than the first, hold what is no part
    of them, or lack what an engine takes.
    """
    told = _tell(ranks, Told(tuple(specs), tuple(held), tuple(taken)))
    parts = {rank: words.held for rank, words in told.items()}
    plan = make_plan(
        parts,
        {rank: words.taken for rank, words in told.items()},
        order=[spec.name for spec in specs],
        bucket_bytes=bucket_bytes,
    )
    return plan, Replicas(parts, ranks), tuple(told)


def agree_on_parts(ranks: RankGroup, specs: Sequence[TensorSpec], held: Sequence[Slice]) -> dict[int, Told]:
    """What every rank holds. A collective. Raises: as `agree`."""
    return _tell(ranks, Told(tuple(specs), tuple(held), ()))


def _tell(ranks: RankGroup, words: Told) -> dict[int, Told]:
    told = ranks.gather(words)
    check_told(told)
    ranks.connect(len(told))
    return told


def check_told(told: Mapping[int, Told]) -> None:
    """Raise `TransferError`, naming rank and weight, where what ranks say does not fit together."""
    first, reference = next(iter(told.items()))
    try:
        manifest = Manifest(specs=reference.specs)
    except ValueError as error:
        raise TransferError(f"the weights of rank {first} cannot travel: {error}") from error
    expected = {spec.name: spec for spec in manifest.specs}
    for rank, words in told.items():
        if words.specs != reference.specs:
            raise TransferError(f"rank {rank} has other weights than rank {first}: {_difference(expected, words)}")
        for part in words.held:
            spec = expected.get(part.name)
            if spec is None:
                raise TransferError(f"rank {rank} holds a part of {part.name}, which is no weight of the trainer")
            is_within = len(part.box.shape) == len(spec.shape) and all(
                start + size <= whole
                for start, size, whole in zip(part.box.offset, part.box.shape, spec.shape, strict=True)
            )
            if part.dtype != spec.dtype or not is_within:
                raise TransferError(
                    f"rank {rank} holds {part.box.shape} of {part.name} at {part.box.offset} in {part.dtype}, which is "
                    f"{spec.shape} in {spec.dtype}"
                )


def _difference(expected: Mapping[str, TensorSpec], words: Told) -> str:
    """The first difference in words."""
    found = {spec.name: spec for spec in words.specs}
    for name, spec in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != spec:
            other = found[name]
            return f"{name} is {other.shape} in {other.dtype}, not {spec.shape} in {spec.dtype}"
    if extra := [name for name in found if name not in expected]:
        return f"{extra[0]} is one more"
    if len(words.specs) != len(found):
        return "a weight is named twice"
    return "they are in another order"
