"""A Megatron model as a source of weights in Hugging Face names, whatever its layout over ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from colo.errors import TransferError, Unsupported
from colo.memory.specs import TensorSpec
from colo.weights.sources.megatron.names import QKV, VOCABULARY, Named, Names, Table
from colo.weights.sources.megatron.rows import Run, num_rows, qkv_rows, same_rows, within
from colo.weights.sources.megatron.stages import HeldTensor, bare, held_by
from colo.weights.sources.module import saved_buffers
from colo.weights.sources.placed import PlacedPart


@dataclass(frozen=True, slots=True)
class _Told:
    """One part, described by its rank to the others."""

    key: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, one: HeldTensor) -> _Told:
        dtype = str(one.tensor.dtype).removeprefix("torch.")
        return cls(one.key, dtype, one.whole, one.offset, tuple(one.tensor.shape))


class MegatronSource:
    """The weights of a model that Megatron has built: `stages` is its list, with more than one for virtual stages.

    Every rank holds parts. Data-parallel replicas and the two stages of a tied embedding hold the same ones; padding of
    the vocabulary is in none. Making one is a collective: the ranks of `group`, by default all processes, tell each
    other once what they hold. Weights that are replaced or move to other memory later are found again, as long as they
    have the same places.
    """

    def __init__(
        self, stages: nn.Module | Sequence[nn.Module], *, family: str | Table, vocab_size: int, group: Any = None
    ) -> None:
        """`family` is the `model_type` of the checkpoint's config, or a table as in `names.py`, `vocab_size` its too.

        Raises: `Unsupported` for a name in no table and for other models than Megatron's own, `TransferError` where
        parts of ranks do not make up whole tensors, or another rank has raised. Nothing has been sent then.
        """
        from torch import distributed

        self.stages: list[nn.Module] = [stages] if isinstance(stages, nn.Module) else list(stages)
        """The stages as given, with their wrappers."""

        self.group: Any = distributed.group.WORLD if group is None else group
        """The process group of the ranks that hold the weights."""

        self._vocab_size = vocab_size
        self._layout: dict[tuple[str, tuple[int, ...]], tuple[Named, tuple[Run, ...]]] = {}
        try:
            self._bare = bare(self.stages)
            held = list(held_by(self._bare))
        except Exception as error:
            self._gather(f"{type(error).__name__}: {error}")
            raise
        told = self._gather([_Told.of(one) for one in held])
        self._config: Any = self._bare[0].config
        self._names = Names(family, num_layers=self._config.num_layers)
        self.specs, self.groups = self._whole(told)
        """Name, dtype and shape of every weight, and the names by layers: the same on every rank, in the same order."""

        self.left_out = frozenset(spec.name for spec in self.specs if self._names.is_further(spec.name))
        """Layers that predict further tokens (MTP), without which engines sample from the same model."""

        self._addresses = self._where()
        self._parts = tuple(self._placed(held))

    def parts(self) -> tuple[PlacedPart, ...]:
        """Parts that this rank holds: views of the live weights.

        Asks no other rank. With `overlap_param_gather` a step's weights arrive in `MegatronOptimizers.finish_step`,
        which colo's trainer session calls, or in the next forward pass.
        """
        if (now := self._where()) != self._addresses:
            found = tuple(self._placed(list(held_by(self._bare))))
            if [(p.name, p.offset, p.shape) for p in found] != [(p.name, p.offset, p.shape) for p in self._parts]:
                raise Unsupported("this rank holds other parts of the weights than when the source was made")
            self._parts, self._addresses = found, now
        return self._parts

    def fingerprint(self) -> Hashable:
        """Changes when a weight of this rank is written to or replaced, except through `.data`."""
        return tuple((tensor.data_ptr(), tensor._version) for tensor in self._tensors())

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors()]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for stage in self._bare:
            yield from stage.parameters()
            yield from (buffer for _, buffer in saved_buffers(stage))

    def _gather(self, mine: list[_Told] | str) -> dict[int, list[_Told]]:
        """All-gather the parts of every rank; `mine` may be an error text. `TransferError` if another rank's is."""
        from torch import distributed

        told: list[Any] = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(told, mine, group=self.group)
        ranks = {distributed.get_global_rank(self.group, number): theirs for number, theirs in enumerate(told)}
        for rank, theirs in ranks.items():
            if isinstance(theirs, str) and isinstance(mine, list):
                raise TransferError(f"reading Megatron's weights failed on rank {rank}: {theirs}")
        return ranks

    def _whole(self, told: dict[int, list[_Told]]) -> tuple[tuple[TensorSpec, ...], tuple[tuple[str, ...], ...]]:
        """Specs of every weight, checked to be complete, and names by layers."""
        specs: dict[str, TensorSpec] = {}
        boxes: dict[str, dict[tuple[Any, Any], int]] = {}
        places: dict[str, tuple[int, tuple[int, ...]]] = {}
        for rank, theirs in told.items():
            for part in theirs:
                named, runs = self._laid_out(part.key, part.whole)
                for target, name in enumerate(named.names):
                    spec = TensorSpec(name, part.dtype, (num_rows(runs, target), *part.whole[1:]))
                    if specs.setdefault(name, spec) != spec:
                        raise TransferError(f"{name} is {spec} on rank {rank}, and {specs[name]} on another")
                    places[name] = named.group, (*named.order, target)
                for name, offset, shape, _ in _boxes(named, runs, part.offset, part.shape):
                    boxes.setdefault(name, {})[offset, shape] = math.prod(shape)
        for name, spec in specs.items():
            if (found := sum(boxes.get(name, {}).values())) != spec.num_elements:
                raise TransferError(f"parts of {name} on all ranks have {found} of its {spec.num_elements} elements")
        ordered = sorted(specs, key=places.__getitem__)
        layers = groupby(ordered, key=lambda name: places[name][0])
        return tuple(specs[name] for name in ordered), tuple(tuple(names) for _, names in layers)

    def _placed(self, held: Sequence[HeldTensor]) -> Iterator[PlacedPart]:
        from torch import distributed

        rank = distributed.get_rank()
        seen: set[tuple[Any, ...]] = set()
        for one in held:
            named, runs = self._laid_out(one.key, one.whole)
            for name, offset, shape, row in _boxes(named, runs, one.offset, tuple(one.tensor.shape)):
                if (name, offset, shape) not in seen:  # tied embeddings of two stages in one rank
                    seen.add((name, offset, shape))
                    yield PlacedPart(name, offset, shape, rank, one.tensor.narrow(0, row, shape[0]))

    def _laid_out(self, key: str, whole: tuple[int, ...]) -> tuple[Named, tuple[Run, ...]]:
        """The checkpoint's names of a tensor of Megatron's, and which rows are whose."""
        if (key, whole) not in self._layout:
            named = self._names.of(key)
            self._layout[key, whole] = named, self._rows(named.entry, whole)
        return self._layout[key, whole]

    def _rows(self, entry: str, whole: tuple[int, ...]) -> tuple[Run, ...]:
        if entry in VOCABULARY:
            if whole[0] < self._vocab_size:
                raise Unsupported(f"Megatron's {entry} has {whole[0]} rows, and vocab_size is {self._vocab_size}")
            return same_rows(self._vocab_size)
        if entry not in QKV:
            return same_rows(whole[0])
        groups = self._config.num_query_groups
        runs = qkv_rows(
            num_groups=groups,
            heads_per_group=self._config.num_attention_heads // groups,
            head_dim=self._config.kv_channels,
        )
        if (expected := sum(run.count for run in runs)) != whole[0]:
            raise Unsupported(f"Megatron's {entry} has {whole[0]} rows, and queries, keys and values {expected}")
        return runs


def _boxes(
    named: Named, runs: Sequence[Run], offset: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """Boxes of the checkpoint's tensors in one of Megatron's: name, offset, shape, and the first row in the part."""
    for run in within(runs, offset[0], shape[0]):
        yield named.names[run.target], (run.first, *offset[1:]), (run.count, *shape[1:]), run.start - offset[0]
