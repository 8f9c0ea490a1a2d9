"""A Megatron model as a source of weights in Hugging Face names, whatever its layout over ranks.

Megatron describes its parts for its checkpoints: `sharded_state_dict` with `singleton_local_shards` names layers and
experts by their numbers in the whole model, tells the halves of a gated linear unit apart, and gives each part's place
in the whole: over tensor, pipeline (with virtual stages), expert and expert-tensor parallelism. Nothing here computes a
layer's or an expert's number.

Rows are nearly always a checkpoint's. A fused attention layer has, for each group of heads, the rows of its queries, of
its key and of its value; tensors with a row for each token end in padding. Tensor parallelism cuts such tensors
wherever it likes, also within a head where there are fewer key heads than ranks. So a rank's rows are met with all runs
of rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from colo.errors import TransferError, Unsupported
from colo.memory.share import dtype_name
from colo.memory.specs import TensorSpec
from colo.weights.boxes import PlacedPart
from colo.weights.sources.module import saved_buffers
from colo.weights.sources.names import QKV, VOCABULARY, Named, Names, Table


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
        return cls(one.key, dtype_name(one.tensor), one.whole, one.offset, tuple(one.tensor.shape))


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
            # the other ranks wait in this gather: told of the error, they raise too
            self._gather(f"{type(error).__name__}: {error}")
            raise
        told = self._gather([_Told.of(one) for one in held])
        self._config: Any = self._bare[0].config
        # behind the gather: what raises from here on raises on every rank, and nobody waits
        self._names = Names(family, num_layers=self._config.num_layers)
        self.specs, self.groups = self._whole(told)
        """Name, dtype and shape of every weight, and the names by layers: the same on every rank, in the same order."""

        self.left_out = frozenset(spec.name for spec in self.specs if self._names.is_further(spec.name))
        """Layers that predict further tokens (MTP), without which engines sample from the same model."""

        # an optimizer or wrapper may move weights to other memory, such as one flat buffer
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
                    # a dict by place, since replicas hold the same box, which counts once
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


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that follow one another in Megatron's tensor, and in one of the checkpoint's."""

    start: int  # the first, in Megatron's tensor
    count: int
    target: int  # index of the checkpoint's tensor
    first: int  # first of the rows in the checkpoint's tensor


def same_rows(count: int) -> tuple[Run, ...]:
    """The first `count` rows, which one tensor consists of; what follows them is padding."""
    return (Run(0, count, 0, 0),)


def qkv_rows(*, num_groups: int, heads_per_group: int, head_dim: int) -> tuple[Run, ...]:
    """Rows of queries (target 0), keys (1) and values (2), group after group."""
    counts = (heads_per_group * head_dim, head_dim, head_dim)
    found, start = [], 0
    for group in range(num_groups):
        for target, count in enumerate(counts):
            found.append(Run(start, count, target, group * count))
            start += count
    return tuple(found)


def num_rows(runs: Sequence[Run], target: int) -> int:
    """Rows of one of the checkpoint's tensors."""
    return sum(run.count for run in runs if run.target == target)


def within(runs: Sequence[Run], start: int, count: int) -> Iterator[Run]:
    """Cut `runs` to `count` rows from `start` on."""
    for run in runs:
        low, high = max(start, run.start), min(start + count, run.start + run.count)
        if low < high:
            yield Run(low, high - low, run.target, run.first + low - run.start)


_SHARDED_WRAPPERS = ("FullyShardedDataParallel", "MegatronFSDP", "TorchFullyShardedDataParallel")
_NO_WEIGHTS = "_extra_state"  # suffix of Transformer Engine's extra state, such as scales of its fp8 kernels


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A part of one of Megatron's tensors."""

    key: str
    tensor: torch.Tensor  # the parameter or buffer itself, or a view of it
    whole: tuple[int, ...]  # shape of the whole tensor, over all ranks
    offset: tuple[int, ...]  # first index of the part in the whole, per axis


def is_megatron(model: object) -> bool:
    """True for a stage of a Megatron model, or a list of stages. Does not import Megatron."""
    module = sys.modules.get("megatron.core.transformer.module")  # without which there are none
    stages = model if isinstance(model, (list, tuple)) else [model]
    return module is not None and bool(stages) and all(isinstance(stage, module.MegatronModule) for stage in stages)


def bare(stages: Sequence[nn.Module]) -> list[Any]:
    """The models within Megatron's data-parallel and mixed-precision wrappers.

    Raises: `Unsupported` for what is no stage of Megatron's, is sharded by FSDP, or computes with other weights than it
    keeps.
    """
    found = []
    if not stages:
        raise Unsupported("there are no stages of a Megatron model in an empty list")
    for stage in stages:
        if not is_megatron(stage):
            raise Unsupported(f"a {type(stage).__name__} is no stage of a Megatron model: pass the list that it made")
        model: Any = stage
        while True:
            if type(model).__name__ in _SHARDED_WRAPPERS:
                raise Unsupported(
                    f"{type(model).__name__} cuts weights over data-parallel ranks, and Megatron does not say where "
                    "the parts lie: use Megatron's DistributedDataParallel with the distributed optimizer "
                    "(use_megatron_fsdp=False, use_torch_fsdp2=False)"
                )
            if not isinstance(getattr(model, "module", None), nn.Module):
                break
            model = model.module
        found.append(model)
    for option, why in _REFUSED.items():
        if getattr(found[0].config, option, False):
            raise Unsupported(f"{option} of Megatron's config is not supported: {why}")
    return found


_REFUSED = {
    "layernorm_zero_centered_gamma": "Megatron's norms are those of a checkpoint less one, and colo copies weights",
    "attention_output_gate": "the rows of its linear_qkv hold a gate that colo does not know the place of",
}


def held_by(stages: Sequence[Any]) -> Iterator[HeldTensor]:
    """Every part of a weight in this process. Nothing is copied, and no other rank is asked.

    Raises: `Unsupported` for what is no plain tensor, or has no place in a whole.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for stage in stages:
        told = stage.sharded_state_dict(metadata={"singleton_local_shards": True, "dp_cp_group": group})
        # cuts what Megatron fuses, such as the two halves of a gated unit, into parts with keys of their own
        apply_factories(told)
        for part in nested_values(told):
            if isinstance(part, ShardedObject) and part.key.rpartition(".")[2].startswith(_NO_WEIGHTS):
                continue
            if not isinstance(part, ShardedTensor) or part.data is None:
                name = getattr(part, "key", type(part).__name__)
                raise Unsupported(f"Megatron gives {name} as a {type(part).__name__} and not as a part of a tensor")
            tensor = part.data.detach()
            if type(tensor) is not torch.Tensor or part.prepend_axis_num:
                raise Unsupported(
                    f"{part.key} is a {type(tensor).__name__} of shape {tuple(tensor.shape)} in a whole of "
                    f"{tuple(part.global_shape)}: colo sends plain tensors only (no fp8 parameters)"
                )
            yield HeldTensor(part.key, tensor, tuple(part.global_shape), tuple(part.global_offset))
